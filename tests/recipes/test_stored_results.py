"""What recipes write on pages, all claims, tables and notes, is that of the stored rows; these are of all their cells.

So these pages are the expected output of every recipe's claims, tables and notes, and the rows of its grid; tests of
single recipes check only what is measured.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from tiny_runs import without_drawing

from regard.recipes import recipes
from regard_recipes.lib.claims import paired
from regard_recipes.lib.pages import markdown, marks, write
from regard_recipes.lib.recipe import Frame, select
from regard_recipes.lib.results import load, plain

DOCS = Path(__file__).parents[2] / "docs"
STORED = sorted(path.stem for path in (DOCS / "results").glob("*.json") if path.stem != "demo")
IN_FOLDERS = sorted((DOCS / "results").glob("*/*.json"))


def assert_the_claims_are(stored: list[Any], claims: list[Any]) -> None:
    """Compare all estimates, of which pages show a part; their last digits depend on versions of libraries."""
    for claim, record in zip(claims, stored, strict=True):
        for estimate, other in zip(claim["estimates"].values(), record["estimates"].values(), strict=True):
            assert (estimate["mean"] or 0.0) == pytest.approx(other["mean"] or 0.0, rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("name", STORED)
def test_pages_are_those_of_the_stored_rows(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    without_drawing(monkeypatch)
    made, results = load(recipes.get(name), DOCS / "results")
    files = [f"{name}-{part}.png" for part in made.figures(results)]
    assert all((DOCS / "results" / file).is_file() for file in files)
    own, again = (DOCS / "results" / f"{name}.md").read_text(), f"run `regard reproduce {name} --rebuild docs/results`"
    assert own == f"# {name}\n\n{markdown(made, results, files)}", again
    claims = json.loads((DOCS / "results" / f"{name}.json").read_text())["claims"]
    assert_the_claims_are(claims, [plain(claim.record()) for claim in made.claims(results)])
    begin, end = marks(name)
    block = f"{begin}\n\n{markdown(made, results, files, 'results/', level=3)}\n{end}"
    for page in DOCS.glob("*.md"):
        text = page.read_text()
        assert begin not in text or block in text, f"{again} with --page docs/{page.name}"


@pytest.mark.parametrize("path", IN_FOLDERS, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_runs_without_a_page_are_rebuilt_from_their_rows(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Runs with other options than those on the pages; four-blocks has no model whose heads learn a bandwidth."""
    without_drawing(monkeypatch)
    write(*load(recipes.get(path.stem), path.parent), tmp_path)
    stored, again = (json.loads((folder / path.name).read_text()) for folder in (path.parent, tmp_path))
    assert_the_claims_are(stored.pop("claims"), again.pop("claims"))
    assert again == stored


@pytest.mark.parametrize("name", sorted({*STORED} - {"lla-variants"}))  # of which one cell gives rows of several names
def test_every_cell_has_stored_rows_and_no_other(name: str) -> None:
    made, results = load(recipes.get(name), DOCS / "results")
    cells = pd.DataFrame(plain(made.cells()))
    stored = results.frame[list(cells)].drop_duplicates().astype(cells.dtypes)
    both = cells.merge(stored, how="outer", indicator=True)
    assert both[both["_merge"] != "both"].empty


def runs(name: str, folder: str = "") -> Frame:
    """Return the rows at the end of training, of each model with the rate that it takes."""
    made, results = load(recipes.get(name), DOCS / "results" / folder)
    return made.chosen(results, "run")


def test_numbers_in_prose_are_those_of_the_rows() -> None:
    """Numbers from stored rows that stand outside the generated blocks."""

    def loss(rows: Frame, model: str) -> str:
        return f"{select(rows, model=model)['test'].mean():.3f}"

    def above_softmax(rows: Frame, model: str, signed: bool = False) -> str:
        return paired(select(rows, model=model), select(rows, model="softmax"), "test").text(3, signed=signed)

    def above_transformer(model: str, *folders: str) -> str:
        """The share of test perplexity."""
        rows = runs("iclm-parity", *folders)
        rows = rows.assign(perplexity=np.exp(rows["test"]))
        share = paired(select(rows, model=model), select(rows, model="transformer"), "perplexity", ratio=True).plus(-1)
        return f"{share.mean:.1%} ± {share.high - share.mean:.1%}".replace("%", " %")

    one, four, kernels = runs("mosaic-kernels"), runs("mosaic-kernels", "four-blocks"), runs("kernel-selection")
    one, kernels = select(one, form="defined"), select(kernels, weights="normalised", query_key="apart")
    told = [f"{loss(one, 'softmax')} softmax"]
    told += [f"{loss(one, name)} `{name}` (" for name in ("biweight", "sparsemax", "relumax")]
    told += [f"{above_softmax(one, name)})" for name in ("biweight", "sparsemax", "relumax")]
    told += [f"{loss(kernels, 'elu')} nats per character with `elu`", f"{loss(kernels, 'exponential')} with softmax"]
    rbf, exponential = (select(kernels, model=name) for name in ("rbf", "exponential"))
    lower = select(load(recipes.get("mosaic-kernels"), DOCS / "results")[1].frame, kind="run", rate=5e-3)
    means = [rows.groupby(["model", "form"])["test"].mean() for rows in (lower, runs("mosaic-kernels"))]
    gaps = means[0] - means[1]
    lower = select(lower, form="defined")
    leads = [above_softmax(lower, name).removeprefix("-") for name in ("biweight", "sparsemax")]
    found = [above_softmax(one, name) for name in ("topk-uniform", "normrelu", "sparsemax")]
    scores = sorted(select(runs("state-tracking"), model="local linear, learned ridge")["validation"])
    pages = {
        "choose-a-spec": told,
        "papers": [each.removeprefix("-") for each in (*found, paired(rbf, exponential, "test").text(3))]
        + [above_transformer(name) for name in ("iclm-wv", "iclm-full-matched")],
        "iclm": [above_transformer("iclm-wv")],
        "language-model-results": [
            above_softmax(four, name, signed=True) for name in ("biweight", "sparsemax", "topk-softmax")
        ]
        + [above_transformer("iclm-wv", "six-layers"), f"({' and '.join(leads)})"]
        + [f"by {gaps.min():.2f} to {gaps.max():.2f} nats"],
        "local-linear-results": ["{:.2f}, {:.2f}, {:.2f}, {:.2f} and {:.2f}".format(*scores)],
    }
    for page, numbers in pages.items():
        prose = " ".join((DOCS / f"{page}.md").read_text().split())
        assert [each for each in numbers if each not in prose] == [], page
