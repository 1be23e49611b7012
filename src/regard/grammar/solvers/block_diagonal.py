"""Solver that keeps only the diagonal blocks of the covariance."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ...checks import ArgumentError, whole
from ..systems import Solved, SolveStatus, System
from .base import Solver, direct_solution, solvers
from .cholesky import Cholesky


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
            factored = Cholesky().factor(parts, b, ridge)
            value, status = factored.value, factored.status
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
