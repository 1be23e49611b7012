"""Reading and writing a chunk of a fast-weight memory with kernels, each step with its own derivative. `fast_weights`
calls `looked` and `rewritten` through `TableValues`.

A chunk takes six launches: rough scores, search, mixed rows; preparing the write, keys, write.

Legend: B batch, T tokens, M memories (B, or 1 for all), P = B T / M, H heads, n sub-keys of a half, k slots a head, d
width of a half, Dv of a value.
"""

from typing import Any

import torch
from torch import Tensor

from ...memory.fast_weight_rules import FLOOR, WriteRule
from ...memory.fast_weights import SlotMemory
from ...memory.product_key import SOFTMAX, InverseDistance, _joined, weigh
from ...memory.stores.overlay_pool import first_order
from ..runtime.operators import applied
from .keys import moved_keys
from .prepare import Chunk, Errors, Use, prepared, sums_of
from .read import picked_rows
from .search import best_halves, through_weights
from .targets import STEP_CODES, through_errors

THROUGH_SOFTMAX = torch.ops.aten._softmax_backward_data
"""Given u, p, an axis and a dtype, return p (u - sum p u) by one launch."""


def looked(
    store: Any, how: SlotMemory, keys: Tensor, tokens: dict[str, Tensor]
) -> tuple[Tensor, dict[str, Tensor]] | None:
    """Do `SlotMemory._looked` by kernels, or return None if they cannot."""
    query, good = tokens["query"], tokens.get("good")
    if store.refuses(store.base, None, query, keys, how.top_k, how.kind) is not None:
        return None
    memories, n = len(keys), keys.shape[-2]
    joined = how.spec == SOFTMAX and how.rule.key_update != "mse"
    distance = isinstance(how.kind, InverseDistance)
    half_scores, halves, slots, weights = applied(_Search, query, keys, how.top_k, how.eps, distance, joined)
    fields = {"halves": halves, "half_scores": half_scores}
    if not joined:
        slots, fields["scores"] = _joined(half_scores, halves, n)
        weights = weigh(fields["scores"].flatten(-2), how.spec).view_as(slots)
    weight, slot = (_by_memory(x.flatten(-2), memories) for x in (weights, slots))
    mix = (tokens["value"], tokens.get("gate")) if how.mix else ()
    read, mixed = store.mixed(weight, slot, None if good is None else _by_memory(good, memories), *mix)
    read = read.view(*query.shape[:2], store.width)
    return read if mixed is None else mixed, {**fields, "slots": slots, "weights": weights, "read": read}


def rewritten(
    store: Any, how: SlotMemory, keys: Tensor, tokens: dict[str, Tensor], following: dict[str, Tensor] | None,
) -> tuple[Tensor, Any] | None:  # fmt: skip
    """Do `SlotMemory.write` by kernels: return keys and store after it, or None if they cannot."""
    rule, moved = how.rule, how.rule.key_update != "none"
    pooled = rule.key_update == "pooled-entropy" and keys.shape[1] > 1
    known = rule.name in STEP_CODES and rule.key_update != "mse" and not pooled
    query, gate, good = (tokens.get(name) for name in ("query", "gate", "good"))
    refused = store.refuses(store.base, None, tokens["value"], keys, tokens["slots"].shape[-1], how.kind) is not None
    if refused or not known or (moved and query is None):
        return None
    after = following if rule.look_ahead and rule.border else None
    value, good_next = (None, None) if after is None else (after["value"], after.get("good"))
    memories = store.memories
    slots, counted = (None if x is None else _by_memory(x, memories) for x in (tokens["slots"].flatten(-2), good))
    use = (tokens["half_scores"], tokens["halves"], len(keys), keys.shape[-2]) if moved else None
    gate = gate if rule.gate_loss else None
    chunk = Chunk(tokens["read"], tokens["value"], value, tokens["weights"], gate, tokens["slots"], good)
    used, order, computed = prepared(use, (slots, counted, store.slots), chunk, good_next, memories, rule)
    errors, shares = applied(_Errors, *chunk, memories, rule, computed)
    if use is not None:
        distance, rate = isinstance(how.kind, InverseDistance), rule.learning_rate * rule.address_weight
        keys = applied(_Keys, keys, query, *use[:2], counted, rate, distance, used)
    shares, errors = _by_memory(shares, memories), _by_memory(errors, memories)
    return keys, store.write(slots, shares.flatten(-2), errors, counted, order)


def _by_memory(x: Tensor, memories: int) -> Tensor:
    """View [B, T, ...] as [M, P, ...]."""
    return x if len(x) == memories else x.reshape(memories, -1, *x.shape[2:])


def _numbers(halves: Tensor, keys: Tensor) -> Tensor:
    """Return the numbers of the sub-keys `halves` [B, T, H, 2, k] among all of keys [M, H, 2, n, d]."""
    (memories, *sets, n), every = keys.shape[:-1], keys.shape[:-1].numel()
    return halves + torch.arange(0, every, n, device=halves.device).view(memories, 1, *sets, 1)


def _flat(x: Tensor) -> Tensor:
    """Return the vectors of x [..., d] as the rows of one table [1, N, d], contiguous."""
    return x.contiguous().view(1, -1, x.shape[-1])


def _centred(x: Tensor, p: Tensor) -> Tensor:
    """Return x - sum p x."""
    return x - (p * x).sum(-1, keepdim=True)


