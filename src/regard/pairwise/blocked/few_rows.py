"""The systems of a few rows that see many keys, as in decoding, without a copy of the keys. One pass over chunks that
fit a core's cache gives means and second moments, a second pass the slopes.

Legend: as in `weighted_rows`.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from .weighted_rows import WeightedRows

ROWS = 8
"""Maximum number of rows."""
CHUNK = 2**17
"""Numbers in a chunk of keys."""
NEAREST = 256
"""Maximum number of keys whose mean is the origin: the last that every row sees."""


class FewRows(WeightedRows):
    """`WeightedRows` of raw coordinates [n, w, D], moved to the origin one chunk at a time."""

    def _set_keys(self, y: Tensor, common: Tensor) -> None:
        self.raw, p = y, self.p
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
        """Return the mean of the near keys [n, 1, D]; zero if the keys spread wider than its length."""
        first = int(near.any(0).int().argmax()) if near.shape[1] else 0  # before it no head has a share
        share, y = self.share[:, None, first:], self.raw[:, first:]
        origin = share @ y
        far = origin.square().sum(-1, keepdim=True) > 0.5 * (share @ y.square().sum(-1, keepdim=True))
        # Heads that need no move are computed without one, so that results do not depend on other heads.
        count = int(far.sum())
        self._far, self._moved, self._all_moved = far, count > 0, count == far.numel()
        return torch.where(far, origin, 0)

    def _chunks(self) -> Iterator[tuple[slice, Tensor]]:
        """Yield slices of keys and their coordinates from the origin [n, chunk, D], valid until the next."""
        n, width, dim = self.raw.shape
        size = max(64, CHUNK // (n * dim))
        room = self.raw.new_empty(n, min(size, width), dim)
        for start in range(0, width, size):
            at = slice(start, min(start + size, width))
            part = self.raw[:, at]
            yield at, torch.sub(part, self.origin, out=room[:, : at.stop - start]) if self._moved else part

    @property
    def y(self) -> Tensor:
        """A copy, for methods not written for few rows."""
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
