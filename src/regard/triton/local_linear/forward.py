"""What stands before and behind the systems in the forward pass of local linear attention.

`moments`: of every row the logarithm of its total weight and the means of its keys and values, in one pass with an
online maximum. `output`: from the solutions t, in another, with e_ij = (k_j - mean_i) . t_i,

    o_i = vmean_i + sum_j p_ij e_ij (v_j - vmean_i)

where vmean is taken off by the weights as they were multiplied, so that the effective weights p (1 + e) sum to one
whatever was rounded.

Legend: as in `local_linear_math`; Dv features of a value in blocks of VBLOCK.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..runtime.blocks import LENGTHS, load_block, load_span, seen, store_block
from ..runtime.launch import launch
from ..runtime.span import Span, batch_stride
from ..runtime.tiles import Tiles, TileTable
from .math import (
    LOG2E,
    block_width,
    edge_tile,
    mask_strides,
    norm_scale,
    number_or_rows,
    plan,
    product,
    row_factor,
    times,
)

MOMENTS = TileTable(
    "local_linear_moments",
    {
        (64, 2): Tiles(64, 32, 4, 3),
        (128, 2): Tiles(64, 16, 8, 2),
        (256, 2): Tiles(64, 32, 8, 2),
        (64, 4): Tiles(32, 32, 4, 1),
        (128, 4): Tiles(32, 16, 8, 2),
        (256, 4): Tiles(16, 16, 8, 1),
    },
)
OUTPUT = TileTable(
    "local_linear_output",
    {
        (64, 2): Tiles(64, 64, 4, 2),
        (128, 2): Tiles(64, 32, 4, 2),
        (256, 2): Tiles(64, 32, 8, 2),
        (64, 4): Tiles(32, 32, 8, 2),
        (128, 4): Tiles(32, 16, 8, 2),
        (256, 4): Tiles(16, 16, 8, 1),
    },
)
OUTPUT_MASKED = TileTable("local_linear_output_masked", {**OUTPUT.shipped, (64, 2): Tiles(64, 32, 4, 2)})
"""A mask takes a register for every key of a tile."""
PART = tl.constexpr(16)
"""Rows whose float32 vectors are in registers at a time."""
COUNTS = 4
"""What is counted of a row's weights: top score, support, effective sample size, negative mass."""


