"""The backward pass of compact attention and softmax: lists of live blocks, then two kernels.

Legend: B batch, H heads, Hkv key heads, Tq queries, Tk keys, D and Dv dimensions.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import NamedTuple

import torch
from torch import Tensor

from ..runtime.call import Form
from ..runtime.launch import launch
from ..runtime.span import Span, batch_stride
from ..runtime.support import interpreted
from ..runtime.tiles import Tiles, TileTable, padded
from .backward_kernels import compact_dkv_kernel, compact_dq_kernel
from .lists import Lists, lists_of
from .math import ANCHORED, SOFTMAX
from .rules import own_form

_WIDE = [(32, 32, 8, 1), (16, 32, 8, 1), (16, 16, 8, 1)]
DQ = TileTable.by_width(
    "compact_dq", [(64, 64, 4, 3), (64, 64, 4, 2), (32, 32, 8, 1)], _WIDE, [(64, 64, 8, 2), (64, 32, 4, 2)]
)
DKV = TileTable.by_width(
    "compact_dkv", [(64, 64, 4, 3), (64, 64, 8, 2), (32, 32, 8, 1)], _WIDE, [(32, 64, 4, 3), (32, 64, 8, 2)]
)
NARROW = 32
"""Most rows of a streamed block on devices whose products take operands from registers."""


def _streamed(size: int, device: torch.device) -> int:
    """Return the rows of a streamed block on a device."""
    if interpreted():
        return size
    from triton.runtime import driver

    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        arch = driver.active.get_current_target().arch
    return min(size, NARROW) if isinstance(arch, int) and arch < 90 else size


class _Call(NamedTuple):
    """What both kernels of a call are given."""

    floats: Tensor
    flags: Tensor
    index: Tensor
    factor: Tensor | float
    matrices: tuple[tuple[Tensor, int, int], ...]  # grad, q, k, v, slope_mean
    span: Span
    live: Tensor
    mask_tile: tuple[int, int]
    sizes: tuple[int, int, int, int, int]  # H, H / Hkv, Tq, Tk, all rows
    form: Form

    def by_queries(self, tiles: Tiles, table: Tensor, outs: tuple[Tensor, ...]) -> Tensor:
        """Fill `table` and outs. Return which blocks have a row with tied best keys, uint8 [B x H, blocks]."""
        queries = self.sizes[2]
        own = tiles.rows if self.soft else min(tiles.rows, self.mask_tile[0])
        heads, blocks = self.sizes[4] // max(1, queries), -(-queries // own)
        padded = blocks if self.soft else -(-queries // self.mask_tile[0]) * (self.mask_tile[0] // own)
        ties = torch.zeros(heads, padded, dtype=torch.uint8, device=table.device)
        lists, form = self._lists(2, own, _streamed(tiles.keys, table.device), 1)
        launch(
            compact_dq_kernel, (heads * blocks,), self.floats, self.flags, self.index, self.factor, self.matrices,
            *self.span[:2], self.span.mask, lists.listed, lists.counts, table, ties, outs, *self.sizes[:4],
            *self.span.steps, lists.rows, lists.length, padded, tiles=tiles, FORM=form,
        )  # fmt: skip
        return ties

    def by_keys(self, tiles: Tiles, table: Tensor, ties: Tensor, outs: tuple[Tensor, ...]) -> None:
        """Fill outs: dk, dv."""
        lists, form = self._lists(3, tiles.keys, _streamed(tiles.rows, table.device), self.sizes[1], ties)
        blocks = outs[0].shape[0] * outs[0].shape[1] * -(-self.sizes[3] // tiles.keys)
        heads, _, queries, keys, _ = self.sizes
        launch(
            compact_dkv_kernel, (blocks,), self.floats, self.index, self.factor, self.matrices, self.span.first,
            self.span.last, self.span.mask, lists.listed, lists.counts, table, outs, heads, queries, keys,
            batch_stride(self.span.first), *self.span.mask_steps, lists.rows, lists.length, tiles=tiles, FORM=form,
        )  # fmt: skip

    @property
    def soft(self) -> bool:
        return self.form.rule == SOFTMAX.value

    def _lists(self, axis: int, own: int, tile: int, group: int, ties: Tensor | None = None) -> tuple[Lists, Form]:
        """Return what streams past blocks of `own` owners along that axis of `live`, and the form of the kernel."""
        if self.soft:
            return Lists(None, None, 0, 0), self.form._replace(own=own, tile=tile, listed=0, split=1, group=group)
        own_tile, mask_tile = self.mask_tile if axis == 2 else self.mask_tile[::-1]
        listed, tile = max(own, own_tile), min(tile, mask_tile)
        ends, owners = (self.span[:2] if axis == 2 else self.span[2:4]), self.sizes[axis]
        sizes, flags = (own_tile, mask_tile), ties if self.form.rule == ANCHORED.value else None
        lists = lists_of(self.live, *ends, self.form.masked, owners, sizes, listed, axis, group, flags)
        return lists, self.form._replace(own=own, tile=tile, listed=listed, split=mask_tile // tile, group=group)


def backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, factor: Tensor | float, span: Span, kept: tuple[Tensor, ...],
    mask_tile: tuple[int, int], rule: tuple[int, int, int, str], wanted: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Compute (dq, dk, dv, dfactor, dgiven) of one call; the last two are float32 [B, H, Tq], or [0] for numbers.

    Args:
        grad, q, k, v: dL/do [B, H, Tq, Dv], [B, H, Tq, D], [B, Hkv, Tk, D], [B, Hkv, Tk, Dv].
        factor: factor of the dot products, a number or float32 [B, H, Tq].
        kept: row statistics floats and flags of `block_rows`; index int32 [B, H, Tq, n]: if anchored, the first key
            with the best score, the last, and how many there are; if fixed, for rows without a near enough key, how
            many they see or which is nearest; slope_mean [B, H, Tq, Dv], sum_j B_j v_j: the output, or if adaptive
            sum_j A_j v_j / sum_j A_j; live uint8 [B, H, query blocks, key blocks], whether any pair has weight.
        mask_tile: queries and keys of these blocks, powers of two.
        rule: code of the rule, power of the kernel, code of the fallback weights, and `Rule.own`.
        wanted: whether the rule's number is a tensor.

    Cost: 7 products of all live blocks, 2 above the minimum, since both kernels compute scores and dL/dp; float32 [2
    to 5, B, H, Tq] and two bytes a pair of blocks."""
    floats, flags, index, slope_mean, live = kept
    grad, q, k, v, slope_mean = (x if x.stride(-1) == 1 else x.contiguous() for x in (grad, q, k, v, slope_mean))
    (batch, heads, queries, dim), (key_heads, keys, value_dim) = q.shape, v.shape[1:]
    factors, masked, soft = isinstance(factor, Tensor), span.mask is not None, rule[0] == SOFTMAX.value
    precision = "ieee" if q.dtype == torch.float32 else "tf32"
    sizes = (heads, heads // max(1, key_heads), queries, keys, batch * heads * queries)
    every = (grad, q, k, v, slope_mean)
    widths, steps = (*padded(dim), *padded(value_dim)), tuple(x.stride(2) for x in every)
    tables = 2 if soft else 5 if rule[3] else 4
    form = Form(*widths, factors, int(masked), precision=precision, given=wanted, tables=tables, steps=steps)
    form = form._replace(rule=rule[0], r=rule[1], stand=rule[2], **own_form(rule[3]))
    matrices = tuple((x, x.stride(0), x.stride(1)) for x in every)
    by = factor.contiguous() if isinstance(factor, Tensor) else float(factor)
    call = _Call(floats, flags, index, by, matrices, span, live, mask_tile, sizes, form)

    own = {"device": q.device, "dtype": torch.float32}
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    dfactor, dgiven = (torch.empty(q.shape[:3] if some else (0,), **own) for some in (factors, wanted))
    table = torch.empty(*q.shape[:2], tables, queries, **own)
    key, outs = (max(dim, value_dim), q.dtype), (dq, dfactor, dgiven)
    flags_of = (*rule, factors, masked, wanted)
    tiles = DQ.pick(*key, lambda tiles: call.by_queries(tiles, table, outs), flags_of)
    ties = call.by_queries(tiles, table, outs)
    tiles = DKV.pick(*key, lambda tiles: call.by_keys(tiles, table, ties, (dk, dv)), flags_of)
    call.by_keys(tiles, table, ties, (dk, dv))
    return dq, dk, dv, dfactor, dgiven
