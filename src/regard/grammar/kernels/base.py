"""Kernels: weight as a function of the score.

A kernel is a function of the excess a = z - theta of a score over its row's threshold theta, which the thresholding
rule sets. It has two forms:

* `relative(d, reach)`: K(reach - d) / K(reach), the value at distance d = max z - z below the largest score relative
  to the value at the largest, with reach = max z - theta. Normalised rows use it, since it never overflows. Without a
  threshold, reach is infinite; then only an exponential is a function of d alone.
* `value(a)`: the value itself, for unnormalised sums and for kernels that do not depend on the distance.

Legend: d, a, z [..., Tq, Tk]; reach and row parameters [..., Tq, 1] or numbers. Masked keys have z = -inf, d = +inf
and weight 0.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

import torch
from torch import Tensor

from ...registry import Registry

kernels: Registry[Any] = Registry("kernel", "regard.kernels")

Number: TypeAlias = float | Tensor

Params: TypeAlias = Mapping[str, Number]


@dataclass(frozen=True)
class ParamInfo:
    """A parameter that can be learned: its default and lower limit (excluded if `strict`)."""

    default: Number
    low: float | None = None
    strict: bool = False


class Kernel(ABC):
    """Weight as a function of the score. By default of the score itself, which only the fixed rule can use."""

    name: ClassVar[str]
    compact: ClassVar[bool] = False  # exactly zero at and below the threshold
    vanishes: ClassVar[bool] = False  # continuous at the threshold
    ranked: ClassVar[bool] = False  # has `relative` and `relative_slope`: compact, or exponential (see the module)
    scaled: ClassVar[bool] = False  # whether a scale of the scores is accepted
    nonnegative: ClassVar[bool] = True
    bandwidth: ClassVar[str] = "fixed"  # the default rule
    # Optional: numba_relative(d, reach), (relative, relative_slope) of one key in code that numba compiles. With it
    # impl="cpu" runs a kernel that is compact, continuous and without parameters. triton_relative(d, reach) is the same
    # for blocks of keys, in code that Triton compiles, where `tl` is triton.language: for impl="triton".

    @property
    def params(self) -> Mapping[str, ParamInfo]:
        """The learnable parameters of the kernel."""
        return {}

    @abstractmethod
    def value(self, a: Tensor, params: Params) -> Tensor:
        """Return K(a)."""

    @abstractmethod
    def slope(self, a: Tensor, params: Params) -> Tensor:
        """Return dK/da."""


def least_reach(dtype: torch.dtype) -> float:
    """Return the smallest `reach` by which slopes are divided; quotients by smaller numbers would overflow."""
    info = torch.finfo(dtype)
    return info.tiny / info.eps


class RankedKernel(Kernel):
    """Kernels that are a function of the distance to the largest score."""

    ranked: ClassVar[bool] = True
    scaled: ClassVar[bool] = True
    own_slope: ClassVar[bool] = False
    """Whether the kernel is its own derivative."""
