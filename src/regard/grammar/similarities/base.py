"""Similarities of queries and keys.

Every similarity is a dot product of features, s_ij = phi(q_i) . psi(k_j), so implementations see only features.
Scores are z = scale * s.

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
    """s = phi(q) . psi(k), and its range."""

    name: ClassVar[str]
    lower: float  # lower bound of s
    upper: float  # upper bound of s (1 for a cosine)
    scaled: ClassVar[bool]  # whether z = scale * s accepts a scale
    # Optional: grows, whether features can be larger than 1 and the largest entry. Default True.

    def default_scale(self, dim: int) -> float:
        """Return the default scale."""

    def features(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """Return phi(q) [..., Tq, F] and psi(k) [..., Tk, F] of q [..., Tq, D] and k [..., Tk, D]."""

    def threshold(self, h: Any) -> Any:
        """Return the similarity at distance `h`. Raise if the similarity has no distance."""

    def squared_distance(self, s: Tensor) -> Tensor:
        """Return the squared distance at similarity s (of unit vectors for a dot product)."""


class Features:
    """Defaults: features without a distance."""

    lower: float = -math.inf
    upper: float = math.inf
    scaled: ClassVar[bool] = False
    symmetric: ClassVar[bool] = True  # phi = psi: the features of q = k are stored once
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
    """One non-negative feature map for queries and keys: s >= 0, no scale, no distance."""

    lower: float = 0.0

    def squared_distance(self, s: Tensor) -> Tensor:
        return torch.full_like(s, torch.inf)
