"""The kernel of `finite`."""

from __future__ import annotations

import triton
import triton.language as tl

from .blocks import LENGTHS

LIMIT = tl.constexpr((127 + 56) << 23)
"""The bits of 2^56 in float32, the limit of `precision.clean`."""


@triton.jit
def non_finite(x):
    """Return which vectors [N, WIDTH] hold a number not finite or beyond 2^56, by bits without sign."""
    return tl.max(x.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1) > LIMIT


@triton.jit(do_not_specialize=LENGTHS)
def clean_kernel(
    x, good, bad, heads, length, stride_b, stride_h, stride_t,
    D: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Clean one block of vectors of one head: x [B, H, T, D], contiguous along D, into contiguous good and bad."""
    at = tl.program_id(1)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, WIDTH)
    there = rows < length
    inside = there[:, None] & (columns < D)[None, :]
    head = (at // heads).to(tl.int64) * stride_b + (at % heads).to(tl.int64) * stride_h
    values = tl.load(x + head + rows[:, None].to(tl.int64) * stride_t + columns[None, :], mask=inside, other=0.0)
    lost = non_finite(values)
    to = at.to(tl.int64) * length + rows
    tl.store(good + to[:, None] * D + columns[None, :], tl.where(lost[:, None], 0.0, values), mask=inside)
    tl.store(bad + to, lost.to(tl.int8), mask=there)
