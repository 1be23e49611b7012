"""Fixed: the same threshold for every row."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor

from ...checks import ArgumentError, choice, number, require
from ..kernels import Number, ParamInfo, Params, least_reach
from ..weighting import Plain, Ratio, RowStats, Weighting
from .base import RuleBase, bandwidths, positions

Empty = Literal["uniform", "zero", "nearest"]


@bandwidths.register("fixed")
@dataclass(frozen=True)
class Fixed(RuleBase):
    """w = K(z + bias): threshold -bias on the scores, or bandwidth `h` in units of distance.

    Args:
        bias: added to every score. Default 0.
        h: bandwidth as a distance; needs the cosine or euclidean similarity and excludes a scale. Under a compact
            kernel, keys farther than h from the query have no weight (theta_s = 1 - h^2/2 on unit vectors). For
            the Gaussian, w = exp(-distance^2 / (2 h^2)).
        empty: weights of a row with visible keys of which none is above the threshold: "uniform" over the visible
            keys, "zero", or "nearest" (the best key alone, the lowest index first). None has a score gradient.

    With Epanechnikov this is the normalised ReLU (sparse-attention paper, equations 11 and 12).
    """

    bias: float | None = None
    h: float | None = None
    empty: Empty = "uniform"
    shift_invariant: ClassVar[bool] = False

    def __post_init__(self) -> None:
        require(self.bias is None or self.h is None, "fixed", "bias and h both set the threshold; give one of them.")
        if self.bias is not None:
            object.__setattr__(self, "bias", number("fixed", "bias", self.bias))
        if self.h is not None:
            object.__setattr__(self, "h", number("fixed", "h", self.h, low=0.0, strict=True))
        choice("fixed", "empty", self.empty, get_args(Empty))

    @property
    def _bias(self) -> float:
        return self.bias or 0.0

    def weighting(self, kernel: Any, normalise: bool, similarity: Any) -> Weighting:
        if self.h is not None:
            similarity.threshold(self.h)
            if not kernel.ranked or not normalise:
                raise ArgumentError(
                    f"{kernel.name}*fixed(h={self.h:g}): a bandwidth in units of distance is for normalised "
                    f"gaussian, polynomial and uniform kernels; give bias=... instead."
                )
        if self.bias and not kernel.scaled and not kernel.ranked:
            raise ArgumentError(f"{kernel.name}*fixed: the {kernel.name} kernel takes no bias; leave it out.")
        if not (kernel.ranked and normalise):
            safe = kernel.nonnegative or similarity.lower + self._bias >= 0
            return Plain(kernel, self._bias, normalise, safe)
        if self.bias and not kernel.compact:
            raise ArgumentError(
                f"{kernel.name}*fixed(bias={self.bias:g}): a bias cancels when {kernel.name} weights are "
                f"normalised; leave it out, or use normalise=False."
            )
        return Ratio(kernel, self)

    def param_info(self, kernel: Any) -> Mapping[str, ParamInfo]:
        if self.h is not None:
            return {**kernel.params, "h": ParamInfo(self.h, low=0.0, strict=True)}
        return {**kernel.params, **({"bias": ParamInfo(self._bias)} if kernel.compact else {})}

    def resolve(
        self, kernel: Any, similarity: Any, scale: Number | None, params: Params, dim: int
    ) -> tuple[Number, dict[str, Number]]:
        if self.h is None:
            return super().resolve(kernel, similarity, scale, params, dim)
        rest = dict(params)
        h = rest.pop("h", self.h)
        if not kernel.compact:
            return 1 / (h * h), rest
        return 1.0, {**rest, "bias": -similarity.threshold(h)}

    def bounded(self, kernel: Any) -> bool:
        return bool(kernel.compact)

    may_miss = bounded

    def indices(self, kernel: Any) -> int:
        return int(kernel.compact)

    def locate(self, z: Tensor, top: Tensor, kernel: Any, params: Params, *, fast: bool) -> dict[str, Any]:
        if not kernel.compact:
            return {"theta": torch.full_like(top, -torch.inf), "reach": torch.ones_like(top)}
        bias = params.get("bias", self._bias)
        reach = top + bias
        scores = z.detach()
        index = (scores != -torch.inf).sum(-1, keepdim=True)
        if self.empty == "nearest":
            index = scores.argmax(-1, keepdim=True)
        fallback = reach.detach() < least_reach(z.dtype)
        return {"theta": 0 * top - bias, "reach": reach, "fallback": fallback, "index": index}

    def fallback_weights(self, z: Tensor, stats: RowStats) -> Tensor:
        if self.empty == "uniform":
            return (z != -torch.inf).to(z.dtype) / stats.index.clamp(min=1)
        if self.empty == "nearest":
            return (positions(z) == stats.index).to(z.dtype)
        return torch.zeros_like(z)

    def theta_grads(self, dtheta: Tensor) -> dict[str, Tensor]:
        return {"bias": -dtheta}
