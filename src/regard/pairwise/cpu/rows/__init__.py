"""Row solvers in numba: scores to weights and back, one row of scores at a time, in parallel over rows.

Imported only where `impl="cpu"` runs (numba is the extra `cpu`). The mathematics is that of `regard.grammar`: with
top = max z, d = top - z and reach = top - theta, a key weighs

    p = K(1 - d / reach) / mass,        K(u) = [u]_+^r, or 1 where u > 0, or exp(-d),

and the rules differ in reach alone. The forward pass takes the largest score of every tile of a row. The adaptive
rule first solves for those alone: fewer keys need a larger peak, so that this one bounds the row's from above; it
tells which tiles can still count, and Newton's descent on those begins from it. The backward pass needs the row's
statistics only. What is out of reach of a whole span of
columns is not looked at twice.

Legend: z, p, g, dz [R, n] rows of scores, weights, dL/dp, dL/dz; row i sees columns [lo[i], hi[i]), and -inf hides a
key inside. `bits` is z read as integers. `floats` [R, 6] top, theta, reach, mass, support, effective sample size;
`flags` [R, 3] empty, fallback, status; `index` [R, 3] positions as the rules note them; `power`, `number` [R] the
kernel's r and the rule's margin or bias. Both passes can work in place (p is z, dz is g): a span of columns is read
before it is written.
"""

from .base import (
    ADAPTIVE,
    ANCHORED,
    FIXED,
    GAUSSIAN,
    NEAREST,
    POWER,
    POWER1,
    POWER2,
    POWER3,
    STAND_NEAREST,
    STAND_UNIFORM,
    STAND_ZERO,
    UNIFORM,
)
from .passes import backward, backward_part, forward, forward_part

__all__ = [
    "ADAPTIVE",
    "ANCHORED",
    "FIXED",
    "GAUSSIAN",
    "NEAREST",
    "POWER",
    "POWER1",
    "POWER2",
    "POWER3",
    "STAND_NEAREST",
    "STAND_UNIFORM",
    "STAND_ZERO",
    "UNIFORM",
    "backward",
    "backward_part",
    "forward",
    "forward_part",
]
