"""The forward pass of local linear attention before and after the systems are solved.

`moments` finds the logarithm of each row's total weight and the means of its keys and values, in one pass with an
online maximum. `output` takes another, with the solutions t and e_ij = (k_j - mean_i) . t_i:

    o_i = vmean_i + sum_j p_ij e_ij (v_j - vmean_i)

vmean is subtracted with the weights as they were multiplied, so that the effective weights p (1 + e) sum to one
whatever was rounded.

Legend: as in `math`; V = FORM.value_wide columns that hold the Dv features of a value.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..runtime.blocks import LENGTHS, load_block, seen, store_block
from ..runtime.call import Call, matrix_of
from ..runtime.launch import launch
from ..runtime.tiles import Tiles, TileTable
from .math import (
    LOG2E,
    norm_scale,
    of_head,
    opened,
    own_rows,
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
    [(64, 64, 4, 2), (128, 64, 8, 2)],
)
_WIDE = [(32, 32, 8, 2), (32, 16, 8, 2), (16, 16, 8, 1)]
_MORE = [(64, 32, 4, 3), (128, 64, 8, 2)]
OUTPUT = TileTable.by_width("local_linear_output", [(64, 64, 4, 2), (64, 32, 4, 2), (64, 32, 8, 2)], _WIDE, _MORE)
OUTPUT_MASKED = TileTable.by_width(
    "local_linear_output_masked", [(64, 32, 4, 2), (64, 32, 4, 2), (64, 32, 8, 2)], _WIDE, _MORE
)
"""Smaller tiles, since a mask takes a register for every key."""
PART = tl.constexpr(16)
"""Rows whose float32 vectors are in registers at once."""
COUNTS = 4
"""Statistics of a row's weights: top score, support, effective sample size, negative mass."""


