"""What a memory holds, one pair after the other. Nothing is changed in place, so that gradients pass through."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Pairs:
    """n pairs of keys [B, H, n, D] and values [B, H, n, Dv], the oldest first.

    Attributes:
        mask: [B, n], False where a place holds nothing (padding); None where every place is taken.
    """

    keys: Tensor
    values: Tensor
    mask: Tensor | None = None

    def __len__(self) -> int:
        return self.keys.shape[2]

    @property
    def bytes(self) -> int:
        """Of the tensors held; values that are the keys themselves count once."""
        held = {id(t): t for t in (self.keys, self.values, self.mask) if t is not None}
        return sum(t.numel() * t.element_size() for t in held.values())

    def map(self, fn: Callable[[Tensor], Tensor]) -> Pairs:
        """The same pairs with `fn` applied to every tensor."""
        keys = fn(self.keys)
        values = keys if self.values is self.keys else fn(self.values)
        return Pairs(keys, values, None if self.mask is None else fn(self.mask))

    def append(self, new: Pairs) -> Pairs:
        """These pairs, then the new ones. Copies all: O(n)."""
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
        """The pairs at `places`, int64 [m]."""
        keys = self.keys.index_select(2, places)
        values = keys if self.values is self.keys else self.values.index_select(2, places)
        return Pairs(keys, values, None if self.mask is None else self.mask.index_select(1, places))

    def newest(self, n: int) -> Pairs:
        """All but the oldest, n of them."""
        places = torch.arange(max(len(self) - n, 0), len(self), device=self.keys.device)
        return self.select(places)

    def expand(self, batch: int) -> Pairs:
        """One memory for every sequence of a batch, without a copy."""
        if self.keys.shape[0] == batch:
            return self
        grown = lambda t: t.expand(batch, *t.shape[1:])  # noqa: E731
        return self.map(grown)

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
    """Learned slots [H, m, D] and [H, m, Dv] as the pairs of every sequence of a batch; no values: the keys."""
    key = keys[None].expand(batch, -1, -1, -1)
    return Pairs(key, key if values is None else values[None].expand(batch, -1, -1, -1))
