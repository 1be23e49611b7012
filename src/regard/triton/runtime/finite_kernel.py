"""The kernel of `finite`."""

from __future__ import annotations

import triton
import triton.language as tl

LIMIT = tl.constexpr((127 + 56) << 23)  # the bits of 2^56 in float32, the limit of `precision.clean`
NUMBERS = [f"{name}_{i}" for name in ("programs", "heads", "length") for i in range(3)]
"""Parameters that the kernel is not specialised for."""


@triton.jit
def non_finite(x):
    """Return which vectors [N, WIDTH] hold a number not finite or beyond 2^56, by bits without sign."""
    return tl.max(x.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1) > LIMIT


@triton.jit(do_not_specialize=NUMBERS)
def clean_kernel(
    matrices, programs_0, programs_1, programs_2, heads_0, heads_1, heads_2, length_0, length_1, length_2,
    DIMS: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, COUNT: tl.constexpr, BACKWARD: tl.constexpr,
):  # fmt: skip
    """Clean one block of vectors of one head of one of COUNT tensors, by the third axis of the grid: x [B, H, T, D],
    contiguous along D, into contiguous found and bad. With BACKWARD, `bad` says which vectors are zero."""
    programs_of, heads_of = (programs_0, programs_1, programs_2), (heads_0, heads_1, heads_2)
    lengths, at = (length_0, length_1, length_2), tl.program_id(1)
    rows, columns = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, WIDTH)
    for i in tl.static_range(COUNT):
        if tl.program_id(2) == i:
            x, found, bad, stride_b, stride_h, stride_t = matrices[i]
            heads, length = heads_of[i], lengths[i]
            there = rows < tl.where(at < programs_of[i], length, 0)
            inside = there[:, None] & (columns < DIMS[i])[None, :]
            x += tl.cast(at // heads, tl.int64) * stride_b + tl.cast(at % heads, tl.int64) * stride_h
            values = tl.load(x + rows[:, None].to(tl.int64) * stride_t + columns[None, :], mask=inside, other=0.0)
            to = tl.cast(at, tl.int64) * length + rows
            if BACKWARD:
                lost = tl.load(bad + to, mask=there, other=0) != 0
            else:
                lost = non_finite(values)
                tl.store(bad + to, lost.to(tl.int8), mask=there)
            values = tl.where(lost[:, None], 0.0, values)
            tl.store(found + to[:, None] * DIMS[i] + columns[None, :], values, mask=inside)
