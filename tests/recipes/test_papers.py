"""One page for each paper, from stored results."""

import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from regard.cli import main
from regard.recipes import recipes
from regard_recipes.lib.pages import PAPERS, page, stored

RESULTS = Path(__file__).parents[2] / "docs" / "results"


@pytest.fixture(scope="module")
def found() -> list[Any]:
    """The stored claims of every recipe."""
    return list(stored(RESULTS))


@pytest.mark.parametrize("paper", PAPERS)
def test_the_pages_are_those_of_the_stored_rows(paper: str, found: list[Any]) -> None:
    path = RESULTS / f"paper-{paper.lower().replace(' ', '-')}.md"
    assert path.read_text() == page(paper, found), "run `regard reproduce --papers docs/results`"


def test_an_item_names_a_recipe_or_needs_a_gpu_or_neither() -> None:
    for items in PAPERS.values():
        assert all(not item.gpu if item.recipe else True for item in items)
        assert {item.recipe for item in items} - {""} <= {*recipes.names()}


TABLES_AND_FIGURES = {"Sparse attention": (7, 5), "Local Linear Attention": (2, 9),
                      "Fast-weight Product Key Memory": (3, 10), "ICLM": (3, 3)}  # fmt: skip
"""How many tables and figures a paper has."""


@pytest.mark.parametrize("paper", TABLES_AND_FIGURES)
def test_every_table_and_figure_has_a_row(paper: str) -> None:
    """Places such as "figures 1 and 4, tables 3 to 6" name each of them."""
    named: dict[str, set[int]] = {"table": set(), "figure": set()}
    for item in PAPERS[paper]:
        for kind, numbers in re.findall(r"(table|figure)s? ((?:\d+[ab]?(?:, | and | to )?)+)", item.place):
            for first, _, last in re.findall(r"(\d+)[ab]?( to (\d+))?", numbers):
                named[kind] |= {*range(int(first), int(last or first) + 1)}
    assert named == {"table": {*range(1, TABLES_AND_FIGURES[paper][0] + 1)},
                     "figure": {*range(1, TABLES_AND_FIGURES[paper][1] + 1)}}  # fmt: skip


def test_every_claim_of_a_paper_is_shown_once(found: list[Any]) -> None:
    for paper in PAPERS:
        text = page(paper, found)
        own = [claim for *_, claim in found if claim.paper == paper]
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


@pytest.mark.parametrize(("old", "new"), [('"weight"', '"mass"'), ('"seconds"', '"time"'), ('"command"', '"words"')])
def test_rows_of_another_version_are_one_error(
    old: str, new: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    record = (RESULTS / "dispersion.json").read_text()
    (tmp_path / "dispersion.json").write_text(record.replace(old, new))
    for words in (["--papers", str(tmp_path)], ["dispersion", "--rebuild", str(tmp_path)]):
        assert main(["reproduce", *words]) == 2
        said = capsys.readouterr().err
        assert f"dispersion: cannot show the rows in {tmp_path}, which may be of another version" in said
