"""Operations and numbers moved per query by attention, Mesa and local linear attention: Table 1 of the Local Linear
Attention paper (appendix E) as formulas, with its errors mended:

* Conjugate gradients without matrices take 4 n d a step with kept weights (6 n d with weights computed again), not d^2.
  A d^2 step needs the matrix, which n d (d + 1) operations form (half of a symmetric one).
* Block-diagonal with g blocks: forming takes n d (d / g + 1), in one pass over the keys, and a step 2 d^2 / g.
* Section 5 calls the traffic of blockwise softmax attention n d + n^2 a head; it is n^2 d / B, as the table has it.

A multiplication and an addition count as two; exponentials and what is linear in n or d alone are left out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple


class Sizes(NamedTuple):
    """n keys that a query sees, d channels, T steps, g diagonal blocks, B queries of a block."""

    n: float
    d: int
    steps: float = 0.0
    blocks: int = 1
    tile: int = 128


class Cost(NamedTuple):
    """A row of the table: computation and traffic in the paper ("" where it has no such row), the same corrected, and
    operations and numbers moved as functions of the sizes."""

    paper: tuple[str, str]
    computed: str
    moved: str
    flops: Callable[[Sizes], float]
    numbers: Callable[[Sizes], float]


def _streams(count: float, s: Sizes) -> float:
    """Return the numbers of `count` passes over keys or values past a block of B queries."""
    return count * s.n * s.d / s.tile


def _forming(s: Sizes) -> float:
    """Return the diagonal blocks of the covariance, half of each, and the four products every local linear form has:
    scores, mean, slopes and output."""
    return s.n * s.d * (s.d / s.blocks + 1) + 8 * s.n * s.d


COSTS: dict[str, Cost] = {
    "softmax": Cost(("O(nd)", "2nd/B"), "4nd", "2nd/B", lambda s: 4 * s.n * s.d, lambda s: _streams(2, s)),
    "mesa": Cost(("O(Td²) + O(d²)", "O(d)"), "2Td² + 6d²", "4d",
                 lambda s: (2 * s.steps + 6) * s.d**2, lambda s: 4 * s.d),
    "lla, weights again": Cost(("O(Td²) + O(nd)", "(T+3)nd/B"), "6Tnd + 10nd", "(T+3)nd/B",
                               lambda s: (6 * s.steps + 10) * s.n * s.d, lambda s: _streams(s.steps + 3, s)),
    "lla, weights kept": Cost(("", ""), "4Tnd + 8nd", "(T+3)nd/B + (T+2)n", lambda s: (4 * s.steps + 8) * s.n * s.d,
                              lambda s: _streams(s.steps + 3, s) + (s.steps + 2) * s.n),
    "lla, direct": Cost(("", ""), "nd(d+1) + d³/3 + 8nd", "3nd/B + d²",
                        lambda s: _forming(Sizes(s.n, s.d)) + s.d**3 / 3, lambda s: _streams(3, s) + s.d**2),
    "block-diagonal, cg": Cost(("O(Td²/g²) + O(nd)", "(T+3)nd/B"), "nd(d/g+1) + 2Td²/g + 8nd", "3nd/B + d²/g",
                               lambda s: _forming(s) + 2 * s.steps * s.d**2 / s.blocks,
                               lambda s: _streams(3, s) + s.d**2 / s.blocks),
    "block-diagonal, direct": Cost(("O(d³/g²) + O(nd)", "3nd/B"), "nd(d/g+1) + d³/(3g²) + 8nd", "3nd/B + d²/g",
                                   lambda s: _forming(s) + s.d**3 / (3 * s.blocks**2),
                                   lambda s: _streams(3, s) + s.d**2 / s.blocks),
}  # fmt: skip
"""Row to its formulas, forward."""
