"""Conjugate gradients for a block of rows between two sweeps over its keys. The vectors of all rows lie in scratch
memory and pass through registers a few rows at a time, which leaves registers to the sweeps.

Legend: as in `math`; x, r, d: solution, residual and direction of a row; A = C + ridge.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...grammar import SolveStatus
from ..runtime.blocks import load_block, load_span, store_block
from .math import norm_scale, row_ridge

UNCONVERGED = tl.constexpr(int(SolveStatus.UNCONVERGED))
EPS = tl.constexpr(2.0**-23)
X, R, MEAN, IMAGE, D = (tl.constexpr(i) for i in range(5))
"""Tiles [R, W] of a block's scratch memory: x, r, mean of the keys, result of a sweep, d."""
AWAY, USED, RR, GOAL, COUNT, ACTIVE, OPEN, SIZE, TERMS, WHOLE = (tl.constexpr(i) for i in range(10))
"""Rows [R] behind them: mean . d, the sum of a sweep's weights, |r|^2, its goal, steps, whether the row is
active, whether it is unsettled, the unit of its right side, the size of what C sums, and the first |r|^2."""
TILE, ROW = tl.constexpr(5), tl.constexpr(10)
PART = tl.constexpr(16)
"""Rows whose vectors are in registers at once."""


@triton.jit
def tile(scratch, which: tl.constexpr, part, ROWS: tl.constexpr, FORM: tl.constexpr):
    """Return where ROWS rows of a tile lie, from row `part` on."""
    at = scratch + which * (FORM.own * FORM.wide) + part * FORM.wide
    return at + tl.arange(0, ROWS)[:, None] * FORM.wide + tl.arange(0, FORM.wide)[None, :]


@triton.jit
def _rows(scratch, which: tl.constexpr, part, FORM: tl.constexpr):
    """Return where a part of a row of numbers lies."""
    return scratch + TILE * (FORM.own * FORM.wide) + which * FORM.own + part + tl.arange(0, PART)


@triton.jit
def _direct(d, mean, active, scratch, part, FORM: tl.constexpr):
    """Store the direction, rounded as it will be multiplied."""
    d = tl.where(active[:, None], d, 0.0)
    if FORM.fine:
        d = d.to(tl.bfloat16).to(tl.float32)
    tl.store(tile(scratch, D, part, PART, FORM), d)
    tl.store(_rows(scratch, AWAY, part, FORM), tl.sum(mean * d, 1))


@triton.jit
def begin(scratch, right_ptr, mean_ptr, span, first, queries, tol, limit, FORM: tl.constexpr):
    """Set x = 0 and r = right in its own unit. Return whether any row is active."""
    running = 0
    for part in range(0, FORM.own, PART):
        rows = first + part + tl.arange(0, PART)
        low, high = load_span(span[0], span[1], rows, rows < queries)
        r = load_block(right_ptr, first + part, FORM.dim, queries, PART, FORM.dim, FORM.wide)
        mean = load_block(mean_ptr, first + part, FORM.dim, queries, PART, FORM.dim, FORM.wide)
        size = norm_scale(r)
        r = r / size[:, None]
        rr = tl.sum(r * r, 1)
        unsettled = (rr > 0) & (high - low > FORM.few)
        active = unsettled & (limit > 0)
        tl.store(tile(scratch, X, part, PART, FORM), tl.full((PART, FORM.wide), 0.0, tl.float32))
        tl.store(tile(scratch, R, part, PART, FORM), r)
        tl.store(tile(scratch, MEAN, part, PART, FORM), mean)
        tl.store(_rows(scratch, RR, part, FORM), rr)
        tl.store(_rows(scratch, WHOLE, part, FORM), rr)
        tl.store(_rows(scratch, GOAL, part, FORM), tol * tol * rr)
        tl.store(_rows(scratch, COUNT, part, FORM), tl.full((PART,), 0.0, tl.float32))
        tl.store(_rows(scratch, ACTIVE, part, FORM), active.to(tl.float32))
        tl.store(_rows(scratch, OPEN, part, FORM), unsettled.to(tl.float32))
        tl.store(_rows(scratch, SIZE, part, FORM), size)
        _direct(r, mean, active, scratch, part, FORM)
        running = tl.maximum(running, tl.max(active.to(tl.int32), 0))
    return running


