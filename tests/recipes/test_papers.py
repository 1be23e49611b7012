"""One page for each paper, from stored results."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from regard.cli import main
from regard.recipes import recipes
from regard_recipes.lib.papers import PAPERS, page, paper_of, stored

RESULTS = Path(__file__).parents[2] / "docs" / "results"


@pytest.fixture(scope="module")
def found() -> list[Any]:
    """The stored claims of every recipe."""
    return list(stored(RESULTS))


@pytest.mark.parametrize("paper", PAPERS)
def test_the_pages_are_those_of_the_stored_rows(paper: str, found: list[Any]) -> None:
    path = RESULTS / f"paper-{paper.lower().replace(' ', '-')}.md"
    assert path.read_text() == page(paper, found), "run `regard reproduce --papers docs/results`"


def test_every_item_names_a_recipe_or_needs_a_gpu() -> None:
    for items in PAPERS.values():
        assert all((item.recipe in recipes) != bool(item.gpu) for item in items)


def test_every_claim_of_a_paper_is_shown_once(found: list[Any]) -> None:
    for paper in PAPERS:
        text = page(paper, found)
        own = [claim for _, _, claim in found if paper_of(claim) == paper]
        assert all(f"“{claim.wording}” | {claim.verdict} |" in text for claim in own)


def test_what_has_no_result_is_not_run(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert main(["reproduce", "--papers", str(tmp_path)]) == 2
    assert "holds no results" in capsys.readouterr().err
    shutil.copy(RESULTS / "dispersion.json", tmp_path)
    assert main(["reproduce", "--papers", str(tmp_path)]) == 0
    text = (tmp_path / "paper-sparse-attention.md").read_text()
    assert "| holds |" in text
    assert "| not run |  | `regard reproduce mosaic-kernels` |" in text
    other = (tmp_path / "paper-local-linear-attention.md").read_text()
    assert "| not testable at this size |  | on a GPU: `python benchmarks/gpu.py --write` |" in other
