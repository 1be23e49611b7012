"""What stands before and behind the systems in the forward pass of local linear attention.

`moments`: of every row the logarithm of its total weight and the mean of its keys, in one pass with an online maximum.
`output`: from the solutions t, o_i = sum_j p_ij (1 + (k_j - mean_i) . t_i) v_j, in one pass. Of its two sums, v_j with
weight p_ij and with the signed rest, the second is taken around the first, by the weights as they were multiplied: the
effective weights sum to one whatever was rounded.

Legend: as in `local_linear_math`; Dv features of a value in blocks of VBLOCK.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import launch
from .local_linear_math import (
    LOG2E,
    block_width,
    edge_tile,
    load_keys,
    load_rows,
    load_span,
    mask_strides,
    norm_scale,
    number_or_rows,
    parts,
    plan,
    product,
    row_factor,
    seen,
    store_rows,
    times,
    weights,
)
from .span import Span, batch_stride
from .tiles import Tiles, TileTable

MOMENTS = TileTable(
    "local_linear_moments",
    {
        (64, 2): Tiles(128, 64, 4, 3),
        (128, 2): Tiles(64, 64, 4, 3),
        (256, 2): Tiles(64, 32, 8, 2),
        (64, 4): Tiles(32, 32, 4, 2),
        (128, 4): Tiles(32, 32, 8, 2),
        (256, 4): Tiles(16, 32, 8, 1),
    },
)
OUTPUT = TileTable(
    "local_linear_output",
    {
        (64, 2): Tiles(64, 64, 4, 2),
        (128, 2): Tiles(64, 32, 4, 2),
        (256, 2): Tiles(64, 32, 8, 2),
        (64, 4): Tiles(32, 32, 4, 2),
        (128, 4): Tiles(32, 32, 8, 2),
        (256, 4): Tiles(16, 32, 8, 1),
    },
)
COUNTS = 4
"""What is counted of a row's weights: top score, support, effective sample size, negative mass."""


@triton.jit
def _moment_tile(
    q, c, k, visible, top, mass, total, SPLIT: tl.constexpr, EDGE: tl.constexpr
):
    """One tile of the online sums: the largest score in base 2, and the sums of 2^(z - top) and of these times k."""
    z = product(q, tl.trans(k)) * c[:, None]
    if EDGE:
        z = tl.where(visible, z, float("-inf"))
    best = tl.maximum(top, tl.max(z, 1))
    safe = tl.where(best > float("-inf"), best, 0.0)
    shrink = tl.exp2(top - safe)
    total, mass = times(tl.exp2(z - safe[:, None]), k, total * shrink[:, None], mass * shrink, SPLIT)
    return best, mass, total


