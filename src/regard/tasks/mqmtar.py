"""Multi-query multi-token associative recall (MQMTAR): keys and values of two tokens each, scattered among blanks.

"Long-context generalization with sparse attention" (Vasylenko et al., 2025), which the sparse regression paper repeats
(its Table 2, appendix B.3). A source of about `length` tokens holds blocks `k k 1 v v 0` at random places among blanks
(token 0), then queries `2 k k`; the answer is `2 v v` for each query.

Keys and values are drawn for each example; the reference program draws them once per file.
"""

from dataclasses import dataclass
from random import Random
from typing import ClassVar

import torch
from torch import Tensor

from ..checks import require
from .base import Settings, check_share, check_sizes, tasks
from .tokens import TokenExample, TokenTask, continued

BLANK, PAIR, QUERY, FIRST = 0, 1, 2, 3
"""Tokens: a blank, between key and value, before a query, and the first letter."""
BLOCK = 6
"""Tokens of a pair with its separators."""


@tasks.register("mqmtar")
@dataclass(frozen=True)
class MQMTAR(TokenTask):
    """Recall of values of two tokens by keys of two tokens.

    Args:
        letters: how many letters keys and values are made of. Begin, separator and end are the tokens after them.
        least, most: the length of the source before queries, drawn uniformly.
        queries: drawn with replacement, as in the reference program, or without where `distinct`.
        share: of the source that pairs fill.
        distinct: whether no key is queried twice.
    """

    settings: ClassVar[Settings] = {
        "quick": {"letters": 16, "least": 18, "most": 30, "queries": 2},
        "paper": {"letters": 256, "least": 32, "most": 64},
    }

    letters: int = 256
    least: int = 32
    most: int = 64
    queries: int = 4
    share: float = 0.8
    distinct: bool = False

    def __post_init__(self) -> None:
        check_sizes(self, letters=2, least=1, most=1, queries=1)
        check_share(self)
        call = type(self).__name__
        longer = f"least is {self.least}, longer than most, {self.most}; give least <= most."
        require(self.least <= self.most, call, longer)
        fewest, many, keys = self.pairs(self.least), self.pairs(self.most), self.letters**2
        few = f"a source of {self.least} tokens holds {fewest} pairs, too few for {self.queries} queries"
        enough = fewest >= (self.queries if self.distinct else 1)
        require(enough, call, f"{few}; give a larger least or fewer queries.")
        short = f"a source of {self.most} tokens holds {many} pairs, but {self.letters} letters make {keys} keys"
        require(many <= keys, call, f"{short}; give more letters or a smaller most.")

    def pairs(self, length: int) -> int:
        """Return how many pairs a source of that length holds."""
        return int(self.share * length) // BLOCK

    @property
    def vocabulary(self) -> int:
        return FIRST + self.letters + 3

    def draw(self, random: Random, split: str) -> TokenExample:
        length = random.randint(self.least, self.most)
        count = self.pairs(length)
        keys, values = (random.sample(range(self.letters**2), count) for _ in range(2))
        source: list[int] = []
        for i, (key, value) in enumerate(zip(keys, values, strict=True)):
            slot = (i + 1) * length // count - i * length // count
            before = random.randint(0, max(slot - BLOCK, 0))
            block = [*self._letters(key), PAIR, *self._letters(value), BLANK]
            source += [BLANK] * before + block + [BLANK] * max(slot - BLOCK - before, 0)
        draw = random.sample if self.distinct else random.choices
        asked = draw(range(count), k=self.queries)
        begin, separator, end = range(FIRST + self.letters, self.vocabulary)
        questions = [x for i in asked for x in (QUERY, *self._letters(keys[i]))]
        answers = [x for i in asked for x in (QUERY, *self._letters(values[i]))]
        return continued([begin, *source, *questions, separator], [*answers, end])

    def _letters(self, pair: int) -> tuple[int, int]:
        return FIRST + pair // self.letters, FIRST + pair % self.letters

    def oracle(self, example: TokenExample) -> Tensor:
        """Return the values of the queried keys, int64 [T]."""
        prompt = example.tokens[: example.prompt].tolist()
        known = {tuple(prompt[i - 2 : i]): prompt[i + 1 : i + 3] for i, x in enumerate(prompt) if x == PAIR}
        queried = [known[tuple(prompt[i + 1 : i + 3])] for i, x in enumerate(prompt) if x == QUERY]
        return torch.tensor([*prompt, *(x for value in queried for x in (QUERY, *value)), self.vocabulary - 1])

    def trivial(self, example: TokenExample) -> Tensor:
        """Return the first value of the source for every query, int64 [T]."""
        prompt = example.tokens[: example.prompt].tolist()
        at = prompt.index(PAIR)
        answer = [QUERY, *prompt[at + 1 : at + 3]] * self.queries
        return torch.tensor([*prompt, *answer, self.vocabulary - 1])
