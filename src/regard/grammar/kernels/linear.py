"""The linear kernel: the weight is the score."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from .base import Kernel, Params, kernels


@kernels.register("linear")
@dataclass(frozen=True)
class Linear(Kernel):
    """K(a) = a, signed: linear attention. Kernel-selection paper, equations 9-12 and Table 1.

    Non-negative only with a similarity and bias that make it so, such as `fixed(bias=1)` and a cosine.
    """

    affine: ClassVar[bool] = True  # K(a) = a: sums over keys do not depend on the query
    scaled: ClassVar[bool] = True
    nonnegative: ClassVar[bool] = False

    def value(self, a: Tensor, params: Params) -> Tensor:
        return a

    def slope(self, a: Tensor, params: Params) -> Tensor:
        return torch.ones_like(a)
