"""A weighting: kernel x bandwidth as one object that maps a row of scores to a row of weights.

Its derivative is all that any estimator or fast implementation needs, so there is no code for pairs. With
G = dL/dp, a weighting gives A and B such that, row by row,

    rho = sum_j B_j G_j,        dL/dz_j = A_j (G_j - rho)  (+ finish, for what does not fit).

Every ranked kernel under every rule is p_j = K(z_j - theta) / sum K, and the rules differ only in theta, hence

    A = K'(z - theta) / sum K,  B = p,  finish: dL/dz -= (sum_j A_j (G_j - rho)) dtheta/dz,

which covers fixed (dtheta/dz = 0), anchored (the share at the maximum), nearest (the (k+1)-th key); for
adaptive, dtheta/dz = A / sum A and the two lines fold into B = A / sum A.

Legend: z scores [..., Tq, Tk], -inf at hidden keys; p weights [..., Tq, Tk]; row statistics and row parameters
[..., Tq, 1]. All in float32 or float64.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from enum import IntEnum
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from .kernels import ParamInfo, Params, least_reach


class Status(IntEnum):
    """How a row was solved."""

    OK = 0
    UNCONVERGED = 1  # the threshold search ran out of steps; the weights still sum to one
    NEAR_ZERO = 2  # a signed sum of weights too near zero: the denominator is held at its guard
    NEGATIVE = 3  # a negative sum of signed weights: the normalised weights change sign


@dataclass(frozen=True)
class RowStats:
    """What is known of each row once its scores were seen: enough to weigh any block of its keys.

    Attributes:
        top: the score that the row's arithmetic is anchored at (0 in an empty row): the largest of a visible key, but
            for the adaptive rule with r < 1 the lowest that has weight (`threshold.solve_gap`).
        theta: the threshold on z; -inf where the kernel has no edge.
        reach: top - theta, how far below `top` a key still counts, kept apart because the
            difference of two large numbers would round it away; 1 where it decides nothing.
        mass: the sum of the kernel's values, relative to the value at `top` for ranked kernels.
        empty: no key is visible.
        fallback: keys are visible but none lies inside the bandwidth (or all kept keys tie with it).
        status: a `Status` a row, int32.
        index: per-rule positions of keys, int64 [..., Tq, n], or None.
    """

    top: Tensor
    theta: Tensor
    reach: Tensor
    mass: Tensor
    empty: Tensor
    fallback: Tensor
    status: Tensor
    index: Tensor | None = None

    def map(self, fn: Any) -> RowStats:
        """The same statistics with `fn` applied to every tensor."""
        return RowStats(**{f.name: None if (t := getattr(self, f.name)) is None else fn(t) for f in fields(self)})


class Weighting(Protocol):
    """Scores to weights, and back. Implementations hold no tensors and are hashable."""

    @property
    def nonnegative(self) -> bool:
        """Whether no weight is negative."""

    @property
    def normalised(self) -> bool:
        """Whether the weights of a row sum to one."""

    @property
    def shift_invariant(self) -> bool:
        """Whether adding a number to a row of scores changes nothing."""

    @property
    def indices(self) -> int:
        """How many positions `RowStats.index` holds a row."""

    @property
    def params(self) -> Mapping[str, ParamInfo]:
        """The numbers that can be given per row, with their defaults."""

    def fit(self, z: Tensor, params: Params, *, fast: bool = False) -> RowStats:
        """Statistics of whole rows. Differentiable, except where `fast` asks for early exit."""

    def weights(self, z: Tensor, stats: RowStats, params: Params, start: int = 0) -> Tensor:
        """p on a block of keys, the first of which is key number `start`."""

    def jacobian(self, z: Tensor, p: Tensor, stats: RowStats, params: Params) -> tuple[Tensor, Tensor]:
        """(A, B) on whole rows."""

    def finish(self, dz: Tensor, rho: Tensor, z: Tensor, p: Tensor, stats: RowStats, params: Params) -> Tensor:
        """dz with what the product A (G - rho) leaves out."""

    def param_grads(
        self, dz: Tensor, g: Tensor, rho: Tensor, z: Tensor, p: Tensor, stats: RowStats, params: Params
    ) -> dict[str, Tensor]:
        """dL/dparameter per row [..., Tq, 1]; `dz` is A (G - rho), before `finish`."""

    # Where it matters, also `centred(g, z, stats, params)`: G less one number a row, which changes no derivative and
    # keeps G - rho exact at a key whose A outweighs that of all others.


def fit_weights(weighting: Weighting, z: Tensor, params: Params, *, fast: bool = False) -> tuple[RowStats, Tensor]:
    """Statistics and weights of whole rows, in one go where the weighting has a method of this name."""
    own = getattr(weighting, "fit_weights", None)
    if own is not None:
        return own(z, params, fast=fast)
    stats = weighting.fit(z, params, fast=fast)
    return stats, weighting.weights(z, stats, params)


class Rule(Protocol):
    """A bandwidth rule: where a row's threshold lies and how it moves with the scores."""

    shift_invariant: bool

    def param_info(self, kernel: Any) -> Mapping[str, ParamInfo]:
        """The numbers that can be learned when the rule meets `kernel`, the kernel's own among them."""

    def kernel_params(self, params: Params) -> Params:
        """The kernel's numbers in its own names (adaptive: r from alpha)."""

    def bounded(self, kernel: Any) -> bool:
        """Whether weight ends at the threshold."""

    def may_miss(self, kernel: Any) -> bool:
        """Whether a row that sees keys can be left without support, so that `stand_in` is needed."""

    def indices(self, kernel: Any) -> int:
        """How many positions `locate` notes a row."""

    def locate(self, z: Tensor, top: Tensor, kernel: Any, params: Params, *, fast: bool) -> dict[str, Any]:
        """`theta` and `reach`, and where they apply `top` (another anchor than the best score), `fallback`, `status`,
        `index`. The `top` given is a constant."""

    def distance(self, z: Tensor, stats: RowStats, kernel: Any, params: Params) -> tuple[Tensor, Tensor]:
        """(`distance` to `stats.top`, reach): what `Kernel.relative` is given."""

    def members(self, z: Tensor, stats: RowStats, kernel: Any, start: int) -> Tensor | None:
        """Which keys may have weight, where the threshold alone does not decide; None for all."""

    def stand_in(self, z: Tensor, stats: RowStats, start: int) -> Tensor:
        """The weights of rows in `stats.fallback`."""

    def pivot(self, z: Tensor, stats: RowStats, kernel: Any, params: Params) -> Tensor | None:
        """The place of a key whose A may outweigh that of all others, int64 [..., 1]; None where there is none."""

    def mix(self, slope: Tensor, p: Tensor) -> Tensor:
        """B, given A = slope."""

    def pull(self, z: Tensor, stats: RowStats, kernel: Any) -> Tensor | None:
        """dtheta/dz where `mix` does not hold it already; None for 0."""

    def theta_grads(self, dtheta: Tensor) -> dict[str, Tensor]:
        """Gradients of the rule's numbers, given dL/dtheta."""

    def power_grads(
        self, log_u: Tensor, drift: Tensor, stats: RowStats, kernel: Any, params: Params
    ) -> dict[str, Tensor]:
        """Gradient of the kernel's power: log_u = log(1 - d/reach), drift = p (G - rho)."""


