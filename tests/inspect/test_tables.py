"""One table in its prints."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from regard.inspect.tables import Table

TABLE = Table(header=("model", "bits"), rows=(("a|b", "1.5"), ("[red]c", "2")), note="A note.")


def test_markdown() -> None:
    assert TABLE.markdown() == "\n".join(
        ["| model | bits |", "|---|---:|", "| a\\|b | 1.5 |", "| [red]c | 2 |", "", "A note.", ""]
    )


def test_markdown_without_a_note_keeps_rows_to_one_line() -> None:
    assert Table(header=("m",), rows=(("a\nb",),)).markdown() == "| m |\n|---|\n| a b |\n"


def test_rich_prints_every_cell_as_it_is() -> None:
    console = Console(file=io.StringIO(), width=80)
    console.print(TABLE.rich("Title"))
    printed = console.file.getvalue()  # type: ignore[attr-defined]
    for text in ("Title", "model", "bits", "a|b", "1.5", "[red]c", "A note."):
        assert text in printed


def test_ragged_rows_are_refused() -> None:
    with pytest.raises(AssertionError):
        Table(header=("a", "b"), rows=(("1",),))
