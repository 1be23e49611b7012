"""Which tokens of a batch are streams of their own, and in what order: masks and documents packed into a row.

Legend: B rows, T positions, R streams, L tokens of the longest.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Layout:
    """Streams as rows that begin at their left, or, where the batch shares one memory, as columns of tokens.

    Attributes:
        index: int64 [R, L], where in the B * T positions each token stands; any where there is none.
        good: bool [R, L], whether there is one.
        back: int64 [B, T], where in the R * L places each position went; any where it was masked.
        real: bool [B, T].
        counts: tokens of each stream; of a shared memory one number, the columns.
        row: of each stream, the row it comes from.
        before: of each stream, how many real tokens come before it in its row.
        first, last: the first and the last stream of every row.
        order: int64 [R, L], how many real tokens of its row come before each token.
    """

    index: Tensor
    good: Tensor
    back: Tensor
    real: Tensor
    counts: tuple[int, ...]
    row: tuple[int, ...]
    before: tuple[int, ...]
    first: tuple[bool, ...]
    last: tuple[int, ...]
    order: Tensor

    def gather(self, x: Tensor) -> Tensor:
        """[B, T, ...] as [R, L, ...]."""
        return x.flatten(0, 1)[self.index]

    def scatter(self, x: Tensor) -> Tensor:
        """[R, L, D] as [B, T, D], 0 where masked."""
        if x.shape[1] == 0:
            return x.new_zeros(*self.back.shape, x.shape[-1])
        return torch.where(self.real[..., None], x.flatten(0, 1)[self.back], 0)

    @property
    def seen(self) -> tuple[int, ...]:
        """How many real tokens every row has."""
        return tuple(self.real_counts)

    @property
    def real_counts(self) -> list[int]:
        counts: list[int] = self.real.sum(1).tolist()
        return counts
