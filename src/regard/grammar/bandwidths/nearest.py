"""Nearest: the k keys with the largest scores (top-k)."""

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor

from ...checks import ArgumentError, choice, number, whole
from ..kernels import Params, least_reach
from ..weighting import Ratio, RowStats, Weighting, distance, row_top
from .base import RuleBase, bandwidths, positions, require_ranked

Gradient = Literal["hard", "straight-through", "soft"]


@bandwidths.register("nearest")
@dataclass(frozen=True)
class Nearest(RuleBase):
    """Exactly min(k, visible) keys, the lowest index first among ties.

    Kernels with a jump at the threshold (Gaussian: top-k softmax; uniform: k-nearest neighbours) keep the k best keys.
    For continuous compact kernels theta is the (k+1)-th score, so that k keys have weight. With fewer than k+1 visible
    keys theta = min z - 1. If all kept keys tie with theta, their weights are equal.

    Args:
        k: number of keys.
        gradient: "hard" is the derivative for a fixed choice of keys (zero for the uniform kernel, whose keys are
            then never trained). "straight-through" has the same weights and the derivative of softmax(z) over all
            visible keys. "soft" multiplies all visible keys by a logistic gate centred between the k-th and the
            (k+1)-th score, forward and backward (Gaussian and uniform only: the others have no jump).
        temperature: width of the soft gate, in units of z.
    """

    k: int = 32
    gradient: Gradient = "hard"
    temperature: float = 1.0

    def __post_init__(self) -> None:
        whole("nearest", "k", self.k, 1)
        choice("nearest", "gradient", self.gradient, get_args(Gradient))
        width = number("nearest", "temperature", self.temperature, low=0.0, strict=True)
        object.__setattr__(self, "temperature", width)

    def weighting(self, kernel: Any, normalise: bool, similarity: Any) -> Weighting:
        require_ranked(self.name, kernel, normalise)
        if self.gradient == "soft":
            if kernel.vanishes:
                raise ArgumentError(
                    f"{kernel.name}*nearest(gradient=soft): the {kernel.name} kernel goes to zero at its edge, so "
                    f"that there is no jump to smooth; use gradient=hard or straight-through."
                )
            return SoftNearest(kernel, self)
        hard = Ratio(kernel, self)
        return hard if self.gradient == "hard" else StraightThrough(hard)

    def bounded(self, kernel: Any) -> bool:
        return bool(kernel.vanishes)

    may_miss = bounded  # all kept keys may tie with the threshold

    def indices(self, kernel: Any) -> int:
        return 3

    def locate(self, z: Tensor, top: Tensor, kernel: Any, params: Params, *, fast: bool) -> dict[str, Any]:
        scores = z.detach()
        best, kth, cut, kept = _kth(scores, self.k)
        if not kernel.vanishes:
            return {"theta": kth, "reach": torch.ones_like(top), "index": torch.cat([cut, cut, kept], -1)}
        following = best[..., self.k :] if best.shape[-1] > self.k else torch.full_like(top, -torch.inf)
        more = following > -torch.inf
        outside = (scores == following) & ~_chosen(scores, kth, cut)
        lowest = torch.where(scores == -torch.inf, torch.inf, scores).argmin(-1, keepdim=True)
        pivot = torch.where(more, outside.int().argmax(-1, keepdim=True), lowest)
        edge, below = z.gather(-1, pivot), (~more).to(z.dtype)
        reach = (top - edge) + below
        index = torch.cat([cut, pivot, kept], -1)
        fallback = reach.detach() < least_reach(z.dtype)
        return {"theta": edge - below, "reach": reach, "fallback": fallback, "index": index}

    def members(self, z: Tensor, stats: RowStats, kernel: Any) -> Tensor | None:
        return None if kernel.vanishes else _chosen(z.detach(), stats.theta, stats.index[..., :1])

    def fallback_weights(self, z: Tensor, stats: RowStats) -> Tensor:
        chosen = _chosen(z, stats.theta, stats.index[..., :1])
        return chosen.to(z.dtype) / stats.index[..., 2:3].clamp(min=1)

    def dtheta_dz(self, z: Tensor, stats: RowStats, kernel: Any) -> Tensor | None:
        if not kernel.vanishes:
            return None
        return (positions(z) == stats.index[..., 1:2]).to(z.dtype)


