"""The forward pass of local linear attention before and after the systems are solved.

`moments` finds the logarithm of each row's total weight and the means of its keys and values, in one pass with an
online maximum. `output` takes another, with the solutions t and e_ij = (k_j - mean_i) . t_i:

    o_i = vmean_i + sum_j p_ij e_ij (v_j - vmean_i)

vmean is subtracted with the weights as they were multiplied, so that effective weights p (1 + e) sum to exactly one.

Legend: as in `math`; V = FORM.value_wide columns that hold the Dv features of a value.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..runtime.blocks import LENGTHS, load_block, store_block, store_numbers
from ..runtime.call import Call, matrix_of
from ..runtime.tiles import TileTable
from .math import LOG2E, norm_scale, of_head, opened, own_rows, pair_tile, product, put_rows, rows_of, tile_count, times

MOMENTS = TileTable.by_width(
    "local_linear_moments", [(64, 64, 4, 3), (64, 64, 4, 2), (64, 32, 8, 2)],
    [(32, 32, 4, 1), (32, 16, 8, 2), (16, 16, 8, 1)], [(64, 32, 4, 3), (64, 32, 4, 2), (128, 64, 8, 2)],
)  # fmt: skip
_WIDE = [(32, 32, 8, 2), (32, 16, 8, 2), (16, 16, 8, 1)]
_MORE = [(64, 64, 4, 3), (64, 32, 4, 2), (128, 64, 8, 2)]
OUTPUT = TileTable.by_width("local_linear_output", [(64, 64, 4, 2), (64, 64, 4, 2), (64, 32, 8, 2)], _WIDE, _MORE)
_MASKED = [(64, 32, 4, 2), (64, 32, 4, 2), (64, 32, 8, 2)]
OUTPUT_MASKED = TileTable.by_width("local_linear_output_masked", _MASKED, _WIDE, _MORE)
"""Smaller tiles, since a mask takes a register for every key."""
PART = tl.constexpr(16)  # rows whose float32 vectors are in registers at once
COUNTS = 4  # statistics of a row's weights: top score, support, effective sample size, negative mass


@triton.jit(do_not_specialize=LENGTHS)
def _moments(
    matrices, factor, span, outs, heads, group, queries, keys, span_batch, mask_batch, mask_head, FORM: tl.constexpr
):
    """Store lse and the means of a block of rows and, if t is solved for, the right sides q - mean. Sums are relative
    to the largest score so far, `top`, in base 2; weights of values are rounded once."""
    sizes, steps = (heads, group, queries), (span_batch, mask_batch, mask_head)
    at, batch, head, first, rows, sight, tiles, q, c, kv = opened(matrices, factor, span, sizes, steps, FORM)
    top = tl.full((FORM.own,), 0.0, tl.float32) + float("-inf")
    mass, vmass = tl.full((FORM.own,), 0.0, tl.float32), tl.full((FORM.own,), 0.0, tl.float32)
    total = tl.full((FORM.own, FORM.wide), 0.0, tl.float32)
    vtotal = tl.full((FORM.own, FORM.value_wide), 0.0, tl.float32)
    for side in tl.static_range(1 if FORM.masked else 2):
        for n in range(tile_count(tiles, side == 0)):
            k, v, visible = pair_tile(n, tiles, kv, sight, keys, side == 0, FORM)
            z = product(q, tl.trans(k)) * c[:, None]
            if side == 0:
                z = tl.where(visible, z, float("-inf"))
            best = tl.maximum(top, tl.max(z, 1))
            safe = tl.where(best > float("-inf"), best, 0.0)
            shrink = tl.exp2(top - safe)
            p = tl.exp2(z - safe[:, None])
            total, mass = times(p, k, total * shrink[:, None], mass * shrink, FORM.fine)
            vtotal, vmass = times(p, v, vtotal * shrink[:, None], vmass * shrink, False)
            top = best
    lse_ptr, mean_ptr, vmean_ptr, right_ptr = outs
    some = (top > float("-inf")) & (sight[1] > sight[0])
    mean = tl.where(some[:, None], total / tl.where(some, mass, 1.0)[:, None], 0.0)
    lse = tl.where(some, top + tl.log2(tl.where(some, mass, 1.0)), float("inf"))
    tl.store(lse_ptr + at + rows, lse, mask=rows < queries)
    put_rows(mean_ptr + at * FORM.dim, mean, first, queries, FORM)
    vmean = tl.where(some[:, None], vtotal / tl.where(some, vmass, 1.0)[:, None], 0.0)
    vmean_ptr += at * FORM.value_dim
    store_block(vmean_ptr, vmean, first, FORM.value_dim, queries, FORM.own, FORM.value_dim, FORM.value_wide)
    if FORM.solved:
        # loaded again: the sums need the registers
        q = rows_of(matrices[0], batch, head, first, queries, FORM.dim, FORM.wide, FORM)
        right = tl.where(some[:, None], q.to(tl.float32) - mean, 0.0)
        put_rows(right_ptr + at * FORM.dim, right, first, queries, FORM)


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


@triton.jit(do_not_specialize=LENGTHS)
def _output(
    slope, terms_ptr, numbers, matrices, kept, factor, span, outs, heads, group, queries, keys,
    span_batch, mask_batch, mask_head, FORM: tl.constexpr,
):  # fmt: skip
    """Store the output of a block of rows. `slope` holds t, or -t if it was given; two are scratch."""
    sizes, steps = (heads, group, queries), (span_batch, mask_batch, mask_head)
    at, batch, head, first, rows, sight, tiles, q, c, kv = opened(matrices, factor, span, sizes, steps, FORM)
    lse = tl.load(kept[0] + at + rows, mask=rows < queries, other=float("inf"))
    plane = tl.num_programs(1).to(tl.int64) * queries
    terms, rest_ptr = terms_ptr + at * FORM.dim, terms_ptr + (plane + at) * FORM.dim
    numbers += at
    mean_ptr, vmean_ptr = kept[1] + at * FORM.dim, kept[2] + at * FORM.value_dim
    _slopes(of_head(slope, batch, head), mean_ptr, terms, rest_ptr, numbers, numbers + plane, first, queries, FORM)
    tl.debug_barrier()
    hi = own_rows(terms, first, queries, FORM)
    lo = own_rows(rest_ptr, first, queries, FORM) if FORM.fine else hi
    away = tl.load(numbers + rows, mask=rows < queries, other=0.0)
    unit = tl.load(numbers + plane + rows, mask=rows < queries, other=1.0)
    rest, used = tl.full((FORM.own, FORM.value_wide), 0.0, tl.float32), tl.full((FORM.own,), 0.0, tl.float32)
    top, support = tl.full((FORM.own,), 0.0, tl.float32) + float("-inf"), tl.full((FORM.own,), 0.0, tl.float32)
    square, negative = tl.full((FORM.own,), 0.0, tl.float32), tl.full((FORM.own,), 0.0, tl.float32)
    for side in tl.static_range(1 if FORM.masked else 2):
        for n in range(tile_count(tiles, side == 0)):
            k, v, visible = pair_tile(n, tiles, kv, sight, keys, side == 0, FORM)
            z = product(q, tl.trans(k)) * c[:, None]
            p = tl.exp2(z - lse[:, None])
            e = product(hi, tl.trans(k))
            if FORM.fine:
                e = tl.dot(lo, tl.trans(k), e, input_precision="ieee")
            if side == 0:
                p = tl.where(visible, p, 0.0)
            w = p * ((e - away[:, None]) * unit[:, None])
            if FORM.counted:
                if side == 0:
                    z = tl.where(visible, z, float("-inf"))
                top = tl.maximum(top, tl.max(z, 1))
                support += tl.sum((p > 0).to(tl.float32), 1)
                square += tl.sum(p * p, 1)
                negative -= tl.sum(tl.minimum(p + w, 0.0), 1)
            rest, used = times(w, v, rest, used, False)
    vmean = load_block(vmean_ptr, first, FORM.value_dim, queries, FORM.own, FORM.value_dim, FORM.value_wide)
    out = vmean + (rest - used[:, None] * vmean)
    out_ptr = outs[0] + at * FORM.value_dim
    store_block(out_ptr, out, first, FORM.value_dim, queries, FORM.own, FORM.value_dim, FORM.value_wide)
    if FORM.counted:
        size = tl.where(square > 0, 1 / tl.where(square > 0, square, 1.0), 0.0)
        store_numbers(outs[1], at + rows, (top / LOG2E, support, size, negative), rows < queries)


def moments(call: Call, solved: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return float32 lse [B, H, Tq] in base 2, inf if no key is visible; means of keys [B, H, Tq, D], of values [B, H,
    Tq, Dv]; x - mean, empty unless `solved`. Cost: as `output`."""
    mean, vmean = call.new(call.form.dim), call.new(call.form.value_dim)
    stored = call.new(), mean, vmean, torch.empty_like(mean) if solved else mean.new_empty(0)
    read = call.matrices, call.factor, call.span.pointers
    call.by_rows(_moments, MOMENTS, *read, stored, *call.sizes, *call.span.steps, flags=(solved,), solved=solved)
    return stored


def output(t: Tensor, call: Call, found: tuple[Tensor, ...], solved: bool, counted: bool) -> tuple[Tensor, Tensor]:
    """Return (o [B, H, Tq, Dv] in the dtype of v, counts [B, H, Tq, 4] if `counted`, else empty) for slopes t [B, H,
    Tq, D], or -t if they were not `solved` for. Cost: 6 D + 2 Dv a pair (4 D + 2 Dv in float32)."""
    out = torch.empty((*call.shape, call.form.value_dim), dtype=call.v.dtype, device=t.device)
    counts = call.new(COUNTS) if counted else t.new_empty(0, dtype=torch.float32)
    terms = torch.empty((1 + call.form.fine, *call.shape, call.form.dim), dtype=call.dtype, device=t.device)
    slopes = torch.empty((2, *call.shape), dtype=torch.float32, device=t.device)
    read = matrix_of(t), terms, slopes, call.matrices, found[:3], call.factor, call.span.pointers
    call.by_rows(
        _output, OUTPUT_MASKED if call.form.masked else OUTPUT, *read, (out, counts), *call.sizes, *call.span.steps,
        flags=(solved, counted), solved=solved, counted=counted,
    )  # fmt: skip
    return out, counts
