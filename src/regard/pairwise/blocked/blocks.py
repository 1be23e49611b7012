"""Blocks of heads, queries and keys of an attention call.

Legend: N = B x H heads, flattened; Tq, Tk queries and keys; n heads, q queries and w columns (keys) of one block.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ...grammar import Spec
from ..visibility import Visibility

ELEMENTS = 2**18
"""Query-key pairs of a block: fits a core's cache with its copies."""
ROWS = 128
"""Maximum number of queries of a block, and queries per mark."""
COLUMNS = 128
"""Keys per mark."""
CHUNK = 256
"""Keys per product with values if keys are left out."""
SPARSE = 0.6
"""Share of marked keys above which gathering them costs more than it saves."""


@dataclass
class Work:
    """One call without its tensors."""

    spec: Spec
    rows: Any  # the `Rows` of the implementation
    names: list[str]  # of the parameters given as tensors
    numbers: dict[str, float]  # the other parameters
    visible: Visibility
    heads: int  # H
    kv_heads: int  # Hkv
    total: int  # N
    ridge: float  # of a local linear model, if it is a number
    counted: bool  # whether diagnostics are wanted
    _ends: tuple[Tensor, Tensor] | None = None

    def ends(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return `Visibility.bounds` of all queries, computed once."""
        if self._ends is None:
            self._ends = self.visible.bounds(0, self.visible.queries, device)
        return self._ends

    def blocks(self) -> "Iterator[Block]":
        """Yield the blocks, of `rows.elements` pairs each if possible. For a local linear model they have two heads at
        2048 keys, since threads split heads better than products of 128 rows."""
        elements = self.rows.elements
        if self.spec.degree:
            elements = max(elements, 2 * min(ELEMENTS, elements))
        queries = self.visible.queries
        width = self.visible.keys if self.visible.window is None else 2 * self.visible.window + ROWS
        rows = ROWS
        while rows > 16 and rows * min(width, self.visible.keys) > elements:
            rows //= 2  # a power of two, so that a block has one row of marks
        for first in range(0, queries, rows):
            last = min(first + rows, queries)
            low, high = self.visible.span(first, last)
            if high == low:
                continue
            group = max(1, min(self.total, elements // ((last - first) * (high - low))))
            for n in range(0, self.total, group):
                yield Block(self, slice(n, min(n + group, self.total)), first, last, low, high)


@dataclass(frozen=True)
class Block:
    """Heads `at`, queries [first, last), keys [low, high), or only those in `kept` (int64 [w], relative to low)."""

    work: Work
    at: slice
    first: int
    last: int
    low: int
    high: int
    kept: Tensor | None = None

    @property
    def heads(self) -> int:
        return int(self.at.stop - self.at.start)

    def rows(self, x: Tensor) -> Tensor:
        """Return the block's queries of x [N, Tq, ...]."""
        return x[self.at, self.first : self.last]

    def _kv(self, device: torch.device) -> Tensor | slice:
        """Return which of the B x Hkv key heads the block's heads read."""
        ratio = self.work.heads // self.work.kv_heads
        if ratio == 1:
            return self.at
        if self.heads == 1:
            return slice(self.at.start // ratio, self.at.start // ratio + 1)
        return torch.arange(self.at.start, self.at.stop, device=device) // ratio

    def columns(self, x: Tensor) -> Tensor:
        """Return the block's keys of x [B x Hkv, Tk, ...]."""
        part = x[self._kv(x.device), self.low : self.high]
        return part if self.kept is None else part[:, self.kept]

    def add_columns(self, total: Tensor, x: Tensor, p: Tensor) -> None:
        """Add x^T p to the block's keys of `total` [B x Hkv, D, Tk], for x [n, q, D] and p [n, q, w]."""
        where = self._kv(total.device)
        x, p = x.to(total.dtype).transpose(-1, -2), p.to(total.dtype)  # p^T x would take 1.5 times as long
        if not isinstance(where, slice):
            part = x @ p
            if self.kept is not None:
                whole = part.new_zeros(*part.shape[:2], self.high - self.low)
                part = whole.index_copy_(2, self.kept, part)
            total[..., self.low : self.high].index_add_(0, where, part)
        elif self.kept is not None:
            total[where, :, self.low : self.high].index_add_(2, self.kept, x @ p)
        elif self.heads == 1:
            total[where.start, :, self.low : self.high].addmm_(x[0], p[0])
        else:
            total[where, :, self.low : self.high].baddbmm_(x, p)

    def add_rows(self, total: Tensor, x: Tensor) -> None:
        """Add x [n, w, D] to the block's keys of `total` [B x Hkv, D, Tk], for a block with all its keys."""
        where = self._kv(total.device)
        part, x = total[..., self.low : self.high], x.to(total.dtype).transpose(-1, -2)
        if isinstance(where, slice):
            part[where] += x
        else:
            part.index_add_(0, where, x)

    def add_weighted(self, out: Tensor, p: Tensor, v: Tensor, marks: Tensor) -> None:
        """Add p v to out [n, q, Dv] by chunks of keys, without chunks that have no mark. Chunks have fixed borders, so
        that leaving one out only omits zeros: the weights of one row do not change any other row."""
        alive = marks.any(0).tolist()
        for start in range(self.low - self.low % CHUNK, self.high, CHUNK):
            first, last = max(start, self.low), min(start + CHUNK, self.high)
            if not any(alive[first // COLUMNS : (last - 1) // COLUMNS + 1]):
                continue
            at = slice(first - self.low, last - self.low)
            if self.heads == 1:
                out[0].addmm_(p[0, :, at], v[0, at])
            else:
                out.baddbmm_(p[..., at], v[:, at])

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        """Return q . k [n, q, w], before masking."""
        return self.rows(q) @ self.columns(k).transpose(-1, -2)

    def hide(self, z: Tensor, *, positional: bool = True, fill: float = -torch.inf) -> Tensor:
        """Write `fill` to masked keys of z, in place; without `positional` only those of the mask."""
        visible = self.work.visible
        if visible.mask is None and not (positional and visible.positional):
            return z
        low = self._edge(visible) if positional else None
        if low is not None:
            seen = visible.block(self.first, self.last, low, self.high, z.device)
            z[..., low - self.low :].masked_fill_(~seen[0], fill)
            return z
        seen = visible.block(self.first, self.last, self.low, self.high, z.device, positional=positional)
        if self.kept is not None and seen.shape[-1] > 1:
            seen = seen[..., self.kept]
        if seen.shape[0] == 1 and seen.shape[1] == 1:
            return z.masked_fill_(~seen[0], fill)
        full = seen.expand(self.work.total // self.work.heads, self.work.heads, *seen.shape[-2:])
        n = torch.arange(self.at.start, self.at.stop, device=z.device)
        return z.masked_fill_(~full[n // self.work.heads, n % self.work.heads], fill)

    def _edge(self, visible: Visibility) -> int | None:
        """Return the first key that causal order hides from some query; None if keys are also hidden otherwise."""
        other = visible.window is not None or visible.runs is not None or visible.mask is not None
        if not visible.causal or other or self.kept is not None or isinstance(visible.offset, Tensor):
            return None
        seen = self.first + visible.offset + (0 if visible.strict else 1)
        return max(self.low, min(seen, self.high))

    def common(self, device: torch.device) -> Tensor:
        """Return the keys that every non-empty query sees, for a block with all its keys: boolean [n, w]."""
        visible, width = self.work.visible, self.high - self.low
        if visible.mask is None and not visible.positional:
            return torch.ones(self.heads, width, dtype=torch.bool, device=device)
        if visible.mask is None:
            low, high = self.bounds(device)
            some = high > low
            start, stop = torch.where(some, low, 0).amax(-1), torch.where(some, high, width).amin(-1)
            at = torch.arange(width, device=device)
            return (at >= start[:, None]) & (at < stop[:, None])
        seen = visible.block(self.first, self.last, self.low, self.high, device)
        shared = (seen | ~seen.any(-1, keepdim=True)).all(-2)
        full = shared.expand(self.work.total // self.work.heads, self.work.heads, self.high - self.low)
        return full.flatten(0, 1)[self.at]

    def bounds(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the columns [low, high) that positions, which hide some keys, allow each row: int64 [n, q] each."""
        limits = []
        for ends in self.work.ends(device):
            part = ends[:, self.first : self.last].clamp(self.low, self.high) - self.low
            if part.shape[0] > 1:
                part = part[torch.arange(self.at.start, self.at.stop, device=device) // self.work.heads]
            part = part if self.kept is None else torch.searchsorted(self.kept, part)
            limits.append(part.expand(self.heads, -1))
        return limits[0], limits[1]

    def placed(self, index: Tensor) -> Tensor:
        """Return an index of keys [n, q, ...], its first two entries, positions, relative to the block's columns."""
        if self.kept is None:
            return index
        return torch.cat([torch.searchsorted(self.kept, index[..., :2].contiguous()), index[..., 2:]], -1)

    def params(self, given: Tensor | None) -> dict[str, float | Tensor]:
        """Return the numbers, and the block's rows of `given` [P, N, Tq] as [n, q, 1]."""
        tensors = {} if given is None else dict(zip(self.work.names, given, strict=True))
        return {**self.work.numbers, **{n: self.rows(p)[..., None] for n, p in tensors.items()}}

    def marks(self, active: Tensor) -> Tensor:
        """Return the block's part of `active` [N, ceil(Tq / ROWS), ceil(Tk / COLUMNS)]: [n, ceil(Tk / COLUMNS)]."""
        return active[self.at, self.first // ROWS]

    def narrowed(self, marks: Tensor) -> "Block":
        """Return the block without keys that no head has marked, if that pays: marks bool [n, ceil(Tk / COLUMNS)]."""
        marked = marks.any(0)
        alive = marked[self.low // COLUMNS : -(-self.high // COLUMNS)]
        if float(alive.sum()) > SPARSE * alive.shape[0]:
            return self
        columns = marked.repeat_interleave(COLUMNS)[self.low : self.high]
        return replace(self, kept=columns.nonzero()[:, 0])


def new_marks(q: Tensor, k: Tensor) -> Tensor:
    """Return marks without a marked key: bool [B, H, ceil(Tq / ROWS) + 1, ceil(Tk / COLUMNS) + 1]. Without the added
    row and column, a traced graph would be valid for up to 128 queries only: contiguity depends on axes of length 1."""
    rows, columns = (q.shape[2] + ROWS - 1) // ROWS + 1, (k.shape[2] + COLUMNS - 1) // COLUMNS + 1
    return q.new_zeros(*q.shape[:2], rows, columns, dtype=torch.bool)
