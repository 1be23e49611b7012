"""Solvers: how the local linear model's system (C + ridge I) t = m is solved."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from ..registry import Registry

solvers: Registry[Any] = Registry("solver", "regard.solvers")


class Solved(NamedTuple):
    """A solution, how each system fared (0: as asked), and statistics by name."""

    value: Tensor
    status: Tensor
    statistics: dict[str, Tensor]


@runtime_checkable
class Solver(Protocol):
    """Solves a batch of symmetric positive semi-definite systems."""

    name: ClassVar[str]

    def solve(self, matrix: Tensor, right: Tensor) -> Solved:
        """x with `matrix` x = `right`: [..., D, D], [..., D] -> [..., D]."""


@solvers.register("cholesky")
@dataclass(frozen=True)
class Cholesky:
    """Direct solve by a Cholesky factor; where the matrix is singular (ridge 0), the least-squares solution of
    minimum norm, by eigenvalues. Status 0: direct; 1: minimum norm; 2: not finite, and the solution is NaN.
    Cost D^3/3 a system.
    """

    name: ClassVar[str] = "cholesky"

    def solve(self, matrix: Tensor, right: Tensor) -> Solved:
        finite = torch.isfinite(matrix.detach()).all((-1, -2))
        eye = torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)
        sound = torch.where(finite[..., None, None], matrix, eye)  # no row's NaN may fail the whole call
        singular = self._singular(sound.detach())
        regular = torch.where(singular[..., None, None], eye, sound)
        solution = torch.cholesky_solve(right[..., None], torch.linalg.cholesky(regular))
        if torch.compiler.is_compiling() or bool(singular.any()):
            held = torch.where(singular[..., None, None], sound, eye)
            least = torch.linalg.pinv(held, hermitian=True, rtol=_rtol(matrix)) @ right[..., None]
            solution = torch.where(singular[..., None, None], least, solution)
        value = torch.where(finite[..., None], solution[..., 0], torch.nan)
        return Solved(value, torch.where(finite, singular.int(), 2), {})

    @staticmethod
    def _singular(matrix: Tensor) -> Tensor:
        """A factor of a numerically singular matrix exists but means nothing: its pivots are roots of rounding."""
        factor, info = torch.linalg.cholesky_ex(matrix)
        diagonal = torch.diagonal(factor, dim1=-2, dim2=-1)
        return (info != 0) | (diagonal.amin(-1) <= diagonal.amax(-1) * _rtol(matrix) ** 0.5)


def _rtol(matrix: Tensor) -> float:
    return float(matrix.shape[-1] * torch.finfo(matrix.dtype).eps * 10)
