"""The forward pass of local linear attention before and after the systems are solved.

`moments` finds the logarithm of each row's total weight and the means of its keys and values, in one pass with an
online maximum. `output` takes another, with the solutions t and e_ij = (k_j - mean_i) . t_i:

    o_i = vmean_i + sum_j p_ij e_ij (v_j - vmean_i)

vmean is subtracted with the weights as they were multiplied, so that the effective weights p (1 + e) sum to one
whatever was rounded.

Legend: as in `math`; Dv features of a value in blocks of VBLOCK.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..runtime.blocks import LENGTHS, load_block, seen, store_block
from ..runtime.launch import launch
from ..runtime.span import Span
from ..runtime.tiles import TileTable
from .math import (
    LOG2E,
    block_width,
    norm_scale,
    number_or_rows,
    opened,
    plan,
    product,
    row_factor,
    tile_at,
    tile_count,
    times,
)

MOMENTS = TileTable.by_width(
    "local_linear_moments",
    [(64, 32, 4, 3), (64, 16, 8, 2), (64, 32, 8, 2)],
    [(32, 32, 4, 1), (32, 16, 8, 2), (16, 16, 8, 1)],
)
_WIDE = [(32, 32, 8, 2), (32, 16, 8, 2), (16, 16, 8, 1)]
OUTPUT = TileTable.by_width("local_linear_output", [(64, 64, 4, 2), (64, 32, 4, 2), (64, 32, 8, 2)], _WIDE)
OUTPUT_MASKED = TileTable.by_width(
    "local_linear_output_masked", [(64, 32, 4, 2), (64, 32, 4, 2), (64, 32, 8, 2)], _WIDE
)
"""Smaller tiles, since a mask takes a register for every key."""
PART = tl.constexpr(16)
"""Rows whose float32 vectors are in registers at once."""
COUNTS = 4
"""Statistics of a row's weights: top score, support, effective sample size, negative mass."""


@triton.jit
def _moment_tile(q, c, k, v, visible, top, mass, total, vmass, vtotal, SPLIT: tl.constexpr, EDGE: tl.constexpr):
    """Add one tile to the online sums: the largest score in base 2, and the sums of 2^(z - top), of these times k, and
    of these, rounded once, times v."""
    z = product(q, tl.trans(k)) * c[:, None]
    if EDGE:
        z = tl.where(visible, z, float("-inf"))
    best = tl.maximum(top, tl.max(z, 1))
    safe = tl.where(best > float("-inf"), best, 0.0)
    shrink = tl.exp2(top - safe)
    p = tl.exp2(z - safe[:, None])
    total, mass = times(p, k, total * shrink[:, None], mass * shrink, SPLIT)
    vtotal, vmass = times(p, v, vtotal * shrink[:, None], vmass * shrink, False)
    return best, mass, total, vmass, vtotal


