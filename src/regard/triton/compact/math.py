"""Weights of compact attention from scores, shared by the forward pass, the backward pass and decoding.

A weight is a power of the excess e = max(z - theta, 0) over the row's threshold: p = (e / reach)^r / mass, with
z = factor q.k. `power`, `lower_power` and `root` are all that depends on r. To support another whole power, add it to
`POWERS` in `rules.py`. A kernel with a function of its own (`triton_relative`) has p = relative(reach - e) / mass.

Legend: R rows (queries) of a program, K keys of a block.
"""

import triton
import triton.language as tl

SOFTMAX, ADAPTIVE, ANCHORED, FIXED = (tl.constexpr(i) for i in range(4))
UNIFORM = tl.constexpr(0)  # fallback weights of a row without a near enough key: equal for all keys (1: none)
NEAREST = tl.constexpr(2)  # or only the best key
LOG2E = tl.constexpr(1.4426950408889634)
SMALLEST = tl.constexpr(2.0**-100)  # least reach whose inverse is finite


@triton.jit
def power(u, R: tl.constexpr):
    """Return u^R, the value of the kernel, for u >= 0 and a whole R >= 1."""
    w = u
    for _ in tl.static_range(R - 1):
        w = w * u
    return w


@triton.jit
def lower_power(u, R: tl.constexpr):
    """Return u^(R - 1), the kernel's derivative over R; for R = 1 it is 1 where u > 0."""
    if R == 1:
        return tl.where(u > 0, 1.0, 0.0)
    else:
        return power(u, R - 1)


@triton.jit
def root(x, R: tl.constexpr, EXACT: tl.constexpr = False):
    """Return x^(1 / R) for x > 0; EXACT: with a square root that is rounded correctly."""
    if R == 1:
        return x
    elif R == 2:
        return tl.sqrt_rn(x) if EXACT else tl.sqrt(x)
    else:
        return tl.exp2(tl.log2(x) * (1.0 / R))


@triton.jit
def relative(d, reach, FORM: tl.constexpr):
    """Return (K(reach - d), K'(reach - d)) / K(reach), K a kernel's own function; 0 for distances d from reach on."""
    d = tl.maximum(d, 0.0)
    value, slope = FORM.relative(tl.minimum(d, reach), reach)
    inside = d < tl.where(reach > SMALLEST, reach, 0.0)
    return tl.where(inside, value, 0.0), tl.where(inside, slope, 0.0)


@triton.jit
def value_of(e, reach, g, FORM: tl.constexpr):
    """Return K(e) / K(reach) of excesses e; g is 1 / reach."""
    return power(e * g, FORM.r) if FORM.relative is None else relative(reach - e, reach, FORM)[0]


@triton.jit
def excess(dot, factor, theta):
    """Return by how much scores [R, K] exceed their row's threshold, >= 0; factor and theta are [R] or numbers."""
    return tl.maximum(dot * factor - theta, 0.0)
