"""The systems of local linear attention, (C_i + ridge_i) t_i = right_i, by conjugate gradients for blocks of rows.

    C_i d = sum_j p_ij ((k_j - mean_i) . d) (k_j - mean_i)

C_i is never formed. A step streams the keys once; if a block of rows sees at most four tiles of CHIP keys, these and
the weights stay on the chip for all steps. A row stops when its residual is small and then keeps its bits; a block
stops with its last row. Rows with few keys are solved one by one (`direct`).

With bfloat16 keys the direction is rounded before use and is then the direction: its image is exact but for the
weights, which are split in two terms. Vectors that a sweep does not need lie in memory meanwhile.

Legend: as in `math`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..runtime.blocks import FAR, LENGTHS, load_block, load_span, seen
from ..runtime.launch import launch
from ..runtime.span import Span
from ..runtime.tiles import Tiles, TileTable
from .direct import TILES as DIRECT
from .direct import solve_few
from .math import (
    block_width,
    load_tile,
    multiplied,
    number_or_rows,
    opened,
    plan,
    product,
    row_factor,
    row_ridge,
    sweep,
    weights,
)
from .steps import AWAY, ROW, TERMS, TILE, D, begin, finish, follow

CHIP = 64
"""Keys of a tile; four tiles stay on the chip with their weights."""
RESTARTS = tl.constexpr(3)
"""How often a row restarts if its true residual is still too large."""


class Rule(NamedTuple):
    """How systems are solved: relative residual, most steps of a row, whether rows with few keys are solved directly,
    and whether true residuals are computed instead of those that the steps carry along."""

    tol: float
    limit: int
    direct: bool
    verify: bool


TILES = TileTable.by_width(
    "local_linear_solve",
    [(64, 32, 4, 2), (64, 32, 4, 2), (64, 32, 8, 2)],
    [(32, 32, 4, 1), (32, 16, 8, 2), (16, 16, 8, 1)],
)


@triton.jit
def _terms(
    q, c, lse, low, high, k_ptr, k_stride, mask_ptr, keys, start, tiles,
    ROWS: tl.constexpr, KEYS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Return sum_j p_ij |k_j|^2, the size of what a product with C sums."""
    found = tl.zeros((ROWS,), tl.float32)
    for n in range(tiles):
        at = start + n * KEYS
        k = load_block(k_ptr, at, k_stride, keys, KEYS, WIDTH, BLOCK)
        p = tl.where(seen(at + tl.arange(0, KEYS), low, high, mask_ptr, keys, MASKED), weights(q, k, c, lse), 0.0)
        kf = k.to(tl.float32)
        found += tl.sum(p * tl.sum(kf * kf, 1)[None, :], 1)
    return found


@triton.jit
def _fits(low_ptr, high_ptr, rows, queries, most):
    """Return whether these rows see no more than `most` keys."""
    low, high = load_span(low_ptr, high_ptr, rows, rows < queries)
    some = high > low
    return tl.max(tl.where(some, high, 0), 0) - tl.min(tl.where(some, low, FAR), 0) <= most


