"""Conjugate gradients for many rows at once, with a mask of the rows still under way.

Legend: n groups of q rows; m of them still in work; D coordinates.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from .systems import Solved, SolveStatus, System

SHARE = 0.7
"""Rows in work of those at hand, below which the others are left out of the products."""
STEP = 16
"""Rows are left out by so many, so that products of fewer rows are made the same way: not a bit of one row hangs on how
many others are in work."""


def conjugate_gradients(
    system: System, right: Tensor, tol: float, limit: int, precondition: bool, restarts: int
) -> Solved:
    """t with A t = `right` [..., q, D] to a true residual |right - A t| <= tol |right|, or to what rounding leaves of
    it, eps (|A| |t| + |right|), in at most `limit` steps a row."""
    inverse = _inverse(system) if precondition else None
    rows = _Rows.begin(right, tol)
    for _ in range(restarts + 1):
        rows.divide(inverse)
        _iterate(system, rows, inverse, limit)
        if rows.settle(system) or not bool((rows.active & (rows.count < limit)).any()):
            break
    size = torch.where(rows.size > 0, rows.size, 1)
    status = torch.where(rows.active, int(SolveStatus.UNCONVERGED), 0).int()
    found = {"iterations": rows.count, "residual": rows.residual / size, "jitter": torch.zeros_like(size)}
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
    """Steps until no row is active; those that are through are left out of the products by and by."""
    part, at, parts = rows, None, system
    while bool(part.active.any()):
        part.step(parts, inverse, limit)
        most = int(part.active.sum(-2).max())
        keep = -(-most // STEP) * STEP
        if 0 < keep <= SHARE * part.x.shape[-2]:
            if at is not None:
                rows.put(at, part)
            alive = rows.active[..., 0].to(torch.int8)
            at = alive.argsort(dim=-1, descending=True, stable=True)[..., :keep]
            part, parts = rows.take(at), system.take(at)
    if at is not None:
        rows.put(at, part)


@dataclass
class _Rows:
    """The vectors [..., D] and numbers [..., 1] of rows. A row that is through stands still.

    x, r, d: solution, residual and direction; `size` of the right side, `goal` of the residual; rz = r . z; `norm` of
    A, from below; `count` of steps.
    """

    right: Tensor
    x: Tensor
    r: Tensor
    d: Tensor
    size: Tensor
    goal: Tensor
    rz: Tensor
    norm: Tensor
    residual: Tensor
    count: Tensor
    active: Tensor

    @classmethod
    def begin(cls, right: Tensor, tol: float) -> _Rows:
        size = _norm(right)
        zero, none = torch.zeros_like(right), torch.zeros_like(size)
        return cls(
            right, zero, right.clone(), zero.clone(), size, tol * size, none, none, size.clone(), none.clone(), size > 0
        )

    def take(self, at: Tensor) -> _Rows:
        """Rows `at` [..., m]."""
        return _Rows(**{f.name: _gather(getattr(self, f.name), at) for f in fields(self)})

    def put(self, at: Tensor, part: _Rows) -> None:
        """Rows `at` become those of `part`."""
        for f in fields(self):
            own, new = getattr(self, f.name), getattr(part, f.name)
            setattr(self, f.name, own.scatter(-2, at[..., None].expand(new.shape), new))

    def divide(self, inverse: Tensor | None) -> None:
        """Take the residual, divided by the preconditioner, as the direction."""
        self.d = self.r.clone() if inverse is None else self.r @ inverse
        self.rz = _dot(self.r, self.d)

    def step(self, system: System, inverse: Tensor | None, limit: int) -> None:
        """One step of every active row."""
        image = system.apply(self.d)
        curvature = _dot(self.d, image)
        sound = self.active & (curvature > 0) & (curvature < torch.inf) & (self.count < limit)
        length = torch.where(sound, self.rz / torch.where(sound, curvature, 1), 0)
        quotient = curvature / torch.where(sound, _dot(self.d, self.d), 1)
        self.norm = torch.where(sound, torch.maximum(self.norm, quotient), self.norm)
        self.x = torch.addcmul(self.x, length, self.d)
        self.r = torch.addcmul(self.r, length, image, value=-1)
        self.count = self.count + sound
        self.residual = torch.where(sound, _norm(self.r), self.residual)
        self.active = sound & (self.residual > self.goal)
        z = self.r if inverse is None else self.r @ inverse
        rz = _dot(self.r, z)
        turn = torch.where(self.active & (self.rz > 0), rz / torch.where(self.rz > 0, self.rz, 1), 0)
        self.d = torch.addcmul(z, turn, self.d)
        self.rz = rz

    def settle(self, system: System) -> bool:
        """Look at the true residuals; rows whose own is still too large go on from it. True where there are none."""
        true = self.right - system.apply(self.x)
        self.residual = _norm(true)
        floor = 16 * torch.finfo(true.dtype).eps * (self.norm * _norm(self.x) + self.size)
        self.active = self.residual > torch.maximum(self.goal, floor)
        self.r = torch.where(self.active, true, 0)
        return not bool(self.active.any())


def _gather(x: Tensor, at: Tensor) -> Tensor:
    return x.gather(-2, at[..., None].expand(*at.shape, x.shape[-1]))


def _dot(a: Tensor, b: Tensor) -> Tensor:
    return (a * b).sum(-1, keepdim=True)


def _norm(a: Tensor) -> Tensor:
    return torch.linalg.vector_norm(a, dim=-1, keepdim=True)
