"""How a decoding call is split among programs, decided without looking into a tensor.

Legend: B batch, H query heads, Hkv key heads, Tq queries, Tk keys.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ...pairwise.visibility import Visibility
from ..runtime.span import batch_stride, mask_steps

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
    """Which keys each query sees.

    Attributes:
        low, high: int32 [B or 1, Tq]; query i sees keys [low_i, high_i) that `mask` lets be seen.
        mask: uint8 [B or 1, H or 1, Tk], 1 where a key may be seen, or None.
        most: how many keys all queries of a sequence together can see, from the first to the last.
    """

    low: Tensor
    high: Tensor
    mask: Tensor | None
    most: int

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor | None]:
        return self.low, self.high, self.mask

    @property
    def strides(self) -> tuple[int, int, int]:
        """Return the steps between sequences in the ranges, and between sequences and heads in the mask."""
        return batch_stride(self.low), *mask_steps(self.mask)


def ranges_of(visible: Visibility, device: torch.device) -> Ranges:
    """Return the ranges of a call whose mask, if any, is over keys."""
    low, high = (x.to(torch.int32).contiguous() for x in visible.bounds(0, visible.queries, device))
    mask = visible.mask
    if mask is not None:
        mask = mask[..., 0, :].expand(*mask.shape[:2], visible.keys).to(torch.uint8).contiguous()
    first, last = visible.span(0, visible.queries)
    most = last - first
    if visible.window is not None:
        width = visible.window if visible.causal else 2 * visible.window - 1
        most = min(most, width + visible.queries - 1)
    return Ranges(low, high, mask, max(most, 1))


def masked(ranges: Ranges) -> int:
    """Return 0 without a mask, 1 if all heads share one, else 2."""
    return 0 if ranges.mask is None else 1 if ranges.mask.shape[1] == 1 else 2


def group_of(q: Tensor, k: Tensor) -> int:
    """Return the number of query heads of a key head."""
    return q.shape[1] // k.shape[1] if k.shape[1] else 1


def rows_of(count: int, dtype: torch.dtype) -> int:
    """Return how many of the `count` rows of a key head a program has: up to 32 on tensor cores, else one."""
    return 1 if count == 1 or dtype == torch.float32 else min(max(16, 1 << (count - 1).bit_length()), TILE)


def splits_of(device: torch.device, programs: int, tiles: int, rows: int, least: int = LEAST) -> int:
    """Return among how many programs the keys of each of `programs` are split: enough to fill the device, each with at
    least `least` tiles."""
    count = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else PROCESSORS
    wanted = -(-WAVES * count // max(programs, 1))
    return max(1, min(wanted, tiles // max(least, rows // 4), 65535))


def strides(x: Tensor) -> tuple[int, int, int]:
    """Return the strides of sequence, head and position."""
    return x.stride(0), x.stride(1), x.stride(2)


def row_tensor(x: Tensor, q: Tensor) -> Tensor:
    """Return numbers of rows as float32 [B, H, Tq], contiguous."""
    return x.to(torch.float32).expand(q.shape[:3]).contiguous()