def _kth(scores: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return (the min(k+1, n) best scores, the k-th, the index of its last kept tie, the number of kept keys)."""
    k = min(k, scores.shape[-1])  # a larger k may exceed int64
    best = scores.topk(min(k + 1, scores.shape[-1]), dim=-1).values
    kept = (scores != -torch.inf).sum(-1, keepdim=True).clamp(max=k)
    kth = best.gather(-1, (kept - 1).clamp(min=0))
    wanted = kept - (scores > kth).sum(-1, keepdim=True)
    cut = ((scores == kth).cumsum(-1) < wanted).sum(-1, keepdim=True)
    cut = cut.clamp(max=scores.shape[-1] - 1)  # a row with a NaN has fewer ties than it wants
    return best, kth, cut, kept


def _chosen(z: Tensor, kth: Tensor, cut: Tensor) -> Tensor:
    return ((z > kth) | ((z == kth) & (positions(z) <= cut))) & (z != -torch.inf)


@dataclass(frozen=True)
class StraightThrough(Weighting):
    """The weights of `hard` with the derivative of softmax(z) over the visible keys."""

    hard: Ratio

    indices: ClassVar[int] = 3

    def fit(self, z: Tensor, params: Params, *, fast: bool = False) -> RowStats:
        return self.hard.fit(z.detach(), params, fast=fast)

    def weights(self, z: Tensor, stats: RowStats, params: Params) -> Tensor:
        p = self.hard.weights(z.detach(), stats, params)
        if not torch.is_grad_enabled():
            return p
        surrogate = self._surrogate(z, stats)
        return p + (surrogate - surrogate.detach())

    def jacobian(self, z: Tensor, p: Tensor, stats: RowStats, params: Params) -> tuple[Tensor, Tensor]:
        surrogate = self._surrogate(z, stats)
        return surrogate, surrogate

    def _surrogate(self, z: Tensor, stats: RowStats) -> Tensor:
        w = torch.exp(-distance(z, stats.top))
        return torch.where(stats.empty, 0, w / torch.where(stats.empty, 1, w.sum(-1, keepdim=True)))


@dataclass(frozen=True)
class SoftNearest(Weighting):
    """p_j proportional to K_j sigmoid((z_j - c) / temperature), c halfway between the k-th and next score."""

    kernel: Any
    rule: Nearest

    indices: ClassVar[int] = 2

    def fit(self, z: Tensor, params: Params, *, fast: bool = False) -> RowStats:
        top, empty = row_top(z)
        scores = z.detach()
        best, kth, cut, _ = _kth(scores, self.rule.k)
        one, none = torch.ones_like(top), torch.zeros_like(empty)
        more = best[..., self.rule.k :] > -torch.inf if best.shape[-1] > self.rule.k else none
        following = best[..., -1:]
        outside = (scores == following) & ~_chosen(scores, kth, cut)
        index = torch.cat([cut, outside.int().argmax(-1, keepdim=True)], -1)
        middle = z.gather(-1, index).mean(-1, keepdim=True)
        theta = torch.where(more, middle, -torch.inf)  # at most k keys: the gate is open
        stats = RowStats(top, theta, one, one, empty, none, none.int(), index)
        mass = self._values(z, stats)[0].sum(-1, keepdim=True)
        return replace(stats, mass=torch.where(empty, 1, mass))

    def _values(self, z: Tensor, stats: RowStats) -> tuple[Tensor, Tensor, Tensor]:
        """Return the weights before division by their sum, the gate, and 1 - gate."""
        gated = stats.theta > -torch.inf
        hidden = z == -torch.inf
        centre = torch.where(gated, stats.theta, 0)
        a = (torch.where(hidden, 0, z) - centre) / self.rule.temperature
        gate, shut = torch.where(gated, torch.sigmoid(a), 1), torch.where(gated, torch.sigmoid(-a), 0)
        w = self.kernel.relative(distance(z, stats.top), float("inf"), {}) * gate
        return torch.where(hidden, 0, w), gate, shut

    def weights(self, z: Tensor, stats: RowStats, params: Params) -> Tensor:
        return torch.where(stats.empty, 0, self._values(z, stats)[0] / stats.mass)

    def jacobian(self, z: Tensor, p: Tensor, stats: RowStats, params: Params) -> tuple[Tensor, Tensor]:
        through_kernel, through_gate = self._slopes(z, p, stats)
        return through_kernel + through_gate, p

    def _slopes(self, z: Tensor, p: Tensor, stats: RowStats) -> tuple[Tensor, Tensor]:
        _, gate, shut = self._values(z, stats)
        slope = self.kernel.relative_slope(distance(z, stats.top), float("inf"), {})
        return slope * gate / stats.mass, p * shut / self.rule.temperature

    def finish(self, dz: Tensor, rho: Tensor, z: Tensor, p: Tensor, stats: RowStats, params: Params) -> Tensor:
        # dL/dc = -(the part of sum dz that goes through the gates), c the centre of the gates.
        through_kernel, through_gate = self._slopes(z, p, stats)
        whole = through_kernel + through_gate
        dc = -(dz * through_gate / torch.where(whole == 0, 1, whole)).sum(-1, keepdim=True)
        half = torch.where(stats.theta > -torch.inf, dc / 2, 0).expand(*dc.shape[:-1], 2)
        return dz.scatter_add(-1, stats.index, half)
