"""The exception for wrong arguments, and suggestions for misspelt names, without torch for the command line.

Elsewhere both come from `regard.checks`.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class ArgumentError(ValueError):
    """A wrong argument. The command line prints the message as one line and exits with status 2."""


def closest(name: str, choices: Iterable[str], cutoff: float = 0.6) -> list[str]:
    """Return at most two of `choices` that are similar to `name`; fewer with a higher cutoff."""
    return difflib.get_close_matches(name, sorted(set(choices)), n=2, cutoff=cutoff)


def suggestion(name: str, choices: Iterable[str]) -> str:
    """Return ' Did you mean ...?' with the closest of `choices`, or else a list of all."""
    known = sorted(set(choices))
    close = closest(name, known)
    if close:
        return f" Did you mean {' or '.join(repr(c) for c in close)}?"
    return f" Choose from: {', '.join(known)}."
