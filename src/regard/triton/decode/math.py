"""Shared code of the decoding kernels. A program serves one key head: the rows of its tile are the queries of all query
heads of that head, so that keys and values are read once for all of them. The keys are split between programs. In
float32, which tensor cores do not multiply, a program has one row; keys that its neighbours read are in the shared
cache.

Legend: ROWS = FORM.own rows of a tile (of `group` query heads x `queries`), 1 or at least 16; KEYS = FORM.tile keys; D
features in WIDTH = FORM.wide columns. A matrix: (pointer, strides of sequence, head, row); a factor: (pointer, number).
"""

import triton
import triton.language as tl

from ..runtime.blocks import FAR, load, load_span, of_head, parts, places_of, row_scale, seen, store_rows
from ..runtime.kernels import LIMIT, non_finite


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
    begin, to = tl.load(low + at, mask=at < queries, other=0), tl.load(high + at, mask=at < queries, other=0)
    stop = tl.max(tl.where(to > begin, to, 0), 0)
    start = tl.minimum(tl.min(tl.where(to > begin, begin, FAR), 0), stop)
    return start // KEYS, (stop + KEYS - 1) // KEYS - start // KEYS, stop


@triton.jit
def part_of(span, steps, heads, group, queries, FORM: tl.constexpr):
    """Return the work of program (i, part): sequence, key head, (rows [ROWS], which exist, their numbers among all),
    (the first visible tile, the tiles [first, last) of the part counted from it), and what `seen_keys` reads. Rows are
    ordered by head, then by query. `steps`: strides of the ranges, and of the mask by sequence and head."""
    count = group * queries
    at, batch, head, rows = place_of(heads, count, FORM.own)
    low, high = span[0] + batch * steps[0], span[1] + batch * steps[0]
    origin, tiles, stop = extent(low, high, queries, FORM.tile, FORM.most)
    start, to = load_span(low, high, rows % queries, rows < count)
    part, each, more = tl.program_id(1), tiles // tl.num_programs(1), tiles % tl.num_programs(1)
    first = part * each + tl.minimum(part, more)
    last = first + each + (part < more).to(tl.int32)  # numbers of tiles differ by at most one
    mask = span[2]
    if FORM.masked:
        mask = span[2] + batch * steps[1] + head * group * steps[2]
    held = rows < count
    sight = start, to, mask, rows, held, queries, steps[2], stop
    return batch, head, (rows, held, at * count + rows), (origin, first, last), sight


@triton.jit
def store_part(part, stride, row, held, x, DIM: tl.constexpr, WIDTH: tl.constexpr):
    """Store x [ROWS, WIDTH], the result of a part of the keys, in part [parts, N, DIM]."""
    store_rows(part + tl.program_id(1).to(tl.int64) * stride, row, x, held, DIM, WIDTH)


