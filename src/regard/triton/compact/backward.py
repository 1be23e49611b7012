"""The backward pass of compact attention and softmax: lists of live blocks, a kernel by queries, and one by keys.

With g = mass^(-1/r) / reach of a row and a = [z - theta]_+ g, its weights are p = a^r, and their derivative by z is
A = r g a^(r-1); for softmax A = p. Given G = dL/dp and rho = sum_j B_j G_j (`grammar.weighting`),

    dL/dz_j = A_j (G_j - rho),    dL/d(margin or bias) = sum_j dL/dz_j.

With e = [z - theta]_+ a kernel with its own function has g = 1 / mass, p = g K(e) / K(reach), A = g K'(e) / K(reach).

If the threshold depends on the best key, the keys that tie for it subtract that sum in equal shares. Weights are
recomputed from the row statistics, and blocks without weight are skipped. The kernel by queries runs first and stores
theta, g, rho, shares of best keys and, if it has a function of its own, the reach in tables for the kernel by keys.

Legend: B batch, H heads, Hkv key heads, Tq queries, Tk keys, D and Dv dimensions.
"""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..runtime.blocks import load_block, load_rows, load_span, seen, store_block
from ..runtime.call import Call, Form
from ..runtime.launch import launch
from ..runtime.operators import FARTHEST, empty_gradients, rows_together
from ..runtime.span import Span, batch_stride
from ..runtime.support import before_hopper
from ..runtime.tiles import Tiles, TileTable
from .lists import block_of, lists_of, plan_of
from .math import ANCHORED, FIXED, LOG2E, NEAREST, SOFTMAX, UNIFORM, excess, lower_power, relative, root
from .rules import own_form

_WIDE = [(32, 32, 8, 1), (16, 32, 8, 1), (16, 16, 8, 1)]
DQ = TileTable.by_width(
    "compact_dq", [(64, 64, 4, 3), (64, 64, 4, 2), (32, 32, 8, 1)], _WIDE, [(64, 64, 8, 2), (64, 32, 4, 2)]
)
DKV = TileTable.by_width(
    "compact_dkv", [(64, 64, 4, 3), (64, 64, 8, 2), (32, 32, 8, 1)], _WIDE, [(32, 64, 4, 3), (32, 64, 8, 2)]
)
NARROW = 32  # maximum rows of a streamed block on devices whose products take operands from registers
NEAR = tl.constexpr(2.0**-19)  # relative tolerance of scores that tie for the best
GRAD, Q, K, V, SLOPE_MEAN = (tl.constexpr(i) for i in range(5))  # matrices, in the order of their steps
THETA, RHO, SCALE, EXTRA, BEST, REACH = (tl.constexpr(i) for i in range(6))
"""Tables; RHO is multiplied with g and the row's own factor, if there is one; EXTRA: shares of best keys, multiplied
alike, or fallback weights; BEST: `_bits` of the first best key."""
ONE = tl.constexpr(0x3F800000)  # the bits of 1.0
LENGTHS = ["heads", "group", "range_step", "mask_batch", "mask_head", "list_rows", "list_length", "padded"]
"""Parameters that the kernels are not specialised for. The numbers of queries and keys are not among them: knowing that
they are multiples of 16 saves registers, which are scarce at 128 features."""


@triton.jit
def _tile(at, start, total, OF: tl.constexpr, SIZE: tl.constexpr, PART: tl.constexpr, FORM: tl.constexpr):
    """Load rows [start, start + SIZE) of a matrix; 0 from row `total` on, which only PART blocks reach."""
    STEP: tl.constexpr = FORM.steps[OF]
    if OF == Q or OF == K:  # noqa: SIM109 - kernels have no "in"
        return load_block(at, start, STEP, total, SIZE, FORM.dim, FORM.wide, PART)
    else:
        return load_block(at, start, STEP, total, SIZE, FORM.value_dim, FORM.value_wide, PART)


@triton.jit
def _line(at, start, total, other, SIZE: tl.constexpr, PART: tl.constexpr):
    """Load numbers of rows [start, start + SIZE); `other` from row `total` on, which only PART blocks reach."""
    at = at + start + tl.arange(0, SIZE)
    return tl.load(at, mask=start + tl.arange(0, SIZE) < total, other=other) if PART else tl.load(at)


