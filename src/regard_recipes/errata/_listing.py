"""The list of errata: `@erratum` adds a function that shows one."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

Numbers = Mapping[str, float]
"""What a number is, to the number."""
Show = Callable[[], Numbers]


@dataclass(frozen=True)
class Erratum:
    """One error of a paper or its program: where, what is `printed` or released, what is `correct`, and a function that
    returns `numbers` which show it."""

    paper: str
    place: str
    printed: str
    correct: str
    numbers: Show


ERRATA: dict[str, Erratum] = {}


def erratum(paper: str, place: str, printed: str, correct: str) -> Callable[[Show], Show]:
    """Return a decorator that adds a function under its name, with hyphens for underscores."""

    def add(function: Show) -> Show:
        name = function.__name__.replace("_", "-")
        assert name not in ERRATA, name
        ERRATA[name] = Erratum(paper, place, printed, correct, function)
        return function

    return add
