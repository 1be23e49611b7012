"""Attention to the residuals of a global linear model (local-linear-attention paper, equation 9):

    o_i = sum_j s_ij (v_j - W_i k_j) + W_i q_i = obar_i + W_i (q_i - kbar_i)

obar and kbar come from one attention over the values and keys side by side; W_i, the model of the pairs that query i
sees, is read at q_i - kbar_i, which costs no more than reading it at q_i. Softmax with W = 0 is attention; softmax with
the best W near the query is local linear attention; in between, W may be any state of fixed size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..checks import (
    ArgumentError,
    boolean_mask,
    broadcastable,
    floating,
    on_device,
    optional_whole,
    shape,
    shown,
    within,
)
from ..grammar import Spec, as_spec
from ..grammar.spec import as_trend
from ..pairwise.attention import attention
from ..pairwise.diagnostics import Diagnostics
from ..pairwise.dispatch import Cost, Inputs, Problem, choose, register_impl
from .arguments import order
from .trends import predict_from

CALL = "interpolated_attention"


def interpolated_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    trend: Any = "mesa",
    spec: Spec | str = "softmax",
    *,
    attn_mask: Tensor | None = None,
    is_causal: bool = True,
    exclude_self: bool = False,
    query_offset: int | None = None,
    segment_ids: Tensor | None = None,
    scale: float | Tensor | None = None,
    params: Mapping[str, float | Tensor] | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """A global linear model at every query, and the weighted mean of what it leaves unexplained (equation 9).

    With a trend that has a name it is `regard.attention` with the Spec of both, such as interpolated[mesa].

    Args:
        query: [B, H, Tq, D].
        key: [B, Hkv, Tk, D].
        value: [B, Hkv, Tk, Dv].
        trend: the global linear model W_i: a name, text or object of `regard.grammar.trends` ("linear-attention",
            "mesa", "mesa(ridge=0.5)", "delta", "gated-delta"), or, for learned numbers, a function of (query, key,
            value, attn_mask=, is_causal=, exclude_self=, and segment_ids= where given) that gives W_i q_i for any
            queries, as lambda q, k, v, **how: regard.mesa_attention(q, k, v, ridge=ridge, **how)[0].
        spec: the weights s: a sentence whose weights sum to one, or its text.
        attn_mask: boolean over the keys, broadcastable to [B, 1, 1, Tk]; True where a key may be attended.
        is_causal, exclude_self: as in `regard.attention`; the model sees what the weights see.
        query_offset: the key position of query 0, a whole number; Tk - Tq (end-aligned) by default. A function as
            trend needs 0.
        segment_ids: integers [B or 1, T] of packed sequences, T = Tq = Tk, as in `regard.linear_attention`: weights and
            model see a document alone.
        scale, params, enable_gqa: as in `regard.attention`.

    Returns:
        The output [B, H, Tq, Dv] in the dtype of `query`. Rows without a visible key are 0.

    Raises:
        ArgumentError: as `regard.attention` and the trend; a spec whose weights do not sum to one, or of degree 1.

    Precision: float32 (float64 for float64 inputs) throughout; the output is rounded once. Cost: one attention with
    values of Dv + D channels, and the trend, for all keys.
    """
    weights = as_spec(spec, CALL)
    require_averages(weights)
    causal = order(CALL, is_causal, exclude_self)
    optional_whole(CALL, "query_offset", query_offset)
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        floating(CALL, name, tensor)
    mask = _key_mask(attn_mask, key)
    how: dict[str, Any] = {
        "attn_mask": None if mask is None else mask[:, None, None], "is_causal": causal, "exclude_self": exclude_self,
        "query_offset": query_offset, "segment_ids": segment_ids, "scale": scale, "params": params,
        "enable_gqa": enable_gqa,
    }  # fmt: skip
    if not callable(trend) or hasattr(trend, "name"):
        joined = within(CALL, "trend", _joined, spec, trend)
        found: Tensor = within(CALL, None, attention, query, key, value, joined, **how)
        return found
    if query_offset not in (None, 0) or key.shape[2] != query.shape[2]:
        raise ArgumentError(f"{CALL}: a function as trend needs query_offset 0, as many queries as keys.")
    q, k, v = (x.to(torch.promote_types(query.dtype, torch.float32)) for x in (query, key, value))
    both = within(CALL, None, attention, q, k, torch.cat([v, k], -1), weights, **how)
    mean, centre = both.split([value.shape[3], key.shape[3]], -1)
    given = {"attn_mask": mask, "is_causal": causal, "exclude_self": exclude_self}
    slope = trend(q - centre, k, v, **given, **({} if segment_ids is None else {"segment_ids": segment_ids}))
    if not isinstance(slope, Tensor) or slope.shape != mean.shape:
        raise ArgumentError(f"{CALL}: trend gave {shown(slope)}, expected W_i q_i, a tensor {shape(mean)}.")
    return (mean + slope).to(query.dtype)


_JOINED: dict[tuple[str, str], Spec] = {}


def _joined(spec: Spec | str, trend: Any) -> Spec:
    """The sentence with the trend."""
    if isinstance(spec, str) and isinstance(trend, str):
        _remember(spec, trend)
        return _JOINED[spec, trend]
    return replace(as_spec(spec), trend=as_trend(trend))


def _remember(spec: str, trend: str) -> bool:
    if (spec, trend) not in _JOINED:
        if len(_JOINED) >= 1024:  # a number that changes at every call must not fill the memory
            _JOINED.clear()
        _JOINED[spec, trend] = replace(as_spec(spec), trend=as_trend(trend))
    return True


_remember._dynamo_marked_constant = True  # type: ignore[attr-defined]  # run for real while a graph is traced


def require_averages(spec: Spec) -> None:
    """The weights of `spec` are those of a mean.

    Raises:
        ArgumentError: they are not.
    """
    if spec.degree or not spec.weighting.normalised:
        why = "has a linear model of its own" if spec.degree else "has weights that do not sum to one"
        raise ArgumentError(
            f"{CALL}: the spec {spec} {why}, so that it has no residuals to average; use a normalised sentence of "
            f"degree 0, such as softmax or biweight."
        )


def _key_mask(mask: Tensor | None, key: Tensor) -> Tensor | None:
    """The mask as [B, Tk].

    Raises:
        ArgumentError: it differs from query to query, or does not fit.
    """
    if mask is None:
        return None
    boolean_mask(CALL, "attn_mask", mask)
    if mask.dim() not in (1, 2, 4) or (mask.dim() == 4 and mask.shape[1:3] != (1, 1)):
        raise ArgumentError(
            f"{CALL}: attn_mask must be the same for all queries and heads, for one state is made of the keys: give "
            f"[B, Tk] or [B, 1, 1, Tk]."
        )
    on_device(CALL, "attn_mask", mask, key.device)
    mask = mask[:, 0, 0] if mask.dim() == 4 else mask
    broadcastable(CALL, "attn_mask", mask, (key.shape[0], key.shape[2]))
    return mask.expand(key.shape[0], key.shape[2])


@register_impl("trend", priority=1)
class Interpolated:
    """Sentences with a trend: the best implementation for their weights, over values and keys side by side, and the
    trend read where those leave it. Diagnostics are those of the weights."""

    trends = True

    def available(self) -> str | None:
        return None

    def supports(self, problem: Problem) -> str | None:
        if problem.spec.trend is None:
            return "is for sentences with a trend, such as interpolated[mesa]"
        if problem.window is not None:
            return "has no window: the state of a trend cannot forget the oldest pairs"
        if problem.mask == "pairs":
            return "makes one state for all queries, so that a mask may depend on the key alone"
        if problem.segments and problem.queries != problem.keys:
            return "takes segments only with a query at every key: each document then has a state of its own"
        if problem.offset is None:
            return "needs one query_offset for all sequences, an int"
        return None

    def cost(self, problem: Problem) -> Cost:
        local = _local(problem)
        inner = choose(local, "auto").cost(local)
        state = problem.dim * problem.value_dim
        tokens = problem.batch * problem.heads * max(problem.queries, problem.keys)
        return Cost(inner.flops + 4 * tokens * state, inner.bytes + 16 * tokens * (problem.dim + problem.value_dim))

    def run(self, inputs: Inputs) -> tuple[Tensor, Diagnostics | None]:
        assert inputs.x is not None
        assert inputs.y is not None
        visible, mask, keys = inputs.visible, inputs.visible.mask, inputs.y
        asked = replace(_local(inputs.problem), dim=inputs.q.shape[3], dtype=inputs.q.dtype)
        inner = replace(inputs, problem=asked, v=torch.cat([inputs.v, keys], -1), x=None, y=None)
        both, diagnostics = choose(asked, "auto").run(inner)
        mean, centre = both.split([inputs.v.shape[3], keys.shape[3]], -1)
        q, values, heads = inputs.x - centre, inputs.v, inputs.x.shape[1]
        how: dict[str, Any] = {"is_causal": visible.causal, "exclude_self": visible.strict, "offset": visible.offset}
        how["segment_ids"] = None if visible.runs is None else visible.runs[0]
        if mask is None or mask.shape[1] == 1:
            kept = None if mask is None else mask[:, 0, 0].expand(keys.shape[0], -1)
            return mean + predict_from(inputs.spec.trend, q, keys, values, attn_mask=kept, **how), diagnostics
        found = []  # heads may see different keys, and then have different states
        for head in range(heads):
            own = head * keys.shape[1] // heads
            one = (q[:, head : head + 1], keys[:, own : own + 1], values[:, own : own + 1])
            kept = mask[:, head, 0].expand(keys.shape[0], -1)
            found.append(predict_from(inputs.spec.trend, *one, attn_mask=kept, **how))
        return mean + torch.cat(found, 1), diagnostics


def _local(problem: Problem) -> Problem:
    """What is asked of the implementation of the weights."""
    return replace(problem, spec=problem.spec.local, value_dim=problem.value_dim + problem.dim)
