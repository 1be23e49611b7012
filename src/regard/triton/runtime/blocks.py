"""What all kernels read and write alike: blocks of a matrix, what belongs to rows, and which keys rows see.

A matrix has DIM columns side by side, which WIDTH holds, the next power of two, and `stride` numbers from one row to
the next. A block is SIZE rows that follow one another, or any rows by their numbers.
"""

from __future__ import annotations

import triton
import triton.language as tl

FAR = tl.constexpr(2**31 - 1)
"""A number that no row and no key has."""
LENGTHS = (
    *("heads", "group", "queries", "keys", "span_batch", "mask_batch", "mask_head"),
    *(
        "room",
        "blocks",
        "splits",
        "total_rows",
        "capacity",
        "first",
        "stride_low",
        "stride_mb",
        "stride_mh",
        "stride_state",
    ),
    *("tokens", "length", "total", "rows", "stride_g"),
)
"""Parameters of which a kernel knows nothing when it is compiled (`do_not_specialize`; what stands in tuples cannot be
left out), or it would be compiled anew where one is a multiple of 16 or 1."""


@triton.jit
def load(places, held, DIM: tl.constexpr, WIDTH: tl.constexpr, EDGE: tl.constexpr):
    """The rows at `places` [SIZE, WIDTH]: 0 beyond DIM columns and, at an EDGE, where a row is not `held` [SIZE], and
    not read there. Elsewhere there is no mask, so that loops over whole blocks look at none."""
    real = (tl.arange(0, WIDTH) < DIM)[None, :]
    if EDGE and DIM == WIDTH:
        return tl.load(places, mask=held[:, None], other=0.0)
    elif EDGE:
        return tl.load(places, mask=held[:, None] & real, other=0.0)
    elif DIM == WIDTH:
        return tl.load(places)
    else:
        return tl.load(places, mask=real, other=0.0)


@triton.jit
def places_of(at, first, stride, SIZE: tl.constexpr, WIDTH: tl.constexpr, WIDE: tl.constexpr):
    """Where rows from number `first` on lie in a matrix that begins at `at`. Within the block offsets are 32-bit, so
    that no loop holds a long one for every number, unless it is WIDE: may reach over 2^31 numbers."""
    rows, columns = tl.arange(0, SIZE), tl.arange(0, WIDTH)
    steps = rows.to(tl.int64) * stride if WIDE else rows * stride
    return at + tl.cast(first, tl.int64) * stride + (steps[:, None] + columns[None, :])


@triton.jit
def load_block(
    at, first, stride, count, SIZE: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, EDGE: tl.constexpr = True,
    WIDE: tl.constexpr = False,
):  # fmt: skip
    """Rows [SIZE, WIDTH] from number `first` on; only at an EDGE may some lie beyond the `count` that there are, which
    are 0."""
    held = first + tl.arange(0, SIZE) < count
    return load(places_of(at, first, stride, SIZE, WIDTH, WIDE), held, DIM, WIDTH, EDGE)


@triton.jit
def store_block(at, x, first, stride, count, SIZE: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr):
    """The counterpart of `load_block`, in the dtype of `at`."""
    held = (first + tl.arange(0, SIZE) < count)[:, None] & (tl.arange(0, WIDTH) < DIM)[None, :]
    tl.store(places_of(at, first, stride, SIZE, WIDTH, False), x.to(at.dtype.element_ty), mask=held)


@triton.jit
def load_rows(at, rows, stride, DIM: tl.constexpr, WIDTH: tl.constexpr):
    """The rows of these numbers, all of which there are, [len(rows), WIDTH]."""
    places = at + rows.to(tl.int64)[:, None] * stride + tl.arange(0, WIDTH)[None, :]
    return load(places, rows, DIM, WIDTH, False)


@triton.jit
def load_span(low, high, rows, held):
    """The range of keys [low, high) of each row, empty where it is not `held`."""
    return tl.load(low + rows, mask=held, other=0), tl.load(high + rows, mask=held, other=0)


@triton.jit
def row_scale(factor, scale, rows, held, GIVEN: tl.constexpr):
    """What products are multiplied with to be scores, float32 like `rows`: a `factor` a row, 0 where it is not `held`,
    or one number for all."""
    if GIVEN:
        return tl.load(factor + rows, mask=held, other=0.0)
    else:
        return tl.zeros_like(rows).to(tl.float32) + scale


@triton.jit
def seen(columns, low, high, mask, keys, MASKED: tl.constexpr):
    """Which of the key numbers `columns` [K] each row sees, [R, K]: those of its range that the bytes of `mask`, one
    for each of `keys`, show where MASKED."""
    if MASKED:  # a hidden key has a number that no row sees: so the mask takes a register a key, not one a pair
        shown = tl.load(mask + columns, mask=columns < keys, other=0) != 0
        columns = tl.where(shown, columns, FAR)
    return (columns[None, :] >= low[:, None]) & (columns[None, :] < high[:, None])
