"""Trends computed: what a global linear model of the pairs seen so far predicts for a query.

Legend: B batch, H query heads, Hkv key heads, Tq queries, Tk keys, D channels of a key, Dv of a value.
"""

from __future__ import annotations

from functools import singledispatch
from typing import Any

import torch
from torch import Tensor

from ..checks import ArgumentError
from ..grammar.trends import Delta, GatedDelta, LinearAttention, Mesa
from .delta import delta_rule
from .linear import linear_attention
from .mesa import mesa_attention


@singledispatch
def predict(trend: Any, query: Tensor, key: Tensor, value: Tensor, **how: Any) -> tuple[Tensor, Any]:
    """(W_i q_i [B, H, Tq, Dv], the state after all pairs); register a function for a trend of one's own.

    Args:
        trend: an object of `regard.grammar.trends`.
        query: [B, H, Tq, D]; key: [B, Hkv, Tk, D]; value: [B, Hkv, Tk, Dv].
        how: state, attn_mask, is_causal, exclude_self as in `regard.linear_attention`; segment_ids only where a call
            has them.

    Raises:
        ArgumentError: nothing is registered for the trend.
    """
    raise ArgumentError(
        f"trend: nothing computes {trend!r}; register a function by regard.recurrent.trends.predict.register."
    )


def _fade(trend: Any) -> float | None:
    return trend.log_decay or None


@predict.register
def _(trend: LinearAttention, query: Tensor, key: Tensor, value: Tensor, **how: Any) -> tuple[Tensor, Any]:
    return linear_attention(query, key, value, "linear", scale=1.0, log_decay=_fade(trend), **how)


@predict.register
def _(trend: Mesa, query: Tensor, key: Tensor, value: Tensor, **how: Any) -> tuple[Tensor, Any]:
    found: tuple[Tensor, Any] = mesa_attention(query, key, value, ridge=trend.ridge, log_decay=_fade(trend), **how)
    return found


@predict.register
def _(trend: Delta, query: Tensor, key: Tensor, value: Tensor, **how: Any) -> tuple[Tensor, Any]:
    return delta_rule(query, key, value, unit_steps(key, trend.beta), **how)


@predict.register
def _(trend: GatedDelta, query: Tensor, key: Tensor, value: Tensor, **how: Any) -> tuple[Tensor, Any]:
    return delta_rule(query, key, value, unit_steps(key, trend.beta), log_decay=_fade(trend), **how)


def unit_steps(key: Tensor, beta: float) -> Tensor:
    """beta / |k|^2 for every key, 0 for keys of zero: [B, Hkv, Tk]."""
    square = key.to(torch.promote_types(key.dtype, torch.float32)).square().sum(-1)
    return torch.where(square == 0, 0, beta / torch.where(square == 0, 1, square))


def predict_from(
    trend: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    offset: int,
    attn_mask: Tensor | None = None,
    is_causal: bool = True,
    exclude_self: bool = False,
    segment_ids: Tensor | None = None,
) -> Tensor:
    """W_i q_i where query i stands at key position i + offset: the keys before are read into a state first.

    Args:
        offset: may be negative (queries that see nothing yet give 0) or beyond the keys.
        attn_mask: boolean [B, Tk], or None.
        segment_ids: integers [B or 1, Tk], with offset 0 and Tq = Tk alone, or None.

    Cost: that of the trend for max(Tq, Tk) tokens.
    """
    rows, keys = query.shape[2], key.shape[2]
    if segment_ids is not None:
        order: dict[str, Any] = {"is_causal": is_causal, "exclude_self": exclude_self, "segment_ids": segment_ids}
        return predict(trend, query, key, value, attn_mask=attn_mask, **order)[0]
    if not (is_causal or exclude_self):
        return predict(trend, query, key, value, attn_mask=attn_mask, is_causal=False)[0]
    lead = min(max(-offset, 0), rows)
    before = min(max(offset, 0), keys)
    pairs = min(rows - lead, keys - before)
    mask = lambda a, b: None if attn_mask is None else attn_mask[:, a:b]  # noqa: E731
    state, found = None, [query.new_zeros(*query.shape[:2], lead, value.shape[3])]
    if before:
        state = predict(
            trend, query[:, :, :0], key[:, :, :before], value[:, :, :before],
            attn_mask=mask(0, before), is_causal=False,
        )[1]  # fmt: skip
    last = before + pairs
    out, state = predict(
        trend, query[:, :, lead : lead + pairs], key[:, :, before:last], value[:, :, before:last], state=state,
        attn_mask=mask(before, last), exclude_self=exclude_self,
    )  # fmt: skip
    found.append(out)
    if lead + pairs < rows:  # later than every key
        nothing = (key[:, :, :0], value[:, :, :0])
        found.append(predict(trend, query[:, :, lead + pairs :], *nothing, state=state, is_causal=False)[0])
    return torch.cat(found, 2)
