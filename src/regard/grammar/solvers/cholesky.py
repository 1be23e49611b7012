"""Direct solution by a Cholesky factor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..systems import Solved, SolveStatus, System, unreadable
from .base import direct_solution, has_ridge, solvers


@solvers.register("cholesky")
@dataclass(frozen=True)
class Cholesky:
    """Direct solve by a Cholesky factor. A numerically singular matrix gets the least-squares solution of minimum norm
    where ridge is 0 (by eigenvalues), else the first of three growing jitters that makes it regular.
    Cost D^3/3 a row, and D^2 a pair for the matrix.
    """

    name: ClassVar[str] = "cholesky"
    exact: ClassVar[bool] = True
    needs_ridge: ClassVar[bool] = False

    RUNGS: ClassVar[tuple[float, ...]] = (1e1, 1e3, 1e5)
    """Jitter, in units of D eps times the mean of the diagonal."""

    def solve(self, system: System, right: Tensor) -> Solved:
        return self.factor(system.matrix(), right, system.ridge)

    def factor(self, matrix: Tensor, right: Tensor, ridge: float | Tensor) -> Solved:
        """`matrix` x = `right`: [..., D, D], [..., D] -> [..., D]."""
        finite = torch.isfinite(matrix.detach()).all((-1, -2))
        eye = torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)
        sound = torch.where(finite[..., None, None], matrix, eye)  # no row's NaN may fail the whole call
        factor, info = torch.linalg.cholesky_ex(sound)
        penalised = has_ridge(ridge, info)
        singular = self._meaningless(factor.detach(), info, sound.detach(), penalised)
        status = torch.where(finite, 0, int(SolveStatus.NOT_FINITE))
        jitter = torch.zeros_like(right[..., 0])
        if not (unreadable(singular) or bool(singular.any())):
            solution = torch.cholesky_solve(right[..., None], factor)
        else:
            jitter, left = self._jitter(sound.detach(), singular & penalised)
            left |= singular & (jitter == 0)
            raised = sound + jitter[..., None, None] * eye
            regular = torch.cholesky_solve(
                right[..., None], torch.linalg.cholesky_ex(torch.where(left[..., None, None], eye, raised))[0]
            )
            held = torch.where(left[..., None, None], sound, eye)
            least = torch.linalg.pinv(held, hermitian=True, rtol=_rtol(matrix)) @ right[..., None]
            solution = torch.where(left[..., None, None], least, regular)
            status = torch.where(jitter > 0, int(SolveStatus.JITTER), status)
            status = torch.where(left, int(SolveStatus.MINIMUM_NORM), status)
        value = torch.where(finite[..., None], solution[..., 0], torch.nan)
        found = direct_solution(matrix.detach(), right.detach(), value.detach(), status, jitter)
        return found._replace(value=value)

    def _jitter(self, matrix: Tensor, singular: Tensor) -> tuple[Tensor, Tensor]:
        """(the first rung on which a singular matrix is regular, 0 for the others; which no rung mends)."""
        mean = matrix.diagonal(dim1=-2, dim2=-1).mean(-1)
        unit = matrix.shape[-1] * torch.finfo(matrix.dtype).eps * torch.where(mean > 0, mean, 1)
        eye = torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)
        found, left = torch.zeros_like(unit), singular
        for rung in self.RUNGS:
            found = torch.where(left, rung * unit, found)
            raised = matrix + found[..., None, None] * eye
            factor, info = torch.linalg.cholesky_ex(raised)
            whole = torch.zeros_like(left)  # the jitter is the same in all coordinates, and so is the measure
            left = left & self._meaningless(factor, info, raised, whole)
        return torch.where(left, 0, found), left

    @staticmethod
    def _meaningless(factor: Tensor, info: Tensor, matrix: Tensor, penalised: Tensor) -> Tensor:
        """Whether there is no factor, or none that means anything: pivots of a numerically singular matrix are roots
        of rounding. A pivot is what elimination leaves of its own coordinate, whose scale is nobody else's matter; but
        without a ridge, that may be rounding from the start."""
        pivots = torch.diagonal(factor, dim1=-2, dim2=-1).square()
        whole = torch.diagonal(matrix, dim1=-2, dim2=-1)
        whole = torch.where(penalised[..., None], whole, whole.amax(-1, keepdim=True))
        return (info != 0) | ~(pivots > whole * _rtol(factor)).all(-1)


def _rtol(matrix: Tensor) -> float:
    return float(matrix.shape[-1] * torch.finfo(matrix.dtype).eps * 10)
