"""The negative squared distance."""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from .base import Similarity, similarities


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
