"""The backward pass of local linear attention and of Parallax on the GPU.

With the saved t and means m of a row, g = dL/do, gamma_ij = g_i . v_j and its mean gammabar_i:

    A_i u_i = sum_j p_ij (gamma_ij - gammabar_i) y_j,   a_ij = 1 + (y_j - m_i) . t_i,
    b_ij = gamma_ij - gammabar_i - (y_j - m_i) . u_i,   dz_ij = p_ij (a_ij b_ij - c_i),   c_i = sum_j p_ij a_ij b_ij
    dx_i = u_i + factor_i sum_j dz_ij y_j,   dy_j = sum_i factor_i dz_ij x_i + p_ij (b_ij t_i - a_ij u_i),
    dv_j = sum_i p_ij a_ij g_i,   dridge_i = -t_i u_i,   dfactor_i = x_i . sum_j dz_ij y_j

Three kernels and one solve compute them: the right sides by rows; u; dx by rows; dy and dv by keys, with all query
heads of a key head in one program. If t is given, u is 0, and one kernel by rows gives dx and -dL/dt. All but p, which
each kernel computes again for its tiles, is saved or made in Theta(n d) memory. In bfloat16 the kernel by keys
multiplies the operands of b and a in two terms: the weights of the right sides and u, since b may be small compared
with rounding errors of gamma, and t, since for a long t, a would differ from that of the forward pass.
In float32 the kernel by rows also sums p a, and that by keys adds to a what it lacks of 1: a long t magnifies rounding
errors of m, which shift a whole row. So dv is as accurate as the output, where these errors cancel.

Legend: B batch, H query heads, Hkv key heads, Tq queries, Tk keys; x [B, H, Tq, D], y [B, Hkv, Tk, D],
v [B, Hkv, Tk, Dv]. In kernels as in `math`; matrices are x, y, v, g.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..runtime.blocks import LENGTHS, load_block, load_span, row_scale, seen, store_block
from ..runtime.call import Call, Numbers, matrix_of, number_or_rows
from ..runtime.launch import launch
from ..runtime.operators import FARTHEST, empty_gradients, rows_together
from ..runtime.span import Span, batch_stride
from ..runtime.tiles import Tiles, TileTable
from . import math as shared
from .solve import solve

RIGHT = TileTable.by_width(
    "local_linear_backward_right", [(64, 64, 4, 2), (64, 32, 4, 3), (32, 32, 8, 1)],
    [(32, 32, 8, 1), (16, 16, 8, 1), (16, 16, 8, 1)], [(64, 32, 4, 3), (64, 64, 4, 3), (128, 64, 8, 2)],
)  # fmt: skip
OPERANDS = TileTable("local_linear_backward_operands", {(64, 4): Tiles(32, 16, 4, 1), (256, 4): Tiles(16, 16, 4, 1)})
BY_ROWS = TileTable.by_width(
    "local_linear_backward_rows", [(64, 64, 4, 2), (64, 32, 4, 2), (32, 32, 8, 1)],
    [(32, 16, 8, 2), (16, 16, 8, 1), (16, 16, 8, 1)], [(64, 32, 4, 3), (128, 32, 8, 2), (128, 64, 8, 2)],
)  # fmt: skip
BY_KEYS = TileTable.by_width(
    "local_linear_backward_keys", [(32, 128, 8, 3), (32, 128, 8, 2), (16, 32, 8, 1)], 3 * [(16, 16, 8, 1)],
    [(32, 64, 4, 2), (32, 128, 8, 2), (64, 128, 8, 2)],
)  # fmt: skip
"""wgmma needs 64 rows a warp group on the program's own axis: 4 warps for 64, 8 for 128. With 64 features and two
accumulators, registers hold 32 streamed rows, and 16 in float32."""

GIVEN, SOLUTION, REST, LAST = (tl.constexpr(i) for i in range(4))
"""Operands of a row: t rounded, -u rounded, and the rounding errors of both."""
LIFT, DROP, MEAN, FIRST, LSE, SCALE, FALL, LACK, NUMBERS = (tl.constexpr(i) for i in range(9))
"""Numbers of a row: 1 - m . t, gammabar - m . u, c, 1 - m . t of t's first term, lse, c's factor log2(e), gammabar -
m . u of u's first term, and in float32 what the sum of p a lacks of 1; 8 lie in one sector of memory."""


