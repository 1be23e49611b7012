"""Multi-query associative recall (MQAR): pairs of keys and values, and after them some of the keys again.

"Zoology" (Arora et al., 2023), and the Local Linear Attention paper, section 5. A sequence begins k_1 v_1 ... k_n v_n.
Each key comes once more in the rest, where its value must be predicted but is not written; gaps follow a power law.

Fillers are never keys of the sequence, unlike those of the reference program.
"""

import math
from dataclasses import dataclass, replace
from random import Random
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..checks import in_range, one_of, require
from .base import Settings, check_sizes, tasks
from .tokens import TokenExample, TokenTask, example_of


@tasks.register("mqar")
@dataclass(frozen=True)
class MQAR(TokenTask):
    """Recall of values by their keys.

    Args:
        tokens: the vocabulary: 0 is the filler, keys are the lower half of the others, values the upper half.
        length: T of a sequence.
        pairs: n, no key and no value twice; 4 n <= T.
        power: a of the gap's law, p(gap) ~ gap^(a - 1), gaps in pairs of places.
        fillers: "zero", or "random": any token that is no key of the sequence.
    """

    settings: ClassVar[Settings] = {
        "quick": {"tokens": 128, "length": 32, "pairs": 4},
        "zoology-64": {"tokens": 8192, "length": 64, "pairs": 4},
        "zoology-128": {"tokens": 8192, "length": 128, "pairs": 8},
        "zoology-256": {"tokens": 8192, "length": 256, "pairs": 16},
        "paper": {"tokens": 8192, "length": 512, "pairs": 128},
    }

    places: ClassVar[int] = 2
    """Positions that a key and its value take."""

    tokens: int = 8192
    length: int = 64
    pairs: int = 4
    power: float = 0.01
    fillers: str = "zero"

    def __post_init__(self) -> None:
        check_sizes(self, tokens=4, length=4, pairs=1)
        call, keys = type(self).__name__, self.tokens // 2 - 1
        in_range(call, "power", self.power, low=0.0, strict=True)
        one_of(call, "fillers", self.fillers, ("zero", "random"))
        short = f"length is {self.length}, too short for {self.pairs} pairs and as many queries"
        hint = f"with a place behind each; give a length of at least {4 * self.pairs} or fewer pairs"
        require(4 * self.pairs <= self.length, call, f"{short} {hint}.")
        many = f"pairs is {self.pairs}, but {self.tokens} tokens hold {keys} keys; give fewer pairs or more tokens."
        require(self.pairs <= keys, call, many)

    @property
    def vocabulary(self) -> int:
        return self.tokens

    def _pairs(self, random: Random) -> tuple[list[int], list[int], list[int]]:
        """Return keys, values and the place of each key's query after the pairs, in steps of two."""
        half = self.tokens // 2
        keys = random.sample(range(1, half), self.pairs)
        values = random.sample(range(half, self.tokens), self.pairs)
        room, draw = (self.length - 2 * self.pairs) // 2, random.random
        # the n smallest of exponential times with these rates are n draws without replacement
        times = [-math.log(1.0 - draw()) * gap ** (1 - self.power) for gap in range(1, room + 1)]
        return keys, values, sorted(range(room), key=times.__getitem__)[: self.pairs]

    def draw(self, random: Random, split: str) -> TokenExample:
        keys, values, gaps = self._pairs(random)
        tokens = [x for pair in zip(keys, values, strict=True) for x in pair[: self.places]]
        start = len(tokens)
        tokens += self._fillers(random, set(keys), self.length - start)
        labels = {}
        for key, value, gap in zip(keys, values, gaps, strict=True):
            tokens[start + self.places * gap] = key
            labels[start + self.places * gap + 1] = value
        example = example_of(tokens, labels)
        if self.places == 2:
            return example
        return replace(example, beside=pad(torch.tensor(values), (0, self.length - start)))

    def _fillers(self, random: Random, keys: set[int], count: int) -> list[int]:
        if self.fillers == "zero":
            return [0] * count
        fillers: list[int] = []
        while len(fillers) < count:
            fillers += [x for x in random.choices(range(self.tokens), k=count) if x not in keys]
        return fillers[:count]

    def _known(self, example: TokenExample) -> tuple[Tensor, Tensor]:
        """Return the keys and the values of the pairs, int64 [n]."""
        n, tokens, beside = self.pairs, example.tokens, example.beside
        return (tokens[0 : 2 * n : 2], tokens[1 : 2 * n : 2]) if beside is None else (tokens[:n], beside[:n])

    def oracle(self, example: TokenExample) -> Tensor:
        """Return the value of the key before each label, int64 [T]."""
        known = dict(zip(*(x.tolist() for x in self._known(example)), strict=True))
        return torch.tensor([0, *(known.get(x, 0) for x in example.tokens[:-1].tolist())])

    def trivial(self, example: TokenExample) -> Tensor:
        """Return the first value of the sequence at every place, int64 [T]."""
        return self._known(example)[1][0].expand(len(example.tokens))


@tasks.register("stacked-mqar")
@dataclass(frozen=True)
class StackedMQAR(MQAR):
    """Recall of values where a key and its value are one position, so that no layer has to combine neighbours first.

    `tokens` of an example holds the keys, `beside` the value that stands at each, 0 for none. A model takes the sum of
    two embeddings, `table(tokens) + table(beside)`, as `inputs_embeds`. The gap to a query is in positions.
    """

    places = 1