@triton.jit
def _of_head(matrix, batch, head):
    """Return the pointer to one head, from (base, strides of batch and head)."""
    return matrix[0] + batch * matrix[1] + head * matrix[2]


@triton.jit
def _row_scales(floats, flags, line, inside, FORM: tl.constexpr):
    """Return (theta, g, reach) of rows, for softmax (log2 of the sum of exp z, 1, 1). g is 0 if no key is near."""
    mass = tl.load(floats + line * 6 + 3, mask=inside, other=1.0)
    if FORM.rule == SOFTMAX:
        theta = tl.load(floats + line * 6, mask=inside, other=0.0) * LOG2E + tl.log2(mass)
        g = tl.full((FORM.own,), 1.0, tl.float32)
        reach = g
    else:
        theta = tl.load(floats + line * 6 + 1, mask=inside, other=0.0)
        reach = tl.load(floats + line * 6 + 2, mask=inside, other=1.0)
        none = tl.load(flags + line * 3, mask=inside, other=1) | tl.load(flags + line * 3 + 1, mask=inside, other=1)
        size = mass if FORM.relative is not None else root(mass, FORM.r, True) * reach
        g = tl.where(none != 0, 0.0, 1 / size)
    return theta, g, reach


@triton.jit
def _bits(key):
    """Return numbers of at least 1 that are equal only for equal keys. Floats are compared faster than integers."""
    return (key + ONE).to(tl.float32, bitcast=True)


@triton.jit
def _weights(dot, factor, theta, g, reach, seen, PART: tl.constexpr, FORM: tl.constexpr):
    """Return (weights, slopes / (r g)) of a tile of dot products; with PART, 0 for hidden pairs."""
    if FORM.rule == SOFTMAX:
        z = dot * (factor * LOG2E) - theta
        if PART:
            z = tl.where(seen, z, float("-inf"))
        p = tl.exp2(z)
        slope = p
    else:
        e = excess(dot, factor, theta)
        if PART:
            e = tl.where(seen, e, 0.0)
        if FORM.relative is None:
            a = e * g
            slope = lower_power(a, FORM.r)
            p = a if FORM.r == 1 else slope * a
        else:
            value, slope = relative(reach - e, reach, FORM)
            p = value * g
    return p, slope


@triton.jit
def _tops(floats, index, line, inside):
    """Return (first key with the best score, last, how many, that score, tolerance) of rows."""
    first = tl.load(index + line * 3, mask=inside, other=-1)
    last = tl.load(index + line * 3 + 1, mask=inside, other=-1)
    count = tl.load(index + line * 3 + 2, mask=inside, other=0)
    top = tl.load(floats + line * 6, mask=inside, other=0.0)
    size = tl.abs(top) + tl.load(floats + line * 6 + 2, mask=inside, other=0.0)
    return first, last, count, top, size * NEAR


@triton.jit
def _others(key, z, first, last, count, top, near):
    """Return which keys besides the first tie for the best score: the last and, of more than two, those in between."""
    between = (count > 2) & (key < last) & (tl.abs(z - top) <= near)
    return (key > first) & ((key == last) | between)


@triton.jit
def _dq_step(state, plan, t, owner, rows, kv, keys, PART: tl.constexpr, FORM: tl.constexpr):
    """Add one block of keys to state (sum of dz k, sum of dz) of a block of queries."""
    q, grad = owner
    factor, theta, g, rho, low, high, reach = rows
    start = block_of(plan, t, PART, FORM)[0] * FORM.tile
    k = _tile(kv[0], start, keys, K, FORM.tile, PART, FORM)
    v = _tile(kv[1], start, keys, V, FORM.tile, PART, FORM)
    shown = None
    if PART:
        shown = seen(start + tl.arange(0, FORM.tile), low, high, kv[2], keys, FORM.masked)
    dot = tl.dot(q, tl.trans(k), input_precision=FORM.precision)
    _, slope = _weights(dot, factor, theta[:, None], g[:, None], reach[:, None], shown, PART, FORM)
    dz = slope * (tl.dot(grad, tl.trans(v), input_precision=FORM.precision) - rho[:, None])
    moved = state[1]
    if FORM.given or FORM.rule == ANCHORED:
        moved += tl.sum(dz, 1)
    return tl.dot(dz.to(k.dtype), k, state[0], input_precision=FORM.precision), moved


