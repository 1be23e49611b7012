"""The keys that each query sees, as kernels read them: two numbers per query and, for the backward pass, two per key.

Causal and strict order, windows, packed sequences, offsets and unequal lengths all give a query a range of keys whose
ends never decrease; the queries that see a key form a range, too. A mask over keys is applied within it.

Legend: B batch, H heads, Hkv key heads, Tq queries, Tk keys.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...pairwise.visibility import Visibility
from .launch import launch
from .operators import operator
from .tiles import Tiles

SEEN = "Tensor low, Tensor high, Tensor first, Tensor last, Tensor? mask"  # a `Span` in the schema of an operator
_BLOCK, _TILES = 256, Tiles()  # rows or keys of a program, and its warps
_SCANNED = 1024  # keys that a program of `seen_before_kernel` takes at a time


class Span(NamedTuple):
    """Ranges, int32 and contiguous."""

    low: Tensor  # [B or 1, Tq]; query i sees keys [low_i, high_i) that `mask` allows
    high: Tensor
    first: Tensor  # [B or 1, Tk]; key j is seen by queries [first_j, last_j)
    last: Tensor
    mask: Tensor | None  # uint8 [B or 1, H or 1, Tk], 1 where a key may be seen

    @property
    def pointers(self) -> tuple[Tensor, Tensor, Tensor]:
        """Ends of the queries' ranges, and the mask or, as a pointer that is not read, one of these."""
        return self.low, self.high, self.low if self.mask is None else self.mask

    @property
    def steps(self) -> tuple[int, int, int]:
        """Step of the queries' ranges from one sequence to the next, and `mask_steps`."""
        return batch_stride(self.low), *mask_steps(self.mask)

    @classmethod
    def of(cls, visible: Visibility, like: Tensor, by_keys: bool = True) -> "Span":
        """Return a call's ranges on the device of `like`, computed once; first and last are empty unless `by_keys`."""
        if visible.kept is None:
            mask = visible.mask
            if mask is not None:
                mask = mask[..., 0, :].expand(*mask.shape[:2], visible.keys).to(torch.uint8).contiguous()
            offset = (visible.offset, 0) if isinstance(visible.offset, Tensor) else (None, visible.offset)
            sizes = visible.queries, visible.keys, 0 if visible.window is None else visible.window
            order = visible.causal, visible.strict, by_keys
            low, high, first, last = _spans(like, visible.runs, *offset, *sizes, *order)
            visible.kept = cls(low, high, first, last, mask)
        kept: Span = visible.kept
        return kept


def seen_rows(visible: Visibility, query_bad: Tensor, key_bad: Tensor, value_bad: Tensor) -> Tensor:
    """Return which rows see a bad key or value, or are bad and see any: boolean [B, H, Tq], by boolean query_bad [B, H,
    Tq], key_bad and value_bad [B, Hkv, Tk]. A mask, if any, is over keys."""
    span = Span.of(visible, query_bad)
    return _seen(query_bad, key_bad, value_bad, span.low, span.high, span.mask)


def batch_stride(x: Tensor) -> int:
    """Return the step from one sequence to the next, 0 if all share one range."""
    return x.stride(0) if x.shape[0] > 1 else 0


def mask_steps(mask: Tensor | None) -> tuple[int, int]:
    """Return the steps of a mask from one sequence, and from one head, to the next: 0 if these share it."""
    return (0, 0) if mask is None else (batch_stride(mask), mask.stride(1) if mask.shape[1] > 1 else 0)


def _empty_spans(like: Tensor, runs: Tensor | None, offset: Tensor | None, *rest: Any) -> tuple[Tensor, ...]:
    batch = 1 if runs is None else runs.shape[1]
    batch = batch if offset is None else offset.shape[0]
    keys = rest[2] if rest[-1] else 0
    sizes = rest[1], rest[1], keys, keys
    return tuple(torch.empty(batch, size, dtype=torch.int32, device=like.device) for size in sizes)


def _make_spans(
    like: Tensor, runs: Tensor | None, offset: Tensor | None, shift: int, queries: int, keys: int, window: int,
    causal: bool, strict: bool, by_keys: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    from .kernels import spans_kernel

    spans = _empty_spans(like, runs, offset, shift, queries, keys, by_keys)
    unread = spans[0]
    ranges = (unread, unread) if runs is None else tuple(x.contiguous() for x in runs)
    launch(
        spans_kernel, (-(-max(queries, keys if by_keys else 0) // _BLOCK), spans[0].shape[0]), spans, ranges,
        unread if offset is None else offset.contiguous(), shift, queries, keys, window, tiles=_TILES,
        BLOCK=_BLOCK, CAUSAL=causal, STRICT=strict, WINDOW=window > 0, OFFSETS=offset is not None, BY_KEYS=by_keys,
        RUNS=0 if runs is None else 1 if runs.shape[1] == 1 else 2,
    )  # fmt: skip
    return spans


_spans = operator(
    "spans", _make_spans,
    "(Tensor like, Tensor? runs, Tensor? offset, SymInt shift, SymInt queries, SymInt keys, SymInt window, "
    "bool causal, bool strict, bool by_keys) -> (Tensor, Tensor, Tensor, Tensor)", _empty_spans,
)  # fmt: skip


def _find_seen(
    query_bad: Tensor, key_bad: Tensor, value_bad: Tensor, low: Tensor, high: Tensor, mask: Tensor | None
) -> Tensor:
    from .kernels import seen_before_kernel, seen_rows_kernel

    (batch, heads, queries), (key_heads, keys) = query_bad.shape, key_bad.shape[1:]
    apart = mask is not None and mask.shape[1] > 1
    many, rows = heads if apart else key_heads, torch.empty_like(query_bad, memory_format=torch.contiguous_format)
    before = torch.empty(2 if mask is not None else 1, batch, many, keys, dtype=torch.int32, device=low.device)
    shown, masked = low if mask is None else mask, mask is not None
    group = max(1, many // max(1, key_heads))
    launch(
        seen_before_kernel, (batch * many,), key_bad.contiguous(), value_bad.contiguous(), shown, before, many, group,
        keys, before.stride(0), *mask_steps(mask), tiles=_TILES, BLOCK=_SCANNED, MASKED=masked,
    )  # fmt: skip
    launch(
        seen_rows_kernel, (-(-queries // _BLOCK), batch * heads), query_bad.contiguous(), before, low, high, rows,
        heads, max(1, heads // max(1, many)), queries, keys, before.stride(0), batch_stride(low), tiles=_TILES,
        BLOCK=_BLOCK, MASKED=masked,
    )  # fmt: skip
    return rows


_seen = operator(
    "seen", _find_seen,
    "(Tensor query_bad, Tensor key_bad, Tensor value_bad, Tensor low, Tensor high, Tensor? mask) -> Tensor",
    lambda query_bad, *_: torch.empty_like(query_bad, memory_format=torch.contiguous_format),
)  # fmt: skip
