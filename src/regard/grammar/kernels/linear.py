"""The linear kernel: the weight is the score."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from .base import Params, PointwiseKernel, kernels


@kernels.register("linear")
@dataclass(frozen=True)
class Linear(PointwiseKernel):
    """K(a) = a, signed: the associative matrix memory. Kernel-selection paper, equations 9-12 and Table 1.

    Non-negative only where the similarity and the bias make it so (`fixed(bias=1)` on a cosine, say).
    """

    name: ClassVar[str] = "linear"
    affine: ClassVar[bool] = True  # K(a) = a: sums over keys can be made before a query is known
    scaled: ClassVar[bool] = True
    nonnegative: ClassVar[bool] = False

    def value(self, a: Tensor, params: Params) -> Tensor:
        return a

    def slope(self, a: Tensor, params: Params) -> Tensor:
        return torch.ones_like(a)