@triton.jit
def _best_keys(plan, tops, q, rows, kv, keys, FORM: tl.constexpr):
    """Return the mean of the keys that tie for the best score of each row; several keys are rare."""
    first, last, count, top, near = tops
    total = load_rows(kv[0], first, FORM.steps[2], first >= 0, FORM.dim, FORM.wide).to(tl.float32)
    if tl.max(count, 0) > 1:
        for t in range(plan[1] + plan[2]):
            if t < plan[1]:
                start = block_of(plan, t, False, FORM)[0] * FORM.tile
            else:
                start = block_of(plan, t - plan[1], True, FORM)[0] * FORM.tile
            k = _tile(kv[0], start, keys, K, FORM.tile, True, FORM)
            z = tl.dot(q, tl.trans(k), input_precision=FORM.precision) * rows[0]
            key = start + tl.arange(0, FORM.tile)
            tie = _others(key[None, :], z, first[:, None], last[:, None], count[:, None], top[:, None], near[:, None])
            tie = tie & seen(key, rows[4], rows[5], kv[2], keys, FORM.masked)
            total = tl.dot(tie.to(k.dtype), k, total, input_precision=FORM.precision)
    return total / tl.maximum(count, 1)[:, None]


@triton.jit
def _leave_rows(table, ties, left, index, row, inside, queries, FORM: tl.constexpr):
    """Store the statistics of a head's rows that the kernel by keys reads."""
    rho, theta, g, reach, moved, first, count, by = left
    scale = g * by if FORM.factors else g
    tl.store(table + THETA * queries + row, theta, mask=inside)
    tl.store(table + RHO * queries + row, rho * scale, mask=inside)
    if FORM.rule != SOFTMAX:
        tl.store(table + SCALE * queries + row, g, mask=inside)
    if FORM.relative is not None:
        tl.store(table + REACH * queries + row, reach, mask=inside)
    if FORM.rule == ANCHORED:
        tl.store(table + EXTRA * queries + row, scale * (-moved / tl.maximum(count, 1)), mask=inside)
        tl.store(table + BEST * queries + row, _bits(first), mask=inside)
        tl.store(ties, (tl.max(count, 0) > 1).to(tl.uint8))
    if FORM.rule == FIXED and FORM.stand == UNIFORM:
        some = tl.load(index + row, mask=inside, other=0)
        tl.store(table + EXTRA * queries + row, tl.where(some > 0, 1.0 / some, 0.0), mask=inside)


