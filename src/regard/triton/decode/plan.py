"""How a decoding call is split among programs, without a look into a tensor; the launches of one pass and its merge.

Legend: B batch, H query heads, Hkv key heads, Tq queries, Tk keys.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from ...pairwise.visibility import Visibility
from ..runtime.call import Call, Form
from ..runtime.launch import launch
from ..runtime.operators import tensor_or_number
from ..runtime.span import Span
from ..runtime.tiles import Tiles

ROWS = 64  # most rows of a key head: queries x query heads
TILE = 32  # most rows of a program: with more, sums leave no registers for keys
LEAST = 4  # fewest tiles of keys of a program, so that it writes little beside what it reads
PROCESSORS = 132  # multiprocessors of an H100 or H200, for devices that do not report theirs
WAVES = 4  # programs for each multiprocessor: the loads of one overlap the arithmetic of others
MERGE = Tiles(warps=4, stages=1)  # for kernels that merge splits
PARTS = 8  # splits that are added at once


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


def rows_of(count: int, dtype: torch.dtype) -> int:
    """Return how many of the `count` rows of a key head a program has: up to 32 on tensor cores, else one."""
    return 1 if count == 1 or dtype == torch.float32 else min(max(16, 1 << (count - 1).bit_length()), TILE)


def of_rows(x: float | Tensor | None, q: Tensor) -> tuple[Tensor | None, float]:
    """Return (numbers or vectors of rows, float32 [B, H, Tq, ...], contiguous, 1), or (None, one number for all)."""
    return tensor_or_number(x.expand(*q.shape[:3], *x.shape[3:]) if isinstance(x, Tensor) else x)


class Decoding(Call):
    """What the launches of one call share; `keys` are at most that many that all queries see."""

    def __init__(
        self, q: Tensor, k: Tensor, v: Tensor, factor: float | Tensor, span: Span, keys: int, raw: bool
    ) -> None:
        masked = 0 if span.mask is None else 1 if span.mask.shape[1] == 1 else 2
        super().__init__(q, k, v, factor, span, masked=masked, most=1 << (q.shape[2] - 1).bit_length(), raw=raw)
        self.keys, self.rows = keys, self.shape.numel()
        self.row_sizes = k.shape[1], *self.sizes[1:3]

    def shared(self, tiles: Tiles) -> tuple[Form, tuple[int, int], int]:
        """Return form, grid (programs, splits that fill the device with >= LEAST tiles each), tiles a row can touch."""
        key_heads, group, queries = self.row_sizes
        rows = rows_of(group * queries, self.dtype)
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
