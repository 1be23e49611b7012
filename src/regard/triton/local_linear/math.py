"""What the kernels of local linear attention share.

Keys are not shifted to an origin. Every product with keys is corrected by the mean of its own row, with the operand as
it was rounded, so that keys far from 0 lose no precision and other rows have no influence:

    (k_j - mean_i) . d_i            = k_j . round(d_i) - mean_i . round(d_i)
    sum_j w_ij (k_j - mean_i)       = sum_j round(w_ij) k_j - (sum_j round(w_ij)) mean_i

Scores are in base 2: p_ij = 2^(c_i q_i . k_j - lse_i), c = factor log2(e).

Legend: ROWS queries and KEYS keys of a tile; WIDTH features in blocks of BLOCK, the next power of two.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ..runtime.blocks import FAR, load_block, load_span, row_scale, seen

LOG2E = tl.constexpr(1.4426950408889634)
EDGES = tl.constexpr(1)
"""Pipeline stages of the short loops over boundary tiles."""


@triton.jit
def load_tile(ptr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Load a whole tile [ROWS, BLOCK] of scratch memory."""
    return tl.load(ptr + tl.arange(0, ROWS)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :])


@triton.jit
def store_tile(ptr, value, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Store what `load_tile` loads."""
    tl.store(ptr + tl.arange(0, ROWS)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :], value)


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
def tile_count(tiles, full, EDGE: tl.constexpr):
    """Return how many tiles need a look at pairs (EDGE), or how many do not."""
    return tiles - full if EDGE else full


@triton.jit
def tile_at(n, start, left, full, KEYS: tl.constexpr, EDGE: tl.constexpr):
    """Return the first key of the n-th of those tiles."""
    return start + edge_tile(n, left, full) * KEYS if EDGE else start + (left + n) * KEYS


@triton.jit
def opened(
    low_ptr, high_ptr, mask_ptr, heads, queries, span_batch, mask_batch, mask_head, ROWS: tl.constexpr
):  # fmt: skip
    """Return what a program serves: (head among all, batch, head, first row, rows, their ranges of keys, mask)."""
    block = tl.num_programs(0) - 1 - tl.program_id(0)  # in causal order the last rows see most, and begin first
    head = tl.program_id(1).to(tl.int64)
    batch, own = head // heads, head % heads
    rows = block * ROWS + tl.arange(0, ROWS)
    low, high = load_span(low_ptr + batch * span_batch, high_ptr + batch * span_batch, rows, rows < queries)
    return head, batch, own, block * ROWS, rows, low, high, mask_ptr + batch * mask_batch + own * mask_head


@triton.jit
def row_factor(factor_ptr, number, rows, count, GIVEN: tl.constexpr):
    """Return c [ROWS]: the factor of the scores in base 2, one number or one a row."""
    return row_scale(factor_ptr, number, rows, rows < count, GIVEN) * LOG2E


@triton.jit
def row_ridge(
    ridge_ptr, number, first, count, ROWS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, RIDGE: tl.constexpr
):
    """Return the ridge of each row [ROWS, BLOCK or 1]. RIDGE is its width in memory, WIDTH or 1, or 0 for a number."""
    if RIDGE == 0:
        return tl.zeros((ROWS, 1), tl.float32) + number
    elif RIDGE == 1:
        rows = first + tl.arange(0, ROWS)
        return tl.load(ridge_ptr + rows, mask=rows < count, other=0.0)[:, None]
    else:
        return load_block(ridge_ptr, first, WIDTH, count, ROWS, WIDTH, BLOCK)


@triton.jit
def product(a, b):
    """Return a b with a float32 sum; float32 operands are not rounded."""
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def weights(q, k, c, lse):
    """Return p [ROWS, KEYS], also of hidden keys."""
    return tl.exp2(product(q, tl.trans(k)) * c[:, None] - lse[:, None])


@triton.jit
def parts(x, like, SPLIT: tl.constexpr):
    """Return (hi, lo) in the dtype of `like` with the sum x within 2^-17 of it; without SPLIT the rounded x twice."""
    hi = x.to(like.dtype)
    if SPLIT:
        return hi, (x - hi.to(tl.float32)).to(like.dtype)
    else:
        return hi, hi


@triton.jit
def multiplied(w, k, total, SPLIT: tl.constexpr):
    """Return (total + w k, w as it was multiplied, in float32): w in two terms if SPLIT, else rounded once."""
    hi, lo = parts(w, k, SPLIT)
    total = tl.dot(hi, k, total, input_precision="ieee")
    own = hi.to(tl.float32)
    if SPLIT:
        total = tl.dot(lo, k, total, input_precision="ieee")
        own += lo.to(tl.float32)
    return total, own


@triton.jit
def times(w, k, total, used, SPLIT: tl.constexpr):
    """Return (total + w k, used + row sums of w as it was multiplied)."""
    total, own = multiplied(w, k, total, SPLIT)
    return total, used + tl.sum(own, 1)


@triton.jit
def norm_scale(x):
    """Return the power of two at or below the largest number of each row of x, 1 if all are 0. Dividing by it rounds
    nothing and keeps squares in range."""
    bits = tl.max(tl.abs(x), 1).to(tl.int32, bitcast=True) & 0x7F800000
    return tl.where(bits > 0, bits, 0x3F800000).to(tl.float32, bitcast=True)


@triton.jit
def apply_tile(d, away, q, k, c, lse, total, used, visible, SPLIT: tl.constexpr, EDGE: tl.constexpr):
    """Add one tile of sum_j p_ij ((k_j - mean_i) . d_i) k_j, for d as it is multiplied and away = mean . d."""
    p = weights(q, k, c, lse)
    if EDGE:
        p = tl.where(visible, p, 0.0)
    w = p * (product(d, tl.trans(k)) - away[:, None])
    return times(w, k, total, used, SPLIT)


@triton.jit
def sweep(
    d, away, q, c, lse, low, high, k_ptr, k_stride, mask_ptr, keys, start, tiles, left, full,
    ROWS: tl.constexpr, KEYS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, MASKED: tl.constexpr,
    SPLIT: tl.constexpr,
):  # fmt: skip
    """Return (sum_j w_ij k_j, sum_j w_ij) with w_ij = p_ij (k_j - mean_i) . d_i. The covariance times d is the first
    minus the second times the mean. `d` [ROWS, BLOCK] is in the dtype of the keys."""
    total = tl.zeros((ROWS, BLOCK), tl.float32)
    used = tl.zeros((ROWS,), tl.float32)
    for n in tl.range(0, tiles - full, num_stages=EDGES):
        first = start + edge_tile(n, left, full) * KEYS
        k = load_block(k_ptr, first, k_stride, keys, KEYS, WIDTH, BLOCK)
        visible = seen(first + tl.arange(0, KEYS), low, high, mask_ptr, keys, MASKED)
        total, used = apply_tile(d, away, q, k, c, lse, total, used, visible, SPLIT, True)
    if not MASKED:
        for n in range(left, left + full):
            k = load_block(k_ptr, start + n * KEYS, k_stride, keys, KEYS, WIDTH, BLOCK, False)
            total, used = apply_tile(d, away, q, k, c, lse, total, used, low, SPLIT, False)
    return total, used


# On the host --------------------------------------------------------------------------------------------------


def block_width(width: int) -> int:
    """Return the block that holds so many features."""
    return max(16, triton.next_power_of_2(width))


def number_or_rows(x: float | Tensor, unread: Tensor) -> tuple[Tensor, float]:
    """Return a number, or a float32 tensor of rows, as kernels take it: a pointer (`unread` if there is none) and a
    number."""
    return (x.contiguous(), 0.0) if isinstance(x, Tensor) else (unread, float(x))
