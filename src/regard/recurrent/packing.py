"""Packed sequences: every document of a packed row becomes a sequence of a batch of its own.

Documents of similar lengths share a batch. A batch is as long as its longest document, and a document is in it only
where it has at least 3/4 of that length, so that fewer than a third of all positions is added. Every estimator then
runs as it does on any padded batch: its masks, forms, solvers and derivatives are the same, no state reaches from one
document into the next, and the batch axis of a state counts documents.

Legend: B rows, T positions, N documents of all rows, ordered row by row; H heads, query or key.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.utils._pytree import tree_map

from ..checks import ArgumentError, segments
from .states import State, joined

R = TypeVar("R")


class _Bucket(NamedTuple):
    """Documents of similar lengths.

    Attributes:
        documents: which they are, int64 [n].
        rows: the rows that they are in, int64 [n].
        source: the place of every position in the flattened rows, int64 [n, L]; beyond the end of a document that of
            its last position.
        real: boolean [n, L], whether the document has that position.
    """

    documents: Tensor
    rows: Tensor
    source: Tensor
    real: Tensor

    def gather(self, x: Any, length: int) -> Any:
        """x [B, H, T or 1, ...] as [n, H, L or 1, ...]; None and numbers as they are."""
        if not isinstance(x, Tensor):
            return x
        if x.shape[2] != length:
            return x[self.rows]
        flat = x.transpose(1, 2).flatten(0, 1).index_select(0, self.source.flatten())
        return flat.unflatten(0, self.source.shape).transpose(1, 2)


class Documents:
    """The documents of ids [B, T]. Looks at the ids, for which a GPU has to be waited for.

    Attributes:
        count: N.
        whole: whether every row is one document.
    """

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

    def _fill(self, own: Tensor, first: Tensor, lengths: Tensor) -> None:
        """Make the buckets; `own` is the document of every position, flattened."""
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
        self._place = base[own] + torch.arange(own.shape[0], device=own.device) - first[own]

    def run(self, call: Call, inputs: Any, mask: Tensor | None, state: State | None) -> tuple[Any, Any]:
        """Return what `by_document` does, batch after batch."""
        rows, states = [], []
        for bucket in self._buckets:
            real = bucket.real[:, None]
            if mask is not None:
                real = real & bucket.gather(mask.expand(self.batch, -1, -1), self.length)
            own = tree_map(lambda x, bucket=bucket: bucket.gather(x, self.length), inputs)
            found, after = call(own, real, None if state is None else state.select(bucket.documents))
            rows.append(found)
            states.append(after)
        order = torch.cat([bucket.documents for bucket in self._buckets]).argsort()
        after = None if states[0] is None else joined(states, order)
        return tree_map(lambda *x: self._scatter(x), *rows), after

    def _scatter(self, parts: tuple[Any, ...]) -> Any:
        """Rows [n, H, L, ...] of all buckets as [B, H, T, ...]; None as it is."""
        if parts[0] is None:
            return None
        flat = torch.cat([x.transpose(1, 2).flatten(0, 1) for x in parts])
        return flat.index_select(0, self._place).unflatten(0, (self.batch, self.length)).transpose(1, 2)


Call = Callable[[Any, "Tensor | None", Any], tuple[Any, Any]]


def by_document(
    packed: Documents | None, call: Call, inputs: Any, mask: Tensor | None, state: State | None = None
) -> tuple[Any, Any]:
    """Return (the rows of `call` at their places in the packed rows, the states of all documents).

    Args:
        packed: None where every row is one sequence.
        call: (inputs, mask, state) -> (rows, state or None), rows a tree of tensors [n, H, L, ...].
        inputs: a tree of tensors [B, H, T or 1, ...], numbers and None.
        mask: boolean [B or 1, H or 1, T], True where a position is real, or None.
        state: with an entry for every document, or None.
    """
    if packed is None or packed.whole:
        return call(inputs, mask, state)
    found: tuple[Any, Any] = _outside(packed.run)(call, inputs, mask, state)
    return found


def documents(call: str, segment_ids: Any, query: Tensor, key: Tensor) -> Documents | None:
    """Return the documents of a call, or None without ids.

    Raises:
        ArgumentError: ids that are no integers [B or 1, T] at hand, or not one for every query and key.
    """
    return None if segment_ids is None else _outside(_documents)(call, segment_ids, query, key)


def _outside(run: Callable[..., R]) -> Callable[..., R]:
    """Return `run`, left out of the graph where one is being compiled: every packing would be another graph."""
    return torch.compiler.disable(run) if torch.compiler.is_compiling() else run


def _documents(call: str, ids: Any, query: Tensor, key: Tensor) -> Documents:
    (batch, _, queries, _), keys = query.shape, key.shape[2]
    segments(call, ids, batch, keys, query.device)
    if queries != keys:
        raise ArgumentError(
            f"{call}: segment_ids say of every query and of every key at once where they belong, but there are "
            f"{queries} queries and {keys} keys."
        )
    if ids.is_meta:
        raise ArgumentError(
            f"{call}: segment_ids is on the meta device, where it holds no ids; how many documents there are decides "
            f"the shape of the state."
        )
    return Documents(ids.to(torch.int64).expand(batch, keys))
