"""What a bandwidth rule is, and what most of them share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor

from ...checks import ArgumentError
from ...registry import Registry
from ..kernels import Number, ParamInfo, Params
from ..weighting import RowStats, Weighting, distance

bandwidths: Registry[Any] = Registry("bandwidth rule", "regard.bandwidths")


@runtime_checkable
class Bandwidth(Protocol):
    """A rule of the grammar. It builds its weighting, or says why the product has no meaning."""

    name: ClassVar[str]

    def weighting(self, kernel: Any, normalise: bool, similarity: Any) -> Weighting:
        """The weighting of this rule and `kernel`.

        Raises:
            ArgumentError: the product has no meaning; the message gives the reason and what to use instead.
        """

    def resolve(
        self, kernel: Any, similarity: Any, scale: Number | None, params: Params, dim: int
    ) -> tuple[Number, dict[str, Number]]:
        """The scale of the scores and the weighting's numbers, from what the caller gave."""


class RuleBase:
    """Defaults: no numbers of its own, everything visible is a member, a threshold that does not move."""

    name: ClassVar[str]
    shift_invariant: ClassVar[bool] = True

    def own_params(self) -> Mapping[str, ParamInfo]:
        return {}

    def param_info(self, kernel: Any) -> Mapping[str, ParamInfo]:
        return {**kernel.params, **self.own_params()}

    def may_miss(self, kernel: Any) -> bool:
        return False

    def indices(self, kernel: Any) -> int:
        return 0

    def kernel_params(self, params: Params) -> Params:
        return params

    def distance(self, z: Tensor, stats: RowStats, kernel: Any, params: Params) -> tuple[Tensor, Tensor]:
        return distance(z, stats.top), stats.reach

    def pivot(self, z: Tensor, stats: RowStats, kernel: Any, params: Params) -> Tensor | None:
        return None

    def members(self, z: Tensor, stats: RowStats, kernel: Any, start: int) -> Tensor | None:
        return None

    def stand_in(self, z: Tensor, stats: RowStats, start: int) -> Tensor:
        return torch.zeros_like(z)

    def mix(self, slope: Tensor, p: Tensor) -> Tensor:
        return p

    def pull(self, z: Tensor, stats: RowStats, kernel: Any) -> Tensor | None:
        return None

    def theta_grads(self, dtheta: Tensor) -> dict[str, Tensor]:
        return {}

    def power_grads(
        self, log_u: Tensor, drift: Tensor, stats: RowStats, kernel: Any, params: Params
    ) -> dict[str, Tensor]:
        return {"r": (log_u * drift).sum(-1, keepdim=True)}

    def resolve(
        self, kernel: Any, similarity: Any, scale: Number | None, params: Params, dim: int
    ) -> tuple[Number, dict[str, Number]]:
        return (similarity.default_scale(dim) if scale is None else scale), dict(params)


def require_ranked(rule: str, kernel: Any, normalise: bool) -> None:
    """Rules other than fixed look at scores relative to the best one, and their weights sum to one."""
    if not kernel.ranked:
        raise ArgumentError(
            f"{kernel.name}*{rule}: the {kernel.name} kernel is a function of the score itself, not of its "
            f"distance to a threshold, so that only the fixed rule has a meaning; use {kernel.name}*fixed."
        )
    if not normalise:
        raise ArgumentError(
            f"{kernel.name}*{rule}: the {rule} rule defines weights that sum to one, so normalise=False has no "
            f"meaning; use the fixed rule for unnormalised sums."
        )


def positions(z: Tensor, start: int) -> Tensor:
    """Key numbers of a block whose first key is `start`."""
    return torch.arange(start, start + z.shape[-1], device=z.device)
