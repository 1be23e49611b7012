"""Systems of the local linear model, (C_i + ridge_i) t_i = b_i for every query i, and what solving them gives.

Legend: [...] rows; D coordinates; g diagonal blocks of D / g coordinates.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple, Protocol

import torch
from torch import Tensor


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
    def rank(self) -> int | None:
        """The most that C can have, where it is known."""

    @property
    def probe(self) -> Tensor | None:
        """-t [..., D] as the caller gives it, or None."""

    def apply(self, x: Tensor) -> Tensor:
        """(C + ridge) x [..., D]."""

    def matrix(self) -> Tensor:
        """C + ridge [..., D, D]."""

    def diagonal(self, blocks: int) -> Tensor:
        """The diagonal blocks of C + ridge, [..., g, D/g, D/g]."""

    def through_keys(self, right: Tensor, most: int) -> tuple[Solved, Tensor]:
        """(solutions of the rows with at most `most` weighted keys, by systems among those, and 0 for the others; which
        rows were solved). Of systems that know their weights."""

    def take(self, rows: Tensor) -> System:
        """The systems of `rows`, int64 [n, m] positions along the last axis of rows."""

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
    rank: int | None = None

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

    def through_keys(self, right: Tensor, most: int) -> tuple[Solved, Tensor]:
        raise NotImplementedError

    def take(self, rows: Tensor) -> Dense:
        return Dense(
            taken(self.matrices, rows), taken_ridge(self.ridge, rows),
            None if self.probe is None else taken(self.probe, rows), self.rank,
        )  # fmt: skip


def taken(x: Tensor, rows: Tensor) -> Tensor:
    """Rows [..., m] of x [..., q, ...]."""
    tail = x.shape[rows.dim() :]
    return x.gather(rows.dim() - 1, rows.reshape(*rows.shape, *(1,) * len(tail)).expand(*rows.shape, *tail))


def taken_ridge(ridge: float | Tensor, rows: Tensor) -> float | Tensor:
    """The ridge of rows [..., m]."""
    return taken(ridge, rows) if isinstance(ridge, Tensor) else ridge


def unit(right: Tensor) -> Tensor:
    """The power of two [..., 1] next to the largest number of each right side, 1 where that is 0: dividing by it rounds
    nothing, and squares of very large or small numbers stay in range."""
    exponent = torch.frexp(right.abs().amax(-1, keepdim=True)).exponent
    return torch.ldexp(torch.ones_like(right[..., :1]), exponent)


STEP = 16
"""Rows are taken out by so many, so that products of fewer rows are made the same way: not a bit of one row hangs on
how many others are in work."""


def crowd(wanted: Tensor) -> int:
    """The most rows `wanted` [n, q] of any n, rounded up to a multiple of STEP."""
    most = int(wanted.sum(-1).max()) if wanted.numel() else 0
    return min(-(-most // STEP) * STEP, wanted.shape[-1])


def rows_of(wanted: Tensor) -> Tensor:
    """Positions [n, m] of the rows `wanted`, boolean [n, q], in order and filled up with others to m = `crowd`."""
    return wanted.to(torch.int8).argsort(dim=-1, descending=True, stable=True)[..., : crowd(wanted)]
