"""The geometric kernel, plain and clipped."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ...checks import number
from .base import Kernel, Params, kernels


@kernels.register("geometric")
@dataclass(frozen=True)
class Geometric(Kernel):
    """K(z) = 1 / (1 - z) for z < 1, the geometric series; needs the cosine similarity.

    Kernel-selection paper, Table 1. With the paper's eps = 1e-3 a unit key equal to its query has about 1000 times
    the weight of an orthogonal one; use `exclude_self` in self-attention.
    """

    below: ClassVar[float] = 1.0  # upper limit of the similarity

    def value(self, a: Tensor, params: Params) -> Tensor:
        return 1 / self._gap(a)

    def slope(self, a: Tensor, params: Params) -> Tensor:
        gap = self._gap(a)
        return torch.where(1 - a < gap, 0, gap**-2)

    @staticmethod
    def _gap(a: Tensor) -> Tensor:
        """Return 1 - z, at least eps: a rounded cosine can exceed 1."""
        return (1 - a).clamp(min=torch.finfo(a.dtype).eps)


@kernels.register("clipped-geometric")
@dataclass(frozen=True)
class ClippedGeometric(Kernel):
    """K(z) = 1 / (1 + eps - min(z, limit) / limit): positive without exponentials, constant above the limit.

    Kernel-selection paper, Table 1 (M = 300, eps = 1e-4). z is the plain dot product; `limit` acts as its scale.
    """

    limit: float = 300.0
    eps: float = 1e-4

    def __post_init__(self) -> None:
        number("clipped-geometric", "limit", self.limit, low=0.0, strict=True)
        number("clipped-geometric", "eps", self.eps, low=0.0, strict=True)

    def value(self, a: Tensor, params: Params) -> Tensor:
        return 1 / (self.eps + (self.limit - a.clamp(max=self.limit)) / self.limit)  # 1 + eps would round eps

    def slope(self, a: Tensor, params: Params) -> Tensor:
        return torch.where(a < self.limit, self.value(a, params).square() / self.limit, 0)
