"""The kernels that regard brings.

Of the distance to the largest score: Gaussian (softmax), uniform, and rectified polynomials, among them Epanechnikov,
biweight and triweight. Of the score itself: linear and geometric.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ...checks import ArgumentError, number
from .base import Kernel, Number, ParamInfo, Params, RankedKernel, kernels


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


@kernels.register("polynomial")
@dataclass(frozen=True)
class Polynomial(RankedKernel):
    """K(a) = [a]_+^r, the rectified polynomial: r = 1 Epanechnikov, 2 biweight, 3 triweight, any r > 0.

    Sparse-attention paper, section 2 and Proposition 1 (which holds for every r > 0).
    """

    r: float = 1.0
    compact: ClassVar[bool] = True
    vanishes: ClassVar[bool] = True
    bandwidth: ClassVar[str] = "adaptive"

    def __post_init__(self) -> None:
        number("polynomial", "r", self.r, low=0.0, strict=True)
        if not 1e-3 <= self.r <= 1e12:  # float32 fails outside
            raise ArgumentError(
                f"polynomial: r is {self.r:g}, expected 0.001 <= r <= 1e12; for larger r use its limit, the gaussian "
                f"kernel, for smaller r the uniform kernel."
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
        """Return log(1 - d/reach) inside the support, 0 outside: the derivative of log K by r."""
        inside = d < reach
        return torch.where(inside, torch.log1p(-torch.where(inside, d, 0) / reach), 0)

    def value(self, a: Tensor, params: Params) -> Tensor:
        return _positive_power(a, params.get("r", self.r))

    def slope(self, a: Tensor, params: Params) -> Tensor:
        r = params.get("r", self.r)
        return r * _positive_power(a, r - 1)


def power(d: Tensor, reach: Number, r: Number) -> Tensor:
    """Return [1 - d/reach]_+^r; for r = 0 the indicator of the support.

    Integer powers up to 3 are products. Other powers are exp(r log1p(-d/reach)), whose error near the peak does not
    grow with r.
    """
    if isinstance(r, float) and r in (1.0, 2.0, 3.0) and not torch.is_grad_enabled():
        u = (1 - d / reach).clamp_(min=0)
        return u if r == 1.0 else (u * u if r == 2.0 else u * u * u)
    inside = d < reach
    if isinstance(r, float) and r == 0.0:
        return inside.to(d.dtype)
    x = torch.where(inside, d, 0) / reach  # where first: an infinite d times a zero gradient is NaN
    if isinstance(r, float) and r in (1.0, 2.0, 3.0):
        u = torch.where(inside, 1 - x, 0)
        return u if r == 1.0 else (u * u if r == 2.0 else u * u * u)
    return torch.where(inside, torch.exp(r * torch.log1p(-x)), 0)


def _positive_power(a: Tensor, r: Number) -> Tensor:
    """Return [a]_+^r; 0 for a <= 0, also for r <= 0."""
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
