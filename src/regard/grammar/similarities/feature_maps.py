"""Dot products of non-negative feature maps."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from .base import FeatureMap, similarities


@similarities.register("elu")
@dataclass(frozen=True)
class ELU(FeatureMap):
    """s = (elu(q) + 1) . (elu(k) + 1). Kernel-selection paper, Table 1; Katharopoulos et al. 2020.

    In float32 the products of features near exp(-50) on both sides lose digits, and underflow near exp(-80).
    """

    grows: ClassVar[bool] = False

    def features(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        return self._map(query), self._map(key)

    @staticmethod
    def _map(x: Tensor) -> Tensor:
        """Return elu(x) + 1 as exp(x) for x <= 0, where the sum would lose all digits."""
        above = x > 0
        return torch.where(above, x + 1, x.masked_fill(above, 0).exp())  # clamp has no slope at 0 from torch 2.15 on


@similarities.register("relu")
@dataclass(frozen=True)
class ReLU(FeatureMap):
    """s = relu(q) . relu(k). Kernel-selection paper, Table 1."""

    grows: ClassVar[bool] = False

    def features(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        return query.relu(), key.relu()


@similarities.register("relu2")
@dataclass(frozen=True)
class ReLU2(FeatureMap):
    """s = relu(q)^2 . relu(k)^2. Kernel-selection paper, Table 1."""

    def features(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        return query.relu().square(), key.relu().square()
