"""Codes, sizes and compilers of the row solvers."""

from __future__ import annotations

from typing import Any

from numba import njit

ADAPTIVE, ANCHORED, FIXED, NEAREST = 0, 1, 2, 3
UNIFORM, POWER1, POWER2, POWER3, POWER, GAUSSIAN = 0, 1, 2, 3, 4, 5
STAND_UNIFORM, STAND_ZERO, STAND_NEAREST = 0, 1, 2

TILE = 64
"""Columns that are in reach or out of it together."""
GAP = 2
"""Tiles out of reach that are not worth a span of their own."""
SPAN = 512
"""Columns worked on at once, and terms of a sum taken in the dtype of the scores before they join it in float64."""
MARK = 128
"""Columns to one mark of `active`."""

jit: Any = njit(error_model="numpy")
"""Compiles a part. Parts are not cached: the entries in `passes.py` are, with all that they call."""
sums: Any = njit(error_model="numpy", fastmath={"reassoc", "contract", "nsz"})
"""The same where sums may be taken in any order, which is what lets them use whole registers; NaN and infinity keep
their meaning."""