class _Search(torch.autograd.Function):
    """Scores and indices [B, T, H, 2, k] of each half's best sub-keys; if `joined`, slots, weights [B, T, H, k]."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, keys: Tensor, k: int, eps: float, distance: bool, joined: bool
    ) -> tuple[Tensor | None, ...]:  # fmt: skip
        scores, halves, slots, weights = best_halves(query, keys, k, eps, distance=distance, joined=joined)
        ctx.save_for_backward(query, keys, scores, halves, slots, weights)
        ctx.distance = distance
        ctx.mark_non_differentiable(halves, *(() if slots is None else (slots,)))
        ctx.set_materialize_grads(False)
        return scores, halves, slots, weights

    @staticmethod
    @first_order
    def backward(
        ctx: Any, upstream: Tensor | None, _: None, __: None, by_weights: Tensor | None
    ) -> tuple[Tensor | None, ...]:  # fmt: skip
        query, keys, scores, halves, slots, weights = ctx.saved_tensors
        none = (None,) * 4
        if upstream is None and by_weights is None:
            return None, None, *none
        by_query = by_keys = None
        c: Any  # gradient by squared distances, or by products
        c = -upstream * scores.exp() if ctx.distance and upstream is not None else upstream
        if by_weights is not None:
            given = through_weights(by_weights, weights, slots, halves, scores, keys.shape[-2], ctx.distance)
            c = given if c is None else c + given
        if ctx.needs_input_grad[0]:
            by_query = picked_rows(_flat(keys), _flat(_numbers(halves, keys)), _flat(c))[0]
            if ctx.distance:
                by_query = 2 * (_flat(query.unflatten(-1, (2, -1))) * _flat(c).sum(-1, keepdim=True) - by_query)
            by_query = by_query.view(query.shape)
        if ctx.needs_input_grad[1]:
            groups = sums_of(c, halves, len(keys), keys.shape[-2])[1]
            by_keys = moved_keys(keys, query, c, halves, None, None, groups, 0.0, distance=ctx.distance)
        return by_query, by_keys, *none


class _Errors(torch.autograd.Function):
    """v^ - target [R, L, Dv], and rate g_t w_tj step_t [R, L, H, k], 0 where nothing is written."""

    @staticmethod
    def forward(
        ctx: Any, read: Tensor, value: Tensor, following: Tensor | None, weights: Tensor, gate: Tensor | None,
        slots: Tensor, good: Tensor | None, memories: int, rule: WriteRule, computed: Errors,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        errors, shares, written, target_at = computed
        ctx.save_for_backward(weights, gate, slots, good, written, target_at)
        ctx.memories, ctx.rule = memories, rule
        return errors, shares

    @staticmethod
    @first_order
    def backward(ctx: Any, upstream: Tensor, by_shares: Tensor) -> tuple[Tensor | None, ...]:
        by_read, targets, *others = through_errors(upstream, by_shares, *ctx.saved_tensors, ctx.memories, ctx.rule)
        length, after = by_read.shape[1], ctx.needs_input_grad[2]
        return by_read, targets[:, :length], targets[:, length:] if after else None, *others, *(None,) * 5


class _Keys(torch.autograd.Function):
    """Sub-keys [M, H, 2, n, d] after a step that increases the entropy of their use."""

    @staticmethod
    def forward(
        ctx: Any, keys: Tensor, query: Tensor, scores: Tensor, halves: Tensor, counted: Tensor | None, rate: float,
        distance: bool, used: Use,
    ) -> Tensor:  # fmt: skip
        mean, slope, groups = used
        ctx.save_for_backward(keys, query, scores, halves, counted, mean, slope)
        ctx.rate, ctx.distance = rate, distance
        return moved_keys(keys, query, scores, halves, counted, slope, groups, rate, distance=distance)

    @staticmethod
    @first_order
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        keys, query, scores, halves, counted, mean, slope = ctx.saved_tensors
        batch, length = halves.shape[:2]
        share: Tensor | float = len(keys) / (batch * length)
        if counted is not None:  # 1 / C for counted tokens, else 0
            share = (counted / counted.sum(-1, keepdim=True).clamp(min=1)).view(batch, length, 1, 1, 1)
        index, p = _numbers(halves, keys), scores.softmax(-1)
        a = _centred(slope.take(index), p)
        by, rate = (share * scores.exp(), 2 * ctx.rate) if ctx.distance else (share, ctx.rate)
        u, gamma = by * p * a, -rate * upstream
        pulled, by_u, _ = picked_rows(_flat(gamma), _flat(index), _flat(u), _flat(query.unflatten(-1, (2, -1))))
        by_u = by_u.view(index.shape)
        if ctx.distance:
            total = sums_of(u, halves, len(keys), keys.shape[-2])[0]
            upstream = torch.addcmul(upstream, gamma, total.view(*keys.shape[:-1], 1), value=-1)
            by_u = by_u - (gamma * keys).sum(-1).take(index)
        x = _centred(by * by_u, p)  # of u by scores: through p, and through the slopes a of p-
        by_slope = sums_of(p * x, halves, len(keys), keys.shape[-2])[0]
        floored = mean + FLOOR
        by_mean = by_slope * (floored + FLOOR) / floored.square()
        by_scores = THROUGH_SOFTMAX(x * a + share * by_mean.take(index), p, -1, p.dtype)
        if ctx.distance:
            by_scores.addcmul_(by_u, u)
        return upstream, pulled.view(query.shape), by_scores, *(None,) * 5
