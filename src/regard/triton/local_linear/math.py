"""What the kernels of local linear attention share.

Keys are not shifted to an origin. Every product with keys is corrected by the mean of its own row, with the operand as
it was rounded, so that keys far from 0 lose no precision and other rows have no influence:

    (k_j - mean_i) . d_i            = k_j . round(d_i) - mean_i . round(d_i)
    sum_j w_ij (k_j - mean_i)       = sum_j round(w_ij) k_j - (sum_j round(w_ij)) mean_i

Scores are in base 2: p_ij = 2^(c_i q_i . k_j - lse_i), c = factor log2(e).

Legend: R = FORM.own rows of a program, K = FORM.tile keys of a tile; W = FORM.wide columns that hold D features. A
matrix is (pointer, strides of batch, head and row), within a head (pointer, stride). A factor or ridge is (pointer,
number), and the pointer is read if each row has its own.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ..runtime.blocks import block_of, count_of, load_block, load_span, parts, row_scale, seen, tiles_of

LOG2E = tl.constexpr(1.4426950408889634)
EDGES = tl.constexpr(1)
"""Pipeline stages of the short loops over boundary tiles."""


@triton.jit
def of_head(matrix, batch, head):
    """Return the matrix of one head."""
    return matrix[0] + batch * matrix[1] + head * matrix[2], matrix[3]


@triton.jit
def own_rows(pointer, first, queries, FORM: tl.constexpr):
    """Load this block's rows [R, W] of contiguous vectors [Tq, D]."""
    return load_block(pointer, first, FORM.dim, queries, FORM.own, FORM.dim, FORM.wide)


@triton.jit
def row_factor(factor_ptr, number, rows, count, GIVEN: tl.constexpr):
    """Return c [ROWS]: the factor of the scores in base 2, one number or one a row."""
    return row_scale(factor_ptr, number, rows, rows < count, GIVEN) * LOG2E


@triton.jit
def row_ridge(ridge, first, count, ROWS: tl.constexpr, FORM: tl.constexpr):
    """Return the ridge of each row [ROWS, W or 1]."""
    if FORM.ridge == 0:
        return tl.zeros((ROWS, 1), tl.float32) + ridge[1]
    elif FORM.ridge == 1:
        rows = first + tl.arange(0, ROWS)
        return tl.load(ridge[0] + rows, mask=rows < count, other=0.0)[:, None]
    else:
        return load_block(ridge[0], first, FORM.dim, count, ROWS, FORM.dim, FORM.wide)


@triton.jit
def product(a, b):
    """Return a b with a float32 sum; float32 operands are not rounded."""
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def times(w, k, total, used, SPLIT: tl.constexpr):
    """Return (total + w k, used + row sums of w as it was multiplied): w in two terms if SPLIT, else rounded once."""
    hi, lo = parts(w, k, SPLIT)
    total = tl.dot(hi, k, total, input_precision="ieee")
    own = hi.to(tl.float32)
    if SPLIT:
        total = tl.dot(lo, k, total, input_precision="ieee")
        own += lo.to(tl.float32)
    return total, used + tl.sum(own, 1)


@triton.jit
def opened(matrices, factor, span, steps, sizes, FORM: tl.constexpr):
    """Return what kernels by rows begin with: (number of the head's first row among all, (batch, head), first row, rows
    [R], (their ranges of keys, the mask, how many keys there are), the tiles they see, queries [R, W], c [R], keys and
    values of the head)."""
    heads, group, queries, keys = sizes
    block = tl.num_programs(0) - 1 - tl.program_id(0)  # in causal order the last rows see most, and begin first
    head = tl.program_id(1).to(tl.int64)
    batch, own, at = head // heads, head % heads, head * queries
    first, rows = block * FORM.own, block * FORM.own + tl.arange(0, FORM.own)
    low, high = load_span(span[0] + batch * steps[0], span[1] + batch * steps[0], rows, rows < queries)
    sight = low, high, span[2] + batch * steps[1] + own * steps[2], keys
    q_at = of_head(matrices[0], batch, own)
    q = load_block(q_at[0], first, q_at[1], queries, FORM.own, FORM.dim, FORM.wide)
    c = row_factor(factor[0] + at, factor[1], rows, queries, FORM.factors)
    kv = of_head(matrices[1], batch, own // group), of_head(matrices[2], batch, own // group)
    return at, (batch, own), first, rows, sight, tiles_of(low, high, FORM.tile, FORM.masked), q, c, kv


@triton.jit
def norm_scale(x):
    """Return the power of two at or below the largest number of each row of x, 1 if all are 0. Dividing by it rounds
    nothing and keeps squares in range."""
    bits = tl.max(tl.abs(x), 1).to(tl.int32, bitcast=True) & 0x7F800000
    return tl.where(bits > 0, bits, 0x3F800000).to(tl.float32, bitcast=True)


@triton.jit
def weighted_tile(q, c, lse, sight, k_at, tile, EDGE: tl.constexpr, FORM: tl.constexpr):
    """Return one tile of keys [K, W] and its weights p [R, K]; with EDGE, 0 for hidden pairs."""
    first = tile * FORM.tile
    k = load_block(k_at[0], first, k_at[1], sight[3], FORM.tile, FORM.dim, FORM.wide, EDGE)
    if EDGE:
        visible = seen(first + tl.arange(0, FORM.tile), sight[0], sight[1], sight[2], sight[3], FORM.masked)
    p = tl.exp2(product(q, tl.trans(k)) * c[:, None] - lse[:, None])
    if EDGE:
        p = tl.where(visible, p, 0.0)
    return k, p


@triton.jit
def sweep(d, away, q, c, lse, sight, k_at, run, FORM: tl.constexpr):
    """Return (sum_j w_ij k_j, sum_j w_ij) with w_ij = p_ij (k_j - mean_i) . d_i, for d [R, W] in the dtype of the keys
    and away = mean . d. The covariance times d is the first minus the second times the mean."""
    total = tl.full((FORM.own, FORM.wide), 0.0, tl.float32)
    used = tl.full((FORM.own,), 0.0, tl.float32)
    for n in tl.range(0, count_of(run, True), num_stages=EDGES):
        k, p = weighted_tile(q, c, lse, sight, k_at, block_of(run, n, True), True, FORM)
        total, used = times(p * (product(d, tl.trans(k)) - away[:, None]), k, total, used, FORM.fine)
    if not FORM.masked:
        for n in range(count_of(run, False)):
            k, p = weighted_tile(q, c, lse, sight, k_at, block_of(run, n, False), False, FORM)
            total, used = times(p * (product(d, tl.trans(k)) - away[:, None]), k, total, used, FORM.fine)
    return total, used


# On the host --------------------------------------------------------------------------------------------------


def ridge_width(ridge: float | Tensor | None) -> int:
    """Return `Form.ridge`."""
    return ridge.shape[-1] if isinstance(ridge, Tensor) else 0
