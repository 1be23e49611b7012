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
    form |= {"mask_tile": mask_tile[0], "keep": keep, "counted": counted}
    call = Call(q, k, v, factor if isinstance(factor, Tensor) else max(factor, LEAST_SCALE), span, **form)
    visible = *span.pointers, *span.steps
    read = call.matrices, call.factor, number_or_rows(given, span.low), visible, found[:5], live

    def start(kernel: Any, tables: dict[int, TileTable], **changed: Any) -> None:
        """Run with tiles that fit the marks of blocks; what a kernel does not read is `changed` to one value."""
        form = call.form._replace(**changed)

        def run(tiles: Tiles) -> None:
            tiles = tiles.fitted(*mask_tile)
            programs = call.shape[0] * call.sizes[0] * triton.cdiv(call.sizes[2], tiles.rows)
            lists = programs * triton.cdiv(call.sizes[3], tiles.keys) if kernel in LISTING else 1
            far = max(k.stride(2), v.stride(2)) * tiles.keys >= 2**31
            launch(
                kernel, (programs,), *read, call.blank(lists, dtype=torch.int32), TOLERANCE[call.dtype], *call.sizes,
                tiles=tiles, FORM=form._replace(own=tiles.rows, tile=tiles.keys, far=far),
            )  # fmt: skip

        run(tables[call.dtype.itemsize].pick(max(form.dim, form.value_dim), call.dtype, run, form))

    if searched:
        nothing: dict[str, Any] = {
            "value_dim": 0, "value_wide": 0, "keep": False, "counted": False, "relative": None, "source": "",
        }  # fmt: skip
        start(compact_search_kernel, compact.SEARCH, stand=0, **nothing)
        start(compact_weigh_kernel, compact.WEIGH_KEPT if keep else compact.WEIGH, stand=0, given=False)
        return
    start(compact_stream_kernel, compact.STREAM, stand=0)
    if code == compact.FIXED and stand != compact.STANDS["zero"]:
        start(compact_stand_in_kernel, compact.STAND_IN, r=0, given=False, relative=None, source="")
