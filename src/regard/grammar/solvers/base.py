"""Solvers of the systems (C_i + ridge_i) t_i = b_i of the local linear model, one system per query.

A solver gets a `System`, which can form its matrices or apply them, and returns a status for every row.

Legend: as in `regard.grammar.systems`.
"""

from abc import ABC, abstractmethod
from typing import Any, ClassVar

import torch
from torch import Tensor

from ...registry import Registry
from ..systems import LIMIT, Solved, SolveStatus, System

solvers: Registry[Any] = Registry("solver", "regard.solvers")


class Solver(ABC):
    """Base class of solvers of the linear systems in local linear models."""

    name: ClassVar[str]
    exact: ClassVar[bool] = True  # whether autograd differentiates `solve`; else gradients are those of the solution
    needs_ridge: ClassVar[bool] = False  # whether ridge 0 raises an error

    @abstractmethod
    def solve(self, system: System, right: Tensor) -> Solved:
        """Solve (C + ridge) t = `right` [..., D]."""


@torch.no_grad()
def direct_solution(matrix: Tensor, right: Tensor, value: Tensor, status: Tensor, jitter: Any = None) -> Solved:
    """Return the direct solution `value` of `matrix` x = `right` with its residual |b - A x| / |b|,
    INACCURATE instead of OK if that is large."""
    size = torch.linalg.vector_norm(right, dim=-1)
    left = torch.linalg.vector_norm(right - (matrix @ value[..., None])[..., 0], dim=-1)
    none = torch.zeros_like(size)
    residual = torch.where(size > 0, left / torch.where(size > 0, size, 1), 0)
    status = torch.where((status == 0) & ~(residual <= LIMIT), int(SolveStatus.INACCURATE), status)
    jitter = none if jitter is None else jitter
    return Solved(value, status.int(), {"iterations": none, "residual": residual, "jitter": jitter})


def has_ridge(ridge: float | Tensor, like: Tensor) -> Tensor:
    """Return which systems have a ridge above zero in every coordinate, as booleans of the shape of `like`."""
    if isinstance(ridge, Tensor):
        return (ridge.detach().amin(-1) > 0).expand(like.shape)
    return torch.full_like(like, ridge > 0, dtype=torch.bool)