@triton.jit
def _rows_of(matrices, kept, factor, span, steps, sizes, FORM: tl.constexpr):
    """Return what the kernels by rows begin with: as `shared.opened`, with g and lse."""
    at, batch, head, first, rows, sight, tiles, x, c, kv = shared.opened(matrices, factor, span, sizes, steps, FORM)
    g = shared.rows_of(matrices[3], batch, head, first, sizes[2], FORM.value_dim, FORM.value_wide, FORM)
    lse = tl.load(kept[0] + at + rows, mask=rows < sizes[2], other=float("inf"))
    return at, first, rows, x, g, c, lse, sight, tiles, kv


@triton.jit
def _mean_value(kept, g, at, first, queries, FORM: tl.constexpr):
    """Return g . vbar of rows."""
    vbar = kept[2] + at * FORM.value_dim
    vbar = load_block(vbar, first, FORM.value_dim, queries, FORM.own, FORM.value_dim, FORM.value_wide)
    return tl.sum(g.to(tl.float32) * vbar, 1)


@triton.jit(do_not_specialize=LENGTHS)
def local_linear_right_kernel(
    outs, matrices, kept, factor, span, heads, group, queries, keys, span_batch, mask_batch, mask_head,
    FORM: tl.constexpr,
):  # fmt: skip
    """Store for one block of queries the right sides [B, H, Tq, D] of the systems of u, and gammabar [B, H, Tq]: g .
    vbar, corrected for the weights that the forward pass rounded. Errors of both enter b, small where models fit."""
    steps, sizes = (span_batch, mask_batch, mask_head), (heads, group, queries)
    at, first, rows, x, g, c, lse, sight, tiles, kv = _rows_of(matrices, kept, factor, span, steps, sizes, FORM)
    mean = _mean_value(kept, g, at, first, queries, FORM)
    total = tl.full((FORM.own, FORM.wide), 0.0, tl.float32)
    used, unrounded = tl.full((FORM.own,), 0.0, tl.float32), tl.full((FORM.own,), 0.0, tl.float32)
    for side in tl.static_range(1 if FORM.masked else 2):
        for n in range(shared.tile_count(tiles, side == 0)):
            k, v, visible = shared.pair_tile(n, tiles, kv, sight, keys, side == 0, FORM)
            p = shared.weights_of(x, k, c, lse, visible, side == 0)
            w = p * (shared.product(g, tl.trans(v)) - mean[:, None])
            total, used = shared.times(w, k, total, used, FORM.operands > 2)
            unrounded += tl.sum(w, 1)
    total -= used[:, None] * shared.own_rows(kept[1] + at * FORM.dim, first, queries, FORM)
    shared.put_rows(outs[0] + at * FORM.dim, total, first, queries, FORM)
    tl.store(outs[1] + at + rows, mean + unrounded, mask=rows < queries)


@triton.jit
def _operand(operands, WHICH: tl.constexpr, first, count, SIZE: tl.constexpr, EDGE: tl.constexpr, FORM: tl.constexpr):
    """Load one operand of a block of SIZE rows."""
    step: tl.constexpr = FORM.operands * FORM.dim
    return load_block(operands + WHICH * FORM.dim, first, step, count, SIZE, FORM.dim, FORM.wide, EDGE)


