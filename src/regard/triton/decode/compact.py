"""Attention at degree 0 with few queries: programs share out the keys, and the queries of all heads of one key head
meet its keys together.

Softmax reads keys and values once. Compact rules read keys once and keep their scores (4 bytes a row and key beside the
2 D or 4 D of the key), find every row's threshold among the scores near its best, and then read only the values with
weight. If tensors are `raw`, rows that see a non-finite number are NaN; compact rules then read all values.

Forward only: calls that need a gradient use the general kernels.

Legend: B batch, H query heads, Hkv key heads, Tq queries, Tk keys.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...checks import ArgumentError
from ...pairwise.diagnostics import Diagnostics
from ...pairwise.dispatch import Cost, Inputs, Problem
from ...pairwise.visibility import Visibility
from ..compact.rules import SOFTMAX, Rule, rule_of
from ..runtime.launch import launch
from ..runtime.tiles import Tiles, TileTable
from .plan import Ranges, group_of, masked, ranges_of, row_tensor, rows_of, splits_of, strides

TABLE = TileTable(
    "compact_decode",
    {(64, 2): Tiles(keys=64, stages=3), (256, 2): Tiles(keys=32, stages=3), (256, 4): Tiles(keys=32)},
    others=(Tiles(keys=64), Tiles(keys=128), Tiles(keys=128, warps=8)),
)
CHUNK = Tiles(keys=1024, warps=4, stages=1)
"""Scores that a program reads at once when it solves for a threshold."""
PARTS = 8
"""Splits that are added at once."""


def cost(problem: Problem) -> Cost:
    """Return the operations of the forward pass and the bytes of scores and splits."""
    rows = problem.batch * problem.heads * problem.queries
    return Cost(2 * rows * problem.keys * (problem.dim + problem.value_dim), 8 * rows * problem.keys)


def run(inputs: Inputs) -> tuple[Tensor, Diagnostics | None]:
    """Return the output [B, H, Tq, Dv] in the dtype of the values; no diagnostics.

    Raises:
        ArgumentError: a power of the kernel, given as a number with the call, that the kernels do not know.
    """
    rule = rule_of(inputs.spec, inputs.params)
    if isinstance(rule, str):
        raise ArgumentError(f"attention: impl='triton' {rule}. Use impl='blocked'.")
    given = inputs.params.get(rule.row)
    given = given if isinstance(given, Tensor) else None
    tensors = (inputs.q, inputs.k, inputs.v, inputs.factor)
    return decode(*tensors, rule, given, inputs.visible, raw=inputs.raw), None


def decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    factor: float | Tensor,
    rule: Rule,
    given: Tensor | None,
    visible: Visibility,
    raw: bool = False,
) -> Tensor:
    """Return the attention of few queries, [B, H, Tq, Dv] in the dtype of the values.

    Args:
        q, k, v: [B, H, Tq, D], [B, Hkv, Tk, D] and [B, Hkv, Tk, Dv], of one dtype.
        factor: factor of the products, a number or [B, H, Tq].
        given: the rule's number for every row [B, H, Tq], or None.
        raw: whether vectors may be non-finite (or beyond 2^56) anywhere: rows that see one become NaN. Otherwise
            only vectors that no row sees may be non-finite.
    """
    ranges = ranges_of(visible, q.device)
    scale, by = (1.0, row_tensor(factor, q)) if isinstance(factor, Tensor) else (float(factor), None)
    given = None if given is None else row_tensor(given, q)
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    return _decode(q, k, v, by, given, *ranges.tensors, *rule[:4], scale, ranges.most, raw)


def _run(q: Tensor, k: Tensor, v: Tensor, factor: Tensor | None, given: Tensor | None, *rest: Any) -> Tensor:
    low, high, mask, code, power, number, stand, scale, most, raw = rest
    out = v.new_empty(*q.shape[:3], v.shape[-1])
    if q.numel() == 0 or k.shape[2] == 0:
        return out.zero_()
    tiles = TABLE.pick(max(q.shape[-1], v.shape[-1]), v.dtype)
    call = _Call(q, k, v, factor, scale, Ranges(low, high, mask, most), out, tiles, raw)
    if code == SOFTMAX:
        call.softmax()
    else:
        call.compact(Rule(code, power, number, stand), given)
    return out


_decode = torch.library.custom_op(
    "regard::triton_compact_decode",
    _run,
    mutates_args=(),
    schema="(Tensor q, Tensor k, Tensor v, Tensor? factor, Tensor? given, Tensor low, Tensor high, Tensor? mask, "
    "SymInt code, SymInt power, float number, SymInt stand, float scale, SymInt most, bool raw) -> Tensor",
)


@_decode.register_fake
def _(q, k, v, *rest):
    return v.new_empty(*q.shape[:3], v.shape[-1])


def room_for(most: int, keys: int) -> int:
    """Return how many tiles so many keys can touch."""
    return (most + keys - 2) // keys + 1


class Shape(NamedTuple):
    """Sizes that every kernel of a call is given; a program has `rows` rows of a key head."""

    heads: int
    group: int
    queries: int
    rows: int
    programs: int
    most: int

    @classmethod
    def of(cls, q: Tensor, k: Tensor, one: bool = False) -> Shape:
        """Return the sizes of a call; with `one` every program has one row."""
        from .math import next_power_of_2

        group, queries = group_of(q, k), q.shape[2]
        count = group * queries
        rows = 1 if one else rows_of(count, k.dtype)
        programs = k.shape[0] * k.shape[1] * -(-count // rows)
        return cls(k.shape[1], group, queries, rows, programs, next_power_of_2(queries))

    @property
    def sizes(self) -> tuple[int, int, int]:
        return self.heads, self.group, self.queries


def width_of(x: Tensor) -> int:
    """Return the columns of a tile that holds the features of x."""
    from .math import next_power_of_2

    return max(16, next_power_of_2(x.shape[-1]))


class _Call(NamedTuple):
    """A call as its launches need it."""

    q: Tensor
    k: Tensor
    v: Tensor
    factor: Tensor | None
    scale: float
    ranges: Ranges
    out: Tensor
    tiles: Tiles
    raw: bool

    def _shared(self) -> tuple[Shape, int, int, dict[str, int]]:
        """Return sizes, tiles of a row, splits, and the widths of keys and values."""
        q, v = self.q, self.v
        shape, room = Shape.of(q, self.k), room_for(self.ranges.most, self.tiles.keys)
        splits = splits_of(q.device, shape.programs, room, shape.rows)
        widths = {"D": q.shape[-1], "WIDTH": width_of(q), "DV": v.shape[-1], "WIDTH_V": width_of(v)}
        return shape, room, splits, widths

    def softmax(self) -> None:
        from .compact_kernels import merge_kernel, online_kernel

        q, k, v, factor, scale, ranges, out, tiles, raw = self
        shape, _, splits, widths = self._shared()
        part = q.new_empty(splits, *out.shape, dtype=torch.float32)
        state = q.new_empty(splits, *out.shape[:3], 2, dtype=torch.float32)
        flags = {"GIVEN": factor is not None, "MASKED": masked(ranges), "RAW": raw}
        if flags["MASKED"] == 2:  # a mask for each head takes registers for every pair
            tiles = replace(tiles, warps=8)
        launch(
            online_kernel, (shape.programs, splits), q, k, v, factor, *ranges.tensors, part, state, *shape.sizes, scale,
            *strides(q), *strides(k), *strides(v), *ranges.strides, part.stride(0), state.stride(0),
            tiles=tiles, **widths, ROWS=shape.rows, KEYS=tiles.keys, MOST=shape.most, **flags,
        )  # fmt: skip
        launch(
            merge_kernel, (out[..., 0].numel(),), part, state, out, splits, part.stride(0), state.stride(0),
            tiles=Tiles(warps=4, stages=1), DV=v.shape[-1], WIDTH=width_of(v), PARTS=PARTS,
        )  # fmt: skip

    def compact(self, rule: Rule, given: Tensor | None) -> None:
        from .compact_kernels import output_kernel, scores_kernel, threshold_kernel

        q, k, v, factor, scale, ranges, out, tiles, raw = self
        shape, room, splits, widths = self._shared()
        rows, grid = q.shape[:3], (shape.programs, splits)
        z, near = q.new_empty(2, *rows, room * tiles.keys, dtype=torch.float32)
        tops = q.new_empty(*rows, room, dtype=torch.float32)
        found = q.new_empty(*rows, 3, dtype=torch.float32)
        best = q.new_empty(*rows, 2, dtype=torch.int32)
        kinds = {"RULE": rule.code, "R": rule.r, "EMPTY": rule.stand}
        seen = {"KEYS": tiles.keys, "MASKED": masked(ranges), "MOST": shape.most}
        launch(
            scores_kernel, grid, q, k, v, factor, *ranges.tensors, z, tops, *shape.sizes, room, scale,
            *strides(q), *strides(k), *strides(v), *ranges.strides,
            tiles=tiles, **widths, ROWS=shape.rows, **seen, GIVEN=factor is not None, RAW=raw,
        )  # fmt: skip
        launch(
            threshold_kernel, (rows.numel(),), z, tops, near, given, *ranges.tensors, found, best, *shape.sizes, room,
            rule.number, *ranges.strides,
            tiles=CHUNK, CHUNK=min(CHUNK.keys, 16 * tiles.keys), PARAMETER=given is not None, **seen, **kinds,
        )  # fmt: skip
        part = out[None] if splits == 1 else q.new_empty(splits, *out.shape, dtype=torch.float32)
        launch(
            output_kernel, grid, v, z, tops, *ranges.tensors, found, best, part, *shape.sizes, room,
            *strides(v), *ranges.strides, part.stride(0),
            tiles=tiles, DV=v.shape[-1], WIDTH=width_of(v), ROWS=shape.rows, **seen, **kinds,
        )  # fmt: skip
        add_splits(part, out)


def add_splits(part: Tensor, out: Tensor) -> None:
    """Add the splits of an output, [splits, B, H, Tq, Dv], unless there is one, which is the output itself."""
    from .compact_kernels import sum_kernel

    if len(part) > 1:
        launch(
            sum_kernel, (out[..., 0].numel(),), part, out, len(part), part.stride(0),
            tiles=Tiles(warps=4, stages=1), DV=out.shape[-1], WIDTH=width_of(out), PARTS=PARTS,
        )  # fmt: skip