@triton.jit
def _image(scratch, part, ridge, first, queries, FORM: tl.constexpr):
    """Return (A d, d, mean) of some rows, after a sweep."""
    d = tl.load(tile(scratch, D, part, PART, FORM))
    mean = tl.load(tile(scratch, MEAN, part, PART, FORM))
    total = tl.load(tile(scratch, IMAGE, part, PART, FORM))
    used = tl.load(_rows(scratch, USED, part, FORM))
    ridge = row_ridge(ridge, first + part, queries, PART, FORM)
    return total - used[:, None] * mean + ridge * d, d, mean


@triton.jit
def advance(scratch, ridge, first, queries, limit, FORM: tl.constexpr):
    """Take one step along d and return whether any row continues. The next direction is made conjugate to d by the
    image itself, since a ratio of residuals ignores rounding."""
    running = 0
    for part in range(0, FORM.own, PART):
        image, d, mean = _image(scratch, part, ridge, first, queries, FORM)
        rr = tl.load(_rows(scratch, RR, part, FORM))
        goal = tl.load(_rows(scratch, GOAL, part, FORM))
        count = tl.load(_rows(scratch, COUNT, part, FORM))
        curve = tl.sum(d * image, 1)
        good = (tl.load(_rows(scratch, ACTIVE, part, FORM)) > 0) & (curve > 0)
        curve = tl.where(good, curve, 1.0)
        r = tl.load(tile(scratch, R, part, PART, FORM))
        length = tl.where(good, tl.sum(r * d, 1) / curve, 0.0)
        x = tl.load(tile(scratch, X, part, PART, FORM)) + length[:, None] * d
        tl.store(tile(scratch, X, part, PART, FORM), x)
        r -= length[:, None] * image
        tl.store(tile(scratch, R, part, PART, FORM), r)
        rr = tl.where(good, tl.sum(r * r, 1), rr)
        count += good.to(tl.float32)
        active = good & (rr > goal) & (count < limit)
        _direct(r - (tl.sum(r * image, 1) / curve)[:, None] * d, mean, active, scratch, part, FORM)
        tl.debug_barrier()  # other threads may still read what is stored now
        tl.store(_rows(scratch, RR, part, FORM), rr)
        tl.store(_rows(scratch, COUNT, part, FORM), count)
        tl.store(_rows(scratch, ACTIVE, part, FORM), active.to(tl.float32))
        running = tl.maximum(running, tl.max(active.to(tl.int32), 0))
    return running


@triton.jit
def _look(scratch, right_ptr, first, queries, FORM: tl.constexpr):
    """Begin to compute true residuals: r = right, from which A x is then subtracted."""
    for part in range(0, FORM.own, PART):
        x = tl.load(tile(scratch, X, part, PART, FORM))
        mean = tl.load(tile(scratch, MEAN, part, PART, FORM))
        size = tl.load(_rows(scratch, SIZE, part, FORM))
        r = load_block(right_ptr, first + part, FORM.dim, queries, PART, FORM.dim, FORM.wide) / size[:, None]
        tl.store(tile(scratch, R, part, PART, FORM), r)
        _direct(x, mean, size > 0, scratch, part, FORM)


@triton.jit
def _take_off(scratch, ridge, first, queries, FORM: tl.constexpr):
    """Subtract A d from r, and make what rounding left of x the next d."""
    for part in range(0, FORM.own, PART):
        image, d, mean = _image(scratch, part, ridge, first, queries, FORM)
        r = tl.load(tile(scratch, R, part, PART, FORM)) - image
        tl.store(tile(scratch, R, part, PART, FORM), r)
        if FORM.fine:
            x = tl.load(tile(scratch, X, part, PART, FORM))
            whole = tl.load(_rows(scratch, SIZE, part, FORM)) > 0
            _direct(x - d, mean, whole, scratch, part, FORM)


