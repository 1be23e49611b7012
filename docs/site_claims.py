"""Tables of the papers' claims beside what we measured, for the pages of the mechanisms.

A page holds a line such as `<!-- claims: dispersion, needle/second read -->`. In the site, a table stands in its place:
the rows of docs/results/paper-*.md that come from these recipes, of `needle` only those whose claim has these words.
"""

import re
from collections.abc import Iterator
from pathlib import Path

RESULTS = Path(__file__).parent / "results"
MARK = re.compile(r"^<!-- claims: (.+) -->$", flags=re.MULTILINE)
HEAD = "| paper | claim | verdict | measured here |\n|---|---|---|---|\n"
NOTE = 'Verdicts are computed from counts and 95 % intervals, on two CPU cores; "not testable" means at this size.'


def rows() -> Iterator[tuple[str, str, str, str, str]]:
    """Yield (recipe, link to the page of the paper, claim, verdict, measured) of all papers' pages."""
    for page in sorted(RESULTS.glob("paper-*.md")):
        title, *lines = page.read_text(encoding="utf-8").splitlines()
        paper = f"[{title.removeprefix('# ')}](../results/{page.name})"
        for line in lines:
            cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
            recipe = re.match(r"`regard reproduce ([\w-]+)", cells[4]) if cells else None
            if recipe:
                place, claim, verdict, measured, *_ = cells
                if measured:
                    measured = f"[{measured}](../results/{recipe[1]}.md)"
                yield recipe[1], f"{paper}, {place}", claim, verdict.removesuffix(" at this size"), measured


def table(wanted: str) -> str:
    """Return the table for the names in a mark.

    Raises:
        ValueError: a name selects no row.
    """
    chosen: list[str] = []
    for name in wanted.split(", "):
        recipe, _, words = name.partition("/")
        found = [
            f"| {' | '.join(cells)} |"
            for made_by, *cells in rows()
            if made_by == recipe and words.lower() in cells[1].lower()
        ]
        if not found:
            raise ValueError(f"docs/results has no claim for {name!r}")
        chosen += [row for row in found if row not in chosen]
    return f"{HEAD}{chr(10).join(chosen)}\n\n{NOTE}\n"


def filled(markdown: str) -> str:
    """Return a page with tables in place of its marks."""
    return MARK.sub(lambda mark: table(mark[1]), markdown)
