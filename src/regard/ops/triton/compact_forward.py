"""Compact attention, forward: what is launched.

Softmax and a fixed threshold take one pass (`compact_stream`); rules that rank keys below the best one take a search
for the threshold and the blocks with weight, and then the output from those blocks (`compact_search`).
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from . import compact
from .compact_search import compact_search_kernel, compact_weigh_kernel
from .compact_stream import compact_stand_in_kernel, compact_stream_kernel
from .launch import launch
from .span import Span, batch_stride
from .tiles import Tiles

TOLERANCE = {torch.bfloat16: 2.0**-8, torch.float32: 2.0**-12}
"""The last step of a threshold, over the peak: what is left after it is about its square."""


SMALLEST = torch.finfo(torch.float32).tiny
"""The least scale, since one that float32 takes for 0 would make NaN of what is hidden."""


class _Call:
    """What the launches of one call have in common."""

    def __init__(
        self, q: Tensor, k: Tensor, v: Tensor, factor: Tensor | float, given: Tensor | float, span: Span, keep: bool,
        counted: bool, granule: tuple[int, int],
    ) -> None:  # fmt: skip
        self.batch, self.heads, self.queries, dim = q.shape
        self.keys, width, mask = k.shape[2], v.shape[3], span.mask
        self.width, self.dtype, self.granule = max(dim, width), q.dtype, granule
        nothing = torch.empty(1, device=q.device)  # stands where a flag says that nothing is read
        self.q, self.k, self.v = q, k, v
        self.factor, self.given = (x if isinstance(x, Tensor) else nothing for x in (factor, given))
        self.scale = 1.0 if isinstance(factor, Tensor) else max(factor, SMALLEST)
        self.number = 0.0 if isinstance(given, Tensor) else given
        self.ranges = span.low, span.high, span.low if mask is None else mask
        self.sizes = self.heads, self.heads // max(1, k.shape[1]), self.queries, self.keys
        self.q_steps, self.k_steps, self.v_steps = (x.stride()[:3] for x in (q, k, v))
        steps = (0, 0) if mask is None else tuple(mask.stride(i) if mask.shape[i] > 1 else 0 for i in (0, 1))
        self.range_steps = batch_stride(span.low), *steps
        self.scores = {"FACTOR": isinstance(factor, Tensor), "MASK": mask is not None, "DIM": dim, "WIDTH": _block(dim)}
        self.outputs = {"KEEP": keep, "COUNTED": counted, "VALUES": width, "VALUE_WIDTH": _block(width)}
        self.given_flag = {"GIVEN": isinstance(given, Tensor)}

    def grid(self, tiles: Tiles) -> tuple[int]:
        return (self.batch * self.heads * triton.cdiv(self.queries, tiles.rows),)

    def lists(self, tiles: Tiles) -> Tensor:
        """Room for a list of key blocks a program."""
        blocks = triton.cdiv(self.keys, tiles.keys)
        return torch.empty(*self.grid(tiles), blocks, dtype=torch.int32, device=self.q.device)

    def sides(self, tiles: Tiles) -> dict[str, int]:
        """Sizes of the tiles, and whether a block of keys reaches further than an int32 does."""
        wide = max(self.k_steps[2], self.v_steps[2]) * tiles.keys >= 2**31
        return {"ROWS": tiles.rows, "KEYS": tiles.keys, "GRANULE": self.granule[0], "WIDE": wide}


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    factor: Tensor | float,
    given: Tensor | float,
    span: Span,
    found: tuple[Tensor, ...],
    rule: int,
    r: int,
    stand: int,
    granule: tuple[int, int],
    keep: bool,
    counted: bool,
) -> None:
    """Fill `found`: out, floats, flags, index, tilt and live, as `compact.forward` returns them.

    Memory beside them: where the rule needs a search, 4 bytes a block of pairs, and without `keep` one more.
    """
    call = _Call(q, k, v, factor, given, span, keep, counted, granule)
    out, floats, flags, index, tilt, live = found
    if rule in (compact.SOFTMAX, compact.FIXED):
        _stream(call, {"RULE": rule, "R": r}, out, floats, flags, live)
        if rule == compact.FIXED and stand != compact.STANDS["zero"]:
            _stand_in(call, {"STAND": stand}, out, floats, flags, index, live)
        return
    blocks = triton.cdiv(call.queries, granule[0]), triton.cdiv(call.keys, granule[1])
    marks = live if keep else torch.zeros(call.batch, call.heads, *blocks, dtype=torch.uint8, device=q.device)
    _search(call, {"RULE": rule, "R": r}, floats, flags, marks)
    _weigh(call, {"RULE": rule, "R": r}, (floats, flags, marks), out, index, tilt)


def _stream(call: _Call, rule: dict[str, int], *found: Tensor) -> None:
    def run(tiles: Tiles) -> None:
        launch(
            compact_stream_kernel, call.grid(tiles), call.q, call.k, call.v, call.factor, call.given, *call.ranges,
            *found, call.scale, call.number, *call.sizes, *call.q_steps, *call.k_steps, *call.v_steps,
            *call.range_steps, tiles=tiles, **rule, **call.scores, **call.given_flag, **call.outputs,
            **call.sides(tiles),
        )  # fmt: skip

    run(compact.STREAM[call.dtype.itemsize].pick(call.width, call.dtype, run, _flags(rule, call)))


def _stand_in(call: _Call, rule: dict[str, int], *found: Tensor) -> None:
    def run(tiles: Tiles) -> None:
        launch(
            compact_stand_in_kernel, call.grid(tiles), call.q, call.k, call.v, call.factor, *call.ranges, *found,
            call.scale, *call.sizes, *call.q_steps, *call.k_steps, *call.v_steps, *call.range_steps,
            tiles=tiles, **rule, **call.scores, **call.outputs, **call.sides(tiles),
        )  # fmt: skip

    run(compact.STAND_IN[call.dtype.itemsize].pick(call.width, call.dtype))


def _search(call: _Call, rule: dict[str, int], *found: Tensor) -> None:
    def run(tiles: Tiles) -> None:
        launch(
            compact_search_kernel, call.grid(tiles), call.q, call.k, call.factor, call.given, *call.ranges, *found,
            call.lists(tiles), call.scale, call.number, TOLERANCE[call.dtype], *call.sizes, *call.q_steps,
            *call.k_steps, *call.range_steps, tiles=tiles, **rule, **call.scores, **call.given_flag,
            **call.sides(tiles),
        )  # fmt: skip

    run(compact.SEARCH[call.dtype.itemsize].pick(call.scores["DIM"], call.dtype, run, _flags(rule, call)))


def _weigh(call: _Call, rule: dict[str, int], statistics: tuple[Tensor, ...], *found: Tensor) -> None:
    def run(tiles: Tiles) -> None:
        launch(
            compact_weigh_kernel, call.grid(tiles), call.q, call.k, call.v, call.factor, *call.ranges, *statistics,
            call.lists(tiles), *found, call.scale, *call.sizes, *call.q_steps, *call.k_steps, *call.v_steps,
            *call.range_steps, tiles=tiles, **rule, **call.scores, **call.outputs, **call.sides(tiles),
        )  # fmt: skip

    table = compact.WEIGH_KEPT if call.outputs["KEEP"] else compact.WEIGH
    run(table[call.dtype.itemsize].pick(call.width, call.dtype, run, _flags(rule, call)))


def _flags(rule: dict[str, int], call: _Call) -> tuple[Any, ...]:
    """What tuned tiles hang on beside widths and dtype."""
    return (*rule.values(), call.outputs["KEEP"], call.outputs["COUNTED"], call.scores["MASK"])


def _block(dim: int) -> int:
    """Columns of a tile that holds rows of so many features."""
    return max(16, triton.next_power_of_2(dim))