@triton.jit
def _moments(
    q_ptr, k_ptr, factor_ptr, factor, low_ptr, high_ptr, mask_ptr, lse_ptr, mean_ptr, right_ptr,
    heads, group, queries, keys, q_batch, q_head, q_row, k_batch, k_head, k_row, span_batch, mask_batch, mask_head,
    ROWS: tl.constexpr, KEYS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, GIVEN: tl.constexpr,
    MASKED: tl.constexpr, SPLIT: tl.constexpr, SOLVED: tl.constexpr,
):  # fmt: skip
    """lse and mean of the rows of a block, and where they are to be SOLVED the right sides q - mean."""
    block = tl.num_programs(0) - 1 - tl.program_id(0)  # with causal order the longest first
    head = tl.program_id(1).to(tl.int64)
    batch, own = head // heads, head % heads
    first = block * ROWS
    rows = first + tl.arange(0, ROWS)
    low, high = load_span(low_ptr + batch * span_batch, high_ptr + batch * span_batch, rows, queries)
    start, tiles, left, full = plan(low, high, KEYS, MASKED)
    at = head * queries
    k_ptr += batch * k_batch + (own // group) * k_head
    mask_ptr += batch * mask_batch + own * mask_head
    q = load_rows(q_ptr + batch * q_batch + own * q_head, first, q_row, queries, ROWS, WIDTH, BLOCK)
    c = row_factor(factor_ptr + at, factor, rows, queries, GIVEN)
    top = tl.zeros((ROWS,), tl.float32) + float("-inf")
    mass = tl.zeros((ROWS,), tl.float32)
    total = tl.zeros((ROWS, BLOCK), tl.float32)
    for n in range(tiles - full):
        here = start + edge_tile(n, left, full) * KEYS
        k = load_keys(k_ptr, here, k_row, keys, KEYS, WIDTH, BLOCK, True)
        visible = seen(low, high, here, mask_ptr, keys, KEYS, MASKED)
        top, mass, total = _moment_tile(q, c, k, visible, top, mass, total, SPLIT, True)
    if not MASKED:
        for n in range(left, left + full):
            k = load_keys(k_ptr, start + n * KEYS, k_row, keys, KEYS, WIDTH, BLOCK, False)
            top, mass, total = _moment_tile(q, c, k, low, top, mass, total, SPLIT, False)
    some = (top > float("-inf")) & (high > low)
    mean = tl.where(some[:, None], total / tl.where(some, mass, 1.0)[:, None], 0.0)
    lse = tl.where(some, top + tl.log2(tl.where(some, mass, 1.0)), float("inf"))
    tl.store(lse_ptr + at + rows, lse, mask=rows < queries)
    store_rows(mean_ptr + at * WIDTH, mean, first, WIDTH, queries, ROWS, WIDTH, BLOCK)
    if SOLVED:
        q = load_rows(q_ptr + batch * q_batch + own * q_head, first, q_row, queries, ROWS, WIDTH, BLOCK)
        right = tl.where(some[:, None], q.to(tl.float32) - mean, 0.0)
        store_rows(right_ptr + at * WIDTH, right, first, WIDTH, queries, ROWS, WIDTH, BLOCK)


@triton.jit
def _output_tile(
    q, c, lse, hi, lo, away, unit, k, v, visible, means, mass, rest, used, top, support, square, negative,
    SPLIT: tl.constexpr, EDGE: tl.constexpr, COUNTED: tl.constexpr,
):  # fmt: skip
    """One tile of sum_j p_ij v_j and sum_j p_ij e_ij v_j with the sums of their weights, and of what is counted."""
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
    means, mass = times(p, v, means, mass, False)
    rest, used = times(w, v, rest, used, False)
    return means, mass, rest, used, top, support, square, negative


@triton.jit
def _output(
    t_ptr, q_ptr, k_ptr, v_ptr, lse_ptr, mean_ptr, factor_ptr, factor, low_ptr, high_ptr, mask_ptr,
    out_ptr, vmean_ptr, counts_ptr, heads, group, queries, keys, t_batch, t_head, t_row, q_batch, q_head, q_row,
    k_batch, k_head, k_row, v_batch, v_head, v_row, span_batch, mask_batch, mask_head,
    ROWS: tl.constexpr, KEYS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, VWIDTH: tl.constexpr,
    VBLOCK: tl.constexpr, GIVEN: tl.constexpr, MASKED: tl.constexpr, SPLIT: tl.constexpr, SIGN: tl.constexpr,
    KEEP: tl.constexpr, COUNTED: tl.constexpr,
):  # fmt: skip
    """The output of a block of rows for t = SIGN times what lies at `t_ptr`. KEEP: sum_j p_ij v_j too."""
    block = tl.num_programs(0) - 1 - tl.program_id(0)  # with causal order the longest first
    head = tl.program_id(1).to(tl.int64)
    batch, own = head // heads, head % heads
    first = block * ROWS
    rows = first + tl.arange(0, ROWS)
    low, high = load_span(low_ptr + batch * span_batch, high_ptr + batch * span_batch, rows, queries)
    start, tiles, left, full = plan(low, high, KEYS, MASKED)
    at = head * queries
    k_ptr += batch * k_batch + (own // group) * k_head
    v_ptr += batch * v_batch + (own // group) * v_head
    mask_ptr += batch * mask_batch + own * mask_head
    q = load_rows(q_ptr + batch * q_batch + own * q_head, first, q_row, queries, ROWS, WIDTH, BLOCK)
    c = row_factor(factor_ptr + at, factor, rows, queries, GIVEN)
    lse = tl.load(lse_ptr + at + rows, mask=rows < queries, other=float("inf"))
    t = SIGN * load_rows(t_ptr + batch * t_batch + own * t_head, first, t_row, queries, ROWS, WIDTH, BLOCK)
    unit = norm_scale(t)
    hi, lo = parts(t / unit[:, None], q, SPLIT)
    mean = load_rows(mean_ptr + at * WIDTH, first, WIDTH, queries, ROWS, WIDTH, BLOCK)
    away = tl.sum(mean * hi.to(tl.float32), 1)
    if SPLIT:
        away += tl.sum(mean * lo.to(tl.float32), 1)
    means, rest = tl.zeros((ROWS, VBLOCK), tl.float32), tl.zeros((ROWS, VBLOCK), tl.float32)
    mass, used = tl.zeros((ROWS,), tl.float32), tl.zeros((ROWS,), tl.float32)
    top, support = tl.zeros((ROWS,), tl.float32) + float("-inf"), tl.zeros((ROWS,), tl.float32)
    square, negative = tl.zeros((ROWS,), tl.float32), tl.zeros((ROWS,), tl.float32)
    for n in range(tiles - full):
        here = start + edge_tile(n, left, full) * KEYS
        k = load_keys(k_ptr, here, k_row, keys, KEYS, WIDTH, BLOCK, True)
        v = load_keys(v_ptr, here, v_row, keys, KEYS, VWIDTH, VBLOCK, True)
        visible = seen(low, high, here, mask_ptr, keys, KEYS, MASKED)
        means, mass, rest, used, top, support, square, negative = _output_tile(
            q, c, lse, hi, lo, away, unit, k, v, visible, means, mass, rest, used, top, support, square, negative,
            SPLIT, True, COUNTED,
        )  # fmt: skip
    if not MASKED:
        for n in range(left, left + full):
            k = load_keys(k_ptr, start + n * KEYS, k_row, keys, KEYS, WIDTH, BLOCK, False)
            v = load_keys(v_ptr, start + n * KEYS, v_row, keys, KEYS, VWIDTH, VBLOCK, False)
            means, mass, rest, used, top, support, square, negative = _output_tile(
                q, c, lse, hi, lo, away, unit, k, v, low, means, mass, rest, used, top, support, square, negative,
                SPLIT, False, COUNTED,
            )  # fmt: skip
    means = means / tl.where(mass > 0, mass, 1.0)[:, None]
    out = means + (rest - used[:, None] * means)
    store_rows(out_ptr + at * VWIDTH, out, first, VWIDTH, queries, ROWS, VWIDTH, VBLOCK)
    if KEEP:
        store_rows(vmean_ptr + at * VWIDTH, means, first, VWIDTH, queries, ROWS, VWIDTH, VBLOCK)
    if COUNTED:
        there = rows < queries
        tl.store(counts_ptr + (at + rows) * 4, top / LOG2E, mask=there)
        tl.store(counts_ptr + (at + rows) * 4 + 1, support, mask=there)
        tl.store(counts_ptr + (at + rows) * 4 + 2, tl.where(square > 0, 1 / tl.where(square > 0, square, 1.0), 0.0), mask=there)
        tl.store(counts_ptr + (at + rows) * 4 + 3, negative, mask=there)


class Moments(NamedTuple):
    """Of rows: lse [B, H, Tq] in base 2, inf where no key is seen, mean of the keys [B, H, Tq, D], and x - mean (empty
    where it was not asked for), all float32."""

    lse: Tensor
    mean: Tensor
    right: Tensor


def moments(x: Tensor, y: Tensor, factor: float | Tensor, span: Span, solved: bool) -> Moments:
    """One pass over the keys. `solved`: whether x - mean is wanted. Cost: 6 D a pair (4 D in float32)."""
    batch, heads, queries, width = x.shape
    lse = torch.empty(x.shape[:3], dtype=torch.float32, device=x.device)
    mean = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    right = torch.empty(x.shape if solved else (0,), dtype=torch.float32, device=x.device)
    tiles, mask = MOMENTS.pick(width, y.dtype), span.mask
    launch(
        _moments,
        (triton.cdiv(queries, tiles.rows), batch * heads),
        x, y, *number_or_rows(factor, lse), span.low, span.high, span.low if mask is None else mask, lse, mean, right,
        heads, heads // y.shape[1], queries, y.shape[2], *x.stride()[:3], *y.stride()[:3], batch_stride(span.low),
        *mask_strides(mask),
        tiles=tiles,
        ROWS=tiles.rows,
        KEYS=tiles.keys,
        WIDTH=width,
        BLOCK=block_width(width),
        GIVEN=isinstance(factor, Tensor),
        MASKED=mask is not None,
        SPLIT=y.dtype == torch.bfloat16,
        SOLVED=solved,
    )  # fmt: skip
    return Moments(lse, mean, right)


def output(
    t: Tensor,
    x: Tensor,
    y: Tensor,
    v: Tensor,
    factor: float | Tensor,
    lse: Tensor,
    mean: Tensor,
    span: Span,
    *,
    negated: bool = False,
    keep: bool = False,
    counted: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """(o [B, H, Tq, Dv] in the dtype of v, the mean of the values in float32 where `keep`, COUNTS [B, H, Tq, 4] where
    `counted`; empty else) for the slopes t [B, H, Tq, D], `negated` or not. Cost: 6 D + 4 Dv a pair (4 D + 4 Dv in
    float32)."""
    batch, heads, queries, width = x.shape
    wide = v.shape[-1]
    out = torch.empty((batch, heads, queries, wide), dtype=v.dtype, device=v.device)
    vmean = torch.empty((batch, heads, queries, wide) if keep else (0,), dtype=torch.float32, device=v.device)
    counts = torch.empty((batch, heads, queries, COUNTS) if counted else (0,), dtype=torch.float32, device=v.device)
    tiles, mask = OUTPUT.pick(max(width, wide), y.dtype), span.mask
    launch(
        _output,
        (triton.cdiv(queries, tiles.rows), batch * heads),
        t, x, y, v, lse, mean, *number_or_rows(factor, lse), span.low, span.high, span.low if mask is None else mask,
        out, vmean, counts, heads, heads // y.shape[1], queries, y.shape[2], *t.stride()[:3], *x.stride()[:3],
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
        SPLIT=y.dtype == torch.bfloat16,
        SIGN=-1 if negated else 1,
        KEEP=keep,
        COUNTED=counted,
    )  # fmt: skip
    return out, vmean, counts
