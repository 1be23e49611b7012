"""Conjugate gradients for a block of rows between two sweeps over its keys. The vectors of all rows lie in scratch
memory and pass through registers a few rows at a time, which leaves registers to the sweeps.

Legend: as in `math`; x, r, d: solution, residual and direction of a row; A = C + ridge.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...grammar import SolveStatus
from ..runtime.blocks import load_block, load_span, store_block
from .math import load_tile, norm_scale, row_ridge, store_tile

UNCONVERGED = tl.constexpr(int(SolveStatus.UNCONVERGED))
EPS = tl.constexpr(2.0**-23)
X, R, MEAN, IMAGE, D = (tl.constexpr(i) for i in range(5))
"""Tiles [ROWS, BLOCK] of a block's scratch memory: x, r, mean of the keys, result of a sweep, d."""
AWAY, USED, RR, GOAL, COUNT, ACTIVE, OPEN, SIZE, TERMS, WHOLE = (tl.constexpr(i) for i in range(10))
"""Rows [ROWS] behind them: mean . d, the sum of a sweep's weights, |r|^2, its goal, steps, whether the row is
active, whether it is unsettled, the unit of its right side, the size of what C sums, and the first |r|^2."""
TILE, ROW = tl.constexpr(5), tl.constexpr(10)
PART = tl.constexpr(16)
"""Rows whose vectors are in registers at once."""


