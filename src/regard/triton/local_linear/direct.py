"""Direct solution of rows that see few keys, one row at a time.

With a_j = sqrt(p_j) (k_j - mean) for the n keys of a row, the push-through identity turns D equations into n:

    (A^T A + ridge)^-1 b = ridge^-1 (b - A^T z),   (1 + A ridge^-1 A^T) z = A ridge^-1 b,   A = [a_1 ... a_n]^T

The second matrix has no eigenvalue below 1, however small the ridge and however few the keys, which is where conjugate
gradients take the most steps and lose the most to rounding. Arithmetic is float64: a small ridge makes t long, mostly
outside the span of the keys, and only the rest matters. The reported residual is |b - A t| / |b| of the returned
float32 t, as for all other rows; rounding a long t may make it large.

Legend: as in `math`; FORM.own rows of a program, one after another; KEYS = FORM.tile keys of a row at most.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ...grammar import SolveStatus
from ..runtime.blocks import LENGTHS, load_span, store_numbers
from ..runtime.call import Call, number_or_rows
from ..runtime.launch import launch
from ..runtime.tiles import Tiles, TileTable
from .math import LOG2E, of_head, ridge_width

TILES = TileTable("local_linear_direct", {(256, 4): Tiles(rows=4, keys=32, warps=2, stages=1)})
LEAST = tl.constexpr(1e-30)
"""Smaller ridges are raised to this."""
RAISED = tl.constexpr(int(SolveStatus.JITTER))


@triton.jit
def _inverse(matrix, KEYS: tl.constexpr):
    """Return the inverse of a positive definite matrix [KEYS, KEYS], by Gauss-Jordan elimination in place."""
    at = tl.arange(0, KEYS)
    for j in range(KEYS):
        here = at == j
        row = tl.sum(tl.where(here[:, None], matrix, 0.0), 0)
        column = tl.sum(tl.where(here[None, :], matrix, 0.0), 1)
        pivot = tl.sum(tl.where(here, row, 0.0), 0)
        row = tl.where(here, 1.0, row) / pivot
        rest = tl.where(here[None, :], 0.0, matrix) - column[:, None] * row[None, :]
        matrix = tl.where(here[:, None], row[None, :], rest)
    return matrix


@triton.jit
def _away(k_ptr, k_row, at, there, p, root, d):
    """Return feature d of the a_j [KEYS] in float64, centred at the mean of these very weights."""
    k = tl.load(k_ptr + at * k_row + d, mask=there, other=0.0).to(tl.float32).to(tl.float64)
    return root * (k - tl.sum(p * k, 0))


@triton.jit
def _ridge(ridge, row, d, FORM: tl.constexpr):
    """Return the ridge of one feature of a row, float32."""
    if FORM.ridge == 0:
        return ridge[1]
    elif FORM.ridge == 1:
        return tl.load(ridge[0] + row)
    else:
        return tl.load(ridge[0] + row * FORM.dim + d)


@triton.jit
def _one(row, low, high, right_ptr, q_at, k_at, lse_ptr, factor, ridge, mask_ptr, found, FORM: tl.constexpr):
    """Solve one row."""
    KEYS: tl.constexpr = FORM.tile
    value_ptr, statistics_ptr, status_ptr = found
    k_ptr, k_row = k_at
    row = tl.cast(row, tl.int64)
    at = low.to(tl.int64) + tl.arange(0, KEYS)
    there = at < high
    if FORM.masked:
        there &= tl.load(mask_ptr + at, mask=there, other=0) != 0
    z = tl.zeros((KEYS,), tl.float32)
    for d in range(FORM.dim):
        k = tl.load(k_ptr + at * k_row + d, mask=there, other=0.0).to(tl.float32)
        z += tl.load(q_at[0] + row * q_at[1] + d).to(tl.float32) * k
    c = (tl.load(factor[0] + row) if FORM.factors else factor[1]) * LOG2E
    p = tl.where(there, tl.exp2(z * c - tl.load(lse_ptr + row)), 0.0).to(tl.float64)
    mass = tl.sum(p, 0)
    p = p / tl.where(mass > 0, mass, 1.0)
    root = tl.sqrt(p)
    inner = tl.arange(0, KEYS)
    matrix = (inner[:, None] == inner[None, :]).to(tl.float64)
    h = tl.zeros((KEYS,), tl.float64)
    least = tl.full((), 1.0, tl.float32)
    for d in range(FORM.dim):
        own = _ridge(ridge, row, d, FORM)
        least = tl.minimum(least, own)
        a = _away(k_ptr, k_row, at, there, p, root, d)
        scaled = a / tl.maximum(own, LEAST).to(tl.float64)
        matrix += a[:, None] * scaled[None, :]
        h += scaled * tl.load(right_ptr + row * FORM.dim + d).to(tl.float64)
    z = tl.sum(_inverse(matrix, KEYS) * h[None, :], 1)
    slope = tl.zeros((KEYS,), tl.float64)
    for d in range(FORM.dim):
        own = tl.maximum(_ridge(ridge, row, d, FORM), LEAST).to(tl.float64)
        a = _away(k_ptr, k_row, at, there, p, root, d)
        value = ((tl.load(right_ptr + row * FORM.dim + d).to(tl.float64) - tl.sum(a * z, 0)) / own).to(tl.float32)
        tl.store(value_ptr + row * FORM.dim + d, value)
        slope += a * value.to(tl.float64)
    tl.debug_barrier()  # wait for values of other threads
    left, size = tl.full((), 0.0, tl.float64), tl.full((), 0.0, tl.float64)
    for d in range(FORM.dim):
        own = tl.maximum(_ridge(ridge, row, d, FORM), LEAST).to(tl.float64)
        a = _away(k_ptr, k_row, at, there, p, root, d)
        b = tl.load(right_ptr + row * FORM.dim + d).to(tl.float64)
        rest = b - tl.sum(a * slope, 0) - own * tl.load(value_ptr + row * FORM.dim + d).to(tl.float64)
        left += rest * rest
        size += b * b
    residual = tl.sqrt(left / tl.where(size > 0, size, 1.0)).to(tl.float32)
    store_numbers(statistics_ptr, row, (0.0, residual), None)
    tl.store(status_ptr + row, tl.where(least < LEAST, RAISED, 0))


@triton.jit(do_not_specialize=LENGTHS)
def _few(
    right_ptr, matrices, lse_ptr, factor, ridge, span, found, heads, group, queries,
    span_batch, mask_batch, mask_head, FORM: tl.constexpr,
):  # fmt: skip
    """Solve the rows of a program that see from 1 to KEYS keys."""
    KEYS: tl.constexpr = FORM.tile
    first = tl.program_id(0) * FORM.own
    head = tl.program_id(1).to(tl.int64)
    batch, own = head // heads, head % heads
    low_ptr, high_ptr = span[0] + batch * span_batch, span[1] + batch * span_batch
    rows = first + tl.arange(0, FORM.own)
    lows, highs = load_span(low_ptr, high_ptr, rows, rows < queries)
    if tl.max(((highs > lows) & (highs - lows <= KEYS)).to(tl.int32), 0) == 0:
        return
    at = head * queries
    outs = found[0] + at * FORM.dim, found[1] + at * 2, found[2] + at
    for n in range(FORM.own):
        row = first + n
        if row < queries:
            low, high = tl.load(low_ptr + row), tl.load(high_ptr + row)
            if (high > low) & (high - low <= KEYS):
                _one(
                    row, low, high, right_ptr + at * FORM.dim, of_head(matrices[0], batch, own),
                    of_head(matrices[1], batch, own // group), lse_ptr + at, (factor[0] + at, factor[1]),
                    (ridge[0] + at * FORM.ridge, ridge[1]), span[2] + batch * mask_batch + own * mask_head, outs, FORM,
                )  # fmt: skip


def solve_few(
    right: Tensor, call: Call, ridge: float | Tensor, lse: Tensor, found: tuple[Tensor, Tensor, Tensor], tiles: Tiles
) -> None:
    """Solve the rows that see from 1 to `tiles.keys` keys into `found`, the three tensors of `solve.solve`."""
    launch(
        _few, call.grid(tiles.rows), right, call.matrices[:2], lse, call.factor, number_or_rows(ridge, lse),
        call.span.pointers, found, *call.sizes[:3], *call.span.steps,
        tiles=tiles, FORM=call.fitted(tiles, ridge=ridge_width(ridge)),
    )  # fmt: skip
