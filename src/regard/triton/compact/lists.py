"""Lists of the blocks that stream past a block of queries, or of keys, in the backward pass of compact attention.

For softmax these are all visible blocks, by a range; for compact weightings the marked ones, by lists. Blocks that all
owners see whole come first, without a mask. Entry n of a list is block n // GROUP of head n % GROUP of its key head.

Legend: owners are the queries (keys) of a program; mask tiles are the marked blocks of pairs.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..runtime.blocks import store_numbers
from ..runtime.launch import launch
from ..runtime.span import batch_stride
from ..runtime.tiles import Tiles

CHUNK = 256  # blocks that the list kernel reads at once


@triton.jit
def ranges(low, high, start, size, total, TILE: tl.constexpr):
    """Return (first, first that all owners see whole, end of those, end) of the blocks past size owners."""
    final = tl.minimum(start + size, total) - 1
    first = tl.load(low + start) // TILE
    finish = tl.maximum(first, tl.cdiv(tl.load(high + final), TILE))
    whole = tl.minimum(tl.maximum(tl.cdiv(tl.load(low + final), TILE), first), finish)
    ended = tl.minimum(tl.maximum(tl.load(high + start) // TILE, whole), finish)
    return first, whole, ended, finish


@triton.jit(do_not_specialize=["span_step", "heads", "owners", "mask_tiles", "blocks", "along", "across"])
def compact_lists_kernel(
    live, listed, counts, flags, low, high, span_step, heads, owners, mask_tiles, blocks, along, across,
    GROUP: tl.constexpr, MERGED: tl.constexpr, OWNER: tl.constexpr, TILE: tl.constexpr, MASKED: tl.constexpr,
    FLAGS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """List the streamed blocks that each group of MERGED mask tiles of OWNER owners must visit. `along` and `across`
    are steps from one owner's mark and from one streamed block's mark to the next; FLAGS flags of each block count."""
    rows = tl.cdiv(mask_tiles, MERGED)
    row = tl.program_id(0) % rows
    head = (tl.program_id(0) // rows).to(tl.int64)
    owner = head * rows + row
    step = head // heads * span_step
    _, whole_from, whole_to, _ = ranges(low + step, high + step, row * MERGED * OWNER, MERGED * OWNER, owners, TILE)
    if MASKED:
        whole_to = whole_from
    listed += owner * blocks * GROUP
    whole, part, flagged = 0, 0, 0
    for n in range(tl.cdiv(blocks, CHUNK) * GROUP):
        block = n // GROUP * CHUNK + tl.arange(0, CHUNK)
        marks = live + (head * GROUP + n % GROUP) * mask_tiles * blocks
        marked = tl.zeros((CHUNK,), tl.int32)
        for i in tl.static_range(MERGED):
            mask_tile = row * MERGED + i
            real = block < tl.where(mask_tile < mask_tiles, blocks, 0)
            marked |= tl.load(marks + mask_tile * along + block * across, mask=real, other=0).to(tl.int32)
        full = (marked != 0) & (block >= whole_from) & (block < whole_to)
        rest = (marked != 0) & ((block < whole_from) | (block >= whole_to))
        number = block * GROUP + n % GROUP
        tl.store(listed + whole + tl.cumsum(full.to(tl.int32), 0) - 1, number, mask=full)
        tl.store(listed + blocks * GROUP - part - tl.cumsum(rest.to(tl.int32), 0), number, mask=rest)
        whole += tl.sum(full.to(tl.int32), 0)
        part += tl.sum(rest.to(tl.int32), 0)
        for i in tl.static_range(FLAGS):
            at = (head * GROUP + n % GROUP) * blocks * FLAGS + block * FLAGS + i
            flagged += tl.sum(tl.load(flags + at, mask=marked != 0, other=0).to(tl.int32), 0)
    store_numbers(counts, owner, (whole, part, flagged), None)


@triton.jit
def plan_of(lists, low, high, head, start, owners, FORM: tl.constexpr):
    """Return what streams past owners [start, start + FORM.own): (list, blocks without mask, with one, flagged,
    what `block_of` needs). A list has mask tiles of FORM.split blocks for FORM.listed owners; 0: a range."""
    listed, counts, rows, length = lists
    if FORM.listed == 0:
        first, whole, ended, finish = ranges(low, high, start, FORM.own, owners, FORM.tile)
        if FORM.masked:
            ended = whole
        full = ended - whole
        plan = low, full * FORM.group, (finish - first - full) * FORM.group, 0, first, whole, ended
    else:
        owner = head * rows + start // FORM.listed
        count = counts + owner * 3
        whole, part, flagged = tl.load(count) * FORM.split, tl.load(count + 1) * FORM.split, tl.load(count + 2)
        plan = listed + owner * length, whole, part, flagged, length - 1, 0, 0
    return plan


@triton.jit
def block_of(plan, t, PART: tl.constexpr, FORM: tl.constexpr):
    """Return (number, head of the group) of the t-th block without mask, or with one (PART)."""
    listed, _, _, _, first, whole, ended = plan
    if FORM.listed > 0:
        index = t // FORM.split
        if PART:
            index = first - index
        number = tl.load(listed + index).to(tl.int32)
        block = number // FORM.group * FORM.split + t % FORM.split
        head = number % FORM.group
    else:
        n = t // FORM.group
        head = t % FORM.group
        block = whole + n
        if PART:
            block = tl.where(n < whole - first, first + n, ended - (whole - first) + n)
    return block, head


def lists_of(
    live: Tensor, low: Tensor, high: Tensor, masked: int, owners: int, sizes: tuple[int, int], listed: int,
    axis: int, group: int, flags: Tensor | None = None,
) -> tuple[Tensor, Tensor, int, int]:  # fmt: skip
    """Return lists of live blocks, whole numbers [B x owners' heads x rows x length]; counts int32 [... x rows x 3],
    how many need no mask, at the front of a list, do, at its end, and are flagged; rows and length.

    There is a list for every group of `listed` of the `owners`, a multiple of the mask tile. `axis`, 2 or 3, is that of
    the owners in the marks `live`, and `group` heads share an owner; `low` and `high` [B or 1, owners] say what each
    sees, `masked` whether every block needs a mask; `sizes` are those of a mask tile, in owners and in streamed rows.
    `flags` uint8 [B x H, streamed tiles x n] of marked blocks are counted."""
    batch, heads, mask_tiles, blocks = live.shape if axis == 2 else live.transpose(2, 3).shape
    heads, merged = heads // group, listed // sizes[0]
    rows, length = -(-mask_tiles // merged), blocks * group
    kind = torch.int16 if length < 2**15 else torch.int32
    numbers = torch.empty(batch * heads * rows * length, dtype=kind, device=live.device)
    counts = torch.empty(batch * heads * rows * 3, dtype=torch.int32, device=live.device)
    flagged = 0 if flags is None else flags.shape[1] // max(1, blocks)
    tensors = (live, numbers, counts, counts if flags is None else flags, low, high, batch_stride(low))
    args = (*tensors, heads, owners, mask_tiles, blocks, live.stride(axis), live.stride(5 - axis))
    launch(
        compact_lists_kernel, (batch * heads * rows,), *args, tiles=Tiles(warps=1, stages=1), GROUP=group,
        MERGED=merged, OWNER=sizes[0], TILE=sizes[1], MASKED=masked, FLAGS=flagged, CHUNK=CHUNK,
    )  # fmt: skip
    return numbers, counts, rows, length