def distance(z: Tensor, top: Tensor) -> Tensor:
    """d = top - z, +inf and without gradient at hidden keys."""
    if not torch.is_grad_enabled():
        return top - z
    return torch.where(z == -torch.inf, torch.inf, top - z)


def row_top(z: Tensor) -> tuple[Tensor, Tensor]:
    """(largest visible score, 0 in empty rows; whether the row is empty), as constants.

    The top only anchors the arithmetic: no weight depends on it, so that it carries no gradient.
    """
    top = z.detach().amax(-1, keepdim=True)
    empty = top == -torch.inf
    return torch.where(empty, 0, top), empty


@dataclass(frozen=True)
class Ratio:
    """p_j = K(z_j - theta) / sum K for a ranked kernel and a bandwidth rule."""

    kernel: Any
    rule: Any

    nonnegative: ClassVar[bool] = True
    normalised: ClassVar[bool] = True

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
        return stats, self._finished(relative, z, stats, 0)

    def _fit(self, z: Tensor, params: Params, fast: bool) -> tuple[RowStats, Tensor]:
        """Statistics, and weights that are not divided by their sum yet."""
        top, empty = row_top(z)
        found = self.rule.locate(z, top, self.kernel, params, fast=fast)
        status = found.get("status")
        fallback = found["fallback"] & ~empty if "fallback" in found else torch.zeros_like(empty)
        stats = RowStats(
            top=torch.where(empty, 0, found["top"]) if "top" in found else top,
            theta=torch.where(empty, -1, found["theta"]),
            reach=torch.where(empty | fallback, 1, found["reach"]),
            mass=torch.ones_like(top),
            empty=empty,
            fallback=fallback,
            status=torch.zeros_like(empty, dtype=torch.int32) if status is None else torch.where(empty, 0, status),
            index=found.get("index"),
        )
        relative = self._relative(z, stats, params, 0)
        mass = relative.sum(-1, keepdim=True)
        return replace(stats, mass=torch.where(empty | stats.fallback, 1, mass)), relative

    def weights(self, z: Tensor, stats: RowStats, params: Params, start: int = 0) -> Tensor:
        return self._finished(self._relative(z, stats, params, start), z, stats, start)

    def _finished(self, relative: Tensor, z: Tensor, stats: RowStats, start: int) -> Tensor:
        p = relative / stats.mass  # 0 / 1 in empty rows
        if not self.rule.may_miss(self.kernel):
            return p
        return torch.where(stats.fallback, self.rule.stand_in(z.detach(), stats, start), p)

    def _relative(self, z: Tensor, stats: RowStats, params: Params, start: int) -> Tensor:
        d, reach = self.rule.distance(z, stats, self.kernel, params)
        edge = reach if self.rule.bounded(self.kernel) else float("inf")
        w = self.kernel.relative(d, edge, self.rule.kernel_params(params))
        members = self.rule.members(z, stats, self.kernel, start)
        return w if members is None else torch.where(members, w, 0 * stats.top)  # 0 * keeps a row's NaN

    def log_mass(self, stats: RowStats, params: Params) -> Tensor:
        """log sum_j K(z_j - theta) of every row, -inf where none has weight."""
        own = self.rule.kernel_params(params)
        peak = getattr(self.kernel, "log_peak", lambda top, reach, own: self.kernel.value(reach, own).log())
        log = stats.mass.log() + peak(stats.top, stats.reach, own)
        return torch.where(stats.fallback, -torch.inf, log)

    def jacobian(self, z: Tensor, p: Tensor, stats: RowStats, params: Params) -> tuple[Tensor, Tensor]:
        if getattr(self.kernel, "own_slope", False) and not self.rule.may_miss(self.kernel):
            return p, self.rule.mix(p, p)
        own = self.rule.kernel_params(params)
        d, reach = self.rule.distance(
            z, stats, self.kernel, params
        )  # in the units of `mass`, which has derivatives too
        edge = reach if self.rule.bounded(self.kernel) else float("inf")
        slope = self.kernel.relative_slope(d, edge, own) / stats.mass
        members = self.rule.members(z, stats, self.kernel, 0)
        if members is not None:
            slope = torch.where(members, slope, 0)
        if self.rule.may_miss(self.kernel):
            slope = torch.where(stats.fallback, 0, slope)
        return slope, self.rule.mix(slope, p)

    def centred(self, g: Tensor, z: Tensor, stats: RowStats, params: Params) -> Tensor:
        pivot = self.rule.pivot(z, stats, self.kernel, params)
        return g if pivot is None else g - g.gather(-1, pivot)

    def finish(self, dz: Tensor, rho: Tensor, z: Tensor, p: Tensor, stats: RowStats, params: Params) -> Tensor:
        pull = self.rule.pull(z, stats, self.kernel)
        return dz if pull is None else dz - dz.sum(-1, keepdim=True) * pull

    def param_grads(
        self, dz: Tensor, g: Tensor, rho: Tensor, z: Tensor, p: Tensor, stats: RowStats, params: Params
    ) -> dict[str, Tensor]:
        moved = -dz.sum(-1, keepdim=True)  # dL/dtheta, where the kernel falls to its threshold
        grads = dict(self.rule.theta_grads(moved if self.kernel.vanishes else torch.zeros_like(moved)))
        if "r" in self.kernel.params:
            log_u = self.kernel.log_relative(distance(z, stats.top), stats.reach)
            drift = torch.where(stats.fallback, 0, p * (g - rho))
            grads |= self.rule.power_grads(log_u, drift, stats, self.kernel, params)
        return grads


