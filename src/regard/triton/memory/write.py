"""Writing rows of a table in place (equations 35 and 36 of the fast-weight product-key-memory paper), without atomic
operations: entries (token, j) are sorted by slot, and the first entry of every slot writes the whole row.

    V_i <- V_i - (1 / N_i) sum over entries of slot i of share e_token,        N_i the entries of counted tokens

The old row goes into a log, with which `swapped` undoes a write and does it again.

Legend: M tables of N rows of Dv numbers, P tokens, K slots of each, E = P K entries.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..runtime.blocks import LENGTHS
from ..runtime.launch import launch
from ..runtime.tiles import Tiles, TileTable, power_of_two

ORDER = TileTable("memory_order", {(1 << 20, 8): Tiles(rows=16, keys=512)})
WRITE = TileTable("memory_write", {(512, 4): Tiles(4, 512, 2, 1), (1 << 20, 4): Tiles(4, 1024, 4, 1)})
"""`rows`: entries of a slot that are processed at once; `keys`: the widest part of a row."""


@triton.jit
def _slots(slots, counted, at, total, rows, K: tl.constexpr):
    """Load the slots of entries: `rows` for tokens that are not counted, 2^30 - 1 past the end."""
    slot = tl.load(slots + at, mask=at < total, other=0x3FFFFFFF).to(tl.int32)
    if counted is not None:
        slot = tl.where(tl.load(counted + at // K, mask=at < total, other=1) != 0, slot, rows)
    return slot


@triton.jit
def find_order(
    program, counted, slots, ordered, entries, total, rows, K: tl.constexpr, R: tl.constexpr, OT: tl.constexpr
):  # fmt: skip
    """Compute `order_of` for a block of entries of one table, each ranked among all entries."""
    blocks = tl.cdiv(total, R)
    memory, first = (program // blocks).to(tl.int64), program % blocks * R
    slots += memory * total
    if counted is not None:
        counted += memory * (total // K)
    mine = first + tl.arange(0, R)
    slot = _slots(slots, counted, mine, total, rows, K)
    earlier = tl.zeros((R, OT), tl.int32)
    following = _slots(slots, counted, tl.arange(0, OT), total, rows, K)
    for start in range(0, total, OT):
        at = start + tl.arange(0, OT)
        other = 2 * following - (at < first).to(tl.int32)
        following = _slots(slots, counted, at + OT, total, rows, K)
        earlier += (other[None, :] - 2 * slot[:, None]) >> 31  # -1 where the other comes before
    before = (slot[None, :] == slot[:, None]) & (mine[None, :] < mine[:, None])
    to = memory * total + tl.sum(before.to(tl.int32), 1) - tl.sum(earlier, 1)
    tl.store(ordered + to, slot, mask=mine < total)
    tl.store(entries + to, mine, mask=mine < total)


@triton.jit
def _entry(slots, total, rows):
    """Return (table, place of a program's entry, its slot, whether it is the first of that slot)."""
    memory, first = tl.program_id(1).to(tl.int64), tl.program_id(0)
    slots += memory * total
    key = tl.load(slots + first)
    return memory, first, key, (key < rows) & (key != tl.load(slots + first - 1, mask=first > 0, other=-1))


@triton.jit(do_not_specialize=LENGTHS)
def _write(
    table, log, count, slots, entries, shares, errors, total, tokens, rows,
    K: tl.constexpr, D: tl.constexpr, ADD: tl.constexpr, R: tl.constexpr, DT: tl.constexpr,
):  # fmt: skip
    """Write a slot's row if this entry is its first, and N_i at its entries. With ADD, V_i <- V_i + sum share e."""
    memory, first, key, leads = _entry(slots, total, rows)
    slots += memory * total
    entries += memory * total
    if leads:
        column = tl.program_id(2) * DT + tl.arange(0, DT)
        inside = column < D
        moved = tl.zeros((DT,), tl.float32)
        number = 0
        j = first
        more = True
        while more:
            at = j + tl.arange(0, R)
            mine = tl.load(slots + at, mask=at < total, other=-1) == key
            entry = tl.load(entries + at, mask=mine, other=0)
            share = tl.load(shares + memory * total + entry, mask=mine, other=0.0)
            token = memory * tokens + entry // K
            held = mine[:, None] & inside[None, :]
            error = tl.load(errors + token[:, None] * D + column[None, :], mask=held, other=0.0)
            moved += tl.sum(share[:, None] * error, 0)
            number += tl.sum(mine.to(tl.int32), 0)
            j += R
            more = tl.min(mine.to(tl.int32), 0) > 0
        to = table + (memory * rows + key) * D + column
        old = tl.load(to, mask=inside, other=0.0)
        if log is not None:
            tl.store(log + (memory * total + first) * D + column, old, mask=inside)
        if not ADD:
            moved = -moved / tl.cast(number, tl.float32)
        tl.store(to, (old.to(tl.float32) + moved).to(old.dtype), mask=inside)
        if count is not None:
            for start in range(0, number, R):
                at = start + tl.arange(0, R)
                entry = tl.load(entries + first + at, mask=at < number, other=0)
                tl.store(count + memory * total + entry, number, mask=at < number)


@triton.jit(do_not_specialize=LENGTHS)
def _swap(table, log, slots, total, rows, D: tl.constexpr, DT: tl.constexpr):
    """Swap the row of one slot with the log if this entry is its first."""
    memory, first, key, leads = _entry(slots, total, rows)
    if leads:
        column = tl.program_id(2) * DT + tl.arange(0, DT)
        inside = column < D
        one = table + (memory * rows + key) * D + column
        other = log + (memory * total + first) * D + column
        held = tl.load(one, mask=inside)
        tl.store(one, tl.load(other, mask=inside), mask=inside)
        tl.store(other, held, mask=inside)


@torch.compiler.disable
def written(
    table: Tensor, slots: Tensor, entries: Tensor, shares: Tensor, errors: Tensor, log: Tensor | None = None,
    count: Tensor | None = None, *, add: bool = False,
) -> None:  # fmt: skip
    """Write rows of `table` [M, N, Dv], contiguous, float32 or bfloat16, in place, for slots and entries of `order_of`,
    shares float32 [M, P, K] and errors float32 [M, P, Dv]. `log` [M, E, Dv] like `table` takes the rows before the
    write, each at its slot's first entry; `count` int32 [M, P, K] N_i at counted tokens' entries. With `add`, sum share
    e is added to the rows instead (gradients)."""
    (memories, rows, width), (_, tokens, k) = table.shape, shares.shape
    tiles = WRITE.pick(width, table.dtype)
    wide = min(tiles.keys, power_of_two(width))
    launch(
        _write, (tokens * k, memories, -(-width // wide)), table, log, count, slots, entries, shares.contiguous(),
        errors.contiguous(), tokens * k, tokens, rows, tiles=tiles, K=k, D=width, ADD=add, R=tiles.rows, DT=wide,
    )  # fmt: skip


@torch.compiler.disable
def swapped(table: Tensor, slots: Tensor, log: Tensor) -> None:
    """Swap the rows of a write with its log: undo it, or do it again. One launch."""
    memories, rows, width = table.shape
    tiles = WRITE.pick(width, table.dtype)
    wide = min(tiles.keys, power_of_two(width))
    grid = (slots.shape[1], memories, -(-width // wide))
    launch(_swap, grid, table, log, slots, slots.shape[1], rows, tiles=tiles, D=width, DT=wide)
