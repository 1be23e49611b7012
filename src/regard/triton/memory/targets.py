"""What the tokens of a chunk write: errors against the next token's value, and how far each token moves its slots
(`fast_weight_rules`).

Legend: R streams of L tokens, M memories (R, or 1 for all), P tokens of a memory, H heads, k slots a head, K = H k, Dv
width of a value.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..runtime.blocks import LENGTHS
from ..runtime.launch import launch
from ..runtime.operators import rows_together
from ..runtime.tiles import Tiles, TileTable
from .search import bytes_of, flags_set

ERRORS = TileTable("memory_errors", {(1 << 20, 4): Tiles(rows=4, keys=512, warps=4, stages=2)})
SHARES = TileTable("memory_shares", {(1 << 20, 4): Tiles(rows=32, warps=4, stages=1)})
RULES = {"normalized": 0, "paper": 1, "reference": 2}  # codes of the step rules that kernels support
NORMALIZED, REFERENCE = tl.constexpr(RULES["normalized"]), tl.constexpr(RULES["reference"])


@triton.jit(do_not_specialize=LENGTHS)
def _errors(
    read, value, following, good, good_next, errors, written, place, length,
    stride_r, stride_t, stride_n,
    D: tl.constexpr, AHEAD: tl.constexpr, R: tl.constexpr, OT: tl.constexpr, DT: tl.constexpr,
):  # fmt: skip
    """Store v^ - target of a block of tokens of one stream. A target is the value of the next good token; `place` says
    which, with the length for the token after the chunk."""
    stream = tl.program_id(1).to(tl.int64)
    mine = tl.program_id(0) * R + tl.arange(0, R)
    inside = mine < length
    own = inside
    if good is not None:
        own = inside & (tl.load(good + stream * length + mine, mask=inside, other=0) != 0)
    at = mine
    there = own
    if AHEAD:
        at = tl.full((R,), 2147483647, tl.int32)
        for start in range(0, length, OT):
            other = start + tl.arange(0, OT)
            fine = other < length
            if good is not None:
                fine = fine & (tl.load(good + stream * length + other, mask=fine, other=0) != 0)
            later = fine[None, :] & (other[None, :] > mine[:, None])
            at = tl.minimum(at, tl.min(tl.where(later, other[None, :], 2147483647), 1))
        if following is not None:
            end = length
            if good_next is not None:
                end = tl.where(tl.load(good_next + stream) != 0, length, 2147483647)
            at = tl.minimum(at, end)
        there = own & (at <= length)
        at = tl.where(there, at, 0)
    to = stream * length + mine
    tl.store(place + to, at.to(tl.int64), mask=inside)
    tl.store(written + to, there.to(tl.uint8), mask=inside)
    for start in range(0, D, DT):
        column = start + tl.arange(0, DT)
        fits = there[:, None] & (column < D)[None, :]
        seen = tl.load(read + to[:, None] * D + column[None, :], mask=fits, other=0.0)
        here = (at < length)[:, None]
        from_chunk = value + stream * stride_r + at[:, None].to(tl.int64) * stride_t + column[None, :]
        target = tl.load(from_chunk, mask=fits & here, other=0.0)
        if AHEAD and following is not None:
            from_next = following + stream * stride_n + column[None, :] + at[:, None] * 0
            target += tl.load(from_next, mask=fits & ~here, other=0.0)
        all_ = inside[:, None] & (column < D)[None, :]
        tl.store(errors + to[:, None] * D + column[None, :], seen - target, mask=all_)


@triton.jit(do_not_specialize=LENGTHS)
def _shares(
    weights, slots, gate, counted, written, shares, tokens, rate, stride_g,
    H: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, RULE: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """Store rate g_t w_tj step_t of a block of tokens of one memory, 0 where nothing is written."""
    memory = tl.program_id(1).to(tl.int64)
    row, place = tl.program_id(0) * R + tl.arange(0, R), tl.arange(0, KP)
    inside = row < tokens
    token = memory * tokens + row
    part = token[:, None] * K + place[None, :]
    fits = inside[:, None] & (place < K)[None, :]
    weight = tl.load(weights + part, mask=fits, other=0.0)
    step = tl.zeros((R,), tl.float32) + rate
    if RULE == NORMALIZED:
        if H == 1:
            step = rate / tl.where(inside, tl.sum(weight * weight, 1), 1.0)
        else:  # sum, for every entry, the weights that all heads give its slot
            slot = tl.load(slots + part, mask=fits, other=-1)
            own = tl.zeros((R,), tl.float32)
            for j in range(K):
                mine = tl.load(slots + token * K + j, mask=inside, other=-1)
                same = (slot == mine[:, None]) & fits
                total = tl.sum(tl.where(same, weight, 0.0), 1)
                alone = tl.load(weights + token * K + j, mask=inside, other=0.0)
                own += alone * total / tl.maximum(tl.sum(same.to(tl.float32), 1), 1.0)
            step = rate / tl.where(inside, own, 1.0)
    if RULE == REFERENCE:
        pairs = flags_set(written + memory * tokens, tokens)
        read = tokens if counted is None else flags_set(counted + memory * tokens, tokens)
        step += rate * (K * tl.cast(read, tl.float32) / tl.maximum(pairs, 1).to(tl.float32) - 1.0)
    if gate is not None:
        step = step * tl.load(gate + memory * stride_g + row, mask=inside, other=0.0)
    fine = tl.load(written + token, mask=inside, other=0) != 0
    tl.store(shares + part, tl.where(fine[:, None], step[:, None] * weight, 0.0), mask=fits)


@torch.compiler.disable
def errors_of(
    read: Tensor, value: Tensor, following: Tensor | None, good: Tensor | None, good_next: Tensor | None,
    look_ahead: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the errors of the tokens of a chunk, float32 [R, L, Dv], 0 where nothing is written; which tokens are
    written, bool [R, L]; and the places of their targets, int64 [R, L], L for the token after the chunk. One launch.

    Args:
        read, value: float32 [R, L, Dv].
        following: float32 [R, 1, Dv], the value of the token after the chunk, or None if nothing is bound to it.
        good, good_next: bool [R, L] and [R, 1]; None: all are.
        look_ahead: targets are the next good token's values, else the token's own."""
    streams, length, width = read.shape
    read, value = read.contiguous(), rows_together(value)
    after = None if following is None else rows_together(following)
    errors = torch.empty_like(read)
    written = torch.empty(streams, length, dtype=torch.bool, device=read.device)
    place = torch.empty(streams, length, dtype=torch.int64, device=read.device)
    tiles = ERRORS.pick(width, read.dtype)
    launch(
        _errors, (triton.cdiv(length, tiles.rows), streams), read, value, after, bytes_of(good), bytes_of(good_next),
        errors, bytes_of(written), place, length, *value.stride()[:2], 0 if after is None else after.stride(0),
        tiles=tiles, D=width, AHEAD=look_ahead, R=tiles.rows, OT=tiles.keys,
        DT=min(512, triton.next_power_of_2(width)),
    )  # fmt: skip
    return errors, written, place


@torch.compiler.disable
def shares_of(
    weights: Tensor, slots: Tensor, gate: Tensor | None, counted: Tensor | None, written: Tensor, rule: str,
    rate: float,
) -> Tensor:  # fmt: skip
    """Return rate g_t w_tj step_t, float32 [M, P, H, k], from weights float32 and slots int64 [M, P, H, k], gate
    float32 [M, P] (None: 1), counted and written bool [M, P] (counted None: all are), and one of `RULES`."""
    memories, tokens, heads, k = weights.shape
    weights, slots = weights.contiguous(), slots.contiguous()
    gate = gate if gate is None else rows_together(gate)
    shares = torch.empty_like(weights)
    tiles = SHARES.pick(heads * k, weights.dtype)
    launch(
        _shares, (triton.cdiv(tokens, tiles.rows), memories), weights, slots, gate, bytes_of(counted),
        bytes_of(written), shares, tokens, rate, 0 if gate is None else gate.stride(0),
        tiles=tiles, H=heads, K=heads * k, KP=triton.next_power_of_2(heads * k), RULE=RULES[rule], R=tiles.rows,
    )  # fmt: skip
    return shares
