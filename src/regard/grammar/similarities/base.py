"""Similarities: how near a query is to a key, before any kernel looks at it.

Every similarity is a dot product of features, s_ij = phi(q_i) . psi(k_j), so that one matrix product serves
them all, and every implementation sees features only. Scores are z = scale * s.

Legend: B batch, H heads, T positions, D head dimension, F features.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor

from ...checks import ArgumentError
from ...registry import Registry

similarities: Registry[Any] = Registry("similarity", "regard.similarities")


@runtime_checkable
class Similarity(Protocol):
    """s = phi(q) . psi(k), with what is known of its range."""

    name: ClassVar[str]
    lower: float  # s is never below
    upper: float  # s is never above (1 for a cosine)
    scaled: ClassVar[bool]  # whether z = scale * s takes a scale
    # grows: ClassVar[bool], whether features can be larger than 1 and the largest entry; taken to be so where not said

    def default_scale(self, dim: int) -> float:
        """The scale used where none is given."""

    def features(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """phi(q) [..., Tq, F] and psi(k) [..., Tk, F] of q [..., Tq, D] and k [..., Tk, D]."""

    def threshold(self, h: Any) -> Any:
        """The similarity below which a key lies farther than `h`, or an error where distance is undefined."""

    def squared_distance(self, s: Tensor) -> Tensor:
        """The squared distance at similarity s (for unit keys where the similarity is a dot product)."""


class Features:
    """What similarities without a distance share."""

    lower: float = -math.inf
    upper: float = math.inf
    scaled: ClassVar[bool] = False
    symmetric: ClassVar[bool] = True  # phi = psi, so that q = k need be kept once
    grows: ClassVar[bool] = False
    name: ClassVar[str]

    def default_scale(self, dim: int) -> float:
        return 1.0

    def threshold(self, h: Any) -> Any:
        raise ArgumentError(
            f"fixed(h=...): a bandwidth in units of distance needs similarity 'cosine' or 'euclidean', not "
            f"{self.name!r}; choose one of those, or give fixed(bias=...), which acts on the scores."
        )

    def squared_distance(self, s: Tensor) -> Tensor:
        return 2 * (1 - s)


class FeatureMap(Features):
    """The same non-negative feature map on both sides: s >= 0, no scale, and no distance."""

    lower: float = 0.0

    def squared_distance(self, s: Tensor) -> Tensor:
        return torch.full_like(s, torch.inf)
