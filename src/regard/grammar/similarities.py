"""Similarities: how near a query is to a key, before any kernel looks at it.

Every similarity is a dot product of features, s_ij = phi(q_i) . psi(k_j), so that one matrix product serves
them all, and every implementation sees features only. Scores are z = scale * s.

Legend: B batch, H heads, T positions, D head dimension, F features.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor

from ..checks import ArgumentError, number
from ..registry import Registry

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


class _Features:
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


@similarities.register("dot")
@dataclass(frozen=True)
class Dot(_Features):
    """s = q . k, scale 1/sqrt(D) by default: the scores of scaled dot-product attention."""

    name: ClassVar[str] = "dot"
    scaled: ClassVar[bool] = True

    def default_scale(self, dim: int) -> float:
        return dim**-0.5

    def features(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        return query, key


@similarities.register("cosine")
@dataclass(frozen=True)
class Cosine(_Features):
    """s = q . k / sqrt((eps + |q|^2)(eps + |k|^2)), strictly inside (-1, 1) for eps > 0.

    Kernel-selection paper, Table 1 (its alpha = 1e-3 is our eps). eps = 0 is the exact cosine; a zero vector
    then has similarity 0 to everything. The default scale is 1.
    """

    eps: float = 1e-3
    name: ClassVar[str] = "cosine"
    scaled: ClassVar[bool] = True
    lower: ClassVar[float] = -1.0  # type: ignore[misc]
    upper: ClassVar[float] = 1.0  # type: ignore[misc]

    def __post_init__(self) -> None:
        number("cosine", "eps", self.eps, low=0.0)

    def features(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        return self._unit(query), self._unit(key)

    def _unit(self, x: Tensor) -> Tensor:
        if self.eps == 0:  # no length matters then, and none may be lost in its square
            size = x.detach().abs().amax(-1, keepdim=True)
            x = x / torch.where(size > 0, size, 1)
        square = x.square().sum(-1, keepdim=True) + self.eps
        return x * torch.where(square > 0, square, 1).rsqrt()

    def threshold(self, h: Any) -> Any:
        return 1 - h * h / 2


@similarities.register("euclidean")
@dataclass(frozen=True)
class Euclidean(_Features):
    """s = -|q - k|^2 / 2, scale 1/sqrt(D) by default: on unit vectors the dot product less one.

    With a Gaussian kernel this is the radial basis function exp(-|q - k|^2 / g) with g = 2 / scale
    (kernel-selection paper, Table 1). Computed as q . k - |q|^2/2 - |k|^2/2, whose rounding grows with the
    norms: in float32 a distance below about 1e-3 |q| is not seen, so centre data that lie far from 0.
    """

    name: ClassVar[str] = "euclidean"
    scaled: ClassVar[bool] = True
    symmetric: ClassVar[bool] = False
    grows: ClassVar[bool] = True
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


class _Mapped(_Features):
    """The same non-negative feature map on both sides: s >= 0, no scale, and no distance."""

    lower: float = 0.0

    def squared_distance(self, s: Tensor) -> Tensor:
        return torch.full_like(s, torch.inf)


@similarities.register("relu")
@dataclass(frozen=True)
class ReLU(_Mapped):
    """s = relu(q) . relu(k). Kernel-selection paper, Table 1."""

    name: ClassVar[str] = "relu"

    def features(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        return query.relu(), key.relu()


@similarities.register("relu2")
@dataclass(frozen=True)
class ReLU2(_Mapped):
    """s = relu(q)^2 . relu(k)^2. Kernel-selection paper, Table 1."""

    name: ClassVar[str] = "relu2"
    grows: ClassVar[bool] = True

    def features(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        return query.relu().square(), key.relu().square()


@similarities.register("elu")
@dataclass(frozen=True)
class ELU(_Mapped):
    """s = (elu(q) + 1) . (elu(k) + 1). Kernel-selection paper, Table 1; Katharopoulos et al. 2020.

    In float32 the products of features near exp(-50) on both sides lose digits, and underflow near exp(-80).
    """

    name: ClassVar[str] = "elu"

    def features(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        return self._map(query), self._map(key)

    @staticmethod
    def _map(x: Tensor) -> Tensor:
        """elu(x) + 1, which is exp(x) for x <= 0: as a sum it would lose all digits of exp(x) there."""
        return torch.where(x > 0, x + 1, torch.exp(x.clamp(max=0)))
