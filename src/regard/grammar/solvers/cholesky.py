"""Direct solution by a Cholesky factor."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..systems import Solved, SolveStatus, System, unreadable
from .base import Solver, direct_solution, has_ridge, solvers


@solvers.register("cholesky")
@dataclass(frozen=True)
class Cholesky(Solver):
    """Solve by a Cholesky factor. For a numerically singular matrix the result is the least-squares solution of minimum
    norm if the ridge is 0 (by eigenvalues), else the solution with the first of three jitters that makes it regular.
    Cost: D^3/3 per row, and D^2 per pair for the matrix.
    """

    RUNGS: ClassVar[tuple[float, ...]] = (1e1, 1e3, 1e5)
    """Jitters in units of D eps times the mean of the diagonal."""

    def solve(self, system: System, right: Tensor) -> Solved:
        return self.factor(system.matrix(), right, system.ridge)

    def factor(self, matrix: Tensor, right: Tensor, ridge: float | Tensor) -> Solved:
        """Solve `matrix` x = `right`: [..., D, D], [..., D] -> [..., D]."""
        finite = torch.isfinite(matrix.detach()).all((-1, -2))
        eye = torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)
        sound = torch.where(finite[..., None, None], matrix, eye)  # a NaN would make the call fail for all rows
        factor, info = torch.linalg.cholesky_ex(sound)
        penalised = has_ridge(ridge, info)
        singular = self._meaningless(factor.detach(), info, sound.detach(), penalised)
        status = torch.where(finite, 0, int(SolveStatus.NOT_FINITE))
        jitter = torch.zeros_like(right[..., 0])
        if not (unreadable(singular) or bool(singular.any())):
            solution = torch.cholesky_solve(right[..., None], factor)
        else:
            jitter, left = self._jitter(sound.detach(), eye, singular & penalised)
            left |= singular & (jitter == 0)
            matrices, raised = left[..., None, None], sound + jitter[..., None, None] * eye
            factor = torch.linalg.cholesky_ex(torch.where(matrices, eye, raised))[0]
            regular = torch.cholesky_solve(right[..., None], factor)
            held = torch.where(matrices, sound, eye)
            least = torch.linalg.pinv(held, hermitian=True, rtol=_rtol(matrix)) @ right[..., None]
            solution = torch.where(matrices, least, regular)
            status = torch.where(jitter > 0, int(SolveStatus.JITTER), status)
            why = torch.where(penalised, int(SolveStatus.INACCURATE), int(SolveStatus.MINIMUM_NORM))
            status = torch.where(left, why, status)
        value = torch.where(finite[..., None], solution[..., 0], torch.nan)
        solved = direct_solution(matrix.detach(), right.detach(), value.detach(), status, jitter)
        return solved._replace(value=value)

    def _jitter(self, matrix: Tensor, eye: Tensor, singular: Tensor) -> tuple[Tensor, Tensor]:
        """Return (the first jitter that makes a singular matrix regular, else 0; which stay singular)."""
        mean = matrix.diagonal(dim1=-2, dim2=-1).mean(-1)
        unit = matrix.shape[-1] * torch.finfo(matrix.dtype).eps * torch.where(mean > 0, mean, 1)
        jitter, left = torch.zeros_like(unit), singular
        for rung in self.RUNGS:
            jitter = torch.where(left, rung * unit, jitter)
            raised = matrix + jitter[..., None, None] * eye
            factor, info = torch.linalg.cholesky_ex(raised)
            whole = torch.zeros_like(left)  # measures all coordinates alike, as the jitter does
            left = left & self._meaningless(factor, info, raised, whole)
        return torch.where(left, 0, jitter), left

    @staticmethod
    def _meaningless(factor: Tensor, info: Tensor, matrix: Tensor, penalised: Tensor) -> Tensor:
        """Return whether there is no factor, or one with pivots of the size of rounding errors. With a ridge a pivot is
        compared with its own diagonal entry, since coordinates may differ in scale; without one with the largest."""
        pivots = torch.diagonal(factor, dim1=-2, dim2=-1).square()
        whole = torch.diagonal(matrix, dim1=-2, dim2=-1)
        whole = torch.where(penalised[..., None], whole, whole.amax(-1, keepdim=True))
        return (info != 0) | ~(pivots > whole * _rtol(factor)).all(-1)


def _rtol(matrix: Tensor) -> float:
    return float(matrix.shape[-1] * torch.finfo(matrix.dtype).eps * 10)
