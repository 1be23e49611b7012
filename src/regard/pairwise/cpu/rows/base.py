"""Codes, sizes and compilers of the numba loops."""

from typing import Any

from numba import njit

ADAPTIVE, ANCHORED, FIXED, NEAREST = 0, 1, 2, 3
UNIFORM, POWER1, POWER2, POWER3, POWER, GAUSSIAN, OWN = 0, 1, 2, 3, 4, 5, 6
FALLBACK_UNIFORM, FALLBACK_ZERO, FALLBACK_NEAREST = 0, 1, 2

TILE = 64
"""Columns that are tested together for being above the threshold."""
GAP = 2
"""Tiles below the threshold up to which a span is not split."""
SPAN = 512
"""Columns of one loop, whose sums are in the dtype of the scores; sums of spans are in float64."""
MARK = 128
"""Columns per mark of `active`."""

jit: Any = njit(error_model="numpy")
"""Compile a function without a cache: `passes.py` caches its functions with all that they call."""
sums: Any = njit(error_model="numpy", fastmath={"reassoc", "contract", "nsz"})
"""The same with sums in any order, which allows vector instructions. NaN and infinity keep their meaning."""
