"""The kernels of `decode.KeyBounds`: balls around blocks of keys, and by them what no score of a block exceeds.

Legend: as in `compact_decode_kernels`; blocks of BLOCK keys are counted from the first that a query of the sequence
sees.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..compact.math import ADAPTIVE, ANCHORED, NEAREST
from ..runtime.blocks import LENGTHS, row_scale
from .math import extent, load_queries, load_tile, place_of, products, row_ranges, seen_keys

SLACK = tl.constexpr(2.0**-13)
"""Of a bound, in units of |q| |k|: more than a product of 256 numbers can be rounded by, whatever the order of the sum
and if every partial sum is cut off after 23 bits."""


@triton.jit(do_not_specialize=LENGTHS)
def ball_kernel(
    k, centre, radius, heads, keys, capacity, first, blocks, stride_b, stride_h, stride_t,
    D: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """A ball around the keys of one of the `blocks` of a head from `first` on: centre [N, capacity, D], rounded to the
    keys' dtype, and the largest distance from it as it is then, [N, capacity] float32."""
    block, at = first + tl.program_id(0) % blocks, (tl.program_id(0) // blocks).to(tl.int64)
    k += (at // heads) * stride_b + (at % heads) * stride_h
    columns, own = tl.arange(0, WIDTH), tl.arange(0, KEYS)
    start, stop = block * BLOCK, tl.minimum(block * BLOCK + BLOCK, keys)
    total = tl.zeros((WIDTH,), tl.float32)
    for j in range(start, stop, KEYS):
        total += tl.sum(load_tile(k, j, j + own < stop, stride_t, D, WIDTH, KEYS).to(tl.float32), 0)
    middle = (total / (stop - start)).to(k.dtype.element_ty)
    square = tl.zeros((KEYS,), tl.float32)
    for j in range(start, stop, KEYS):
        tile = load_tile(k, j, j + own < stop, stride_t, D, WIDTH, KEYS).to(tl.float32)
        away = tl.where((j + own < stop)[:, None], tile - middle.to(tl.float32)[None, :], 0.0)
        far = tl.sum(away * away, 1)
        square = tl.where((far > square) | (far != far), far, square)
    broken = tl.sum((square != square).to(tl.int32), 0) > 0
    to = at * capacity + block
    tl.store(centre + to * D + columns, middle, mask=columns < D)
    tl.store(radius + to, tl.where(broken, float("nan"), tl.sqrt(tl.max(square, 0))))


@triton.jit(do_not_specialize=LENGTHS)
def bound_kernel(
    q, factor, centre, radius, low, high, upper, heads, group, queries, room, capacity, blocks, scale,
    stride_b, stride_h, stride_t, stride_low,
    D: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, MOST: tl.constexpr, BLOCK: tl.constexpr,
    KEYS: tl.constexpr, GIVEN: tl.constexpr,
):  # fmt: skip
    """What no score of a block of keys exceeds, upper [N, count, room], by |q . k - q . c| <= |q| |k - c|: NaN where
    the block holds keys that are not finite."""
    count = group * queries
    at, batch, head, rows = place_of(heads, count, ROWS)
    first, _, stop = extent(low + batch * stride_low, high + batch * stride_low, queries, BLOCK, MOST)
    own = at * count + rows
    place = tl.program_id(1) * KEYS
    held = (place + tl.arange(0, KEYS) < room) & (first + place + tl.arange(0, KEYS) < blocks)
    if (first + place) * BLOCK < stop:
        a = load_queries(q + batch * stride_b, head * group, rows, count, queries, stride_h, stride_t, D, WIDTH)
        c = load_tile(centre + at * capacity * D, first + place, held, D, D, WIDTH, KEYS)
        far = tl.load(radius + at * capacity + first + place + tl.arange(0, KEYS), mask=held, other=0.0)
        z = products(a, c, ROWS)
        a, c = a.to(tl.float32), c.to(tl.float32)
        size, norm = tl.sqrt(tl.sum(a * a, 1)), tl.sqrt(tl.sum(c * c, 1))
        by = row_scale(factor, scale, own, rows < count, GIVEN)
        reach = size[:, None] * (far + SLACK * (norm + far))[None, :]
        to = upper + own[:, None] * room + (place + tl.arange(0, KEYS))[None, :]
        tl.store(to, by[:, None] * z + tl.abs(by)[:, None] * reach, mask=(rows < count)[:, None] & held[None, :])


@triton.jit(do_not_specialize=LENGTHS)
def probe_kernel(
    q, k, factor, given, low, high, mask, upper, edge, heads, group, queries, room, scale, number,
    stride_qb, stride_qh, stride_qt, stride_kb, stride_kh, stride_kt, stride_low, stride_mb, stride_mh,
    D: tl.constexpr, WIDTH: tl.constexpr, MOST: tl.constexpr, BLOCK: tl.constexpr, KEYS: tl.constexpr,
    PLACES: tl.constexpr, RULE: tl.constexpr, R: tl.constexpr, EMPTY: tl.constexpr, GIVEN: tl.constexpr,
    PARAMETER: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """edge [N, count]: a key whose score cannot exceed it has no weight in the row. The best score is at least the best
    of one block, the one that promises most."""
    row = tl.program_id(0).to(tl.int64)
    count = group * queries
    at, r = row // count, (row % count).to(tl.int32)
    batch, head = at // heads, at % heads
    first, _, _ = extent(low + batch * stride_low, high + batch * stride_low, queries, BLOCK, MOST)
    mine = r + tl.arange(0, 1)
    own, to = row_ranges(low + batch * stride_low, high + batch * stride_low, mine, count, queries)
    start, stop = tl.max(own, 0), tl.max(to, 0)
    best, where = tl.full((PLACES,), float("-inf"), tl.float32), tl.zeros((PLACES,), tl.int32)
    for place in range(start // BLOCK - first, (stop + BLOCK - 1) // BLOCK - first, PLACES):
        n = place + tl.arange(0, PLACES)
        bound = tl.load(upper + row * room + n, mask=(first + n) * BLOCK < stop, other=float("-inf"))
        where = tl.where(bound > best, n, where)
        best = tl.where(bound > best, bound, best)
    chosen = (first + tl.max(tl.where(best == tl.max(best, 0), where, -1), 0)) * BLOCK
    a = load_queries(q + batch * stride_qb, head * group, mine, count, queries, stride_qh, stride_qt, D, WIDTH)
    by = row_scale(factor, scale, row + tl.arange(0, 1), mine < count, GIVEN)
    k += batch * stride_kb + head * stride_kh
    shown = batch * stride_mb + head * group * stride_mh
    top = tl.full((1,), float("-inf"), tl.float32)
    for j in range(chosen, tl.minimum(chosen + BLOCK, stop), KEYS):
        keys = load_tile(k, j, j + tl.arange(0, KEYS) < stop, stride_kt, D, WIDTH, KEYS)
        z = products(a, keys, 1) * by[:, None]
        seen = seen_keys(j, own, to, mask, shown, mine, count, queries, stride_mh, KEYS, MASKED)
        top = tl.maximum(top, tl.max(tl.where(seen, z, float("-inf")), 1))
    most = tl.max(top, 0)
    value = tl.load(given + row) if PARAMETER else number
    if RULE == ADAPTIVE:
        ends = most - R
    elif RULE == ANCHORED:
        ends = most - value
    elif EMPTY == NEAREST:  # the best key of all may be asked for, and the first of those that tie
        ends = tl.minimum(-value, most - tl.abs(most) * 1e-5 - 1e-30)
    else:
        ends = most * 0 - value
    tl.store(edge + row, ends)
