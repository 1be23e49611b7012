"""Compact attention, forward: what is launched.

Softmax and a fixed threshold take one pass (`compact_stream`); rules that rank keys below the best one take a search
for the threshold and the blocks with weight, and then the output from those blocks (`compact_search`).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
from torch import Tensor

from ..runtime.launch import launch
from ..runtime.span import Span, batch_stride
from ..runtime.tiles import Tiles, TileTable
from . import rules as compact
from .rows import Form, padded
from .search import compact_search_kernel, compact_weigh_kernel
from .stream import compact_stand_in_kernel, compact_stream_kernel

TOLERANCE = {torch.bfloat16: 2.0**-8, torch.float32: 2.0**-12}
"""The last step of a threshold, over the peak: what is left after it is about its square."""


SMALLEST = torch.finfo(torch.float32).tiny
"""The least scale, since one that float32 takes for 0 would make NaN of what is hidden."""


class _Call:
    """What the launches of one call have in common."""

    def __init__(
        self, q: Tensor, k: Tensor, v: Tensor, factor: Tensor | float, given: Tensor | float, span: Span,
        rule: tuple[int, int, int], flags: tuple[bool, bool], granule: tuple[int, int],
    ) -> None:  # fmt: skip
        self.batch, self.heads, self.queries, dim = q.shape
        self.keys, width, mask = k.shape[2], v.shape[3], span.mask
        self.dtype, self.granule = q.dtype, granule
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
        tensors = isinstance(factor, Tensor), isinstance(given, Tensor), mask is not None
        self.form = Form(*rule, *padded(dim), *padded(width), *tensors, *flags)

    def start(self, tables: dict[int, TileTable], form: Form, run: Callable[[Tiles, Form], None]) -> None:
        """Run with the tiles of a table, brought to fit the marks of blocks, and with the form they complete. What that
        hangs on, tiles that are tuned hang on too."""

        def fitted(tiles: Tiles) -> None:
            tiles = tiles.fitted(*self.granule)
            far = max(self.k_steps[2], self.v_steps[2]) * tiles.keys >= 2**31
            run(tiles, form._replace(rows=tiles.rows, keys=tiles.keys, granule=self.granule[0], far=far))

        fitted(tables[self.dtype.itemsize].pick(max(form.dim, form.value_dim), self.dtype, fitted, form))

    def grid(self, tiles: Tiles) -> tuple[int]:
        return (self.batch * self.heads * triton.cdiv(self.queries, tiles.rows),)

    def lists(self, tiles: Tiles) -> Tensor:
        """Room for a list of key blocks a program."""
        blocks = triton.cdiv(self.keys, tiles.keys)
        return torch.empty(*self.grid(tiles), blocks, dtype=torch.int32, device=self.q.device)


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
    call = _Call(q, k, v, factor, given, span, (rule, r, stand), (keep, counted), granule)
    out, floats, flags, index, tilt, live = found
    if rule in (compact.SOFTMAX, compact.FIXED):
        _stream(call, out, floats, flags, live)
        if rule == compact.FIXED and stand != compact.STANDS["zero"]:
            _stand_in(call, out, floats, flags, index, live)
        return
    blocks = triton.cdiv(call.queries, granule[0]), triton.cdiv(call.keys, granule[1])
    marks = live if keep else torch.zeros(call.batch, call.heads, *blocks, dtype=torch.uint8, device=q.device)
    _search(call, floats, flags, marks)
    _weigh(call, (floats, flags, marks), out, index, tilt)


def _stream(call: _Call, *found: Tensor) -> None:
    def run(tiles: Tiles, form: Form) -> None:
        launch(
            compact_stream_kernel, call.grid(tiles), call.q, call.k, call.v, call.factor, call.given, *call.ranges,
            *found, call.scale, call.number, *call.sizes, *call.q_steps, *call.k_steps, *call.v_steps,
            *call.range_steps, tiles=tiles, FORM=form,
        )  # fmt: skip

    call.start(compact.STREAM, call.form._replace(stand=0), run)


def _stand_in(call: _Call, *found: Tensor) -> None:
    def run(tiles: Tiles, form: Form) -> None:
        launch(
            compact_stand_in_kernel, call.grid(tiles), call.q, call.k, call.v, call.factor, *call.ranges, *found,
            call.scale, *call.sizes, *call.q_steps, *call.k_steps, *call.v_steps, *call.range_steps,
            tiles=tiles, FORM=form,
        )  # fmt: skip

    call.start(compact.STAND_IN, call.form._replace(r=0, given=False), run)


def _search(call: _Call, *found: Tensor) -> None:
    def run(tiles: Tiles, form: Form) -> None:
        launch(
            compact_search_kernel, call.grid(tiles), call.q, call.k, call.factor, call.given, *call.ranges, *found,
            call.lists(tiles), call.scale, call.number, TOLERANCE[call.dtype], *call.sizes, *call.q_steps,
            *call.k_steps, *call.range_steps, tiles=tiles, FORM=form,
        )  # fmt: skip

    form = call.form._replace(stand=0, value_dim=0, value_wide=0, keep=False, counted=False)
    call.start(compact.SEARCH, form, run)


def _weigh(call: _Call, statistics: tuple[Tensor, ...], *found: Tensor) -> None:
    def run(tiles: Tiles, form: Form) -> None:
        launch(
            compact_weigh_kernel, call.grid(tiles), call.q, call.k, call.v, call.factor, *call.ranges, *statistics,
            call.lists(tiles), *found, call.scale, *call.sizes, *call.q_steps, *call.k_steps, *call.v_steps,
            *call.range_steps, tiles=tiles, FORM=form,
        )  # fmt: skip

    table = compact.WEIGH_KEPT if call.form.keep else compact.WEIGH
    call.start(table, call.form._replace(stand=0, given=False), run)
