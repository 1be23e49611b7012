"""Shared code of the kernels of local linear attention.

Keys are not shifted to an origin. Every product with keys is corrected by the mean of its own row, with the operand as
it was rounded, so that keys far from 0 lose no precision and other rows have no influence:

    (k_j - mean_i) . d_i            = k_j . round(d_i) - mean_i . round(d_i)
    sum_j w_ij (k_j - mean_i)       = sum_j round(w_ij) k_j - (sum_j round(w_ij)) mean_i

Scores are in base 2: p_ij = 2^(c_i q_i . k_j - lse_i), c = factor log2(e).

Legend: R = FORM.own rows of a program, K = FORM.tile keys of a tile; W = FORM.wide columns that hold D features. A
matrix is (pointer, strides of batch, head and row), within a head (pointer, stride). A factor or ridge is (pointer,
number), and the pointer is read if each row has its own.
"""

import triton
import triton.language as tl
from torch import Tensor

from ..runtime.blocks import FAR, load_block, load_span, of_head, rounded, row_scale, seen, store_block

LOG2E = tl.constexpr(1.4426950408889634)
EDGES = tl.constexpr(1)  # pipeline stages of the short loops over boundary tiles


@triton.jit
def rows_of(matrix, batch, head, first, count, DIM: tl.constexpr, WIDTH: tl.constexpr, FORM: tl.constexpr):
    """Load this block's rows [R, WIDTH] of one head of a matrix with DIM columns."""
    at, stride = of_head(matrix, batch, head)
    return load_block(at, first, stride, count, FORM.own, DIM, WIDTH)


@triton.jit
def own_rows(pointer, first, queries, FORM: tl.constexpr):
    """Load this block's rows [R, W] of contiguous vectors [Tq, D]."""
    return load_block(pointer, first, FORM.dim, queries, FORM.own, FORM.dim, FORM.wide)


@triton.jit
def put_rows(pointer, x, first, queries, FORM: tl.constexpr):
    """Store x [R, W] in them."""
    store_block(pointer, x, first, FORM.dim, queries, FORM.own, FORM.dim, FORM.wide)


@triton.jit
def plan(low, high, KEYS: tl.constexpr, MASKED: tl.constexpr):
    """Return the tiles of keys that a block of rows visits: (start, tiles, left, full). Tile i begins at start + i
    KEYS. Rows that see any key see all keys of the `full` tiles from `left` on; with a mask there are none."""
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
def tile_count(tiles, EDGE: tl.constexpr):
    """Return how many tiles need a check of every pair (EDGE), or how many do not."""
    return tiles[1] - tiles[3] if EDGE else tiles[3]


@triton.jit
def tile_at(n, tiles, EDGE: tl.constexpr, FORM: tl.constexpr):
    """Return the first key of the n-th of those tiles."""
    start, _, left, full = tiles
    return start + (tl.where(n < left, n, n + full) if EDGE else left + n) * FORM.tile


@triton.jit
def opened(matrices, factor, span, sizes, steps, FORM: tl.constexpr):
    """Return what kernels by blocks of rows begin with: number of the head's first row among all, batch, head, first
    row of the block, rows [R], sight (their ranges of keys and the mask), the tiles of their `plan`, q [R, W], c [R],
    and (keys, values) of the head. `steps`: strides of the ranges, and of the mask by sequence and head."""
    heads, group, queries = sizes
    block = tl.num_programs(0) - 1 - tl.program_id(0)  # in causal order the last rows see the most keys and start first
    head = tl.program_id(1).to(tl.int64)
    batch, h = head // heads, head % heads
    first = block * FORM.own
    rows = first + tl.arange(0, FORM.own)
    low, high = load_span(span[0] + batch * steps[0], span[1] + batch * steps[0], rows, rows < queries)
    sight = low, high, span[2] + batch * steps[1] + h * steps[2]
    q = rows_of(matrices[0], batch, h, first, queries, FORM.dim, FORM.wide, FORM)
    c = row_scale(factor[0] + head * queries, factor[1], rows, rows < queries, FORM.factors) * LOG2E
    kv = of_head(matrices[1], batch, h // group), of_head(matrices[2], batch, h // group)
    return head * queries, batch, h, first, rows, sight, plan(low, high, FORM.tile, FORM.masked), q, c, kv


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
    hi, sums = rounded(w, k)
    total = tl.dot(hi, k, total, input_precision="ieee")
    if SPLIT:
        lo, rest = rounded(w - sums, k)
        total = tl.dot(lo, k, total, input_precision="ieee")
        sums += rest
    return total, used + tl.sum(sums, 1)


@triton.jit
def norm_scale(x):
    """Return the power of two at or below each row's largest number, 1 if all are 0: dividing by it rounds nothing."""
    bits = tl.max(tl.abs(x), 1).to(tl.int32, bitcast=True) & 0x7F800000
    return tl.where(bits > 0, bits, 0x3F800000).to(tl.float32, bitcast=True)


@triton.jit
def key_tile(first, k_at, sight, keys, EDGE: tl.constexpr, FORM: tl.constexpr):
    """Return (keys [K, W], which of them each row sees) of the tile that begins at `first`; without EDGE, all are."""
    k, visible = load_block(k_at[0], first, k_at[1], keys, FORM.tile, FORM.dim, FORM.wide, EDGE), sight[0]
    if EDGE:
        visible = seen(first + tl.arange(0, FORM.tile), sight[0], sight[1], sight[2], keys, FORM.masked)
    return k, visible


@triton.jit
def pair_tile(n, tiles, kv, sight, keys, EDGE: tl.constexpr, FORM: tl.constexpr):
    """Return (keys, values, which of them each row sees) of the n-th tile."""
    first = tile_at(n, tiles, EDGE, FORM)
    k, visible = key_tile(first, kv[0], sight, keys, EDGE, FORM)
    v = load_block(kv[1][0], first, kv[1][1], keys, FORM.tile, FORM.value_dim, FORM.value_wide, EDGE)
    return k, v, visible


@triton.jit
def weights_of(q, k, c, lse, visible, EDGE: tl.constexpr):
    """Return the weights p [R, K] of a tile; with EDGE, 0 for hidden pairs."""
    p = tl.exp2(product(q, tl.trans(k)) * c[:, None] - lse[:, None])
    if EDGE:
        p = tl.where(visible, p, 0.0)
    return p


@triton.jit
def sweep(d, away, q, c, lse, sight, k_at, keys, tiles, FORM: tl.constexpr):
    """Return (sum_j w_ij k_j, sum_j w_ij) with w_ij = p_ij (k_j - mean_i) . d_i, for d [R, W] in the dtype of the keys
    and away = mean . d. The covariance times d is the first minus the second times the mean."""
    total, used = tl.full((FORM.own, FORM.wide), 0.0, tl.float32), tl.full((FORM.own,), 0.0, tl.float32)
    for side in tl.static_range(1 if FORM.masked else 2):  # with a mask no tile is full
        for n in tl.range(0, tile_count(tiles, side == 0), num_stages=EDGES if side == 0 else None):
            k, visible = key_tile(tile_at(n, tiles, side == 0, FORM), k_at, sight, keys, side == 0, FORM)
            p = weights_of(q, k, c, lse, visible, side == 0)
            total, used = times(p * (product(d, tl.trans(k)) - away[:, None]), k, total, used, FORM.fine)
    return total, used


def ridge_width(ridge: float | Tensor | None) -> int:
    """Return `Form.ridge`."""
    return ridge.shape[-1] if isinstance(ridge, Tensor) else 0
