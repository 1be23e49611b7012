"""Slots of sorted halves and their weights (equations 5 and 30 of the fast-weight product-key-memory paper), and sums
of picked rows of a table.

Legend: B batch, T tokens, H heads, k slots a head, K = H k; M tables of N rows of Dv numbers, P tokens of each.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import launch
from .memory_search import _float, _ordered, bytes_of
from .tiles import Tiles, TileTable

JOIN = TileTable("memory_join", {(64, 4): Tiles(warps=1, stages=1), (1 << 20, 4): Tiles(warps=4, stages=1)})
ROWS = TileTable(
    "memory_rows",
    {(512, 4): Tiles(rows=8, keys=512, warps=4, stages=1), (1 << 20, 4): Tiles(8, 1024, 8, 1)},
    (Tiles(8, 512, 2, 1), Tiles(16, 512, 4, 1)),
)
"""`rows`: rows of the table that are under way at once; `keys`: the widest part of a row."""


@triton.jit
def _join(
    scores, halves, slots, weights, n,
    H: tl.constexpr, K: tl.constexpr, HP: tl.constexpr, KP: tl.constexpr,
):  # fmt: skip
    """The slots of one token. Of sorted halves only pairs with (a + 1)(b + 1) <= k can be among the k best sums."""
    token = tl.program_id(0).to(tl.int64)
    head, pair, place = tl.arange(0, HP), tl.arange(0, KP * KP), tl.arange(0, KP)
    a, b = pair // KP, pair % KP
    may = (head < H)[:, None] & ((a + 1) * (b + 1) <= K)[None, :]
    first = ((token * H + head) * 2 * K)[:, None] + a[None, :]
    second = ((token * H + head) * 2 * K + K)[:, None] + b[None, :]
    total = tl.load(scores + first, mask=may, other=0.0) + tl.load(scores + second, mask=may, other=0.0)
    slot = tl.load(halves + first, mask=may, other=0) * n + tl.load(halves + second, mask=may, other=0)
    low: tl.constexpr = 0x7FFFFFFF
    packed = (_ordered(total).to(tl.int64) << 32) | (low - slot)
    none: tl.constexpr = -9223372036854775808
    packed = tl.where(may, packed, none)
    best = tl.full((HP, KP), none, tl.int64)
    for j in range(K):
        top = tl.max(packed, 1)
        best = tl.where(place[None, :] == j, top[:, None], best)
        packed = tl.where(packed == top[:, None], none, packed)
    inside = (head < H)[:, None] & (place < K)[None, :]
    score = tl.where(inside, _float((best >> 32).to(tl.int32)), -float("inf"))
    score = tl.exp(score - tl.max(tl.max(score, 1), 0))
    weight = score / tl.sum(tl.sum(score, 1), 0)
    to = ((token * H + head) * K)[:, None] + place[None, :]
    tl.store(slots + to, low - (best & low), mask=inside)
    tl.store(weights + to, weight, mask=inside)


@triton.jit
def _rows(
    table, slots, weights, other, good, sums, dots, tokens, stride_m,
    K: tl.constexpr, D: tl.constexpr, SUMS: tl.constexpr, DOTS: tl.constexpr, GOOD: tl.constexpr,
    R: tl.constexpr, DT: tl.constexpr,
):  # fmt: skip
    """One token: sum over j of w_j V[slot_j], and the products of those rows with `other`."""
    token = tl.program_id(1).to(tl.int64) * tokens + tl.program_id(0)
    table += tl.program_id(1).to(tl.int64) * stride_m
    column, place = tl.arange(0, DT), tl.arange(0, R)
    reach, wide = K, D  # what is looked at
    if GOOD:
        reach = tl.load(good + token).to(tl.int32) * K
        wide = tl.load(good + token).to(tl.int32) * D
    once: tl.constexpr = DT >= D
    if SUMS:
        for start in range(0, D, DT):
            inside = start + column < D
            total = tl.zeros((DT,), tl.float32)
            for j in range(0, K, R):
                there = j + place < reach
                slot = tl.load(slots + token * K + j + place, mask=there, other=0)
                part = slot[:, None] * D + (start + column)[None, :]
                row = tl.load(table + part, mask=there[:, None] & inside[None, :], other=0.0).to(tl.float32)
                weight = tl.load(weights + token * K + j + place, mask=there, other=0.0)
                total += tl.sum(weight[:, None] * row, 0)
                if DOTS and once:
                    given = tl.load(other + token * D + column, mask=column < wide, other=0.0)
                    tl.store(dots + token * K + j + place, tl.sum(row * given[None, :], 1), mask=j + place < K)
            tl.store(sums + token * D + start + column, total, mask=inside)
    if DOTS and not (SUMS and once):
        for j in range(0, K, R):
            there = j + place < reach
            slot = tl.load(slots + token * K + j + place, mask=there, other=0)
            found = tl.zeros((R,), tl.float32)
            for start in range(0, D, DT):
                inside = start + column < D
                part = slot[:, None] * D + (start + column)[None, :]
                row = tl.load(table + part, mask=there[:, None] & inside[None, :], other=0.0).to(tl.float32)
                given = tl.load(other + token * D + start + column, mask=start + column < wide, other=0.0)
                found += tl.sum(row * given[None, :], 1)
            tl.store(dots + token * K + j + place, found, mask=j + place < K)


def join(half_scores: Tensor, halves: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """The k best of all n^2 sums and their weights, one softmax over all heads.

    Args:
        half_scores: float32 [B, T, H, 2, k], sorted, best first; halves: int64, their sub-keys. Contiguous.

    Returns:
        (slots int64 [B, T, H, k], best first, the lowest of equals first; weights float32). One launch.
    """
    batch, tokens, heads, _, k = halves.shape
    slots = torch.empty(batch, tokens, heads, k, dtype=torch.int64, device=halves.device)
    weights = torch.empty(slots.shape, dtype=torch.float32, device=halves.device)
    hp, kp = triton.next_power_of_2(heads), triton.next_power_of_2(k)

    def run(tiles: Tiles) -> None:
        grid = (batch * tokens,)
        launch(_join, grid, half_scores, halves, slots, weights, n, tiles=tiles, H=heads, K=k, HP=hp, KP=kp)

    run(JOIN.pick(hp * kp * kp, weights.dtype, run))
    return slots, weights


def picked_rows(
    table: Tensor,
    slots: Tensor,
    weights: Tensor | None,
    other: Tensor | None = None,
    good: Tensor | None = None,
) -> tuple[Tensor | None, Tensor | None]:
    """Sums and products of picked rows.

    Args:
        table: float32 or bfloat16 [M, N, Dv], contiguous.
        slots: int64 [M, P, K].
        weights: float32 [M, P, K], or None where no sums are wanted.
        other: float32 [M, P, Dv], or None where no products are wanted.
        good: bool [M, P]; others have 0. None: all.

    Returns:
        (sum_j weights_pj V[slots_pj] [M, P, Dv]; V[slots_pj] . other_p [M, P, K]), float32. One launch; reads
        P K Dv numbers of the table.
    """
    (memories, tokens, k), width = slots.shape, table.shape[-1]
    sums = dots = table
    if weights is not None:
        sums = torch.empty(memories, tokens, width, dtype=torch.float32, device=table.device)
    if other is not None:
        dots = torch.empty(slots.shape, dtype=torch.float32, device=table.device)

    def run(tiles: Tiles) -> None:
        launch(
            _rows, (tokens, memories), table, slots.contiguous(),
            table if weights is None else weights.contiguous(), table if other is None else other.contiguous(),
            table if good is None else bytes_of(good), sums, dots, tokens, table.stride(0),
            tiles=tiles, K=k, D=width, SUMS=weights is not None, DOTS=other is not None, GOOD=good is not None,
            R=min(tiles.rows, triton.next_power_of_2(k)), DT=min(tiles.keys, triton.next_power_of_2(width)),
        )  # fmt: skip

    run(ROWS.pick(width, table.dtype, run))
    return None if weights is None else sums, None if other is None else dots
