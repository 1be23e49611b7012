"""The clipped geometric kernel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ...checks import number
from .base import Params, PointwiseKernel, kernels


@kernels.register("clipped-geometric")
@dataclass(frozen=True)
class ClippedGeometric(PointwiseKernel):
    """K(z) = 1 / (1 + eps - min(z, limit) / limit): positive without exponentials, constant above the limit.

    Kernel-selection paper, Table 1 (M = 300, eps = 1e-4). z is the plain dot product; `limit` acts as its scale.
    """

    limit: float = 300.0
    eps: float = 1e-4
    name: ClassVar[str] = "clipped-geometric"
    nonnegative: ClassVar[bool] = True

    def __post_init__(self) -> None:
        number("clipped-geometric", "limit", self.limit, low=0.0, strict=True)
        number("clipped-geometric", "eps", self.eps, low=0.0, strict=True)

    def value(self, a: Tensor, params: Params) -> Tensor:
        return 1 / (self.eps + (self.limit - a.clamp(max=self.limit)) / self.limit)  # 1 + eps would round eps

    def slope(self, a: Tensor, params: Params) -> Tensor:
        return torch.where(a < self.limit, self.value(a, params).square() / self.limit, 0)
