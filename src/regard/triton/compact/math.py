"""What every kernel of compact attention computes in the same way: weights from scores.

Weights of the ranked kernels are powers of the excess e = max(z - theta, 0) over the row's threshold, z = factor q.k:
p = (e / reach)^r / mass. So the forward pass, the backward pass and decoding agree on the last bit of an edge.

Legend: R rows (queries) of a program, K keys of a block.
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
def cube_root(x):
    """Of x > 0."""
    return tl.exp2(tl.log2(x) * (1.0 / 3.0))