@triton.jit
def _put_operand(operands, WHICH: tl.constexpr, value, mean, at, first, queries, FORM: tl.constexpr):
    """Store a value as it is multiplied and return (it, mean . it)."""
    rounded = value.to(operands.dtype.element_ty)
    step: tl.constexpr = FORM.operands * FORM.dim
    base = operands + at * step + WHICH * FORM.dim
    store_block(base, rounded, first, step, queries, FORM.own, FORM.dim, FORM.wide)
    return rounded.to(tl.float32), tl.sum(rounded.to(tl.float32) * mean, 1)


@triton.jit(do_not_specialize=LENGTHS)
def local_linear_operands_kernel(
    grad, kept, slopes, means, ridge, dridge, factor, operands, table, heads, queries, FORM: tl.constexpr
):  # fmt: skip
    """Store the operands of one block of rows for the kernels by queries and by keys: `operands` [B, H, Tq, 2 to 4, D]
    and `table` [B, H, Tq, NUMBERS], with c as it is for an exact solution. Also store the gradient of ridges."""
    head, first = tl.program_id(1).to(tl.int64), tl.program_id(0) * FORM.own
    at, row = head * queries, first + tl.arange(0, FORM.own)
    inside, line = row < queries, table + (at + row) * NUMBERS
    share = tl.full((FORM.own,), 0.0, tl.float32)
    if FORM.solved:
        drop = tl.load(means + at + row, mask=inside, other=0.0)
    else:
        g = shared.rows_of(grad, head // heads, head % heads, first, queries, FORM.value_dim, FORM.value_wide, FORM)
        drop = _mean_value(kept, g, at, first, queries, FORM)
    mean = shared.own_rows(kept[1] + at * FORM.dim, first, queries, FORM)
    t = shared.own_rows(slopes[0] + at * FORM.dim, first, queries, FORM)
    used, lift = _put_operand(operands, GIVEN, t, mean, at, first, queries, FORM)
    tl.store(line + FIRST, 1 - lift, mask=inside)
    if FORM.operands > 2:
        lift += _put_operand(operands, REST, t - used, mean, at, first, queries, FORM)[1]
    if FORM.solved:
        u = shared.own_rows(slopes[1] + at * FORM.dim, first, queries, FORM)
        own_ridge = shared.row_ridge((ridge[0] + at * FORM.ridge, ridge[1]), first, queries, FORM.own, FORM)
        share = tl.sum(t * u * own_ridge, 1)
        if FORM.ridge == 1:
            tl.store(dridge + at + row, -tl.sum(t * u, 1), mask=inside)
        if FORM.ridge > 1:
            shared.put_rows(dridge + at * FORM.dim, -(t * u), first, queries, FORM)
        used, part = _put_operand(operands, SOLUTION, -u, mean, at, first, queries, FORM)
        drop += part
        tl.store(line + FALL, drop, mask=inside)
        if FORM.operands > 2:
            drop += _put_operand(operands, LAST, -u - used, mean, at, first, queries, FORM)[1]
    tl.store(line + LIFT, 1 - lift, mask=inside)
    tl.store(line + DROP, drop, mask=inside)
    tl.store(line + MEAN, share, mask=inside)
    tl.store(line + LSE, tl.load(kept[0] + at + row, mask=inside, other=0.0), mask=inside)
    tl.store(line + SCALE, row_scale(factor[0] + at, factor[1], row, inside, FORM.factors) * shared.LOG2E, mask=inside)


@triton.jit(do_not_specialize=LENGTHS)
def local_linear_query_kernel(
    outs, matrices, kept, u, operands, table, factor, span, heads, group, queries, keys,
    span_batch, mask_batch, mask_head, FORM: tl.constexpr,
):  # fmt: skip
    """Store dx, gradients of factors or of a given t, and c of a block of queries, from one term each."""
    steps, sizes = (span_batch, mask_batch, mask_head), (heads, group, queries)
    at, first, rows, x, g, c, lse, sight, tiles, kv = _rows_of(matrices, kept, factor, span, steps, sizes, FORM)
    inside, line = rows < queries, table + (at + rows) * NUMBERS
    step: tl.constexpr = FORM.operands * FORM.dim
    t = _operand(operands + at * step, GIVEN, first, queries, FORM.own, True, FORM)
    negative = _operand(operands + at * step, SOLUTION, first, queries, FORM.own, True, FORM) if FORM.solved else t
    lift = tl.load(line + FIRST, mask=inside, other=0.0)
    drop = tl.load(line + (FALL if FORM.solved else DROP), mask=inside, other=0.0)
    total, none = tl.full((FORM.own, FORM.wide), 0.0, tl.float32), tl.full((FORM.own,), 0.0, tl.float32)
    guess = tl.load(line + MEAN, mask=inside, other=0.0) if FORM.solved else none
    used, unrounded, whole, right, spent = none, none, none, total, none
    for side in tl.static_range(1 if FORM.masked else 2):
        for n in range(shared.tile_count(tiles, side == 0)):
            k, v, visible = shared.pair_tile(n, tiles, kv, sight, keys, side == 0, FORM)
            p = shared.weights_of(x, k, c, lse, visible, side == 0)
            b = shared.product(g, tl.trans(v))
            if FORM.solved:
                b = tl.dot(negative, tl.trans(k), b, input_precision=FORM.precision)
            b = (b - drop[:, None]) * p
            a = shared.product(t, tl.trans(k)) + lift[:, None]
            if FORM.operands == 2:
                whole += tl.sum(p * a, 1)
            dz = a * b
            if FORM.solved:
                dz -= p * guess[:, None]
            else:
                right, spent = shared.times(b, k, right, spent, False)
            total, used = shared.times(dz, k, total, used, False)
            unrounded += tl.sum(dz, 1)
    tl.store(line + MEAN, guess + unrounded, mask=inside)
    if FORM.operands == 2:
        tl.store(line + LACK, 1 - whole, mask=inside)
    mean = shared.own_rows(kept[1] + at * FORM.dim, first, queries, FORM)
    if not FORM.solved:
        shared.put_rows(outs[2] + at * FORM.dim, spent[:, None] * mean - right, first, queries, FORM)
    total -= used[:, None] * mean
    if FORM.factors:
        tl.store(outs[1] + at + rows, tl.sum(x.to(tl.float32) * total, 1), mask=inside)
    total *= (c / shared.LOG2E)[:, None]
    if FORM.solved:
        total += shared.own_rows(u + at * FORM.dim, first, queries, FORM)
    shared.put_rows(outs[0] + at * FORM.dim, total, first, queries, FORM)


@triton.jit
def _key_step(state, block, member, first, read, sizes, EDGE: tl.constexpr, FORM: tl.constexpr):
    """Add one tile of queries of one head to state (dk, dv)."""
    k, v, low, high, begin = block
    x_at, grad_at, operands, table, mask, factor = read
    queries, keys = sizes
    member = tl.cast(member, tl.int64)
    row = first + tl.arange(0, FORM.tile)
    inside = row < queries
    x = load_block(x_at[0] + member * x_at[1], first, x_at[2], queries, FORM.tile, FORM.dim, FORM.wide, EDGE)
    g = grad_at[0] + member * grad_at[1]
    g = load_block(g, first, grad_at[2], queries, FORM.tile, FORM.value_dim, FORM.value_wide, EDGE)
    operands += member * queries * (FORM.operands * FORM.dim)
    t = _operand(operands, GIVEN, first, queries, FORM.tile, EDGE, FORM)
    line = table + (member * queries + first) * NUMBERS + tl.arange(0, FORM.tile) * NUMBERS
    c = tl.full((FORM.tile,), 0.0, tl.float32) + factor * shared.LOG2E
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
        rest = _operand(operands, REST, first, queries, FORM.tile, EDGE, FORM)
        a = tl.dot(k, tl.trans(rest), a, input_precision=FORM.precision)
    a += tl.load(line + LIFT, mask=inside, other=0.0)[None, :]
    if FORM.operands == 2:  # added last: for a long t, LIFT is large and would round it away
        a += tl.load(line + LACK, mask=inside, other=0.0)[None, :]
    a = p * a
    dv = tl.dot(a.to(k.dtype), g, state[1], input_precision=FORM.precision)
    dk = state[0]
    b = tl.dot(v, tl.trans(g), input_precision=FORM.precision)
    if FORM.solved:
        u = _operand(operands, SOLUTION, first, queries, FORM.tile, EDGE, FORM)
        dk = tl.dot(a.to(k.dtype), u, dk, input_precision=FORM.precision)
        b = tl.dot(k, tl.trans(u), b, input_precision=FORM.precision)
        if FORM.operands > 2:
            last = _operand(operands, LAST, first, queries, FORM.tile, EDGE, FORM)
            b = tl.dot(k, tl.trans(last), b, input_precision=FORM.precision)
    b -= tl.load(line + DROP, mask=inside, other=0.0)[None, :]
    dk = tl.dot((p * b).to(k.dtype), t, dk, input_precision=FORM.precision)
    mean = tl.load(line + MEAN, mask=inside, other=0.0)
    dz = (a * b - p * mean[None, :]) * (c / shared.LOG2E)[None, :]
    return tl.dot(dz.to(k.dtype), x, dk, input_precision=FORM.precision), dv


@triton.jit(do_not_specialize=LENGTHS)
def local_linear_key_kernel(
    outs, matrices, operands, table, factor, span, heads, group, queries, keys, span_batch, mask_batch, mask_head,
    FORM: tl.constexpr,
):  # fmt: skip
    """Store dk and dv of one block of keys, over all query heads of its key head in turn."""
    begin, nth = tl.program_id(0) * FORM.own, tl.program_id(1).to(tl.int64)
    batch, key_head = nth // (heads // group), nth % (heads // group)
    k = shared.rows_of(matrices[1], batch, key_head, begin, keys, FORM.dim, FORM.wide, FORM)
    v = shared.rows_of(matrices[2], batch, key_head, begin, keys, FORM.value_dim, FORM.value_wide, FORM)
    key = begin + tl.arange(0, FORM.own)
    low, high = load_span(span[0] + batch * span_batch, span[1] + batch * span_batch, key, key < keys)
    tiles = shared.plan(low, high, FORM.tile, False)
    head = key_head * group
    mask = span[2] + batch * mask_batch + head * mask_head
    there = high > low  # full tiles also give weights to keys that no query sees
    if FORM.masked == 1:
        there &= tl.load(mask + key, mask=key < keys, other=0) != 0
    x_at, grad_at = shared.of_head(matrices[0], batch, head), shared.of_head(matrices[3], batch, head)
    base = (batch * heads + head) * queries
    read = (
        (x_at[0], matrices[0][2], x_at[1]), (grad_at[0], matrices[3][2], grad_at[1]),
        operands + base * (FORM.operands * FORM.dim), table + base * NUMBERS, (mask, mask_head), factor,
    )  # fmt: skip
    block = k, v, low, high, begin
    state = tl.full((FORM.own, FORM.wide), 0.0, tl.float32), tl.full((FORM.own, FORM.value_wide), 0.0, tl.float32)
    for side in tl.static_range(2):
        each = shared.tile_count(tiles, side == 0)
        for n in range(group * each):  # one loop over heads and tiles takes fewer registers than two
            first = shared.tile_at(n % each, tiles, side == 0, FORM)
            state = _key_step(state, block, n // each, first, read, (queries, keys), side == 0, FORM)
    at = nth * keys
    dk, dv = tl.where(there[:, None], state[0], 0.0), tl.where(there[:, None], state[1], 0.0)
    store_block(outs[0] + at * FORM.dim, dk, begin, FORM.dim, keys, FORM.own, FORM.dim, FORM.wide)
    dv_at = outs[1] + at * FORM.value_dim
    store_block(dv_at, dv, begin, FORM.value_dim, keys, FORM.own, FORM.value_dim, FORM.value_wide)


# On the host --------------------------------------------------------------------------------------------------


def backward(
    grad: Tensor, x: Tensor, y: Tensor, v: Tensor, factor: Tensor | None, ridge: Tensor | None, probe: Tensor | None,
    *rest: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Compute the gradients of one call from dL/do [B, H, Tq, Dv], with deterministic kernels: dx, dy, dv, contiguous
    in the dtypes of x, y, v, and float32 gradients of factor, ridge and probe, empty if they are not tensors. `rest`
    holds the span; t and `forward.moments` as the forward pass kept them; and `Numbers`.

    Cost: products a pair: 3 D for right sides, those of the solve, 5 D for dx, 8 D for dy, dv; in bfloat16 4, 5, 10."""
    span, (t, lse, *means), numbers = Span(*rest[:5]), rest[5:9], Numbers(*rest[9:])
    solved, kept = not numbers.given, (lse, *means)
    given = (x, y, v), (factor, ridge, probe)
    if not lse.numel():
        return tuple(z.zero_() for z in empty_gradients(*given))
    masked = 0 if span.mask is None else 1 if span.mask.shape[1] == 1 or x.shape[1] == y.shape[1] else 2
    operands, scale = 2 if x.dtype == torch.float32 else 3 + solved, numbers.factor if factor is None else factor
    call = Call(x, y, v, scale, span, masked=masked, solved=solved, operands=operands)
    matrices = *call.matrices, matrix_of(rows_together(grad.to(v.dtype), FARTHEST))
    sight = call.factor, span.pointers, *call.sizes, *span.steps
    penalty: float | Tensor = numbers.ridge if ridge is None else ridge
    gammabar = u = lse  # not read where t is given
    if solved:
        right, gammabar = call.new(call.form.dim), call.new()
        call.by_rows(local_linear_right_kernel, RIGHT, (right, gammabar), matrices, kept, *sight)
        rows = Call(x, y, v, scale, span, fine=y.dtype == torch.bfloat16)
        u, *_ = solve(right, rows, penalty, lse, means[0], numbers)
    else:
        assert probe is not None
        t = -probe.contiguous()
    dx, dy, dv, dfactor, dridge, dprobe = outs = empty_gradients(*given)
    table = call.q.new_empty(*call.shape, call.form.operands, call.form.dim), call.new(NUMBERS.value)
    tiles = OPERANDS.pick(call.width, torch.float32)
    launch(
        local_linear_operands_kernel, call.grid(tiles.rows), matrices[3], kept, (t, u), gammabar,
        number_or_rows(penalty, lse), dridge, call.factor, *table, call.sizes[0], call.sizes[2],
        tiles=tiles, FORM=call.form._replace(own=tiles.rows, ridge=shared.ridge_width(ridge)),
    )  # fmt: skip
    read = matrices, kept, u, *table, *sight
    call.by_rows(local_linear_query_kernel, BY_ROWS, (dx, dfactor, dprobe), *read, flags=(solved,))

    def run(tiles: Tiles) -> None:
        launch(
            local_linear_key_kernel, (-(-call.sizes[3] // tiles.keys), dy.shape[0] * dy.shape[1]), (dy, dv),
            matrices, *table, call.factor[1], (span.first, span.last, span.pointers[2]), *call.sizes,
            batch_stride(span.first), *span.steps[1:],
            tiles=tiles, FORM=call.form._replace(own=tiles.keys, tile=tiles.rows),
        )  # fmt: skip

    run(BY_KEYS.pick(call.width, call.dtype, run, (solved,)))
    return outs
