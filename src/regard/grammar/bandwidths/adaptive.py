"""Adaptive: the threshold at which the weights of a row sum to one (entmax)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...checks import ArgumentError
from ..kernels import Number, ParamInfo, Params
from ..threshold import implicit_reach, solve_gap, solve_peak
from ..weighting import Ratio, RowStats, Status, Weighting, distance
from .base import RuleBase, bandwidths, positions, require_ranked


@bandwidths.register("adaptive")
@dataclass(frozen=True)
class Adaptive(RuleBase):
    """p_j = [z_j / r - tau]_+^r with tau such that sum p = 1: alpha-entmax with alpha = 1 + 1/r.

    Epanechnikov gives sparsemax (alpha = 2), biweight 1.5-entmax, triweight 4/3-entmax. On unit keys with
    scores s / gamma these are Nadaraya-Watson weights of bandwidth H = sqrt(2 - 2 r gamma tau), which is always
    larger than the distance to the nearest key (sparse-attention paper, Proposition 1; true for every r > 0).

    Learned parameter: `alpha` >= 1, per head or per row, instead of the kernel's r; 1 is softmax.
    """

    def weighting(self, kernel: Any, normalise: bool, similarity: Any) -> Weighting:
        if kernel.ranked and "r" not in kernel.params:
            why = {
                "gaussian": "the Gaussian is the limit alpha -> 1 (r -> infinity), where the adaptive bandwidth is "
                "infinite and the weights are softmax; use gaussian*fixed.",
                "uniform": "the sum of a 0/1 kernel jumps, so that no threshold makes it one; use uniform*nearest or "
                "uniform*anchored.",
            }.get(kernel.name, "the kernel has no power r to make its weights sum to one.")
            raise ArgumentError(f"{kernel.name}*adaptive: {why}")
        require_ranked(self.name, kernel, normalise)
        return Ratio(kernel, self)

    def param_info(self, kernel: Any) -> Mapping[str, ParamInfo]:
        return {"alpha": ParamInfo(1 + 1 / kernel.r, low=1.0)}

    def kernel_params(self, params: Params) -> Params:
        return {"r": power_of(params["alpha"])} if "alpha" in params else {}

    def bounded(self, kernel: Any) -> bool:
        return True

    def locate(self, z: Tensor, top: Tensor, kernel: Any, params: Params, *, fast: bool) -> dict[str, Any]:
        r = self.power(kernel, params)
        # detach also drops forward-mode tangents: no derivative goes through the search
        number = r.detach() if isinstance(r, Tensor) else r
        peak, converged = solve_peak(distance(z, top).detach(), number, fast=fast)
        reach = number * peak
        if _steep(r):
            pivot, gap, exact = solve_gap(z.detach(), peak, top, number, fast=fast)
            below = number < torch.ones_like(reach)
            top, reach = torch.where(below, pivot, top), torch.where(below, gap, reach)
            converged = torch.where(below, exact, converged)
        if torch.is_grad_enabled():
            at = _first(z.detach() == top)
            top = z.gather(-1, at) + 0 * top  # 0 * top keeps NaN, which equals no score
            reach = implicit_reach(_from(z, top, at), r, reach)
        status = torch.where(converged, int(Status.OK), int(Status.UNCONVERGED)).int()
        return {"top": top, "theta": top - reach, "reach": reach, "status": status}

    def distance(self, z: Tensor, stats: RowStats, kernel: Any, params: Params) -> tuple[Tensor, Tensor]:
        if not torch.is_grad_enabled():
            return super().distance(z, stats, kernel, params)
        # Weights are powers of (reach - d) over a constant. Divided by the reach itself, all weights and their sum
        # would move with it, and the difference of the derivatives would be rounding error.
        fixed = stats.reach.detach()
        return _from(z, stats.top, _first(z.detach() == stats.top.detach())) - (stats.reach - fixed), fixed

    def pivot(self, z: Tensor, stats: RowStats, kernel: Any, params: Params) -> Tensor | None:
        return _first(z == stats.top)

    def mix(self, slope: Tensor, p: Tensor) -> Tensor:
        total = slope.sum(-1, keepdim=True)
        return slope / torch.where(total == 0, 1, total)

    def power_grads(
        self, log_u: Tensor, drift: Tensor, stats: RowStats, kernel: Any, params: Params
    ) -> dict[str, Tensor]:
        r = self.power(kernel, params)
        # p = a^r with a = (z - theta)/r: d log p / dr at fixed theta is log a - 1. Since sum p (G - rho) / a = 0,
        # adding 1/a changes nothing and avoids cancellation near a = 1, where large r has all its weights.
        log_a = log_u - torch.log(stats.mass) / r
        steepness = _near_one(log_a)
        if _steep(r):
            steepness = torch.where(r < torch.ones_like(stats.reach), log_a - 1, steepness)
        return {"alpha": -r * r * (steepness * drift).sum(-1, keepdim=True)}


LEAST = 1e-12
"""Smallest alpha - 1; the weights there equal softmax to the last bit."""


def power_of(alpha: Number) -> Number:
    """Return r = 1 / (alpha - 1), bounded at alpha = 1; NaN for alpha < 1."""
    less = alpha - 1
    if isinstance(less, Tensor):
        return 1 / torch.where(less < 0, torch.nan, less.clamp(min=LEAST))
    return 1 / max(less, LEAST)


def _steep(r: Number) -> bool:
    """Return whether r may be below one, where the slope of a weight at the threshold is infinite."""
    return isinstance(r, Tensor) or r < 1


def _first(marked: Tensor) -> Tensor:
    """Return the first marked position of every row, [..., 1]."""
    return marked.int().argmax(-1, keepdim=True)


def _from(z: Tensor, top: Tensor, at: Tensor) -> Tensor:
    """Return `distance`, with a constant 0 at position `at`. The derivative of that key, which may be much larger than
    all others, is then the sum of theirs instead of a small difference of two large terms."""
    d = distance(z, top)
    return torch.where((positions(z) == at) & (d < torch.inf), 0, d)


def _near_one(log_a: Tensor) -> Tensor:
    """Return 1/a + log a - 1, exact near a = 1."""
    series = log_a.square() * (0.5 - log_a / 6 + log_a.square() / 24)
    return torch.where(log_a.abs() < 1e-2, series, torch.expm1(-log_a) + log_a)
