"""Tables that grow, and weighted sums of their rows without a tensor of all gathered rows.

A table consists of pieces that never move: it grows without copying, and a backward pass finds the rows that were read.

Shapes: D width of a row; E entries, pairs of a row and the output that it is added to; U distinct rows among them.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

TILE = 2**17  # numbers gathered at a time: half a MiB of float32, which fits a cache
SPARE = 0.125  # the least size of a new piece, as a share of the rows added so far: larger pieces are fewer


def weighted_sums(
    table: Tensor, rows: Tensor, weights: Tensor, offsets: Tensor, dtype: torch.dtype | None = None
) -> Tensor:
    """Return the sums over e in [offsets[b], offsets[b + 1]) of weights[e] table[rows[e]], [B, D] in the dtype of
    `weights`; the rows of table [n, D] are first rounded to `dtype` if given. Not differentiable."""
    dtype = dtype or table.dtype
    if table.dtype == weights.dtype == dtype:
        return F.embedding_bag(rows, table, offsets, mode="sum", per_sample_weights=weights)
    out = weights.new_zeros(len(offsets), table.shape[1])
    owner = torch.searchsorted(offsets, torch.arange(len(rows), device=rows.device), right=True) - 1
    step = max(1, TILE // table.shape[1])
    for at, who, weight in zip(rows.split(step), owner.split(step), weights.split(step), strict=True):
        out.index_add_(0, who, table[at].to(dtype).to(out.dtype) * weight[:, None])
    return out


class Groups(NamedTuple):
    """Entries grouped by row."""

    unique: Tensor  # int64 [U], the distinct rows, ascending
    order: Tensor  # int64 [E], the entries sorted by row (stable)
    counts: Tensor  # int64 [U], the number of entries of each row

    @classmethod
    def of(cls, rows: Tensor) -> "Groups":
        """Group the rows of entries, int64 [E]."""
        ordered, order = rows.sort(stable=True)
        unique, counts = torch.unique_consecutive(ordered, return_counts=True)
        return cls(unique, order, counts)


def spread(counts: Tensor) -> Tensor:
    """Repeat 0, 1, ... by `counts` [U]: the group of every entry."""
    return torch.repeat_interleave(torch.arange(len(counts), device=counts.device), counts)


def tiles(counts: Tensor, width: int, start: int = 0, stop: int | None = None) -> Iterator[tuple[slice, slice, Tensor]]:
    """Yield (rows, their entries, the offset of each row among these) of the rows from `start` to `stop`, at most TILE
    numbers in rows of `width` at a time. Entries are sorted by row, `counts` [U] of each."""
    ends = counts.cumsum(0)
    step = max(1, TILE // width)
    stop = len(counts) if stop is None else stop
    begin = int(ends[start - 1]) if start else 0
    for low in range(start, stop, step):
        high = min(low + step, stop)
        end = int(ends[high - 1])
        yield slice(low, high), slice(begin, end), ends[low:high] - counts[low:high] - begin
        begin = end


class RowPieces:
    """A table [size, D] that grows at its end. The first rows [n, D] are not copied; if they have another dtype they
    are rounded when read."""

    def __init__(self, width: int, dtype: torch.dtype, device: torch.device, first: Tensor | None = None) -> None:
        self.width, self.dtype, self.device = width, dtype, device
        self.pieces: list[Tensor] = [] if first is None else [first]
        self.given = self.size = self.room = 0 if first is None else len(first)
        self.starts = [0] if self.pieces else []
        self._edges = torch.zeros(0, dtype=torch.int64, device=device)

    @property
    def bytes(self) -> int:
        """The memory of the added rows, including unused room."""
        return (self.room - self.given) * self.width * self.dtype.itemsize

    def extend(self, count: int, spare: float = SPARE) -> None:
        """Add `count` uninitialised rows. A new piece has room for at least the share `spare` of the rows so far."""
        self.size += count
        if self.size > self.room:
            length = max(self.size - self.room, int((self.room - self.given) * spare))
            self.starts.append(self.room)
            self.pieces.append(torch.empty(length, self.width, dtype=self.dtype, device=self.device))
            self._edges = torch.tensor(self.starts[1:], device=self.device)
            self.room += length

    def views(self, start: int, stop: int) -> Iterator[Tensor]:
        """Yield views of the rows from `start` to `stop`, piece by piece, to write into."""
        for first, piece in zip(self.starts, self.pieces, strict=True):
            low, high = max(start - first, 0), min(stop - first, len(piece))
            if low < high:
                yield piece[low:high]

    def parts(self, ids: Tensor) -> Iterator[tuple[Tensor, Tensor | None, Tensor]]:
        """Yield (a piece, which of ids [E] lie in it or None for all, their rows in it)."""
        if not len(ids):
            return
        if len(self.pieces) == 1:
            yield self.pieces[0], None, ids
            return
        which = torch.bucketize(ids, self._edges, right=True)
        for i, count in enumerate(torch.bincount(which).tolist()):
            if count == len(ids):
                yield self.pieces[i], None, ids - self.starts[i]
            elif count:
                at = (which == i).nonzero()[:, 0]
                yield self.pieces[i], at, ids[at] - self.starts[i]

    def gather(self, ids: Tensor, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
        """Return the rows ids [E] as [E, D], in `out` if given, which has that dtype."""
        for piece, at, rows in self.parts(ids):
            if at is None and piece.dtype == self.dtype == dtype:
                if out is None:
                    return piece.index_select(0, rows)
                if out.untyped_storage().data_ptr() != piece.untyped_storage().data_ptr():
                    return torch.index_select(piece, 0, rows, out=out)
            if out is None:
                out = torch.empty(len(ids), self.width, dtype=dtype, device=self.device)
            at = torch.arange(len(ids), device=self.device) if at is None else at
            step = max(1, TILE // self.width)
            for to, some in zip(at.split(step), rows.split(step), strict=True):
                out.index_copy_(0, to, piece.index_select(0, some).to(self.dtype).to(dtype))
        return torch.empty(0, self.width, dtype=dtype, device=self.device) if out is None else out

    def traced(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """Compute `gather` with operations that can be compiled, for ids [...]; every piece is read for each row."""
        out = torch.zeros(*ids.shape, self.width, dtype=dtype, device=self.device)
        for start, piece in zip(self.starts, self.pieces, strict=True):
            here = ids - start
            inside = (here >= 0) & (here < len(piece))
            rows = piece[here.clamp(0, len(piece) - 1)].to(self.dtype).to(dtype)
            out = torch.where(inside[..., None], rows, out)
        return out

    def sums(self, ids: Tensor, weights: Tensor, owner: Tensor, owners: int) -> Tensor:
        """Return for each owner the sum of weights times rows over its entries, [owners, D]; owner int64 [E] ascending.
        The first and the added rows are summed apart, so that the result does not depend on where pieces end."""
        added = None if len(self.pieces) == 1 else ids >= self.given
        if added is None or int(added.sum()) in (0, len(ids)):
            return self._sums(ids, weights, owner, owners)
        both = (~added).nonzero()[:, 0], added.nonzero()[:, 0]
        first, more = (self._sums(ids[at], weights[at], owner[at], owners) for at in both)
        return first.add_(more)

    def _sums(self, ids: Tensor, weights: Tensor, owner: Tensor, owners: int) -> Tensor:
        offsets = torch.searchsorted(owner, torch.arange(owners, device=self.device))
        parts = list(self.parts(ids))
        if len(parts) == 1:
            return weighted_sums(parts[0][0], parts[0][2], weights, offsets, self.dtype)
        out, ends = weights.new_zeros(owners, self.width), torch.cat((offsets, offsets.new_full((1,), len(ids))))
        step = max(1, 4 * TILE * owners // (self.width * max(1, len(ids))))  # owners whose rows fill a few tiles
        for low in range(0, owners, step):
            begin, end = (int(ends[i]) for i in (low, min(low + step, owners)))
            rows = self.gather(ids[begin:end], weights.dtype)
            every = torch.arange(end - begin, device=self.device)
            out[low : low + step] = weighted_sums(rows, every, weights[begin:end], offsets[low : low + step] - begin)
        return out

    def products(self, ids: Tensor, owner: Tensor, other: Tensor) -> Tensor:
        """Return row . other[owner] for every entry, [E]; other [., D] has the dtype of the result."""
        step = max(1, TILE // self.width)
        products = [
            torch.einsum("ed,ed->e", self.gather(at, other.dtype), other.index_select(0, who))
            for at, who in zip(ids.split(step), owner.split(step), strict=True)
        ]
        return torch.cat(products)

    def add(self, ids: Tensor, rows: Tensor) -> None:
        """Add rows [E, D] to the rows ids [E], of which some may be the same."""
        for piece, at, mine in self.parts(ids):
            piece.index_add_(0, mine, rows if at is None else rows.index_select(0, at))


class RowGradients:
    """Gradients of those rows of a table that have one. Freed room is used again."""

    def __init__(self, width: int, dtype: torch.dtype, device: torch.device) -> None:
        self.rows = RowPieces(width, dtype, device)
        self._place = torch.zeros(0, dtype=torch.int32, device=device)
        self._free = torch.zeros(0, dtype=torch.int64, device=device)

    def places(self, ids: Tensor) -> Tensor:
        """Return the places in `rows` of the gradients of the rows ids [E], int64; -1 if there is none."""
        short = int(ids.max()) + 1 - len(self._place) if len(ids) else 0
        if short > 0:
            self._place = torch.cat((self._place, self._place.new_full((short,), -1)))
        return self._place[ids].long()

    def add(self, ids: Tensor, rows: Tensor) -> None:
        """Add rows [E, D] to the gradients of the distinct rows ids [E]."""
        places = self.places(ids)
        known = places >= 0
        count = int(known.sum())
        if count == len(ids):
            self.rows.add(places, rows)
            return
        if count:
            self.rows.add(places[known], rows[known])
            ids, rows = ids[~known], rows[~known]
        fresh, self._free = self._free[: len(ids)], self._free[len(ids) :]
        start, more = self.rows.size, len(ids) - len(fresh)
        if more:
            self.rows.extend(more)
            fresh = torch.cat((fresh, torch.arange(start, start + more, device=fresh.device)))
        for piece, at, mine in self.rows.parts(fresh):
            piece.index_copy_(0, mine, rows if at is None else rows.index_select(0, at))
        self._place[ids] = fresh.int()

    def move(self, ids: Tensor, to: Tensor, keep: Tensor) -> None:
        """Add the gradients of the rows ids [E] to those of the rows `to` [E], which may repeat, and drop those where
        not `keep` [E]. Every row of `ids` has a gradient."""
        places = self.places(ids)
        self._place[ids] = -1
        self._release(places[~keep])
        places, to = places[keep], to[keep]
        groups = Groups.of(to)
        first = groups.order[groups.counts.cumsum(0) - groups.counts]
        first = first[self.places(groups.unique) < 0]
        self._place[to[first]] = places[first].int()
        rest = torch.ones(len(to), dtype=torch.bool, device=to.device)
        rest[first] = False
        places, target = places[rest], self.places(to[rest])
        step = max(1, TILE // self.rows.width)
        for source, sink in zip(places.split(step), target.split(step), strict=True):
            if len(source):
                self.rows.add(sink, self.rows.gather(source, self.rows.dtype))
        self._release(places)

    def drop(self, ids: Tensor) -> None:
        """Free the gradients of rows ids [E], each of which has one."""
        self._release(self.places(ids))
        self._place[ids] = -1

    @property
    def empty(self) -> bool:
        return len(self._free) == self.rows.size

    def _release(self, places: Tensor) -> None:
        self._free = torch.cat((self._free, places))
