"""The weightings that the compact kernels support, and the tile sizes shipped for each kernel."""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from types import FunctionType
from typing import Any, NamedTuple

import torch

from ...grammar import Spec
from ...grammar.bandwidths.adaptive import Adaptive
from ...grammar.bandwidths.anchored import Anchored
from ...grammar.bandwidths.fixed import Fixed
from ...grammar.kernels import Gaussian, Polynomial
from ...grammar.weighting import Ratio
from ..runtime.tiles import Row, TileTable

SOFTMAX, ADAPTIVE, ANCHORED, FIXED = range(4)  # as in `math`, which is not imported before a kernel runs
STANDS = {"uniform": 0, "zero": 1, "nearest": 2}
POWERS = (1.0, 2.0, 3.0)
MASK_TILE = 64  # maximum rows of a block of pairs that is skipped if it has no weight; fewer if tiles are smaller


def _tables(name: str, narrow: list[Row], wide: list[Row]) -> dict[int, TileTable]:
    """Return the tables of a kernel by bytes of a number, each with alternatives."""
    return {
        2: TileTable.by_width(f"{name}_2", narrow, [], [(64, 64, 4, 3), (128, 64, 8, 3)]),
        4: TileTable.by_width(f"{name}_4", [], wide, [(64, 32, 4, 2)]),
    }


_SHORT = [(32, 32, 8, 2), (16, 32, 8, 2), (16, 32, 8, 1)]
_LONG = [(128, 64, 8, 3), (128, 64, 8, 3), (64, 64, 8, 2)]
STREAM = _tables("compact_stream", _LONG, _SHORT)
STAND_IN = _tables("compact_stand_in", 3 * [(64, 64, 8, 2)], [(64, 32, 8, 2), (32, 32, 8, 2), (32, 32, 8, 1)])
SEARCH = _tables("compact_search", [(64, 64, 4, 4), (64, 64, 4, 3), (128, 64, 8, 2)], _SHORT)
WEIGH = _tables("compact_weigh", [(64, 64, 4, 2), (64, 64, 4, 2), (64, 64, 8, 2)], _SHORT)
"""64 rows: with 128 a program would visit every block that either half needs, and fewer fit on a multiprocessor."""
WEIGH_MEAN = _tables("compact_weigh_mean", [(64, 64, 4, 3), (128, 64, 8, 2), (64, 64, 8, 2)], _SHORT)
"""WEIGH for the backward pass of the adaptive rule, which needs a second sum of values: of 128 features, 64 rows of it
would spill with 4 warps, and with 8 both groups of 4 would compute all scores."""


def mask_tile_of(width: int, dtype: torch.dtype) -> tuple[int, int]:
    """Return rows and keys of a marked block of pairs, fixed for all kernels of a call, for the larger of D and Dv."""
    tiles = STREAM[dtype.itemsize].pick(width, dtype)
    return min(MASK_TILE, tiles.rows), tiles.keys


class Rule(NamedTuple):
    """A weighting in the form that kernels read."""

    code: int  # SOFTMAX, ADAPTIVE, ANCHORED or FIXED
    r: int  # power of the kernel; 1 for softmax and kernels with their own function
    number: float = 0.0  # margin or bias
    stand: int = STANDS["zero"]  # the fallback weights of a row without a near enough key
    row: str = ""  # name of the parameter that gives `number` for each row; "" if there is none
    own: str = ""  # the spec of a kernel with its own function, as JSON


def rule_of(spec: Spec, numbers: Mapping[str, Any] | None = None, tensors: Sequence[str] = ()) -> Rule | str:
    """Return the rule of a spec, or why the kernels do not support it; names in `tensors` are tensors."""
    kernel, rule, numbers = spec.kernel, spec.bandwidth, numbers or {}
    if type(spec.weighting) is not Ratio or type(rule) not in (Adaptive, Anchored, Fixed):
        return f"supports normalised kernels with the rules adaptive, anchored and fixed, not {spec}"
    if type(kernel) is Gaussian and type(rule) is Fixed:
        return Rule(SOFTMAX, 1)
    if hasattr(kernel, "triton_relative"):
        if kernel.params or not (kernel.compact and kernel.vanishes) or type(rule) is Adaptive:
            only = "compact kernels that are continuous at the threshold and have no parameters"
            return f"supports triton_relative only for {only}, and not with the rule adaptive"
        return _rule(rule, 1, numbers, spec.to_json())
    if type(kernel) is not Polynomial:
        return f"supports polynomial kernels, those with triton_relative, and gaussian*fixed, not {spec}"
    for name in ("r", "alpha"):
        if name in tensors or isinstance(numbers.get(name), torch.Tensor):
            return f"takes {name} as a number, not as a tensor"
    power = rule.kernel_params(numbers).get("r", kernel.r)
    r = min(POWERS, key=lambda whole: abs(whole - power))
    if abs(r - power) > 1e-9 * r:  # alpha = 4/3 is rounded, and so is its power
        return f"supports the powers r = 1, 2 and 3, not r = {power:g}"
    return _rule(rule, int(r), numbers)


def _rule(rule: Any, r: int, numbers: Mapping[str, Any], own: str = "") -> Rule:
    if type(rule) is Adaptive:
        return Rule(ADAPTIVE, r)
    name = "margin" if type(rule) is Anchored else "bias"
    given = numbers.get(name)
    number = float(given if isinstance(given, (int, float)) else getattr(rule, name) or 0.0)
    if type(rule) is Anchored:
        return Rule(ANCHORED, r, number, row=name, own=own)
    return Rule(FIXED, r, number, STANDS[rule.empty], name, own)


@lru_cache(maxsize=64)
def own_form(json: str) -> dict[str, Any]:
    """Return the fields of a `Form` by which kernels call the function of the kernel of a spec (`Rule.own`)."""
    if not json:
        return {}
    import triton
    import triton.language as tl

    plain = Spec.from_json(json).kernel.triton_relative
    function = FunctionType(plain.__code__, {**plain.__globals__, "tl": tl}, plain.__name__)
    function.__qualname__ = plain.__qualname__
    relative = triton.jit(function)
    return {"relative": relative, "source": getattr(relative, "cache_key", "")}
