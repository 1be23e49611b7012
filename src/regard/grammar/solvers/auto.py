"""The default solver, which chooses among the others."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..systems import Solved, SolveStatus, System
from .base import Solver, has_ridge, solvers
from .cholesky import Cholesky
from .conjugate_gradient import ConjugateGradient


@solvers.register("auto")
@dataclass(frozen=True)
class Auto(Solver):
    """Choose the cheapest of: systems in the space of the weighted keys, Cholesky, conjugate gradients.

    If weights can be zero (compact kernels, thresholds, short windows), every row is solved separately. A row with at
    most D weighted keys, for D coordinates, is solved in the space of these keys (without numba also a row with up to
    2 D of many keys). Other rows are solved by Cholesky. If weights cannot be zero, Cholesky solves systems of at most
    16 coordinates, of few queries, and of blocks in which a query sees at most 2 D keys. Conjugate gradients solve the
    rest, and Cholesky the rows that did not converge. `impl="reference"` always uses Cholesky.

    Cost: that of the choice; at 64 coordinates Cholesky costs about as much as 10 steps of conjugate gradients.
    """

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
        # The solution of a singular system can be so long that rounding hides the residual.
        failed = (solved.status != SolveStatus.OK) | ~has_ridge(system.ridge, solved.status)
        if not bool(failed.any()):
            return solved
        direct = Cholesky().solve(system, right)  # of all rows, used for these: no row depends on another
        direct.statistics["iterations"] = solved.statistics["iterations"]
        statistics = {name: torch.where(failed, direct.statistics[name], x) for name, x in solved.statistics.items()}
        value = torch.where(failed[..., None], direct.value, solved.value)
        return Solved(value, torch.where(failed, direct.status, solved.status), statistics)
