"""Similarities of queries and keys.

Every similarity is a dot product of features, s_ij = phi(q_i) . psi(k_j), so implementations see only features.
Scores are z = scale * s.

Legend: B batch, H heads, T positions, D head dimension, F features.
"""

import math
from abc import ABC, abstractmethod
from typing import Any, ClassVar

import torch
from torch import Tensor

from ...checks import ArgumentError
from ...registry import Registry

similarities: Registry[Any] = Registry("similarity", "regard.similarities")


class Similarity(ABC):
    """s = phi(q) . psi(k), and its range. By default without a distance."""

    name: ClassVar[str]
    lower: float = -math.inf  # lower bound of s
    upper: float = math.inf  # upper bound of s (1 for a cosine)
    scaled: ClassVar[bool] = False  # whether z = scale * s accepts a scale
    symmetric: ClassVar[bool] = True  # phi = psi: the features of q = k are stored once
    grows: ClassVar[bool] = True  # whether features can be larger than 1 and the largest entry; False saves a check

    @abstractmethod
    def features(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """Return phi(q) [..., Tq, F] and psi(k) [..., Tk, F] of q [..., Tq, D] and k [..., Tk, D]."""

    def default_scale(self, dim: int) -> float:
        """Return the default scale."""
        return 1.0

    def threshold(self, h: Any) -> Any:
        """Return the similarity at distance `h`. Raise if the similarity has no distance."""
        raise ArgumentError(
            f"fixed(h=...): a bandwidth in units of distance needs similarity 'cosine' or 'euclidean', not "
            f"{self.name!r}; choose one of those, or give fixed(bias=...), which acts on the scores."
        )

    def squared_distance(self, s: Tensor) -> Tensor:
        """Return the squared distance at similarity s (of unit vectors for a dot product)."""
        return 2 * (1 - s)


class FeatureMap(Similarity):
    """One non-negative feature map for queries and keys: s >= 0, no scale, no distance."""

    lower: float = 0.0

    def squared_distance(self, s: Tensor) -> Tensor:
        return torch.full_like(s, torch.inf)
