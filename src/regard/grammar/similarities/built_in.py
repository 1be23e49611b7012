"""The similarities that regard brings: cosine, dot product, squared distance, and non-negative feature maps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from ...checks import number
from .base import FeatureMap, Similarity, similarities


@similarities.register("cosine")
@dataclass(frozen=True)
class Cosine(Similarity):
    """s = q . k / sqrt((eps + |q|^2)(eps + |k|^2)), strictly inside (-1, 1) for eps > 0.

    Kernel-selection paper, Table 1 (whose alpha = 1e-3 is eps here). eps = 0 is the exact cosine, for which a zero
    vector has similarity 0 to every vector. The default scale is 1.
    """

    eps: float = 1e-3
    scaled: ClassVar[bool] = True
    grows: ClassVar[bool] = False
    lower: ClassVar[float] = -1.0  # type: ignore[misc]
    upper: ClassVar[float] = 1.0  # type: ignore[misc]

    def __post_init__(self) -> None:
        number("cosine", "eps", self.eps, low=0.0)

    def features(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        return self._unit(query), self._unit(key)

    def _unit(self, x: Tensor) -> Tensor:
        if self.eps == 0:  # keeps squares of very short and long vectors in range
            size = x.detach().abs().amax(-1, keepdim=True)
            x = x / torch.where(size > 0, size, 1)
        square = x.square().sum(-1, keepdim=True) + self.eps
        return x * torch.where(square > 0, square, 1).rsqrt()

    def threshold(self, h: Any) -> Any:
        return 1 - h * h / 2


@similarities.register("dot")
@dataclass(frozen=True)
class Dot(Similarity):
    """s = q . k, default scale 1/sqrt(D): the scores of scaled dot-product attention."""

    scaled: ClassVar[bool] = True
    grows: ClassVar[bool] = False

    def default_scale(self, dim: int) -> float:
        return dim**-0.5

    def features(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        return query, key


@similarities.register("euclidean")
@dataclass(frozen=True)
class Euclidean(Similarity):
    """s = -|q - k|^2 / 2, default scale 1/sqrt(D); on unit vectors the dot product minus one.

    With a Gaussian kernel this is the radial basis function exp(-|q - k|^2 / g) with g = 2 / scale
    (kernel-selection paper, Table 1). Computed as q . k - |q|^2/2 - |k|^2/2, whose rounding error grows with the
    norms: float32 does not resolve distances below about 1e-3 |q|, so centre data that lie far from 0.
    """

    scaled: ClassVar[bool] = True
    symmetric: ClassVar[bool] = False
    upper: ClassVar[float] = 0.0  # type: ignore[misc]

    def default_scale(self, dim: int) -> float:
        return dim**-0.5

    def features(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        q2 = query.square().sum(-1, keepdim=True) * -0.5
        k2 = key.square().sum(-1, keepdim=True) * -0.5
        phi = torch.cat([query, q2, torch.ones_like(q2)], -1)
        return phi, torch.cat([key, torch.ones_like(k2), k2], -1)

    def threshold(self, h: Any) -> Any:
        return -h * h / 2

    def squared_distance(self, s: Tensor) -> Tensor:
        return -2 * s


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
