"""Shared code of the forward kernels of compact attention: rows, the key blocks they see, scores, row statistics.

Legend: R = FORM.own queries of a program, K = FORM.tile keys of a block; q: the program's queries [R, D]; k, v: (where
keys or values of the head lie, the step from one to the next, how many there are).
"""

import triton
import triton.language as tl

from ..runtime.blocks import load, load_rows, of_head, places_of, seen


@triton.jit
def place_of(queries, heads, FORM: tl.constexpr):
    """Return (head among all, block of rows, batch, head) of a program; the last rows, which see the most, first."""
    row_blocks = tl.cdiv(queries, FORM.own)
    head = tl.program_id(0) // row_blocks
    row_block = row_blocks - 1 - tl.program_id(0) % row_blocks
    return head, row_block, (head // heads).to(tl.int64), (head % heads).to(tl.int64)


@triton.jit
def own_rows(ids, queries, FORM: tl.constexpr):
    """Return (rows, which exist, their numbers among all heads); rows past the last repeat it and are not stored."""
    row = ids[1] * FORM.own + tl.arange(0, FORM.own)
    rows = tl.minimum(row, queries - 1)
    return rows, row < queries, ids[0].to(tl.int64) * queries + rows


@triton.jit
def row_number(ptr, flat, number, GIVEN: tl.constexpr, FORM: tl.constexpr):
    """Return the number of each of the rows `flat` [R], or the number of all."""
    return tl.load(ptr + flat) if GIVEN else tl.full((FORM.own,), 1.0, tl.float32) * number


@triton.jit
def opened(qkv, factor, visible, marks_ptr, sizes, FORM: tl.constexpr):
    """Return what all forward kernels begin with: (`place_of`, which rows exist, their numbers, sight: ranges of keys
    and the mask, scales: the factor in `key_scores` and the one that then makes scores (a number is applied last), q,
    k, v, where the marks of each row begin, key blocks: (first, full, partial, last), of which [first, last) hold all
    visible keys, and every row sees all of [full, partial), which is empty with a mask). A matrix is (pointer, strides
    of batch, head and row), a factor (pointer, number); `visible`: the ranges' ends, the mask, and their strides."""
    heads, group, queries, keys = sizes
    ids = place_of(queries, heads, FORM)
    rows, real, flat = own_rows(ids, queries, FORM)
    low, high, mask, range_batch, mask_batch, mask_head = visible
    low, high = low + ids[2] * range_batch, high + ids[2] * range_batch
    sight = tl.load(low + rows), tl.load(high + rows), mask + ids[2] * mask_batch + ids[3] * mask_head
    by = row_number(factor[0], flat, factor[1], FORM.factors, FORM)
    scales = by, tl.full((FORM.own,), 1.0, tl.float32) if FORM.factors else by
    at, stride = of_head(qkv[0], ids[2], ids[3])
    q = load_rows(at, rows, stride, None, FORM.dim, FORM.wide)
    k, v = of_head(qkv[1], ids[2], ids[3] // group), of_head(qkv[2], ids[2], ids[3] // group)
    mask_tile = tl.arange(0, FORM.own) // FORM.mask_tile
    marked = marks_of(marks_ptr, ids, queries, keys, FORM) + mask_tile.to(tl.int64) * tl.cdiv(keys, FORM.tile)
    first = tl.min(sight[0], 0) // FORM.tile
    last = tl.maximum(tl.cdiv(tl.max(sight[1], 0), FORM.tile), first)
    full = last
    partial = last
    if not FORM.masked:
        full = tl.minimum(tl.cdiv(tl.max(sight[0], 0), FORM.tile), last)
        partial = tl.maximum(tl.min(sight[1], 0) // FORM.tile, full)
    run = first, full, partial, last
    return ids, real, flat, sight, scales, q, (k[0], k[1], keys), (v[0], v[1], keys), marked, run


@triton.jit
def count_of(run, EDGE: tl.constexpr):
    """Return how many blocks of [first, full, partial, last) need masks (EDGE), or how many do not."""
    first, full, partial, last = run
    return full - first + last - partial if EDGE else partial - full


@triton.jit
def block_of(run, t, EDGE: tl.constexpr):
    """Return the t-th of these blocks from the last. Blocks near the diagonal have high scores; if they are visited
    first, fewer later blocks seem near enough. With EDGE, [first, full) follows [partial, last)."""
    first, _, partial, last = run
    if EDGE:
        return tl.where(t < last - partial, last - 1 - t, first + t - (last - partial))
    else:
        return partial - 1 - t


@triton.jit
def load_keys(of, block, DIM: tl.constexpr, WIDTH: tl.constexpr, EDGE: tl.constexpr, FORM: tl.constexpr):
    """Load a key block of k or v, [K, WIDTH]."""
    at, stride, keys = of
    first = block * FORM.tile
    held = tl.arange(0, FORM.tile) < keys - first
    return load(places_of(at, first, stride, FORM.tile, WIDTH, False), held, DIM, WIDTH, EDGE)


@triton.jit
def key_scores(q, k, block, factor, sight, EDGE: tl.constexpr, FORM: tl.constexpr):
    """Return (q.k of a key block [R, K], the numbers of its keys). Scores are multiplied with `factor` [R] if rows have
    their own, and with EDGE they are -inf for hidden pairs."""
    dot = tl.dot(q, tl.trans(load_keys(k, block, FORM.dim, FORM.wide, EDGE, FORM)), input_precision="ieee")
    columns = block * FORM.tile + tl.arange(0, FORM.tile)
    if FORM.factors:
        dot = dot * factor[:, None]
    if EDGE:
        dot = tl.where(seen(columns, sight[0], sight[1], sight[2], k[2], FORM.masked), dot, -float("inf"))
    return dot, columns


@triton.jit
def marks_of(marks_ptr, ids, queries, keys, FORM: tl.constexpr):
    """Return the position of the first mark of a program. A row of marks has one for each key block."""
    line = ids[0].to(tl.int64) * tl.cdiv(queries, FORM.mask_tile) + ids[1] * (FORM.own // FORM.mask_tile)
    return marks_ptr + line * tl.cdiv(keys, FORM.tile)


@triton.jit
def applied(acc, w, x):
    """Return (acc + w x [R, Dv], sums of the weights [R], weights [R, K]), both as rounded for the product, so that
    outputs of equal values are exact. A product with ones sums rounded weights, since converting them back is slow."""
    p = w.to(x.dtype)
    w = p.to(tl.float32)
    if x.dtype == tl.float32:  # noqa: SIM108 - known when the kernel is compiled
        part = tl.sum(w, 1)
    else:
        part = tl.max(tl.dot(p, tl.full((w.shape[1], 16), 1.0, x.dtype)), 1)
    return tl.dot(p, x, acc, input_precision="ieee"), part, w


@triton.jit
def counted(counts, w):
    """Add a block of weights [R, K] to (how many are not 0, sum of their squares)."""
    support, square = counts
    return support + tl.sum(tl.where(w > 0, 1.0, 0.0), 1), square + tl.sum(w * w, 1)
