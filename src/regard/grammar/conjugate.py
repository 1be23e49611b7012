"""Conjugate gradients for many rows at once, with a mask of the rows still under way.

Legend: [..., q] rows; D coordinates.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .systems import Solved, SolveStatus, System


def conjugate_gradients(
    system: System, right: Tensor, tol: float, limit: int, precondition: bool, restarts: int
) -> Solved:
    """t with A t = `right` [..., q, D] to a true residual |right - A t| <= tol |right|, or to what rounding leaves of
    it, 2 eps (s |t| + |right|) with s the size of the terms that A sums, in at most `limit` steps a row."""
    inverse = _inverse(system) if precondition else None
    rows = _Rows.begin(right, tol)
    for _ in range(restarts + 1):
        rows.divide(inverse)
        _iterate(system, rows, inverse, limit)
        if rows.settle(system, limit):
            break
    size = torch.where(rows.size > 0, rows.size, 1)
    residual = rows.rr.sqrt() / size
    status = torch.where(rows.active, int(SolveStatus.UNCONVERGED), 0).int()
    found = {"iterations": rows.count, "residual": residual, "jitter": torch.zeros_like(size)}
    return Solved(rows.x, status[..., 0], {name: x[..., 0] for name, x in found.items()})


def _inverse(system: System) -> Tensor | None:
    """Of one matrix for all rows; the identity where that is singular."""
    near = system.near()
    if near is None:
        return None
    factor, info = torch.linalg.cholesky_ex(near)
    eye = torch.eye(near.shape[-1], dtype=near.dtype, device=near.device)
    sound = (info == 0)[..., None, None]
    return torch.where(sound, torch.cholesky_inverse(torch.where(sound, factor, eye)), eye)


def _iterate(system: System, rows: _Rows, inverse: Tensor | None, limit: int) -> None:
    """Steps until no row is active. All rows are in every product: products of fewer rows may round otherwise, and not
    a bit of one row is to hang on how many others are in work. Each has `limit` steps of its own for the same reason.
    """
    rows.active &= rows.count < limit
    while bool(rows.active.any()):
        rows.step(system, inverse, limit)


@dataclass
class _Rows:
    """The vectors [..., D] and numbers [..., 1] of rows. A row that is through stands still.

    x, r, d: solution, residual and direction; rr = r . r and rz = r . z, z the residual divided by the preconditioner;
    `goal` of rr; `count` of steps.
    """

    right: Tensor
    x: Tensor
    r: Tensor
    d: Tensor
    size: Tensor
    goal: Tensor
    rr: Tensor
    rz: Tensor
    count: Tensor
    active: Tensor

    @classmethod
    def begin(cls, right: Tensor, tol: float) -> _Rows:
        rr = _dot(right, right)
        zero, none = torch.zeros_like(right), torch.zeros_like(rr)
        return cls(right, zero, right.clone(), right.clone(), rr.sqrt(), tol**2 * rr, rr, rr, none, rr > 0)

    def divide(self, inverse: Tensor | None) -> None:
        """Take the residual, divided by the preconditioner, as the direction."""
        self.d = self.r.clone() if inverse is None else self.r @ inverse
        self.rz = _dot(self.r, self.d)

    def step(self, system: System, inverse: Tensor | None, limit: int) -> None:
        """One step of every active row."""
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
        """Look at the true residuals; rows whose own is still too large go on from it. True where none can."""
        self.r = self.right - system.apply(self.x)
        # Every step lowers x.Ax / 2 - b.x from its 0 at x = 0; where it lies above, rounding has blown x up.
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
