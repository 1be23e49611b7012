"""Adaptive: each row's bandwidth is such that its weights sum to one by themselves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from ...checks import ArgumentError
from ..kernels import Number, ParamInfo, Params
from ..threshold import implicit_peak, solve_peak
from ..weighting import Ratio, RowStats, Status, Weighting, distance
from .base import RuleBase, bandwidths, require_ranked


@bandwidths.register("adaptive")
@dataclass(frozen=True)
class Adaptive(RuleBase):
    """p_j = [z_j / r - tau]_+^r with tau such that sum p = 1: alpha-entmax with alpha = 1 + 1/r.

    Epanechnikov gives sparsemax (alpha = 2), biweight 1.5-entmax, triweight 4/3-entmax. On unit keys with
    scores s / gamma these are Nadaraya-Watson weights of bandwidth H = sqrt(2 - 2 r gamma tau), which always
    exceeds the distance to the nearest key (sparse-attention paper, Proposition 1; true for every r > 0).

    Learned number: `alpha` > 1, per head or per row, in place of the kernel's r.
    """

    name: ClassVar[str] = "adaptive"

    def weighting(self, kernel: Any, normalise: bool, similarity: Any) -> Weighting:
        if kernel.ranked and "r" not in kernel.params:
            raise ArgumentError(
                f"{kernel.name}*adaptive: "
                + {
                    "gaussian": "the Gaussian is the limit alpha -> 1 (r -> infinity), where the adaptive bandwidth "
                    "is infinite and the weights are softmax; use gaussian*fixed.",
                    "uniform": "the sum of a 0/1 kernel jumps, so that no threshold makes it one; use "
                    "uniform*nearest or uniform*anchored.",
                }.get(kernel.name, "the kernel has no power r to make its weights sum to one.")
            )
        require_ranked(self.name, kernel, normalise)
        return Ratio(kernel, self)

    def param_info(self, kernel: Any) -> Mapping[str, ParamInfo]:
        return {"alpha": ParamInfo(1 + 1 / kernel.r, low=1.0, strict=True)}

    def kernel_params(self, params: Params) -> Params:
        return {"r": 1 / (params["alpha"] - 1)} if "alpha" in params else {}

    def bounded(self, kernel: Any) -> bool:
        return True

    def locate(self, z: Tensor, top: Tensor, kernel: Any, params: Params, *, fast: bool) -> dict[str, Any]:
        r: Number = self.kernel_params(params).get("r", kernel.r)
        d = distance(z, top)
        # detach drops forward-mode tangents too: no derivative goes through the search
        peak, converged = solve_peak(d.detach(), r.detach() if isinstance(r, Tensor) else r, fast=fast)
        if torch.is_grad_enabled():
            peak = implicit_peak(d, r, peak)
        status = torch.where(converged, int(Status.OK), int(Status.UNCONVERGED)).int()
        return {"theta": top - r * peak, "reach": r * peak, "status": status}

    def mix(self, slope: Tensor, p: Tensor) -> Tensor:
        total = slope.sum(-1, keepdim=True)
        return slope / torch.where(total == 0, 1, total)

    def power_grads(
        self, log_u: Tensor, drift: Tensor, stats: RowStats, kernel: Any, params: Params
    ) -> dict[str, Tensor]:
        r = self.kernel_params(params).get("r", kernel.r)
        # p = a^r with a = (z - theta)/r: d log p / dr at fixed theta is log a - 1. Since sum p (G - rho) / a = 0,
        # 1/a may be added, which leaves nothing to cancel near a = 1, where large r has all its weights.
        log_a = log_u + torch.log(stats.reach / r)
        return {"alpha": -r * r * ((torch.expm1(-log_a) + log_a) * drift).sum(-1, keepdim=True)}
