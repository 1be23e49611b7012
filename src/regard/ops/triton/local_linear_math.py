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

LOG2E = tl.constexpr(1.4426950408889634)
EDGES = tl.constexpr(1)
"""Stages of the loops over boundary tiles, which are short."""
FAR = tl.constexpr(2**31 - 1)


@triton.jit
def _held(first, count, ROWS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Which numbers of a tile of rows there are."""
    held = (first + tl.arange(0, ROWS) < count)[:, None]
    return held & (tl.arange(0, BLOCK) < WIDTH)[None, :]


@triton.jit
def load_rows(ptr, first, stride, count, ROWS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Rows [ROWS, BLOCK] from `first` on of a matrix [count, WIDTH], 0 outside. Within the tile offsets are short, so
    that no loop holds a long one for every number; the host sees to it that they are."""
    at = tl.arange(0, ROWS)[:, None] * stride + tl.arange(0, BLOCK)[None, :]
    base = ptr + tl.cast(first, tl.int64) * stride
    return tl.load(base + at, mask=_held(first, count, ROWS, WIDTH, BLOCK), other=0.0)


@triton.jit
def store_rows(ptr, value, first, stride, count, ROWS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """The counterpart of `load_rows`, in the dtype of `ptr`."""
    at = tl.arange(0, ROWS)[:, None] * stride + tl.arange(0, BLOCK)[None, :]
    base = ptr + tl.cast(first, tl.int64) * stride
    tl.store(base + at, value.to(ptr.dtype.element_ty), mask=_held(first, count, ROWS, WIDTH, BLOCK))


@triton.jit
def load_tile(ptr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """A whole tile [ROWS, BLOCK] of scratch memory."""
    return tl.load(ptr + tl.arange(0, ROWS)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :])


@triton.jit
def store_tile(ptr, value, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """The counterpart of `load_tile`."""
    tl.store(ptr + tl.arange(0, ROWS)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :], value)


@triton.jit
def load_keys(
    ptr, first, stride, count, KEYS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, EDGE: tl.constexpr
):
    """Rows [KEYS, BLOCK] from `first` on; only at an EDGE may some lie beyond `count`: they are 0."""
    at, cols = tl.arange(0, KEYS), tl.arange(0, BLOCK)
    ptrs = ptr + tl.cast(first, tl.int64) * stride + (at[:, None] * stride + cols[None, :])
    if EDGE and WIDTH != BLOCK:
        return tl.load(ptrs, mask=(first + at < count)[:, None] & (cols[None, :] < WIDTH), other=0.0)
    elif EDGE:
        return tl.load(ptrs, mask=(first + at < count)[:, None], other=0.0)
    elif WIDTH != BLOCK:
        return tl.load(ptrs, mask=cols[None, :] < WIDTH, other=0.0)
    else:
        return tl.load(ptrs)


@triton.jit
def load_span(low_ptr, high_ptr, rows, count):
    """The range of keys [low, high) of each row, empty beyond the last."""
    low = tl.load(low_ptr + rows, mask=rows < count, other=0)
    high = tl.load(high_ptr + rows, mask=rows < count, other=0)
    return low, high


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
def seen(low, high, first, mask_ptr, count, KEYS: tl.constexpr, MASKED: tl.constexpr):
    """Which keys from `first` on each row sees, [ROWS, KEYS]."""
    at = first + tl.arange(0, KEYS)
    visible = (at[None, :] >= low[:, None]) & (at[None, :] < high[:, None])
    if MASKED:
        visible &= (tl.load(mask_ptr + at, mask=at < count, other=0) != 0)[None, :]
    return visible


@triton.jit
def row_factor(factor_ptr, number, rows, count, GIVEN: tl.constexpr):
    """c [ROWS]: the factor of the scores, a number or one a row, in base 2."""
    if GIVEN:
        return tl.load(factor_ptr + rows, mask=rows < count, other=0.0) * LOG2E
    else:
        return tl.zeros_like(rows).to(tl.float32) + number * LOG2E


@triton.jit
def row_ridge(
    ridge_ptr, number, first, count, ROWS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, RIDGE: tl.constexpr
):
    """The ridge of each row [ROWS, BLOCK or 1]: RIDGE is its width in memory, WIDTH or 1, or 0 where it is a number."""
    if RIDGE == 0:
        return tl.zeros((ROWS, 1), tl.float32) + number
    elif RIDGE == 1:
        rows = first + tl.arange(0, ROWS)
        return tl.load(ridge_ptr + rows, mask=rows < count, other=1.0)[:, None]
    else:
        at = tl.arange(0, ROWS)[:, None] * WIDTH + tl.arange(0, BLOCK)[None, :]
        base = ridge_ptr + tl.cast(first, tl.int64) * WIDTH
        return tl.load(base + at, mask=_held(first, count, ROWS, WIDTH, BLOCK), other=1.0)


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
def times(w, k, total, used, SPLIT: tl.constexpr):
    """(total + w k, used + row sums of w as it was multiplied): w in two terms where SPLIT, else rounded once."""
    hi, lo = parts(w, k, SPLIT)
    total = tl.dot(hi, k, total, input_precision="ieee")
    own = hi.to(tl.float32)
    if SPLIT:
        total = tl.dot(lo, k, total, input_precision="ieee")
        own += lo.to(tl.float32)
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
        k = load_keys(k_ptr, first, k_stride, keys, KEYS, WIDTH, BLOCK, True)
        visible = seen(low, high, first, mask_ptr, keys, KEYS, MASKED)
        total, used = apply_tile(d, away, q, k, c, lse, total, used, visible, SPLIT, True)
    if not MASKED:
        for n in range(left, left + full):
            k = load_keys(k_ptr, start + n * KEYS, k_stride, keys, KEYS, WIDTH, BLOCK, False)
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
