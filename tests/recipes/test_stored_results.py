"""The blocks that recipes write on pages are those of the stored rows."""

import re
from pathlib import Path

import pytest
from tiny_runs import without_drawing

from regard.recipes import recipes
from regard_recipes.lib.pages import markdown, marks
from regard_recipes.lib.results import load

DOCS = Path(__file__).parents[2] / "docs"
BLOCKS = [
    (page.name, name)
    for page in sorted(DOCS.glob("*.md"))
    for name in re.findall(r"<!-- regard reproduce (\S+): begin -->", page.read_text())
]


@pytest.mark.parametrize(("page", "name"), BLOCKS, ids=[name for _, name in BLOCKS])
def test_a_block_is_that_of_the_stored_rows(page: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    without_drawing(monkeypatch)
    made, results = load(recipes.get(name), DOCS / "results")
    files = [f"{name}-{part}.png" for part in made.figures(results)]
    begin, end = marks(name)
    again = "`{}`: write it again with `regard reproduce {} --rebuild docs/results --page docs/{}`"
    block = f"{begin}\n\n{markdown(made, results, files, 'results/', level=3)}\n{end}"
    assert block in (DOCS / page).read_text(), again.format(page, name, page)
    assert all((DOCS / "results" / file).is_file() for file in files)
