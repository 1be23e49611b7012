"""Solution by Cholesky factors, of whole matrices or of their diagonal blocks, and solutions that the caller gives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ...checks import ArgumentError, whole
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
        """Return (the first jitter that makes a singular matrix regular, else 0; which stay singular)."""
        mean = matrix.diagonal(dim1=-2, dim2=-1).mean(-1)
        unit = matrix.shape[-1] * torch.finfo(matrix.dtype).eps * torch.where(mean > 0, mean, 1)
        eye = torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)
        found, left = torch.zeros_like(unit), singular
        for rung in self.RUNGS:
            found = torch.where(left, rung * unit, found)
            raised = matrix + found[..., None, None] * eye
            factor, info = torch.linalg.cholesky_ex(raised)
            whole = torch.zeros_like(left)  # measures all coordinates alike, as the jitter does
            left = left & self._meaningless(factor, info, raised, whole)
        return torch.where(left, 0, found), left

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


@solvers.register("block-diagonal")
@dataclass(frozen=True)
class BlockDiagonal(Solver):
    """Solve with the diagonal blocks of the covariance: in closed form for blocks of one or two coordinates, else by
    Cholesky. This is a different estimator, between attention and local linear attention; use a ridge near 1.

    Args:
        blocks: number of blocks, a divisor of D; 0 means D.

    Cost: D / blocks per pair, and D^3 / (3 blocks^2) per row.
    """

    blocks: int = 0

    def __post_init__(self) -> None:
        whole("block-diagonal", "blocks", self.blocks, 0)

    def solve(self, system: System, right: Tensor) -> Solved:
        dim = right.shape[-1]
        count = self.blocks or dim
        if dim % count:
            raise ArgumentError(f"block-diagonal: {dim} coordinates do not divide into {count} blocks; give a divisor.")
        parts, b = system.diagonal(count), right.unflatten(-1, (count, dim // count))
        if dim == count:
            value, status = self._one(parts[..., 0], b)
        elif dim == 2 * count:
            value, status = self._two(parts, b)
        else:
            ridge = system.ridge
            if isinstance(ridge, Tensor):
                ridge = ridge.expand(right.shape).unflatten(-1, (count, dim // count))
            found = Cholesky().factor(parts, b, ridge)
            value, status = found.value, found.status
        solved = direct_solution(parts.detach(), b.detach(), value.detach(), status)
        worst = {name: x.amax(-1) for name, x in solved.statistics.items()}
        finite = torch.isfinite(parts.detach()).flatten(-3).all(-1)
        status = torch.where(finite, solved.status.amax(-1), int(SolveStatus.NOT_FINITE))
        return Solved(torch.where(finite[..., None], value.flatten(-2), torch.nan), status.int(), worst)

    @staticmethod
    def _one(parts: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """Solve blocks of one coordinate: [..., g, 1] each."""
        held = parts > 0
        value = torch.where(held, b / torch.where(held, parts, 1), 0)
        return value, torch.where(held, 0, int(SolveStatus.MINIMUM_NORM))[..., 0]

    @staticmethod
    def _two(parts: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """Solve blocks of two by elimination, the larger pivot first: [..., g, 2, 2], [..., g, 2]."""
        swap = parts[..., 0, 0] < parts[..., 1, 1]
        a = torch.where(swap, parts[..., 1, 1], parts[..., 0, 0])
        d = torch.where(swap, parts[..., 0, 0], parts[..., 1, 1])
        first = torch.where(swap, b[..., 1], b[..., 0])
        second = torch.where(swap, b[..., 0], b[..., 1])
        held = a > 0
        share = torch.where(held, parts[..., 0, 1] / torch.where(held, a, 1), 0)
        rest = d - share * parts[..., 0, 1]
        sound = rest > a * torch.finfo(a.dtype).eps  # below, the remainder is rounding error
        y = torch.where(sound, (second - share * first) / torch.where(sound, rest, 1), 0)
        x = torch.where(held, first / torch.where(held, a, 1), 0) - share * y
        value = torch.stack([torch.where(swap, y, x), torch.where(swap, x, y)], -1)
        return value, torch.where(sound, 0, int(SolveStatus.MINIMUM_NORM))


@solvers.register("learned")
@dataclass(frozen=True)
class Learned(Solver):
    """Use t = -r for a given `params={"probe": r}` [B, H, Tq, D]; no cost (Parallax, Zuo et al., arXiv 2605.29157)."""

    def solve(self, system: System, right: Tensor) -> Solved:
        if system.probe is None:
            raise ArgumentError("learned: no probe was given; pass params={'probe': r} with r [B, H, Tq, D].")
        none = torch.zeros(right.shape[:-1], dtype=right.dtype, device=right.device)
        return Solved(-system.probe, none.int(), {"iterations": none, "residual": none, "jitter": none})