@triton.jit
def _key_tile(n, tiles, kv, sight, keys, EDGE: tl.constexpr, FORM: tl.constexpr):
    """Return (keys [K, W], values [K, V], which pairs are visible) of the n-th tile; with EDGE some may be hidden."""
    first, visible = tile_at(n, tiles, EDGE, FORM), sight[0]
    k = load_block(kv[0][0], first, kv[0][1], keys, FORM.tile, FORM.dim, FORM.wide, EDGE)
    v = load_block(kv[1][0], first, kv[1][1], keys, FORM.tile, FORM.value_dim, FORM.value_wide, EDGE)
    if EDGE:
        visible = seen(first + tl.arange(0, FORM.tile), sight[0], sight[1], sight[2], keys, FORM.masked)
    return k, v, visible


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
    matrices, factor, span, outs, heads, group, queries, keys, span_batch, mask_batch, mask_head, FORM: tl.constexpr
):
    """Store lse and the means of a block of rows and, if t is solved for, the right sides q - mean."""
    SIDES: tl.constexpr = 1 if FORM.masked else 2  # with a mask no tile is full
    head, batch, own, first, rows, sight = opened(span, heads, queries, span_batch, mask_batch, mask_head, FORM)
    tiles = plan(sight[0], sight[1], FORM.tile, FORM.masked)
    at = head * queries
    kv = of_head(matrices[1], batch, own // group), of_head(matrices[2], batch, own // group)
    q_at, q_row = of_head(matrices[0], batch, own)
    q = load_block(q_at, first, q_row, queries, FORM.own, FORM.dim, FORM.wide)
    c = row_factor(factor[0] + at, factor[1], rows, queries, FORM.factors)
    top = tl.full((FORM.own,), 0.0, tl.float32) + float("-inf")
    mass, vmass = tl.full((FORM.own,), 0.0, tl.float32), tl.full((FORM.own,), 0.0, tl.float32)
    total, vtotal = (
        tl.full((FORM.own, FORM.wide), 0.0, tl.float32),
        tl.full((FORM.own, FORM.value_wide), 0.0, tl.float32),
    )
    for side in tl.static_range(SIDES):
        for n in range(tile_count(tiles, side == 0)):
            k, v, visible = _key_tile(n, tiles, kv, sight, keys, side == 0, FORM)
            top, mass, total, vmass, vtotal = _moment_tile(
                q, c, k, v, visible, top, mass, total, vmass, vtotal, FORM.fine, side == 0
            )
    lse_ptr, mean_ptr, vmean_ptr, right_ptr = outs
    some = (top > float("-inf")) & (sight[1] > sight[0])
    mean = tl.where(some[:, None], total / tl.where(some, mass, 1.0)[:, None], 0.0)
    lse = tl.where(some, top + tl.log2(tl.where(some, mass, 1.0)), float("inf"))
    tl.store(lse_ptr + at + rows, lse, mask=rows < queries)
    store_block(mean_ptr + at * FORM.dim, mean, first, FORM.dim, queries, FORM.own, FORM.dim, FORM.wide)
    vmean = tl.where(some[:, None], vtotal / tl.where(some, vmass, 1.0)[:, None], 0.0)
    vmean_ptr += at * FORM.value_dim
    store_block(vmean_ptr, vmean, first, FORM.value_dim, queries, FORM.own, FORM.value_dim, FORM.value_wide)
    if FORM.solved:
        q = load_block(q_at, first, q_row, queries, FORM.own, FORM.dim, FORM.wide)
        right = tl.where(some[:, None], q.to(tl.float32) - mean, 0.0)
        store_block(right_ptr + at * FORM.dim, right, first, FORM.dim, queries, FORM.own, FORM.dim, FORM.wide)


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
def _slopes(t_at, mean_ptr, terms, rest, away_ptr, unit_ptr, first, queries, FORM: tl.constexpr):
    """Store t in its own unit, in the terms that are multiplied, and mean . t of these; a few rows at a time, since
    float32 tiles would take the registers of the sums."""
    for part in range(0, FORM.own, PART):
        here = first + part
        SIGN: tl.constexpr = 1 if FORM.solved else -1
        t = SIGN * load_block(t_at[0], here, t_at[1], queries, PART, FORM.dim, FORM.wide)
        mean = load_block(mean_ptr, here, FORM.dim, queries, PART, FORM.dim, FORM.wide)
        unit = norm_scale(t)
        t = t / unit[:, None]
        hi = t.to(terms.dtype.element_ty)
        away = tl.sum(mean * hi.to(tl.float32), 1)
        store_block(terms, hi, here, FORM.dim, queries, PART, FORM.dim, FORM.wide)
        if FORM.fine:
            lo = (t - hi.to(tl.float32)).to(terms.dtype.element_ty)
            away += tl.sum(mean * lo.to(tl.float32), 1)
            store_block(rest, lo, here, FORM.dim, queries, PART, FORM.dim, FORM.wide)
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
    slope, terms_ptr, numbers, matrices, kept, factor, span, outs, heads, group, queries, keys,
    span_batch, mask_batch, mask_head, FORM: tl.constexpr,
):  # fmt: skip
    """Store the output of a block of rows. `slope` holds t, or -t if it was given; two are scratch."""
    SIDES: tl.constexpr = 1 if FORM.masked else 2  # with a mask no tile is full
    head, batch, own, first, rows, sight = opened(span, heads, queries, span_batch, mask_batch, mask_head, FORM)
    tiles = plan(sight[0], sight[1], FORM.tile, FORM.masked)
    at = head * queries
    kv = of_head(matrices[1], batch, own // group), of_head(matrices[2], batch, own // group)
    q_at, q_row = of_head(matrices[0], batch, own)
    q = load_block(q_at, first, q_row, queries, FORM.own, FORM.dim, FORM.wide)
    c = row_factor(factor[0] + at, factor[1], rows, queries, FORM.factors)
    lse = tl.load(kept[0] + at + rows, mask=rows < queries, other=float("inf"))
    plane = tl.num_programs(1).to(tl.int64) * queries
    terms, rest_ptr = terms_ptr + at * FORM.dim, terms_ptr + (plane + at) * FORM.dim
    numbers += at
    mean_ptr, vmean_ptr = kept[1] + at * FORM.dim, kept[2] + at * FORM.value_dim
    _slopes(of_head(slope, batch, own), mean_ptr, terms, rest_ptr, numbers, numbers + plane, first, queries, FORM)
    tl.debug_barrier()
    hi = own_rows(terms, first, queries, FORM)
    lo = own_rows(rest_ptr, first, queries, FORM) if FORM.fine else hi
    away = tl.load(numbers + rows, mask=rows < queries, other=0.0)
    unit = tl.load(numbers + plane + rows, mask=rows < queries, other=1.0)
    rest, used = tl.full((FORM.own, FORM.value_wide), 0.0, tl.float32), tl.full((FORM.own,), 0.0, tl.float32)
    top, support = tl.full((FORM.own,), 0.0, tl.float32) + float("-inf"), tl.full((FORM.own,), 0.0, tl.float32)
    square, negative = tl.full((FORM.own,), 0.0, tl.float32), tl.full((FORM.own,), 0.0, tl.float32)
    for side in tl.static_range(SIDES):
        for n in range(tile_count(tiles, side == 0)):
            k, v, visible = _key_tile(n, tiles, kv, sight, keys, side == 0, FORM)
            rest, used, top, support, square, negative = _output_tile(
                q, c, lse, hi, lo, away, unit, k, v, visible, rest, used, top, support, square, negative,
                FORM.fine, side == 0, FORM.counted,
            )  # fmt: skip
    vmean = load_block(vmean_ptr, first, FORM.value_dim, queries, FORM.own, FORM.value_dim, FORM.value_wide)
    out = vmean + (rest - used[:, None] * vmean)
    out_ptr = outs[0] + at * FORM.value_dim
    store_block(out_ptr, out, first, FORM.value_dim, queries, FORM.own, FORM.value_dim, FORM.value_wide)
    if FORM.counted:
        _store_counts(outs[1] + (at + rows) * 4, top, support, square, negative, rows < queries)


class Moments(NamedTuple):
    """Of rows, all float32: lse [B, H, Tq] in base 2, inf if no key is visible; means of keys [B, H, Tq, D] and of
    values [B, H, Tq, Dv]; x - mean [B, H, Tq, D], empty if not asked for."""

    lse: Tensor
    mean: Tensor
    vmean: Tensor
    right: Tensor


def moments(call: Call, solved: bool) -> Moments:
    """Compute the moments in one pass over the keys; `solved` asks for x - mean. Cost: 6 D + 2 Dv a pair (4 D + 2 Dv in
    float32)."""
    mean, vmean = call.new(call.form.dim), call.new(call.form.value_dim)
    found = Moments(call.new(), mean, vmean, torch.empty_like(mean) if solved else mean.new_empty(0))

    def run(tiles: Tiles) -> None:
        launch(
            _moments, call.grid(tiles.rows), call.matrices, call.factor, call.span.pointers, tuple(found), *call.sizes,
            *call.span.steps, tiles=tiles, FORM=call.fitted(tiles, solved=solved),
        )  # fmt: skip

    run(MOMENTS.pick(call.width, call.dtype, run, (solved,)))
    return found


def output(t: Tensor, call: Call, found: Moments, *, solved: bool, counted: bool = False) -> tuple[Tensor, Tensor]:
    """Return (o [B, H, Tq, Dv] in the dtype of v, counts [B, H, Tq, 4] if `counted`, else empty) for slopes t [B, H,
    Tq, D], or -t if they were not `solved` for. Cost: 6 D + 2 Dv a pair (4 D + 2 Dv in float32)."""
    out = torch.empty((*call.shape, call.form.value_dim), dtype=call.v.dtype, device=t.device)
    counts = call.new(COUNTS) if counted else t.new_empty(0, dtype=torch.float32)
    terms = torch.empty((1 + call.form.fine, *call.shape, call.form.dim), dtype=call.dtype, device=t.device)
    slopes = torch.empty((2, *call.shape), dtype=torch.float32, device=t.device)

    def run(tiles: Tiles) -> None:
        launch(
            _output, call.grid(tiles.rows), matrix_of(t), terms, slopes, call.matrices, found[:3],
            call.factor, call.span.pointers, (out, counts), *call.sizes, *call.span.steps,
            tiles=tiles, FORM=call.fitted(tiles, solved=solved, counted=counted),
        )  # fmt: skip

    run((OUTPUT_MASKED if call.form.masked else OUTPUT).pick(call.width, call.dtype, run, (solved, counted)))
    return out, counts
