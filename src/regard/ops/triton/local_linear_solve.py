"""The systems of local linear attention, (C_i + ridge_i) t_i = right_i, by conjugate gradients for blocks of rows.

    C_i d = sum_j p_ij ((k_j - mean_i) . d) (k_j - mean_i)

is never formed. A step streams the keys once; where a block of rows sees no more than four tiles of CHIP keys, these and the
weights stay on the chip for all steps. A row ends when its residual is small, and then does not change by a bit; a
block, when all its rows have. Rows with no more than `FEW` keys are solved by themselves (`local_linear_direct`).

With keys in bfloat16, the direction is rounded before it is used, and is then the direction: its image is exact but for
the weights, which are split in two terms. What is left of x and r lies in memory while keys stream by.

Legend: as in `local_linear_math`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...grammar import SolveStatus
from .launch import launch
from .local_linear_math import (
    FAR,
    block_width,
    load_keys,
    load_rows,
    load_tile,
    load_span,
    mask_strides,
    norm_scale,
    number_or_rows,
    plan,
    product,
    row_factor,
    row_ridge,
    seen,
    store_rows,
    store_tile,
    sweep,
    times,
    weights,
)
from .span import Span, batch_stride
from .tiles import Tiles, TileTable

CHIP = 64
"""Keys of a tile, four of which stay on the chip with their weights, for all steps."""
FEW = 32
"""Keys a row up to which it is solved by itself."""
RESTARTS = tl.constexpr(3)
"""How often a row whose recurrence was over before its true residual was small begins again."""
UNCONVERGED = tl.constexpr(int(SolveStatus.UNCONVERGED))
EPS = tl.constexpr(2.0**-23)


class Rule(NamedTuple):
    """How systems are solved: relative residual, most steps a row, whether rows with few keys are solved directly, and
    whether true residuals are looked at, instead of those that the steps carry along."""

    tol: float
    limit: int
    direct: bool
    verify: bool


TILES = TileTable(
    "local_linear_solve",
    {
        (64, 2): Tiles(64, 32, 4, 2),
        (128, 2): Tiles(64, 32, 4, 2),
        (256, 2): Tiles(64, 32, 8, 2),
        (64, 4): Tiles(32, 32, 4, 2),
        (128, 4): Tiles(32, 32, 8, 2),
        (256, 4): Tiles(16, 32, 8, 1),
    },
)


X, R, MEAN, IMAGE, D = (tl.constexpr(i) for i in range(5))
"""Tiles [ROWS, BLOCK] of a block's scratch memory: solution, residual, mean of the keys, what a sweep gave, direction."""
AWAY, USED, RR, GOAL, COUNT, ACTIVE, OPEN, SIZE, TERMS, WHOLE = (tl.constexpr(i) for i in range(10))
"""Rows [ROWS] behind them: mean . d, the sum of a sweep's weights, |r|^2, its goal, steps, whether the row is under way,
whether it is unsettled, the unit of its right side, the size of what C sums, and |r|^2 at first."""
TILE, ROW = tl.constexpr(5), tl.constexpr(10)
PART = tl.constexpr(16)
"""Rows whose vectors are in registers at a time."""


