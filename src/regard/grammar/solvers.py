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
    minimum norm, by eigenvalues, with status 1. Cost D^3/3 a system.
    """

    name: ClassVar[str] = "cholesky"

    def solve(self, matrix: Tensor, right: Tensor) -> Solved:
        factor, info = torch.linalg.cholesky_ex(matrix)
        diagonal = torch.diagonal(factor, dim1=-2, dim2=-1)
        # A factor of a numerically singular matrix exists but means nothing: its pivots are roots of rounding.
        floor = diagonal.detach().amax(-1) * _rtol(matrix) ** 0.5
        singular = (info != 0) | (diagonal.detach().amin(-1) <= floor)
        eye = torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)
        safe = torch.where(singular[..., None, None], eye, matrix)
        direct = torch.cholesky_solve(right[..., None], torch.linalg.cholesky(safe))
        if torch.compiler.is_compiling() or bool(singular.any()):
            held = torch.where(singular[..., None, None], matrix, eye)
            least = torch.linalg.pinv(held, hermitian=True, rtol=_rtol(matrix)) @ right[..., None]
            direct = torch.where(singular[..., None, None], least, direct)
        return Solved(direct[..., 0], singular.int(), {})


def _rtol(matrix: Tensor) -> float:
    return float(matrix.shape[-1] * torch.finfo(matrix.dtype).eps * 10)