@triton.jit(do_not_specialize=LENGTHS)
def _moments(
    q_ptr, k_ptr, v_ptr, factor_ptr, factor, low_ptr, high_ptr, mask_ptr, lse_ptr, mean_ptr, vmean_ptr, right_ptr,
    heads, group, queries, keys, q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row,
    span_batch, mask_batch, mask_head,
    ROWS: tl.constexpr, KEYS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, VWIDTH: tl.constexpr,
    VBLOCK: tl.constexpr, GIVEN: tl.constexpr, MASKED: tl.constexpr, SPLIT: tl.constexpr, SOLVED: tl.constexpr,
):  # fmt: skip
    """Store lse and the means of a block of rows and, if SOLVED, the right sides q - mean."""
    SIDES: tl.constexpr = 1 if MASKED else 2  # with a mask no tile is full
    head, batch, own, first, rows, low, high, mask_ptr = opened(
        low_ptr, high_ptr, mask_ptr, heads, queries, span_batch, mask_batch, mask_head, ROWS
    )
    start, tiles, left, full = plan(low, high, KEYS, MASKED)
    at = head * queries
    k_ptr += batch * k_batch + (own // group) * k_head
    v_ptr += batch * v_batch + (own // group) * v_head
    q = load_block(q_ptr + batch * q_batch + own * q_head, first, q_row, queries, ROWS, WIDTH, BLOCK)
    c = row_factor(factor_ptr + at, factor, rows, queries, GIVEN)
    top = tl.zeros((ROWS,), tl.float32) + float("-inf")
    mass, vmass = tl.zeros((ROWS,), tl.float32), tl.zeros((ROWS,), tl.float32)
    total, vtotal = tl.zeros((ROWS, BLOCK), tl.float32), tl.zeros((ROWS, VBLOCK), tl.float32)
    for side in tl.static_range(SIDES):
        for n in range(tile_count(tiles, full, side == 0)):
            here, visible = tile_at(n, start, left, full, KEYS, side == 0), low
            k = load_block(k_ptr, here, k_row, keys, KEYS, WIDTH, BLOCK, side == 0)
            v = load_block(v_ptr, here, v_row, keys, KEYS, VWIDTH, VBLOCK, side == 0)
            if side == 0:
                visible = seen(here + tl.arange(0, KEYS), low, high, mask_ptr, keys, MASKED)
            top, mass, total, vmass, vtotal = _moment_tile(
                q, c, k, v, visible, top, mass, total, vmass, vtotal, SPLIT, side == 0
            )
    some = (top > float("-inf")) & (high > low)
    mean = tl.where(some[:, None], total / tl.where(some, mass, 1.0)[:, None], 0.0)
    lse = tl.where(some, top + tl.log2(tl.where(some, mass, 1.0)), float("inf"))
    tl.store(lse_ptr + at + rows, lse, mask=rows < queries)
    store_block(mean_ptr + at * WIDTH, mean, first, WIDTH, queries, ROWS, WIDTH, BLOCK)
    vmean = tl.where(some[:, None], vtotal / tl.where(some, vmass, 1.0)[:, None], 0.0)
    store_block(vmean_ptr + at * VWIDTH, vmean, first, VWIDTH, queries, ROWS, VWIDTH, VBLOCK)
    if SOLVED:
        q = load_block(q_ptr + batch * q_batch + own * q_head, first, q_row, queries, ROWS, WIDTH, BLOCK)
        right = tl.where(some[:, None], q.to(tl.float32) - mean, 0.0)
        store_block(right_ptr + at * WIDTH, right, first, WIDTH, queries, ROWS, WIDTH, BLOCK)


@triton.jit
def _output_tile(
    q, c, lse, hi, lo, away, unit, k, v, visible, rest, used, top, support, square, negative,
    SPLIT: tl.constexpr, EDGE: tl.constexpr, COUNTED: tl.constexpr,
):  # fmt: skip
    """Add one tile of sum_j p_ij e_ij v_j, of its weights, and of what is counted."""
    z = product(q, tl.trans(k)) * c[:, None]
    p = tl.exp2(z - lse[:, None])
    slope = product(hi, tl.trans(k))
    if SPLIT:
        slope += product(lo, tl.trans(k))
    if EDGE:
        p = tl.where(visible, p, 0.0)
    w = p * ((slope - away[:, None]) * unit[:, None])
    if COUNTED:
        if EDGE:
            z = tl.where(visible, z, float("-inf"))
        top = tl.maximum(top, tl.max(z, 1))
        support += tl.sum((p > 0).to(tl.float32), 1)
        square += tl.sum(p * p, 1)
        negative -= tl.sum(tl.minimum(p + w, 0.0), 1)
    rest, used = times(w, v, rest, used, False)
    return rest, used, top, support, square, negative


@triton.jit
def _slopes(
    t_ptr, mean_ptr, terms, rest, away_ptr, unit_ptr, first, t_row, queries,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, SPLIT: tl.constexpr, SIGN: tl.constexpr,
):  # fmt: skip
    """Store t in its own unit, in the terms that are multiplied, and mean . t of these; a few rows at a time, since
    float32 tiles would take the registers of the sums."""
    for part in range(0, ROWS, PART):
        here = first + part
        t = SIGN * load_block(t_ptr, here, t_row, queries, PART, WIDTH, BLOCK)
        mean = load_block(mean_ptr, here, WIDTH, queries, PART, WIDTH, BLOCK)
        unit = norm_scale(t)
        t = t / unit[:, None]
        hi = t.to(terms.dtype.element_ty)
        away = tl.sum(mean * hi.to(tl.float32), 1)
        store_block(terms, hi, here, WIDTH, queries, PART, WIDTH, BLOCK)
        if SPLIT:
            lo = (t - hi.to(tl.float32)).to(terms.dtype.element_ty)
            away += tl.sum(mean * lo.to(tl.float32), 1)
            store_block(rest, lo, here, WIDTH, queries, PART, WIDTH, BLOCK)
        rows = here + tl.arange(0, PART)
        tl.store(away_ptr + rows, away, mask=rows < queries)
        tl.store(unit_ptr + rows, unit, mask=rows < queries)


@triton.jit
def _store_counts(at, top, support, square, negative, there):
    """Store what is counted of each row's weights."""
    tl.store(at, top / LOG2E, mask=there)
    tl.store(at + 1, support, mask=there)
    tl.store(at + 2, tl.where(square > 0, 1 / tl.where(square > 0, square, 1.0), 0.0), mask=there)
    tl.store(at + 3, negative, mask=there)


@triton.jit(do_not_specialize=LENGTHS)
def _output(
    t_ptr, terms_ptr, slopes_ptr, q_ptr, k_ptr, v_ptr, lse_ptr, mean_ptr, factor_ptr, factor, low_ptr, high_ptr,
    mask_ptr, out_ptr, vmean_ptr, counts_ptr, heads, group, queries, keys, t_batch, t_head, t_row,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row, span_batch, mask_batch, mask_head,
    ROWS: tl.constexpr, KEYS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, VWIDTH: tl.constexpr,
    VBLOCK: tl.constexpr, GIVEN: tl.constexpr, MASKED: tl.constexpr, SPLIT: tl.constexpr, SIGN: tl.constexpr,
    COUNTED: tl.constexpr,
):  # fmt: skip
    """Store the output of a block of rows for t = SIGN times what lies at `t_ptr`."""
    SIDES: tl.constexpr = 1 if MASKED else 2  # with a mask no tile is full
    head, batch, own, first, rows, low, high, mask_ptr = opened(
        low_ptr, high_ptr, mask_ptr, heads, queries, span_batch, mask_batch, mask_head, ROWS
    )
    start, tiles, left, full = plan(low, high, KEYS, MASKED)
    at = head * queries
    k_ptr += batch * k_batch + (own // group) * k_head
    v_ptr += batch * v_batch + (own // group) * v_head
    q = load_block(q_ptr + batch * q_batch + own * q_head, first, q_row, queries, ROWS, WIDTH, BLOCK)
    c = row_factor(factor_ptr + at, factor, rows, queries, GIVEN)
    lse = tl.load(lse_ptr + at + rows, mask=rows < queries, other=float("inf"))
    plane = tl.num_programs(1).to(tl.int64) * queries
    terms, rest_ptr = terms_ptr + at * WIDTH, terms_ptr + (plane + at) * WIDTH
    slopes_ptr += at
    _slopes(
        t_ptr + batch * t_batch + own * t_head, mean_ptr + at * WIDTH, terms, rest_ptr, slopes_ptr, slopes_ptr + plane,
        first, t_row, queries, ROWS, WIDTH, BLOCK, SPLIT, SIGN,
    )  # fmt: skip
    tl.debug_barrier()
    hi = load_block(terms, first, WIDTH, queries, ROWS, WIDTH, BLOCK)
    lo = load_block(rest_ptr, first, WIDTH, queries, ROWS, WIDTH, BLOCK) if SPLIT else hi
    away = tl.load(slopes_ptr + rows, mask=rows < queries, other=0.0)
    unit = tl.load(slopes_ptr + plane + rows, mask=rows < queries, other=1.0)
    rest, used = tl.zeros((ROWS, VBLOCK), tl.float32), tl.zeros((ROWS,), tl.float32)
    top, support = tl.zeros((ROWS,), tl.float32) + float("-inf"), tl.zeros((ROWS,), tl.float32)
    square, negative = tl.zeros((ROWS,), tl.float32), tl.zeros((ROWS,), tl.float32)
    for side in tl.static_range(SIDES):
        for n in range(tile_count(tiles, full, side == 0)):
            here, visible = tile_at(n, start, left, full, KEYS, side == 0), low
            k = load_block(k_ptr, here, k_row, keys, KEYS, WIDTH, BLOCK, side == 0)
            v = load_block(v_ptr, here, v_row, keys, KEYS, VWIDTH, VBLOCK, side == 0)
            if side == 0:
                visible = seen(here + tl.arange(0, KEYS), low, high, mask_ptr, keys, MASKED)
            rest, used, top, support, square, negative = _output_tile(
                q, c, lse, hi, lo, away, unit, k, v, visible, rest, used, top, support, square, negative,
                SPLIT, side == 0, COUNTED,
            )  # fmt: skip
    vmean = load_block(vmean_ptr + at * VWIDTH, first, VWIDTH, queries, ROWS, VWIDTH, VBLOCK)
    out = vmean + (rest - used[:, None] * vmean)
    store_block(out_ptr + at * VWIDTH, out, first, VWIDTH, queries, ROWS, VWIDTH, VBLOCK)
    if COUNTED:
        _store_counts(counts_ptr + (at + rows) * 4, top, support, square, negative, rows < queries)


class Moments(NamedTuple):
    """Of rows, all float32: lse [B, H, Tq] in base 2, inf if no key is visible; means of keys [B, H, Tq, D] and of
    values [B, H, Tq, Dv]; x - mean [B, H, Tq, D], empty if not asked for."""

    lse: Tensor
    mean: Tensor
    vmean: Tensor
    right: Tensor


def moments(x: Tensor, y: Tensor, v: Tensor, factor: float | Tensor, span: Span, solved: bool) -> Moments:
    """Compute the moments in one pass over the keys; `solved` asks for x - mean. Cost: 6 D + 2 Dv a pair (4 D + 2 Dv in
    float32)."""
    batch, heads, queries, width = x.shape
    wide = v.shape[-1]
    lse, mean, vmean, right = (
        torch.empty(shape, dtype=torch.float32, device=x.device)
        for shape in (x.shape[:3], x.shape, (batch, heads, queries, wide), x.shape if solved else (0,))
    )
    tiles = MOMENTS.pick(max(width, wide), y.dtype)
    launch(
        _moments,
        (triton.cdiv(queries, tiles.rows), batch * heads),
        x, y, v, *number_or_rows(factor, lse), *span.pointers,
        lse, mean, vmean, right, heads, heads // max(1, y.shape[1]), queries, y.shape[2],
        *x.stride()[:3], *y.stride()[:3], *v.stride()[:3], *span.steps,
        tiles=tiles, ROWS=tiles.rows, KEYS=tiles.keys, WIDTH=width, BLOCK=block_width(width), VWIDTH=wide,
        VBLOCK=block_width(wide), GIVEN=isinstance(factor, Tensor), MASKED=span.mask is not None,
        SPLIT=y.dtype == torch.bfloat16, SOLVED=solved,
    )  # fmt: skip
    return Moments(lse, mean, vmean, right)


def output(
    t: Tensor,
    x: Tensor,
    y: Tensor,
    v: Tensor,
    factor: float | Tensor,
    found: Moments,
    span: Span,
    *,
    negated: bool = False,
    counted: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return (o [B, H, Tq, Dv] in the dtype of v, counts [B, H, Tq, 4] if `counted`, else empty) for slopes t [B, H,
    Tq, D], or -t if `negated`. Cost: 6 D + 2 Dv a pair (4 D + 2 Dv in float32)."""
    batch, heads, queries, width = x.shape
    wide = v.shape[-1]
    out = torch.empty((batch, heads, queries, wide), dtype=v.dtype, device=v.device)
    counts = torch.empty((batch, heads, queries, COUNTS) if counted else (0,), dtype=torch.float32, device=v.device)
    split = y.dtype == torch.bfloat16
    terms = torch.empty((1 + split, batch, heads, queries, width), dtype=y.dtype, device=v.device)
    slopes = torch.empty((2, batch, heads, queries), dtype=torch.float32, device=v.device)
    tiles = (OUTPUT if span.mask is None else OUTPUT_MASKED).pick(max(width, wide), y.dtype)
    launch(
        _output,
        (triton.cdiv(queries, tiles.rows), batch * heads),
        t, terms, slopes, x, y, v, found.lse, found.mean, *number_or_rows(factor, slopes), *span.pointers,
        out, found.vmean, counts,
        heads, heads // max(1, y.shape[1]), queries, y.shape[2], *t.stride()[:3], *x.stride()[:3],
        *y.stride()[:3], *v.stride()[:3], *span.steps,
        tiles=tiles, ROWS=tiles.rows, KEYS=tiles.keys, WIDTH=width, BLOCK=block_width(width), VWIDTH=wide,
        VBLOCK=block_width(wide), GIVEN=isinstance(factor, Tensor), MASKED=span.mask is not None,
        SPLIT=split, SIGN=-1 if negated else 1, COUNTED=counted,
    )  # fmt: skip
    return out, counts
