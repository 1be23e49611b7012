"""What recipes write on pages, all claims, tables and notes, is that of the stored rows; these are of all their cells.

So these pages are the expected output of every recipe's claims, tables and notes, and the rows of its grid; tests of
single recipes check only what is measured.
"""

import json
from pathlib import Path

import pandas as pd
import pytest
from tiny_runs import without_drawing

from regard.recipes import recipes
from regard_recipes.lib.pages import markdown, marks
from regard_recipes.lib.results import load, plain

DOCS = Path(__file__).parents[2] / "docs"
STORED = sorted(path.stem for path in (DOCS / "results").glob("*.json") if path.stem != "demo")


@pytest.mark.parametrize("name", STORED)
def test_pages_are_those_of_the_stored_rows(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    without_drawing(monkeypatch)
    made, results = load(recipes.get(name), DOCS / "results")
    files = [f"{name}-{part}.png" for part in made.figures(results)]
    assert all((DOCS / "results" / file).is_file() for file in files)
    own, again = (DOCS / "results" / f"{name}.md").read_text(), f"run `regard reproduce {name} --rebuild docs/results`"
    assert own == f"# {name}\n\n{markdown(made, results, files)}", again
    claims = json.loads((DOCS / "results" / f"{name}.json").read_text())["claims"]
    for claim, stored in zip(made.claims(results), claims, strict=True):  # pages do not show every estimate
        for estimate, record in zip(claim.record()["estimates"].values(), stored["estimates"].values(), strict=True):
            assert (plain(estimate)["mean"] or 0.0) == pytest.approx(record["mean"] or 0.0, rel=1e-6, abs=1e-9)
    begin, end = marks(name)
    block = f"{begin}\n\n{markdown(made, results, files, 'results/', level=3)}\n{end}"
    for page in DOCS.glob("*.md"):
        text = page.read_text()
        assert begin not in text or block in text, f"{again} with --page docs/{page.name}"


@pytest.mark.parametrize("name", sorted({*STORED} - {"lla-variants"}))  # of which one cell gives rows of several names
def test_every_cell_has_stored_rows_and_no_other(name: str) -> None:
    made, results = load(recipes.get(name), DOCS / "results")
    cells = pd.DataFrame(plain(made.cells()))
    stored = results.frame[list(cells)].drop_duplicates().astype(cells.dtypes)
    both = cells.merge(stored, how="outer", indicator=True)
    assert both[both["_merge"] != "both"].empty
