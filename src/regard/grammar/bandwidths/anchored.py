"""Anchored: a threshold at a fixed margin below the largest score of each row."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...checks import number
from ..kernels import ParamInfo, Params
from ..weighting import Ratio, RowStats, Weighting
from .base import RuleBase, bandwidths, require_ranked


@bandwidths.register("anchored")
@dataclass(frozen=True)
class Anchored(RuleBase):
    """theta = max z - margin: keys whose score is less than `margin` below the largest have weight.

    With Epanechnikov this is ReLUmax (sparse-attention paper, equations 20 and 21): on unit keys with largest
    similarity m and scores s / h^2, an Epanechnikov kernel of bandwidth H^2 = 2 (1 - m) + 2 margin h^2. With
    the Gaussian it is softmax over the keys within the margin (min-p); with the uniform kernel, their mean.
    Keys that tie for the maximum share its gradient equally.
    """

    margin: float = 1.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "margin", number("anchored", "margin", self.margin, low=0.0, strict=True))

    def weighting(self, kernel: Any, normalise: bool, similarity: Any) -> Weighting:
        require_ranked(self.name, kernel, normalise)
        return Ratio(kernel, self)

    def own_params(self) -> Mapping[str, ParamInfo]:
        return {"margin": ParamInfo(self.margin, low=0.0, strict=True)}

    def bounded(self, kernel: Any) -> bool:
        return True

    def locate(self, z: Tensor, top: Tensor, kernel: Any, params: Params, *, fast: bool) -> dict[str, Any]:
        best = z.amax(-1, keepdim=True)  # equals top, with gradient
        best = torch.where(best == -torch.inf, 0, best)
        reach = params.get("margin", self.margin) + (top - best)
        return {"theta": best - params.get("margin", self.margin), "reach": reach}

    def dtheta_dz(self, z: Tensor, stats: RowStats, kernel: Any) -> Tensor | None:
        if not kernel.vanishes:
            return None
        best = (z == stats.top).to(z.dtype)
        return best / best.sum(-1, keepdim=True).clamp(min=1)

    def theta_grads(self, dtheta: Tensor) -> dict[str, Tensor]:
        return {"margin": -dtheta}
