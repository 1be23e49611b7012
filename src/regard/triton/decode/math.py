"""What the decoding kernels share. A program serves one key head: the rows of its tile are the queries of all the query
heads of that head, so that keys and values are read once for all of them, and programs share out the keys.

In float32, which is no matter of tensor cores, a program has one row; what its neighbours read of the same keys is then
in the cache that all processors share.

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
    """(sequence x key head, sequence, key head, rows [ROWS]) of a program; `count` rows have a key head in common."""
    blocks = (count + ROWS - 1) // ROWS
    at = (tl.program_id(0) // blocks).to(tl.int64)
    return at, at // heads, at % heads, (tl.program_id(0) % blocks) * ROWS + tl.arange(0, ROWS)


@triton.jit
def extent(low, high, queries, KEYS: tl.constexpr, MOST: tl.constexpr):
    """(the first tile that holds a key seen by one of the queries, how many tiles do up to the last, the key after the
    last); tiles begin at multiples of KEYS. `low` and `high` point to the ranges of this sequence."""
    at = tl.arange(0, MOST)
    own, to = tl.load(low + at, mask=at < queries, other=0), tl.load(high + at, mask=at < queries, other=0)
    stop = tl.max(tl.where(to > own, to, 0), 0)
    start = tl.minimum(tl.min(tl.where(to > own, own, FAR), 0), stop)
    return start // KEYS, (stop + KEYS - 1) // KEYS - start // KEYS, stop


@triton.jit
def share(part, parts, tiles):
    """The tiles [first, last) of one of so many programs: none differs from another by more than one."""
    each, more = tiles // parts, tiles % parts
    first = part * each + tl.minimum(part, more)
    return first, first + each + (part < more).to(tl.int32)


@triton.jit
def row_ranges(low, high, rows, count, queries):
    """[low, high) of each row of the tile, empty beyond the last; rows are ordered by head, then by query."""
    return load_span(low, high, rows % queries, rows < count)


@triton.jit
def part_of(
    low, high, heads, group, queries, stride, ROWS: tl.constexpr, KEYS: tl.constexpr, MOST: tl.constexpr
):  # fmt: skip
    """What program (i, part) works on: (sequence, key head, rows [ROWS] of it, which of them there are, their numbers
    among all, the keys [start, to) that each sees, the first tile in sight, the tiles [first, last) of the part,
    counted from that one, the key after the last in sight)."""
    count = group * queries
    at, batch, head, rows = place_of(heads, count, ROWS)
    low, high = low + batch * stride, high + batch * stride
    origin, tiles, stop = extent(low, high, queries, KEYS, MOST)
    start, to = row_ranges(low, high, rows, count, queries)
    first, last = share(tl.program_id(1), tl.num_programs(1), tiles)
    return batch, head, rows, rows < count, at * count + rows, start, to, origin, first, last, stop


@triton.jit
def store_part(part, stride, own, held, x, DIM: tl.constexpr, WIDTH: tl.constexpr):
    """What a part of the keys comes to in the rows of these numbers: x [ROWS, WIDTH] to part [parts, N, DIM]."""
    columns = tl.arange(0, WIDTH)
    to = part + tl.program_id(1).to(tl.int64) * stride + own[:, None] * DIM + columns[None, :]
    tl.store(to, x.to(part.dtype.element_ty), mask=held[:, None] & (columns < DIM)[None, :])


@triton.jit
def load_queries(q, first_head, rows, count, queries, stride_h, stride_t, D: tl.constexpr, WIDTH: tl.constexpr):
    """The queries [ROWS, WIDTH] of the heads from `first_head` on, 0 outside."""
    at = (first_head + rows // queries).to(tl.int64) * stride_h + (rows % queries).to(tl.int64) * stride_t
    return load(q + at[:, None] + tl.arange(0, WIDTH)[None, :], rows < count, D, WIDTH, True)


@triton.jit
def load_tile(x, first, held, stride, D: tl.constexpr, WIDTH: tl.constexpr, KEYS: tl.constexpr):
    """Rows [KEYS, WIDTH] from number `first` on, 0 where not `held` [KEYS]: those are not read. A tile of a cache laid
    out by tokens may span more than 2^31 numbers."""
    return load(places_of(x, first, stride, KEYS, WIDTH, True), held, D, WIDTH, True)


@triton.jit
def products(a, k, ROWS: tl.constexpr):
    """a k' [ROWS, KEYS] in float32, `a` [ROWS, WIDTH] in the dtype of the keys."""
    if ROWS == 1:
        return tl.sum(a.to(tl.float32) * k.to(tl.float32), 1)[None, :]
    else:
        return tl.dot(a, tl.trans(k))


@triton.jit
def fine_products(a, k, ROWS: tl.constexpr):
    """a k' of a in float32, and what was multiplied: keys in bfloat16 meet two terms of it."""
    if ROWS == 1:
        return tl.sum(a * k.to(tl.float32), 1)[None, :], a
    else:
        large = a.to(k.dtype)
        small = (a - large.to(tl.float32)).to(k.dtype)
        turned = tl.trans(k)
        return tl.dot(small, turned, tl.dot(large, turned)), large.to(tl.float32) + small.to(tl.float32)


@triton.jit
def add_weighted(total, p, v, ROWS: tl.constexpr):
    """total + p v, the weights [ROWS, KEYS] in float32, or in two terms where tensor cores multiply them."""
    if ROWS == 1:
        column = tl.reshape(p, (p.shape[1],))[:, None]
        return total + tl.sum(column * v.to(tl.float32), 0)[None, :]
    else:
        large = p.to(v.dtype)
        small = (p - large.to(tl.float32)).to(v.dtype)
        return tl.dot(small, v, tl.dot(large, v, total))


@triton.jit
def seen_keys(first, low, high, mask, place, rows, count, queries, stride_h, KEYS: tl.constexpr, MASKED: tl.constexpr):
    """Which keys from `first` on each row sees [ROWS, KEYS]; the first head has its mask at `place`. MASKED: 0 without
    one, 1 where all heads have the same, else 2."""
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
    """(w [ROWS, KEYS] with NaN where a row sees a `lost` key [KEYS] or a value that is not finite, or sees anything
    and is `wrong` [ROWS] itself; the values, which are mended unless all rows see ALIKE: those that do not see one that
    is not finite multiply it with 0)."""
    bad = broken(values)
    if not ALIKE:
        values = tl.where(bad[:, None], 0.0, values)
    return tl.where(seen & (wrong[:, None] | (lost | bad)[None, :]), float("nan"), w), values
