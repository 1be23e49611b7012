"""Rows that see few keys, solved one by one among these keys.

With a_j = sqrt(p_j) (k_j - mean) for the n keys of a row, the push-through identity turns D equations into n:

    (A^T A + ridge)^-1 b = ridge^-1 (b - A^T z),   (1 + A ridge^-1 A^T) z = A ridge^-1 b,   A = [a_1 ... a_n]^T

Its matrix has no eigenvalue below 1, however small the ridge and however few the keys, which is where conjugate
gradients take the most steps and lose the most to rounding.

Legend: as in `local_linear_math`; ROWS rows of a program, one after another; KEYS keys a row at most.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...grammar import SolveStatus
from .launch import launch
from .local_linear_math import (
    block_width,
    load_keys,
    load_span,
    mask_strides,
    number_or_rows,
    product,
    row_factor,
    row_ridge,
    seen,
)
from .span import Span, batch_stride
from .tiles import Tiles

TILES = {16: 1, 32: 2, 64: 4}
"""Warps of a program by the width up to which they are enough; 8 beyond."""
ROWS = 8
LEAST = tl.constexpr(1e-30)
"""A ridge below it is raised to it."""
RAISED = tl.constexpr(int(SolveStatus.JITTER))


@triton.jit
def _eliminate(matrix, z, KEYS: tl.constexpr):
    """matrix^-1 z for a positive definite matrix [KEYS, KEYS], by Gauss and Jordan."""
    at = tl.arange(0, KEYS)
    for j in range(KEYS):
        here = at == j
        row = tl.sum(tl.where(here[:, None], matrix, 0.0), 0)
        column = tl.sum(tl.where(here[None, :], matrix, 0.0), 1)
        pivot = tl.sum(tl.where(here, row, 0.0), 0)
        share = tl.where(here, 0.0, column / pivot)
        matrix -= share[:, None] * row[None, :]
        z -= share * tl.sum(tl.where(here, z, 0.0), 0)
    return z / tl.sum(tl.where(at[:, None] == at[None, :], matrix, 0.0), 1)


@triton.jit
def _one(
    row, low, high, right_ptr, q_ptr, k_ptr, lse_ptr, mean_ptr, factor_ptr, factor, ridge_ptr, ridge_number, mask_ptr,
    value_ptr, statistics_ptr, status_ptr, queries, keys, q_row, k_row,
    KEYS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, GIVEN: tl.constexpr, RIDGE: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Solve one row."""
    cols = tl.arange(0, BLOCK)
    held = cols < WIDTH
    at = tl.cast(row, tl.int64)
    q = tl.load(q_ptr + at * q_row + cols, mask=held, other=0.0).to(tl.float32)
    mean = tl.load(mean_ptr + at * WIDTH + cols, mask=held, other=0.0)
    right = tl.load(right_ptr + at * WIDTH + cols, mask=held, other=0.0)
    k = load_keys(k_ptr, low, k_row, keys, KEYS, WIDTH, BLOCK, True).to(tl.float32)
    rows = row + tl.arange(0, 1)
    c = row_factor(factor_ptr, factor, rows, queries, GIVEN)
    z = tl.sum(k * q[None, :], 1) * tl.sum(c, 0) - tl.load(lse_ptr + row)
    visible = seen(low + tl.zeros((1,), tl.int32), high + tl.zeros((1,), tl.int32), low, mask_ptr, keys, KEYS, MASKED)
    p = tl.where(tl.sum(visible.to(tl.int32), 0) > 0, tl.exp2(z), 0.0)
    a = tl.where(p[:, None] > 0, tl.sqrt(p)[:, None] * (k - mean[None, :]), 0.0)
    own = row_ridge(ridge_ptr, ridge_number, row, queries, 1, WIDTH, BLOCK, RIDGE)
    ridge = tl.maximum(own, LEAST)
    inner = tl.arange(0, KEYS)
    scaled = a / ridge
    matrix = product(scaled, tl.trans(a)) + (inner[:, None] == inner[None, :]).to(tl.float32)
    z = _eliminate(matrix, tl.sum(scaled * right[None, :], 1), KEYS)
    ridge = tl.sum(ridge + tl.zeros((1, BLOCK), tl.float32), 0)
    value = (right - tl.sum(a * z[:, None], 0)) / ridge
    left = right - tl.sum(a * tl.sum(a * value[None, :], 1)[:, None], 0) - ridge * value
    size = tl.sum(right * right, 0)
    residual = tl.where(size > 0, tl.sqrt(tl.sum(left * left, 0) / tl.where(size > 0, size, 1.0)), 0.0)
    least = tl.min(tl.where(held[None, :], own + tl.zeros((1, BLOCK), tl.float32), LEAST), 1)
    tl.store(value_ptr + at * WIDTH + cols, value, mask=held)
    tl.store(statistics_ptr + at * 2, 0.0)
    tl.store(statistics_ptr + at * 2 + 1, residual)
    tl.store(status_ptr + at, tl.where(tl.min(least, 0) < LEAST, RAISED, 0))