@triton.jit(do_not_specialize=LENGTHS)
def compact_dq_kernel(
    floats, flags, index, factor, matrices, low_ptr, high_ptr, mask_ptr, listed, counts, table, ties, outs, heads,
    group, queries, keys, range_step, mask_batch, mask_head, list_rows, list_length, padded, FORM: tl.constexpr,
):  # fmt: skip
    """Compute dq and the gradients of the rows' numbers for one block of queries, and tables for the kernel by keys."""
    blocks = tl.cdiv(queries, FORM.own)
    block = blocks - 1 - tl.program_id(0) % blocks  # in causal order the last rows see the most keys
    nth = (tl.program_id(0) // blocks).to(tl.int64)
    batch, head = nth // heads, nth % heads
    start = block * FORM.own
    row = start + tl.arange(0, FORM.own)
    inside, line = row < queries, nth * queries + row
    low, high = low_ptr + batch * range_step, high_ptr + batch * range_step
    plan = plan_of((listed, counts, list_rows, list_length), low, high, nth, start, queries, FORM)
    mask_at = low
    if FORM.masked:
        mask_at = mask_ptr + batch * mask_batch + head * mask_head
    kv = _of_head(matrices[2], batch, head // group), _of_head(matrices[3], batch, head // group), mask_at

    slope_mean = _tile(_of_head(matrices[4], batch, head), start, queries, SLOPE_MEAN, FORM.own, True, FORM)
    grad = _tile(_of_head(matrices[0], batch, head), start, queries, GRAD, FORM.own, True, FORM)
    rho = tl.sum(grad.to(tl.float32) * slope_mean.to(tl.float32), 1)
    q = _tile(_of_head(matrices[1], batch, head), start, queries, Q, FORM.own, True, FORM)
    theta, g, reach = _row_scales(floats, flags, line, inside, FORM)
    by = factor
    if FORM.factors:
        by = tl.load(factor + line, mask=inside, other=0.0)
    low_of, high_of = load_span(low, high, row, inside)
    rows = by[:, None] if FORM.factors else by, theta, g, rho, low_of, high_of, reach

    state = tl.full((FORM.own, FORM.wide), 0.0, tl.float32), tl.full((FORM.own,), 0.0, tl.float32)
    for side in tl.static_range(2):
        for t in range(plan[1 + side]):
            state = _dq_step(state, plan, t, (q, grad), rows, kv, keys, side == 1, FORM)
    dq, moved = state
    first, count = 0, 1
    if FORM.rule == ANCHORED:
        tops = _tops(floats, index, line, inside)
        dq -= moved[:, None] * _best_keys(plan, tops, q, rows, kv, keys, FORM)
        first, count = tops[0], tops[2]
    left = rho, theta, g, reach, moved, first, count, by
    table, ties = table + nth * queries * FORM.tables, ties + nth * padded + block
    _leave_rows(table, ties, left, index + nth * queries, row, inside, queries, FORM)
    slope = FORM.r * g
    if FORM.given:
        tl.store(outs[2] + line, moved * slope, mask=inside)
    if FORM.factors:
        dfactor = tl.sum(dq * q.to(tl.float32), 1) * slope
        if FORM.rule == FIXED and FORM.relative is None:  # the factor of scores above a threshold of 0 cancels
            dfactor = tl.where(theta == 0, 0.0, dfactor)
        tl.store(outs[1] + line, dfactor, mask=inside)
    at = outs[0] + nth * queries * FORM.dim
    store_block(at, dq * (slope * by)[:, None], start, FORM.dim, queries, FORM.own, FORM.dim, FORM.wide)


@triton.jit
def _other_shares(dk, plan, owner, matrices, tables, mask, sizes, FORM: tl.constexpr):
    """Add to dk the gradient shares of tied best keys after the first, which are rare."""
    k, _, key, first, last = owner
    queries, keys = sizes
    table, index, floats, factor = tables
    for t in range(plan[1] + plan[2]):
        if t < plan[1]:
            block, head = block_of(plan, t, False, FORM)
        else:
            block, head = block_of(plan, t - plan[1], True, FORM)
        start, at = block * FORM.tile, tl.cast(head, tl.int64) * queries
        row = start + tl.arange(0, FORM.tile)
        first_best, last_best, count, top, near = _tops(floats + at * 6, index + at * 3, row, row < queries)
        if tl.max(count, 0) > 1:
            q_at = matrices[1] + tl.cast(head, tl.int64) * matrices[3]
            q = _tile(q_at, start, queries, Q, FORM.tile, True, FORM)
            by = factor
            if FORM.factors:
                by = _line(factor + at, start, queries, 0.0, FORM.tile, True)[None, :]
            z = tl.dot(k, tl.trans(q), input_precision=FORM.precision) * by
            bests = first_best[None, :], last_best[None, :], count[None, :], top[None, :], near[None, :]
            tie = _others(key[:, None], z, bests[0], bests[1], bests[2], bests[3], bests[4])
            tie = tie & _seen_rows(start, key, first, last, mask, head, keys, FORM)
            rows = table + tl.cast(head, tl.int64) * queries * FORM.tables
            share = _line(rows + EXTRA * queries, start, queries, 0.0, FORM.tile, True)[None, :]
            dk = tl.dot(tl.where(tie, share, 0.0).to(q.dtype), q, dk, input_precision=FORM.precision)
    return dk


@triton.jit
def _dkv_step(state, plan, t, owner, matrices, tables, mask, sizes, PART: tl.constexpr, FORM: tl.constexpr):
    """Add one block of queries to state (sum of dz q, sum of p dL/do) of a block of keys."""
    k, v, key, first, last = owner
    queries, keys = sizes
    block, head = block_of(plan, t, PART, FORM)
    start = block * FORM.tile
    head_at = tl.cast(head, tl.int64)
    at = head_at * queries
    table, index, _, factor = tables
    q = _tile(matrices[1] + head_at * matrices[3], start, queries, Q, FORM.tile, PART, FORM)
    grad = _tile(matrices[0] + head_at * matrices[2], start, queries, GRAD, FORM.tile, PART, FORM)
    table = table + at * FORM.tables
    theta = _line(table + THETA * queries, start, queries, 0.0, FORM.tile, PART)
    rho = _line(table + RHO * queries, start, queries, 0.0, FORM.tile, PART)
    g = theta
    if FORM.rule != SOFTMAX:
        g = _line(table + SCALE * queries, start, queries, 0.0, FORM.tile, PART)
    reach = g
    if FORM.relative is not None:
        reach = _line(table + REACH * queries, start, queries, 1.0, FORM.tile, PART)
    by = factor
    if FORM.factors:
        by = _line(factor + at, start, queries, 0.0, FORM.tile, PART)[None, :]
    dot = tl.dot(k, tl.trans(q), input_precision=FORM.precision)
    seen = None
    if PART:
        seen = _seen_rows(start, key, first, last, mask, head, keys, FORM)
    p, slope = _weights(dot, by, theta[None, :], g[None, :], reach[None, :], seen, PART, FORM)
    if FORM.rule == FIXED and FORM.stand == UNIFORM:  # fallback weights of rows without a key in the bandwidth
        alike = _line(table + EXTRA * queries, start, queries, 0.0, FORM.tile, PART)[None, :]
        p += tl.where(seen, alike, 0.0) if PART else alike
    if FORM.rule == FIXED and FORM.stand == NEAREST:
        best = _line(index + at, start, queries, -1, FORM.tile, PART)
        p = tl.where(key[:, None] == best[None, :], 1.0, p)
    dv = tl.dot(p.to(grad.dtype), grad, state[1], input_precision=FORM.precision)
    dp = tl.dot(v, tl.trans(grad), input_precision=FORM.precision)
    if FORM.rule != SOFTMAX:
        dp *= by * g[None, :] if FORM.factors else g[None, :]
    elif FORM.factors:
        dp *= by
    dz = slope * (dp - rho[None, :])
    if FORM.rule == ANCHORED:
        best = _line(table + BEST * queries, start, queries, 0.0, FORM.tile, PART)
        share = _line(table + EXTRA * queries, start, queries, 0.0, FORM.tile, PART)
        dz += tl.where(_bits(key)[:, None] == best[None, :], 1.0, 0.0) * share[None, :]
    return tl.dot(dz.to(q.dtype), q, state[0], input_precision=FORM.precision), dv


@triton.jit
def _seen_rows(start, key, first, last, mask, head, keys, FORM: tl.constexpr):
    """Return which rows of a block see the program's keys."""
    if FORM.masked:
        shown = tl.load(mask[0] + head * mask[1] + key, mask=key < keys, other=0)
        last = tl.where(shown != 0, last, 0)
    row = start + tl.arange(0, FORM.tile)
    return (row[None, :] >= first[:, None]) & (row[None, :] < last[:, None])


@triton.jit(do_not_specialize=LENGTHS)
def compact_dkv_kernel(
    floats, index, factor, matrices, low_ptr, high_ptr, mask_ptr, listed, counts, table, outs, heads, queries, keys,
    range_step, mask_batch, mask_head, list_rows, list_length, TIED: tl.constexpr, FORM: tl.constexpr,
):  # fmt: skip
    """Compute dk and dv of one block of keys, over all query heads that use them: TIED if a row that gives it weight
    has several best keys. The code for ties would cost other programs registers and a seventh of their operations."""
    blocks = tl.cdiv(keys, FORM.own)
    start = tl.program_id(0) % blocks * FORM.own
    nth = (tl.program_id(0) // blocks).to(tl.int64)
    batch, key_head = nth // (heads // FORM.group), nth % (heads // FORM.group)
    head = key_head * FORM.group
    query_nth = batch * heads + head
    at = query_nth * queries
    key = start + tl.arange(0, FORM.own)
    inside = key < keys
    low, high = low_ptr + batch * range_step, high_ptr + batch * range_step
    plan = plan_of((listed, counts, list_rows, list_length), low, high, nth, start, keys, FORM)
    if FORM.rule == ANCHORED:  # noqa: SIM102 - known when the kernel is compiled
        if (plan[3] > 0) != TIED:
            return
    first, last = load_span(low, high, key, inside)
    k = _tile(_of_head(matrices[2], batch, key_head), start, keys, K, FORM.own, True, FORM)
    v = _tile(_of_head(matrices[3], batch, key_head), start, keys, V, FORM.own, True, FORM)
    streams = _of_head(matrices[0], batch, head), _of_head(matrices[1], batch, head), matrices[0][2], matrices[1][2]
    by = factor
    if FORM.factors:
        by = factor + at
    shown = low, 0
    if FORM.masked:
        shown = mask_ptr + batch * mask_batch + head * mask_head, mask_head
    numbers = index + at * 3 if FORM.rule == ANCHORED else index + at
    rows = table + query_nth * queries * FORM.tables, numbers, floats + at * 6, by
    owner, size = (k, v, key, first, last), (queries, keys)

    state = tl.full((FORM.own, FORM.wide), 0.0, tl.float32), tl.full((FORM.own, FORM.value_wide), 0.0, tl.float32)
    for side in tl.static_range(2):
        for t in range(plan[1 + side]):
            state = _dkv_step(state, plan, t, owner, streams, rows, shown, size, side == 1, FORM)
    dk, dv = state
    if TIED:
        dk = _other_shares(dk, plan, owner, streams, rows, shown, size, FORM)
    dk *= FORM.r
    if not FORM.factors:
        dk *= factor
    dk_at, dv_at = outs[0] + nth * keys * FORM.dim, outs[1] + nth * keys * FORM.value_dim
    store_block(dk_at, dk, start, FORM.dim, keys, FORM.own, FORM.dim, FORM.wide)
    store_block(dv_at, dv, start, FORM.value_dim, keys, FORM.own, FORM.value_dim, FORM.value_wide)


# On the host --------------------------------------------------------------------------------------------------


class _Call(Call):
    """The arguments that both kernels of a call share."""

    def __init__(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, factor: Tensor | float, span: Span,
        kept: Sequence[Tensor], mask_tile: Sequence[int], rule: Sequence[Any], wanted: bool,
    ) -> None:  # fmt: skip
        self.soft, self.mask_tile = rule[0] == SOFTMAX.value, tuple(mask_tile)
        self.floats, self.flags, self.index, slope_mean, self.live = kept
        every = tuple(rows_together(x, FARTHEST) for x in (grad, q, k, v, slope_mean))
        form = {"rule": rule[0], "r": rule[1], "stand": rule[2], "given": wanted, **own_form(rule[3])}
        tables = 2 if self.soft else 6 if rule[3] else 5 if rule[0] == ANCHORED.value else 4
        steps = tuple(x.stride(2) if x.shape[2] > 1 else x.shape[3] for x in every)  # one row may have any stride
        form |= {"tables": tables, "steps": steps}
        super().__init__(q, k, v, factor, span, precision="ieee" if q.dtype == torch.float32 else "tf32", **form)
        self.read = self.factor[0 if self.form.factors else 1], tuple((x, *x.stride()[:2]) for x in every)
        self.table = self.blank(*self.shape[:2], self.form.tables, self.shape[2])
        self.most = NARROW if before_hopper(q.device) else 256  # rows of a streamed block

    def by_queries(self, tiles: Tiles, outs: tuple[Tensor, ...]) -> Tensor:
        """Fill the table and outs. Return which blocks have a row with tied best keys, uint8 [B x H, blocks]."""
        heads, queries = self.shape[:2].numel(), self.shape[2]
        block = tiles.rows if self.soft else min(tiles.rows, self.mask_tile[0])
        blocks = -(-queries // block)
        padded = blocks if self.soft else -(-queries // self.mask_tile[0]) * (self.mask_tile[0] // block)
        ties = torch.zeros(heads, padded, dtype=torch.uint8, device=self.q.device)
        lists, form = self._lists(2, block, min(tiles.keys, self.most), 1)
        launch(
            compact_dq_kernel, (heads * blocks,), self.floats, self.flags, self.index, *self.read, *self.span[:2],
            self.span.mask, *lists[:2], self.table, ties, outs, *self.sizes, *self.span.steps, *lists[2:], padded,
            tiles=tiles, FORM=form,
        )  # fmt: skip
        return ties

    def by_keys(self, tiles: Tiles, ties: Tensor, outs: tuple[Tensor, Tensor]) -> None:
        """Fill outs: dk, dv."""
        heads, group, queries, keys = self.sizes
        lists, form = self._lists(3, tiles.keys, min(tiles.rows, self.most), group, ties)
        blocks = outs[0].shape[:2].numel() * -(-keys // tiles.keys)
        for tied in (False, True)[: 1 + (form.rule == ANCHORED.value)]:
            launch(
                compact_dkv_kernel, (blocks,), self.floats, self.index, *self.read, *self.span[2:], *lists[:2],
                self.table, outs, heads, queries, keys, batch_stride(self.span.first), *self.span.steps[1:], *lists[2:],
                tiles=tiles, TIED=tied, FORM=form,
            )  # fmt: skip

    def _lists(self, axis: int, own: int, tile: int, group: int, ties: Tensor | None = None) -> tuple[Any, Form]:
        """Return the blocks that stream past blocks of `own` owners along `axis` of `live`, and the kernel's form."""
        if self.soft:  # a range
            return (None, None, 0, 0), self.form._replace(own=own, tile=tile, listed=0, split=1, group=group)
        own_tile, mask_tile = self.mask_tile if axis == 2 else self.mask_tile[::-1]
        listed, tile = max(own, own_tile), min(tile, mask_tile)
        ends, owners = (self.span[:2] if axis == 2 else self.span[2:4]), self.sizes[axis]
        sizes, flags = (own_tile, mask_tile), ties if self.form.rule == ANCHORED.value else None
        lists = lists_of(self.live, *ends, self.form.masked, owners, sizes, listed, axis, group, flags)
        return lists, self.form._replace(own=own, tile=tile, listed=listed, split=mask_tile // tile, group=group)


def backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, factor: Tensor | None, given: Tensor | None, *rest: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Compute (dq, dk, dv, dfactor, dgiven) of one call from dL/do [B, H, Tq, Dv]; the last two are float32 [B, H, Tq],
    or [0] for numbers. `rest` holds the span; what the forward pass kept; its scale; and code of the rule, power of the
    kernel, code of the fallback weights, `Rule.own`, and the queries and keys of a block of `live`.

    Kept are floats and flags of `block_rows`; index int32 [B, H, Tq, n]: if anchored, the first key with the best
    score, the last, and how many there are; if fixed, for rows without a near enough key, how many they see or which is
    nearest; slope_mean [B, H, Tq, Dv], sum_j B_j v_j: the output, or if adaptive sum_j A_j v_j / sum_j A_j; live uint8
    [B, H, query blocks, key blocks], whether any pair has weight. Cost: 7 products of all live blocks."""
    span, kept, (scale, *rule, live_rows, live_keys) = Span(*rest[:5]), rest[5:10], rest[10:]
    wanted, mask_tile = given is not None, (live_rows, live_keys)
    call = _Call(grad, q, k, v, scale if factor is None else factor, span, kept, mask_tile, rule, wanted)
    factors, masked = call.form.factors, span.mask is not None
    dq, dk, dv, dfactor, dgiven = empty_gradients((q, k, v), (factor, given))
    outs, flags = (dq, dfactor, dgiven), (*rule, factors, masked, wanted)
    tiles = DQ.pick(call.width, call.dtype, lambda tiles: call.by_queries(tiles, outs), flags)
    ties = call.by_queries(tiles, outs)
    tiles = DKV.pick(call.width, call.dtype, lambda tiles: call.by_keys(tiles, ties, (dk, dv)), flags)
    call.by_keys(tiles, ties, (dk, dv))
    return dq, dk, dv, dfactor, dgiven
