"""Kernels of the backward pass of local linear attention: the formulas are those of `local_linear_backward`.

A weight is never stored: each kernel makes p_ij = 2^(log2e factor_i x_i . y_j - lse_i) of its tiles anew. Tiles that all
of a block's rows see whole run through a loop without masks, those at the ends of ranges through another.

Every product with the keys is centred at the row's own mean by its own rounded operand: slopes are y_j . round(t_i) -
m_i . round(t_i), and sums are sum_j round(w_ij) y_j - (sum_j round(w_ij)) m_i, both differences in float32.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
NUMBER, ROW, DIMS = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
"""A ridge is a number, one a row, or one a row and coordinate."""


@triton.jit
def _tile(base, start, local, dims, stride, count, DIM: tl.constexpr, EDGE: tl.constexpr):
    """Rows [start + local] of a matrix [count, DIM], 0 outside it."""
    at = base + tl.cast(start, tl.int64) * stride + (local[:, None] * stride + dims[None, :])
    if EDGE:
        return tl.load(at, mask=(start + local < count)[:, None] & (dims < DIM)[None, :], other=0.0)
    if DIM < dims.shape[0]:
        return tl.load(at, mask=(dims < DIM)[None, :], other=0.0)
    return tl.load(at)


@triton.jit
def _put(base, value, start, local, dims, stride, count, DIM: tl.constexpr):
    """Store rows [start + local] of a matrix [count, DIM]."""
    at = base + tl.cast(start, tl.int64) * stride + (local[:, None] * stride + dims[None, :])
    tl.store(at, value.to(base.dtype.element_ty), mask=(start + local < count)[:, None] & (dims < DIM)[None, :])


@triton.jit
def _ranges(low, high, SIZE: tl.constexpr):
    """Tiles of a block whose members see [low, high): (start, tiles to the left of the full ones, the full ones' start
    and end, tiles on both sides)."""
    start, end = tl.min(low, 0) // SIZE * SIZE, tl.cdiv(tl.max(high, 0), SIZE) * SIZE
    full, last = tl.cdiv(tl.max(low, 0), SIZE) * SIZE, tl.min(high, 0) // SIZE * SIZE
    some = last > full
    full, last = tl.where(some, full, end), tl.where(some, last, end)
    left = (full - start) // SIZE
    return start, left, full, last, tl.maximum(left + (end - last) // SIZE, 0)


@triton.jit
def _side(n, start, left, last, SIZE: tl.constexpr):
    """Where the n-th tile beside the full ones starts."""
    return tl.where(n < left, start + n * SIZE, last + (n - left) * SIZE)


@triton.jit
def _hidden(p, start, keys, low, high, keep, Tk, MASK: tl.constexpr):
    """The weights [rows, keys] with 0 where a row does not see a key."""
    at = start + keys
    seen = (at[None, :] >= low[:, None]) & (at[None, :] < high[:, None])
    if MASK:
        seen = seen & (tl.load(keep + at, mask=at < Tk, other=0) != 0)[None, :]
    return tl.where(seen, p, 0.0)


@triton.jit
def _place(pid, blocks, H, G):
    """(block, batch, query head, key head) of a program; heads stay together, that L2 may hold their keys."""
    head = pid // blocks
    return pid % blocks, head // H, head % H, (head % H) // G


@triton.jit
def _range_of(low_ptr, high_ptr, stride, batch, at, count):
    """Ranges of the members `at`, those beyond the last as the last."""
    at = batch.to(tl.int64) * stride + tl.minimum(at, count - 1)
    return tl.load(low_ptr + at), tl.load(high_ptr + at)


@triton.jit
def _right_tile(
    sums, total, start, x, g, mean, scale, lse, low, high, k_ptr, v_ptr, keep, skt, svt, Tk,
    D: tl.constexpr, DV: tl.constexpr, WIDTH: tl.constexpr, VWIDTH: tl.constexpr, KEYS: tl.constexpr,
    EDGE: tl.constexpr, MASK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile of sum_j p_ij (gamma_ij - gammabar_i) y_j and of the rounded weights' sum."""
    keys = tl.arange(0, KEYS)
    k = _tile(k_ptr, start, keys, tl.arange(0, WIDTH), skt, Tk, D, EDGE)
    v = _tile(v_ptr, start, keys, tl.arange(0, VWIDTH), svt, Tk, DV, EDGE)
    p = tl.exp2(tl.dot(x, tl.trans(k), input_precision=PRECISION) * scale[:, None] - lse[:, None])
    if EDGE or MASK:
        p = _hidden(p, start, keys, low, high, keep, Tk, MASK)
    gamma = tl.dot(g, tl.trans(v), input_precision=PRECISION)
    weights = (p * (gamma - mean[:, None])).to(k.dtype)
    return tl.dot(weights, k, sums, input_precision=PRECISION), total + tl.sum(weights.to(tl.float32), 1)


