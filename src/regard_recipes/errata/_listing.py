"""What an erratum is. `@erratum` makes one of a function that shows it."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from regard.checks import require

Numbers = Mapping[str, float]
"""What a number is, to the number."""


class Erratum(NamedTuple):
    """An error at a place of a paper or its program, and a function that returns `numbers` which show it. Its docstring
    says what is printed or released, and what is correct: "Found: ... Correct: ..."."""

    paper: str
    place: str
    numbers: Callable[[], Numbers]

    def texts(self) -> list[str]:
        """Return what is printed or released, and what is correct."""
        docstring = " ".join(str(self.numbers.__doc__).split())
        texts = docstring.removeprefix("Found: ").removesuffix(".").split(". Correct: ")
        lacks = f"{self.numbers.__name__} has no docstring 'Found: ... Correct: ...'; python -OO removes docstrings."
        require(len(texts) == 2, "errata", lacks)
        return texts


def erratum(paper: str, place: str) -> Callable[[Callable[[], Numbers]], Erratum]:
    """Return a decorator that makes an erratum of a function."""
    return partial(Erratum, paper, place)


def normal(*shape: int, seed: int = 0) -> Tensor:
    """Return numbers from N(0, 1) in float64."""
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
