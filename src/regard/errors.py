"""The one exception for mistakes in arguments, and "did you mean". Nothing here needs torch, so that the command line
can answer such mistakes without it; elsewhere both names come from `regard.checks`."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class ArgumentError(ValueError):
    """A mistake in what the caller gave. The command line prints its message as one line and exits with 2."""


def closest(name: str, choices: Iterable[str], cutoff: float = 0.6) -> list[str]:
    """Return those of `choices` for which `name` may be a misspelling, two at most; with a higher cutoff, fewer."""
    return difflib.get_close_matches(name, sorted(set(choices)), n=2, cutoff=cutoff)


def suggestion(name: str, choices: Iterable[str]) -> str:
    """' Did you mean ...?' for the closest of `choices`, or the list of all of them."""
    known = sorted(set(choices))
    close = closest(name, known)
    if close:
        return f" Did you mean {' or '.join(repr(c) for c in close)}?"
    return f" Choose from: {', '.join(known)}."
