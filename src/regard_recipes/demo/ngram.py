"""The baseline of the demo: an n-gram model with interpolated, modified Kneser-Ney smoothing (Kneser and Ney 1995; Chen
and Goodman 1999, section 3).

With c(h x) the count of token x after the context h of length k = n - 1,

    p_k(x | h) = ( c(h x) - D(c(h x)) + G(h) p_{k-1}(x | h without its first token) ) / sum_y c(h y)

where D is the discount of a non-zero count and G(h) the sum of the discounts, shared out by the next shorter context.
Below the longest context, a count is the number of different tokens before the n-gram. p_{-1} is uniform over the
vocabulary. A context that never occurred is replaced by the next shorter one.
"""

import math
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from regard.checks import require

LEAST = 0.05  # least discount: with none, tokens that never followed a context would have probability zero


class _Counts(NamedTuple):
    """Counts of n-grams of one length; by context their sum and their discounts."""

    grams: Counter[tuple[int, ...]]
    total: Counter[tuple[int, ...]]
    taken: dict[tuple[int, ...], float]
    discounts: tuple[float, float, float, float]


class NGram:
    """An n-gram model of a text.

    Args:
        tokens: the training text as token ids.
        vocabulary: number of tokens V; ids are 0 .. V - 1.
        order: n, the length of the longest n-gram; the context is n - 1 tokens.
    """

    def __init__(self, tokens: Sequence[int], vocabulary: int, order: int = 5) -> None:
        tokens = tuple(tokens)
        require(0 < order <= len(tokens), "NGram", f"{len(tokens)} tokens cannot be counted with order {order}.")
        require(0 <= min(tokens) <= max(tokens) < vocabulary, "NGram", f"token ids must lie in 0 .. {vocabulary - 1}.")
        self.vocabulary, self.order = vocabulary, order
        grams = Counter(tokens[i : i + order] for i in range(len(tokens) - order + 1))
        levels = [_with_totals(grams)]
        for _ in range(order - 1):  # each distinct n-gram is one different left neighbour of its tail
            grams = Counter(gram[1:] for gram in grams)
            levels.append(_with_totals(grams))
        self._levels = levels[::-1]  # shortest first

    def probability(self, token: int, context: Sequence[int] = ()) -> float:
        """Return p(token | the last n - 1 tokens of `context`)."""
        context = tuple(context)
        p = 1.0 / self.vocabulary
        for length, level in enumerate(self._levels[: len(context) + 1]):
            history = context[len(context) - length :]
            total = level.total[history]
            if not total:  # then no longer context occurred either
                break
            gram = (*history, token)
            count = level.grams[gram]
            p = (count - level.discounts[min(count, 3)] + level.taken[history] * p) / total
        return p

    def loss(self, tokens: Sequence[int]) -> float:
        """Return the mean negative log-likelihood in nats of all tokens but the first."""
        tokens = tuple(tokens)
        require(len(tokens) > 1, "NGram.loss", f"{len(tokens)} tokens, expected at least 2.")
        reach = self.order - 1
        logs = (math.log(self.probability(tokens[i], tokens[max(0, i - reach) : i])) for i in range(1, len(tokens)))
        return -math.fsum(logs) / (len(tokens) - 1)


def discounts(counts: Counter[int]) -> tuple[float, float, float, float]:
    """Return the discounts of counts of 0, 1, 2, and 3 or more: with n_i n-grams of count i and
    Y = n_1 / (n_1 + 2 n_2), D_i = i - (i + 1) Y n_{i+1} / n_i (Chen and Goodman 1999, equation 17), between `LEAST` and
    i; one half where some n_i is zero."""
    n = [counts[i] for i in range(5)]
    if not all(n[1:]):
        return 0.0, 0.5, 0.5, 0.5
    y = n[1] / (n[1] + 2 * n[2])
    one, two, three = (min(max(i - (i + 1) * y * n[i + 1] / n[i], LEAST), i) for i in (1, 2, 3))
    return 0.0, float(one), float(two), float(three)


def _with_totals(grams: Counter[tuple[int, ...]]) -> _Counts:
    steps = discounts(Counter(grams.values()))
    total: Counter[tuple[int, ...]] = Counter()
    taken: dict[tuple[int, ...], float] = {}
    for gram, count in grams.items():
        history = gram[:-1]
        total[history] += count
        taken[history] = taken.get(history, 0.0) + steps[min(count, 3)]
    return _Counts(grams, total, taken, steps)
