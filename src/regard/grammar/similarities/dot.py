"""The dot product."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from .base import Similarity, similarities


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
