"""Gradients of the steps of `rounds` that combine few numbers of a token, each by one launch.

Legend: B batch, T tokens, M memories (B, or 1 for all), H heads, k slots a head, K = H k, Dv width of a value.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...memory.fast_weight_rules import WriteRule
from ..runtime.blocks import LENGTHS
from ..runtime.launch import launch
from ..runtime.tiles import Tiles, power_of_two
from .search import bytes_of, flags_set
from .targets import ERRORS, NORMALIZED, REFERENCE, STEP_CODES, seen_weights


@triton.jit(do_not_specialize=("n",))
def _scores(
    upstream, weights, slots, halves, scores, by_scores, n,
    H: tl.constexpr, TOP: tl.constexpr, KP: tl.constexpr, TP: tl.constexpr, DISTANCE: tl.constexpr,
):  # fmt: skip
    """Compute `through_weights` for one token."""
    first = tl.program_id(0).to(tl.int64) * H * TOP
    every = tl.arange(0, KP)
    weight = tl.load(weights + first + every, mask=every < H * TOP, other=0.0)
    mean = tl.sum(weight * tl.load(upstream + first + every, mask=every < H * TOP, other=0.0), 0)
    entry = tl.arange(0, TP)
    inside = entry < TOP
    for head in range(H):
        at = first + head * TOP + entry
        weight = tl.load(weights + at, mask=inside, other=0.0)
        u = weight * (tl.load(upstream + at, mask=inside, other=0.0) - mean)
        slot = tl.load(slots + at, mask=inside, other=0)
        for half in tl.static_range(2):
            place = slot // n if half == 0 else slot % n
            to = 2 * (at - entry) + half * TOP + entry
            met = tl.load(halves + to, mask=inside, other=-1)[:, None] == place[None, :]
            sums = tl.sum(tl.where(met, u[None, :], 0.0), 1)
            if DISTANCE:
                sums = -sums * tl.exp(tl.load(scores + to, mask=inside, other=0.0))
            tl.store(by_scores + to, sums, mask=inside)


@torch.compiler.disable
def through_weights(
    upstream: Tensor, weights: Tensor, slots: Tensor, halves: Tensor, scores: Tensor, n: int, distance: bool
) -> Tensor:
    """Return the gradient [B, T, H, 2, k] of the products of sub-keys and queries, or of squared distances, whose
    `scores` are -log, from the gradient of softmax weights [B, T, H, k] of the slots that n x n sub-keys give."""
    (batch, length, heads, k), by_scores = weights.shape, torch.empty_like(scores)
    launch(
        _scores, (batch * length,), upstream.contiguous(), weights, slots, halves, scores, by_scores, n,
        tiles=Tiles(warps=1, stages=1), H=heads, TOP=k, KP=power_of_two(heads * k), TP=power_of_two(k),
        DISTANCE=distance,
    )  # fmt: skip
    return by_scores


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
