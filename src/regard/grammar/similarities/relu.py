"""The dot product of rectified coordinates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from .base import FeatureMap, similarities


@similarities.register("relu")
@dataclass(frozen=True)
class ReLU(FeatureMap):
    """s = relu(q) . relu(k). Kernel-selection paper, Table 1."""

    name: ClassVar[str] = "relu"

    def features(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        return query.relu(), key.relu()
