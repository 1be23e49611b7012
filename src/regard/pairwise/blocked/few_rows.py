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
        self,
        p: Tensor,
        y: Tensor,
        common: Tensor,
        ridge: float | Tensor,
        probe: Tensor | None = None,
        fewest: int = 0,
        sparse: bool = False,
    ) -> None:
        self.raw, self.ridge, self.probe, self.p = y, ridge, probe, p
        self.fewest, self.sparse = fewest, sparse
        self._last = self.source = self.raised = None
        near = common
        if common.shape[-1] > NEAREST:
            near = common & (common.flip(-1).cumsum(-1).flip(-1) <= NEAREST)
        self.share = near / near.sum(-1, keepdim=True).clamp(min=1).to(p.dtype)
        self.origin = self._origin(near)
        self.mean = p.new_zeros(p.shape[0], p.shape[1], y.shape[-1])
        if self._moved:
            for at, part in self._chunks():
                self.mean.baddbmm_(p[..., at], part)
        if not self._all_moved:
            self.mean = torch.where(self._far, self.mean, p @ y)

    def _origin(self, near: Tensor) -> Tensor:
        """The mean of the near keys [n, 1, D]; zero, which saves the move, where keys spread wider than it is far."""
        first = int(near.any(0).int().argmax()) if near.shape[1] else 0  # before it no head has a share
        share, y = self.share[:, None, first:], self.raw[:, first:]
        origin = share @ y
        far = origin.square().sum(-1, keepdim=True) > 0.5 * (share @ y.square().sum(-1, keepdim=True))
        # Heads that need no move are done as if none did: their bits are not to hang on other heads' keys.
        count = int(far.sum())
        self._far, self._moved, self._all_moved = far, count > 0, count == far.numel()
        return torch.where(far, origin, 0)

    def _chunks(self) -> Iterator[tuple[slice, Tensor]]:
        """Keys, and their coordinates from the origin [n, chunk, D], to be used before the next."""
        n, width, dim = self.raw.shape
        size = max(64, CHUNK // (n * dim))
        room = self.raw.new_empty(n, min(size, width), dim)
        for start in range(0, width, size):
            at = slice(start, min(start + size, width))
            part = self.raw[:, at]
            yield at, torch.sub(part, self.origin, out=room[:, : at.stop - start]) if self._moved else part

    @property
    def y(self) -> Tensor:
        """For what is not made for few rows: a copy."""
        return self.raw - self.origin

    def slopes(self, x: Tensor) -> Tensor:
        s = torch.empty_like(self.p)
        if self._moved:
            for at, part in self._chunks():
                s[..., at] = x @ part.transpose(-1, -2)
        if not self._all_moved:
            plain = x @ self.raw.transpose(-1, -2)
            s = torch.where(self._far, s, plain) if self._moved else plain
        return s.sub_((self.mean * x).sum(-1, keepdim=True))

    def matrix(self) -> Tensor:
        n, q, _ = self.p.shape
        dim = self.raw.shape[-1]
        spread = self.mean[..., :, None] * -self.mean[..., None, :]
        flat, room = spread.flatten(0, 1), self.p.new_empty(0)
        for at, part in self._chunks():
            weighted = torch.mul(part[:, None], self.p[..., at, None], out=room.resize_(n, q, part.shape[1], dim))
            flat.baddbmm_(weighted.flatten(0, 1).transpose(-1, -2), part.repeat_interleave(q, 0) if q > 1 else part)
        spread.diagonal(dim1=-2, dim2=-1).add_(self.ridge)
        return spread

    def _keys(self, at: Tensor) -> Tensor:
        return self.raw.flatten(0, 1)[at] - self.origin.flatten(0, 1)[at[:, 0] // self.raw.shape[1], None]
