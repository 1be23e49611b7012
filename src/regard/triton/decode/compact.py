"""Attention at degree 0 with few queries: the keys are split between programs, and the queries of all heads of one key
head are multiplied with its keys together. Forward only: calls that need a gradient use the general kernels.

Softmax reads keys and values once. Compact rules read keys once and keep their scores (4 bytes a row and key besides
2 D or 4 D of the key), find every row's threshold among the scores near its best, and then read only the values with
weight. If tensors are `raw`, rows that see a non-finite number are NaN; compact rules then read all values.

Legend: B batch, H query heads, Hkv key heads, Tq queries, Tk keys.
"""

from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ...pairwise.diagnostics import Diagnostics
from ...pairwise.dispatch import Cost, Inputs, Problem
from ...pairwise.visibility import Visibility
from ..compact.rules import SOFTMAX, Rule, own_form, rule_of
from ..runtime.call import Call, Form
from ..runtime.launch import launch
from ..runtime.operators import operator, rows_together, tensor_or_number
from ..runtime.span import Span
from ..runtime.tiles import Tiles, TileTable, padded, power_of_two

_TILES = {(64, 2): Tiles(keys=64, stages=3), (256, 2): Tiles(keys=32, stages=3), (256, 4): Tiles(keys=32)}
TABLE = TileTable("compact_decode", _TILES)
CHUNK = Tiles(keys=1024, warps=4, stages=1)  # scores that a program reads at once when it solves for a threshold
ROWS = 64  # maximum rows of a key head: queries x query heads
TILE = 32  # maximum rows of a program: with more, sums leave no registers for keys
LEAST = 4  # minimum tiles of keys of a program, so that it writes little compared with what it reads
PROCESSORS = 132  # multiprocessors of an H100 or H200, for devices that do not report theirs
WAVES = 4  # programs for each multiprocessor: the loads of one overlap the arithmetic of others
MERGE = Tiles(warps=4, stages=1)  # for kernels that merge splits
PARTS = 8  # splits that are added at once


def cost(problem: Problem) -> Cost:
    """Return the operations of the forward pass and the bytes of scores and splits."""
    rows = problem.batch * problem.heads * problem.queries
    return Cost(2 * rows * problem.keys * (problem.dim + problem.value_dim), 8 * rows * problem.keys)


def run(inputs: Inputs) -> tuple[Tensor, Diagnostics | None]:
    """Return the output [B, H, Tq, Dv] in the dtype of the values; no diagnostics."""
    rule = rule_of(inputs.spec, inputs.params)
    assert isinstance(rule, Rule), rule  # `supports` has refused everything else
    tensors = (inputs.q, inputs.k, inputs.v, inputs.factor)
    return decode(*tensors, rule, inputs.params.get(rule.row), inputs.visible, raw=inputs.raw), None


def decode(
    q: Tensor, k: Tensor, v: Tensor, factor: float | Tensor, rule: Rule, given: float | Tensor | None,
    visible: Visibility, raw: bool = False,
) -> Tensor:  # fmt: skip
    """Return the attention of few queries, [B, H, Tq, Dv] in the dtype of the values. `factor` is a number or [B, H,
    Tq], `given` the rule's number for every row [B, H, Tq], otherwise not read. If `raw`, any vector may be non-finite
    (or beyond 2^56), and rows that see one become NaN; otherwise only vectors that no row sees may be non-finite."""
    span = Span.of(visible, q, by_keys=False)
    (by, scale), (given, _) = of_rows(factor, q), of_rows(given, q)
    q, k, v = (rows_together(x) for x in (q, k, v))
    seen = span.low, span.high, span.mask
    return _decode(q, k, v, by, given, *seen, *rule[:4], rule.own, scale, most_keys(visible), raw)


def _run(q: Tensor, k: Tensor, v: Tensor, factor: Tensor | None, given: Tensor | None, *rest: Any) -> Tensor:
    low, high, mask, code, power, number, stand, own, scale, most, raw = rest
    out = v.new_empty(*q.shape[:3], v.shape[-1])
    if q.numel() == 0 or k.shape[2] == 0:
        return out.zero_()
    tiles = TABLE.pick(max(q.shape[-1], v.shape[-1]), v.dtype)
    call = Decoding(q, k, v, scale if factor is None else factor, Span(low, high, low, low, mask), most, raw)
    if code == SOFTMAX:
        if call.form.masked == 2:  # a mask for each head takes registers for every pair
            tiles = replace(tiles, warps=8)
        merged(call, None, out, tiles)
        return out
    from .compact_kernels import output_kernel, scores_kernel, threshold_kernel

    form, grid, room = call.shared(tiles)
    rows, steps, span = call.rows, call.span.steps, call.span.pointers
    z, near = call.blank(2, rows, room * tiles.keys)
    tops, numbers, best = call.new(room), call.new(3), call.blank(rows, 2, dtype=torch.int32)
    launch(
        scores_kernel, grid, call.matrices, call.factor, span, z, tops, *call.row_sizes, room, *steps,
        tiles=tiles, FORM=form,
    )  # fmt: skip
    form = form._replace(dim=0, wide=0, factors=False, raw=False, rule=code, r=power, stand=stand, **own_form(own))
    launch(
        threshold_kernel, (rows,), z, tops, near, given, span, numbers, best, *call.row_sizes, room,
        number, *steps, tiles=CHUNK, CHUNK=min(CHUNK.keys, 16 * tiles.keys), PARAMETER=given is not None,
        FORM=form._replace(value_dim=0, value_wide=0, own=1),
    )  # fmt: skip
    part = out[None] if grid[1] == 1 else call.blank(grid[1], *out.shape)
    launch(
        output_kernel, grid, call.matrices[2], z, tops, span, numbers, best, part, *call.row_sizes, room, *steps,
        part.stride(0), tiles=tiles, FORM=form,
    )  # fmt: skip
    add_splits(part, out)
    return out


