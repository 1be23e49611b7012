"""Linear systems of the local linear model, (C_i + ridge_i) t_i = b_i for every query i, and their solutions.

Legend: [...] rows; D coordinates; g diagonal blocks of D / g coordinates.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

import torch
from torch import Tensor

from ..checks import ArgumentError

LEAST, MOST = -80.0, 80.0
"""Limits of the logarithm of 1 / total kernel weight, which keep a relative ridge finite."""
LARGEST = 1e36
"""Largest ridge: sums of it over coordinates are finite in float32."""
LIMIT = 2.0**-10
"""Rounding error, relative to the residual or to the weights of the values, above which `rounded` reports a row."""


class SolveStatus(IntEnum):
    """Status of the solution of a linear system. Mend INACCURATE and JITTER by float64 inputs, a larger ridge, or
    normalised keys."""

    OK = 0
    MINIMUM_NORM = 1  # singular with ridge 0: the least-squares solution of minimum norm
    NOT_FINITE = 2  # the matrix is not finite; the solution is NaN
    UNCONVERGED = 3  # the iteration ended before the residual was small
    JITTER = 4  # numerically singular although ridge > 0: a larger diagonal was used
    INACCURATE = 5  # rounding errors, which grow with |k|^2 / ridge, may hide the result, even in float64


class Solved(NamedTuple):
    """Solution [..., D], `SolveStatus` of every system [...] (int32), and statistics [...] by name."""

    value: Tensor
    status: Tensor
    statistics: dict[str, Tensor]


class System(ABC):
    """Symmetric positive semi-definite systems, one per row."""

    ridge: float | Tensor  # a number, or [..., 1 or D]
    probe: Tensor | None  # -t [..., D] if the caller gives the solution
    fewest: int | None = None  # keys that positions allow a non-empty row to see; None if unknown
    sparse: bool = False  # whether rows may have so few nonzero weights that `by_row` is faster

    @abstractmethod
    def apply(self, x: Tensor) -> Tensor:
        """Return (C + ridge) x [..., D]."""

    @abstractmethod
    def matrix(self) -> Tensor:
        """Return C + ridge [..., D, D]."""

    @abstractmethod
    def diagonal(self, blocks: int) -> Tensor:
        """Return the diagonal blocks of C + ridge, [..., g, D/g, D/g]."""

    @abstractmethod
    def terms(self) -> Tensor:
        """Return the size [..., 1] of the terms of C + ridge, which bounds the rounding error of a product."""

    def by_row(self, right: Tensor) -> Solved:
        """Solve each row separately, in the space of its weighted keys if they are few. For `sparse` systems."""
        kind = type(self).__name__
        raise ArgumentError(f"{kind}: by_row needs the weights of the keys, not matrices; use cholesky or cg.")

    def near(self) -> Tensor | None:
        """Return a preconditioner [n, D, D] made from the keys that every row sees, or None."""
        return None


@dataclass(frozen=True)
class Dense(System):
    """Systems given by their matrices [..., D, D], ridge included."""

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


def unreadable(x: Tensor) -> bool:
    """Return whether the contents of x cannot be read: under compilation, a torch.func transform, or on meta."""
    return torch.compiler.is_compiling() or x.is_meta or torch._C._functorch.maybe_current_level() is not None


def rounded(status: Tensor, t: Tensor, squares: Tensor) -> Tensor:
    """Return the status [...], INACCURATE for OK where the slopes y_j . t of the solution t [..., D] have rounding
    errors eps |y| |t| above LIMIT; `squares` [...] is the weighted mean of |y_j|^2."""
    size = torch.linalg.vector_norm(t, dim=-1) * squares.sqrt()
    return status.masked_fill((size > LIMIT / torch.finfo(t.dtype).eps) & (status == 0), int(SolveStatus.INACCURATE))


def lost(status: Tensor) -> Tensor:
    """Return which rows [...] were not solved in their precision."""
    return status >= int(SolveStatus.JITTER)


def power_of_two_above(right: Tensor) -> Tensor:
    """Return the power of two [..., 1] above the largest entry of each right-hand side, 1 for zeros. Dividing by it is
    exact and keeps squares in range."""
    exponent = torch.frexp(right.abs().amax(-1, keepdim=True)).exponent
    return torch.ldexp(torch.ones_like(right[..., :1]), exponent)


def relative(ridge: float | Tensor, log_mass: Tensor) -> Tensor:
    """Divide an absolute ridge by the total kernel weight, given as logarithm [..., 1]."""
    return (ridge * (-log_mass).clamp(LEAST, MOST).exp()).clamp(-LARGEST, LARGEST)
