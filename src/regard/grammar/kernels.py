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

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, TypeAlias, runtime_checkable

import torch
from torch import Tensor

from ..checks import ArgumentError, number
from ..registry import Registry

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


class _Ranked:
    """Kernels that are a function of the distance to the best score."""

    ranked: ClassVar[bool] = True
    scaled: ClassVar[bool] = True
    nonnegative: ClassVar[bool] = True
    own_slope: ClassVar[bool] = False
    """Whether the kernel is its own derivative."""

    @property
    def params(self) -> Mapping[str, ParamInfo]:
        return {}


@kernels.register("gaussian")
@dataclass(frozen=True)
class Gaussian(_Ranked):
    """K(a) = exp(a): with fixed bandwidth and normalised, softmax."""

    name: ClassVar[str] = "gaussian"
    compact: ClassVar[bool] = False
    vanishes: ClassVar[bool] = False
    bandwidth: ClassVar[str] = "fixed"
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
    """w where d < reach, else 0; the comparison is left out where nothing is cut off."""
    if isinstance(reach, float) and math.isinf(reach):
        return w
    return torch.where(d < reach, w, 0)


@kernels.register("polynomial")
@dataclass(frozen=True)
class Polynomial(_Ranked):
    """K(a) = [a]_+^r, the rectified polynomial: r = 1 Epanechnikov, 2 biweight, 3 triweight, any r > 0.

    Sparse-attention paper, section 2 and Proposition 1 (which holds for every r > 0).
    """

    r: float = 1.0
    name: ClassVar[str] = "polynomial"
    compact: ClassVar[bool] = True
    vanishes: ClassVar[bool] = True
    bandwidth: ClassVar[str] = "adaptive"

    def __post_init__(self) -> None:
        number("polynomial", "r", self.r, low=0.0, strict=True)
        if not 1e-3 <= self.r <= 1e12:  # beyond, the arithmetic of float32 ends before the mathematics does
            raise ArgumentError(
                f"polynomial: r is {self.r:g}, expected 0.001 <= r <= 1e12; for larger r use its limit, the gaussian "
                f"kernel, for smaller the uniform one."
            )
        object.__setattr__(self, "r", float(self.r))

    @property
    def params(self) -> Mapping[str, ParamInfo]:
        return {"r": ParamInfo(self.r, low=0.0, strict=True)}

    def relative(self, d: Tensor, reach: Number, params: Params) -> Tensor:
        return power(d, reach, params.get("r", self.r))

    def relative_slope(self, d: Tensor, reach: Number, params: Params) -> Tensor:
        r = params.get("r", self.r)
        return power(d, reach, r - 1) * (r / reach)

    def log_relative(self, d: Tensor, reach: Number) -> Tensor:
        """log(1 - d/reach) inside the support, 0 outside: the derivative of log K by r."""
        inside = d < reach
        return torch.where(inside, torch.log1p(-torch.where(inside, d, 0) / reach), 0)

    def value(self, a: Tensor, params: Params) -> Tensor:
        return _positive_power(a, params.get("r", self.r))

    def slope(self, a: Tensor, params: Params) -> Tensor:
        r = params.get("r", self.r)
        return r * _positive_power(a, r - 1)


def power(d: Tensor, reach: Number, r: Number) -> Tensor:
    """[1 - d/reach]_+^r, with r = 0 the indicator of the support.

    Integer powers up to 3 are multiplications. The general power goes by exp(r log1p(-d/reach)), whose error
    does not grow with r near the peak, where the weight is.
    """
    if isinstance(r, float) and r in (1.0, 2.0, 3.0) and not torch.is_grad_enabled():
        u = (1 - d / reach).clamp_(min=0)
        return u if r == 1.0 else (u * u if r == 2.0 else u * u * u)
    inside = d < reach
    if isinstance(r, float) and r == 0.0:
        return inside.to(d.dtype)
    x = torch.where(inside, d, 0) / reach  # where first: an infinite d must not meet a zero gradient
    if isinstance(r, float) and r in (1.0, 2.0, 3.0):
        u = torch.where(inside, 1 - x, 0)
        return u if r == 1.0 else (u * u if r == 2.0 else u * u * u)
    return torch.where(inside, torch.exp(r * torch.log1p(-x)), 0)


