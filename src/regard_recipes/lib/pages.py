"""The folder of a recipe's results, written from its rows: record, Markdown and figures."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from regard.checks import ArgumentError

from .claims import claims_table
from .recipe import Recipe
from .results import Results, plain

FIRST, LONGEST = 30, 16  # rows of the first and of other tables that are shown on pages of the docs


def write(made: Recipe, results: Results, out: Path) -> str:
    """Write figures, HTML pages, NAME.md and last NAME.json to `out`; other files stay.

    Returns:
        The Markdown, without its title.
    """
    figures = {f"{made.name}-{part}.png": picture for part, picture in made.figures(results).items()}
    body = markdown(made, results, list(figures))
    claims = [plain(claim.record()) for claim in made.claims(results)]
    rows = plain(results.frame.astype(object).to_numpy().tolist())
    stored = {"facts": results.facts, "claims": claims, "columns": list(results.frame.columns), "rows": rows}
    record = {**results.record, **stored}
    try:
        out.mkdir(parents=True, exist_ok=True)
        for file, picture in figures.items():
            (out / file).write_bytes(picture)
        for part, page in made.pages(results).items():
            (out / f"{made.name}-{part}.html").write_text(page, encoding="utf-8")
        (out / f"{made.name}.md").write_text(f"# {made.name}\n\n{body}", encoding="utf-8")
        (out / f"{made.name}.json").write_text(json.dumps(record) + "\n", encoding="utf-8")
    except OSError as error:
        raise ArgumentError(f"reproduce: cannot write to {out}: {error.strerror or error}.") from None
    return body


def markdown(made: Recipe, results: Results, figures: list[str], folder: str = "", level: int = 2) -> str:
    """Return claims, notes, tables and figures as Markdown.

    Args:
        figures: file names.
        folder: what stands before them in links from another page, such as "results/", which has no long tables.
        level: of the headings.
    """
    record, head = results.record, "#" * level
    parts = [f"Made by `{record['command']}`, {record['date'][:10]}, {time_of(record)} in all cells."]
    claims = made.claims(results)
    if claims:
        parts += [f"{head} Claims", claims_table(claims).markdown().strip()]
    tables = made.tables(results)
    for place, (title, table) in enumerate(tables.items()):
        if not folder or len(table.rows) <= (LONGEST if place else FIRST):
            parts += [f"{head} {title}", table.markdown().strip()]
    if folder:
        every = f"All {len(tables)} tables are" if len(tables) > 1 else "The table is"
        parts += [f"{every} in [{made.name}.md]({folder}{made.name}.md)."]
    parts += [f"![{file}]({folder}{file})" for file in figures]
    parts += ["\n".join(f"- {note}" for note in made.notes(results))]
    return "\n\n".join(part for part in parts if part) + "\n"


def time_of(record: Mapping[str, Any]) -> str:
    """Return the time of all cells of a run as text."""
    seconds = record["seconds"]
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


def write_block(page: Path, made: Recipe, results: Results, folder: str) -> None:
    """Replace what stands on a page between `<!-- regard reproduce NAME: begin -->` and `... end -->`."""
    text = page.read_text(encoding="utf-8")
    begin, end = marks(made.name)
    if text.count(begin) != 1 or text.count(end) != 1:
        raise ArgumentError(f"{made.call()}: {page} needs one line {begin!r} and one {end!r}.")
    files = [f"{made.name}-{part}.png" for part in made.figures(results)]
    body = markdown(made, results, files, folder, level=3)
    new = re.sub(f"(?s){re.escape(begin)}.*{re.escape(end)}", lambda _: f"{begin}\n\n{body}\n{end}", text)
    page.write_text(new, encoding="utf-8")


def marks(name: str) -> tuple[str, str]:
    """Return the lines that enclose a recipe's block on a page."""
    return f"<!-- regard reproduce {name}: begin -->", f"<!-- regard reproduce {name}: end -->"
