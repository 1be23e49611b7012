"""Reverse and Sort: a sequence of symbols, and then the same symbols in another order.

The tasks of "Long-context generalization with sparse attention" (Vasylenko et al., 2025), which the sparse regression
paper repeats (appendix B.3): `begin x_1 ... x_L separator y_1 ... y_L end`, symbols drawn uniformly. Models are
trained at lengths from `least` to `most` and tested at longer ones.
"""

from abc import abstractmethod
from dataclasses import dataclass
from random import Random
from typing import ClassVar

import torch
from torch import Tensor

from ..checks import require
from .base import Settings, check_sizes, tasks
from .tokens import TokenExample, TokenTask, continued


@dataclass(frozen=True)
class Reordered(TokenTask):
    """Symbols, and the same in another order.

    Args:
        symbols: how many there are; three tokens after them are begin, separator and end.
        least, most: lengths L, drawn uniformly.
    """

    settings: ClassVar[Settings] = {
        "quick": {"symbols": 16, "least": 4, "most": 12},
        "paper": {"symbols": 32, "least": 32, "most": 64},
    }

    symbols: int = 32
    least: int = 32
    most: int = 64

    def __post_init__(self) -> None:
        check_sizes(self, symbols=2, least=1, most=1)
        longer = f"least is {self.least}, longer than most, {self.most}; give least <= most."
        require(self.least <= self.most, type(self).__name__, longer)

    @property
    def vocabulary(self) -> int:
        return self.symbols + 3

    @abstractmethod
    def order(self, symbols: list[int]) -> list[int]:
        """Return the symbols in the order of the answer."""

    def draw(self, random: Random, split: str) -> TokenExample:
        symbols = random.choices(range(self.symbols), k=random.randint(self.least, self.most))
        begin, separator, end = range(self.symbols, self.symbols + 3)
        return continued([begin, *symbols, separator], [*self.order(symbols), end])

    def oracle(self, example: TokenExample) -> Tensor:
        """Return the symbols before the separator in the order of the answer, int64 [T]."""
        prompt = example.tokens[: example.prompt].tolist()
        return torch.tensor(prompt + self.order(prompt[1:-1]) + [self.symbols + 2])

    def trivial(self, example: TokenExample) -> Tensor:
        """Return the first symbol at every place, int64 [T]."""
        return example.tokens[1].expand(len(example.tokens))


@tasks.register("reverse")
@dataclass(frozen=True)
class Reverse(Reordered):
    """Repeat symbols from the last to the first."""

    def order(self, symbols: list[int]) -> list[int]:
        return symbols[::-1]


@tasks.register("sort")
@dataclass(frozen=True)
class Sort(Reordered):
    """Repeat symbols from the smallest to the largest."""

    def order(self, symbols: list[int]) -> list[int]:
        return sorted(symbols)
