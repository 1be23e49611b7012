"""The baseline that a language model has to beat: counting. An n-gram model with interpolated, modified
Kneser-Ney smoothing (Kneser and Ney 1995; Chen and Goodman 1999, section 3).

With c(h x) how often token x followed the context h of length k = n - 1,

    p_k(x | h) = ( c(h x) - D(c(h x)) + G(h) p_{k-1}(x | h without its first token) ) / sum_y c(h y)

where D takes a little from every count that is not zero, and G(h), the sum of what was taken, is shared out
by the next shorter context. Below the longest context a count is not how often but after how many different
tokens the n-gram occurred. p_{-1} is uniform over the vocabulary, so every token has some probability. A
context that never occurred hands over to the next shorter one.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from regard.checks import ArgumentError

LEAST = 0.05
"""Least discount: without any, tokens that never followed a context would have probability zero."""


@dataclass(frozen=True)
class _Counts:
    """Of n-grams of one length: counts by n-gram; their sum and the mass taken from them by context."""

    grams: Counter[tuple[int, ...]]
    total: Counter[tuple[int, ...]]
    taken: dict[tuple[int, ...], float]
    discounts: tuple[float, float, float, float]


class NGram:
    """Counts of a text, and the probabilities that follow from them.

    Args:
        tokens: the training text as token ids.
        vocabulary: number of tokens V; ids are 0 .. V - 1.
        order: n, the length of the longest n-gram; the context is n - 1 tokens.

    Raises:
        ArgumentError: an order below one, a text shorter than the order, or ids outside the vocabulary.
    """

    def __init__(self, tokens: Sequence[int], vocabulary: int, order: int = 5) -> None:
        tokens = tuple(tokens)
        if order < 1 or len(tokens) < order:
            raise ArgumentError(f"NGram: {len(tokens)} tokens cannot be counted with order {order}.")
        if not 0 <= min(tokens) <= max(tokens) < vocabulary:
            raise ArgumentError(f"NGram: token ids must lie in 0 .. {vocabulary - 1}.")
        self.vocabulary, self.order = vocabulary, order
        grams = Counter(tokens[i : i + order] for i in range(len(tokens) - order + 1))
        levels = [_with_totals(grams)]
        for _ in range(order - 1):  # each distinct n-gram is one different left neighbour of its tail
            grams = Counter(gram[1:] for gram in grams)
            levels.append(_with_totals(grams))
        self._levels = levels[::-1]  # shortest first

    def probability(self, token: int, context: Sequence[int] = ()) -> float:
        """p(token | the last n - 1 tokens of `context`)."""
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
        """Mean negative log-likelihood in nats of every token but the first, each given all before it.

        Raises:
            ArgumentError: fewer than two tokens.
        """
        tokens = tuple(tokens)
        if len(tokens) < 2:
            raise ArgumentError(f"NGram.loss: {len(tokens)} tokens, expected at least 2.")
        reach = self.order - 1
        logs = (math.log(self.probability(tokens[i], tokens[max(0, i - reach) : i])) for i in range(1, len(tokens)))
        return -math.fsum(logs) / (len(tokens) - 1)


def discounts(counts: Counter[int]) -> tuple[float, float, float, float]:
    """What is taken from counts of 0, 1, 2, and 3 or more, given how many n-grams have each count.

    With n_i n-grams of count i and Y = n_1 / (n_1 + 2 n_2): D_i = i - (i + 1) Y n_{i+1} / n_i (Chen and
    Goodman 1999, equation 17), held between `LEAST` and i. Where some n_i is zero, one half throughout.
    """
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
