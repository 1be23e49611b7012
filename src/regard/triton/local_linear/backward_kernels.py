"""Kernels of the backward pass of local linear attention; formulas in `backward`.

Weights are not stored: each kernel recomputes p_ij = 2^(c_i x_i . y_j - lse_i), c = factor log2(e), of its tiles. As in
`math`, products with keys are centred at the row's own mean by their own rounded operand.

Legend: B batch, H heads, Hkv key heads, Tq queries, Tk keys, D and Dv dimensions. A matrix is (base, steps of batch,
head and row), within a head (base, step).
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..runtime.blocks import LENGTHS, load_block, load_span, seen, store_block
from .math import LOG2E, edge_tile, of_head, own_rows, plan, row_factor, row_ridge, times

GIVEN, SOLUTION, REST, LAST = (tl.constexpr(i) for i in range(4))
"""Operands of a row: t rounded, -u rounded, and the rounding errors of both."""
LIFT, DROP, MEAN, FIRST, LSE, SCALE, FALL, NUMBERS = (tl.constexpr(i) for i in (*range(7), 8))
"""Numbers of a row: 1 - m . t, gammabar - m . u, c, 1 - m . t of t's first term, lse, c's factor log2(e), and
gammabar - m . u of u's first term; 8 lie in one sector of memory."""


