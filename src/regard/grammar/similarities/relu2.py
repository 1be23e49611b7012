"""The dot product of squared rectified coordinates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from .base import FeatureMap, similarities


@similarities.register("relu2")
@dataclass(frozen=True)
class ReLU2(FeatureMap):
    """s = relu(q)^2 . relu(k)^2. Kernel-selection paper, Table 1."""

    name: ClassVar[str] = "relu2"
    grows: ClassVar[bool] = True

    def features(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        return query.relu().square(), key.relu().square()
