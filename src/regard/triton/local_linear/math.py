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

from ..runtime.blocks import FAR, load_block, load_span, parts, row_scale, seen

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
def plan(low, high, KEYS: tl.constexpr, MASKED: tl.constexpr):
    """Return the tiles of keys that a block of rows visits: (start, tiles, left, full). Tile i begins at start + i
    KEYS. Every row that sees any key sees all keys of the `full` tiles from `left` on; the others (`edge_tile`) and,
    with a mask, all need a look at pairs."""
    some = high > low
    stop = tl.max(tl.where(some, high, 0), 0)
    start = tl.minimum(tl.min(tl.where(some, low, FAR), 0), stop)
    tiles = (stop - start + KEYS - 1) // KEYS
    if MASKED:
        return start, tiles, tiles, 0 * tiles
    else:
        left = (tl.maximum(tl.max(tl.where(some, low, 0), 0), start) - start + KEYS - 1) // KEYS
        shared = tl.maximum(tl.min(tl.where(some, high, FAR), 0), start) - start
        full = tl.minimum(tl.maximum(shared // KEYS - left, 0), tiles)
        return start, tiles, tl.where(full > 0, left, tiles), full


@triton.jit
def edge_tile(n, left, full):
    """Return which tile is the n-th of those that are not full."""
    return tl.where(n < left, n, n + full)


@triton.jit
def tile_count(tiles, EDGE: tl.constexpr):
    """Return how many tiles need a look at pairs (EDGE), or how many do not."""
    return tiles[1] - tiles[3] if EDGE else tiles[3]


@triton.jit
def tile_at(n, tiles, EDGE: tl.constexpr, FORM: tl.constexpr):
    """Return the first key of the n-th of those tiles."""
    start, _, left, full = tiles
    return start + edge_tile(n, left, full) * FORM.tile if EDGE else start + (left + n) * FORM.tile


@triton.jit
def opened(span, heads, queries, span_batch, mask_batch, mask_head, FORM: tl.constexpr):
    """Return (head among all, batch, head, first row, rows [R], their ranges of keys and the mask) of a program."""
    block = tl.num_programs(0) - 1 - tl.program_id(0)  # in causal order the last rows see most, and begin first
    head = tl.program_id(1).to(tl.int64)
    batch, own = head // heads, head % heads
    rows = block * FORM.own + tl.arange(0, FORM.own)
    low, high = load_span(span[0] + batch * span_batch, span[1] + batch * span_batch, rows, rows < queries)
    sight = low, high, span[2] + batch * mask_batch + own * mask_head
    return head, batch, own, block * FORM.own, rows, sight


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
def norm_scale(x):
    """Return the power of two at or below the largest number of each row of x, 1 if all are 0. Dividing by it rounds
    nothing and keeps squares in range."""
    bits = tl.max(tl.abs(x), 1).to(tl.int32, bitcast=True) & 0x7F800000
    return tl.where(bits > 0, bits, 0x3F800000).to(tl.float32, bitcast=True)


@triton.jit
def weighted_tile(q, c, lse, sight, k_at, first, keys, EDGE: tl.constexpr, FORM: tl.constexpr):
    """Return one tile of keys [K, W] and its weights p [R, K]; with EDGE, 0 for hidden pairs."""
    k = load_block(k_at[0], first, k_at[1], keys, FORM.tile, FORM.dim, FORM.wide, EDGE)
    if EDGE:
        visible = seen(first + tl.arange(0, FORM.tile), sight[0], sight[1], sight[2], keys, FORM.masked)
    p = tl.exp2(product(q, tl.trans(k)) * c[:, None] - lse[:, None])
    if EDGE:
        p = tl.where(visible, p, 0.0)
    return k, p


@triton.jit
def sweep(d, away, q, c, lse, sight, k_at, keys, tiles, FORM: tl.constexpr):
    """Return (sum_j w_ij k_j, sum_j w_ij) with w_ij = p_ij (k_j - mean_i) . d_i, for d [R, W] in the dtype of the keys
    and away = mean . d. The covariance times d is the first minus the second times the mean."""
    start, count, left, full = tiles
    total = tl.full((FORM.own, FORM.wide), 0.0, tl.float32)
    used = tl.full((FORM.own,), 0.0, tl.float32)
    for n in tl.range(0, count - full, num_stages=EDGES):
        first = start + edge_tile(n, left, full) * FORM.tile
        k, p = weighted_tile(q, c, lse, sight, k_at, first, keys, True, FORM)
        total, used = times(p * (product(d, tl.trans(k)) - away[:, None]), k, total, used, FORM.fine)
    if not FORM.masked:
        for n in range(left, left + full):
            k, p = weighted_tile(q, c, lse, sight, k_at, start + n * FORM.tile, keys, False, FORM)
            total, used = times(p * (product(d, tl.trans(k)) - away[:, None]), k, total, used, FORM.fine)
    return total, used


# On the host --------------------------------------------------------------------------------------------------


def ridge_width(ridge: float | Tensor | None) -> int:
    """Return `Form.ridge`."""
    return ridge.shape[-1] if isinstance(ridge, Tensor) else 0
