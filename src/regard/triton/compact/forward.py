"""Launches of the forward pass of compact attention.

Softmax and a fixed threshold take one pass (`stream`). Rules relative to the best key take a search for the threshold
and for the blocks with weight, and then the output from those blocks (`search`).
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from ..runtime.call import Call, number_or_rows
from ..runtime.launch import launch
from ..runtime.span import Span
from ..runtime.tiles import Tiles, TileTable
from . import rules as compact
from .search import compact_search_kernel, compact_weigh_kernel
from .stream import compact_stand_in_kernel, compact_stream_kernel

LISTING = (compact_search_kernel, compact_weigh_kernel)
"""Kernels that list key blocks, one list for each program."""
TOLERANCE = {torch.bfloat16: 2.0**-8, torch.float32: 2.0**-12}
"""Relative size of the last step of a threshold; the remaining error is about its square."""


LEAST_SCALE = torch.finfo(torch.float32).tiny
"""Smallest scale: with a scale that underflows to 0 hidden keys would give NaN."""


class _Call(Call):
    """What the launches of one call share. All forward kernels take the same arguments."""

    def __init__(
        self, q: Tensor, k: Tensor, v: Tensor, factor: Tensor | float, number: Tensor | float, span: Span,
        found: tuple[Tensor, ...], marks: Tensor, mask_tile: tuple[int, int], **form: Any,
    ) -> None:  # fmt: skip
        factor = factor if isinstance(factor, Tensor) else max(factor, LEAST_SCALE)
        super().__init__(q, k, v, factor, span, mask_tile=mask_tile[0], **form)
        visible, own = (*span.pointers, *span.steps), number_or_rows(number, span.low)
        self.read, self.mask_tile = (self.matrices, self.factor, own, visible, found, marks), mask_tile

    def start(self, kernel: Any, tables: dict[int, TileTable], **changed: Any) -> None:
        """Run with tiles that fit the marks of blocks; what a kernel does not read is `changed` to one value."""
        form = self.form._replace(**changed)

        def run(tiles: Tiles) -> None:
            tiles = tiles.fitted(*self.mask_tile)
            programs = self.shape[0] * self.sizes[0] * triton.cdiv(self.sizes[2], tiles.rows)
            lists = programs * triton.cdiv(self.sizes[3], tiles.keys) if kernel in LISTING else 1
            far = max(self.k.stride(2), self.v.stride(2)) * tiles.keys >= 2**31
            launch(
                kernel, (programs,), *self.read, self.blank(lists, dtype=torch.int32), TOLERANCE[self.dtype],
                *self.sizes, tiles=tiles, FORM=form._replace(own=tiles.rows, tile=tiles.keys, far=far),
            )  # fmt: skip

        run(tables[self.dtype.itemsize].pick(max(form.dim, form.value_dim), self.dtype, run, form))


def forward(
    q: Tensor, k: Tensor, v: Tensor, factor: Tensor | float, given: Tensor | float, span: Span,
    found: tuple[Tensor, ...], rule: tuple[int, int, int, str], mask_tile: tuple[int, int], flags: tuple[bool, bool],
) -> None:  # fmt: skip
    """Fill `found`: out, floats, flags, index, slope_mean and live of `implementation.forward`. Memory besides: 4 bytes
    a block of pairs if the rule needs a search, and one more without a backward pass."""
    (code, r, stand, own), (keep, counted), live = rule, flags, found[5]
    searched = code not in (compact.SOFTMAX, compact.FIXED)
    if searched and not keep:
        blocks = triton.cdiv(q.shape[2], mask_tile[0]), triton.cdiv(k.shape[2], mask_tile[1])
        live = torch.zeros(*q.shape[:2], *blocks, dtype=torch.uint8, device=q.device)
    form = {"rule": code, "r": r, "stand": stand, "given": isinstance(given, Tensor), **compact.own_form(own)}
    call = _Call(q, k, v, factor, given, span, found[:5], live, mask_tile, keep=keep, counted=counted, **form)
    if searched:
        nothing: dict[str, Any] = {
            "value_dim": 0, "value_wide": 0, "keep": False, "counted": False, "relative": None, "source": "",
        }  # fmt: skip
        call.start(compact_search_kernel, compact.SEARCH, stand=0, **nothing)
        call.start(compact_weigh_kernel, compact.WEIGH_KEPT if keep else compact.WEIGH, stand=0, given=False)
        return
    call.start(compact_stream_kernel, compact.STREAM, stand=0)
    if code == compact.FIXED and stand != compact.STANDS["zero"]:
        call.start(compact_stand_in_kernel, compact.STAND_IN, r=0, given=False, relative=None, source="")
