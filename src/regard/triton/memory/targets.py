"""Compute what tokens of a chunk write (`fast_weight_rules`): errors against the next token's value, and step sizes.

Legend: R streams of L tokens, M memories (R, or 1 for all), H heads, k slots a head, K = H k, Dv width of a value.
"""

import triton
import triton.language as tl

from ..runtime.tiles import Tiles, TileTable
from .search import flags_set

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
