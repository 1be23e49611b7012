"""What the decoding kernels share. A program serves one key head: the rows of its tile are the queries of all query
heads of that head, so that keys and values are read once for all of them. Programs share out the keys.

In float32, which tensor cores do not multiply, a program has one row; keys that neighbouring programs read are then in
the shared cache.

Legend: ROWS rows of a tile (of `group` query heads x `queries`), 1 or at least 16; KEYS keys of a tile; D features in
WIDTH columns, the next power of two.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..runtime.blocks import FAR, load, load_span, places_of, seen
from ..runtime.finite_kernel import broken

next_power_of_2 = triton.next_power_of_2


@triton.jit
def place_of(heads, count, ROWS: tl.constexpr):
    """Return (sequence x key head, sequence, key head, rows [ROWS]) of a program; `count` rows share a key head."""
    blocks = (count + ROWS - 1) // ROWS
    at = (tl.program_id(0) // blocks).to(tl.int64)
    return at, at // heads, at % heads, (tl.program_id(0) % blocks) * ROWS + tl.arange(0, ROWS)


@triton.jit
def extent(low, high, queries, KEYS: tl.constexpr, MOST: tl.constexpr):
    """Return (first tile with a visible key, number of tiles up to the last, key after the last). Tiles begin at
    multiples of KEYS; `low` and `high` point to the ranges of this sequence."""
    at = tl.arange(0, MOST)
    own, to = tl.load(low + at, mask=at < queries, other=0), tl.load(high + at, mask=at < queries, other=0)
    stop = tl.max(tl.where(to > own, to, 0), 0)
    start = tl.minimum(tl.min(tl.where(to > own, own, FAR), 0), stop)
    return start // KEYS, (stop + KEYS - 1) // KEYS - start // KEYS, stop


@triton.jit
def share(part, parts, tiles):
    """Return the tiles [first, last) of one of `parts` programs, whose numbers differ by at most one."""
    each, more = tiles // parts, tiles % parts
    first = part * each + tl.minimum(part, more)
    return first, first + each + (part < more).to(tl.int32)


@triton.jit
def row_ranges(low, high, rows, count, queries):
    """Return [low, high) of each row, empty beyond the last. Rows are ordered by head, then by query."""
    return load_span(low, high, rows % queries, rows < count)


@triton.jit
def part_of(
    low, high, heads, group, queries, stride, ROWS: tl.constexpr, KEYS: tl.constexpr, MOST: tl.constexpr
):  # fmt: skip
    """Return what program (i, part) works on: (sequence, key head, rows [ROWS], which exist, their numbers among all,
    the keys [start, to) that each sees, the first visible tile, the tiles [first, last) of the part counted from it,
    the key after the last visible one)."""
    count = group * queries
    at, batch, head, rows = place_of(heads, count, ROWS)
    low, high = low + batch * stride, high + batch * stride
    origin, tiles, stop = extent(low, high, queries, KEYS, MOST)
    start, to = row_ranges(low, high, rows, count, queries)
    first, last = share(tl.program_id(1), tl.num_programs(1), tiles)
    return batch, head, rows, rows < count, at * count + rows, start, to, origin, first, last, stop


@triton.jit
def store_part(part, stride, own, held, x, DIM: tl.constexpr, WIDTH: tl.constexpr):
    """Store x [ROWS, WIDTH], the result of a part of the keys, in part [parts, N, DIM]."""
    columns = tl.arange(0, WIDTH)
    to = part + tl.program_id(1).to(tl.int64) * stride + own[:, None] * DIM + columns[None, :]
    tl.store(to, x.to(part.dtype.element_ty), mask=held[:, None] & (columns < DIM)[None, :])


@triton.jit
def load_queries(q, first_head, rows, count, queries, stride_h, stride_t, D: tl.constexpr, WIDTH: tl.constexpr):
    """Load the queries [ROWS, WIDTH] of the heads from `first_head` on, 0 outside."""
    at = (first_head + rows // queries).to(tl.int64) * stride_h + (rows % queries).to(tl.int64) * stride_t
    return load(q + at[:, None] + tl.arange(0, WIDTH)[None, :], rows < count, D, WIDTH, True)


@triton.jit
def load_tile(x, first, held, stride, D: tl.constexpr, WIDTH: tl.constexpr, KEYS: tl.constexpr):
    """Load rows [KEYS, WIDTH] from number `first` on. Rows that are not `held` [KEYS] are 0 and not read. A tile of a
    cache laid out by tokens may span more than 2^31 numbers."""
    return load(places_of(x, first, stride, KEYS, WIDTH, True), held, D, WIDTH, True)


@triton.jit
def products(a, k, ROWS: tl.constexpr):
    """Return a k' [ROWS, KEYS] in float32, `a` [ROWS, WIDTH] in the dtype of the keys."""
    if ROWS == 1:
        return tl.sum(a.to(tl.float32) * k.to(tl.float32), 1)[None, :]
    else:
        return tl.dot(a, tl.trans(k))


@triton.jit
def fine_products(a, k, ROWS: tl.constexpr):
    """Return (a k', `a` as it was multiplied) for a in float32; with bfloat16 keys it is multiplied in two terms."""
    if ROWS == 1:
        return tl.sum(a * k.to(tl.float32), 1)[None, :], a
    else:
        large = a.to(k.dtype)
        small = (a - large.to(tl.float32)).to(k.dtype)
        turned = tl.trans(k)
        return tl.dot(small, turned, tl.dot(large, turned)), large.to(tl.float32) + small.to(tl.float32)


@triton.jit
def add_weighted(total, p, v, ROWS: tl.constexpr):
    """Return total + p v with float32 weights [ROWS, KEYS]; on tensor cores they are multiplied in two terms."""
    if ROWS == 1:
        column = tl.reshape(p, (p.shape[1],))[:, None]
        return total + tl.sum(column * v.to(tl.float32), 0)[None, :]
    else:
        large = p.to(v.dtype)
        small = (p - large.to(tl.float32)).to(v.dtype)
        return tl.dot(small, v, tl.dot(large, v, total))


@triton.jit
def seen_keys(first, low, high, mask, place, rows, count, queries, stride_h, KEYS: tl.constexpr, MASKED: tl.constexpr):
    """Return which keys from `first` on each row sees [ROWS, KEYS]; `place` is the mask of the first head. MASKED: 0
    without a mask, 1 if all heads share one, else 2."""
    at = first + tl.arange(0, KEYS)
    found = seen(at, low, high, mask, 0, False)
    if MASKED == 1:
        inside = tl.max(found.to(tl.int32), 0) != 0
        found &= (tl.load(mask + place + at, mask=inside, other=0) != 0)[None, :]
    elif MASKED == 2:
        own = place + (rows // queries).to(tl.int64) * stride_h
        found &= tl.load(mask + own[:, None] + at[None, :], mask=found & (rows < count)[:, None], other=0) != 0
    return found


@triton.jit
def guarded(w, lost, values, seen, wrong, ALIKE: tl.constexpr):
    """Return (w [ROWS, KEYS] with NaN where a row that is `wrong` [ROWS] sees a key, or any row sees a `lost` key
    [KEYS] or a non-finite value; the values). Unless all rows see ALIKE, non-finite values become 0, since rows that do
    not see them multiply them with 0."""
    bad = broken(values)
    if not ALIKE:
        values = tl.where(bad[:, None], 0.0, values)
    return tl.where(seen & (wrong[:, None] | (lost | bad)[None, :]), float("nan"), w), values
