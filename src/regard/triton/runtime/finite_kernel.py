"""The kernel of `finite`."""

from __future__ import annotations

import triton
import triton.language as tl

LIMIT = tl.constexpr((127 + 56) << 23)
"""The bits of 2^56 in float32, the limit of `precision.clean`."""
NUMBERS = [f"{name}_{i}" for name in ("programs", "heads", "length") for i in range(3)]
"""Parameters that the kernel is not specialised for."""


@triton.jit
def non_finite(x):
    """Return which vectors [N, WIDTH] hold a number not finite or beyond 2^56, by bits without sign."""
    return tl.max(x.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1) > LIMIT


@triton.jit
def _clean(matrix, programs, heads, length, D: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
           BACKWARD: tl.constexpr):  # fmt: skip
    """Clean one block of vectors of one head: x [B, H, T, D], contiguous along D, into contiguous found and bad. With
    BACKWARD, `bad` says which vectors are zero."""
    x, found, bad, stride_b, stride_h, stride_t = matrix
    at = tl.program_id(1)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, WIDTH)
    there = rows < tl.where(at < programs, length, 0)
    inside = there[:, None] & (columns < D)[None, :]
    head = tl.cast(at // heads, tl.int64) * stride_b + tl.cast(at % heads, tl.int64) * stride_h
    values = tl.load(x + head + rows[:, None].to(tl.int64) * stride_t + columns[None, :], mask=inside, other=0.0)
    to = tl.cast(at, tl.int64) * length + rows
    if BACKWARD:
        lost = tl.load(bad + to, mask=there, other=0) != 0
    else:
        lost = non_finite(values)
        tl.store(bad + to, lost.to(tl.int8), mask=there)
    tl.store(found + to[:, None] * D + columns[None, :], tl.where(lost[:, None], 0.0, values), mask=inside)


@triton.jit(do_not_specialize=NUMBERS)
def clean_kernel(
    matrices, programs_0, programs_1, programs_2, heads_0, heads_1, heads_2, length_0, length_1, length_2,
    DIMS: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, COUNT: tl.constexpr, BACKWARD: tl.constexpr,
):  # fmt: skip
    """Clean one block of the first, second or third of COUNT tensors, by the third axis of the grid."""
    which = tl.program_id(2)
    if which == 0:
        _clean(matrices[0], programs_0, heads_0, length_0, DIMS[0], WIDTH, ROWS, BACKWARD)
    if COUNT > 1:  # noqa: SIM102 - decided when the kernel is compiled
        if which == 1:
            _clean(matrices[1], programs_1, heads_1, length_1, DIMS[1], WIDTH, ROWS, BACKWARD)
    if COUNT > 2:  # noqa: SIM102
        if which == 2:
            _clean(matrices[2], programs_2, heads_2, length_2, DIMS[2], WIDTH, ROWS, BACKWARD)
