"""The pairs of an associative memory. Nothing changes in place, so that gradients flow through."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Pairs:
    """n pairs of keys [B, H, n, D] and values [B, H, n, Dv], the oldest first."""

    keys: Tensor
    values: Tensor
    mask: Tensor | None = None  # [B, n], False at padding; None without padding

    def __len__(self) -> int:
        return self.keys.shape[2]

    @property
    def bytes(self) -> int:
        """The memory of all tensors; values that are the keys count once."""
        held = {id(t): t for t in (self.keys, self.values, self.mask) if t is not None}
        return sum(t.nbytes for t in held.values())

    def map(self, fn: Callable[[Tensor], Tensor]) -> Pairs:
        keys = fn(self.keys)
        values = keys if self.values is self.keys else fn(self.values)
        return Pairs(keys, values, None if self.mask is None else fn(self.mask))

    def append(self, new: Pairs) -> Pairs:
        """Return these pairs followed by the new ones. Copies all: O(n)."""
        keys = torch.cat([self.keys, new.keys], 2)
        same = self.values is self.keys and new.values is new.keys
        values = keys if same else torch.cat([self.values, new.values], 2)
        if self.mask is None and new.mask is None:
            return Pairs(keys, values)
        return Pairs(keys, values, torch.cat([self._taken(), new._taken()], 1))

    def _taken(self) -> Tensor:
        if self.mask is not None:
            return self.mask
        return torch.ones(self.keys.shape[0], len(self), dtype=torch.bool, device=self.keys.device)

    def select(self, places: Tensor) -> Pairs:
        """Return the pairs at `places`, int64 [m]."""
        keys = self.keys.index_select(2, places)
        values = keys if self.values is self.keys else self.values.index_select(2, places)
        return Pairs(keys, values, None if self.mask is None else self.mask.index_select(1, places))

    def newest(self, n: int) -> Pairs:
        return self.select(torch.arange(max(len(self) - n, 0), len(self), device=self.keys.device))

    def expand(self, batch: int) -> Pairs:
        """Use one memory for every sequence of a batch, without a copy."""
        return self if len(self.keys) == batch else self.map(lambda t: t.expand(batch, *t.shape[1:]))

    @property
    def leading(self) -> tuple[int, int]:
        """B and H."""
        return self.keys.shape[0], self.keys.shape[1]

    @property
    def dtype(self) -> torch.dtype:
        return self.keys.dtype

    @property
    def device(self) -> torch.device:
        return self.keys.device


def learned(keys: Tensor, values: Tensor | None, batch: int) -> Pairs:
    """Return learned slots [H, m, D] and [H, m, Dv] (None: the keys) as pairs of every sequence of a batch."""
    key = keys[None].expand(batch, -1, -1, -1)
    return Pairs(key, key if values is None else values[None].expand(batch, -1, -1, -1))