@triton.jit
def _tile(scratch, which: tl.constexpr, part, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Where a part of a tile lies."""
    return scratch + which * (ROWS * BLOCK) + part * BLOCK


@triton.jit
def _rows(scratch, which: tl.constexpr, part, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Where a part of a row of numbers lies."""
    return scratch + TILE * (ROWS * BLOCK) + which * ROWS + part + tl.arange(0, PART)


@triton.jit
def _direct(d, mean, active, scratch, part, ROWS: tl.constexpr, BLOCK: tl.constexpr, SPLIT: tl.constexpr):
    """Set the direction, which rounding makes."""
    d = tl.where(active[:, None], d, 0.0)
    if SPLIT:
        d = d.to(tl.bfloat16).to(tl.float32)
    store_tile(_tile(scratch, D, part, ROWS, BLOCK), d, PART, BLOCK)
    tl.store(_rows(scratch, AWAY, part, ROWS, BLOCK), tl.sum(mean * d, 1))


@triton.jit
def _begin(
    scratch, right_ptr, mean_ptr, low_ptr, high_ptr, first, queries, tol, limit,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, FEW: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """x = 0 and r = right, in its own unit. Whether any row has something to do."""
    running = 0
    for part in range(0, ROWS, PART):
        rows = first + part + tl.arange(0, PART)
        low, high = load_span(low_ptr, high_ptr, rows, queries)
        r = load_rows(right_ptr, first + part, WIDTH, queries, PART, WIDTH, BLOCK)
        mean = load_rows(mean_ptr, first + part, WIDTH, queries, PART, WIDTH, BLOCK)
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
    """(A d, d, mean) of some rows, after a sweep."""
    d = load_tile(_tile(scratch, D, part, ROWS, BLOCK), PART, BLOCK)
    mean = load_tile(_tile(scratch, MEAN, part, ROWS, BLOCK), PART, BLOCK)
    total = load_tile(_tile(scratch, IMAGE, part, ROWS, BLOCK), PART, BLOCK)
    used = tl.load(_rows(scratch, USED, part, ROWS, BLOCK))
    ridge = row_ridge(ridge_ptr, ridge_number, first + part, queries, PART, WIDTH, BLOCK, RIDGE)
    return total - used[:, None] * mean + ridge * d, d, mean


@triton.jit
def _advance(
    scratch, ridge_ptr, ridge_number, first, queries, limit,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, RIDGE: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """One step along d. The next direction is made conjugate to d by the image itself, not by a ratio of residuals,
    which knows nothing of rounding. Whether any row goes on."""
    running = 0
    for part in range(0, ROWS, PART):
        image, d, mean = _image(
            scratch, part, ridge_ptr, ridge_number, first, queries, ROWS, WIDTH, BLOCK, RIDGE
        )
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
    """Begin to look at the true residuals: r = right, from which A x is to be taken off."""
    for part in range(0, ROWS, PART):
        x = load_tile(_tile(scratch, X, part, ROWS, BLOCK), PART, BLOCK)
        mean = load_tile(_tile(scratch, MEAN, part, ROWS, BLOCK), PART, BLOCK)
        size = tl.load(_rows(scratch, SIZE, part, ROWS, BLOCK))
        r = load_rows(right_ptr, first + part, WIDTH, queries, PART, WIDTH, BLOCK) / size[:, None]
        store_tile(_tile(scratch, R, part, ROWS, BLOCK), r, PART, BLOCK)
        _direct(x, mean, size > 0, scratch, part, ROWS, BLOCK, SPLIT)


@triton.jit
def _take_off(
    scratch, ridge_ptr, ridge_number, first, queries,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, RIDGE: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """r -= A d, and what rounding left of x as the next d."""
    for part in range(0, ROWS, PART):
        image, d, mean = _image(
            scratch, part, ridge_ptr, ridge_number, first, queries, ROWS, WIDTH, BLOCK, RIDGE
        )
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
    """Rows whose true residual r is still too large go on from it. Whether any does."""
    running = 0
    for part in range(0, ROWS, PART):
        x = load_tile(_tile(scratch, X, part, ROWS, BLOCK), PART, BLOCK)
        r = load_tile(_tile(scratch, R, part, ROWS, BLOCK), PART, BLOCK)
        mean = load_tile(_tile(scratch, MEAN, part, ROWS, BLOCK), PART, BLOCK)
        size = tl.load(_rows(scratch, SIZE, part, ROWS, BLOCK))
        right = load_rows(right_ptr, first + part, WIDTH, queries, PART, WIDTH, BLOCK) / size[:, None]
        # Every step lowers x.Ax / 2 - b.x from its 0 at x = 0; where it lies above, rounding has blown x up.
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
def _finish(
    scratch, value_ptr, statistics_ptr, status_ptr, first, queries,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, VERIFY: tl.constexpr,
):  # fmt: skip
    """Hand out the solutions."""
    for part in range(0, ROWS, PART):
        x = load_tile(_tile(scratch, X, part, ROWS, BLOCK), PART, BLOCK)
        size = tl.load(_rows(scratch, SIZE, part, ROWS, BLOCK))
        store_rows(value_ptr, x * size[:, None], first + part, WIDTH, queries, PART, WIDTH, BLOCK)
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
def _terms(
    q, c, lse, low, high, k_ptr, k_stride, mask_ptr, keys, start, tiles,
    ROWS: tl.constexpr, KEYS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """sum_j p_ij |k_j|^2, the size of what a product with C sums."""
    found = tl.zeros((ROWS,), tl.float32)
    for n in range(tiles):
        at = start + n * KEYS
        k = load_keys(k_ptr, at, k_stride, keys, KEYS, WIDTH, BLOCK, True)
        p = tl.where(seen(low, high, at, mask_ptr, keys, KEYS, MASKED), weights(q, k, c, lse), 0.0)
        kf = k.to(tl.float32)
        found += tl.sum(p * tl.sum(kf * kf, 1)[None, :], 1)
    return found


@triton.jit
def _next(
    phase, again, scratch, right_ptr, ridge_ptr, ridge_number, first, queries, limit,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, RIDGE: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """What follows a sweep where true residuals are looked at: phase 0 is a step, 1 and 2 the terms of x in turn.
    (running, phase, again)."""
    running = 1
    if phase == 0:
        running = _advance(
            scratch, ridge_ptr, ridge_number, first, queries, limit, ROWS, WIDTH, BLOCK, RIDGE, SPLIT
        )
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
    return running, phase, again


@triton.jit
def _fits(low_ptr, high_ptr, rows, queries, most):
    """Whether these rows see no more than `most` keys."""
    low, high = load_span(low_ptr, high_ptr, rows, queries)
    some = high > low
    return tl.max(tl.where(some, high, 0), 0) - tl.min(tl.where(some, low, FAR), 0) <= most


@triton.jit
def _held_tile(
    at, k_ptr, k_row, keys, q, c, lse, low, high, mask_ptr,
    KEYS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Keys, and their weights."""
    k = load_keys(k_ptr, at, k_row, keys, KEYS, WIDTH, BLOCK, True)
    return k, tl.where(seen(low, high, at, mask_ptr, keys, KEYS, MASKED), weights(q, k, c, lse), 0.0)


@triton.jit
def _solve(
    right_ptr, q_ptr, k_ptr, lse_ptr, mean_ptr, factor_ptr, factor, ridge_ptr, ridge_number, low_ptr, high_ptr,
    mask_ptr, value_ptr, scratch, statistics_ptr, status_ptr, tol, limit, heads, group, queries, keys,
    q_batch, q_head, q_row, k_batch, k_head, k_row, span_batch, mask_batch, mask_head,
    ROWS: tl.constexpr, KEYS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, WHOLE: tl.constexpr,
    CHIP: tl.constexpr, FEW: tl.constexpr, GIVEN: tl.constexpr, RIDGE: tl.constexpr, MASKED: tl.constexpr, SPLIT: tl.constexpr, VERIFY: tl.constexpr,
    HELD: tl.constexpr,
):  # fmt: skip
    """HELD: of the blocks of WHOLE rows whose keys, 4 CHIP at most, stay on the chip with their weights; else of the
    others."""
    block = tl.num_programs(0) - 1 - tl.program_id(0)  # with causal order the longest first
    head = tl.program_id(1).to(tl.int64)
    batch, own = head // heads, head % heads
    first = block * ROWS
    rows = first + tl.arange(0, ROWS)
    low_ptr += batch * span_batch
    high_ptr += batch * span_batch
    low, high = load_span(low_ptr, high_ptr, rows, queries)
    start, tiles, left, full = plan(low, high, KEYS, MASKED)
    if CHIP > 0:
        around = first // WHOLE * WHOLE + tl.arange(0, WHOLE)
        if _fits(low_ptr, high_ptr, around, queries, 4 * CHIP) != HELD:
            return
    at = head * queries
    scratch += (head * tl.num_programs(0) + block) * (ROWS * (TILE * BLOCK + ROW))
    k_ptr += batch * k_batch + (own // group) * k_head
    mask_ptr += batch * mask_batch + own * mask_head
    right_ptr += at * WIDTH
    ridge_ptr += at * RIDGE
    running = _begin(
        scratch, right_ptr, mean_ptr + at * WIDTH, low_ptr, high_ptr, first, queries, tol, limit,
        ROWS, WIDTH, BLOCK, FEW, SPLIT,
    )  # fmt: skip
    tl.debug_barrier()
    q = load_rows(q_ptr + batch * q_batch + own * q_head, first, q_row, queries, ROWS, WIDTH, BLOCK)
    c = row_factor(factor_ptr + at, factor, rows, queries, GIVEN)
    lse = tl.load(lse_ptr + at + rows, mask=rows < queries, other=float("inf"))
    phase, again = 0, RESTARTS
    if VERIFY:
        terms = _terms(
            q, c, lse, low, high, k_ptr, k_row, mask_ptr, keys, start, tiles, ROWS, KEYS, WIDTH, BLOCK, MASKED
        )
        ridge = row_ridge(ridge_ptr, ridge_number, first, queries, ROWS, WIDTH, BLOCK, RIDGE)
        tl.store(scratch + ROWS * (TILE * BLOCK + TERMS) + tl.arange(0, ROWS), terms + tl.max(ridge, 1))
    if HELD:
        k0, p0 = _held_tile(start, k_ptr, k_row, keys, q, c, lse, low, high, mask_ptr, KEYS, WIDTH, BLOCK, MASKED)
        k1, p1 = _held_tile(start + KEYS, k_ptr, k_row, keys, q, c, lse, low, high, mask_ptr, KEYS, WIDTH, BLOCK, MASKED)
        k2, p2 = _held_tile(start + 2 * KEYS, k_ptr, k_row, keys, q, c, lse, low, high, mask_ptr, KEYS, WIDTH, BLOCK, MASKED)
        k3, p3 = _held_tile(start + 3 * KEYS, k_ptr, k_row, keys, q, c, lse, low, high, mask_ptr, KEYS, WIDTH, BLOCK, MASKED)
    while running > 0:
        d = load_tile(scratch + D * (ROWS * BLOCK), ROWS, BLOCK).to(k_ptr.dtype.element_ty)
        away = tl.load(scratch + ROWS * (TILE * BLOCK + AWAY) + tl.arange(0, ROWS))
        if HELD:
            total = tl.zeros((ROWS, BLOCK), tl.float32)
            used = tl.zeros((ROWS,), tl.float32)
            total, used = times(p0 * (product(d, tl.trans(k0)) - away[:, None]), k0, total, used, SPLIT)
            total, used = times(p1 * (product(d, tl.trans(k1)) - away[:, None]), k1, total, used, SPLIT)
            total, used = times(p2 * (product(d, tl.trans(k2)) - away[:, None]), k2, total, used, SPLIT)
            total, used = times(p3 * (product(d, tl.trans(k3)) - away[:, None]), k3, total, used, SPLIT)
        else:
            total, used = sweep(
                d, away, q, c, lse, low, high, k_ptr, k_row, mask_ptr, keys, start, tiles, left, full,
                ROWS, KEYS, WIDTH, BLOCK, MASKED, SPLIT,
            )  # fmt: skip
        store_tile(scratch + IMAGE * (ROWS * BLOCK), total, ROWS, BLOCK)
        tl.store(scratch + ROWS * (TILE * BLOCK + USED) + tl.arange(0, ROWS), used)
        tl.debug_barrier()
        if VERIFY:
            running, phase, again = _next(
                phase, again, scratch, right_ptr, ridge_ptr, ridge_number, first, queries, limit,
                ROWS, WIDTH, BLOCK, RIDGE, SPLIT,
            )  # fmt: skip
        else:
            running = _advance(
                scratch, ridge_ptr, ridge_number, first, queries, limit, ROWS, WIDTH, BLOCK, RIDGE, SPLIT
            )
        tl.debug_barrier()
    _finish(
        scratch, value_ptr + at * WIDTH, statistics_ptr + at * 2, status_ptr + at, first, queries,
        ROWS, WIDTH, BLOCK, VERIFY,
    )  # fmt: skip


def solve(
    right: Tensor,
    x: Tensor,
    y: Tensor,
    factor: float | Tensor,
    ridge: float | Tensor,
    lse: Tensor,
    mean: Tensor,
    span: Span,
    rule: Rule,
) -> tuple[Tensor, Tensor, Tensor]:
    """Solve (C_i + ridge_i) t_i = right_i for every query.

    Args:
        right: [B, H, Tq, D], float32, contiguous.
        x, y: queries [B, H, Tq, D] and keys [B, Hkv, Tk, D].
        factor: of the scores, a number or float32 [B, H, Tq].
        ridge: a number or float32 [B, H, Tq, 1 or D].
        lse: [B, H, Tq], float32: of the scores in base 2, inf for a row without a key.
        mean: of the keys [B, H, Tq, D], float32, contiguous.

    Returns:
        t [B, H, Tq, D], float32; (steps, relative residual) [B, H, Tq, 2]; `SolveStatus` [B, H, Tq], int32.

    Cost: 8 D a pair and step with keys in bfloat16, 6 D in float32, where one or more steps look at true residuals.
    """
    value = torch.empty_like(right)
    statistics = right.new_empty(*right.shape[:3], 2)
    status = torch.empty(right.shape[:3], dtype=torch.int32, device=right.device)
    tiles = TILES.pick(right.shape[-1], y.dtype)
    few = FEW if rule.direct else 0
    rows = triton.cdiv(right.shape[2], tiles.rows) * tiles.rows
    scratch = right.new_empty(right.shape[0] * right.shape[1], rows, 5 * block_width(right.shape[-1]) + 10)
    tensors = (right, x, y, lse, mean)
    outputs = (value, scratch, statistics, status)
    for held in (False, True):
        _launch(tensors, factor, ridge, span, outputs, rule, tiles, few, held)
    if few:
        from .local_linear_direct import solve_few

        solve_few(right, x, y, factor, ridge, lse, span, (value, statistics, status), few)
    return value, statistics, status


def _launch(
    tensors: tuple[Tensor, ...],
    factor: float | Tensor,
    ridge: float | Tensor,
    span: Span,
    outputs: tuple[Tensor, ...],
    rule: Rule,
    tiles: Tiles,
    few: int,
    held: bool,
) -> None:
    right, x, y, lse, mean = tensors
    batch, heads, queries, width = right.shape
    keys, whole = y.shape[2], tiles.rows
    chip = min(CHIP, 2 * tiles.keys) if y.dtype == torch.bfloat16 else 0
    if held:
        tiles = Tiles(min(32, whole), chip, 8, 1)
    if (chip == 0 and held) or (keys <= 4 * chip and not held):
        return
    mask = span.mask
    launch(
        _solve,
        (triton.cdiv(queries, tiles.rows), batch * heads),
        right, x, y, lse, mean, *number_or_rows(factor, lse), *number_or_rows(ridge, lse), span.low, span.high,
        span.low if mask is None else mask, *outputs, rule.tol, rule.limit, heads, heads // y.shape[1], queries, keys,
        *x.stride()[:3], *y.stride()[:3], batch_stride(span.low), *mask_strides(mask),
        tiles=tiles,
        ROWS=tiles.rows,
        KEYS=tiles.keys,
        WIDTH=width,
        BLOCK=block_width(width),
        WHOLE=whole,
        CHIP=chip,
        FEW=few,
        GIVEN=isinstance(factor, Tensor),
        RIDGE=ridge.shape[-1] if isinstance(ridge, Tensor) else 0,
        MASKED=mask is not None,
        SPLIT=y.dtype == torch.bfloat16,
        VERIFY=rule.verify,
        HELD=held,
    )  # fmt: skip
