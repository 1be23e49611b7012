"""Loads and stores of blocks of a matrix, numbers of rows, and which keys rows see.

A matrix has DIM contiguous columns, held in WIDTH columns, the next power of two; `stride` is the step from one row to
the next. A block is SIZE consecutive rows, or rows by their numbers."""

import triton
import triton.language as tl

from .interpreting import interpreted

INTERPRETED = tl.constexpr(interpreted())
FAR = tl.constexpr(2**31 - 1)  # larger than every number of a row or key
LENGTHS = (
    "heads", "group", "queries", "keys", "span_batch", "mask_batch", "mask_head", "room", "blocks", "splits",
    "total_rows", "capacity", "first", "stride_low", "stride_mb", "stride_mh", "stride_state", "tokens", "length",
    "total", "rows", "stride_g",
)  # fmt: skip
"""Parameters that kernels are not specialised for (`do_not_specialize`): otherwise Triton would recompile a kernel when
one is 1 or a multiple of 16. Members of tuples cannot be exempted."""


@triton.jit
def load(places, held, DIM: tl.constexpr, WIDTH: tl.constexpr, EDGE: tl.constexpr):
    """Load the rows at `places` [SIZE, WIDTH], 0 beyond DIM columns. With EDGE, rows that are not `held` [SIZE] are 0
    and not read; without it there is no row mask, which makes loops over whole blocks cheaper."""
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
def of_head(matrix, batch, head):
    """Return (pointer, stride) of one head of a matrix (pointer, strides of batch, head and row)."""
    return matrix[0] + batch * matrix[1] + head * matrix[2], matrix[3]


@triton.jit
def places_of(at, first, stride, SIZE: tl.constexpr, WIDTH: tl.constexpr, WIDE: tl.constexpr):
    """Return pointers to the rows from number `first` on in a matrix that begins at `at`. Offsets within the block are
    32-bit unless it is WIDE, which it must be if it spans 2^31 numbers or more."""
    rows, columns = tl.arange(0, SIZE), tl.arange(0, WIDTH)
    steps = rows.to(tl.int64) * stride if WIDE else rows * stride
    return at + tl.cast(first, tl.int64) * stride + (steps[:, None] + columns[None, :])


@triton.jit
def load_block(
    at, first, stride, count, SIZE: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, EDGE: tl.constexpr = True
):
    """Load rows [SIZE, WIDTH] from number `first` on. With EDGE, rows from number `count` on are 0."""
    held = first + tl.arange(0, SIZE) < count
    return load(places_of(at, first, stride, SIZE, WIDTH, False), held, DIM, WIDTH, EDGE)


@triton.jit
def store_block(at, x, first, stride, count, SIZE: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr):
    """Store what `load_block` loads, in the dtype of `at`."""
    held = (first + tl.arange(0, SIZE) < count)[:, None] & (tl.arange(0, WIDTH) < DIM)[None, :]
    tl.store(places_of(at, first, stride, SIZE, WIDTH, False), x.to(at.dtype.element_ty), mask=held)


@triton.jit
def load_rows(at, rows, stride, held, DIM: tl.constexpr, WIDTH: tl.constexpr):
    """Load rows by their numbers, [len(rows), WIDTH]; those that are not `held` (None: all are) are 0 and not read."""
    places = at + rows.to(tl.int64)[:, None] * stride + tl.arange(0, WIDTH)[None, :]
    return load(places, held, DIM, WIDTH, held is not None)


@triton.jit
def store_rows(at, rows, x, held, DIM: tl.constexpr, WIDTH: tl.constexpr):
    """Store x [len(rows), WIDTH] in the rows with these numbers that are `held`, contiguous, in the dtype of `at`."""
    columns = tl.arange(0, WIDTH)
    places = at + rows[:, None] * DIM + columns[None, :]
    tl.store(places, x.to(at.dtype.element_ty), mask=held[:, None] & (columns < DIM)[None, :])


@triton.jit
def store_numbers(at, rows, numbers, held):
    """Store a tuple of numbers for each row that is `held`, in a contiguous [..., len(numbers)]."""
    for i in tl.static_range(len(numbers)):
        tl.store(at + rows * len(numbers) + i, numbers[i], mask=held)


@triton.jit
def load_span(low, high, rows, held):
    """Load the range of keys [low, high) of each row, empty if it is not `held`."""
    return tl.load(low + rows, mask=held, other=0), tl.load(high + rows, mask=held, other=0)


@triton.jit
def row_scale(factor, scale, rows, held, GIVEN: tl.constexpr):
    """Return the factor of each row's scores, float32: its own `factor` (0 if not `held`), or one number."""
    if GIVEN:
        return tl.load(factor + rows, mask=held, other=0.0)
    else:
        return tl.zeros_like(rows).to(tl.float32) + scale


@triton.jit
def seen(columns, low, high, mask, keys, MASKED: tl.constexpr):
    """Return which of the keys `columns` each row sees, [R, K]; `mask`, if MASKED, is a byte for each of `keys`."""
    if MASKED:  # give hidden keys a number that no row sees: one register per key, not per pair
        shown = tl.load(mask + columns, mask=columns < keys, other=0) != 0
        columns = tl.where(shown, columns, FAR)
    return (columns[None, :] >= low[:, None]) & (columns[None, :] < high[:, None])


@triton.jit
def rounded(x, like):
    """Return float32 x in the dtype of `like`, and the rounded value in float32. If the rounded value is read again,
    Triton rounds numbers one by one, much more slowly than the instruction here, which rounds two at once."""
    if like.dtype == tl.bfloat16 and not INTERPRETED:
        return tl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $4, $3; shl.b32 $1, $0, 16; and.b32 $2, $0, 0xffff0000;",
            "=r,=r,=r,r,r", [x], dtype=(tl.bfloat16, tl.float32), is_pure=True, pack=2,
        )  # fmt: skip
    else:
        short = x.to(like.dtype)
        return short, short.to(tl.float32)


@triton.jit
def parts(x, like, SPLIT: tl.constexpr):
    """Return (hi, lo) in the dtype of `like` with the sum x within 2^-17 of it; without SPLIT the rounded x twice."""
    hi = x.to(like.dtype)
    if SPLIT:
        return hi, (x - hi.to(tl.float32)).to(like.dtype)
    else:
        return hi, hi
