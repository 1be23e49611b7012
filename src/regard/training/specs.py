"""Lists of attention specs on a command line, with commas between them (not inside brackets)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..errors import ArgumentError

if TYPE_CHECKING:
    from .. import Spec


def split_specs(text: str) -> list[str]:
    """Split at the commas that stand outside brackets, and strip the parts."""
    parts, depth, start = [], 0, 0
    for i, char in enumerate(text):
        depth += (char in "([") - (char in ")]")
        if char == "," and depth <= 0:
            parts.append(text[start:i])
            start = i + 1
    return [part.strip() for part in (*parts, text[start:])]


def read_spec(text: str, flag: str, call: str) -> Spec:
    """Return the spec of one part of a list given with `flag`, which the message of an `ArgumentError` names."""
    from ..grammar import as_spec

    if not text:
        raise ArgumentError(f"{call}: {flag} has an empty part; put one comma between two specs.")
    return as_spec(text, call, flag)
