"""The solver that costs least."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..systems import Solved, SolveStatus, System
from .base import has_ridge, solvers
from .cholesky import Cholesky
from .conjugate_gradient import ConjugateGradient


@solvers.register("auto")
@dataclass(frozen=True)
class Auto:
    """What costs least: systems among the weighted keys for rows with few of them, Cholesky, or conjugate gradients.

    Weights that vanish (compact kernels, thresholds, short windows) have every row solved by itself: among its weighted
    keys where they are no more than its coordinates (than 2 D, of many keys), else by Cholesky. Others go by Cholesky
    for 16 coordinates and fewer, for few queries, and in blocks with queries that see no more than 2 D keys; else by
    conjugate gradients, with Cholesky for the rows that did not converge. `impl="reference"` takes Cholesky for all.

    Cost: that of what it chooses; at 64 coordinates about 10 steps of conjugate gradients cost as much as Cholesky.
    """

    name: ClassVar[str] = "auto"
    exact: ClassVar[bool] = True
    needs_ridge: ClassVar[bool] = False

    SMALL: ClassVar[int] = 16

    def solve(self, system: System, right: Tensor) -> Solved:
        dim = right.shape[-1]
        free = isinstance(system.ridge, float) and system.ridge == 0.0
        if system.sparse and not free:
            return system.by_row(right)
        short = system.fewest is None or system.fewest <= 2 * dim
        if free or short or dim <= self.SMALL or right.shape[-2] < self.SMALL:
            return Cholesky().solve(system, right)
        solved = ConjugateGradient().solve(system, right)
        # A singular system can have a long solution whose rounding hides any residual.
        failed = (solved.status == SolveStatus.UNCONVERGED) | ~has_ridge(system.ridge, solved.status)
        if not bool(failed.any()):
            return solved
        direct = Cholesky().solve(system, right)  # for these rows alone: no row's answer depends on another's fate
        direct.statistics["iterations"] = solved.statistics["iterations"]
        statistics = {name: torch.where(failed, direct.statistics[name], x) for name, x in solved.statistics.items()}
        value = torch.where(failed[..., None], direct.value, solved.value)
        return Solved(value, torch.where(failed, direct.status, solved.status), statistics)