GUARD = 1e-3
"""The least |sum of weights| of a signed kernel, as a share of sqrt(n sum of squared weights), n the visible keys: an
upper bound of the sum of |weights| that a sum over features can give, too."""


@dataclass(frozen=True)
class Plain:
    """p_j = K(z_j + bias), as it is or divided by its sum: for sums without normalisation and for kernels of
    the score itself.

    Where a signed kernel is normalised, a denominator below `GUARD` times sqrt(n sum K^2) is held there (with its
    sign) and reported as `Status.NEAR_ZERO`; a negative one is used as it is and reported as `Status.NEGATIVE`.
    Weights that are known to be non-negative need no guard; a bias given per call that makes them negative gets none.
    """

    kernel: Any
    bias: float
    normalised: bool
    nonnegative: bool
    shift_invariant: ClassVar[bool] = False
    indices: ClassVar[int] = 0

    @property
    def params(self) -> Mapping[str, ParamInfo]:
        return {**self.kernel.params, **({"bias": ParamInfo(self.bias)} if self.kernel.scaled else {})}

    def fit(self, z: Tensor, params: Params, *, fast: bool = False) -> RowStats:
        top, empty = row_top(z)
        stats = RowStats(
            top=top,
            theta=torch.full_like(top, -torch.inf),
            reach=torch.ones_like(top),
            mass=torch.ones_like(top),
            empty=empty,
            fallback=torch.zeros_like(empty),
            status=torch.zeros_like(empty, dtype=torch.int32),
        )
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
        """sqrt(n sum w^2) over the visible keys, 0 with gradient 0 where all weights are."""
        unit = w.detach().abs().amax(-1, keepdim=True)  # squares of large weights would overflow
        unit = torch.where(unit > 0, unit, 1)
        square = (w / unit).square().sum(-1, keepdim=True)
        some = square > 0
        count = (z > -torch.inf).sum(-1, keepdim=True)
        return torch.where(some, unit * (count * torch.where(some, square, 1)).sqrt(), 0)

    def weights(self, z: Tensor, stats: RowStats, params: Params, start: int = 0) -> Tensor:
        w = self._values(z, params)
        if not self.normalised:
            return w
        small = self._small(stats)
        fixed = w.detach() / stats.mass.detach()
        return torch.where(small, fixed, torch.where(small, 0, w) / torch.where(small, 1, stats.mass))

    def _small(self, stats: RowStats) -> Tensor:
        """Rows whose sum is so small that gradients divided by it would overflow: they pass none on."""
        return stats.mass.detach().abs() < least_reach(stats.mass.dtype)

    def _values(self, z: Tensor, params: Params) -> Tensor:
        hidden = z == -torch.inf
        a = torch.where(hidden, 0, z) + params.get("bias", self.bias)
        return torch.where(hidden, 0, self.kernel.value(a, params))

    def jacobian(self, z: Tensor, p: Tensor, stats: RowStats, params: Params) -> tuple[Tensor, Tensor]:
        hidden = z == -torch.inf
        a = torch.where(hidden, 0, z) + params.get("bias", self.bias)
        slope = torch.where(hidden | self._small(stats), 0, self.kernel.slope(a, params)) / stats.mass
        return slope, p if self.normalised else torch.zeros_like(p)

    def finish(self, dz: Tensor, rho: Tensor, z: Tensor, p: Tensor, stats: RowStats, params: Params) -> Tensor:
        if not self.normalised or self.nonnegative:
            return dz
        # A guarded denominator is m = +-GUARD sqrt(n sum w^2), whose derivative by w_j is not 1 but GUARD^2 n w_j / m.
        held = GUARD**2 * p * (z > -torch.inf).sum(-1, keepdim=True)
        slope, _ = self.jacobian(z, p, stats, params)
        return torch.where(stats.status == int(Status.NEAR_ZERO), dz + slope * (1 - held) * rho, dz)

    def param_grads(
        self, dz: Tensor, g: Tensor, rho: Tensor, z: Tensor, p: Tensor, stats: RowStats, params: Params
    ) -> dict[str, Tensor]:
        grads = {"bias": self.finish(dz, rho, z, p, stats, params).sum(-1, keepdim=True)}
        if "r" in self.kernel.params:
            a = torch.where(z == -torch.inf, 0, z) + params.get("bias", self.bias)
            log = torch.where(a > 0, torch.where(a > 0, a, 1).log(), 0)
            grads["r"] = (p * log * (g - rho)).sum(-1, keepdim=True)
        return grads
