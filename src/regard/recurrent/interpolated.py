"""Attention to the residuals of a global linear model (local-linear-attention paper, equation 9):

    o_i = sum_j s_ij (v_j - W_i k_j) + W_i q_i = obar_i + W_i (q_i - kbar_i)

obar and kbar are one attention over concatenated values and keys. W_i, the model of the keys that query i sees, is read
at q_i - kbar_i. Softmax with W = 0 is attention, and with the best W near the query local linear attention.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..checks import ArgumentError, flags, optional_whole, shape, shown, within
from ..grammar import Spec, as_spec
from ..pairwise.attention import attention
from ..pairwise.layout import Layout, any_layout
from ..pairwise.plan import check_tensors
from ..precision import clean, full_precision
from .arguments import key_mask, order
from .trends import as_trend, predict_from

CALL = "interpolated_attention"


@any_layout
def interpolated_attention(
    query: Tensor, key: Tensor, value: Tensor, trend: Any = "mesa", spec: Spec | str = "softmax", *,
    attn_mask: Tensor | None = None, is_causal: bool = True, exclude_self: bool = False,
    query_offset: int | None = None, segment_ids: Tensor | None = None, scale: float | Tensor | None = None,
    params: Mapping[str, float | Tensor] | None = None, enable_gqa: bool = False, layout: Layout = "bhtd",
) -> Tensor:  # fmt: skip
    """Return the prediction of a global linear model plus the weighted mean of its residuals.

    Args:
        query, key, value: [B, H, Tq, D], [B, Hkv, Tk, D] and [B, Hkv, Tk, Dv].
        trend: the global linear model W_i: a name, text or object of `regard.recurrent.trends` ("linear-attention",
            "mesa", "mesa(ridge=0.5)", "delta", "gated-delta"), or, for learned numbers, a function of (query, key,
            value, attn_mask=, is_causal=, exclude_self=, and segment_ids= if given) that returns W_i q_i, such as
            lambda q, k, v, **how: regard.mesa_attention(q, k, v, ridge=ridge, **how)[0].
        spec: a spec whose weights s sum to one, or its text.
        attn_mask: boolean over the keys, broadcastable to [B, 1, 1, Tk]; True where a key may be attended.
        is_causal, exclude_self, scale, params, enable_gqa, layout: as in `regard.attention`, the first two for weights
            and model. A function as trend always gets tensors with heads before tokens.
        query_offset: as in `regard.attention`, but a whole number; a function as trend needs 0.
        segment_ids: as in `regard.linear_attention`.

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
    flags(CALL, enable_gqa=enable_gqa)
    within(CALL, None, check_tensors, query, key, value, enable_gqa)
    mask = key_mask(CALL, attn_mask, key)
    given: dict[str, Any] = {"attn_mask": mask, "is_causal": causal, "exclude_self": exclude_self}
    if segment_ids is not None:
        given["segment_ids"] = segment_ids
    how = {**given, "attn_mask": None if mask is None else mask[:, None, None], "query_offset": query_offset}
    how |= {"scale": scale, "params": params, "enable_gqa": enable_gqa}
    predict = _predictor(trend, query.shape[2], key.shape[2], query_offset, segment_ids)
    q, k, v = (x.to(torch.promote_types(query.dtype, torch.float32)) for x in (query, key, value))
    both = within(CALL, None, attention, q, k, torch.cat([v, k], -1), weights, **how)
    mean, centre = both.split([value.shape[3], key.shape[3]], -1)

    with full_precision(query.device.type):
        # rows that see a non-finite number are NaN in `mean`; the model must not spread it to other rows
        slope = within(CALL, None, predict, *(clean(x)[0] for x in (q - centre, k, v)), **given)
    if not isinstance(slope, Tensor) or slope.shape != mean.shape:
        raise ArgumentError(f"{CALL}: trend gave {shown(slope)}, expected W_i q_i, a tensor {shape(mean)}.")
    return (mean + slope).to(query.dtype)


def _predictor(
    trend: Any, queries: int, keys: int, query_offset: int | None, segment_ids: Tensor | None
) -> Callable[..., Any]:
    """Return the function of (query, key, value, **how) that predicts with `trend`."""
    predict = trend
    if not callable(trend) or hasattr(trend, "name"):
        offset = keys - queries if query_offset is None else query_offset
        predict = partial(predict_from, within(CALL, "trend", as_trend, trend), offset=offset)
    elif query_offset not in (None, 0) or keys != queries:
        raise ArgumentError(f"{CALL}: a function as trend needs query_offset 0, as many queries as keys.")
    if segment_ids is not None and keys != queries:
        counts = f"{queries} queries and {keys} keys"
        raise ArgumentError(f"{CALL}: takes segments only with a query at every key, but there are {counts}.")
    return predict


def require_averages(spec: Spec) -> None:
    """Raise ArgumentError unless the weights of `spec` are those of a mean."""
    if spec.degree or not spec.weighting.normalised:
        why = "has its own linear model" if spec.degree else "has weights that do not sum to one"
        hint = "use a normalised spec of degree 0, such as softmax or biweight"
        raise ArgumentError(f"{CALL}: the spec {spec} {why}, so there is no mean of residuals; {hint}.")
