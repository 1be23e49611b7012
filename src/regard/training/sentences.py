"""Sentences of the grammar in lists on a command line: commas between them, but for those in brackets."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..errors import ArgumentError

if TYPE_CHECKING:
    from .. import Spec


def split_sentences(text: str) -> list[str]:
    """Cut at the commas that stand outside brackets, and drop the blanks around the parts."""
    parts, depth, start = [], 0, 0
    for i, char in enumerate(text):
        depth += (char in "([") - (char in ")]")
        if char == "," and depth <= 0:
            parts.append(text[start:i])
            start = i + 1
    return [part.strip() for part in (*parts, text[start:])]


def read_sentence(sentence: str, flag: str, call: str) -> Spec:
    """One sentence of a list given with `flag`.

    Raises:
        ArgumentError: an empty or unknown sentence; the message names the flag.
    """
    from ..grammar import as_spec

    if not sentence:
        raise ArgumentError(f"{call}: {flag} names nothing at one place; put one comma between two sentences.")
    return as_spec(sentence, call, flag)