@triton.jit
def _held_tile(
    at, k_ptr, k_row, keys, q, c, lse, low, high, mask_ptr,
    KEYS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Return keys and their weights."""
    k = load_block(k_ptr, at, k_row, keys, KEYS, WIDTH, BLOCK)
    return k, tl.where(seen(at + tl.arange(0, KEYS), low, high, mask_ptr, keys, MASKED), weights(q, k, c, lse), 0.0)


@triton.jit
def _held_tiles(
    start, k_ptr, k_row, keys, q, c, lse, low, high, mask_ptr,
    KEYS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Return four such tiles."""
    k0, p0 = _held_tile(start, k_ptr, k_row, keys, q, c, lse, low, high, mask_ptr, KEYS, WIDTH, BLOCK, MASKED)
    start += KEYS
    k1, p1 = _held_tile(start, k_ptr, k_row, keys, q, c, lse, low, high, mask_ptr, KEYS, WIDTH, BLOCK, MASKED)
    start += KEYS
    k2, p2 = _held_tile(start, k_ptr, k_row, keys, q, c, lse, low, high, mask_ptr, KEYS, WIDTH, BLOCK, MASKED)
    start += KEYS
    k3, p3 = _held_tile(start, k_ptr, k_row, keys, q, c, lse, low, high, mask_ptr, KEYS, WIDTH, BLOCK, MASKED)
    return k0, p0, k1, p1, k2, p2, k3, p3


@triton.jit
def _held_sweep(d, away, held, total, SPLIT: tl.constexpr):
    """Do `sweep` for four tiles that are held."""
    k0, p0, k1, p1, k2, p2, k3, p3 = held
    total, w0 = multiplied(p0 * (product(d, tl.trans(k0)) - away[:, None]), k0, total, SPLIT)
    total, w1 = multiplied(p1 * (product(d, tl.trans(k1)) - away[:, None]), k1, total, SPLIT)
    total, w2 = multiplied(p2 * (product(d, tl.trans(k2)) - away[:, None]), k2, total, SPLIT)
    total, w3 = multiplied(p3 * (product(d, tl.trans(k3)) - away[:, None]), k3, total, SPLIT)
    return total, tl.sum(w0 + w1 + w2 + w3, 1)


@triton.jit(do_not_specialize=LENGTHS)
def _solve(
    right_ptr, q_ptr, k_ptr, lse_ptr, mean_ptr, factor_ptr, factor, ridge_ptr, ridge_number, low_ptr, high_ptr,
    mask_ptr, value_ptr, scratch, statistics_ptr, status_ptr, tol, limit, heads, group, queries, keys,
    q_batch, q_head, q_row, k_batch, k_head, k_row, span_batch, mask_batch, mask_head,
    ROWS: tl.constexpr, KEYS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr,
    CHIP: tl.constexpr, FEW: tl.constexpr, GIVEN: tl.constexpr, RIDGE: tl.constexpr, MASKED: tl.constexpr,
    SPLIT: tl.constexpr, VERIFY: tl.constexpr, HELD: tl.constexpr,
):  # fmt: skip
    """Solve a block of rows. HELD serves blocks of GROUP rows whose keys, at most 4 CHIP, stay on the chip; else the
    others."""
    head, batch, own, first, rows, low, high, mask_ptr = opened(
        low_ptr, high_ptr, mask_ptr, heads, queries, span_batch, mask_batch, mask_head, ROWS
    )
    start, tiles, left, full = plan(low, high, KEYS, MASKED)
    low_ptr += batch * span_batch
    high_ptr += batch * span_batch
    if CHIP > 0:
        around = first // GROUP * GROUP + tl.arange(0, GROUP)
        if _fits(low_ptr, high_ptr, around, queries, 4 * CHIP) != HELD:
            return
    at, c = head * queries, row_factor(factor_ptr + head * queries, factor, rows, queries, GIVEN)
    scratch += (head * tl.num_programs(0) + first // ROWS) * (ROWS * (TILE * BLOCK + ROW))
    k_ptr += batch * k_batch + (own // group) * k_head
    right_ptr += at * WIDTH
    ridge_ptr += at * RIDGE
    running = begin(
        scratch, right_ptr, mean_ptr + at * WIDTH, low_ptr, high_ptr, first, queries, tol, limit,
        ROWS, WIDTH, BLOCK, FEW, SPLIT,
    )  # fmt: skip
    tl.debug_barrier()
    q = load_block(q_ptr + batch * q_batch + own * q_head, first, q_row, queries, ROWS, WIDTH, BLOCK)
    lse = tl.load(lse_ptr + at + rows, mask=rows < queries, other=float("inf"))
    phase, again, numbers = 0, RESTARTS, scratch + ROWS * (TILE * BLOCK) + tl.arange(0, ROWS)
    if VERIFY:
        terms = _terms(
            q, c, lse, low, high, k_ptr, k_row, mask_ptr, keys, start, tiles, ROWS, KEYS, WIDTH, BLOCK, MASKED
        )
        ridge = row_ridge(ridge_ptr, ridge_number, first, queries, ROWS, WIDTH, BLOCK, RIDGE)
        tl.store(numbers + ROWS * TERMS, terms + tl.max(ridge, 1))
    if HELD:
        held = _held_tiles(start, k_ptr, k_row, keys, q, c, lse, low, high, mask_ptr, KEYS, WIDTH, BLOCK, MASKED)
    while running > 0:
        d = load_tile(scratch + D * (ROWS * BLOCK), ROWS, BLOCK).to(k_ptr.dtype.element_ty)
        away = tl.load(numbers + ROWS * AWAY)
        if HELD:
            total, used = _held_sweep(d, away, held, tl.zeros((ROWS, BLOCK), tl.float32), SPLIT)
        else:
            total, used = sweep(
                d, away, q, c, lse, low, high, k_ptr, k_row, mask_ptr, keys, start, tiles, left, full,
                ROWS, KEYS, WIDTH, BLOCK, MASKED, SPLIT,
            )  # fmt: skip
        running, phase, again = follow(
            total, used, phase, again, scratch, right_ptr, ridge_ptr, ridge_number, first, queries, limit,
            ROWS, WIDTH, BLOCK, RIDGE, SPLIT, VERIFY,
        )  # fmt: skip
    finish(
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
        factor: factor of the scores, a number or float32 [B, H, Tq].
        ridge: a number or float32 [B, H, Tq, 1 or D].
        lse: [B, H, Tq], float32: log-sum-exp of the scores in base 2, inf for a row without a key.
        mean: means of the keys [B, H, Tq, D], float32, contiguous.

    Returns:
        t [B, H, Tq, D], float32; (steps, relative residual) [B, H, Tq, 2]; `SolveStatus` [B, H, Tq], int32.

    Cost: 8 D a pair and step with keys in bfloat16, 6 D in float32; true residuals take at least one more step.
    """
    value = torch.empty_like(right)
    statistics = right.new_empty(*right.shape[:3], 2)
    status = torch.empty(right.shape[:3], dtype=torch.int32, device=right.device)
    tiles, alone = TILES.pick(right.shape[-1], y.dtype), DIRECT.pick(right.shape[-1], y.dtype)
    few = alone.keys if rule.direct else 0
    rows = triton.cdiv(right.shape[2], tiles.rows) * tiles.rows
    scratch = right.new_empty(right.shape[0] * right.shape[1], rows, 5 * block_width(right.shape[-1]) + 10)
    tensors = (right, x, y, lse, mean)
    outputs = (value, scratch, statistics, status)
    for held in (False, True):
        _launch(tensors, factor, ridge, span, outputs, rule, tiles, few, held)
    if few:
        solve_few(right, x, y, factor, ridge, lse, span, (value, statistics, status), alone)
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
    if (held and not chip) or (chip and not held and keys <= 4 * chip):
        return
    launch(
        _solve,
        (triton.cdiv(queries, tiles.rows), batch * heads),
        right, x, y, lse, mean, *number_or_rows(factor, lse), *number_or_rows(ridge, lse), *span.pointers,
        *outputs, rule.tol, rule.limit,
        heads, heads // max(1, y.shape[1]), queries, keys,
        *x.stride()[:3], *y.stride()[:3], *span.steps,
        tiles=tiles, ROWS=tiles.rows, KEYS=tiles.keys, WIDTH=width, BLOCK=block_width(width), GROUP=whole, CHIP=chip,
        FEW=few, GIVEN=isinstance(factor, Tensor), RIDGE=ridge.shape[-1] if isinstance(ridge, Tensor) else 0,
        MASKED=span.mask is not None, SPLIT=y.dtype == torch.bfloat16, VERIFY=rule.verify, HELD=held,
    )  # fmt: skip
