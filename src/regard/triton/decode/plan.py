"""How a decoding call is split among programs, decided without looking into a tensor.

Legend: B batch, H query heads, Hkv key heads, Tq queries, Tk keys.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from ...pairwise.visibility import Visibility
from ..runtime.span import Span, batch_stride, mask_steps
from ..runtime.tiles import Tiles, padded

if TYPE_CHECKING:
    from .math import Form

ROWS = 64
"""Most rows of a key head: queries x query heads."""
TILE = 32
"""Most rows of a program: with more, sums leave no registers for keys."""
LEAST = 4
"""Fewest tiles of keys of a program, so that it writes little beside what it reads."""
PROCESSORS = 132
"""Multiprocessors of an H100 or H200, for devices that do not report theirs."""
WAVES = 4
"""Programs for each multiprocessor: the loads of one overlap the arithmetic of others."""


class Ranges(NamedTuple):
    """Which keys each query sees: low, high int32 [B or 1, Tq]; mask uint8 [B or 1, H or 1, Tk], 1 where a key may be
    seen, or None; and how many keys all queries of a sequence together can see, from the first to the last."""

    low: Tensor
    high: Tensor
    mask: Tensor | None
    most: int

    @property
    def pointers(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the ranges and the mask or, as a pointer that is not read, one of these."""
        return self.low, self.high, self.low if self.mask is None else self.mask

    @property
    def strides(self) -> tuple[int, int, int]:
        """Return the steps between sequences in the ranges, and between sequences and heads in the mask."""
        return batch_stride(self.low), *mask_steps(self.mask)


def ranges_of(visible: Visibility, like: Tensor) -> Ranges:
    """Return the ranges of a call whose mask, if any, is over keys, on the device of `like`."""
    span = Span.of(visible, like, by_keys=False)
    first, last = visible.span(0, visible.queries)
    most = last - first
    if visible.window is not None:
        width = visible.window if visible.causal else 2 * visible.window - 1
        most = min(most, width + visible.queries - 1)
    return Ranges(span.low, span.high, span.mask, max(most, 1))


def rows_of(count: int, dtype: torch.dtype) -> int:
    """Return how many of the `count` rows of a key head a program has: up to 32 on tensor cores, else one."""
    return 1 if count == 1 or dtype == torch.float32 else min(max(16, 1 << (count - 1).bit_length()), TILE)


def splits_of(device: torch.device, programs: int, tiles: int, rows: int, least: int = LEAST) -> int:
    """Return how many programs share the keys of one, to fill the device with at least `least` tiles each."""
    count = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else PROCESSORS
    wanted = -(-WAVES * count // max(programs, 1))
    return max(1, min(wanted, tiles // max(least, rows // 4), 65535))


def row_tensor(x: Tensor, q: Tensor) -> Tensor:
    """Return numbers or vectors of rows, float32 [B, H, Tq, ...], contiguous."""
    return x.to(torch.float32).expand(*q.shape[:3], *x.shape[3:]).contiguous()


class Call:
    """What the launches of one call share: arguments of kernels, sizes and the form of the kernels."""

    def __init__(
        self, q: Tensor, k: Tensor, v: Tensor, factor: Tensor | None, scale: float, ranges: Ranges, raw: bool
    ) -> None:
        from .math import Form

        self.q, self.k, self.v, self.ranges = q, k, v, ranges
        self.matrices, self.span = tuple((x, *x.stride()[:3]) for x in (q, k, v)), ranges.pointers
        self.factor = ranges.low if factor is None else factor, scale
        self.group, self.rows = q.shape[1] // k.shape[1] if k.shape[1] else 1, q.shape[:3]
        self.sizes = k.shape[1], self.group, q.shape[2]
        masked = 0 if ranges.mask is None else 1 if ranges.mask.shape[1] == 1 else 2
        widths, most = (*padded(q.shape[-1]), *padded(v.shape[-1])), 1 << (q.shape[2] - 1).bit_length()
        self.form = Form(*widths, most=most, factors=factor is not None, masked=masked, raw=raw)

    def new(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return self.q.new_empty(*shape, dtype=dtype)

    def shared(self, tiles: Tiles, one: bool = False, least: int = LEAST) -> tuple[Form, tuple[int, int], int]:
        """Return form, grid (programs, splits) and tiles that a row can touch; with `one` a program has one row."""
        count = self.group * self.rows[2]
        rows = 1 if one else rows_of(count, self.k.dtype)
        programs, room = (
            self.rows[0] * self.sizes[0] * -(-count // rows),
            (self.ranges.most + tiles.keys - 2) // tiles.keys + 1,
        )
        splits = splits_of(self.q.device, programs, room, rows, least)
        return self.form._replace(rows=rows, keys=tiles.keys), (programs, splits), room