@triton.jit
def _moment_tile(q, c, k, v, visible, top, mass, total, vmass, vtotal, SPLIT: tl.constexpr, EDGE: tl.constexpr):
    """One tile of the online sums: the largest score in base 2, and the sums of 2^(z - top), of these times k, and of
    these, rounded once, times v."""
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
    """lse and the means of a block of rows, and where they are to be SOLVED the right sides q - mean."""
    block = tl.num_programs(0) - 1 - tl.program_id(0)  # with causal order the longest first
    head = tl.program_id(1).to(tl.int64)
    batch, own = head // heads, head % heads
    first = block * ROWS
    rows = first + tl.arange(0, ROWS)
    low, high = load_span(low_ptr + batch * span_batch, high_ptr + batch * span_batch, rows, rows < queries)
    start, tiles, left, full = plan(low, high, KEYS, MASKED)
    at = head * queries
    k_ptr += batch * k_batch + (own // group) * k_head
    v_ptr += batch * v_batch + (own // group) * v_head
    mask_ptr += batch * mask_batch + own * mask_head
    q = load_block(q_ptr + batch * q_batch + own * q_head, first, q_row, queries, ROWS, WIDTH, BLOCK)
    c = row_factor(factor_ptr + at, factor, rows, queries, GIVEN)
    top = tl.zeros((ROWS,), tl.float32) + float("-inf")
    mass, vmass = tl.zeros((ROWS,), tl.float32), tl.zeros((ROWS,), tl.float32)
    total, vtotal = tl.zeros((ROWS, BLOCK), tl.float32), tl.zeros((ROWS, VBLOCK), tl.float32)
    for n in range(tiles - full):
        here = start + edge_tile(n, left, full) * KEYS
        k = load_block(k_ptr, here, k_row, keys, KEYS, WIDTH, BLOCK)
        v = load_block(v_ptr, here, v_row, keys, KEYS, VWIDTH, VBLOCK)
        visible = seen(here + tl.arange(0, KEYS), low, high, mask_ptr, keys, MASKED)
        top, mass, total, vmass, vtotal = _moment_tile(
            q, c, k, v, visible, top, mass, total, vmass, vtotal, SPLIT, True
        )
    if not MASKED:
        for n in range(left, left + full):
            k = load_block(k_ptr, start + n * KEYS, k_row, keys, KEYS, WIDTH, BLOCK, False)
            v = load_block(v_ptr, start + n * KEYS, v_row, keys, KEYS, VWIDTH, VBLOCK, False)
            top, mass, total, vmass, vtotal = _moment_tile(
                q, c, k, v, low, top, mass, total, vmass, vtotal, SPLIT, False
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
    """One tile of sum_j p_ij e_ij v_j with the sum of its weights, and of what is counted."""
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
    """t in its own unit, in the terms that are multiplied, and mean . t of these; a few rows at a time, since float32
    tiles would take the registers of the sums."""
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


@triton.jit(do_not_specialize=LENGTHS)
def _output(
    t_ptr, terms_ptr, slopes_ptr, q_ptr, k_ptr, v_ptr, lse_ptr, mean_ptr, factor_ptr, factor, low_ptr, high_ptr,
    mask_ptr, out_ptr, vmean_ptr, counts_ptr, heads, group, queries, keys, t_batch, t_head, t_row,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row, span_batch, mask_batch, mask_head,
    ROWS: tl.constexpr, KEYS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, VWIDTH: tl.constexpr,
    VBLOCK: tl.constexpr, GIVEN: tl.constexpr, MASKED: tl.constexpr, SPLIT: tl.constexpr, SIGN: tl.constexpr,
    COUNTED: tl.constexpr,
):  # fmt: skip
    """The output of a block of rows for t = SIGN times what lies at `t_ptr`."""
    block = tl.num_programs(0) - 1 - tl.program_id(0)  # with causal order the longest first
    head = tl.program_id(1).to(tl.int64)
    batch, own = head // heads, head % heads
    first = block * ROWS
    rows = first + tl.arange(0, ROWS)
    low, high = load_span(low_ptr + batch * span_batch, high_ptr + batch * span_batch, rows, rows < queries)
    start, tiles, left, full = plan(low, high, KEYS, MASKED)
    at = head * queries
    k_ptr += batch * k_batch + (own // group) * k_head
    v_ptr += batch * v_batch + (own // group) * v_head
    mask_ptr += batch * mask_batch + own * mask_head
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
    for n in range(tiles - full):
        here = start + edge_tile(n, left, full) * KEYS
        k = load_block(k_ptr, here, k_row, keys, KEYS, WIDTH, BLOCK)
        v = load_block(v_ptr, here, v_row, keys, KEYS, VWIDTH, VBLOCK)
        visible = seen(here + tl.arange(0, KEYS), low, high, mask_ptr, keys, MASKED)
        rest, used, top, support, square, negative = _output_tile(
            q, c, lse, hi, lo, away, unit, k, v, visible, rest, used, top, support, square, negative,
            SPLIT, True, COUNTED,
        )  # fmt: skip
    if not MASKED:
        for n in range(left, left + full):
            k = load_block(k_ptr, start + n * KEYS, k_row, keys, KEYS, WIDTH, BLOCK, False)
            v = load_block(v_ptr, start + n * KEYS, v_row, keys, KEYS, VWIDTH, VBLOCK, False)
            rest, used, top, support, square, negative = _output_tile(
                q, c, lse, hi, lo, away, unit, k, v, low, rest, used, top, support, square, negative,
                SPLIT, False, COUNTED,
            )  # fmt: skip
    vmean = load_block(vmean_ptr + at * VWIDTH, first, VWIDTH, queries, ROWS, VWIDTH, VBLOCK)
    out = vmean + (rest - used[:, None] * vmean)
    store_block(out_ptr + at * VWIDTH, out, first, VWIDTH, queries, ROWS, VWIDTH, VBLOCK)
    if COUNTED:
        there = rows < queries
        tl.store(counts_ptr + (at + rows) * 4, top / LOG2E, mask=there)
        tl.store(counts_ptr + (at + rows) * 4 + 1, support, mask=there)
        ess = tl.where(square > 0, 1 / tl.where(square > 0, square, 1.0), 0.0)
        tl.store(counts_ptr + (at + rows) * 4 + 2, ess, mask=there)
        tl.store(counts_ptr + (at + rows) * 4 + 3, negative, mask=there)


class Moments(NamedTuple):
    """Of rows: lse [B, H, Tq] in base 2, inf where no key is seen, means of keys [B, H, Tq, D] and of values
    [B, H, Tq, Dv], and x - mean [B, H, Tq, D] (empty where it was not asked for), all float32."""

    lse: Tensor
    mean: Tensor
    vmean: Tensor
    right: Tensor


def moments(x: Tensor, y: Tensor, v: Tensor, factor: float | Tensor, span: Span, solved: bool) -> Moments:
    """One pass over the keys. `solved`: whether x - mean is wanted. Cost: 6 D + 2 Dv a pair (4 D + 2 Dv in float32)."""
    batch, heads, queries, width = x.shape
    wide, mask = v.shape[-1], span.mask
    lse, mean, vmean, right = (
        torch.empty(shape, dtype=torch.float32, device=x.device)
        for shape in (x.shape[:3], x.shape, (batch, heads, queries, wide), x.shape if solved else (0,))
    )
    tiles = MOMENTS.pick(max(width, wide), y.dtype)
    launch(
        _moments,
        (triton.cdiv(queries, tiles.rows), batch * heads),
        x, y, v, *number_or_rows(factor, lse), span.low, span.high, span.low if mask is None else mask,
        lse, mean, vmean, right, heads, heads // max(1, y.shape[1]), queries, y.shape[2],
        *x.stride()[:3], *y.stride()[:3], *v.stride()[:3], batch_stride(span.low), *mask_strides(mask),
        tiles=tiles,
        ROWS=tiles.rows,
        KEYS=tiles.keys,
        WIDTH=width,
        BLOCK=block_width(width),
        VWIDTH=wide,
        VBLOCK=block_width(wide),
        GIVEN=isinstance(factor, Tensor),
        MASKED=mask is not None,
        SPLIT=y.dtype == torch.bfloat16,
        SOLVED=solved,
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
    """(o [B, H, Tq, Dv] in the dtype of v, COUNTS [B, H, Tq, 4] where `counted`, empty else) for the slopes t
    [B, H, Tq, D], `negated` or not. Cost: 6 D + 2 Dv a pair (4 D + 2 Dv in float32)."""
    batch, heads, queries, width = x.shape
    wide = v.shape[-1]
    out = torch.empty((batch, heads, queries, wide), dtype=v.dtype, device=v.device)
    counts = torch.empty((batch, heads, queries, COUNTS) if counted else (0,), dtype=torch.float32, device=v.device)
    split = y.dtype == torch.bfloat16
    terms = torch.empty((1 + split, batch, heads, queries, width), dtype=y.dtype, device=v.device)
    slopes = torch.empty((2, batch, heads, queries), dtype=torch.float32, device=v.device)
    mask = span.mask
    tiles = (OUTPUT if mask is None else OUTPUT_MASKED).pick(max(width, wide), y.dtype)
    launch(
        _output,
        (triton.cdiv(queries, tiles.rows), batch * heads),
        t, terms, slopes, x, y, v, found.lse, found.mean, *number_or_rows(factor, slopes), span.low, span.high,
        span.low if mask is None else mask, out, found.vmean, counts,
        heads, heads // max(1, y.shape[1]), queries, y.shape[2], *t.stride()[:3], *x.stride()[:3],
        *y.stride()[:3], *v.stride()[:3], batch_stride(span.low), *mask_strides(mask),
        tiles=tiles,
        ROWS=tiles.rows,
        KEYS=tiles.keys,
        WIDTH=width,
        BLOCK=block_width(width),
        VWIDTH=wide,
        VBLOCK=block_width(wide),
        GIVEN=isinstance(factor, Tensor),
        MASKED=mask is not None,
        SPLIT=split,
        SIGN=-1 if negated else 1,
        COUNTED=counted,
    )  # fmt: skip
    return out, counts
