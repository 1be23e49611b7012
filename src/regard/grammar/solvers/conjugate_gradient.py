"""Solver by conjugate gradients, for many rows at once with a mask of the active rows.

Legend: [..., q] rows; D coordinates.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ...checks import flag, number, optional_whole
from ..systems import LIMIT, Solved, SolveStatus, System
from .base import Solver, solvers


@solvers.register("cg")
@dataclass(frozen=True)
class ConjugateGradient(Solver):
    """Solve by conjugate gradients without forming matrices. A row ends when its true residual |b - A t| is at most
    `tol` |b|, or as small as the precision allows: 2 eps (s |t| + |b|), s the size of the terms that A sums.

    Args:
        max_iter: maximum number of steps. Default 4 D. 0 gives t = 0, the local constant model.
        tol: relative residual. Default 1e-6 in float32 and 1e-10 in float64. On the data of `regard reproduce
            lla-numerics` the relative error of the output is at most 0.8 tol, that of a row at most 3.6 tol.
        precondition: precondition with one factored matrix per block, of the keys that all its rows see. Takes fewer
            steps for badly conditioned keys, more in early blocks.

    Cost: 4 D per step and pair.
    """

    max_iter: int | None = None
    tol: float | None = None
    precondition: bool = False

    exact: ClassVar[bool] = False
    needs_ridge: ClassVar[bool] = True

    RESTARTS: ClassVar[int] = 3
    """Number of restarts for rows whose recurrence ended before the true residual was small."""

    def __post_init__(self) -> None:
        optional_whole("cg", "max_iter", self.max_iter, 0, 2**31)
        if self.tol is not None:
            number("cg", "tol", self.tol, low=0.0, strict=True)
            object.__setattr__(self, "tol", number("cg", "tol", self.tol, high=1.0))
        flag("cg", "precondition", self.precondition)

    @torch.no_grad()
    def solve(self, system: System, right: Tensor) -> Solved:
        tol = self.tol if self.tol is not None else (1e-10 if right.dtype == torch.float64 else 1e-6)
        limit = 4 * right.shape[-1] if self.max_iter is None else self.max_iter
        if right.is_meta:  # no residual to read
            none = torch.zeros_like(right[..., 0])
            statistics = dict.fromkeys(("iterations", "residual", "jitter"), none)
            return Solved(torch.zeros_like(right), none.int(), statistics)
        inverse = _inverse(system) if self.precondition else None
        rows = _Rows(right, tol)
        for _ in range(self.RESTARTS + 1):
            rows.divide(inverse)
            rows.active &= rows.count < limit
            # All rows take part in every product: a product of fewer may round differently, and no bit of a row may
            # depend on how many others are active.
            while bool(rows.active.any()):
                rows.step(system, inverse, limit)
            if rows.settle(system, limit):
                break
        size = torch.where(rows.size > 0, rows.size, 1)
        residual = rows.rr.sqrt() / size
        hidden = (rows.rr > rows.goal) & (residual > LIMIT)  # by rounding, where the row is not active
        status = torch.where(hidden, int(SolveStatus.INACCURATE), 0).int()
        status = torch.where(rows.active, int(SolveStatus.UNCONVERGED), status)
        measures = {"iterations": rows.count, "residual": residual, "jitter": torch.zeros_like(size)}
        return Solved(rows.x, status[..., 0], {name: x[..., 0] for name, x in measures.items()})


def _inverse(system: System) -> Tensor | None:
    """Return the inverse of the preconditioner; the identity if it is singular, None if there is none."""
    near = system.near()
    if near is None:
        return None
    factor, info = torch.linalg.cholesky_ex(near)
    eye = torch.eye(near.shape[-1], dtype=near.dtype, device=near.device)
    sound = (info == 0)[..., None, None]
    return torch.where(sound, torch.cholesky_inverse(torch.where(sound, factor, eye)), eye)


class _Rows:
    """State of the iteration: vectors [..., D] and numbers [..., 1] per row. Rows that ended no longer change.

    x, r, d: solution, residual and direction; rr = r . r and rz = r . z with z the preconditioned residual; `goal` for
    rr; `count` of steps.
    """

    def __init__(self, right: Tensor, tol: float) -> None:
        self.right, self.x, self.r, self.d = right, torch.zeros_like(right), right.clone(), right.clone()
        self.rr = self.rz = _dot(right, right)
        self.size, self.goal = self.rr.sqrt(), tol**2 * self.rr
        self.count, self.active = torch.zeros_like(self.rr), self.rr > 0

    def divide(self, inverse: Tensor | None) -> None:
        """Set the direction to the preconditioned residual."""
        self.d = self.r.clone() if inverse is None else self.r @ inverse
        self.rz = _dot(self.r, self.d)

    def step(self, system: System, inverse: Tensor | None, limit: int) -> None:
        """Take one step in every active row."""
        image = system.apply(self.d)
        curvature = _dot(self.d, image)
        sound = self.active & (curvature > 0)
        length = torch.where(sound, self.rz / curvature, 0)
        self.x.addcmul_(length, self.d)
        self.r.addcmul_(length, image, value=-1)
        self.count += sound
        self.rr = _dot(self.r, self.r)
        self.active = sound & (self.rr > self.goal) & (self.count < limit)
        z = self.r if inverse is None else self.r @ inverse
        rz = self.rr if inverse is None else _dot(self.r, z)
        self.d.mul_(torch.where(self.active, rz / self.rz, 0)).add_(z)
        self.rz = rz

    def settle(self, system: System, limit: int) -> bool:
        """Compute the true residuals and reactivate rows whose residual is too large. Return True if none is left."""
        self.r = self.right - system.apply(self.x)
        # Every step lowers x.Ax / 2 - b.x from 0 at x = 0. If it is above 0, rounding has made x useless: start again.
        lost = ~(_dot(self.x, self.right + self.r) >= 0)
        if bool(lost.any()):
            self.x, self.r = torch.where(lost, 0, self.x), torch.where(lost, self.right, self.r)
        self.rr = _dot(self.r, self.r)
        floor = 2 * torch.finfo(self.r.dtype).eps * (system.terms() * _dot(self.x, self.x).sqrt() + self.size)
        self.active = ~(self.rr <= torch.maximum(self.goal, floor**2))
        self.r = torch.where(self.active, self.r, 0)
        return not bool((self.active & (self.count < limit)).any())


def _dot(a: Tensor, b: Tensor) -> Tensor:
    return (a * b).sum(-1, keepdim=True)
