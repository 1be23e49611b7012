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
def load_block(at, rows, stride, count, WIDTH: tl.constexpr, BLOCK: tl.constexpr, EDGE: tl.constexpr):
    """Rows of a matrix whose first lies at `at`, [len(rows), BLOCK]; zeros beyond its WIDTH columns and, where EDGE,
    beyond its `count` rows."""
    columns = tl.arange(0, BLOCK)
    place = at + rows.to(tl.int64)[:, None] * stride + columns[None, :]
    if EDGE and WIDTH == BLOCK:
        x = tl.load(place, mask=rows[:, None] < count, other=0.0)
    elif EDGE:
        x = tl.load(place, mask=(rows[:, None] < count) & (columns[None, :] < WIDTH), other=0.0)
    elif WIDTH == BLOCK:
        x = tl.load(place)
    else:
        x = tl.load(place, mask=columns[None, :] < WIDTH, other=0.0)
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
