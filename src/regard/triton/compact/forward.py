"""Launches of the forward pass of compact attention.

Softmax and a fixed threshold take one pass (`stream`). Rules relative to the best key take a search for the threshold
and for the blocks with weight, and then the output from those blocks (`search`).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
from torch import Tensor

from ..runtime.launch import launch
from ..runtime.span import Span
from ..runtime.tiles import Tiles, TileTable
from . import rules as compact
from .rows import Form, padded
from .search import compact_search_kernel, compact_weigh_kernel
from .stream import compact_stand_in_kernel, compact_stream_kernel

TOLERANCE = {torch.bfloat16: 2.0**-8, torch.float32: 2.0**-12}
"""Relative size of the last step of a threshold; the remaining error is about its square."""


SMALLEST = torch.finfo(torch.float32).tiny
"""Smallest scale: with a scale that underflows to 0 hidden keys would give NaN."""


class _Call:
    """What the launches of one call share."""

    def __init__(
        self, q: Tensor, k: Tensor, v: Tensor, factor: Tensor | float, given: Tensor | float, span: Span,
        rule: tuple[int, int, int], flags: tuple[bool, bool], granule: tuple[int, int],
    ) -> None:  # fmt: skip
        self.batch, self.heads, self.queries, dim = q.shape
        self.keys, width = k.shape[2], v.shape[3]
        self.dtype, self.granule = q.dtype, granule
        nothing = torch.empty(1, device=q.device)  # a pointer that no kernel reads
        self.q, self.k, self.v = q, k, v
        self.factor, self.given = (x if isinstance(x, Tensor) else nothing for x in (factor, given))
        self.scale = 1.0 if isinstance(factor, Tensor) else max(factor, SMALLEST)
        self.number = 0.0 if isinstance(given, Tensor) else given
        self.ranges, self.range_steps = span.pointers, span.steps
        self.sizes = self.heads, self.heads // max(1, k.shape[1]), self.queries, self.keys
        self.q_steps, self.k_steps, self.v_steps = (x.stride()[:3] for x in (q, k, v))
        tensors = isinstance(factor, Tensor), isinstance(given, Tensor), span.mask is not None
        self.form = Form(*rule, *padded(dim), *padded(width), *tensors, *flags)

    def start(self, tables: dict[int, TileTable], form: Form, run: Callable[[Tiles, Form], None]) -> None:
        """Run with tiles that fit the marks of blocks, and with the completed form."""

        def fitted(tiles: Tiles) -> None:
            tiles = tiles.fitted(*self.granule)
            far = max(self.k_steps[2], self.v_steps[2]) * tiles.keys >= 2**31
            run(tiles, form._replace(rows=tiles.rows, keys=tiles.keys, granule=self.granule[0], far=far))

        fitted(tables[self.dtype.itemsize].pick(max(form.dim, form.value_dim), self.dtype, fitted, form))

    def grid(self, tiles: Tiles) -> tuple[int]:
        return (self.batch * self.heads * triton.cdiv(self.queries, tiles.rows),)

    def lists(self, tiles: Tiles) -> Tensor:
        """Return room for a list of key blocks for each program."""
        blocks = triton.cdiv(self.keys, tiles.keys)
        return torch.empty(*self.grid(tiles), blocks, dtype=torch.int32, device=self.q.device)


def forward(
    q: Tensor, k: Tensor, v: Tensor, factor: Tensor | float, given: Tensor | float, span: Span,
    found: tuple[Tensor, ...], rule: tuple[int, int, int], granule: tuple[int, int], flags: tuple[bool, bool],
) -> None:  # fmt: skip
    """Fill `found`: out, floats, flags, index, tilt and live of `implementation.forward`.

    Memory besides: 4 bytes a block of pairs if the rule needs a search, and one more without a backward pass.
    """
    call = _Call(q, k, v, factor, given, span, rule, flags, granule)
    (code, _, stand), (out, floats, status, index, tilt, live) = rule, found
    if code in (compact.SOFTMAX, compact.FIXED):
        _stream(call, out, floats, status, live)
        if code == compact.FIXED and stand != compact.STANDS["zero"]:
            _stand_in(call, out, floats, status, index, live)
        return
    blocks = triton.cdiv(call.queries, granule[0]), triton.cdiv(call.keys, granule[1])
    marks = live if flags[0] else torch.zeros(call.batch, call.heads, *blocks, dtype=torch.uint8, device=q.device)
    _search(call, floats, status, marks)
    _weigh(call, (floats, status, marks), out, index, tilt)


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
