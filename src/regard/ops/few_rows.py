"""The systems of a few rows that see many keys, as in decoding: no copy of the keys is made. One pass over chunks that
stay in a core's cache gives means and second moments, a second one the slopes.

Legend: as in `weighted_rows`.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from .weighted_rows import WeightedRows

ROWS = 8
"""Rows of a block up to which this is done."""
CHUNK = 2**17
"""Numbers of a chunk of keys."""
NEAREST = 256
"""The origin is the mean of so many keys at most, the last of those that every row sees."""


class FewRows(WeightedRows):
    """`WeightedRows` of raw coordinates [n, w, D], moved to their origin a chunk at a time."""

    def __init__(
        self, p: Tensor, y: Tensor, common: Tensor, ridge: float | Tensor, probe: Tensor | None = None
    ) -> None:
        self.raw, self.ridge, self.probe, self.p, self._last = y, ridge, probe, p, None
        near = common & (common.flip(-1).cumsum(-1).flip(-1) <= NEAREST)
        self.share = near / near.sum(-1, keepdim=True).clamp(min=1).to(p.dtype)
        first = int(near.any(0).int().argmax()) if near.shape[1] else 0  # before it no head has a share
        self.origin = self.share[:, None, first:] @ y[:, first:]
        n, q, _ = p.shape
        dim = y.shape[-1]
        self.mean = p.new_zeros(n, q, dim)
        self.moments = p.new_zeros(n, q, dim, dim)
        for at, part in self._chunks():
            weighted = part[:, None] * p[..., at, None]
            self.mean += weighted.sum(-2)
            flat = self.moments.flatten(0, 1)
            flat.baddbmm_(weighted.flatten(0, 1).transpose(-1, -2), part.repeat_interleave(q, 0) if q > 1 else part)

    def _chunks(self) -> Iterator[tuple[slice, Tensor]]:
        """Keys, and their coordinates from the origin [n, chunk, D], to be used before the next."""
        n, width, dim = self.raw.shape
        size = max(64, CHUNK // (n * dim))
        room = self.raw.new_empty(n, min(size, width), dim)
        for start in range(0, width, size):
            at = slice(start, min(start + size, width))
            yield at, torch.sub(self.raw[:, at], self.origin, out=room[:, : at.stop - start])

    @property
    def y(self) -> Tensor:
        """For what is not made for few rows: a copy."""
        return self.raw - self.origin

    @property
    def rank(self) -> int:
        return self.raw.shape[1]

    def slopes(self, x: Tensor) -> Tensor:
        s = torch.empty_like(self.p)
        for at, part in self._chunks():
            s[..., at] = x @ part.transpose(-1, -2)
        return s.sub_((self.mean * x).sum(-1, keepdim=True))

    def matrix(self) -> Tensor:
        spread = self.moments - self.mean[..., :, None] * self.mean[..., None, :]
        spread.diagonal(dim1=-2, dim2=-1).add_(self.ridge)
        return spread
