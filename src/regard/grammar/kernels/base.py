"""Kernels: how weight falls with the score.

A kernel is a function of the excess a = z - theta of a score over its row's threshold; the bandwidth rule
says where theta is. Two views of the same function keep every row in range whatever the scores:

* `relative(d, reach)`: K(reach - d) / K(reach), the value at distance d = max z - z below the best score over
  the value at the best, where reach = max z - theta. Scale-free, so normalised rows use it. Where a rule sets
  no edge, reach is infinite, and only an exponential is a function of d alone.
* `value(a)`: the value itself, for unnormalised sums and for kernels that are not a function of distance.

Legend: d, a, z [..., Tq, Tk]; reach and row parameters [..., Tq, 1] or numbers. Hidden keys have z = -inf,
d = +inf, and weigh 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, TypeAlias, runtime_checkable

import torch
from torch import Tensor

from ...registry import Registry

kernels: Registry[Any] = Registry("kernel", "regard.kernels")

Number: TypeAlias = "float | Tensor"

Params: TypeAlias = Mapping[str, Number]


@dataclass(frozen=True)
class ParamInfo:
    """A number that can be learned: its default and where it may lie (low excluded where `strict`)."""

    default: Number
    low: float | None = None
    strict: bool = False


@runtime_checkable
class Kernel(Protocol):
    """How weight falls with the score."""

    name: ClassVar[str]
    compact: ClassVar[bool]  # exactly zero at and below the threshold
    vanishes: ClassVar[bool]  # goes to zero continuously there, so no key pops in or out
    ranked: ClassVar[bool]  # has `relative` and `relative_slope`: compact, or exponential (see the module)
    scaled: ClassVar[bool]  # whether a scale of the scores has a meaning
    nonnegative: bool
    bandwidth: ClassVar[str]  # the rule meant where none is named

    @property
    def params(self) -> Mapping[str, ParamInfo]:
        """Numbers of the kernel that can be learned."""

    def value(self, a: Tensor, params: Params) -> Tensor:
        """K(a)."""

    def slope(self, a: Tensor, params: Params) -> Tensor:
        """dK/da."""


def least_reach(dtype: torch.dtype) -> float:
    """The least `reach` by which slopes are divided: quotients of numbers below it would overflow."""
    info = torch.finfo(dtype)
    return info.tiny / info.eps


class RankedKernel:
    """Kernels that are a function of the distance to the best score."""

    ranked: ClassVar[bool] = True
    scaled: ClassVar[bool] = True
    nonnegative: ClassVar[bool] = True
    own_slope: ClassVar[bool] = False
    """Whether the kernel is its own derivative."""

    @property
    def params(self) -> Mapping[str, ParamInfo]:
        return {}


class PointwiseKernel:
    """Kernels of the score itself: only a fixed bandwidth has a meaning for them."""

    ranked: ClassVar[bool] = False
    scaled: ClassVar[bool] = False
    compact: ClassVar[bool] = False
    vanishes: ClassVar[bool] = False
    bandwidth: ClassVar[str] = "fixed"

    @property
    def params(self) -> Mapping[str, ParamInfo]:
        return {}
