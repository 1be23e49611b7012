"""What every kernel of compact attention computes in the same way: which keys a block of queries sees, scores of a key
block, and weights from scores.

Weights of the ranked kernels are powers of the excess e = max(z - theta, 0) over the row's threshold, z = factor q.k:
p = (e / reach)^r / mass. So the forward pass, the backward pass and decoding agree on the last bit of an edge.

Legend: R rows (queries) of a program, K keys of a block, D features of a key padded to a power of two.
"""

from __future__ import annotations

import triton
import triton.language as tl

SOFTMAX = tl.constexpr(0)
ADAPTIVE = tl.constexpr(1)
ANCHORED = tl.constexpr(2)
FIXED = tl.constexpr(3)
UNIFORM = tl.constexpr(0)  # what a row does that no key is near enough to: all its keys alike,
ZERO = tl.constexpr(1)  # none,
NEAREST = tl.constexpr(2)  # or the best alone
LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def power(u, R: tl.constexpr):
    """u^R for u >= 0, R = 1, 2 or 3."""
    w = u
    if R >= 2:
        w = w * u
    if R == 3:
        w = w * u
    return w


@triton.jit
def lower_power(u, R: tl.constexpr):
    """u^(R - 1), which for R = 1 is where u > 0: the slope of `power` over R."""
    if R == 1:
        w = tl.where(u > 0, 1.0, 0.0)
    elif R == 2:
        w = u
    else:
        w = u * u
    return w


@triton.jit
def excess(dot, factor, theta):
    """How far scores [R, K] lie above their row's threshold, 0 below it; factor and theta [R] or numbers."""
    return tl.maximum(dot * factor - theta, 0.0)