@triton.jit
def _few(
    right_ptr, q_ptr, k_ptr, lse_ptr, mean_ptr, factor_ptr, factor, ridge_ptr, ridge_number, low_ptr, high_ptr, mask_ptr,
    value_ptr, statistics_ptr, status_ptr, heads, group, queries, keys,
    q_batch, q_head, q_row, k_batch, k_head, k_row, span_batch, mask_batch, mask_head,
    ROWS: tl.constexpr, KEYS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, GIVEN: tl.constexpr,
    RIDGE: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """The rows among ROWS that see from 1 to KEYS keys."""
    first = tl.program_id(0) * ROWS
    head = tl.program_id(1).to(tl.int64)
    batch, own = head // heads, head % heads
    low_ptr += batch * span_batch
    high_ptr += batch * span_batch
    low, high = load_span(low_ptr, high_ptr, first + tl.arange(0, ROWS), queries)
    if tl.max(((high > low) & (high - low <= KEYS)).to(tl.int32), 0) == 0:
        return
    at = head * queries
    for n in range(ROWS):
        row = first + n
        if row < queries:
            low, high = tl.load(low_ptr + row), tl.load(high_ptr + row)
            if (high > low) & (high - low <= KEYS):
                _one(
                    row, low, high, right_ptr + at * WIDTH, q_ptr + batch * q_batch + own * q_head,
                    k_ptr + batch * k_batch + (own // group) * k_head, lse_ptr + at, mean_ptr + at * WIDTH,
                    factor_ptr + at, factor, ridge_ptr + at * RIDGE, ridge_number,
                    mask_ptr + batch * mask_batch + own * mask_head, value_ptr + at * WIDTH, statistics_ptr + at * 2,
                    status_ptr + at, queries, keys, q_row, k_row, KEYS, WIDTH, BLOCK, GIVEN, RIDGE, MASKED,
                )  # fmt: skip


def solve_few(
    right: Tensor,
    x: Tensor,
    y: Tensor,
    factor: float | Tensor,
    ridge: float | Tensor,
    lse: Tensor,
    mean: Tensor,
    span: Span,
    found: tuple[Tensor, Tensor, Tensor],
    most: int,
) -> None:
    """Solve, into `found` (as `local_linear_solve.solve` returns it), the rows that see from 1 to `most` keys."""
    batch, heads, queries, width = right.shape
    mask = span.mask
    warps = next((warps for widest, warps in TILES.items() if width <= widest), 8)
    launch(
        _few,
        (triton.cdiv(queries, ROWS), batch * heads),
        right, x, y, lse, mean, *number_or_rows(factor, lse), *number_or_rows(ridge, lse), span.low, span.high,
        span.low if mask is None else mask, *found, heads, heads // y.shape[1], queries, y.shape[2],
        *x.stride()[:3], *y.stride()[:3], batch_stride(span.low), *mask_strides(mask),
        tiles=Tiles(ROWS, most, warps, 1),
        ROWS=ROWS,
        KEYS=most,
        WIDTH=width,
        BLOCK=block_width(width),
        GIVEN=isinstance(factor, Tensor),
        RIDGE=ridge.shape[-1] if isinstance(ridge, Tensor) else 0,
        MASKED=mask is not None,
    )  # fmt: skip
