"""The Gaussian kernel: softmax."""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from .base import Number, Params, RankedKernel, kernels


@kernels.register("gaussian")
@dataclass(frozen=True)
class Gaussian(RankedKernel):
    """K(a) = exp(a): softmax under the fixed rule."""

    own_slope: ClassVar[bool] = True

    def relative(self, d: Tensor, reach: Number, params: Params) -> Tensor:
        w = torch.exp(-d) if torch.is_grad_enabled() else d.neg().exp_()
        return _inside(w, d, reach)

    def relative_slope(self, d: Tensor, reach: Number, params: Params) -> Tensor:
        return _inside(torch.exp(-d), d, reach)

    def log_peak(self, top: Tensor, reach: Tensor, params: Params) -> Tensor:
        return top

    def value(self, a: Tensor, params: Params) -> Tensor:
        return torch.exp(a)

    slope = value


def _inside(w: Tensor, d: Tensor, reach: Number) -> Tensor:
    """Return w where d < reach, else 0, without a comparison if reach is infinite."""
    if isinstance(reach, float) and math.isinf(reach):
        return w
    return torch.where(d < reach, w, 0)
