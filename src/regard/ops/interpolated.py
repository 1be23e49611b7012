"""Attention to the residuals of a global linear model (local-linear-attention paper, equation 9):

    o_i = sum_j s_ij (v_j - W_i k_j) + W_i q_i = obar_i + W_i (q_i - kbar_i)

obar and kbar come from one attention over the values and keys side by side; W_i, the model of the pairs that query i
sees, is read at q_i - kbar_i, which costs no more than reading it at q_i. Softmax with W = 0 is attention; softmax with
the best W near the query is local linear attention; in between, W may be any state of fixed size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ..checks import ArgumentError
from ..estimators.arguments import order
from ..estimators.trends import predict_from
from ..grammar import Spec, as_spec
from ..grammar.spec import _instance, _Reader
from ..grammar.trends import trends
from .attention import attention

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
    scale: float | Tensor | None = None,
    params: Mapping[str, float | Tensor] | None = None,
    enable_gqa: bool = False,
    impl: str = "auto",
) -> Tensor:
    """A global linear model at every query, and the weighted mean of what it leaves unexplained (equation 9).

    Args:
        query: [B, H, Tq, D].
        key: [B, Hkv, Tk, D].
        value: [B, Hkv, Tk, Dv].
        trend: the global linear model W_i: a name, text or object of `regard.grammar.trends` ("linear-attention",
            "mesa", "mesa(ridge=0.5)", "delta", "gated-delta"), or, for learned numbers, a function of (query, key,
            value, attn_mask=, is_causal=, exclude_self=) that gives W_i q_i for any queries, as
            lambda q, k, v, **how: regard.mesa_attention(q, k, v, ridge=ridge, **how)[0].
        spec: the weights s: a sentence whose weights sum to one, or its text.
        attn_mask: boolean over the keys, broadcastable to [B, 1, 1, Tk]; True where a key may be attended.
        is_causal, exclude_self: as in `regard.attention`; the model sees what the weights see.
        query_offset: the key position of query 0, a whole number; Tk - Tq (end-aligned) by default. A function as
            trend needs 0.
        scale, params, enable_gqa, impl: as in `regard.attention`.

    Returns:
        The output [B, H, Tq, Dv] in the dtype of `query`. Rows without a visible key are 0.

    Raises:
        ArgumentError: as `regard.attention` and the trend; a spec whose weights do not sum to one, or of degree 1.

    Precision: float32 (float64 for float64 inputs) throughout; the output is rounded once. Cost: one attention with
    values of Dv + D channels, and the trend, for all keys.
    """
    spec = as_spec(spec)
    require_averages(spec)
    causal = order(CALL, is_causal, exclude_self)
    if isinstance(query_offset, bool) or not isinstance(query_offset, (int, type(None))):
        raise ArgumentError(f"{CALL}: query_offset is {query_offset!r}, expected one whole number for all sequences.")
    offset = key.shape[2] - query.shape[2] if query_offset is None else query_offset
    dtype = torch.promote_types(query.dtype, torch.float32)
    q, k, v = (x.to(dtype) for x in (query, key, value))
    mask = _key_mask(attn_mask, key)
    both = attention(
        q, k, torch.cat([v, k], -1), spec,
        attn_mask=None if mask is None else mask[:, None, None], is_causal=causal, exclude_self=exclude_self,
        query_offset=offset, scale=scale, params=params, enable_gqa=enable_gqa, impl=impl,
    )  # fmt: skip
    mean, centre = both.split([value.shape[3], key.shape[3]], -1)
    how: dict[str, Any] = {"attn_mask": mask, "is_causal": causal, "exclude_self": exclude_self}
    if isinstance(trend, Callable) and not hasattr(trend, "name"):  # type: ignore[arg-type]
        if offset != 0:
            raise ArgumentError(f"{CALL}: a function as trend needs query_offset 0, as many queries as keys.")
        slope = trend(q - centre, k, v, **how)
    else:
        slope = predict_from(as_trend(trend), q - centre, k, v, offset=offset, **how)
    return (mean + slope).to(query.dtype)


def as_trend(trend: Any) -> Any:
    """A trend as it is, or made of its name or text, such as mesa(ridge=0.5).

    Raises:
        ArgumentError: an unknown name or argument, or a number out of range.
    """
    if not isinstance(trend, str):
        return _instance(trends, trend)
    _remember(trend)
    return _READ[trend]


_READ: dict[str, Any] = {}


def _remember(text: str) -> bool:
    if text not in _READ:
        if len(_READ) >= 1024:  # a number that changes at every call must not fill the memory
            _READ.clear()
        name, arguments = _Reader(text).term()
        _READ[text] = _instance(trends, name, **arguments)
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
            f"{CALL}: {spec} {why}, so that it has no residuals to average; use a normalised sentence of degree 0, "
            f"such as softmax or biweight."
        )


def _key_mask(mask: Tensor | None, key: Tensor) -> Tensor | None:
    """The mask as [B, Tk].

    Raises:
        ArgumentError: it differs from query to query, or does not fit.
    """
    if mask is None:
        return None
    batch, keys = key.shape[0], key.shape[2]
    if not isinstance(mask, Tensor) or mask.dim() not in (1, 2, 4) or (mask.dim() == 4 and mask.shape[1:3] != (1, 1)):
        raise ArgumentError(
            f"{CALL}: attn_mask must be the same for all queries and heads, for one state is made of the keys: give "
            f"[B, Tk] or [B, 1, 1, Tk]."
        )
    mask = mask[:, 0, 0] if mask.dim() == 4 else mask
    if mask.shape[-1] not in (1, keys) or (mask.dim() == 2 and mask.shape[0] not in (1, batch)):
        raise ArgumentError(f"{CALL}: attn_mask has shape {list(mask.shape)}, which is not [{batch}, {keys}].")
    return mask.expand(batch, keys)