@triton.jit
def _tile(scratch, which: tl.constexpr, part, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Return where a part of a tile lies."""
    return scratch + which * (ROWS * BLOCK) + part * BLOCK


@triton.jit
def _rows(scratch, which: tl.constexpr, part, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Return where a part of a row of numbers lies."""
    return scratch + TILE * (ROWS * BLOCK) + which * ROWS + part + tl.arange(0, PART)


@triton.jit
def _direct(d, mean, active, scratch, part, ROWS: tl.constexpr, BLOCK: tl.constexpr, SPLIT: tl.constexpr):
    """Store the direction, rounded as it will be multiplied."""
    d = tl.where(active[:, None], d, 0.0)
    if SPLIT:
        d = d.to(tl.bfloat16).to(tl.float32)
    store_tile(_tile(scratch, D, part, ROWS, BLOCK), d, PART, BLOCK)
    tl.store(_rows(scratch, AWAY, part, ROWS, BLOCK), tl.sum(mean * d, 1))


@triton.jit
def begin(
    scratch, right_ptr, mean_ptr, low_ptr, high_ptr, first, queries, tol, limit,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, FEW: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Set x = 0 and r = right in its own unit. Return whether any row has something to do."""
    running = 0
    for part in range(0, ROWS, PART):
        rows = first + part + tl.arange(0, PART)
        low, high = load_span(low_ptr, high_ptr, rows, rows < queries)
        r = load_block(right_ptr, first + part, WIDTH, queries, PART, WIDTH, BLOCK)
        mean = load_block(mean_ptr, first + part, WIDTH, queries, PART, WIDTH, BLOCK)
        size = norm_scale(r)
        r = r / size[:, None]
        rr = tl.sum(r * r, 1)
        unsettled = (rr > 0) & (high - low > FEW)
        active = unsettled & (limit > 0)
        store_tile(_tile(scratch, X, part, ROWS, BLOCK), tl.zeros((PART, BLOCK), tl.float32), PART, BLOCK)
        store_tile(_tile(scratch, R, part, ROWS, BLOCK), r, PART, BLOCK)
        store_tile(_tile(scratch, MEAN, part, ROWS, BLOCK), mean, PART, BLOCK)
        tl.store(_rows(scratch, RR, part, ROWS, BLOCK), rr)
        tl.store(_rows(scratch, WHOLE, part, ROWS, BLOCK), rr)
        tl.store(_rows(scratch, GOAL, part, ROWS, BLOCK), tol * tol * rr)
        tl.store(_rows(scratch, COUNT, part, ROWS, BLOCK), tl.zeros((PART,), tl.float32))
        tl.store(_rows(scratch, ACTIVE, part, ROWS, BLOCK), active.to(tl.float32))
        tl.store(_rows(scratch, OPEN, part, ROWS, BLOCK), unsettled.to(tl.float32))
        tl.store(_rows(scratch, SIZE, part, ROWS, BLOCK), size)
        _direct(r, mean, active, scratch, part, ROWS, BLOCK, SPLIT)
        running = tl.maximum(running, tl.max(active.to(tl.int32), 0))
    return running


@triton.jit
def _image(
    scratch, part, ridge_ptr, ridge_number, first, queries,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, RIDGE: tl.constexpr,
):  # fmt: skip
    """Return (A d, d, mean) of some rows, after a sweep."""
    d = load_tile(_tile(scratch, D, part, ROWS, BLOCK), PART, BLOCK)
    mean = load_tile(_tile(scratch, MEAN, part, ROWS, BLOCK), PART, BLOCK)
    total = load_tile(_tile(scratch, IMAGE, part, ROWS, BLOCK), PART, BLOCK)
    used = tl.load(_rows(scratch, USED, part, ROWS, BLOCK))
    ridge = row_ridge(ridge_ptr, ridge_number, first + part, queries, PART, WIDTH, BLOCK, RIDGE)
    return total - used[:, None] * mean + ridge * d, d, mean


@triton.jit
def advance(
    scratch, ridge_ptr, ridge_number, first, queries, limit,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, RIDGE: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Take one step along d and return whether any row goes on. The next direction is made conjugate to d by the image
    itself, since a ratio of residuals ignores rounding."""
    running = 0
    for part in range(0, ROWS, PART):
        image, d, mean = _image(scratch, part, ridge_ptr, ridge_number, first, queries, ROWS, WIDTH, BLOCK, RIDGE)
        rr = tl.load(_rows(scratch, RR, part, ROWS, BLOCK))
        goal = tl.load(_rows(scratch, GOAL, part, ROWS, BLOCK))
        count = tl.load(_rows(scratch, COUNT, part, ROWS, BLOCK))
        curve = tl.sum(d * image, 1)
        good = (tl.load(_rows(scratch, ACTIVE, part, ROWS, BLOCK)) > 0) & (curve > 0)
        curve = tl.where(good, curve, 1.0)
        r = load_tile(_tile(scratch, R, part, ROWS, BLOCK), PART, BLOCK)
        length = tl.where(good, tl.sum(r * d, 1) / curve, 0.0)
        x = load_tile(_tile(scratch, X, part, ROWS, BLOCK), PART, BLOCK) + length[:, None] * d
        store_tile(_tile(scratch, X, part, ROWS, BLOCK), x, PART, BLOCK)
        r -= length[:, None] * image
        store_tile(_tile(scratch, R, part, ROWS, BLOCK), r, PART, BLOCK)
        rr = tl.where(good, tl.sum(r * r, 1), rr)
        count += good.to(tl.float32)
        active = good & (rr > goal) & (count < limit)
        _direct(r - (tl.sum(r * image, 1) / curve)[:, None] * d, mean, active, scratch, part, ROWS, BLOCK, SPLIT)
        tl.store(_rows(scratch, RR, part, ROWS, BLOCK), rr)
        tl.store(_rows(scratch, COUNT, part, ROWS, BLOCK), count)
        tl.store(_rows(scratch, ACTIVE, part, ROWS, BLOCK), active.to(tl.float32))
        running = tl.maximum(running, tl.max(active.to(tl.int32), 0))
    return running


@triton.jit
def _look(
    scratch, right_ptr, first, queries,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Begin to compute true residuals: r = right, from which A x is then subtracted."""
    for part in range(0, ROWS, PART):
        x = load_tile(_tile(scratch, X, part, ROWS, BLOCK), PART, BLOCK)
        mean = load_tile(_tile(scratch, MEAN, part, ROWS, BLOCK), PART, BLOCK)
        size = tl.load(_rows(scratch, SIZE, part, ROWS, BLOCK))
        r = load_block(right_ptr, first + part, WIDTH, queries, PART, WIDTH, BLOCK) / size[:, None]
        store_tile(_tile(scratch, R, part, ROWS, BLOCK), r, PART, BLOCK)
        _direct(x, mean, size > 0, scratch, part, ROWS, BLOCK, SPLIT)


@triton.jit
def _take_off(
    scratch, ridge_ptr, ridge_number, first, queries,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, RIDGE: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Subtract A d from r, and make what rounding left of x the next d."""
    for part in range(0, ROWS, PART):
        image, d, mean = _image(scratch, part, ridge_ptr, ridge_number, first, queries, ROWS, WIDTH, BLOCK, RIDGE)
        r = load_tile(_tile(scratch, R, part, ROWS, BLOCK), PART, BLOCK) - image
        store_tile(_tile(scratch, R, part, ROWS, BLOCK), r, PART, BLOCK)
        if SPLIT:
            x = load_tile(_tile(scratch, X, part, ROWS, BLOCK), PART, BLOCK)
            whole = tl.load(_rows(scratch, SIZE, part, ROWS, BLOCK)) > 0
            _direct(x - d, mean, whole, scratch, part, ROWS, BLOCK, SPLIT)


@triton.jit
def _settle(
    scratch, right_ptr, first, queries, limit, again,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Let rows whose true residual r is still too large go on from it. Return whether any does."""
    running = 0
    for part in range(0, ROWS, PART):
        x = load_tile(_tile(scratch, X, part, ROWS, BLOCK), PART, BLOCK)
        r = load_tile(_tile(scratch, R, part, ROWS, BLOCK), PART, BLOCK)
        mean = load_tile(_tile(scratch, MEAN, part, ROWS, BLOCK), PART, BLOCK)
        size = tl.load(_rows(scratch, SIZE, part, ROWS, BLOCK))
        right = load_block(right_ptr, first + part, WIDTH, queries, PART, WIDTH, BLOCK) / size[:, None]
        # Exact steps lower x.Ax / 2 - b.x, which is 0 at x = 0. If it is positive, rounding has spoiled x: restart.
        kept = tl.sum(x * (right + r), 1) >= 0
        x = tl.where(kept[:, None], x, 0.0)
        r = tl.where(kept[:, None], r, right)
        store_tile(_tile(scratch, X, part, ROWS, BLOCK), x, PART, BLOCK)
        store_tile(_tile(scratch, R, part, ROWS, BLOCK), r, PART, BLOCK)
        terms = tl.load(_rows(scratch, TERMS, part, ROWS, BLOCK))
        floor = 2 * EPS * (terms * tl.sqrt(tl.sum(x * x, 1)) + tl.sqrt(tl.sum(right * right, 1)))
        goal = tl.load(_rows(scratch, GOAL, part, ROWS, BLOCK))
        count = tl.load(_rows(scratch, COUNT, part, ROWS, BLOCK))
        unsettled = tl.load(_rows(scratch, OPEN, part, ROWS, BLOCK)) > 0
        rr = tl.where(unsettled, tl.sum(r * r, 1), tl.load(_rows(scratch, RR, part, ROWS, BLOCK)))
        unsettled &= ~(rr <= tl.maximum(goal, floor * floor))
        active = unsettled & (count < limit) & (again > 0)
        _direct(r, mean, active, scratch, part, ROWS, BLOCK, SPLIT)
        tl.store(_rows(scratch, RR, part, ROWS, BLOCK), rr)
        tl.store(_rows(scratch, OPEN, part, ROWS, BLOCK), unsettled.to(tl.float32))
        tl.store(_rows(scratch, ACTIVE, part, ROWS, BLOCK), active.to(tl.float32))
        running = tl.maximum(running, tl.max(active.to(tl.int32), 0))
    return running


@triton.jit
def finish(
    scratch, value_ptr, statistics_ptr, status_ptr, first, queries,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, VERIFY: tl.constexpr,
):  # fmt: skip
    """Store the solutions, statistics and status."""
    for part in range(0, ROWS, PART):
        x = load_tile(_tile(scratch, X, part, ROWS, BLOCK), PART, BLOCK)
        size = tl.load(_rows(scratch, SIZE, part, ROWS, BLOCK))
        store_block(value_ptr, x * size[:, None], first + part, WIDTH, queries, PART, WIDTH, BLOCK)
        rr = tl.load(_rows(scratch, RR, part, ROWS, BLOCK))
        whole = tl.load(_rows(scratch, WHOLE, part, ROWS, BLOCK))
        unsettled = tl.load(_rows(scratch, OPEN, part, ROWS, BLOCK)) > 0
        if not VERIFY:
            unsettled &= ~(rr <= tl.load(_rows(scratch, GOAL, part, ROWS, BLOCK)))
        rows = first + part + tl.arange(0, PART)
        there = rows < queries
        tl.store(statistics_ptr + rows * 2, tl.load(_rows(scratch, COUNT, part, ROWS, BLOCK)), mask=there)
        tl.store(statistics_ptr + rows * 2 + 1, tl.sqrt(rr / tl.where(whole > 0, whole, 1.0)), mask=there)
        tl.store(status_ptr + rows, tl.where(unsettled, UNCONVERGED, 0), mask=there)


@triton.jit
def follow(
    total, used, phase, again, scratch, right_ptr, ridge_ptr, ridge_number, first, queries, limit,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, RIDGE: tl.constexpr, SPLIT: tl.constexpr,
    VERIFY: tl.constexpr,
):  # fmt: skip
    """Take what a sweep gave and return (whether any row goes on, phase, restarts left). Phase 0 is a step; with VERIFY
    phases 1 and 2 compute true residuals, from the two terms of x in turn."""
    store_tile(scratch + IMAGE * (ROWS * BLOCK), total, ROWS, BLOCK)
    tl.store(scratch + ROWS * (TILE * BLOCK + USED) + tl.arange(0, ROWS), used)
    tl.debug_barrier()
    running = 1
    if not VERIFY:
        running = advance(scratch, ridge_ptr, ridge_number, first, queries, limit, ROWS, WIDTH, BLOCK, RIDGE, SPLIT)
    elif phase == 0:
        running = advance(scratch, ridge_ptr, ridge_number, first, queries, limit, ROWS, WIDTH, BLOCK, RIDGE, SPLIT)
        if running == 0:
            tl.debug_barrier()
            _look(scratch, right_ptr, first, queries, ROWS, WIDTH, BLOCK, SPLIT)
            running = 1
            phase = 1
    else:
        _take_off(scratch, ridge_ptr, ridge_number, first, queries, ROWS, WIDTH, BLOCK, RIDGE, SPLIT)
        if SPLIT and phase == 1:
            phase = 2
        else:
            tl.debug_barrier()
            running = _settle(scratch, right_ptr, first, queries, limit, again, ROWS, WIDTH, BLOCK, SPLIT)
            phase = 0
            again -= 1
    tl.debug_barrier()
    return running, phase, again
