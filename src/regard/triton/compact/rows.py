"""What the forward kernels of compact attention share: the rows of a program, the key blocks they see, the scores of a
block, and row statistics.

Legend: R = FORM.own queries of a program, K = FORM.tile keys of a block; q: the program's queries [R, D]; k, v: (where
keys or values of the head lie, the step from one to the next, how many there are).
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..runtime.blocks import load, load_rows, places_of, seen, tiles_of

# Rows -----------------------------------------------------------------------------------------------------------


@triton.jit
def place_of(queries, heads, FORM: tl.constexpr):
    """Return (head among all, block of rows, batch, head) of a program; last rows, which see most, first."""
    row_blocks = tl.cdiv(queries, FORM.own)
    head = tl.program_id(0) // row_blocks
    row_block = row_blocks - 1 - tl.program_id(0) % row_blocks
    return head, row_block, (head // heads).to(tl.int64), (head % heads).to(tl.int64)


@triton.jit
def own_rows(place, queries, FORM: tl.constexpr):
    """Return (rows, which exist, their numbers among all heads); rows past the last repeat it, not stored."""
    row = place[1] * FORM.own + tl.arange(0, FORM.own)
    rows = tl.minimum(row, queries - 1)
    return rows, row < queries, place[0].to(tl.int64) * queries + rows


@triton.jit
def sight_of(low_ptr, high_ptr, mask_ptr, place, rows, range_batch, mask_batch, mask_head):
    """Return (first key, end of keys, both [R], mask of the head) of what rows see."""
    _, _, batch, own = place
    low = tl.load(low_ptr + batch * range_batch + rows)
    high = tl.load(high_ptr + batch * range_batch + rows)
    return low, high, mask_ptr + batch * mask_batch + own * mask_head


@triton.jit
def row_number(ptr, flat, number, GIVEN: tl.constexpr, FORM: tl.constexpr):
    """Return the number of each of the rows `flat` [R], or the number of all."""
    return tl.load(ptr + flat) if GIVEN else tl.full((FORM.own,), 1.0, tl.float32) * number


@triton.jit
def factors(ptr, flat, scale, FORM: tl.constexpr):
    """Return (factor in `key_scores`, factor that then makes scores) [R]; a number is applied last."""
    given = row_number(ptr, flat, scale, FORM.factors, FORM)
    return given, tl.full((FORM.own,), 1.0, tl.float32) if FORM.factors else given


@triton.jit
def store_row(floats_ptr, flags_ptr, flat, real, top, theta, reach, mass, support, ess, empty, fallback):
    """Store the statistics of rows in the layout of `block_rows`, with status 0."""
    tl.store(floats_ptr + flat * 6, top, mask=real)
    tl.store(floats_ptr + flat * 6 + 1, theta, mask=real)
    tl.store(floats_ptr + flat * 6 + 2, reach, mask=real)
    tl.store(floats_ptr + flat * 6 + 3, mass, mask=real)
    tl.store(floats_ptr + flat * 6 + 4, support, mask=real)
    tl.store(floats_ptr + flat * 6 + 5, ess, mask=real)
    tl.store(flags_ptr + flat * 3, empty.to(tl.int32), mask=real)
    tl.store(flags_ptr + flat * 3 + 1, fallback.to(tl.int32), mask=real)
    tl.store(flags_ptr + flat * 3 + 2, tl.zeros_like(empty.to(tl.int32)), mask=real)


@triton.jit
def store_values(ptr, flat, x, stored, FORM: tl.constexpr):
    """Store x [R, Dv] in rows `flat` of a tensor like the output, where `stored`."""
    columns = tl.arange(0, FORM.value_wide)
    place = flat[:, None] * FORM.value_dim + columns[None, :]
    tl.store(ptr + place, x.to(ptr.dtype.element_ty), mask=stored[:, None] & (columns < FORM.value_dim)[None, :])


@triton.jit
def opened(matrices, factor, visible, marks_ptr, heads, group, queries, keys, FORM: tl.constexpr):
    """Return what all forward kernels begin with: (place, which rows exist, their numbers, sight, scales, q, k, v,
    marks of rows, key blocks). A matrix is (pointer, strides of batch, head and row), a factor (pointer, number);
    `visible` holds the ranges' ends, the mask, and their strides."""
    place = place_of(queries, heads, FORM)
    rows, real, flat = own_rows(place, queries, FORM)
    low, high, mask, range_batch, mask_batch, mask_head = visible
    sight = sight_of(low, high, mask, place, rows, range_batch, mask_batch, mask_head)
    scales = factors(factor[0], flat, factor[1], FORM)
    q, k, v = matrices
    q = load_rows(q[0] + place[2] * q[1] + place[3] * q[2], rows, q[3], FORM.dim, FORM.wide)
    k = k[0] + place[2] * k[1] + place[3] // group * k[2], k[3], keys
    v = v[0] + place[2] * v[1] + place[3] // group * v[2], v[3], keys
    marked = row_marks(marks_of(marks_ptr, place, queries, keys, FORM), keys, FORM)
    return place, real, flat, sight, scales, q, k, v, marked, tiles_of(sight[0], sight[1], FORM.tile, FORM.masked)


# Key blocks -----------------------------------------------------------------------------------------------------


@triton.jit
def load_keys(of, block, DIM: tl.constexpr, WIDTH: tl.constexpr, EDGE: tl.constexpr, FORM: tl.constexpr):
    """Load a key block of k or v, [K, WIDTH]."""
    at, stride, keys = of
    first = block * FORM.tile
    held = tl.arange(0, FORM.tile) < keys - first
    return load(places_of(at, first, stride, FORM.tile, WIDTH, FORM.far), held, DIM, WIDTH, EDGE)


@triton.jit
def load_values(v, block, EDGE: tl.constexpr, FORM: tl.constexpr):
    """Load the values of a key block, [K, Dv]."""
    return load_keys(v, block, FORM.value_dim, FORM.value_wide, EDGE, FORM)


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
def marks_of(marks_ptr, place, queries, keys, FORM: tl.constexpr):
    """Return where the first mark of a program lies. A row of marks has one for each key block."""
    line = place[0].to(tl.int64) * tl.cdiv(queries, FORM.mask_tile) + place[1] * (FORM.own // FORM.mask_tile)
    return marks_ptr + line * tl.cdiv(keys, FORM.tile)


@triton.jit
def row_marks(marks_at, keys, FORM: tl.constexpr):
    """Return where the marks of each row [R] begin."""
    mask_tile = tl.arange(0, FORM.own) // FORM.mask_tile
    return marks_at + mask_tile.to(tl.int64) * tl.cdiv(keys, FORM.tile)


@triton.jit
def applied(acc, w, x):
    """Return (acc + w x [R, Dv], sums of the weights [R], weights [R, K]), both as rounded for the product, so that
    outputs of equal values are exact."""
    p = w.to(x.dtype)
    w = p.to(tl.float32)
    return tl.dot(p, x, acc, input_precision="ieee"), tl.sum(w, 1), w


@triton.jit
def counted(counts, w):
    """Add a block of weights [R, K] to (how many are not 0, sum of their squares)."""
    support, square = counts
    return support + tl.sum(tl.where(w > 0, 1.0, 0.0), 1), square + tl.sum(w * w, 1)
