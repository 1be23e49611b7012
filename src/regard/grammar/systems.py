"""Systems of the local linear model, (C_i + ridge_i) t_i = b_i for every query i, and what solving them gives.

Legend: [...] rows; D coordinates; g diagonal blocks of D / g coordinates.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ..checks import ArgumentError


class SolveStatus(IntEnum):
    """How a system was solved."""

    OK = 0
    MINIMUM_NORM = 1  # singular, with ridge 0: the least-squares solution of least norm
    NOT_FINITE = 2  # the matrix is not finite; the solution is NaN
    UNCONVERGED = 3  # the iteration ended before the residual was small; the best solution so far
    JITTER = 4  # numerically singular although ridge > 0: more was added to the diagonal


class Solved(NamedTuple):
    """A solution [..., D], the `SolveStatus` of every system [...] (int32), and statistics [...] by name."""

    value: Tensor
    status: Tensor
    statistics: dict[str, Tensor]


class System(Protocol):
    """Symmetric positive semi-definite systems, one a row."""

    @property
    def ridge(self) -> float | Tensor:
        """What is on the diagonal beside C: a number, or [..., 1 or D]."""

    @property
    def fewest(self) -> int | None:
        """The fewest keys that position lets a row see that sees any, where it is known."""

    @property
    def probe(self) -> Tensor | None:
        """-t [..., D] as the caller gives it, or None."""

    def apply(self, x: Tensor) -> Tensor:
        """(C + ridge) x [..., D]."""

    def matrix(self) -> Tensor:
        """C + ridge [..., D, D]."""

    def diagonal(self, blocks: int) -> Tensor:
        """The diagonal blocks of C + ridge, [..., g, D/g, D/g]."""

    @property
    def sparse(self) -> bool:
        """Whether rows may have so few weighted keys that `by_row` pays."""

    def by_row(self, right: Tensor) -> Solved:
        """Every row by itself: through its weighted keys where they are few, else by its own matrix. Of systems that
        are `sparse`."""

    def terms(self) -> Tensor:
        """The size [..., 1] of the terms whose sum C + ridge is, to tell what rounding leaves of a product."""

    def near(self) -> Tensor | None:
        """One matrix like those of all rows [n, D, D], made of nothing that the first of them does not see, for
        preconditioning; None where there is none."""


@dataclass(frozen=True)
class Dense:
    """Systems whose matrices [..., D, D] are at hand, ridge included."""

    matrices: Tensor
    ridge: float | Tensor = 1.0
    probe: Tensor | None = None

    def apply(self, x: Tensor) -> Tensor:
        return (self.matrices @ x[..., None])[..., 0]

    def matrix(self) -> Tensor:
        return self.matrices

    def diagonal(self, blocks: int) -> Tensor:
        size = self.matrices.shape[-1] // blocks
        tiled = self.matrices.unflatten(-1, (blocks, size)).unflatten(-3, (blocks, size))  # [..., g, s, g, s]
        return tiled.diagonal(dim1=-4, dim2=-2).movedim(-1, -3)

    def terms(self) -> Tensor:
        return self.matrices.diagonal(dim1=-2, dim2=-1).sum(-1, keepdim=True)

    def near(self) -> None:
        return None

    @property
    def fewest(self) -> None:
        return None

    @property
    def sparse(self) -> bool:
        return False

    def by_row(self, right: Tensor) -> Solved:
        raise ArgumentError("Dense: matrices do not know the weights they came from; solve them by cholesky or cg.")


def unreadable(x: Tensor) -> bool:
    """Whether nothing may be decided by the numbers in x: it is drawn into a graph, a torch.func transform looks on, or
    it is a meta tensor, which has none."""
    return torch.compiler.is_compiling() or x.is_meta or torch._C._functorch.maybe_current_level() is not None


def unit(right: Tensor) -> Tensor:
    """The power of two [..., 1] next to the largest number of each right side, 1 where that is 0: dividing by it rounds
    nothing, and squares of very large or small numbers stay in range."""
    exponent = torch.frexp(right.abs().amax(-1, keepdim=True)).exponent
    return torch.ldexp(torch.ones_like(right[..., :1]), exponent)
