"""Solver by conjugate gradients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ...checks import flag, number, optional_whole
from ..conjugate import conjugate_gradients
from ..systems import Solved, System
from .base import solvers


@solvers.register("cg")
@dataclass(frozen=True)
class ConjugateGradient:
    """Solve by conjugate gradients without forming matrices. A row ends when its true residual |b - A t| is at most
    `tol` |b| or as small as the precision allows.

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

    name: ClassVar[str] = "cg"
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
        return conjugate_gradients(system, right, tol, limit, self.precondition, self.RESTARTS)
