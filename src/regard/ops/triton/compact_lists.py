"""Which blocks stream past a block of queries, or of keys, in the backward pass of compact attention.

Of softmax all that is visible, by its range; of compact weightings what the forward pass marked, by lists. Blocks that
all owners see whole come first: they need no mask.

Legend: owners are the queries (keys) of a program, `streamed` how many keys (queries) there are to stream past them;
granules are the blocks of the marks.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import launch
from .span import batch_stride
from .tiles import Tiles

CHUNK = 256
"""Blocks that the maker of a list looks at in one go."""


class Lists(NamedTuple):
    """Numbers of live blocks, as kernels read them.

    Attributes:
        listed: [B x H x groups x blocks] int16 (int32 of many blocks); None of softmax, as `counts`.
        counts: int32 [B x H x groups x 2]: how many need no mask, at the front of a row, and do, from its back.
        groups: of owners.
        blocks: streamed granules.
    """

    listed: Tensor | None
    counts: Tensor | None
    groups: int
    blocks: int


@triton.jit
def ranges(low, high, start, size, total, TILE: tl.constexpr):
    """Of the blocks of TILE that stream past owners [start, start + size): (first to meet, first that all owners see
    whole, end of those, end of all)."""
    final = tl.minimum(start + size, total) - 1
    first = tl.load(low + start) // TILE
    finish = tl.maximum(first, tl.cdiv(tl.load(high + final), TILE))
    whole = tl.minimum(tl.maximum(tl.cdiv(tl.load(low + final), TILE), first), finish)
    ended = tl.minimum(tl.maximum(tl.load(high + start) // TILE, whole), finish)
    return first, whole, ended, finish


@triton.jit
def compact_lists_kernel(
    live,
    listed,
    counts,
    low,
    high,
    span_step,
    heads,
    owners,
    granules,
    blocks,
    along,
    across,
    MERGED: tl.constexpr,
    OWNER: tl.constexpr,
    TILE: tl.constexpr,
    MASKED: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """The list past MERGED granules of OWNER owners each; `along`, `across`: from one owner's mark to the next, and
    from one streamed block's."""
    groups = tl.cdiv(granules, MERGED)
    group = tl.program_id(0) % groups
    head = (tl.program_id(0) // groups).to(tl.int64)
    own = head * groups + group
    step = head // heads * span_step
    _, whole_from, whole_to, _ = ranges(low + step, high + step, group * MERGED * OWNER, MERGED * OWNER, owners, TILE)
    if MASKED:
        whole_to = whole_from
    live += head * granules * blocks
    listed += own * blocks
    whole, part = 0, 0
    for at in range(0, blocks, CHUNK):
        block = at + tl.arange(0, CHUNK)
        marked = tl.zeros((CHUNK,), tl.int32)
        for i in tl.static_range(MERGED):
            granule = group * MERGED + i
            real = block < tl.where(granule < granules, blocks, 0)
            marked |= tl.load(live + granule * along + block * across, mask=real, other=0).to(tl.int32)
        full = (marked != 0) & (block >= whole_from) & (block < whole_to)
        rest = (marked != 0) & ((block < whole_from) | (block >= whole_to))
        tl.store(listed + whole + tl.cumsum(full.to(tl.int32), 0) - 1, block, mask=full)
        tl.store(listed + blocks - part - tl.cumsum(rest.to(tl.int32), 0), block, mask=rest)
        whole += tl.sum(full.to(tl.int32), 0)
        part += tl.sum(rest.to(tl.int32), 0)
    tl.store(counts + own * 2, whole)
    tl.store(counts + own * 2 + 1, part)


@triton.jit
def plan_of(
    lists,
    low,
    high,
    head,
    start,
    owners,
    OWN: tl.constexpr,
    TILE: tl.constexpr,
    LISTED: tl.constexpr,
    SPLIT: tl.constexpr,
    MASKED: tl.constexpr,
):
    """What streams past owners [start, start + OWN): (list, how many blocks without mask, how many with one, and what
    `block_of` needs besides). Lists (LISTED > 0) are of granules of SPLIT blocks, past LISTED owners each."""
    listed, counts, groups, blocks = lists
    if LISTED == 0:
        first, whole, ended, finish = ranges(low, high, start, OWN, owners, TILE)
        if MASKED:
            ended = whole
        plan = low, ended - whole, finish - first - (ended - whole), first, whole, ended
    else:
        own = head * groups + start // LISTED
        count = counts + own * 2
        plan = listed + own * blocks, tl.load(count) * SPLIT, tl.load(count + 1) * SPLIT, blocks - 1, 0, 0
    return plan


@triton.jit
def block_of(plan, t, PART: tl.constexpr, LISTED: tl.constexpr, SPLIT: tl.constexpr):
    """The number of the t-th block without mask or, PART, of the t-th with one."""
    listed, _, _, first, whole, ended = plan
    if LISTED > 0 and PART:
        block = tl.load(listed + first - t // SPLIT).to(tl.int32) * SPLIT + t % SPLIT
    elif LISTED > 0:
        block = tl.load(listed + t // SPLIT).to(tl.int32) * SPLIT + t % SPLIT
    elif PART:
        block = tl.where(t < whole - first, first + t, ended - (whole - first) + t)
    else:
        block = whole + t
    return block


def lists_of(
    live: Tensor, low: Tensor, high: Tensor, masked: bool, owners: int, sizes: tuple[int, int], group: int, axis: int
) -> Lists:
    """The lists past groups of `group` owners, a multiple of the granule.

    Args:
        live: uint8 [B, H, queries' granules, keys' granules], contiguous.
        low, high: int32 [B or 1, owners]; what each owner sees.
        masked: whether every block needs a mask.
        owners: how many.
        sizes: of a granule, in owners and in what streams past.
        axis: of `live` that the owners are along, 2 or 3.

    Cost: two bytes for a pair of blocks; no wait for the device.
    """
    batch, heads, granules, blocks = live.shape if axis == 2 else live.transpose(2, 3).shape
    merged = group // sizes[0]
    groups = triton.cdiv(granules, merged)
    kind = torch.int16 if blocks < 2**15 else torch.int32
    listed = torch.empty(batch * heads * groups * blocks, dtype=kind, device=live.device)
    counts = torch.empty(batch * heads * groups * 2, dtype=torch.int32, device=live.device)
    steps = (live.stride(axis), live.stride(5 - axis))
    args = (live, listed, counts, low, high, batch_stride(low), heads, owners, granules, blocks, *steps)
    constants = {"MERGED": merged, "OWNER": sizes[0], "TILE": sizes[1], "MASKED": masked, "CHUNK": CHUNK}
    launch(compact_lists_kernel, (batch * heads * groups,), *args, tiles=Tiles(warps=1, stages=1), **constants)
    return Lists(listed, counts, groups, blocks)