@triton.jit
def load_queries(q, batch, first_head, rows, held, queries, FORM: tl.constexpr):
    """Load the queries [ROWS, WIDTH] of the heads from `first_head` on, 0 if not `held`."""
    at = (first_head + rows // queries).to(tl.int64) * q[2] + (rows % queries).to(tl.int64) * q[3]
    places = q[0] + batch * q[1] + at[:, None] + tl.arange(0, FORM.wide)[None, :]
    return load(places, held, FORM.dim, FORM.wide, True)


@triton.jit
def opened(matrices, factor, span, steps, heads, group, queries, FORM: tl.constexpr):
    """Return (rows, which exist, their numbers, tiles, sight) of `part_of`, q, factors, (pointer, stride) of k, v."""
    batch, head, rows, tiles, sight = part_of(span, steps, heads, group, queries, FORM)
    a = load_queries(matrices[0], batch, head * group, rows[0], rows[1], queries, FORM)
    by = row_scale(factor[0], factor[1], rows[2], rows[1], FORM.factors)
    k, v = of_head(matrices[1], batch, head), of_head(matrices[2], batch, head)
    return rows[0], rows[1], rows[2], tiles, sight, a, by, k, v


@triton.jit
def load_tile(x, first, held, DIM: tl.constexpr, WIDTH: tl.constexpr, FORM: tl.constexpr):
    """Load a tile of keys or values [KEYS, WIDTH] from number `first` on. Rows that are not `held` [KEYS] are 0 and not
    read. A tile of a cache laid out by tokens may span more than 2^31 numbers."""
    return load(places_of(x[0], first, x[1], FORM.tile, WIDTH, True), held, DIM, WIDTH, True)


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
        large, small = parts(a, k, True)
        transposed = tl.trans(k)
        return tl.dot(small, transposed, tl.dot(large, transposed)), large.to(tl.float32) + small.to(tl.float32)


@triton.jit
def add_weighted(total, p, v, ROWS: tl.constexpr):
    """Return total + p v with float32 weights [ROWS, KEYS]; on tensor cores they are multiplied in two terms."""
    if ROWS == 1:
        column = tl.reshape(p, (p.shape[1],))[:, None]
        return total + tl.sum(column * v.to(tl.float32), 0)[None, :]
    else:
        large, small = parts(p, v, True)
        return tl.dot(small, v, tl.dot(large, v, total))


@triton.jit
def seen_keys(first, sight, FORM: tl.constexpr):
    """Return which keys from `first` on each row sees [ROWS, KEYS]."""
    at = first + tl.arange(0, FORM.tile)
    visible = seen(at, sight[0], sight[1], sight[2], 0, False)
    if FORM.masked == 1:
        inside = tl.max(visible.to(tl.int32), 0) != 0
        visible &= (tl.load(sight[2] + at, mask=inside, other=0) != 0)[None, :]
    elif FORM.masked == 2:
        mask_row = (sight[3] // sight[5]).to(tl.int64) * sight[6]
        visible &= tl.load(sight[2] + mask_row[:, None] + at[None, :], mask=visible & sight[4][:, None], other=0) != 0
    return visible


@triton.jit
def largest(x):
    """Return the largest of the numbers that a thread loads at once, [N, WIDTH / 4 or 8], as bits without sign."""
    EACH: tl.constexpr = 128 // x.dtype.primitive_bitwidth
    if x.dtype == tl.float32:
        bits = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    else:  # the upper half of the float32, without loss
        bits = x.to(tl.int16, bitcast=True).to(tl.int32) & 0x7FFF
    return tl.max(tl.reshape(bits, (x.shape[0], x.shape[1] // EACH, EACH)), 2)


@triton.jit
def beyond(worst, like, rows):
    """Return for all `rows` whether a number of `largest`, of the dtype of `like`, is not finite or beyond 2^56."""
    SHIFT: tl.constexpr = 32 - like.dtype.element_ty.primitive_bitwidth
    return rows * 0 + tl.max(tl.max(worst, 1), 0) > (LIMIT >> SHIFT)


@triton.jit
def guarded(w, lost, values, seen, bad_row, FORM: tl.constexpr):
    """Return (w [ROWS, KEYS] with NaN where a row of `bad_row` [ROWS] sees a key, or any row sees a `lost` key
    [KEYS] or a non-finite value; the values, 0 for non-finite ones unless all rows see the same keys)."""
    bad = non_finite(values)
    if FORM.most > 1 or FORM.masked == 2:
        values = tl.where(bad[:, None], 0.0, values)
    return tl.where(seen & (bad_row[:, None] | (lost | bad)[None, :]), float("nan"), w), values


@triton.jit
def scored_keys(first, k, a, by, sight, FORM: tl.constexpr):
    """Return which keys from `first` on are read [KEYS], up to the end and, if all rows see the same keys, only these;
    the keys; which of them each row sees; and their scores [ROWS, KEYS], -inf where hidden."""
    at = first + tl.arange(0, FORM.tile)
    real = at < sight[7]
    if FORM.most == 1 and FORM.masked == 0:
        real &= at >= tl.min(tl.where(sight[4], sight[0], FAR), 0)
    keys = load_tile(k, first, real, FORM.dim, FORM.wide, FORM)
    score = products(a, keys, FORM.own) * by[:, None]
    visible = seen_keys(first, sight, FORM)
    return real, keys, visible, tl.where(visible, score, float("-inf"))