@triton.jit
def _place(blocks, heads, group):
    """Return (block, head among all, batch, head, key head); programs of a head are consecutive."""
    nth = (tl.program_id(0) // blocks).to(tl.int64)
    return tl.program_id(0) % blocks, nth, nth // heads, nth % heads, nth % heads // group


@triton.jit
def _rows_of(matrices, kept, factor, span, mask, steps, sizes, block, FORM: tl.constexpr):
    """Return what the kernels by rows read of their rows: places, operands and numbers."""
    heads, group, queries, keys = sizes
    _, nth, batch, head, key_head = _place(tl.cdiv(queries, FORM.own), heads, group)
    first = block * FORM.own
    grad_at, x_at = of_head(matrices[0], batch, head), of_head(matrices[1], batch, head)
    g = load_block(grad_at[0], first, grad_at[1], queries, FORM.own, FORM.value_dim, FORM.value_wide)
    x = load_block(x_at[0], first, x_at[1], queries, FORM.own, FORM.dim, FORM.wide)
    rows = first + tl.arange(0, FORM.own)
    lse = tl.load(kept[0] + nth * queries + rows, mask=rows < queries, other=float("inf"))
    c = row_factor(factor[0] + nth * queries, factor[1], rows, queries, FORM.factors)
    low, high = load_span(span[0] + batch * steps[0], span[1] + batch * steps[0], rows, rows < queries)
    hidden = mask + batch * steps[1] + head * steps[2]
    kv = of_head(matrices[2], batch, key_head), of_head(matrices[3], batch, key_head), hidden, keys
    return nth, first, x, g, (c, lse, low, high), kv


@triton.jit
def _put_rows(pointer, value, nth, first, queries, FORM: tl.constexpr):
    """Store this block's rows of a contiguous [B, H, Tq, D]."""
    store_block(pointer + nth * queries * FORM.dim, value, first, FORM.dim, queries, FORM.own, FORM.dim, FORM.wide)


@triton.jit
def _own_operand(operands, WHICH: tl.constexpr, nth, first, queries, FORM: tl.constexpr):
    """Load one operand of this block's rows."""
    step: tl.constexpr = FORM.operands * FORM.dim
    base = operands + nth * queries * step + WHICH * FORM.dim
    return load_block(base, first, step, queries, FORM.own, FORM.dim, FORM.wide)


@triton.jit
def _pair_tile(x, rows, kv, first, EDGE: tl.constexpr, FORM: tl.constexpr):
    """Return (keys, values, p) of one tile of keys."""
    c, lse, low, high = rows
    k = load_block(kv[0][0], first, kv[0][1], kv[3], FORM.tile, FORM.dim, FORM.wide, EDGE)
    v = load_block(kv[1][0], first, kv[1][1], kv[3], FORM.tile, FORM.value_dim, FORM.value_wide, EDGE)
    p = tl.exp2(tl.dot(x, tl.trans(k), input_precision=FORM.precision) * c[:, None] - lse[:, None])
    if EDGE:
        p = tl.where(seen(first + tl.arange(0, FORM.tile), low, high, kv[2], kv[3], FORM.masked), p, 0.0)
    return k, v, p


@triton.jit
def _right_step(state, x, g, mean, rows, kv, first, EDGE: tl.constexpr, FORM: tl.constexpr):
    """Add one tile of sum_j p_ij (gamma_ij - gammabar_i) y_j, and of the sums of these weights, multiplied and
    unrounded. Rounding errors in u and gammabar enter b, which is small where the model fits."""
    k, v, p = _pair_tile(x, rows, kv, first, EDGE, FORM)
    w = p * (tl.dot(g, tl.trans(v), input_precision=FORM.precision) - mean[:, None])
    total, used = times(w, k, state[0], state[1], FORM.operands > 2)
    return total, used, state[2] + tl.sum(w, 1)


@triton.jit(do_not_specialize=LENGTHS)
def local_linear_right_kernel(
    outs, matrices, kept, factor, span, mask, span_batch, mask_batch, mask_head, heads, group, queries, keys,
    FORM: tl.constexpr,
):  # fmt: skip
    """Store for one block of queries the right sides [B, H, Tq, D] of the systems of u, and gammabar [B, H, Tq]: g .
    vbar, corrected for the weights that the forward pass rounded."""
    sizes, steps = (heads, group, queries, keys), (span_batch, mask_batch, mask_head)
    blocks = tl.cdiv(queries, FORM.own)
    block = blocks - 1 - tl.program_id(0) % blocks  # in causal order the last see most
    nth, begin, x, g, rows, kv = _rows_of(matrices, kept, factor, span, mask, steps, sizes, block, FORM)
    mean = kept[2] + nth * queries * FORM.value_dim
    mean = load_block(mean, begin, FORM.value_dim, queries, FORM.own, FORM.value_dim, FORM.value_wide)
    mean = tl.sum(g.to(tl.float32) * mean, 1)
    start, tiles, left, full = plan(rows[2], rows[3], FORM.tile, FORM.masked)
    none = tl.full((FORM.own,), 0.0, tl.float32)
    state = tl.full((FORM.own, FORM.wide), 0.0, tl.float32), none, none
    for n in range(tiles - full):
        first = start + edge_tile(n, left, full) * FORM.tile
        state = _right_step(state, x, g, mean, rows, kv, first, True, FORM)
    if not FORM.masked:
        for n in range(left, left + full):
            state = _right_step(state, x, g, mean, rows, kv, start + n * FORM.tile, False, FORM)
    found = state[0] - state[1][:, None] * own_rows(kept[1] + nth * queries * FORM.dim, begin, queries, FORM)
    _put_rows(outs[0], found, nth, begin, queries, FORM)
    row = begin + tl.arange(0, FORM.own)
    tl.store(outs[1] + nth * queries + row, mean + state[2], mask=row < queries)


@triton.jit
def _put_operand(operands, WHICH: tl.constexpr, value, mean, nth, first, queries, FORM: tl.constexpr):
    """Store a value as it is multiplied and return (it, mean . it)."""
    rounded = value.to(operands.dtype.element_ty)
    step: tl.constexpr = FORM.operands * FORM.dim
    base = operands + nth * queries * step + WHICH * FORM.dim
    store_block(base, rounded, first, step, queries, FORM.own, FORM.dim, FORM.wide)
    return rounded.to(tl.float32), tl.sum(rounded.to(tl.float32) * mean, 1)


@triton.jit
def _ridge_share(t, u, ridge, dridge, nth, first, queries, FORM: tl.constexpr):
    """Return sum_d ridge_d t_d u_d, and store dL/dridge if the ridge is a tensor."""
    both = t * u
    own = row_ridge((ridge[0] + nth * queries * FORM.ridge, ridge[1]), first, queries, FORM.own, FORM)
    if FORM.ridge == 1:
        rows = first + tl.arange(0, FORM.own)
        tl.store(dridge + nth * queries + rows, -tl.sum(both, 1), mask=rows < queries)
    if FORM.ridge > 1:
        _put_rows(dridge, -both, nth, first, queries, FORM)
    return tl.sum(both * own, 1)


@triton.jit(do_not_specialize=LENGTHS)
def local_linear_operands_kernel(
    grad, kept, slopes, means, ridge, dridge, factor, operands, table, heads, queries, FORM: tl.constexpr
):  # fmt: skip
    """Store what the kernels by queries and by keys read of one block of rows: `operands` [B, H, Tq, 2 to 4, D] and
    `table` [B, H, Tq, NUMBERS], with c as it is for an exact solution. Also store the gradient of ridges."""
    block, nth, batch, head, _ = _place(tl.cdiv(queries, FORM.own), heads, 1)
    first = block * FORM.own
    row = first + tl.arange(0, FORM.own)
    inside, line = row < queries, table + (nth * queries + row) * NUMBERS
    share = tl.full((FORM.own,), 0.0, tl.float32)
    if FORM.solved:
        drop = tl.load(means + nth * queries + row, mask=inside, other=0.0)
    else:
        grad_at = of_head(grad, batch, head)
        g = load_block(grad_at[0], first, grad_at[1], queries, FORM.own, FORM.value_dim, FORM.value_wide)
        vbar = kept[2] + nth * queries * FORM.value_dim
        vbar = load_block(vbar, first, FORM.value_dim, queries, FORM.own, FORM.value_dim, FORM.value_wide)
        drop = tl.sum(g.to(tl.float32) * vbar, 1)
    mean = own_rows(kept[1] + nth * queries * FORM.dim, first, queries, FORM)
    t = own_rows(slopes[0] + nth * queries * FORM.dim, first, queries, FORM)
    used, lift = _put_operand(operands, GIVEN, t, mean, nth, first, queries, FORM)
    tl.store(line + FIRST, 1 - lift, mask=inside)
    if FORM.operands > 2:
        lift += _put_operand(operands, REST, t - used, mean, nth, first, queries, FORM)[1]
    if FORM.solved:
        u = own_rows(slopes[1] + nth * queries * FORM.dim, first, queries, FORM)
        share = _ridge_share(t, u, ridge, dridge, nth, first, queries, FORM)
        used, own = _put_operand(operands, SOLUTION, -u, mean, nth, first, queries, FORM)
        drop += own
        tl.store(line + FALL, drop, mask=inside)
        if FORM.operands > 2:
            drop += _put_operand(operands, LAST, -u - used, mean, nth, first, queries, FORM)[1]
    tl.store(line + LIFT, 1 - lift, mask=inside)
    tl.store(line + DROP, drop, mask=inside)
    tl.store(line + MEAN, share, mask=inside)
    tl.store(line + LSE, tl.load(kept[0] + nth * queries + row, mask=inside, other=0.0), mask=inside)
    tl.store(line + SCALE, row_factor(factor[0] + nth * queries, factor[1], row, queries, FORM.factors), mask=inside)


@triton.jit
def _query_step(state, operands, scalars, rows, kv, first, EDGE: tl.constexpr, FORM: tl.constexpr):
    """Add one tile to state: (sum_j dz_ij y_j, sum of the rounded dz, their unrounded sum; if t is given, its gradient
    and the sum of its weights)."""
    x, g, t, u = operands
    lift, drop, guess = scalars
    total, used, mean, right, spent = state
    k, v, p = _pair_tile(x, rows, kv, first, EDGE, FORM)
    b = tl.dot(g, tl.trans(v), input_precision=FORM.precision)
    if FORM.solved:
        b = tl.dot(u, tl.trans(k), b, input_precision=FORM.precision)
    b = (b - drop[:, None]) * p
    if not FORM.solved:
        right, spent = times(b, k, right, spent, False)
    a = tl.dot(t, tl.trans(k), input_precision=FORM.precision) + lift[:, None]
    dz = a * b
    if FORM.solved:
        dz -= p * guess[:, None]
    total, used = times(dz, k, total, used, False)
    return total, used, mean + tl.sum(dz, 1), right, spent


@triton.jit(do_not_specialize=LENGTHS)
def local_linear_query_kernel(
    outs, matrices, kept, u, operands, table, factor, span, mask, span_batch, mask_batch, mask_head,
    heads, group, queries, keys, FORM: tl.constexpr,
):  # fmt: skip
    """Store dx, gradients of factors or of a given t, and c of a block of queries, from one term each."""
    sizes, steps = (heads, group, queries, keys), (span_batch, mask_batch, mask_head)
    blocks = tl.cdiv(queries, FORM.own)
    block = blocks - 1 - tl.program_id(0) % blocks
    nth, begin, x, g, rows, kv = _rows_of(matrices, kept, factor, span, mask, steps, sizes, block, FORM)
    row = begin + tl.arange(0, FORM.own)
    inside, line = row < queries, table + (nth * queries + row) * NUMBERS
    t = _own_operand(operands, GIVEN, nth, begin, queries, FORM)
    negative = t
    if FORM.solved:
        negative = _own_operand(operands, SOLUTION, nth, begin, queries, FORM)
    lift = tl.load(line + FIRST, mask=inside, other=0.0)
    drop = tl.load(line + (FALL if FORM.solved else DROP), mask=inside, other=0.0)
    guess = tl.load(line + MEAN, mask=inside, other=0.0)
    start, tiles, left, full = plan(rows[2], rows[3], FORM.tile, FORM.masked)
    sums, none = tl.full((FORM.own, FORM.wide), 0.0, tl.float32), tl.full((FORM.own,), 0.0, tl.float32)
    state = sums, none, none, none, none
    if not FORM.solved:
        state = sums, none, none, sums, none
    for n in range(tiles - full):
        first = start + edge_tile(n, left, full) * FORM.tile
        state = _query_step(state, (x, g, t, negative), (lift, drop, guess), rows, kv, first, True, FORM)
    if not FORM.masked:
        for n in range(left, left + full):
            first = start + n * FORM.tile
            state = _query_step(state, (x, g, t, negative), (lift, drop, guess), rows, kv, first, False, FORM)
    tl.store(line + MEAN, guess + state[2], mask=inside)
    mean = own_rows(kept[1] + nth * queries * FORM.dim, begin, queries, FORM)
    if not FORM.solved:
        _put_rows(outs[2], state[4][:, None] * mean - state[3], nth, begin, queries, FORM)
    sums = state[0] - state[1][:, None] * mean
    if FORM.factors:
        tl.store(outs[1] + nth * queries + row, tl.sum(x.to(tl.float32) * sums, 1), mask=inside)
    sums *= (rows[0] / LOG2E)[:, None]
    if FORM.solved:
        sums += own_rows(u + nth * queries * FORM.dim, begin, queries, FORM)
    _put_rows(outs[0], sums, nth, begin, queries, FORM)


@triton.jit
def _key_step(state, own, member, first, read, sizes, EDGE: tl.constexpr, FORM: tl.constexpr):
    """Add one tile of queries of one head to state (dk, dv)."""
    k, v, low, high, begin = own
    x_at, grad_at, operands, table, mask, factor = read
    queries, keys, wide = sizes[2], sizes[3], FORM.operands * FORM.dim
    member = tl.cast(member, tl.int64)
    row = first + tl.arange(0, FORM.tile)
    inside = row < queries
    x = load_block(x_at[0] + member * x_at[1], first, x_at[2], queries, FORM.tile, FORM.dim, FORM.wide, EDGE)
    g = grad_at[0] + member * grad_at[1]
    g = load_block(g, first, grad_at[2], queries, FORM.tile, FORM.value_dim, FORM.value_wide, EDGE)
    operands += member * queries * wide
    t = load_block(operands, first, wide, queries, FORM.tile, FORM.dim, FORM.wide, EDGE)
    line = table + (member * queries + first) * NUMBERS + tl.arange(0, FORM.tile) * NUMBERS
    c = tl.full((FORM.tile,), 0.0, tl.float32) + factor * LOG2E
    if FORM.factors:
        c = tl.load(line + SCALE, mask=inside, other=0.0)
    lse = tl.load(line + LSE, mask=inside, other=float("inf"))
    p = tl.exp2(tl.dot(k, tl.trans(x), input_precision=FORM.precision) * c[None, :] - lse[None, :])
    if FORM.masked == 2:  # a mask shared by all heads is applied at the end
        key = begin + tl.arange(0, FORM.own)
        high = tl.where(tl.load(mask[0] + member * mask[1] + key, mask=key < keys, other=0) != 0, high, 0)
    if EDGE or FORM.masked == 2:
        p = tl.where(seen(row, low, high, mask[0], queries, False), p, 0.0)
    a = tl.dot(k, tl.trans(t), input_precision=FORM.precision)
    if FORM.operands > 2:
        rest = operands + REST * FORM.dim
        rest = load_block(rest, first, wide, queries, FORM.tile, FORM.dim, FORM.wide, EDGE)
        a = tl.dot(k, tl.trans(rest), a, input_precision=FORM.precision)
    a = p * (a + tl.load(line + LIFT, mask=inside, other=0.0)[None, :])
    dv = tl.dot(a.to(k.dtype), g, state[1], input_precision=FORM.precision)
    dk = state[0]
    b = tl.dot(v, tl.trans(g), input_precision=FORM.precision)
    if FORM.solved:
        u = operands + SOLUTION * FORM.dim
        u = load_block(u, first, wide, queries, FORM.tile, FORM.dim, FORM.wide, EDGE)
        dk = tl.dot(a.to(k.dtype), u, dk, input_precision=FORM.precision)
        b = tl.dot(k, tl.trans(u), b, input_precision=FORM.precision)
        if FORM.operands > 2:
            last = operands + LAST * FORM.dim
            last = load_block(last, first, wide, queries, FORM.tile, FORM.dim, FORM.wide, EDGE)
            b = tl.dot(k, tl.trans(last), b, input_precision=FORM.precision)
    b -= tl.load(line + DROP, mask=inside, other=0.0)[None, :]
    dk = tl.dot((p * b).to(k.dtype), t, dk, input_precision=FORM.precision)
    mean = tl.load(line + MEAN, mask=inside, other=0.0)
    dz = (a * b - p * mean[None, :]) * (c / LOG2E)[None, :]
    return tl.dot(dz.to(k.dtype), x, dk, input_precision=FORM.precision), dv


@triton.jit(do_not_specialize=LENGTHS)
def local_linear_key_kernel(
    outs, matrices, operands, table, factor, span, mask, span_batch, mask_batch, mask_head,
    heads, group, queries, keys, FORM: tl.constexpr,
):  # fmt: skip
    """Store dk and dv of one block of keys, over all query heads of its key head in turn."""
    sizes = heads, group, queries, keys
    block, nth, batch, key_head, _ = _place(tl.cdiv(keys, FORM.own), heads // group, 1)
    begin = block * FORM.own
    k_at, v_at = of_head(matrices[2], batch, key_head), of_head(matrices[3], batch, key_head)
    k = load_block(k_at[0], begin, k_at[1], keys, FORM.own, FORM.dim, FORM.wide)
    v = load_block(v_at[0], begin, v_at[1], keys, FORM.own, FORM.value_dim, FORM.value_wide)
    key = begin + tl.arange(0, FORM.own)
    low, high = load_span(span[0] + batch * span_batch, span[1] + batch * span_batch, key, key < keys)
    start, tiles, left, full = plan(low, high, FORM.tile, False)
    head = key_head * group
    there = high > low  # full tiles also give weights to keys that nobody sees
    if FORM.masked == 1:
        there &= tl.load(mask + batch * mask_batch + head * mask_head + key, mask=key < keys, other=0) != 0
    x_at, grad_at = of_head(matrices[1], batch, head), of_head(matrices[0], batch, head)
    base = (batch * heads + head) * queries
    read = (
        (x_at[0], matrices[1][2], x_at[1]), (grad_at[0], matrices[0][2], grad_at[1]),
        operands + base * (FORM.operands * FORM.dim), table + base * NUMBERS,
        (mask + batch * mask_batch + head * mask_head, mask_head), factor,
    )  # fmt: skip
    own = k, v, low, high, begin
    state = tl.full((FORM.own, FORM.wide), 0.0, tl.float32), tl.full((FORM.own, FORM.value_wide), 0.0, tl.float32)
    edges = tiles - full
    for n in range(group * edges):  # one loop over heads and tiles takes fewer registers than two
        first = start + edge_tile(n % edges, left, full) * FORM.tile
        state = _key_step(state, own, n // edges, first, read, sizes, True, FORM)
    for n in range(group * full):
        first = start + (left + n % full) * FORM.tile
        state = _key_step(state, own, n // full, first, read, sizes, False, FORM)
    at = nth * keys
    dk, dv = tl.where(there[:, None], state[0], 0.0), tl.where(there[:, None], state[1], 0.0)
    store_block(outs[0] + at * FORM.dim, dk, begin, FORM.dim, keys, FORM.own, FORM.dim, FORM.wide)
    store_block(
        outs[1] + at * FORM.value_dim, dv, begin, FORM.value_dim, keys, FORM.own, FORM.value_dim, FORM.value_wide
    )
