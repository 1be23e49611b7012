"""The rectified polynomial kernels: Epanechnikov, biweight, triweight and any other power."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ...checks import ArgumentError, number
from .base import Number, ParamInfo, Params, RankedKernel, kernels


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
    return torch.where(inside, torch.where(inside, a, 1) ** r, 0)


def _named(name: str, r: float) -> None:
    @kernels.register(name)
    def make() -> Polynomial:
        return Polynomial(r)

    make.__doc__ = f"The rectified polynomial kernel with r = {r:g}."


NAMED_POWERS = {"epanechnikov": 1.0, "biweight": 2.0, "triweight": 3.0}

for _name, _r in NAMED_POWERS.items():
    _named(_name, _r)
