"""What tokens of a chunk write (`fast_weight_rules`), errors against the next token's value and step sizes, and their
derivative.

Legend: R streams of L tokens, M memories (R, or 1 for all), H heads, k slots a head, K = H k, Dv width of a value.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...memory.fast_weight_rules import WriteRule
from ..runtime.blocks import LENGTHS
from ..runtime.launch import launch
from ..runtime.tiles import Tiles, TileTable, power_of_two
from .search import bytes_of, flags_set

ERRORS = TileTable("memory_errors", {(1 << 20, 4): Tiles(rows=4, keys=512)})
STEP_CODES = {"normalized": 0, "paper": 1, "reference": 2}  # of the write rules that kernels support
NORMALIZED, REFERENCE = tl.constexpr(STEP_CODES["normalized"]), tl.constexpr(STEP_CODES["reference"])


@triton.jit
def _pairs(good, good_next, first, streams, length, AHEAD: tl.constexpr, BORDER: tl.constexpr):
    """Return how many tokens of `streams` streams are good, and how many are written."""
    read, pairs = 0, 0
    for stream in range(streams):
        number = length
        if good is not None:
            number = flags_set(good + (first + stream) * length, length)
        read += number
        pairs += number
        if AHEAD:  # the last one may have no target
            if not BORDER:
                pairs -= tl.minimum(number, 1)
            elif good_next is not None:
                pairs -= tl.minimum(number, 1 - tl.load(good_next + first + stream).to(tl.int32))
    return read, pairs


@triton.jit
def seen_weights(weights, slots, token, inside, K: tl.constexpr, H: tl.constexpr, KP: tl.constexpr, R: tl.constexpr):
    """Return S = sum_j w_j W_j, and w and W [R, KP], W_j the mean over entries of j's slot of all weights that heads
    give it. The derivative of S by w_j is 2 W_j."""
    entry = tl.arange(0, KP)
    part, fits = token[:, None] * K + entry[None, :], inside[:, None] & (entry < K)[None, :]
    weight = tl.load(weights + part, mask=fits, other=0.0)
    products = tl.zeros((R,), tl.float32)
    mean = weight
    if H == 1:
        products = tl.sum(weight * weight, 1)
    else:
        slot = tl.load(slots + part, mask=fits, other=-1)
        for j in range(K):
            mine = tl.load(slots + token * K + j, mask=inside, other=-1)
            same = (slot == mine[:, None]) & fits
            total = tl.sum(tl.where(same, weight, 0.0), 1)
            alone = tl.load(weights + token * K + j, mask=inside, other=0.0)
            shared = total / tl.maximum(tl.sum(same.to(tl.float32), 1), 1.0)
            products += alone * shared
            mean = tl.where(entry[None, :] == j, shared[:, None], mean)
    return tl.where(inside, products, 1.0), weight, mean


@triton.jit
def find_errors(
    program, good, good_next, following, gate, read, value, weights, slots, errors, written, target_at, shares, length,
    streams, rate, stride_r, stride_t, stride_n, stride_g, stride_gt,
    D: tl.constexpr, H: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, RULE: tl.constexpr, AHEAD: tl.constexpr,
    R: tl.constexpr, OT: tl.constexpr, DT: tl.constexpr,
):  # fmt: skip
    """Compute errors and shares of `prepared` for a block of tokens of one stream."""
    blocks = tl.cdiv(length, R)
    stream, mine = (program // blocks).to(tl.int64), program % blocks * R + tl.arange(0, R)
    inside = mine < length
    valid = inside
    if good is not None:
        valid = inside & (tl.load(good + stream * length + mine, mask=inside, other=0) != 0)
    at = mine
    there = valid
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
        there = valid & (at <= length)
        at = tl.where(there, at, 0)
    to = stream * length + mine
    tl.store(target_at + to, at.to(tl.int64), mask=inside)
    tl.store(written + to, there.to(tl.uint8), mask=inside)
    for start in range(0, D, DT):
        column = start + tl.arange(0, DT)
        fits = there[:, None] & (column < D)[None, :]
        had = tl.load(read + to[:, None] * D + column[None, :], mask=fits, other=0.0)
        here = (at < length)[:, None]
        from_chunk = value + stream * stride_r + at[:, None].to(tl.int64) * stride_t + column[None, :]
        target = tl.load(from_chunk, mask=fits & here, other=0.0)
        if AHEAD and following is not None:
            from_next = following + stream * stride_n + column[None, :] + at[:, None] * 0
            target += tl.load(from_next, mask=fits & ~here, other=0.0)
        all_ = inside[:, None] & (column < D)[None, :]
        tl.store(errors + to[:, None] * D + column[None, :], had - target, mask=all_)
    seen, weight, _ = seen_weights(weights, slots, to, inside, K, H, KP, R)
    step = tl.zeros((R,), tl.float32) + rate
    if RULE == NORMALIZED:
        step = rate / tl.where(seen == 0, 1.0, seen)  # without weight all shares are 0
    if RULE == REFERENCE:
        first = stream // streams * streams
        number, pairs = _pairs(good, good_next, first, streams, length, AHEAD, following is not None)
        step *= K * tl.cast(number, tl.float32) / tl.maximum(pairs, 1).to(tl.float32)
    if gate is not None:
        step = step * tl.load(gate + stream * stride_g + mine * stride_gt, mask=inside, other=0.0)
    entry = tl.arange(0, KP)
    fits = inside[:, None] & (entry < K)[None, :]
    share = tl.where(there[:, None], step[:, None] * weight, 0.0)
    tl.store(shares + to[:, None] * K + entry[None, :], share, mask=fits)


@triton.jit(do_not_specialize=(*LENGTHS, "streams"))
def _shares(
    upstream, by_shares, weights, slots, gate, good, written, target_at, by_read, targets, by_weights, by_gate, length,
    streams, rate, stride_g, stride_gt,
    D: tl.constexpr, H: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, RULE: tl.constexpr, R: tl.constexpr,
    DT: tl.constexpr,
):  # fmt: skip
    """Compute `through_errors` for a block of tokens of one stream."""
    blocks = tl.cdiv(length, R)
    stream, mine = (tl.program_id(0) // blocks).to(tl.int64), tl.program_id(0) % blocks * R + tl.arange(0, R)
    inside, to = mine < length, stream * length + mine
    there = inside & (tl.load(written + to, mask=inside, other=0) != 0)
    at = stream * (length + 1) + tl.load(target_at + to, mask=there, other=0)
    for start in range(0, D, DT):
        column = start + tl.arange(0, DT)
        real = (column < D)[None, :]
        part = to[:, None] * D + column[None, :]
        u = tl.load(upstream + part, mask=there[:, None] & real, other=0.0)
        tl.store(by_read + part, u, mask=inside[:, None] & real)
        tl.store(targets + at[:, None] * D + column[None, :], -u, mask=there[:, None] & real)
    seen, weight, shared = seen_weights(weights, slots, to, inside, K, H, KP, R)
    entry = tl.arange(0, KP)
    part, fits = to[:, None] * K + entry[None, :], inside[:, None] & (entry < K)[None, :]
    u = tl.load(by_shares + part, mask=fits & there[:, None], other=0.0)
    along = tl.sum(u * weight, 1)
    step = tl.where(there, rate, 0.0)
    if RULE == NORMALIZED:
        step, seen = step / tl.where(seen == 0, 1.0, seen), tl.where(seen == 0, float("inf"), seen)
        u -= (2 * along / seen)[:, None] * shared
    if RULE == REFERENCE:
        number, pairs = 0, 0
        first = stream // streams * streams
        for other in range(streams):
            pairs += flags_set(written + (first + other) * length, length)
            number += length if good is None else flags_set(good + (first + other) * length, length)
        step *= K * tl.cast(number, tl.float32) / tl.maximum(pairs, 1).to(tl.float32)
    if gate is not None:
        tl.store(by_gate + to, step * along, mask=inside)
        step *= tl.load(gate + stream * stride_g + mine * stride_gt, mask=inside, other=0.0)
    tl.store(by_weights + part, tl.where(there[:, None], step[:, None] * u, 0.0), mask=fits)


@torch.compiler.disable
def through_errors(
    upstream: Tensor, by_shares: Tensor, weights: Tensor, gate: Tensor | None, slots: Tensor, good: Tensor | None,
    written: Tensor, target_at: Tensor, memories: int, rule: WriteRule,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:  # fmt: skip
    """Return the gradients of what was read [B, T, Dv], of values [B, T + 1, Dv] with the one after the chunk, of
    weights [B, T, H, k] and gates [B, T] from those of the errors and shares of `prepare.prepared`."""
    upstream, (batch, length, heads, k) = upstream.contiguous(), weights.shape
    width, by_gate = upstream.shape[-1], None if gate is None else gate.new_empty(gate.shape)
    by_read, by_weights = torch.empty_like(upstream), weights.new_empty(weights.shape)
    targets = upstream.new_zeros(batch, length + 1, width)  # of the tokens that are no target
    tiles = ERRORS.pick(width, upstream.dtype)
    launch(
        _shares, (-(-length // tiles.rows) * batch,), upstream, by_shares.contiguous(), weights.contiguous(),
        slots.contiguous(), gate, bytes_of(good), bytes_of(written), target_at, by_read, targets, by_weights, by_gate,
        length, batch // max(1, memories), rule.learning_rate, *((0, 0) if gate is None else gate.stride()),
        tiles=tiles, D=width, H=heads, K=heads * k, KP=power_of_two(heads * k), RULE=STEP_CODES[rule.name],
        R=tiles.rows, DT=min(tiles.keys, power_of_two(width)),
    )  # fmt: skip
    return by_read, targets, by_weights, by_gate
