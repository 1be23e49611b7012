"""What an erratum is. `@erratum` makes one of a function that shows it."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

Numbers = Mapping[str, float]
"""What a number is, to the number."""


class Erratum(NamedTuple):
    """One error of a paper or its program: where, what is `printed` or released, what is `correct`, and a function that
    returns `numbers` which show it."""

    paper: str
    place: str
    printed: str
    correct: str
    numbers: Callable[[], Numbers]


def erratum(paper: str, place: str, printed: str, correct: str) -> Callable[[Callable[[], Numbers]], Erratum]:
    """Return a decorator that makes an erratum of a function."""
    return partial(Erratum, paper, place, printed, correct)