@triton.jit
def key_blocks(low, high, MASK: tl.constexpr, KEYS: tl.constexpr):
    """(first, full, partial, last): of rows that see keys [low, high) [R], key blocks [first, last) hold all that any
    of them sees; all rows see all of blocks [full, partial), none where a mask hides keys."""
    first = tl.min(low, 0) // KEYS
    last = tl.maximum((tl.max(high, 0) + KEYS - 1) // KEYS, first)
    full = last
    partial = last
    if not MASK:
        full = tl.minimum((tl.max(low, 0) + KEYS - 1) // KEYS, last)
        partial = tl.maximum(tl.min(high, 0) // KEYS, full)
    return first, full, partial, last


@triton.jit
def load_rows(at, rows, stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Rows of a matrix whose first lies at `at`, [len(rows), BLOCK]; zeros beyond its WIDTH columns."""
    columns = tl.arange(0, BLOCK)
    return tl.load(
        at + rows.to(tl.int64)[:, None] * stride + columns[None, :], mask=(columns < WIDTH)[None, :], other=0.0
    )


@triton.jit
def load_block(
    at, block, stride, count, WIDTH: tl.constexpr, BLOCK: tl.constexpr, KEYS: tl.constexpr, EDGE: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """Block number `block` of KEYS rows of a matrix whose first lies at `at`, [KEYS, BLOCK]; zeros beyond its WIDTH
    columns and, where EDGE, beyond its `count` rows. WIDE: a block may reach over 2^31 numbers."""
    rows = tl.arange(0, KEYS)
    columns = tl.arange(0, BLOCK)
    start = (block * KEYS).to(tl.int64)
    steps = rows.to(tl.int64) * stride if WIDE else rows * stride
    place = at + start * stride + (steps[:, None] + columns[None, :])
    if EDGE and WIDTH == BLOCK:
        x = tl.load(place, mask=(rows < count - start)[:, None], other=0.0)
    elif EDGE:
        x = tl.load(place, mask=(rows < count - start)[:, None] & (columns < WIDTH)[None, :], other=0.0)
    elif WIDTH == BLOCK:
        x = tl.load(place)
    else:
        x = tl.load(place, mask=(columns < WIDTH)[None, :], other=0.0)
    return x


@triton.jit
def seen(columns, low, high, mask_at, keys, MASK: tl.constexpr):
    """Which of the key numbers `columns` [K] each row sees, [R, K]; mask_at: uint8 of the keys, where MASK."""
    found = (columns[None, :] >= low[:, None]) & (columns[None, :] < high[:, None])
    if MASK:
        kept = tl.load(mask_at + columns, mask=columns < keys, other=0)
        found = found & (kept[None, :] != 0)
    return found


@triton.jit
def cube_root(x):
    """Of x > 0."""
    return tl.exp2(tl.log2(x) * (1.0 / 3.0))


@triton.jit
def block_of_rows(queries, heads, ROWS: tl.constexpr):
    """Of a program: (its head among those of all batches, its block of rows, the batch, the head within it). The last
    rows begin first: where order is causal, they see most."""
    row_blocks = (queries + ROWS - 1) // ROWS
    head = tl.program_id(0) // row_blocks
    row_block = row_blocks - 1 - tl.program_id(0) % row_blocks
    return head, row_block, (head // heads).to(tl.int64), (head % heads).to(tl.int64)


@triton.jit
def own_rows(row_block, queries, ROWS: tl.constexpr):
    """(numbers of the rows, which of them there are): rows beyond the last repeat it, and are not stored."""
    rows = row_block * ROWS + tl.arange(0, ROWS)
    return tl.minimum(rows, queries - 1), rows < queries


@triton.jit
def row_number(ptr, flat, number, ROWS: tl.constexpr, GIVEN: tl.constexpr):
    """What rows number `flat` [R] were given, or the number of all."""
    return tl.load(ptr + flat) if GIVEN else tl.full((ROWS,), 1.0, tl.float32) * number


@triton.jit
def key_scores(
    q, k_at, block, stride, keys, factor, FACTOR: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr,
    KEYS: tl.constexpr, EDGE: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """(q.k of a key block [R, K], times `factor` [R], of any sign, where rows have their own; the numbers of its
    keys)."""
    k = load_block(k_at, block, stride, keys, DIM, WIDTH, KEYS, EDGE, WIDE)
    dot = tl.dot(q, tl.trans(k), input_precision="ieee")
    if FACTOR:
        dot = dot * factor[:, None]
    return dot, block * KEYS + tl.arange(0, KEYS)


@triton.jit
def factors(ptr, flat, scale, ROWS: tl.constexpr, FACTOR: tl.constexpr):
    """(what `key_scores` multiplies with, what makes scores of that), [R]. A number is left for later, since it is > 0:
    the best score is that of the largest q.k."""
    given = row_number(ptr, flat, scale, ROWS, FACTOR)
    return given, tl.full((ROWS,), 1.0, tl.float32) if FACTOR else given


@triton.jit
def edge_block(t, first, full, partial, last):
    """The t-th of blocks [partial, last) from the last, then [first, full): those near the diagonal hold high scores,
    and the sooner they are seen, the fewer blocks look near enough to the best."""
    return tl.where(t < last - partial, last - 1 - t, first + t - (last - partial))


@triton.jit
def store_row(floats_ptr, flags_ptr, flat, real, top, theta, reach, mass, support, ess, empty, fallback, status):
    """The statistics of rows, as `block_rows` has them."""
    tl.store(floats_ptr + flat * 6, top, mask=real)
    tl.store(floats_ptr + flat * 6 + 1, theta, mask=real)
    tl.store(floats_ptr + flat * 6 + 2, reach, mask=real)
    tl.store(floats_ptr + flat * 6 + 3, mass, mask=real)
    tl.store(floats_ptr + flat * 6 + 4, support, mask=real)
    tl.store(floats_ptr + flat * 6 + 5, ess, mask=real)
    tl.store(flags_ptr + flat * 3, empty.to(tl.int32), mask=real)
    tl.store(flags_ptr + flat * 3 + 1, fallback.to(tl.int32), mask=real)
    tl.store(flags_ptr + flat * 3 + 2, status, mask=real)
