"""The systems of local linear attention, (C_i + ridge_i) t_i = right_i, by conjugate gradients for blocks of rows.

    C_i d = sum_j p_ij ((k_j - mean_i) . d) (k_j - mean_i)

C_i is never formed. A step streams the keys once. A row stops when its residual is small; a block with its last row.

With bfloat16 keys the direction is rounded before use and is then the direction: its image is exact but for the
weights, which are split in two terms. Between sweeps over the keys the vectors of all rows lie in scratch memory and
pass through registers a few rows at a time, which leaves registers to the sweeps.

Rows with few keys are solved one by one. With a_j = sqrt(p_j) (k_j - mean) for the n keys of a row, the push-through
identity turns D equations into n:

    (A^T A + ridge)^-1 b = ridge^-1 (b - A^T z),   (1 + A ridge^-1 A^T) z = A ridge^-1 b,   A = [a_1 ... a_n]^T

The second matrix has no eigenvalue below 1, however small the ridge and however few the keys, which is where conjugate
gradients take the most steps and lose the most to rounding. Arithmetic is float64: a small ridge makes t long, mostly
outside the span of the keys, and only the rest matters. The reported residual is that of the rounded float32 t.

Legend: as in `math`; x, r, d: solution, residual and direction of a row; A = C + ridge.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...grammar.systems import LIMIT, SolveStatus
from ..runtime.blocks import LENGTHS, load, load_block, load_span, store_block, store_numbers
from ..runtime.call import Call, Numbers, number_or_rows
from ..runtime.launch import launch
from ..runtime.tiles import Tiles, TileTable
from .math import LOG2E, key_tile, norm_scale, of_head, opened, ridge_width, row_ridge, sweep, weights_of

DIRECT = TileTable("local_linear_direct", {(64, 4): Tiles(32, 32, 4, 1), (256, 4): Tiles(32, 32, 8, 1)})
"""`rows` of a program, one after another, and the maximum `keys` of a row that is solved directly. The rows of a
program are far apart, since rows with few keys are neighbours and different programs should solve them."""
LEAST = tl.constexpr(1e-30)  # smaller ridges are raised to this in a direct solution
UNCONVERGED, RAISED = tl.constexpr(int(SolveStatus.UNCONVERGED)), tl.constexpr(int(SolveStatus.JITTER))
INACCURATE = tl.constexpr(int(SolveStatus.INACCURATE))
EPS = tl.constexpr(2.0**-23)
HIDDEN, LONGEST = tl.constexpr(LIMIT), tl.constexpr(LIMIT * 2.0**23)
"""The largest relative residual, and the largest |k| |t|, that `grammar.systems.LIMIT` allows in float32."""
X, R, MEAN, IMAGE = (tl.constexpr(i) for i in range(4))
"""Tiles [R, W] of a block's scratch memory: x, r, mean of the keys, result of a sweep. d has its own tile, in the dtype
of the keys, so that a product reads it from shared memory instead of registers."""
AWAY, USED, RR, GOAL, COUNT, ACTIVE, OPEN, SIZE, TERMS, WHOLE = (tl.constexpr(i) for i in range(10))
"""Rows [R] after them: mean . d, the sum of a sweep's weights, |r|^2, its goal, steps, whether the row is active,
whether it is unsettled, the unit of its right side, the size of what C sums, and the first |r|^2."""
TILE, ROW = tl.constexpr(4), tl.constexpr(10)
SQUARES = ROW  # the mean of |k|^2 if weights are counted, in one more row
RESTARTS = tl.constexpr(3)  # how often a row restarts if its true residual is still too large
TILES = TileTable.by_width(
    "local_linear_solve", [(64, 64, 4, 2), (64, 64, 4, 2), (64, 32, 8, 2)],
    [(32, 32, 4, 1), (32, 16, 8, 2), (16, 16, 8, 1)], [(64, 32, 4, 2), (64, 64, 4, 3), (128, 64, 8, 2)],
)  # fmt: skip


@triton.jit
def _tile(scratch, which: tl.constexpr, part, ROWS: tl.constexpr, FORM: tl.constexpr):
    """Return pointers to ROWS rows of a tile, from row `part` on."""
    places = tl.arange(0, ROWS)[:, None] * FORM.wide + tl.arange(0, FORM.wide)[None, :]
    # the constant is added last, so that tiles share registers for their addresses
    return scratch[0] + part * FORM.wide + places + which * (FORM.own * FORM.wide)


@triton.jit
def _ways(scratch, part, ROWS: tl.constexpr, FORM: tl.constexpr):
    """Return pointers to d of ROWS rows, from row `part` on."""
    at = scratch[1] + part * FORM.wide
    return at + tl.arange(0, ROWS)[:, None] * FORM.wide + tl.arange(0, FORM.wide)[None, :]


@triton.jit
def _rows(scratch, which: tl.constexpr, part, FORM: tl.constexpr):
    """Return pointers to a part of a row of numbers."""
    return scratch[0] + part + tl.arange(0, FORM.part) + (TILE * (FORM.own * FORM.wide) + which * FORM.own)


@triton.jit
def _direct(d, mean, active, scratch, part, FORM: tl.constexpr):
    """Store the direction, rounded as it will be multiplied."""
    d = tl.where(active[:, None], d, 0.0)
    if FORM.fine:
        d = d.to(tl.bfloat16).to(tl.float32)
    tl.store(_ways(scratch, part, FORM.part, FORM), d)
    tl.store(_rows(scratch, AWAY, part, FORM), tl.sum(mean * d, 1))


@triton.jit
def _begin(scratch, right_ptr, mean_ptr, span, first, queries, tol, limit, FORM: tl.constexpr):
    """Set x = 0 and r = right in its own unit. Return whether any row is active."""
    running = 0
    for part in range(0, FORM.own, FORM.part):
        rows = first + part + tl.arange(0, FORM.part)
        low, high = load_span(span[0], span[1], rows, rows < queries)
        r = load_block(right_ptr, first + part, FORM.dim, queries, FORM.part, FORM.dim, FORM.wide)
        mean = load_block(mean_ptr, first + part, FORM.dim, queries, FORM.part, FORM.dim, FORM.wide)
        size = norm_scale(r)
        r = r / size[:, None]
        rr = tl.sum(r * r, 1)
        unsettled = (rr > 0) & (high - low > FORM.few)
        active = unsettled & (limit > 0)
        tl.store(_tile(scratch, X, part, FORM.part, FORM), tl.full((FORM.part, FORM.wide), 0.0, tl.float32))
        tl.store(_tile(scratch, R, part, FORM.part, FORM), r)
        tl.store(_tile(scratch, MEAN, part, FORM.part, FORM), mean)
        tl.store(_rows(scratch, RR, part, FORM), rr)
        tl.store(_rows(scratch, WHOLE, part, FORM), rr)
        tl.store(_rows(scratch, GOAL, part, FORM), tol * tol * rr)
        tl.store(_rows(scratch, COUNT, part, FORM), tl.full((FORM.part,), 0.0, tl.float32))
        tl.store(_rows(scratch, ACTIVE, part, FORM), active.to(tl.float32))
        tl.store(_rows(scratch, OPEN, part, FORM), unsettled.to(tl.float32))
        tl.store(_rows(scratch, SIZE, part, FORM), size)
        _direct(r, mean, active, scratch, part, FORM)
        running = tl.maximum(running, tl.max(active.to(tl.int32), 0))
    return running


@triton.jit
def _image(scratch, part, ridge, first, queries, FORM: tl.constexpr):
    """Return (A d, d, mean) of some rows, after a sweep."""
    d = tl.load(_ways(scratch, part, FORM.part, FORM)).to(tl.float32)
    mean = tl.load(_tile(scratch, MEAN, part, FORM.part, FORM))
    total = tl.load(_tile(scratch, IMAGE, part, FORM.part, FORM))
    used = tl.load(_rows(scratch, USED, part, FORM))
    ridge = row_ridge(ridge, first + part, queries, FORM.part, FORM)
    return total - used[:, None] * mean + ridge * d, d, mean


@triton.jit
def _advance(scratch, ridge, first, queries, limit, FORM: tl.constexpr):
    """Take one step along d and return whether any row continues."""
    running = 0
    for part in range(0, FORM.own, FORM.part):
        image, d, mean = _image(scratch, part, ridge, first, queries, FORM)
        rr = tl.load(_rows(scratch, RR, part, FORM))
        goal = tl.load(_rows(scratch, GOAL, part, FORM))
        count = tl.load(_rows(scratch, COUNT, part, FORM))
        curve = tl.sum(d * image, 1)
        good = (tl.load(_rows(scratch, ACTIVE, part, FORM)) > 0) & (curve > 0)
        curve = tl.where(good, curve, 1.0)
        r = tl.load(_tile(scratch, R, part, FORM.part, FORM))
        length = tl.where(good, tl.sum(r * d, 1) / curve, 0.0)
        x = tl.load(_tile(scratch, X, part, FORM.part, FORM)) + length[:, None] * d
        tl.store(_tile(scratch, X, part, FORM.part, FORM), x)
        r -= length[:, None] * image
        tl.store(_tile(scratch, R, part, FORM.part, FORM), r)
        rr = tl.where(good, tl.sum(r * r, 1), rr)
        count += good.to(tl.float32)
        active = good & (rr > goal) & (count < limit)
        # conjugate by the image itself, since a ratio of residuals ignores rounding
        _direct(r - (tl.sum(r * image, 1) / curve)[:, None] * d, mean, active, scratch, part, FORM)
        tl.debug_barrier()  # other threads may still read what is stored now
        tl.store(_rows(scratch, RR, part, FORM), rr)
        tl.store(_rows(scratch, COUNT, part, FORM), count)
        tl.store(_rows(scratch, ACTIVE, part, FORM), active.to(tl.float32))
        running = tl.maximum(running, tl.max(active.to(tl.int32), 0))
    return running


@triton.jit
def _settle(scratch, right_ptr, first, queries, limit, again, FORM: tl.constexpr):
    """Let rows whose true residual r is still too large continue from it. Return whether any does."""
    running = 0
    for part in range(0, FORM.own, FORM.part):
        x = tl.load(_tile(scratch, X, part, FORM.part, FORM))
        r = tl.load(_tile(scratch, R, part, FORM.part, FORM))
        mean = tl.load(_tile(scratch, MEAN, part, FORM.part, FORM))
        size = tl.load(_rows(scratch, SIZE, part, FORM))
        right = load_block(right_ptr, first + part, FORM.dim, queries, FORM.part, FORM.dim, FORM.wide) / size[:, None]
        # Exact steps lower x.Ax / 2 - b.x, which is 0 at x = 0. If it is positive, rounding errors dominate x: restart.
        kept = tl.sum(x * (right + r), 1) >= 0
        x = tl.where(kept[:, None], x, 0.0)
        r = tl.where(kept[:, None], r, right)
        tl.store(_tile(scratch, X, part, FORM.part, FORM), x)
        tl.store(_tile(scratch, R, part, FORM.part, FORM), r)
        terms = tl.load(_rows(scratch, TERMS, part, FORM))
        floor = 2 * EPS * (terms * tl.sqrt(tl.sum(x * x, 1)) + tl.sqrt(tl.sum(right * right, 1)))
        goal = tl.load(_rows(scratch, GOAL, part, FORM))
        count = tl.load(_rows(scratch, COUNT, part, FORM))
        unsettled = tl.load(_rows(scratch, OPEN, part, FORM)) > 0
        rr = tl.where(unsettled, tl.sum(r * r, 1), tl.load(_rows(scratch, RR, part, FORM)))
        unsettled &= ~(rr <= tl.maximum(goal, floor * floor))
        active = unsettled & (count < limit) & (again > 0)
        _direct(r, mean, active, scratch, part, FORM)
        tl.debug_barrier()  # other threads may still read what is stored now
        tl.store(_rows(scratch, RR, part, FORM), rr)
        tl.store(_rows(scratch, OPEN, part, FORM), unsettled.to(tl.float32))
        tl.store(_rows(scratch, ACTIVE, part, FORM), active.to(tl.float32))
        running = tl.maximum(running, tl.max(active.to(tl.int32), 0))
    return running


@triton.jit
def _finish(scratch, value_ptr, statistics_ptr, status_ptr, first, queries, FORM: tl.constexpr):
    """Store the solutions, statistics and status."""
    for part in range(0, FORM.own, FORM.part):
        x = tl.load(_tile(scratch, X, part, FORM.part, FORM))
        size = tl.load(_rows(scratch, SIZE, part, FORM))
        store_block(value_ptr, x * size[:, None], first + part, FORM.dim, queries, FORM.part, FORM.dim, FORM.wide)
        rr = tl.load(_rows(scratch, RR, part, FORM))
        whole = tl.load(_rows(scratch, WHOLE, part, FORM))
        unsettled = tl.load(_rows(scratch, OPEN, part, FORM)) > 0
        if not FORM.verify:
            unsettled &= ~(rr <= tl.load(_rows(scratch, GOAL, part, FORM)))
        rows = first + part + tl.arange(0, FORM.part)
        there = rows < queries
        residual = tl.sqrt(rr / tl.where(whole > 0, whole, 1.0))
        store_numbers(statistics_ptr, rows, (tl.load(_rows(scratch, COUNT, part, FORM)), residual), there)
        status = 0
        if FORM.counted:
            lost = tl.sqrt(tl.load(_rows(scratch, SQUARES, part, FORM)) * tl.sum(x * x, 1)) * size > LONGEST
            lost |= (rr > tl.load(_rows(scratch, GOAL, part, FORM))) & (residual > HIDDEN)
            status = tl.where(lost, INACCURATE, 0)
        tl.store(status_ptr + rows, tl.where(unsettled, UNCONVERGED, status), mask=there)


@triton.jit
def _follow(phase, again, scratch, right_ptr, ridge, first, queries, limit, FORM: tl.constexpr):
    """Use the stored result of a sweep and return (whether any row continues, phase, restarts left). Phase 0 is a step;
    phases 1 and 2 compute true residuals (FORM.verify), from the two terms of x in turn."""
    running = 1
    if not FORM.verify or phase == 0:
        running = _advance(scratch, ridge, first, queries, limit, FORM)
        if FORM.verify and running == 0:
            tl.debug_barrier()
            for part in range(0, FORM.own, FORM.part):  # r = right, from which A x is then subtracted
                size = tl.load(_rows(scratch, SIZE, part, FORM))
                r = load_block(right_ptr, first + part, FORM.dim, queries, FORM.part, FORM.dim, FORM.wide)
                tl.store(_tile(scratch, R, part, FORM.part, FORM), r / size[:, None])
                x = tl.load(_tile(scratch, X, part, FORM.part, FORM))
                _direct(x, tl.load(_tile(scratch, MEAN, part, FORM.part, FORM)), size > 0, scratch, part, FORM)
            running = 1
            phase = 1
    else:
        for part in range(0, FORM.own, FORM.part):
            image, d, mean = _image(scratch, part, ridge, first, queries, FORM)
            r = tl.load(_tile(scratch, R, part, FORM.part, FORM)) - image
            tl.store(_tile(scratch, R, part, FORM.part, FORM), r)
            if FORM.fine:  # the rounding error of x is the next d
                x = tl.load(_tile(scratch, X, part, FORM.part, FORM))
                _direct(x - d, mean, tl.load(_rows(scratch, SIZE, part, FORM)) > 0, scratch, part, FORM)
        if FORM.fine and phase == 1:
            phase = 2
        else:
            tl.debug_barrier()
            running = _settle(scratch, right_ptr, first, queries, limit, again, FORM)
            phase = 0
            again -= 1
    tl.debug_barrier()
    return running, phase, again


@triton.jit(do_not_specialize=LENGTHS)
def _solve(
    right_ptr, matrices, kept, factor, ridge, span, value_ptr, scratch, statistics_ptr, status_ptr, tol, limit,
    heads, group, queries, keys, span_batch, mask_batch, mask_head, FORM: tl.constexpr,
):  # fmt: skip
    """Solve a block of rows."""
    sizes, steps = (heads, group, queries), (span_batch, mask_batch, mask_head)
    at, batch, _, first, rows, sight, tiles, q, c, kv = opened(matrices, factor, span, sizes, steps, FORM)
    k_at = kv[0]
    ranges = span[0] + batch * span_batch, span[1] + batch * span_batch
    block = tl.program_id(1).to(tl.int64) * tl.num_programs(0) + first // FORM.own
    LINE: tl.constexpr = TILE * FORM.wide + ROW + FORM.counted
    scratch = scratch[0] + block * (FORM.own * LINE), scratch[1] + block * (FORM.own * FORM.wide)
    right_ptr += at * FORM.dim
    ridge = ridge[0] + at * FORM.ridge, ridge[1]
    running = _begin(scratch, right_ptr, kept[1] + at * FORM.dim, ranges, first, queries, tol, limit, FORM)
    tl.debug_barrier()
    lse = tl.load(kept[0] + at + rows, mask=rows < queries, other=float("inf"))
    phase, again, numbers = 0, RESTARTS, scratch[0] + FORM.own * (TILE * FORM.wide) + tl.arange(0, FORM.own)
    if FORM.verify or FORM.counted:
        squares = tl.full((FORM.own,), 0.0, tl.float32)  # sum_j p_ij |k_j|^2
        for n in range(tiles[1]):
            k, visible = key_tile(tiles[0] + n * FORM.tile, k_at, sight, keys, True, FORM)
            p, kf = weights_of(q, k, c, lse, visible, True), k.to(tl.float32)
            squares += tl.sum(p * tl.sum(kf * kf, 1)[None, :], 1)
        tl.store(numbers + FORM.own * TERMS, squares + tl.max(row_ridge(ridge, first, queries, FORM.own, FORM), 1))
        if FORM.counted:
            tl.store(numbers + FORM.own * SQUARES, squares)
    while running > 0:
        d = tl.load(_ways(scratch, 0, FORM.own, FORM))
        away = tl.load(numbers + FORM.own * AWAY)
        total, used = sweep(d, away, q, c, lse, sight, k_at, keys, tiles, FORM)
        tl.store(_tile(scratch, IMAGE, 0, FORM.own, FORM), total)
        tl.store(numbers + FORM.own * USED, used)
        tl.debug_barrier()
        running, phase, again = _follow(phase, again, scratch, right_ptr, ridge, first, queries, limit, FORM)
    _finish(scratch, value_ptr + at * FORM.dim, statistics_ptr + at * 2, status_ptr + at, first, queries, FORM)


@triton.jit
def _one(row, low, high, right_ptr, q_at, k_at, lse_ptr, factor, ridge, mask_ptr, found, FORM: tl.constexpr):
    """Solve one row. All its keys are in registers at once, KEYS by W."""
    KEYS: tl.constexpr = FORM.tile
    value_ptr, statistics_ptr, status_ptr = found
    row = tl.cast(row, tl.int64)
    at, feature = low.to(tl.int64) + tl.arange(0, KEYS), tl.arange(0, FORM.wide)
    there, real = at < high, feature < FORM.dim
    if FORM.masked:
        there &= tl.load(mask_ptr + at, mask=there, other=0) != 0
    k = load(k_at[0] + at[:, None] * k_at[1] + feature[None, :], there, FORM.dim, FORM.wide, True).to(tl.float32)
    q = tl.load(q_at[0] + row * q_at[1] + feature, mask=real, other=0.0).to(tl.float32)
    c = (tl.load(factor[0] + row) if FORM.factors else factor[1]) * LOG2E
    p = tl.exp2(tl.sum(k * q[None, :], 1) * c - tl.load(lse_ptr + row))
    p = tl.where(there, p, 0.0).to(tl.float64)
    mass = tl.sum(p, 0)
    p = p / tl.where(mass > 0, mass, 1.0)
    root, wide = tl.sqrt(p), k.to(tl.float64)
    mean = tl.sum(p[:, None] * wide, 0)  # with exactly these weights
    a = root[:, None] * (wide - mean[None, :])
    ridges = tl.full((FORM.wide,), 0.0, tl.float32) + ridge[1]
    if FORM.ridge == 1:
        ridges += tl.load(ridge[0] + row)
    elif FORM.ridge > 1:
        ridges = tl.load(ridge[0] + row * FORM.dim + feature, mask=real, other=1.0)
    raised = tl.min(tl.where(real, ridges, 1.0), 0) < LEAST
    ridges = tl.maximum(ridges, LEAST).to(tl.float64)
    right = tl.load(right_ptr + row * FORM.dim + feature, mask=real, other=0.0).to(tl.float64)
    inner, scaled = tl.arange(0, KEYS), a / ridges[None, :]
    matrix = (inner[:, None] == inner[None, :]).to(tl.float64)
    for j in range(KEYS):
        here = inner == j
        share = tl.sum(tl.where(here, root, 0.0), 0)
        held = feature < tl.where(share > 0, FORM.dim, 0)
        one = tl.load(k_at[0] + (low.to(tl.int64) + j) * k_at[1] + feature, mask=held, other=0.0)
        one = share * (one.to(tl.float32).to(tl.float64) - mean)
        matrix += tl.where(here[None, :], tl.sum(scaled * one[None, :], 1)[:, None], 0.0)
    for j in range(KEYS):  # invert the matrix in place, by Gauss-Jordan elimination
        here = inner == j
        across = tl.sum(tl.where(here[:, None], matrix, 0.0), 0)
        down = tl.sum(tl.where(here[None, :], matrix, 0.0), 1)
        across = tl.where(here, 1.0, across) / tl.sum(tl.where(here, across, 0.0), 0)
        others = tl.where(here[None, :], 0.0, matrix) - down[:, None] * across[None, :]
        matrix = tl.where(here[:, None], across[None, :], others)
    z = tl.sum(matrix * tl.sum(scaled * right[None, :], 1)[None, :], 1)
    value = ((right - tl.sum(a * z[:, None], 0)) / ridges).to(tl.float32)
    tl.store(value_ptr + row * FORM.dim + feature, value, mask=real)
    slope = tl.sum(a * value.to(tl.float64)[None, :], 1)
    rest = right - tl.sum(a * slope[:, None], 0) - ridges * value.to(tl.float64)
    size = tl.sum(right * right, 0)
    residual = tl.sqrt(tl.sum(rest * rest, 0) / tl.where(size > 0, size, 1.0)).to(tl.float32)
    store_numbers(statistics_ptr, row, (0.0, residual), None)
    status = 0
    if FORM.counted:
        square = tl.sum(p * tl.sum(wide * wide, 1), 0) * tl.sum(value.to(tl.float64) * value.to(tl.float64), 0)
        status = tl.where(tl.sqrt(square) > LONGEST, INACCURATE, 0)
    tl.store(status_ptr + row, tl.where(raised, RAISED, status))


@triton.jit(do_not_specialize=LENGTHS)
def _few(
    right_ptr, matrices, lse_ptr, factor, ridge, span, found, heads, group, queries,
    span_batch, mask_batch, mask_head, FORM: tl.constexpr,
):  # fmt: skip
    """Solve the rows of a program that see from 1 to KEYS keys."""
    KEYS: tl.constexpr = FORM.tile
    head = tl.program_id(1).to(tl.int64)
    batch, h = head // heads, head % heads
    low_ptr, high_ptr = span[0] + batch * span_batch, span[1] + batch * span_batch
    rows = tl.program_id(0) + tl.num_programs(0) * tl.arange(0, FORM.own)
    lows, highs = load_span(low_ptr, high_ptr, rows, rows < queries)
    if tl.max(((highs > lows) & (highs - lows <= KEYS)).to(tl.int32), 0) == 0:
        return
    at = head * queries
    outs = found[0] + at * FORM.dim, found[1] + at * 2, found[2] + at
    for n in range(FORM.own):
        row = tl.program_id(0) + tl.num_programs(0) * n
        if row < queries:
            low, high = tl.load(low_ptr + row), tl.load(high_ptr + row)
            if (high > low) & (high - low <= KEYS):
                _one(
                    row, low, high, right_ptr + at * FORM.dim, of_head(matrices[0], batch, h),
                    of_head(matrices[1], batch, h // group), lse_ptr + at, (factor[0] + at, factor[1]),
                    (ridge[0] + at * FORM.ridge, ridge[1]), span[2] + batch * mask_batch + h * mask_head, outs, FORM,
                )  # fmt: skip


def solve(
    right: Tensor, call: Call, ridge: float | Tensor, lse: Tensor, mean: Tensor, rule: Numbers
) -> tuple[Tensor, Tensor, Tensor]:
    """Solve (C_i + ridge_i) t_i = right_i for every query. Return t [B, H, Tq, D], float32; (steps, relative residual)
    [B, H, Tq, 2]; `SolveStatus` [B, H, Tq], int32. The arguments are the right sides, the means of keys [B, H, Tq, D],
    the ridge [B, H, Tq, 1 or D] if it is a tensor, and `lse` [B, H, Tq]. Cost: 8 D a pair and step, 6 D in float32."""
    out = torch.empty_like(right), call.new(2), lse.new_empty(lse.shape, dtype=torch.int32)
    alone = DIRECT.pick(right.shape[-1], call.dtype)
    few, form = alone.keys if rule.direct else 0, {"ridge": ridge_width(ridge), "counted": rule.counted}

    def run(tiles: Tiles) -> None:
        rows = -(-right.shape[2] // tiles.rows) * tiles.rows
        line = TILE.value * call.form.wide + ROW.value + rule.counted
        scratch = right.new_empty(right.shape[0] * right.shape[1], rows, line)
        ways = call.blank(*scratch.shape[:2], call.form.wide, dtype=call.dtype)
        part = min(tiles.rows, max(16, 4096 // (call.form.wide * ways.element_size())))
        launch(
            _solve, call.grid(tiles.rows), right, call.matrices, (lse, mean), call.factor,
            number_or_rows(ridge, lse), call.span.pointers, out[0], (scratch, ways), *out[1:], rule.tol, rule.limit,
            *call.sizes, *call.span.steps, tiles=tiles,
            FORM=call.fitted(tiles, few=few, verify=rule.verify, part=part, **form),
        )  # fmt: skip

    run(TILES.pick(right.shape[-1], call.dtype, run, (call.form.masked, rule.direct)))
    if few:
        launch(
            _few, call.grid(alone.rows), right, call.matrices[:2], lse, call.factor, number_or_rows(ridge, lse),
            call.span.pointers, out, *call.sizes[:3], *call.span.steps,
            tiles=alone, FORM=call.fitted(alone, **form),
        )  # fmt: skip
    return out
