"""Which weightings the compact kernels know, and the tile sizes that are shipped for each kernel."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...grammar import Spec
from ...grammar.bandwidths.adaptive import Adaptive
from ...grammar.bandwidths.anchored import Anchored
from ...grammar.bandwidths.fixed import Fixed
from ...grammar.kernels import Gaussian, Polynomial
from ...grammar.weighting import Ratio
from ..runtime.tiles import Tiles, TileTable

SOFTMAX, ADAPTIVE, ANCHORED, FIXED = range(4)  # as in compact_math, which is not imported before a kernel runs
STANDS = {"uniform": 0, "zero": 1, "nearest": 2}
POWERS = (1.0, 2.0, 3.0)
GRANULE = 64
"""Rows at most of a block of pairs that is skipped where it holds no weight; fewer where tiles are smaller."""


def _tables(name: str, narrow: list[Tiles], wide: list[Tiles]) -> dict[int, TileTable]:
    """The tables of a kernel by bytes of a number, 2 and 4, from the tiles for widths up to 64, 128 and 256. As marks
    of blocks pass from kernel to kernel, what does not fit `granule_of` is brought to fit before a launch."""

    def table(size: int, tiles: list[Tiles], other: Tiles) -> TileTable:
        return TileTable(f"{name}_{size}", {(64 << i, size): own for i, own in enumerate(tiles)}, [other])

    return {2: table(2, narrow, Tiles(64, 64, 4, 3)), 4: table(4, wide, Tiles(64, 32, 4, 2))}


STREAM = _tables(
    "compact_stream",
    [Tiles(128, 64, 8, 3), Tiles(128, 64, 8, 3), Tiles(64, 64, 8, 2)],
    [Tiles(32, 32, 8, 2), Tiles(16, 32, 8, 2), Tiles(16, 32, 8, 1)],
)
STAND_IN = _tables(
    "compact_stand_in",
    [Tiles(64, 64, 8, 2), Tiles(64, 64, 8, 2), Tiles(64, 64, 8, 2)],
    [Tiles(64, 32, 8, 2), Tiles(32, 32, 8, 2), Tiles(32, 32, 8, 1)],
)
SEARCH = _tables(
    "compact_search",
    [Tiles(128, 64, 8, 3), Tiles(128, 64, 8, 3), Tiles(128, 64, 8, 2)],
    [Tiles(32, 32, 8, 2), Tiles(16, 32, 8, 2), Tiles(16, 32, 8, 1)],
)
WEIGH = _tables(
    "compact_weigh",
    [Tiles(128, 64, 8, 3), Tiles(128, 64, 8, 3), Tiles(64, 64, 8, 2)],
    [Tiles(32, 32, 8, 2), Tiles(16, 32, 8, 2), Tiles(16, 32, 8, 1)],
)
WEIGH_KEPT = _tables(  # what a backward pass needs besides takes registers
    "compact_weigh_kept",
    [Tiles(128, 64, 8, 3), Tiles(64, 64, 8, 2), Tiles(64, 64, 8, 2)],
    [Tiles(32, 32, 8, 2), Tiles(16, 32, 8, 2), Tiles(16, 32, 8, 1)],
)


def granule_of(width: int, dtype: torch.dtype) -> tuple[int, int]:
    """Rows and keys of a block of pairs that a mark is for, which a call decides once, for all its kernels and for its
    backward pass: those of the shipped STREAM, GRANULE rows at most. `width`: the larger of D and Dv."""
    tiles = STREAM[dtype.itemsize].pick(width, dtype)
    return min(GRANULE, tiles.rows), tiles.keys


class Rule(NamedTuple):
    """A weighting as the kernels know it.

    Attributes:
        code: SOFTMAX, ADAPTIVE, ANCHORED or FIXED.
        r: power of the kernel; 1 for softmax.
        number: margin or bias.
        stand: one of STANDS, what a row does that no key is near enough to.
        row: the name under which `number` may be given a row; "" where there is none.
    """

    code: int
    r: int
    number: float = 0.0
    stand: int = STANDS["zero"]
    row: str = ""


def rule_of(spec: Spec, numbers: Mapping[str, Any] | None = None, tensors: Sequence[str] = ()) -> Rule | str:
    """The rule of a sentence with these numbers in place of its own, or why the kernels do not know it. What is named
    in `tensors` is given as one, as are tensors among the numbers."""
    kernel, rule, numbers = spec.kernel, spec.bandwidth, numbers or {}
    if type(spec.weighting) is not Ratio or type(rule) not in (Adaptive, Anchored, Fixed):
        return f"knows normalised kernels under the rules adaptive, anchored and fixed; this is {spec}"
    if type(kernel) is Gaussian and type(rule) is Fixed:
        return Rule(SOFTMAX, 1)
    if type(kernel) is not Polynomial:
        return f"knows polynomial kernels, and the gaussian one under the rule fixed; this is {spec}"
    for name in ("r", "alpha"):
        if name in tensors or isinstance(numbers.get(name), Tensor):
            return f"takes {name} as a number, not as a tensor"
    power = rule.kernel_params(numbers).get("r", kernel.r)
    r = min(POWERS, key=lambda whole: abs(whole - power))
    if abs(r - power) > 1e-9 * r:  # alpha = 4/3 is rounded, and so its power
        return f"knows the powers r = 1, 2 and 3; this is r = {power:g}"
    if type(rule) is Adaptive:
        return Rule(ADAPTIVE, int(r))
    if type(rule) is Anchored:
        return Rule(ANCHORED, int(r), _number(numbers.get("margin"), rule.margin), row="margin")
    return Rule(FIXED, int(r), _number(numbers.get("bias"), rule.bias or 0.0), STANDS[rule.empty], "bias")


def _number(given: Any, default: float) -> float:
    return float(given) if isinstance(given, (int, float)) else default
