"""A table that can be printed on the terminal, as Markdown, and (by the page's template) as HTML."""

from dataclasses import dataclass

from ..errors import extra_imports

with extra_imports():
    from rich import box
    from rich.markup import escape
    from rich.table import Table as RichTable
    from rich.text import Text


_ESCAPED = str.maketrans({"\\": "\\\\", "|": "\\|", "\n": " "})


@dataclass(frozen=True)
class Table:
    """Table with cells of text, as many in every row as in the header, and a note below. The first column is aligned
    left, the others right."""

    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""

    def __post_init__(self) -> None:
        assert all(len(row) == len(self.header) for row in self.rows)

    def markdown(self) -> str:
        """Return the table as GitHub Markdown, with `|` in cells escaped."""
        cells = [[cell.translate(_ESCAPED) for cell in row] for row in (self.header, *self.rows)]
        lines = [f"| {' | '.join(row)} |" for row in cells]
        lines.insert(1, "|" + "|".join(["---", *("---:" for _ in self.header[1:])]) + "|")
        return "\n".join([*lines, *(["", self.note] if self.note else []), ""])

    def rich(self, title: str = "") -> RichTable:
        """Return the table for `rich.console.Console.print`, with brackets as text, not markup."""
        table = RichTable(title=escape(title) or None, box=box.SIMPLE_HEAD, caption=escape(self.note) or None)
        for i, name in enumerate(self.header):
            table.add_column(Text(name), justify="right" if i else "left", overflow="fold")
        for row in self.rows:
            table.add_row(*(Text(cell) for cell in row))
        return table


def visible(token: str) -> str:
    """Return a token with signs for spaces and line ends, and dots for other unprintable characters."""
    signs = {" ": "␣", "\n": "↵", "\t": "→", "\r": "↵"}
    return "".join(signs.get(c, c if c.isprintable() else "·") for c in token)