_decode = operator(
    "compact_decode", _run,
    "(Tensor q, Tensor k, Tensor v, Tensor? factor, Tensor? given, Tensor low, Tensor high, Tensor? mask, "
    "SymInt code, SymInt power, float number, SymInt stand, str own, float scale, SymInt most, bool raw) -> Tensor",
    lambda q, k, v, *_: v.new_empty(*q.shape[:3], v.shape[-1]),
)  # fmt: skip


def add_splits(part: Tensor, out: Tensor) -> None:
    """Add the splits of an output, [splits, B, H, Tq, Dv], unless there is one, which is the output itself."""
    from .compact_kernels import sum_kernel

    if len(part) > 1:
        dim, wide = padded(out.shape[-1])
        launch(
            sum_kernel, (out[..., 0].numel(),), part, out, len(part), part.stride(0),
            tiles=MERGE, DV=dim, WIDTH=wide, PARTS=PARTS,
        )  # fmt: skip


# The launches of a call -----------------------------------------------------------------------------------------


@cache
def processors(device: torch.device) -> int:
    """Return how many multiprocessors a device has."""
    known = device.type == "cuda"
    return int(torch.cuda.get_device_properties(device).multi_processor_count) if known else PROCESSORS


def most_keys(visible: Visibility) -> int:
    """Return how many keys all queries of a sequence together can see, from the first to the last; at least 1."""
    first, last = visible.span(0, visible.queries)
    most = last - first
    if visible.window is not None:
        width = visible.window if visible.causal else 2 * visible.window - 1
        most = min(most, width + visible.queries - 1)
    return max(most, 1)


def of_rows(x: float | Tensor | None, q: Tensor) -> tuple[Tensor | None, float]:
    """Return (numbers or vectors of rows, float32 [B, H, Tq, ...], contiguous, 1), or (None, one number for all)."""
    return tensor_or_number(x.expand(*q.shape[:3], *x.shape[3:]) if isinstance(x, Tensor) else x)


class Decoding(Call):
    """Shared by the launches of one call; `keys` is an upper bound of the keys that all queries see."""

    def __init__(
        self, q: Tensor, k: Tensor, v: Tensor, factor: float | Tensor, span: Span, keys: int, raw: bool
    ) -> None:
        masked = 0 if span.mask is None else 1 if span.mask.shape[1] == 1 else 2
        super().__init__(q, k, v, factor, span, masked=masked, most=power_of_two(q.shape[2]), raw=raw)
        self.keys, self.rows = keys, self.shape.numel()
        self.row_sizes = k.shape[1], *self.sizes[1:3]

    def shared(self, tiles: Tiles) -> tuple[Form, tuple[int, int], int]:
        """Return form, grid (programs, splits that fill the device with >= LEAST tiles each), tiles a row can touch."""
        key_heads, group, queries = self.row_sizes
        rows = group * queries
        if rows > 1:
            rows = 1 if self.dtype == torch.float32 else min(max(16, power_of_two(rows)), TILE)
        programs = self.shape[0] * key_heads * -(-group * queries // rows)
        room = (self.keys + tiles.keys - 2) // tiles.keys + 1
        wanted = -(-WAVES * processors(self.q.device) // max(programs, 1))
        splits = max(1, min(wanted, room // max(LEAST, rows // 4), 65535))
        return self.form._replace(own=rows, tile=tiles.keys), (programs, splits), room


def merged(call: Decoding, probe: Tensor | None, out: Tensor, tiles: Tiles) -> None:
    """Compute softmax attention, or local linear attention whose t is -probe, by one pass and a merge of the splits."""
    from .compact_kernels import merge_kernel, online_kernel

    form, grid, _ = call.shared(tiles)
    total, sums = call.rows, 1 if probe is None else 2
    part, state = call.blank(grid[1], total, sums, form.value_dim), call.blank(grid[1], total, 2 * sums)
    launch(
        online_kernel, grid, call.matrices, call.factor, call.span.pointers, probe, part, state, *call.row_sizes,
        *call.span.steps, total, tiles=tiles, FORM=form,
    )  # fmt: skip
    launch(
        merge_kernel, (total,), part, state, out, grid[1], total,
        tiles=MERGE, CORRECTED=sums == 2, DV=form.value_dim, WIDTH=form.value_wide, PARTS=PARTS,
    )  # fmt: skip
