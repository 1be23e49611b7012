"""Conjugate gradients for many rows at once, with a mask of the rows still under way."""

from __future__ import annotations

import torch
from torch import Tensor

from .systems import Solved, SolveStatus, System


def conjugate_gradients(
    system: System, right: Tensor, tol: float, limit: int, precondition: bool, restarts: int
) -> Solved:
    """t with A t = `right` [n, q, D] to a true residual |right - A t| <= tol |right|, or to what rounding leaves of it,
    eps (|A| |t| + |right|), in at most `limit` steps a row."""
    run = _Run(system, right, tol, precondition)
    for _ in range(restarts + 1):
        run.begin()
        while run.steps < limit and run.go():
            pass
        if run.settle() or run.steps >= limit:
            break
    return run.result()


class _Run:
    """The vectors of all rows. What is done row by row never mixes rows, and a row that is through stands still, so
    that no row's answer depends on when another's comes."""

    def __init__(self, system: System, right: Tensor, tol: float, precondition: bool) -> None:
        # Of size one, by powers of two, which round nothing: squares of very large or small keys are out of range.
        exponent = torch.frexp(right.abs().amax(-1, keepdim=True)).exponent
        self.system, self.exponent, self.right = system, exponent, torch.ldexp(right, -exponent)
        right = self.right
        self.size = _norm(right)
        self.goal = tol * self.size
        self.x = torch.zeros_like(right)
        self.r = right.clone()
        self.residual = self.size.clone()
        self.norm = torch.zeros_like(self.size)  # of A, from below: the largest of the quotients that were seen
        self.count = torch.zeros_like(self.size)
        self.active = self.size > 0
        self.steps = 0
        self.factor = self._factor() if precondition else None

    def _factor(self) -> Tensor | None:
        near = self.system.near()
        if near is None:
            return None
        factor, info = torch.linalg.cholesky_ex(near)
        eye = torch.eye(near.shape[-1], dtype=near.dtype, device=near.device)
        return torch.where((info == 0)[..., None, None], factor, eye)

    def _divided(self, r: Tensor) -> Tensor:
        if self.factor is None:
            return r
        return torch.cholesky_solve(r.transpose(-1, -2), self.factor).transpose(-1, -2)

    def begin(self) -> None:
        """Start from the residual as it is."""
        z = self._divided(self.r)
        self.d = z.clone()
        self.rz = _dot(self.r, z)

    def go(self) -> bool:
        """One step of every row that is not through; False where there is none."""
        if not bool(self.active.any()):
            return False
        image = self.system.apply(self.d)
        curvature = _dot(self.d, image)
        sound = self.active & (curvature > 0) & (curvature < torch.inf)
        length = torch.where(sound, self.rz / torch.where(sound, curvature, 1), 0)
        quotient = curvature / torch.where(sound, _dot(self.d, self.d), 1)
        self.norm = torch.where(sound, torch.maximum(self.norm, quotient), self.norm)
        self.x.addcmul_(length, self.d)
        self.r.addcmul_(length, image, value=-1)
        self.count += self.active
        self.steps += 1
        self.residual = torch.where(sound, _norm(self.r), self.residual)
        self.active = sound & (self.residual > self.goal)
        z = self._divided(self.r)
        rz = _dot(self.r, z)
        self.d.mul_(torch.where(self.active, rz / torch.where(self.rz > 0, self.rz, 1), 0)).add_(z)
        self.rz = rz
        return True

    def settle(self) -> bool:
        """Look at the true residuals; rows whose own is still too large go on from it. True where there are none."""
        true = self.right - self.system.apply(self.x)
        self.residual = _norm(true)
        floor = 4 * torch.finfo(true.dtype).eps * (self.norm * _norm(self.x) + self.size)
        self.active = self.residual > torch.maximum(self.goal, floor)
        self.r = torch.where(self.active, true, 0)
        return not bool(self.active.any())

    def result(self) -> Solved:
        size = torch.where(self.size > 0, self.size, 1)
        status = torch.where(self.active, int(SolveStatus.UNCONVERGED), 0).int()[..., 0]
        found = {"iterations": self.count, "residual": self.residual / size, "jitter": torch.zeros_like(size)}
        return Solved(torch.ldexp(self.x, self.exponent), status, {name: x[..., 0] for name, x in found.items()})


def _dot(a: Tensor, b: Tensor) -> Tensor:
    return (a * b).sum(-1, keepdim=True)


def _norm(a: Tensor) -> Tensor:
    return torch.linalg.vector_norm(a, dim=-1, keepdim=True)
