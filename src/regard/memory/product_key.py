"""Product-key memory: N = n^2 slots that are found through two sets of n sub-keys, one for each half of a query
(Lample et al. 2019; section 2 of the fast-weight product-key-memory paper).

A slot (i, j) scores s_i + s_j, the scores of the halves, so that the k best of all n^2 are among the k best of either
half; with both halves sorted, best first, a pair in places (a, b) (from 0) can be among the k best only where
(a + 1)(b + 1) <= k: 20 of 64 pairs for k = 8, 119 of 1024 for k = 32.

Scores of a half are registered by name: "dot" (equation 6) and "idw", -log(eps + |q - K|^2) (equation 21), under which
the softmax over the selected slots gives the weights of inverse-distance interpolation, w_ij proportional to
1 / ((eps + d1_i^2) (eps + d2_j^2)).

Legend: B batch, T tokens, H heads, n sub-keys of a half, N = n^2 slots, k selected, Dk width of a key (two halves), Dv
of a value. Inside: G sets of sub-keys, each with its own queries, d = Dk / 2.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from ..checks import ArgumentError, finite, flag, floating, instance, number, refuse, shape, tensor, whole, within
from ..grammar import Spec, as_spec
from ..precision import clean, full_precision, transformed
from ..registry import Registry

SOFTMAX = Spec.parse("softmax")


class SlotScore(Protocol):
    """The score of a half query and a sub-key."""

    def best(self, query: Tensor, keys: Tensor, k: int, eps: float) -> tuple[Tensor, Tensor]:
        """Return the k best sub-keys of each query, best first: (scores, differentiable; int64 index), both [G, T, k].

        query [G, T, d] and keys [G, n, d] are float32 or float64; of equal scores the lowest index comes first.
        """

    def key_gradient(self, query: Tensor, keys: Tensor, index: Tensor, scores: Tensor, upstream: Tensor) -> Tensor:
        """Return the sum over t, j of upstream_tj ds_tj/dK, [G, n, d], differentiable in all arguments: those and the
        results of `best`, and `upstream` [G, T, k]."""


slot_scores: Registry[type[SlotScore]] = Registry("slot score", "regard.slot_scores")


@dataclass(frozen=True)
class Found:
    """The slots that queries selected, best first; of equal scores the lowest index comes first.

    Attributes:
        slots: int64 [B, T, H, k], i1 * n + i2.
        scores: [B, T, H, k], the sums of the scores of the halves.
        halves: int64 [B, T, H, 2, k], the best sub-keys of each half.
        half_scores: [B, T, H, 2, k].
    """

    slots: Tensor
    scores: Tensor
    halves: Tensor
    half_scores: Tensor


def product_key_search(query: Tensor, keys: Tensor, top_k: int, *, score: str = "idw", eps: float = 1e-3) -> Found:
    """Return the `top_k` best of all n^2 slots, exactly, for every query and head.

    Args:
        query: [B, T, H, Dk], Dk even.
        keys: [H, 2, n, Dk/2], or [B, H, 2, n, Dk/2] if every sequence has its own.
        top_k: k, from 1 to n.
        score: a registered name, "idw" or "dot".
        eps: added to the squared distance under "idw", > 0.

    Returns:
        The slots found. Scores are float32 at least and differentiable in queries and keys, to any order. Squared
        distances are rounded to float32 only once, whatever autocast and the precision of matrix products. A query that
        is not finite has scores NaN (and arbitrary slots) and no gradient.

    Raises:
        ArgumentError: shapes or dtypes that do not fit, or a number out of range.

    Cost: O(T H n Dk) time (a matrix product, under "idw" in float64), O(T H n) memory while it runs.
    """
    call = "product_key_search"
    eps = _check(call, query, keys, top_k, eps)
    dtype = torch.promote_types(torch.promote_types(query.dtype, keys.dtype), torch.float32)
    with full_precision(query.device.type):
        cleaned, bad = clean(query.to(dtype))
        best = search(cleaned, keys.to(dtype), top_k, slot_scores.given(call, "score", score)(), eps)
        if bad is None:
            return best
        with_nan = lambda x: torch.where(bad.view(*bad.shape, *[1] * (x.dim() - 3)), torch.nan, x)  # noqa: E731
        return replace(best, scores=with_nan(best.scores), half_scores=with_nan(best.half_scores))


def search(query: Tensor, keys: Tensor, top_k: int, kind: SlotScore, eps: float) -> Found:
    """Compute `product_key_search` for checked, finite tensors of one dtype, float32 or float64."""
    (batch, tokens, heads, width), n = query.shape, keys.shape[-2]
    q, back = by_set(query.reshape(batch, tokens, heads, 2, width // 2), keys.dim() == 4)
    scores, index = kind.best(q, keys.reshape(-1, n, width // 2), top_k, eps)
    half_scores, halves = back(scores), back(index)
    slots, totals = _joined(half_scores, halves, n)
    return Found(slots, totals, halves, half_scores)


def slot_weights(found: Found, spec: str | Spec = "softmax", *, joint: bool) -> Tensor:
    """Return the weights of the selected slots, [B, T, H, k].

    Args:
        spec: a spec of degree 0 with non-negative weights that sum to one, and without a similarity of its own.
        joint: weight all H k slots of a token together (fast-weight memory); else each head alone (product-key memory).

    Raises:
        ArgumentError: a spec that gives no such weights.
    """
    known = weights_spec("slot_weights", spec)
    instance("slot_weights", "found", found, Found, "what product_key_search found")
    flag("slot_weights", "joint", joint)
    if not joint:
        return weigh(found.scores, known)
    return weigh(found.scores.flatten(-2), known).view_as(found.scores)


def weigh(scores: Tensor, spec: Spec) -> Tensor:
    """Return the weights of scores [..., k], for a spec that `weights_spec` accepts."""
    with full_precision(scores.device.type):
        if spec == SOFTMAX:
            return scores.softmax(-1)
        scale, params = spec.resolve(1, None, {})
        z = scores * scale
        return spec.weighting.weights(z, spec.weighting.fit(z, params), params)


def score_gradient(scores: Tensor, weights: Tensor, upstream: Tensor, spec: Spec) -> Tensor:
    """Return dL/dscores [..., k] for `weights` = weigh(scores, spec), given dL/dweights; differentiable."""
    if spec == SOFTMAX:
        return weights * (upstream - (weights * upstream).sum(-1, keepdim=True))
    scale, params = spec.resolve(1, None, {})
    z = scores * scale
    stats = spec.weighting.fit(z, params)
    slope, mix = spec.weighting.jacobian(z, weights, stats, params)
    rho = (mix * upstream).sum(-1, keepdim=True)
    return scale * spec.weighting.finish(slope * (upstream - rho), rho, z, weights, stats, params)


def weights_spec(call: str, spec: str | Spec) -> Spec:
    """Return `spec` as a Spec, after checking that it can weight selected slots."""
    known = as_spec(spec, call)
    if not known.convex or known.degree or known.similarity.name != "dot":
        kind = "that are not negative and sum to one, of degree 0, without their own similarity"
        raise refuse(call, "spec", str(known), f"weights over scores {kind}, such as 'softmax' or 'sparsemax'")
    return known


def product_key_read(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    top_k: int,
    *,
    score: str = "idw",
    eps: float = 1e-3,
    spec: str | Spec = "softmax",
    joint: bool = False,
) -> tuple[Tensor, Found]:
    """Return the weighted sums of the values of the selected slots, over all heads (equation 9).

    Args:
        values: [N, Dv], N = n^2, one table for all heads.
        query, keys, top_k, score, eps: as in `product_key_search`; spec, joint: as in `slot_weights`.

    Returns:
        (output [B, T, Dv] in the dtype of `query`, what was found).

    Raises:
        ArgumentError: as in `product_key_search`; values that are not [n^2, Dv].

    Cost: that of the search, and O(T H k Dv) time and memory.
    """
    call = "product_key_read"
    best = within(call, None, product_key_search, query, keys, top_k, score=score, eps=eps)
    tensor(call, "values", values, keys.shape[-2] ** 2, "Dv", like=query, why=", one for every pair of sub-keys")
    weights = within(call, None, slot_weights, best, spec, joint=joint).flatten(-2)
    rows = values.index_select(0, best.slots.reshape(-1)).view(*weights.shape, -1)
    with full_precision(query.device.type):
        out = (weights[..., None, :] @ rows.to(weights.dtype)).squeeze(-2)
    return out.to(query.dtype), best


def by_set(x: Tensor, shared: bool) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """Reshape [B, T, H, 2, d] to [G, T', d], and return the inverse: G = H * 2 sets of keys if the sequences share them
    (T' = B T), otherwise B * H * 2."""
    batch, tokens, heads = x.shape[:3]
    if shared:
        flat = x.permute(2, 3, 0, 1, 4).reshape(heads * 2, batch * tokens, x.shape[-1])
        return flat, lambda y: y.view(heads, 2, batch, tokens, y.shape[-1]).permute(2, 3, 0, 1, 4)
    flat = x.permute(0, 2, 3, 1, 4).reshape(batch * heads * 2, tokens, x.shape[-1])
    return flat, lambda y: y.view(batch, heads, 2, tokens, y.shape[-1]).permute(0, 3, 1, 2, 4)


def check_eps(call: str, name: str, eps: Any) -> float:
    """Return what is added to squared distances as a float, after checking that it is a number above 0."""
    return number(call, name, eps, low=0.0, high=1e30, strict=True)


def _check(call: str, query: Tensor, keys: Tensor, top_k: int, eps: float) -> float:
    floating(call, "query", query)
    tensor(call, "keys", keys, like=query)
    if query.dim() != 4 or query.shape[-1] % 2 or not query.shape[-1]:  # no text of symbolic lengths in torch.compile
        expected = "[B, T, H, Dk] with an even Dk, each half with its own set of sub-keys"
        raise ArgumentError(f"{call}: query is {shape(query)}, expected {expected}.")
    (batch, _, heads, width), batched = query.shape, keys.dim() == 5
    wanted = (batch, heads, 2) if batched else (heads, 2)
    if keys.dim() not in (4, 5) or tuple(keys.shape[:-2]) != wanted or keys.shape[-1] != width // 2:
        needed = f"[{heads}, 2, n, {width // 2}] or [{batch}, {heads}, 2, n, {width // 2}]"
        raise ArgumentError(f"{call}: keys is {shape(keys)}, but query {shape(query)} needs {needed}.")
    require_top_k(call, top_k, keys.shape[-2])
    finite(call, "query", query)
    finite(call, "keys", keys)
    return check_eps(call, "eps", eps)


def require_top_k(call: str, top_k: int, n: int) -> None:
    """Check that `top_k` is a whole number from 1 to n, the number of sub-keys of a half."""
    whole(call, "top_k", top_k, 1, n, why=", the sub-keys of a half; give more sub-keys or a smaller top_k")


@slot_scores.register("idw", "inverse-distance")
class InverseDistance:
    """-log(eps + |q - K|^2) (equation 21)."""

    def best(self, query: Tensor, keys: Tensor, k: int, eps: float) -> tuple[Tensor, Tensor]:
        nearness, index = _selected(_nearness, query, keys, k)
        if transformed():
            return -torch.log(eps - _nearness(query, keys).gather(-1, index)), index
        return -torch.log(eps + _Best.apply(query, keys, index, -nearness, True)), index

    def key_gradient(self, query: Tensor, keys: Tensor, index: Tensor, scores: Tensor, upstream: Tensor) -> Tensor:
        by_square = _spread(-upstream * scores.exp(), index, keys.shape[1])  # ds/d(d^2) = -1 / (eps + d^2)
        return _square_gradient(query, keys, by_square)


@slot_scores.register("dot")
class Dot:
    """q . K (equation 6)."""

    def best(self, query: Tensor, keys: Tensor, k: int, eps: float) -> tuple[Tensor, Tensor]:
        scores, index = _selected(_dots, query, keys, k)
        if transformed():
            return _dots(query, keys).gather(-1, index), index
        return _Best.apply(query, keys, index, scores, False), index

    def key_gradient(self, query: Tensor, keys: Tensor, index: Tensor, scores: Tensor, upstream: Tensor) -> Tensor:
        return _spread(upstream, index, keys.shape[1]).mT @ query


def _nearness(query: Tensor, keys: Tensor) -> Tensor:
    """Return -|q - K|^2, [G, T, n]."""
    if query.dtype == torch.float64:
        return -(query[:, :, None] - keys[:, None]).square().sum(-1)
    q, k = _wide(query), _wide(keys)
    q2, k2 = (torch.linalg.vector_norm(x, dim=-1).square() for x in (q, k))
    return -torch.baddbmm(k2[:, None], q, k.mT, alpha=-2).add_(q2[..., None]).clamp_(min=0).to(query.dtype)


def _dots(query: Tensor, keys: Tensor) -> Tensor:
    """Return q . K, [G, T, n]."""
    if query.dtype == torch.float64:
        return (query[:, :, None] * keys[:, None]).sum(-1)
    return (_wide(query) @ _wide(keys).mT).to(query.dtype)


def _wide(x: Tensor) -> Tensor:
    """Convert to float64, except on MPS, which has none: near a key, and for close keys far from the origin,
    cancellation in the products would leave less than float32 precision."""
    return x if x.device.type == "mps" else x.double()


class _Best(torch.autograd.Function):
    """The products `scores` [G, T, k] of queries and the sub-keys `index`, or their squared distances, with derivatives
    in closed form, since autograd would keep all differences [G, T, k, d]."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, keys: Tensor, index: Tensor, scores: Tensor, squares: bool) -> Tensor:
        ctx.save_for_backward(query, keys, index)
        ctx.squares = squares
        return scores

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        query, keys, index = ctx.saved_tensors
        spread = _spread(upstream, index, keys.shape[1])
        by_query = by_keys = None
        if ctx.needs_input_grad[0]:
            by_query = spread @ keys
            if ctx.squares:
                by_query = 2 * (query * upstream.sum(-1, keepdim=True) - by_query)
        if ctx.needs_input_grad[1]:
            by_keys = _square_gradient(query, keys, spread) if ctx.squares else spread.mT @ query
        return by_query, by_keys, None, None, None


def _square_gradient(query: Tensor, keys: Tensor, spread: Tensor) -> Tensor:
    """Return the sum over t, i of spread_ti d|q_t - K_i|^2 / dK, [G, n, d]."""
    return 2 * (keys * spread.sum(1)[..., None] - spread.mT @ query)


def _spread(values: Tensor, index: Tensor, n: int) -> Tensor:
    """Scatter `values` [G, T, k] to [G, T, n] at `index`, distinct within a row."""
    return values.new_zeros(*index.shape[:-1], n).scatter(-1, index, values)


TILE = 2**23  # numbers computed at once while sub-keys are selected


@torch.no_grad()
def _selected(measure: Callable[..., Tensor], query: Tensor, keys: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the k largest of measure(query, keys) [G, T, n], best first, and their indices."""
    numbers = keys.numel() if query.dtype == torch.float64 else len(keys) * keys.shape[1]
    best = []
    # an exported graph has one tile, since the number of tiles depends on the length
    for part in (query,) if torch.compiler.is_exporting() else query.split(max(1, TILE // max(1, numbers)), 1):
        scores = measure(part, keys)
        index = _largest(scores, k)
        best.append((scores.gather(-1, index), index))
    if len(best) == 1:
        return best[0]
    return torch.cat([scores for scores, _ in best], 1), torch.cat([index for _, index in best], 1)


def _largest(scores: Tensor, m: int) -> Tensor:
    """Return the indices of the m largest of each row, int64 [..., m], best first, of equals the lowest first."""
    n = scores.shape[-1]
    if scores.dtype != torch.float32:
        return scores.sort(dim=-1, descending=True, stable=True).indices[..., :m]
    # A float's bits, the lower 31 inverted if it is negative, have the order of the float; n - 1 - index in the low
    # half breaks ties, for which topk alone gives no order.
    bits = (scores + 0.0).view(torch.int32)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    packed = (ordered.long() << 32) | torch.arange(n - 1, -1, -1, device=scores.device)
    return n - 1 - (packed.topk(m, dim=-1).values & 0xFFFFFFFF)


def _places(k: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Return the places (a, b) of sorted halves that can be among the k best sums."""
    at = (k, like.device)
    if at in _PLACES and type(like) is Tensor:
        return _PLACES[at]
    pairs = [(a, b) for a in range(k) for b in range(k // (a + 1))]
    with torch.inference_mode(False):
        a, b = torch.tensor(pairs).T.contiguous().to(like.device, non_blocking=True)  # without waiting
    if not torch.compiler.is_compiling() and type(like) is Tensor:
        _PLACES[at] = a, b
    return a, b


_PLACES: dict[tuple[int, torch.device], tuple[Tensor, Tensor]] = {}


def _joined(half_scores: Tensor, halves: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """Return (slots, scores), both [B, T, H, k], given sorted halves [B, T, H, 2, k]."""
    k = halves.shape[-1]
    a, b = _places(k, halves)
    slots = halves[..., 0, :].index_select(-1, a) * n + halves[..., 1, :].index_select(-1, b)
    sums = half_scores[..., 0, :].index_select(-1, a) + half_scores[..., 1, :].index_select(-1, b)
    by_slot = slots.argsort(-1)  # so that the stable sort leaves equals with the lowest slot first
    best = sums.detach().gather(-1, by_slot).sort(dim=-1, descending=True, stable=True).indices[..., :k]
    best = by_slot.gather(-1, best)
    return slots.gather(-1, best), sums.gather(-1, best)
