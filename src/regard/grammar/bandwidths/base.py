"""The base class of thresholding rules."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from ...checks import ArgumentError
from ...registry import Registry
from ..kernels import Number, ParamInfo, Params
from ..weighting import RowStats, Weighting, distance

bandwidths: Registry[Any] = Registry("thresholding rule", "regard.bandwidths")


class RuleBase(ABC):
    """Base class of thresholding rules: the threshold of a row, and its derivative with respect to the scores.

    A rule defines `weighting`, `bounded` and `locate`. The defaults are those of a rule without parameters, whose
    threshold is constant and alone decides which keys have weight. A rule with its own weighting only needs a name,
    `weighting` and `resolve`.
    """

    name: ClassVar[str]
    shift_invariant: ClassVar[bool] = True

    @abstractmethod
    def weighting(self, kernel: Any, normalise: bool, similarity: Any) -> Weighting:
        """Return the weighting of this rule and `kernel`.

        Raises:
            ArgumentError: rule and kernel cannot be combined; the message says why and what to use instead.
        """

    def own_params(self) -> Mapping[str, ParamInfo]:
        """Return the learnable parameters of the rule."""
        return {}

    def param_info(self, kernel: Any) -> Mapping[str, ParamInfo]:
        """Return the learnable parameters of the rule with `kernel`, those of the kernel included."""
        return {**kernel.params, **self.own_params()}

    def kernel_params(self, params: Params) -> Params:
        """Return the parameters under the kernel's names (adaptive: r from alpha)."""
        return params

    def power(self, kernel: Any, params: Params) -> Number:
        """Return the power r of `kernel`, 1 if it has none."""
        return self.kernel_params(params).get("r", getattr(kernel, "r", 1.0))

    @abstractmethod
    def bounded(self, kernel: Any) -> bool:
        """Return whether weights are zero below the threshold."""

    def may_miss(self, kernel: Any) -> bool:
        """Return whether a row with visible keys can have no key above the threshold (`fallback_weights`)."""
        return False

    def indices(self, kernel: Any) -> int:
        """Return the number of positions per row that `locate` returns as `index`."""
        return 0

    @abstractmethod
    def locate(self, z: Tensor, top: Tensor, kernel: Any, params: Params, *, fast: bool) -> dict[str, Any]:
        """Return `theta` and `reach`, and if they apply `top` (instead of the largest score), `fallback`, `status`,
        `index`. The argument `top` has no gradient."""

    def distance(self, z: Tensor, stats: RowStats, kernel: Any, params: Params) -> tuple[Tensor, Tensor]:
        """Return (distance to `stats.top`, reach), the arguments of `Kernel.relative`."""
        return distance(z, stats.top), stats.reach

    def pivot(self, z: Tensor, stats: RowStats, kernel: Any, params: Params) -> Tensor | None:
        """Return the position of a key whose A may be much larger than all others, int64 [..., 1], or None."""
        return None

    def members(self, z: Tensor, stats: RowStats, kernel: Any) -> Tensor | None:
        """Return which keys may have weight if the threshold alone does not decide; None for all."""
        return None

    def fallback_weights(self, z: Tensor, stats: RowStats) -> Tensor:
        """Return the weights of rows in `stats.fallback`."""
        return torch.zeros_like(z)

    def mix(self, slope: Tensor, p: Tensor) -> Tensor:
        """Return B, given A = slope."""
        return p

    def dtheta_dz(self, z: Tensor, stats: RowStats, kernel: Any) -> Tensor | None:
        """Return dtheta/dz unless `mix` contains it; None for 0."""
        return None

    def theta_grads(self, dtheta: Tensor) -> dict[str, Tensor]:
        """Return the gradients of the rule's parameters, given dL/dtheta."""
        return {}

    def power_grads(
        self, log_u: Tensor, drift: Tensor, stats: RowStats, kernel: Any, params: Params
    ) -> dict[str, Tensor]:
        """Return the gradient of the kernel's power: log_u = log(1 - d/reach), drift = p (G - rho)."""
        return {"r": (log_u * drift).sum(-1, keepdim=True)}

    def resolve(
        self, kernel: Any, similarity: Any, scale: Number | None, params: Params, dim: int
    ) -> tuple[Number, dict[str, Number]]:
        """Return the scale of the scores and the parameters of the weighting, from the arguments of a call."""
        return (similarity.default_scale(dim) if scale is None else scale), dict(params)


def require_ranked(rule: str, kernel: Any, normalise: bool) -> None:
    """Raise unless `kernel` depends on the distance to a threshold and weights are normalised."""
    if not kernel.ranked:
        raise ArgumentError(
            f"{kernel.name}*{rule}: the {kernel.name} kernel is a function of the score itself, not of its "
            f"distance to a threshold, so only the fixed rule applies; use {kernel.name}*fixed."
        )
    if not normalise:
        raise ArgumentError(
            f"{kernel.name}*{rule}: the {rule} rule defines weights that sum to one, so normalise=False cannot "
            f"be used; use the fixed rule for unnormalised sums."
        )


def positions(z: Tensor) -> Tensor:
    """Return the positions of the keys."""
    return torch.arange(z.shape[-1], device=z.device)
