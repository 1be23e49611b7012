"""Packed sequences: each document of a packed row becomes a sequence of a padded batch.

Documents of similar lengths share a batch: each has at least 3/4 of the length of the longest, so padding adds less
than a third. The batch axis of a state counts documents.

Legend: B rows, T positions, N documents of all rows, ordered row by row; H heads, query or key.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.utils._pytree import tree_map

from ..checks import require, segments
from ..precision import outside_graphs
from .states import State, joined


class _Bucket(NamedTuple):
    """Documents of similar lengths: their numbers and rows [n], the index of each position in the flattened rows
    [n, L] (padding repeats the last position), and `real` [n, L], False for padding."""

    documents: Tensor
    rows: Tensor
    source: Tensor
    real: Tensor

    def gather(self, x: Any, length: int) -> Any:
        """Return x [B, H, T or 1, ...] as [n, H, L or 1, ...]; None and numbers unchanged."""
        if not isinstance(x, Tensor):
            return x
        if x.shape[2] != length:
            return x[self.rows]
        flat = x.transpose(1, 2).flatten(0, 1).index_select(0, self.source.flatten())
        return flat.unflatten(0, self.source.shape).transpose(1, 2)


class Documents:
    """The N = `count` documents of ids [B, T]; `whole` if every row is one. Reading the ids synchronises a GPU."""

    def __init__(self, ids: Tensor) -> None:
        self.batch, self.length = ids.shape
        edge = pad(ids[:, 1:] != ids[:, :-1], (1, 0), value=True)[:, : self.length].flatten()
        first = edge.nonzero()[:, 0]
        lengths = first.diff(append=first.new_tensor([edge.numel()]))
        self.count = first.shape[0]
        self.whole = self.count == self.batch
        self._buckets: list[_Bucket] = []
        if not self.whole:
            self._fill(edge.cumsum(0) - 1, first, lengths)

    def _fill(self, document: Tensor, first: Tensor, lengths: Tensor) -> None:
        """Make the buckets; `document` [B T] is that of each position."""
        order = lengths.cpu().sort(descending=True, stable=True)
        base, start, used = torch.empty_like(first), 0, 0
        while start < self.count or not self._buckets:
            longest = int(order.values[start]) if self.count else 0
            stop = int((4 * order.values >= 3 * longest).sum())
            which = order.indices[start:stop].to(first.device)
            at = torch.arange(longest, device=first.device)
            begin, last = first[which], lengths[which][:, None] - 1
            source = begin[:, None] + torch.minimum(at, last)
            self._buckets.append(_Bucket(which, begin // max(1, self.length), source, at <= last))
            base[which] = used + longest * torch.arange(stop - start, device=first.device)
            start, used = stop, used + longest * (stop - start)
        self._target = base[document] + torch.arange(len(document), device=document.device) - first[document]

    @outside_graphs  # every packing would be another graph
    def run(self, call: "Call", inputs: Any, mask: Tensor | None, state: State | None) -> tuple[Any, Any]:
        rows, states = [], []
        for bucket in self._buckets:
            real = bucket.real[:, None]
            if mask is not None:
                real = real & bucket.gather(mask.expand(self.batch, -1, -1), self.length)
            gathered = tree_map(lambda x, bucket=bucket: bucket.gather(x, self.length), inputs)
            out, after = call(gathered, real, None if state is None else state.select(bucket.documents))
            rows.append(out)
            states.append(after)
        order = torch.cat([bucket.documents for bucket in self._buckets]).argsort()
        after = None if states[0] is None else joined(states, order)
        return tree_map(lambda *x: self._scatter(x), *rows), after

    def _scatter(self, parts: tuple[Any, ...]) -> Any:
        """Return the rows [n, H, L, ...] of all buckets as [B, H, T, ...]; None unchanged."""
        if parts[0] is None:
            return None
        flat = torch.cat([x.transpose(1, 2).flatten(0, 1) for x in parts])
        return flat.index_select(0, self._target).unflatten(0, (self.batch, self.length)).transpose(1, 2)


Call = Callable[[Any, Tensor | None, Any], tuple[Any, Any]]


def by_document(
    packed: Documents | None, call: Call, inputs: Any, mask: Tensor | None, state: State | None = None
) -> tuple[Any, Any]:
    """Return (the output of `call` in the order of the packed rows, the states of all documents).

    `call` takes inputs (a tree of tensors [B, H, T or 1, ...], numbers and None), a mask [B or 1, H or 1, T] or None,
    and a state with one entry per document or None. It returns a tree of tensors [n, H, L, ...] and a state or None.
    """
    return call(inputs, mask, state) if packed is None or packed.whole else packed.run(call, inputs, mask, state)


def documents(call: str, segment_ids: Any, query: Tensor, key: Tensor) -> Documents | None:
    return None if segment_ids is None else _documents(call, segment_ids, query, key)


@outside_graphs
def _documents(call: str, ids: Any, query: Tensor, key: Tensor) -> Documents:
    (batch, _, queries, _), keys = query.shape, key.shape[2]
    segments(call, ids, batch, keys, query.device)
    text = f"segment_ids belong to queries and keys alike, but there are {queries} queries and {keys} keys."
    require(queries == keys, call, text)
    require(not ids.is_meta, call, "segment_ids is on the meta device; the shape of the state depends on the ids.")
    return Documents(ids.to(torch.int64).expand(batch, keys))