def _positive_power(a: Tensor, r: Number) -> Tensor:
    """[a]_+^r, 0 at and below 0 even for r <= 0."""
    inside = a > 0
    if isinstance(r, float) and r == 0.0:
        return inside.to(a.dtype)
    return torch.where(inside, torch.where(inside, a, 1) ** r, 0)


def _named(name: str, r: float) -> None:
    @kernels.register(name)
    def make() -> Polynomial:
        return Polynomial(r)

    make.__doc__ = f"The rectified polynomial kernel with r = {r:g}."


NAMED_POWERS = {"epanechnikov": 1.0, "biweight": 2.0, "triweight": 3.0}
for _name, _r in NAMED_POWERS.items():
    _named(_name, _r)


@kernels.register("uniform")
@dataclass(frozen=True)
class Uniform(_Ranked):
    """K(a) = 1 for a > 0: every key inside counts the same. Its scores have no gradient."""

    name: ClassVar[str] = "uniform"
    compact: ClassVar[bool] = True
    vanishes: ClassVar[bool] = False
    bandwidth: ClassVar[str] = "nearest"

    def relative(self, d: Tensor, reach: Number, params: Params) -> Tensor:
        return (d < reach).to(d.dtype)

    def relative_slope(self, d: Tensor, reach: Number, params: Params) -> Tensor:
        return torch.zeros_like(d)

    def value(self, a: Tensor, params: Params) -> Tensor:
        return (a > 0).to(a.dtype)

    def slope(self, a: Tensor, params: Params) -> Tensor:
        return torch.zeros_like(a)


class _Pointwise:
    """Kernels of the score itself: only a fixed bandwidth has a meaning for them."""

    ranked: ClassVar[bool] = False
    scaled: ClassVar[bool] = False
    compact: ClassVar[bool] = False
    vanishes: ClassVar[bool] = False
    bandwidth: ClassVar[str] = "fixed"

    @property
    def params(self) -> Mapping[str, ParamInfo]:
        return {}


@kernels.register("linear")
@dataclass(frozen=True)
class Linear(_Pointwise):
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


@kernels.register("geometric")
@dataclass(frozen=True)
class Geometric(_Pointwise):
    """K(z) = 1 / (1 - z) for z < 1, the geometric series: needs the cosine similarity.

    Kernel-selection paper, Table 1. With the paper's eps = 1e-3 a unit key equal to its query weighs about
    1000 times an orthogonal one, so attend strictly before the query (`exclude_self`) in self-attention.
    """

    name: ClassVar[str] = "geometric"
    nonnegative: ClassVar[bool] = True
    below: ClassVar[float] = 1.0  # the similarity must stay below this

    def value(self, a: Tensor, params: Params) -> Tensor:
        return 1 / self._gap(a)

    def slope(self, a: Tensor, params: Params) -> Tensor:
        gap = self._gap(a)
        return torch.where(1 - a < gap, 0, gap**-2)

    @staticmethod
    def _gap(a: Tensor) -> Tensor:
        """1 - z, which the rounding of a cosine must not make negative."""
        return (1 - a).clamp(min=torch.finfo(a.dtype).eps)


@kernels.register("clipped-geometric")
@dataclass(frozen=True)
class ClippedGeometric(_Pointwise):
    """K(z) = 1 / (1 + eps - min(z, limit) / limit): positive without exponentials, flat above the limit.

    Kernel-selection paper, Table 1 (M = 300, eps = 1e-4). z is the plain dot product: the limit is its
    scale.
    """

    limit: float = 300.0
    eps: float = 1e-4
    name: ClassVar[str] = "clipped-geometric"
    nonnegative: ClassVar[bool] = True

    def __post_init__(self) -> None:
        number("clipped-geometric", "limit", self.limit, low=0.0, strict=True)
        number("clipped-geometric", "eps", self.eps, low=0.0, strict=True)

    def value(self, a: Tensor, params: Params) -> Tensor:
        return 1 / (1 + self.eps - a.clamp(max=self.limit) / self.limit)

    def slope(self, a: Tensor, params: Params) -> Tensor:
        return torch.where(a < self.limit, self.value(a, params).square() / self.limit, 0)
