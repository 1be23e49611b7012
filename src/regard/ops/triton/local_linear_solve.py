"""The systems of local linear attention, (C_i + ridge_i) t_i = right_i, by conjugate gradients for blocks of rows.

    C_i d = sum_j p_ij ((k_j - mean_i) . d) (k_j - mean_i)

is never formed. A step streams the keys once; where a block of rows sees no more than `CHIP` keys, these and the
weights stay on the chip for all steps. A row ends when its residual is small, and then does not change by a bit; a
block, when all its rows have. Rows with no more than `FEW` keys are solved by themselves (`local_linear_direct`).

With keys in bfloat16, the direction is rounded before it is used, and is then the direction: its image is exact but for
the weights, which are split in two terms. What is left of x and r lies in memory while keys stream by.

Legend: as in `local_linear_math`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...grammar import SolveStatus
from .launch import launch
from .local_linear_math import (
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

CHIP = 256
"""Keys that stay on the chip, weights and all."""
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
        (64, 2): Tiles(64, 64, 4, 3),
        (128, 2): Tiles(64, 64, 4, 2),
        (256, 2): Tiles(64, 32, 8, 2),
        (64, 4): Tiles(32, 32, 4, 2),
        (128, 4): Tiles(32, 32, 8, 2),
        (256, 4): Tiles(16, 32, 8, 1),
    },
)


@triton.jit
def _advance(
    total, used, d, active, rr, goal, count, limit, scratch, ridge_ptr, ridge_number, first, queries,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, RIDGE: tl.constexpr,
):  # fmt: skip
    """One step along d, whose image under C comes from a sweep. The next direction is made conjugate to d by the image
    itself, not by a ratio of residuals, which knows nothing of rounding."""
    mean = load_tile(scratch + 2 * ROWS * BLOCK, ROWS, BLOCK)
    ridge = row_ridge(ridge_ptr, ridge_number, first, queries, ROWS, WIDTH, BLOCK, RIDGE)
    df = d.to(tl.float32)
    image = total - used[:, None] * mean + ridge * df
    curve = tl.sum(df * image, 1)
    good = active & (curve > 0)
    curve = tl.where(good, curve, 1.0)
    r = load_tile(scratch + ROWS * BLOCK, ROWS, BLOCK)
    length = tl.where(good, tl.sum(r * df, 1) / curve, 0.0)
    x = load_tile(scratch, ROWS, BLOCK) + length[:, None] * df
    store_tile(scratch, x, ROWS, BLOCK)
    r -= length[:, None] * image
    store_tile(scratch + ROWS * BLOCK, r, ROWS, BLOCK)
    rr = tl.where(good, tl.sum(r * r, 1), rr)
    count += good.to(tl.int32)
    turn = tl.sum(r * image, 1) / curve
    active = good & (rr > goal) & (count < limit)
    d = tl.where(active[:, None], r - turn[:, None] * df, 0.0).to(d.dtype)
    return d, tl.sum(mean * d.to(tl.float32), 1), active, rr, count


@triton.jit
def _settle(
    image, size, terms, active, goal, rr, count, limit, right_ptr, scratch, first, queries,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Look at the true residuals, given A x: rows whose own is still too large go on from it."""
    right = load_rows(right_ptr, first, WIDTH, queries, ROWS, WIDTH, BLOCK) / size[:, None]
    x = load_tile(scratch, ROWS, BLOCK)
    r = right - image
    # Every step lowers x.Ax / 2 - b.x from its 0 at x = 0; where it lies above, rounding has blown x up.
    kept = tl.sum(x * (right + r), 1) >= 0
    x = tl.where(kept[:, None], x, 0.0)
    r = tl.where(kept[:, None], r, right)
    floor = 2 * EPS * (terms * tl.sqrt(tl.sum(x * x, 1)) + tl.sqrt(tl.sum(right * right, 1)))
    rr = tl.where(active, tl.sum(r * r, 1), rr)
    left = active & ~(rr <= tl.maximum(goal, floor * floor))
    store_tile(scratch, x, ROWS, BLOCK)
    store_tile(scratch + ROWS * BLOCK, r, ROWS, BLOCK)
    return r, left, rr


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
def _solve(
    right_ptr, q_ptr, k_ptr, lse_ptr, mean_ptr, factor_ptr, factor, ridge_ptr, ridge_number, low_ptr, high_ptr, mask_ptr,
    x_ptr, scratch, statistics_ptr, status_ptr, tol, limit, heads, group, queries, keys,
    q_batch, q_head, q_row, k_batch, k_head, k_row, span_batch, mask_batch, mask_head,
    ROWS: tl.constexpr, KEYS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, CHIP: tl.constexpr,
    FEW: tl.constexpr, GIVEN: tl.constexpr, RIDGE: tl.constexpr, MASKED: tl.constexpr, SPLIT: tl.constexpr,
    VERIFY: tl.constexpr, HELD: tl.constexpr,
):  # fmt: skip
    """HELD: of blocks that see no more than CHIP keys; else of the others."""
    block = tl.num_programs(0) - 1 - tl.program_id(0)  # with causal order the longest first
    head = tl.program_id(1).to(tl.int64)
    batch, own = head // heads, head % heads
    first = block * ROWS
    rows = first + tl.arange(0, ROWS)
    low, high = load_span(low_ptr + batch * span_batch, high_ptr + batch * span_batch, rows, queries)
    start, tiles, left, full = plan(low, high, KEYS, MASKED)
    span = tl.max(tl.where(high > low, high, 0), 0) - start
    if (span <= CHIP) != HELD:
        return
    at = head * queries
    right_ptr += at * WIDTH
    mean_ptr += at * WIDTH
    x_ptr += at * WIDTH
    scratch += (head * tl.num_programs(0) + block) * (3 * ROWS * BLOCK)
    ridge_ptr += at * RIDGE
    k_ptr += batch * k_batch + (own // group) * k_head
    mask_ptr += batch * mask_batch + own * mask_head
    q = load_rows(q_ptr + batch * q_batch + own * q_head, first, q_row, queries, ROWS, WIDTH, BLOCK)
    c = row_factor(factor_ptr + at, factor, rows, queries, GIVEN)
    lse = tl.load(lse_ptr + at + rows, mask=rows < queries, other=float("inf"))
    r = load_rows(right_ptr, first, WIDTH, queries, ROWS, WIDTH, BLOCK)
    size = norm_scale(r)
    r = r / size[:, None]
    mean = load_rows(mean_ptr, first, WIDTH, queries, ROWS, WIDTH, BLOCK)
    store_tile(scratch, tl.zeros((ROWS, BLOCK), tl.float32), ROWS, BLOCK)
    store_tile(scratch + ROWS * BLOCK, r, ROWS, BLOCK)
    store_tile(scratch + 2 * ROWS * BLOCK, mean, ROWS, BLOCK)
    tl.debug_barrier()
    rr = tl.sum(r * r, 1)
    whole, goal = rr, tol * tol * rr
    count = tl.zeros((ROWS,), tl.int32)
    active = (rr > 0) & (high - low > FEW) & (limit > 0)
    unsettled = (rr > 0) & (high - low > FEW)
    d = tl.where(active[:, None], r, 0.0).to(k_ptr.dtype.element_ty)
    away = tl.sum(mean * d.to(tl.float32), 1)
    if HELD:
        k = load_keys(k_ptr, start, k_row, keys, CHIP, WIDTH, BLOCK, True)
        visible = seen(low, high, start, mask_ptr, keys, CHIP, MASKED)
        p = tl.where(visible, weights(q, k, c, lse), 0.0)
    running = tl.max(active.to(tl.int32), 0)
    if VERIFY:
        again = RESTARTS + 1
        terms = _terms(
            q, c, lse, low, high, k_ptr, k_row, mask_ptr, keys, start, tiles, ROWS, KEYS, WIDTH, BLOCK, MASKED
        )
        ridge = row_ridge(ridge_ptr, ridge_number, first, queries, ROWS, WIDTH, BLOCK, RIDGE)
        terms += tl.max(ridge, 1)
    while running > 0:
        if HELD:
            total, used = times(
                p * (product(d, tl.trans(k)) - away[:, None]),
                k,
                tl.zeros((ROWS, BLOCK), tl.float32),
                tl.zeros((ROWS, CHIP), tl.float32),
                SPLIT,
            )
            used = tl.sum(used, 1)
        else:
            total, used = sweep(
                d, away, q, c, lse, low, high, k_ptr, k_row, mask_ptr, keys, start, tiles, left, full,
                ROWS, KEYS, WIDTH, BLOCK, MASKED, SPLIT,
            )  # fmt: skip
        d, away, active, rr, count = _advance(
            total, used, d, active, rr, goal, count, limit, scratch, ridge_ptr, ridge_number,
            first, queries, ROWS, WIDTH, BLOCK, RIDGE,
        )  # fmt: skip
        tl.debug_barrier()
        running = tl.max(active.to(tl.int32), 0)
        if VERIFY:
            if (running == 0) & (again > 0):
                again -= 1
                x = load_tile(scratch, ROWS, BLOCK)
                mean = load_tile(scratch + 2 * ROWS * BLOCK, ROWS, BLOCK)
                image = row_ridge(ridge_ptr, ridge_number, first, queries, ROWS, WIDTH, BLOCK, RIDGE) * x
                rest = x
                for _ in range(2 if SPLIT else 1):
                    part = rest.to(k_ptr.dtype.element_ty)
                    rest -= part.to(tl.float32)
                    total, used = sweep(
                        part, tl.sum(mean * part.to(tl.float32), 1), q, c, lse, low, high, k_ptr, k_row, mask_ptr,
                        keys, start, tiles, left, full, ROWS, KEYS, WIDTH, BLOCK, MASKED, SPLIT,
                    )  # fmt: skip
                    image += total - used[:, None] * mean
                tl.debug_barrier()
                r, unsettled, rr = _settle(
                    image, size, terms, unsettled, goal, rr, count, limit, right_ptr, scratch, first, queries,
                    ROWS, WIDTH, BLOCK,
                )  # fmt: skip
                active = unsettled & (count < limit) & (again > 0)
                d = tl.where(active[:, None], r, 0.0).to(k_ptr.dtype.element_ty)
                away = tl.sum(mean * d.to(tl.float32), 1)
                tl.debug_barrier()
                running = tl.max(active.to(tl.int32), 0)
    x = load_tile(scratch, ROWS, BLOCK) * size[:, None]
    store_rows(x_ptr, x, first, WIDTH, queries, ROWS, WIDTH, BLOCK)
    if not VERIFY:
        unsettled &= rr > goal
    residual = tl.sqrt(rr / tl.where(whole > 0, whole, 1.0))
    there = rows < queries
    tl.store(statistics_ptr + (at + rows) * 2, count.to(tl.float32), mask=there)
    tl.store(statistics_ptr + (at + rows) * 2 + 1, residual, mask=there)
    tl.store(status_ptr + at + rows, tl.where(unsettled, UNCONVERGED, 0), mask=there)


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
    scratch = right.new_empty(right.shape[0] * right.shape[1], rows, 3, block_width(right.shape[-1]))
    tensors = (right, x, y, lse, mean)
    outputs = (value, scratch, statistics, status)
    for held in (False, True):
        _launch(tensors, factor, ridge, span, outputs, rule, tiles, few, held)
    if few:
        from .local_linear_direct import solve_few

        solve_few(right, x, y, factor, ridge, lse, mean, span, value, statistics, status, few)
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
    keys, chip = y.shape[2], CHIP
    if not held and keys <= chip:
        return
    if held:
        tiles = replace(tiles, warps=8, stages=1)
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
        CHIP=chip,
        FEW=few,
        GIVEN=isinstance(factor, Tensor),
        RIDGE=ridge.shape[-1] if isinstance(ridge, Tensor) else 0,
        MASKED=mask is not None,
        SPLIT=y.dtype == torch.bfloat16,
        VERIFY=rule.verify,
        HELD=held,
    )  # fmt: skip