@triton.jit(do_not_specialize=["Tq", "Tk"])
def right_kernel(
    g_ptr, x_ptr, k_ptr, v_ptr, factor_ptr, lse_ptr, kbar_ptr, vbar_ptr, low_ptr, high_ptr, keep_ptr, right_ptr,
    sgb, sgh, sgt, sxb, sxh, sxt, skb, skh, skt, svb, svh, svt, span, smb, smh, factor, blocks, H, G, Tq, Tk,
    D: tl.constexpr, DV: tl.constexpr, WIDTH: tl.constexpr, VWIDTH: tl.constexpr, FACTOR: tl.constexpr,
    MASK: tl.constexpr, PRECISION: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """The right sides [B, H, Tq, D] of the systems of u."""
    turn, batch, head, kv = _place(tl.program_id(0), blocks, H, G)
    start = (blocks - 1 - turn) * ROWS  # causal blocks see the more, the later they are: those first
    local, dims, vdims = tl.arange(0, ROWS), tl.arange(0, WIDTH), tl.arange(0, VWIDTH)
    rows, inside = start + local, start + local < Tq
    at = (batch * H + head).to(tl.int64) * Tq
    batch, head, kv = batch.to(tl.int64), head.to(tl.int64), kv.to(tl.int64)
    k_ptr, v_ptr, keep = k_ptr + batch * skb + kv * skh, v_ptr + batch * svb + kv * svh, keep_ptr + batch * smb + head * smh
    x = _tile(x_ptr + batch * sxb + head * sxh, start, local, dims, sxt, Tq, D, True)
    g = _tile(g_ptr + batch * sgb + head * sgh, start, local, vdims, sgt, Tq, DV, True)
    mean = tl.sum(g.to(tl.float32) * _tile(vbar_ptr + at * DV, start, local, vdims, DV, Tq, DV, True), 1)
    lse = tl.load(lse_ptr + at + rows, mask=inside, other=float("inf"))
    scale = (tl.load(factor_ptr + at + rows, mask=inside, other=0.0) if FACTOR else tl.full([ROWS], factor, tl.float32)) * LOG2E
    low, high = _range_of(low_ptr, high_ptr, span, batch, rows, Tq)
    begin, left, full, last, sides = _ranges(low, high, KEYS)
    sums, total = tl.zeros([ROWS, WIDTH], tl.float32), tl.zeros([ROWS], tl.float32)
    for key in range(full, last, KEYS):
        sums, total = _right_tile(
            sums, total, key, x, g, mean, scale, lse, low, high, k_ptr, v_ptr, keep, skt, svt, Tk,
            D, DV, WIDTH, VWIDTH, KEYS, False, MASK, PRECISION,
        )  # fmt: skip
    for n in range(0, sides):
        sums, total = _right_tile(
            sums, total, _side(n, begin, left, last, KEYS), x, g, mean, scale, lse, low, high, k_ptr, v_ptr, keep, skt,
            svt, Tk, D, DV, WIDTH, VWIDTH, KEYS, True, MASK, PRECISION,
        )  # fmt: skip
    sums -= total[:, None] * _tile(kbar_ptr + at * D, start, local, dims, D, Tq, D, True)
    _put(right_ptr + at * D, sums, start, local, dims, D, Tq, D)


@triton.jit
def _query_tile(
    sums, total, c, right, mass, start, x, g, t, u, lift, drop, guess, scale, lse, low, high, k_ptr, v_ptr, keep, skt, svt,
    Tk, D: tl.constexpr, DV: tl.constexpr, WIDTH: tl.constexpr, VWIDTH: tl.constexpr, KEYS: tl.constexpr,
    SOLVED: tl.constexpr, EDGE: tl.constexpr, MASK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile of sum_j dlogit_ij y_j, of the rounded dlogits' sum, of c, and where t is given, of its gradient."""
    keys = tl.arange(0, KEYS)
    k = _tile(k_ptr, start, keys, tl.arange(0, WIDTH), skt, Tk, D, EDGE)
    v = _tile(v_ptr, start, keys, tl.arange(0, VWIDTH), svt, Tk, DV, EDGE)
    p = tl.exp2(tl.dot(x, tl.trans(k), input_precision=PRECISION) * scale[:, None] - lse[:, None])
    if EDGE or MASK:
        p = _hidden(p, start, keys, low, high, keep, Tk, MASK)
    b = tl.dot(g, tl.trans(v), input_precision=PRECISION)
    if SOLVED:
        b = tl.dot(u, tl.trans(k), b, input_precision=PRECISION)
    b -= drop[:, None]
    a = tl.dot(t, tl.trans(k), input_precision=PRECISION) + lift[:, None]
    if SOLVED:
        dz = p * (a * b - guess[:, None])
    else:
        tilted = p * b
        rounded = tilted.to(k.dtype)
        right, mass = tl.dot(rounded, k, right, input_precision=PRECISION), mass + tl.sum(rounded.to(tl.float32), 1)
        dz = tilted * a
    rounded = dz.to(k.dtype)
    sums = tl.dot(rounded, k, sums, input_precision=PRECISION)
    return sums, total + tl.sum(rounded.to(tl.float32), 1), c + tl.sum(dz, 1), right, mass


@triton.jit
def _operand(value, mean, pointer, plane, start, local, dims, Tq, D: tl.constexpr):
    """(`value` rounded for products and stored in its plane, m_i . its rounded self)."""
    rounded = value.to(pointer.dtype.element_ty)
    _put(pointer + plane * D, rounded, start, local, dims, D, Tq, D)
    return rounded, tl.sum(rounded.to(tl.float32) * mean, 1)


@triton.jit
def _ridge_gradient(
    t, u, ridge_ptr, dridge_ptr, ridge, srb, srh, srt, srd, at, batch, head, start, local, dims, Tq,
    D: tl.constexpr, RIDGE: tl.constexpr,
):  # fmt: skip
    """sum_d ridge_d t_d u_d; dL/dridge is stored where the ridge is a tensor."""
    both, inside = t * u, start + local < Tq
    if RIDGE == NUMBER:
        return tl.sum(both, 1) * ridge
    own = ridge_ptr + batch * srb + head * srh + tl.cast(start, tl.int64) * srt
    if RIDGE == ROW:
        share = tl.sum(both, 1)
        tl.store(dridge_ptr + at + start + local, -share, mask=inside)
        return share * tl.load(own + local * srt, mask=inside, other=0.0)
    _put(dridge_ptr + at * D, -both, start, local, dims, D, Tq, D)
    where = inside[:, None] & (dims < D)[None, :]
    return tl.sum(both * tl.load(own + local[:, None] * srt + dims[None, :] * srd, mask=where, other=0.0), 1)


@triton.jit(do_not_specialize=["Tq", "Tk"])
def query_kernel(
    g_ptr, x_ptr, k_ptr, v_ptr, factor_ptr, ridge_ptr, t_ptr, u_ptr, lse_ptr, kbar_ptr, vbar_ptr, low_ptr, high_ptr,
    keep_ptr, dx_ptr, dfactor_ptr, dridge_ptr, right_ptr, slopes_ptr, rows_ptr,
    sgb, sgh, sgt, sxb, sxh, sxt, skb, skh, skt, svb, svh, svt, srb, srh, srt, srd, span, smb, smh, factor, ridge,
    blocks, B, H, G, Tq, Tk,
    D: tl.constexpr, DV: tl.constexpr, WIDTH: tl.constexpr, VWIDTH: tl.constexpr, FACTOR: tl.constexpr,
    RIDGE: tl.constexpr, SOLVED: tl.constexpr, SPLIT: tl.constexpr, MASK: tl.constexpr, PRECISION: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """dx, dfactor, dridge, and the gradient of a given t; also what the kernel by keys reads of rows: t and -u rounded
    [2 or 3, B, H, Tq, D], and 1 - m . t, gammabar - m . u and c [3, B, H, Tq]."""
    turn, batch, head, kv = _place(tl.program_id(0), blocks, H, G)
    start = (blocks - 1 - turn) * ROWS
    local, dims, vdims = tl.arange(0, ROWS), tl.arange(0, WIDTH), tl.arange(0, VWIDTH)
    rows, inside = start + local, start + local < Tq
    at = (batch * H + head).to(tl.int64) * Tq
    plane = tl.cast(B, tl.int64) * H * Tq
    batch, head, kv = batch.to(tl.int64), head.to(tl.int64), kv.to(tl.int64)
    k_ptr, v_ptr, keep = k_ptr + batch * skb + kv * skh, v_ptr + batch * svb + kv * svh, keep_ptr + batch * smb + head * smh
    x = _tile(x_ptr + batch * sxb + head * sxh, start, local, dims, sxt, Tq, D, True)
    g = _tile(g_ptr + batch * sgb + head * sgh, start, local, vdims, sgt, Tq, DV, True)
    drop = tl.sum(g.to(tl.float32) * _tile(vbar_ptr + at * DV, start, local, vdims, DV, Tq, DV, True), 1)
    lse = tl.load(lse_ptr + at + rows, mask=inside, other=float("inf"))
    own = tl.load(factor_ptr + at + rows, mask=inside, other=0.0) if FACTOR else tl.full([ROWS], factor, tl.float32)
    mean = _tile(kbar_ptr + at * D, start, local, dims, D, Tq, D, True)
    slope = _tile(t_ptr + at * D, start, local, dims, D, Tq, D, True)
    t, lift = _operand(slope, mean, slopes_ptr + at * D, 0 * plane, start, local, dims, Tq, D)
    u, guess = t, tl.zeros([ROWS], tl.float32)
    if SOLVED:
        solution = _tile(u_ptr + at * D, start, local, dims, D, Tq, D, True)
        guess = _ridge_gradient(
            slope, solution, ridge_ptr, dridge_ptr, ridge, srb, srh, srt, srd, at, batch, head, start, local, dims, Tq,
            D, RIDGE,
        )  # fmt: skip
        u, away = _operand(-solution, mean, slopes_ptr + at * D, plane, start, local, dims, Tq, D)
        drop += away
    shared = lift
    if SPLIT:
        shared += _operand(slope - t.to(tl.float32), mean, slopes_ptr + at * D, 2 * plane, start, local, dims, Tq, D)[1]
    tl.store(rows_ptr + at + rows, 1 - shared, mask=inside)
    tl.store(rows_ptr + plane + at + rows, drop, mask=inside)
    lift, scale = 1 - lift, own * LOG2E
    low, high = _range_of(low_ptr, high_ptr, span, batch, rows, Tq)
    begin, left, full, last, sides = _ranges(low, high, KEYS)
    sums, total, c = tl.zeros([ROWS, WIDTH], tl.float32), tl.zeros([ROWS], tl.float32), tl.zeros([ROWS], tl.float32)
    right, mass = (tl.zeros([ROWS, 16], tl.float32), total) if SOLVED else (sums, total)
    for key in range(full, last, KEYS):
        sums, total, c, right, mass = _query_tile(
            sums, total, c, right, mass, key, x, g, t, u, lift, drop, guess, scale, lse, low, high, k_ptr, v_ptr, keep,
            skt, svt, Tk, D, DV, WIDTH, VWIDTH, KEYS, SOLVED, False, MASK, PRECISION,
        )  # fmt: skip
    for n in range(0, sides):
        sums, total, c, right, mass = _query_tile(
            sums, total, c, right, mass, _side(n, begin, left, last, KEYS), x, g, t, u, lift, drop, guess, scale, lse, low,
            high, k_ptr, v_ptr, keep, skt, svt, Tk, D, DV, WIDTH, VWIDTH, KEYS, SOLVED, True, MASK, PRECISION,
        )  # fmt: skip
    mean = _tile(kbar_ptr + at * D, start, local, dims, D, Tq, D, True)
    sums -= total[:, None] * mean
    if FACTOR:
        tl.store(dfactor_ptr + at + rows, tl.sum(x.to(tl.float32) * sums, 1), mask=inside)
    sums *= own[:, None]
    if SOLVED:
        sums += _tile(u_ptr + at * D, start, local, dims, D, Tq, D, True)
    else:
        _put(right_ptr + at * D, mass[:, None] * mean - right, start, local, dims, D, Tq, D)
    _put(dx_ptr + at * D, sums, start, local, dims, D, Tq, D)
    tl.store(rows_ptr + 2 * plane + at + rows, guess + c, mask=inside)


@triton.jit
def _key_tile(
    dk, dv, member, start, k, v, first_key, x_ptr, g_ptr, t_ptr, plane, lse_ptr, rows_ptr, factor_ptr, own, low_ptr,
    high_ptr, keep, sxh, sxt, sgh, sgt, smh, Tq, Tk,
    D: tl.constexpr, DV: tl.constexpr, WIDTH: tl.constexpr, VWIDTH: tl.constexpr, ROWS: tl.constexpr,
    KEYS: tl.constexpr, FACTOR: tl.constexpr, SOLVED: tl.constexpr, SPLIT: tl.constexpr, EDGE: tl.constexpr,
    MASK: tl.constexpr, PRECISION: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """What one tile of rows adds to dk and dv. `plane`: rows of all heads; planes as `query_kernel` writes them."""
    local, dims = tl.arange(0, ROWS), tl.arange(0, WIDTH)
    rows = start + local
    inside = rows < Tq
    member = tl.cast(member, tl.int64)
    at = member * Tq
    lse_ptr, rows_ptr, factor_ptr, t_ptr = lse_ptr + at, rows_ptr + at, factor_ptr + at, t_ptr + at * D
    x = _tile(x_ptr + member * sxh, start, local, dims, sxt, Tq, D, EDGE)
    g = _tile(g_ptr + member * sgh, start, local, tl.arange(0, VWIDTH), sgt, Tq, DV, EDGE)
    t = _tile(t_ptr, start, local, dims, D, Tq, D, EDGE)
    lse = tl.load(lse_ptr + rows, mask=inside, other=float("inf"))
    if FACTOR:
        own = tl.load(factor_ptr + rows, mask=inside, other=0.0)
    else:
        own = tl.full([ROWS], own, tl.float32)
    z = tl.dot(x, tl.trans(k), input_precision=PRECISION)
    p = tl.exp2(z * (own * LOG2E)[:, None] - lse[:, None])
    if EDGE or MASK:
        low, high = tl.load(low_ptr + rows, mask=inside, other=0), tl.load(high_ptr + rows, mask=inside, other=0)
        p = _hidden(p, first_key, tl.arange(0, KEYS), low, high, keep + member * smh, Tk, MASK)
    a = tl.dot(t, tl.trans(k), input_precision=PRECISION)
    if SPLIT:
        rest = _tile(t_ptr + 2 * plane * D, start, local, dims, D, Tq, D, EDGE)
        a = tl.dot(rest, tl.trans(k), a, input_precision=PRECISION)
    a = p * (a + tl.load(rows_ptr + rows, mask=inside, other=0.0)[:, None])
    weights = tl.trans(a.to(DTYPE))
    dv = tl.dot(weights, g, dv, input_precision=PRECISION)
    b = tl.dot(g, tl.trans(v), input_precision=PRECISION)
    if SOLVED:
        u = _tile(t_ptr + plane * D, start, local, dims, D, Tq, D, EDGE)
        dk = tl.dot(weights, u, dk, input_precision=PRECISION)
        b = tl.dot(u, tl.trans(k), b, input_precision=PRECISION)
    b -= tl.load(rows_ptr + plane + rows, mask=inside, other=0.0)[:, None]
    dk = tl.dot(tl.trans((p * b).to(DTYPE)), t, dk, input_precision=PRECISION)
    c = tl.load(rows_ptr + 2 * plane + rows, mask=inside, other=0.0)
    dz = (a * b - p * c[:, None]) * own[:, None]
    return tl.dot(tl.trans(dz.to(DTYPE)), x, dk, input_precision=PRECISION), dv


@triton.jit(do_not_specialize=["Tq", "Tk"])
def key_kernel(
    g_ptr, x_ptr, k_ptr, v_ptr, factor_ptr, lse_ptr, slopes_ptr, rows_ptr, low_ptr, high_ptr, first_ptr, last_ptr,
    keep_ptr, dk_ptr, dv_ptr,
    sgb, sgh, sgt, sxb, sxh, sxt, skb, skh, skt, svb, svh, svt, span, smb, smh, spank, factor, blocks, B, H, G, Tq, Tk,
    D: tl.constexpr, DV: tl.constexpr, WIDTH: tl.constexpr, VWIDTH: tl.constexpr, FACTOR: tl.constexpr,
    SOLVED: tl.constexpr, SPLIT: tl.constexpr, MASK: tl.constexpr, PRECISION: tl.constexpr, ROWS: tl.constexpr,
    KEYS: tl.constexpr,
):  # fmt: skip
    """dk and dv of a block of keys: all query heads of its key head in turn, so that nothing is added by two programs."""
    turn, batch, kv, _ = _place(tl.program_id(0), blocks, H // G, 1)
    start = turn * KEYS
    local, dims, vdims = tl.arange(0, KEYS), tl.arange(0, WIDTH), tl.arange(0, VWIDTH)
    plane = tl.cast(B, tl.int64) * H * Tq
    batch, kv = batch.to(tl.int64), kv.to(tl.int64)
    k = _tile(k_ptr + batch * skb + kv * skh, start, local, dims, skt, Tk, D, True)
    v = _tile(v_ptr + batch * svb + kv * svh, start, local, vdims, svt, Tk, DV, True)
    first, end = _range_of(first_ptr, last_ptr, spank, batch, start + local, Tk)
    begin, left, full, last, sides = _ranges(first, end, ROWS)
    low, high, keep = low_ptr + batch * span, high_ptr + batch * span, keep_ptr + batch * smb + kv * G * smh
    head = batch * H + kv * G
    x_ptr, g_ptr, slopes_ptr = x_ptr + batch * sxb + kv * G * sxh, g_ptr + batch * sgb + kv * G * sgh, slopes_ptr + head * Tq * D
    lse_ptr, rows_ptr, factor_ptr = lse_ptr + head * Tq, rows_ptr + head * Tq, factor_ptr + head * Tq
    dk, dv = tl.zeros([KEYS, WIDTH], tl.float32), tl.zeros([KEYS, VWIDTH], tl.float32)
    whole = (last - full) // ROWS
    for n in range(0, G * whole):
        dk, dv = _key_tile(
            dk, dv, n // whole, full + n % whole * ROWS, k, v, start, x_ptr, g_ptr, slopes_ptr, plane, lse_ptr, rows_ptr,
            factor_ptr, factor, low, high, keep, sxh, sxt, sgh, sgt, smh, Tq, Tk, D, DV, WIDTH, VWIDTH, ROWS, KEYS,
            FACTOR, SOLVED, SPLIT, False, MASK, PRECISION, k.dtype,
        )  # fmt: skip
    for n in range(0, G * sides):
        dk, dv = _key_tile(
            dk, dv, n // sides, _side(n % sides, begin, left, last, ROWS), k, v, start, x_ptr, g_ptr, slopes_ptr, plane,
            lse_ptr, rows_ptr, factor_ptr, factor, low, high, keep, sxh, sxt, sgh, sgt, smh, Tq, Tk, D, DV, WIDTH, VWIDTH,
            ROWS, KEYS, FACTOR, SOLVED, SPLIT, True, MASK, PRECISION, k.dtype,
        )  # fmt: skip
    own = (batch * (H // G) + kv) * Tk
    _put(dk_ptr + own * D, dk, start, local, dims, D, Tk, D)
    _put(dv_ptr + own * DV, dv, start, local, vdims, DV, Tk, DV)
