"""A weighting: a kernel and a thresholding rule as one object that maps a row of scores to a row of weights.

Implementations need only the weights and their derivative, so no pair of kernel and rule needs code of its own. With
G = dL/dp, a weighting gives A and B such that, for every row,

    rho = sum_j B_j G_j,        dL/dz_j = A_j (G_j - rho)  (+ `finish`, for the remaining terms).

Every ranked kernel under every rule is p_j = K(z_j - theta) / sum K, and the rules differ only in theta, hence

    A = K'(z - theta) / sum K,  B = p,  finish: dL/dz -= (sum_j A_j (G_j - rho)) dtheta/dz,

for fixed (dtheta/dz = 0), anchored (nonzero at the maximum) and nearest (nonzero at the (k+1)-th key). For adaptive,
dtheta/dz = A / sum A, and both lines combine to B = A / sum A.

Legend: z scores [..., Tq, Tk], -inf at masked keys; p weights [..., Tq, Tk]; row statistics and row parameters
[..., Tq, 1]. All in float32 or float64.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import IntEnum
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch import Tensor

from .kernels import ParamInfo, Params, least_reach


class Status(IntEnum):
    """Status of a row of scores."""

    OK = 0
    UNCONVERGED = 1  # the threshold search ran out of steps; the weights still sum to one
    NEAR_ZERO = 2  # a sum of signed weights near zero: the denominator is bounded by the guard
    NEGATIVE = 3  # a negative sum of signed weights: the normalised weights change sign


@dataclass(frozen=True)
class RowStats:
    """Statistics of rows of scores, from which the weights follow.

    Attributes:
        top: the score from which distances are measured: the largest visible score (0 in an empty row); for the
            adaptive rule with r < 1 the lowest score with weight (`threshold.solve_gap`).
        theta: the threshold on z; -inf if the kernel has none.
        reach: top - theta, stored because the difference of two large numbers would round; 1 if unused.
        mass: the sum of the kernel's values, for ranked kernels relative to the value at `top`.
        empty: no key is visible.
        fallback: keys are visible, but none is above the threshold (or all kept keys tie with it).
        status: a `Status` per row, int32.
        index: positions of keys that the rule needs, int64 [..., Tq, n], or None.
    """

    top: Tensor
    theta: Tensor
    reach: Tensor
    mass: Tensor
    empty: Tensor
    fallback: Tensor
    status: Tensor
    index: Any = None


class Weighting(ABC):
    """A map from rows of scores to weights, and its derivative. The defaults are for normalised weights without
    parameters, whose derivative is `jacobian` alone. Implementations hold no tensors and are hashable."""

    nonnegative: bool = True  # no weight is negative
    normalised: bool = True  # the weights of a row sum to one
    shift_invariant: ClassVar[Any] = True  # adding a constant to a row of scores leaves the weights unchanged
    indices: ClassVar[Any] = 0  # positions per row in `RowStats.index`
    params: ClassVar[Any] = MappingProxyType({})  # the parameters that can be given per row: name -> `ParamInfo`

    @abstractmethod
    def fit(self, z: Tensor, params: Params, *, fast: bool = False) -> RowStats:
        """Return the statistics of whole rows. Differentiable unless `fast`, which allows early exit."""

    @abstractmethod
    def weights(self, z: Tensor, stats: RowStats, params: Params) -> Tensor:
        """Return p of whole rows."""

    def fit_weights(self, z: Tensor, params: Params, *, fast: bool = False) -> tuple[RowStats, Tensor]:
        """Return statistics and weights of whole rows."""
        stats = self.fit(z, params, fast=fast)
        return stats, self.weights(z, stats, params)

    @abstractmethod
    def jacobian(self, z: Tensor, p: Tensor, stats: RowStats, params: Params) -> tuple[Tensor, Tensor]:
        """Return (A, B) of whole rows."""

    def centred(self, g: Tensor, z: Tensor, stats: RowStats, params: Params) -> Tensor:
        """Return G minus a constant per row, which changes no derivative and keeps G - rho exact at a key whose A is
        much larger than all others."""
        return g

    def finish(self, dz: Tensor, rho: Tensor, z: Tensor, p: Tensor, stats: RowStats, params: Params) -> Tensor:
        """Return dz with the terms that A (G - rho) leaves out."""
        return dz

    def param_grads(
        self, dz: Tensor, g: Tensor, rho: Tensor, z: Tensor, p: Tensor, stats: RowStats, params: Params
    ) -> dict[str, Tensor]:
        """Return dL/dparameter per row [..., Tq, 1]; `dz` is A (G - rho), before `finish`."""
        return {}


def distance(z: Tensor, top: Tensor) -> Tensor:
    """Return d = top - z; +inf without gradient at masked keys."""
    if not torch.is_grad_enabled():
        return top - z
    return torch.where(z == -torch.inf, torch.inf, top - z)


def row_top(z: Tensor) -> tuple[Tensor, Tensor]:
    """Return (largest visible score, 0 in empty rows; whether the row is empty), without gradient: weights do not
    depend on the score from which distances are measured."""
    top = z.detach().amax(-1, keepdim=True)
    empty = top == -torch.inf
    return torch.where(empty, 0, top), empty


@dataclass(frozen=True)
class Ratio(Weighting):
    """p_j = K(z_j - theta) / sum K for a ranked kernel and a thresholding rule."""

    kernel: Any
    rule: Any

    @property
    def shift_invariant(self) -> bool:
        return bool(self.rule.shift_invariant)

    @property
    def indices(self) -> int:
        return int(self.rule.indices(self.kernel))

    @property
    def params(self) -> Mapping[str, ParamInfo]:
        return self.rule.param_info(self.kernel)

    def fit(self, z: Tensor, params: Params, *, fast: bool = False) -> RowStats:
        return self._fit(z, params, fast)[0]

    def fit_weights(self, z: Tensor, params: Params, *, fast: bool = False) -> tuple[RowStats, Tensor]:
        stats, relative = self._fit(z, params, fast)
        return stats, self._finished(relative, z, stats)

    def _fit(self, z: Tensor, params: Params, fast: bool) -> tuple[RowStats, Tensor]:
        """Return the statistics, and the weights before division by their sum."""
        top, empty = row_top(z)
        located = self.rule.locate(z, top, self.kernel, params, fast=fast)
        status = located.get("status")
        fallback = located["fallback"] & ~empty if "fallback" in located else torch.zeros_like(empty)
        stats = RowStats(
            top=torch.where(empty, 0, located["top"]) if "top" in located else top,
            theta=torch.where(empty, -1, located["theta"]),
            reach=torch.where(empty | fallback, 1, located["reach"]),
            mass=torch.ones_like(top),
            empty=empty,
            fallback=fallback,
            status=torch.zeros_like(empty, dtype=torch.int32) if status is None else torch.where(empty, 0, status),
            index=located.get("index"),
        )
        relative = self._relative(z, stats, params)
        mass = relative.sum(-1, keepdim=True)
        return replace(stats, mass=torch.where(empty | stats.fallback, 1, mass)), relative

    def weights(self, z: Tensor, stats: RowStats, params: Params) -> Tensor:
        return self._finished(self._relative(z, stats, params), z, stats)

    def _finished(self, relative: Tensor, z: Tensor, stats: RowStats) -> Tensor:
        p = relative / stats.mass  # 0 / 1 in empty rows
        if not self.rule.may_miss(self.kernel):
            return p
        return torch.where(stats.fallback, self.rule.fallback_weights(z.detach(), stats), p)

    def _relative(self, z: Tensor, stats: RowStats, params: Params) -> Tensor:
        d, reach = self.rule.distance(z, stats, self.kernel, params)
        edge = reach if self.rule.bounded(self.kernel) else float("inf")
        w = self.kernel.relative(d, edge, self.rule.kernel_params(params))
        members = self.rule.members(z, stats, self.kernel)
        return w if members is None else torch.where(members, w, 0 * stats.top)  # 0 * top keeps NaN

    def log_mass(self, stats: RowStats, params: Params) -> Tensor:
        """Return log sum_j K(z_j - theta) per row, -inf if no key has weight."""
        kernel_params = self.rule.kernel_params(params)
        peak = getattr(self.kernel, "log_peak", lambda _, reach, params: self.kernel.value(reach, params).log())
        log = stats.mass.log() + peak(stats.top, stats.reach, kernel_params)
        return torch.where(stats.fallback, -torch.inf, log)

    def jacobian(self, z: Tensor, p: Tensor, stats: RowStats, params: Params) -> tuple[Tensor, Tensor]:
        if getattr(self.kernel, "own_slope", False) and not self.rule.may_miss(self.kernel):
            return p, self.rule.mix(p, p)
        kernel_params = self.rule.kernel_params(params)
        d, reach = self.rule.distance(z, stats, self.kernel, params)
        edge = reach if self.rule.bounded(self.kernel) else float("inf")
        slope = self.kernel.relative_slope(d, edge, kernel_params) / stats.mass
        members = self.rule.members(z, stats, self.kernel)
        if members is not None:
            slope = torch.where(members, slope, 0)
        if self.rule.may_miss(self.kernel):
            slope = torch.where(stats.fallback, 0, slope)
        return slope, self.rule.mix(slope, p)

    def centred(self, g: Tensor, z: Tensor, stats: RowStats, params: Params) -> Tensor:
        pivot = self.rule.pivot(z, stats, self.kernel, params)
        return g if pivot is None else g - g.gather(-1, pivot)

    def finish(self, dz: Tensor, rho: Tensor, z: Tensor, p: Tensor, stats: RowStats, params: Params) -> Tensor:
        slope = self.rule.dtheta_dz(z, stats, self.kernel)
        return dz if slope is None else dz - dz.sum(-1, keepdim=True) * slope

    def param_grads(
        self, dz: Tensor, g: Tensor, rho: Tensor, z: Tensor, p: Tensor, stats: RowStats, params: Params
    ) -> dict[str, Tensor]:
        moved = -dz.sum(-1, keepdim=True)  # dL/dtheta of kernels that are continuous at the threshold
        grads = dict(self.rule.theta_grads(moved if self.kernel.vanishes else torch.zeros_like(moved)))
        if "r" in self.kernel.params:
            log_u = self.kernel.log_relative(distance(z, stats.top), stats.reach)
            drift = torch.where(stats.fallback, 0, p * (g - rho))
            grads |= self.rule.power_grads(log_u, drift, stats, self.kernel, params)
        return grads


GUARD = 1e-3
"""Smallest |sum of weights| of a signed kernel, relative to sqrt(n sum of squared weights) with n visible keys. That
bound of sum |weights| can also be computed from linear-attention states."""


@dataclass(frozen=True)
class Plain(Weighting):
    """p_j = K(z_j + bias), optionally divided by the sum: unnormalised weights, and kernels of the score itself.

    The denominator of a signed kernel is at least `GUARD` sqrt(n sum K^2) in size, with its sign; a smaller one is
    reported as `Status.NEAR_ZERO`. A negative one is used as it is and reported as `Status.NEGATIVE`. Weights that are
    non-negative by construction have no guard, even if a bias given per call makes them negative.
    """

    kernel: Any
    bias: float
    normalised: bool
    nonnegative: bool
    shift_invariant: ClassVar[bool] = False

    @property
    def params(self) -> Mapping[str, ParamInfo]:
        return {**self.kernel.params, **({"bias": ParamInfo(self.bias)} if self.kernel.scaled else {})}

    def fit(self, z: Tensor, params: Params, *, fast: bool = False) -> RowStats:
        top, empty = row_top(z)
        one, none = torch.ones_like(top), torch.zeros_like(empty)
        stats = RowStats(top, torch.full_like(top, -torch.inf), one, one, empty, none, none.int())
        if self.kernel.compact:
            stats = replace(stats, theta=0 * top - params.get("bias", self.bias))
        if not self.normalised:
            return stats
        w = self._values(z, params)
        mass = w.sum(-1, keepdim=True)
        status = torch.where(mass < 0, int(Status.NEGATIVE), 0)
        if self.nonnegative:
            return replace(stats, mass=torch.where(mass == 0, 1, mass), status=status.int())
        size = self._size(w, z)
        near = mass.abs() < GUARD * size
        mass = torch.where(near, torch.where(mass < 0, -size, size) * GUARD, mass)
        status = torch.where(near, int(Status.NEAR_ZERO), status)
        return replace(stats, mass=torch.where(size == 0, 1, mass), status=status.int())

    def _size(self, w: Tensor, z: Tensor) -> Tensor:
        """Return sqrt(n sum w^2) over the visible keys; 0 with gradient 0 if all weights are 0."""
        unit = w.detach().abs().amax(-1, keepdim=True)  # squares of large weights would overflow
        unit = torch.where(unit > 0, unit, 1)
        square = (w / unit).square().sum(-1, keepdim=True)
        some = square > 0
        count = (z > -torch.inf).sum(-1, keepdim=True)
        return torch.where(some, unit * (count * torch.where(some, square, 1)).sqrt(), 0)

    def weights(self, z: Tensor, stats: RowStats, params: Params) -> Tensor:
        w = self._values(z, params)
        if not self.normalised:
            return w
        small = self._small(stats)
        fixed = w.detach() / stats.mass.detach()
        return torch.where(small, fixed, torch.where(small, 0, w) / torch.where(small, 1, stats.mass))

    def _small(self, stats: RowStats) -> Tensor:
        """Return the rows whose sum is so small that gradients divided by it would overflow; their gradient is 0."""
        return stats.mass.detach().abs() < least_reach(stats.mass.dtype)

    def _shifted(self, z: Tensor, params: Params) -> tuple[Tensor, Tensor]:
        """Return (which scores are hidden, scores plus bias, with 0 for the hidden ones)."""
        hidden = z == -torch.inf
        return hidden, torch.where(hidden, 0, z) + params.get("bias", self.bias)

    def _values(self, z: Tensor, params: Params) -> Tensor:
        hidden, a = self._shifted(z, params)
        return torch.where(hidden, 0, self.kernel.value(a, params))

    def jacobian(self, z: Tensor, p: Tensor, stats: RowStats, params: Params) -> tuple[Tensor, Tensor]:
        hidden, a = self._shifted(z, params)
        slope = torch.where(hidden | self._small(stats), 0, self.kernel.slope(a, params)) / stats.mass
        return slope, p if self.normalised else torch.zeros_like(p)

    def finish(self, dz: Tensor, rho: Tensor, z: Tensor, p: Tensor, stats: RowStats, params: Params) -> Tensor:
        if not self.normalised or self.nonnegative:
            return dz
        # The derivative of a guarded denominator m = +-GUARD sqrt(n sum w^2) by w_j is GUARD^2 n w_j / m instead of 1.
        held = GUARD**2 * p * (z > -torch.inf).sum(-1, keepdim=True)
        slope, _ = self.jacobian(z, p, stats, params)
        return torch.where(stats.status == int(Status.NEAR_ZERO), dz + slope * (1 - held) * rho, dz)

    def param_grads(
        self, dz: Tensor, g: Tensor, rho: Tensor, z: Tensor, p: Tensor, stats: RowStats, params: Params
    ) -> dict[str, Tensor]:
        grads = {"bias": self.finish(dz, rho, z, p, stats, params).sum(-1, keepdim=True)}
        if "r" in self.kernel.params:
            a = self._shifted(z, params)[1]
            log = torch.where(a > 0, torch.where(a > 0, a, 1).log(), 0)
            grads["r"] = (p * log * (g - rho)).sum(-1, keepdim=True)
        return grads