@triton.jit
def _settle(scratch, right_ptr, first, queries, limit, again, FORM: tl.constexpr):
    """Let rows whose true residual r is still too large continue from it. Return whether any does."""
    running = 0
    for part in range(0, FORM.own, PART):
        x = tl.load(tile(scratch, X, part, PART, FORM))
        r = tl.load(tile(scratch, R, part, PART, FORM))
        mean = tl.load(tile(scratch, MEAN, part, PART, FORM))
        size = tl.load(_rows(scratch, SIZE, part, FORM))
        right = load_block(right_ptr, first + part, FORM.dim, queries, PART, FORM.dim, FORM.wide) / size[:, None]
        # Exact steps lower x.Ax / 2 - b.x, which is 0 at x = 0. If it is positive, rounding errors dominate x: restart.
        kept = tl.sum(x * (right + r), 1) >= 0
        x = tl.where(kept[:, None], x, 0.0)
        r = tl.where(kept[:, None], r, right)
        tl.store(tile(scratch, X, part, PART, FORM), x)
        tl.store(tile(scratch, R, part, PART, FORM), r)
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
def finish(scratch, value_ptr, statistics_ptr, status_ptr, first, queries, FORM: tl.constexpr):
    """Store the solutions, statistics and status."""
    for part in range(0, FORM.own, PART):
        x = tl.load(tile(scratch, X, part, PART, FORM))
        size = tl.load(_rows(scratch, SIZE, part, FORM))
        store_block(value_ptr, x * size[:, None], first + part, FORM.dim, queries, PART, FORM.dim, FORM.wide)
        rr = tl.load(_rows(scratch, RR, part, FORM))
        whole = tl.load(_rows(scratch, WHOLE, part, FORM))
        unsettled = tl.load(_rows(scratch, OPEN, part, FORM)) > 0
        if not FORM.verify:
            unsettled &= ~(rr <= tl.load(_rows(scratch, GOAL, part, FORM)))
        rows = first + part + tl.arange(0, PART)
        there = rows < queries
        tl.store(statistics_ptr + rows * 2, tl.load(_rows(scratch, COUNT, part, FORM)), mask=there)
        tl.store(statistics_ptr + rows * 2 + 1, tl.sqrt(rr / tl.where(whole > 0, whole, 1.0)), mask=there)
        tl.store(status_ptr + rows, tl.where(unsettled, UNCONVERGED, 0), mask=there)


@triton.jit
def follow(total, used, phase, again, scratch, right_ptr, ridge, first, queries, limit, FORM: tl.constexpr):
    """Use the result of a sweep and return (whether any row continues, phase, restarts left). Phase 0 is a step; phases
    1 and 2 compute true residuals (FORM.verify), from the two terms of x in turn."""
    tl.store(tile(scratch, IMAGE, 0, FORM.own, FORM), total)
    tl.store(scratch + FORM.own * (TILE * FORM.wide + USED) + tl.arange(0, FORM.own), used)
    tl.debug_barrier()
    running = 1
    if not FORM.verify:
        running = advance(scratch, ridge, first, queries, limit, FORM)
    elif phase == 0:
        running = advance(scratch, ridge, first, queries, limit, FORM)
        if running == 0:
            tl.debug_barrier()
            _look(scratch, right_ptr, first, queries, FORM)
            running = 1
            phase = 1
    else:
        _take_off(scratch, ridge, first, queries, FORM)
        if FORM.fine and phase == 1:
            phase = 2
        else:
            tl.debug_barrier()
            running = _settle(scratch, right_ptr, first, queries, limit, again, FORM)
            phase = 0
            again -= 1
    tl.debug_barrier()
    return running, phase, again
