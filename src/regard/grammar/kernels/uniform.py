"""The uniform kernel."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from .base import Number, Params, RankedKernel, kernels


@kernels.register("uniform")
@dataclass(frozen=True)
class Uniform(RankedKernel):
    """K(a) = 1 for a > 0: equal weights above the threshold, without gradient to the scores."""

    compact: ClassVar[bool] = True
    bandwidth: ClassVar[str] = "nearest"

    def relative(self, d: Tensor, reach: Number, params: Params) -> Tensor:
        return (d < reach).to(d.dtype)

    def relative_slope(self, d: Tensor, reach: Number, params: Params) -> Tensor:
        return torch.zeros_like(d)

    def value(self, a: Tensor, params: Params) -> Tensor:
        return (a > 0).to(a.dtype)

    def slope(self, a: Tensor, params: Params) -> Tensor:
        return torch.zeros_like(a)
