"""The cosine."""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from ...checks import number
from .base import Similarity, similarities


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
