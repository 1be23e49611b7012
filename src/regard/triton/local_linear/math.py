"""What the kernels of local linear attention share, forward, backward and decoding.

No key is moved to an origin: every product with keys is compensated by the mean of its own row, with the very operand
that was rounded, so that keys far from 0 cost nothing and nothing of other rows enters:

    (k_j - mean_i) . d_i            = k_j . round(d_i) - mean_i . round(d_i)
    sum_j w_ij (k_j - mean_i)       = sum_j round(w_ij) k_j - (sum_j round(w_ij)) mean_i

Scores are in base 2: p_ij = 2^(c_i q_i . k_j - lse_i), c = factor log2(e).

Legend: ROWS queries and KEYS keys of a tile; WIDTH features in blocks of BLOCK, the next power of two.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ..runtime.blocks import FAR, load_block, row_scale, seen

LOG2E = tl.constexpr(1.4426950408889634)
EDGES = tl.constexpr(1)
"""Stages of the loops over boundary tiles, which are short."""


@triton.jit
def load_tile(ptr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """A whole tile [ROWS, BLOCK] of scratch memory."""
    return tl.load(ptr + tl.arange(0, ROWS)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :])


@triton.jit
def store_tile(ptr, value, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """The counterpart of `load_tile`."""
    tl.store(ptr + tl.arange(0, ROWS)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :], value)


@triton.jit
def plan(low, high, KEYS: tl.constexpr, MASKED: tl.constexpr):
    """The tiles of keys that a block of rows visits: (start, tiles, left, full). Tile i begins at start + i KEYS; every
    row that sees a key at all sees all keys of the `full` tiles from `left` on. Of the others (`edge_tile`) and, where
    a mask hides keys, of all, pairs must be looked at."""
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
    """Which tile the n-th is of those that are not full."""
    return tl.where(n < left, n, n + full)


@triton.jit
def row_factor(factor_ptr, number, rows, count, GIVEN: tl.constexpr):
    """c [ROWS]: the factor of the scores, a number or one a row, in base 2."""
    return row_scale(factor_ptr, number, rows, rows < count, GIVEN) * LOG2E


@triton.jit
def row_ridge(
    ridge_ptr, number, first, count, ROWS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, RIDGE: tl.constexpr
):
    """The ridge of each row [ROWS, BLOCK or 1]: RIDGE is its width in memory, WIDTH or 1, or 0 where it is a number."""
    if RIDGE == 0:
        return tl.zeros((ROWS, 1), tl.float32) + number
    elif RIDGE == 1:
        rows = first + tl.arange(0, ROWS)
        return tl.load(ridge_ptr + rows, mask=rows < count, other=0.0)[:, None]
    else:
        return load_block(ridge_ptr, first, WIDTH, count, ROWS, WIDTH, BLOCK)


@triton.jit
def product(a, b):
    """a b with a float32 sum; float32 operands are not rounded."""
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def weights(q, k, c, lse):
    """p [ROWS, KEYS], of hidden keys too."""
    return tl.exp2(product(q, tl.trans(k)) * c[:, None] - lse[:, None])


@triton.jit
def parts(x, like, SPLIT: tl.constexpr):
    """(hi, lo) in the dtype of `like`, which add up to x but for 2^-17 of it; without SPLIT x itself twice."""
    hi = x.to(like.dtype)
    if SPLIT:
        return hi, (x - hi.to(tl.float32)).to(like.dtype)
    else:
        return hi, hi


@triton.jit
def multiplied(w, k, total, SPLIT: tl.constexpr):
    """(total + w k, w as it was multiplied, in float32): w in two terms where SPLIT, else rounded once."""
    hi, lo = parts(w, k, SPLIT)
    total = tl.dot(hi, k, total, input_precision="ieee")
    own = hi.to(tl.float32)
    if SPLIT:
        total = tl.dot(lo, k, total, input_precision="ieee")
        own += lo.to(tl.float32)
    return total, own


@triton.jit
def times(w, k, total, used, SPLIT: tl.constexpr):
    """(total + w k, used + row sums of w as it was `multiplied`)."""
    total, own = multiplied(w, k, total, SPLIT)
    return total, used + tl.sum(own, 1)


@triton.jit
def norm_scale(x):
    """The power of two at or below the largest number of each row of x, 1 where all are 0: dividing by it rounds
    nothing, and squares stay in range."""
    bits = tl.max(tl.abs(x), 1).to(tl.int32, bitcast=True) & 0x7F800000
    return tl.where(bits > 0, bits, 0x3F800000).to(tl.float32, bitcast=True)


@triton.jit
def apply_tile(d, away, q, k, c, lse, total, used, visible, SPLIT: tl.constexpr, EDGE: tl.constexpr):
    """One tile of sum_j p_ij ((k_j - mean_i) . d_i) k_j, for d as it is multiplied and away = mean . d."""
    p = weights(q, k, c, lse)
    if EDGE:
        p = tl.where(visible, p, 0.0)
    w = p * (product(d, tl.trans(k)) - away[:, None])
    return times(w, k, total, used, SPLIT)


@triton.jit
def sweep(
    d,
    away,
    q,
    c,
    lse,
    low,
    high,
    k_ptr,
    k_stride,
    mask_ptr,
    keys,
    start,
    tiles,
    left,
    full,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    MASKED: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """The covariance of each row times its d: (sum_j w_ij k_j, sum_j w_ij) with w_ij = p_ij (k_j - mean_i) . d_i, of
    which the second times the mean is to be taken off. `d` [ROWS, BLOCK] in the dtype of the keys."""
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
    """The block that holds so many features."""
    return max(16, triton.next_power_of_2(width))


def number_or_rows(x: float | Tensor, unread: Tensor) -> tuple[Tensor, float]:
    """A number, or a float32 tensor of rows, as kernels take it: a pointer (to `unread` for want of one), a number."""
    return (x.contiguous(), 0.0) if isinstance(x, Tensor) else (unread, float(x))


def mask_strides(mask: Tensor | None) -> tuple[int, int]:
    """Steps from one sequence, and from one head, to the next."""
    if mask is None:
        return 0, 0
    return mask.stride(0) if mask.shape[0] > 1 else 0, mask.stride(1) if mask.shape[1] > 1 else 0
