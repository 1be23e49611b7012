"""Permutation state tracking: items at places, swaps of two places, and then questions which item stands where.

Local Linear Attention paper, section 5 (its Figure 5): `p1=a1, ... pN=aN # i1 j1, ... iS jS # q1=o1, ...`, with items
from a large alphabet, S swaps (uniform from N/6 to N/3), and 8 questions, which ask for the item behind `=`.

The paper does not say whether places of a swap differ and whether questions repeat; here items are distinct, the two
places of a swap differ, and no place is asked for twice. An answer that ignores all swaps is right at about 60 % of all
places, so the accuracy on moved places is what counts.
"""

from dataclasses import dataclass
from random import Random
from typing import ClassVar

import torch
from torch import Tensor

from ..checks import require
from .base import Settings, check_sizes, check_span, tasks
from .tokens import TokenExample, TokenTask, example_of


@tasks.register("permutation-tracking")
@dataclass(frozen=True)
class PermutationTracking(TokenTask):
    """Places of items after swaps.

    Args:
        places: N.
        items: of which N are drawn without replacement; at least N.
        questions: at most N.
        swaps: (least, most) of S; N/6 and N/3, rounded down and at least 1, by default.
    """

    settings: ClassVar[Settings] = {
        "quick": {"places": 6, "items": 32, "questions": 4, "swaps": (1, 2)},
        **{f"paper-{n}": {"places": n} for n in (16, 24, 48, 96)},
    }

    places: int = 16
    items: int = 8192
    questions: int = 8
    swaps: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        check_sizes(self, places=2, items=1, questions=1)
        call = type(self).__name__
        require(self.items >= self.places, call, f"{self.places} places need as many items, got items={self.items}.")
        few = f"expected at most the {self.places} places, since no place is asked for twice"
        require(self.questions <= self.places, call, f"questions is {self.questions}, {few}.")
        if self.swaps is not None:
            check_span(self, "swaps", 0)

    @property
    def between(self) -> tuple[int, int]:
        """Return the least and the most swaps."""
        return self.swaps if self.swaps is not None else (max(self.places // 6, 1), max(self.places // 3, 1))

    @property
    def vocabulary(self) -> int:
        """Return the number of tokens: items, places, `=`, `,` and `#`."""
        return self.items + self.places + 3

    def draw(self, random: Random, split: str) -> TokenExample:
        count = self.places
        position = range(self.items, self.items + count)
        equals, comma, mark = range(self.vocabulary - 3, self.vocabulary)
        items = random.sample(range(self.items), count)
        tokens = [*[x for p, a in zip(position, items, strict=True) for x in (p, equals, a, comma)][:-1], mark]
        moved = [False] * count
        for _ in range(random.randint(*self.between)):
            i, j = random.sample(range(count), 2)
            items[i], items[j] = items[j], items[i]
            moved[i] = moved[j] = True
            tokens += [position[i], position[j], comma]
        tokens = [*tokens[:-1], mark] if tokens[-1] == comma else [*tokens, mark]
        labels: dict[int, int] = {}
        places: dict[str, list[int]] = {"moved places": [], "other places": []}
        for q in random.sample(range(count), self.questions):
            tokens += [position[q], equals, items[q], comma]
            labels[len(tokens) - 2] = items[q]
            places["moved places" if moved[q] else "other places"].append(len(tokens) - 2)
        return example_of(tokens[:-1], labels, places)

    def _read(self, example: TokenExample, swapping: bool) -> Tensor:
        """Follow the sequence token by token and return what it says at each `=` of the questions."""
        tokens = example.tokens.tolist()
        mark = self.vocabulary - 1
        first, second = (i for i, x in enumerate(tokens) if x == mark)
        state = dict(zip(tokens[0:first:4], tokens[2:first:4], strict=True))
        for at in range(first + 1, second if swapping else first + 1, 3):
            i, j = tokens[at : at + 2]
            state[i], state[j] = state[j], state[i]
        answers = [0] * len(tokens)
        for at in range(second + 1, len(tokens), 4):
            answers[at + 2] = state[tokens[at]]
        return torch.tensor(answers)

    def oracle(self, example: TokenExample) -> Tensor:
        """Return the item that stands at the place after all swaps, int64 [T]."""
        return self._read(example, swapping=True)

    def trivial(self, example: TokenExample) -> Tensor:
        """Return the item that stood at the place before any swap, int64 [T]."""
        return self._read(example, swapping=False)
