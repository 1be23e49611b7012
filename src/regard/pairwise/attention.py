"""`regard.attention`: checks, features and the choice of an implementation."""

from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from .. import checks
from ..checks import ArgumentError, refuse
from ..grammar import Spec, as_spec
from ..grammar.systems import LARGEST
from ..precision import clean, clean_each, clearly_clean, either, full_precision, overflowing
from .dispatch import Explanation, Inputs, Problem, explain_problem
from .layout import Layout, any_layout, repeat_heads
from .plan import CALL, FAR, Plan, check_sizes, check_window, plan_of
from .visibility import Visibility


def _diagnostics_without_gradients(function: Callable[..., Any]) -> Callable[..., Any]:
    """Detach the diagnostics that `function` returns: their weights would keep the graph in memory."""

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        return (result[0], result[1].detached()) if isinstance(result, tuple) else result

    return call


@_diagnostics_without_gradients
@any_layout
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    spec: Spec | str = "softmax",
    *,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    exclude_self: bool = False,
    window: int | None = None,
    query_offset: int | Tensor | None = None,
    segment_ids: Tensor | None = None,
    scale: float | Tensor | None = None,
    params: Mapping[str, float | Tensor] | None = None,
    enable_gqa: bool = False,
    layout: Layout = "bhtd",
    impl: str = "auto",
    return_diagnostics: bool = False,
) -> Any:
    """Compute attention with the kernel, thresholding rule, similarity and local model that `spec` names.

    Args:
        query: [B, H, Tq, D].
        key: [B, Hkv, Tk, D]; Hkv = H, or a divisor of H with `enable_gqa`.
        value: [B, Hkv, Tk, Dv].
        spec: an attention spec or its text: kernel, bandwidth, local model, similarity.
        attn_mask: boolean, broadcastable to [B, H, Tq, Tk]; True where a key may be attended.
        is_causal: query i sees keys j <= i + query_offset.
        exclude_self: query i sees keys j < i + query_offset; implies `is_causal`.
        window: with causal order, only the last `window` visible positions; otherwise |i + query_offset - j| < window.
        query_offset: the key position of query 0: an int, or integers [B]; Tk - Tq (end-aligned) by default.
        segment_ids: integers [B or 1, Tk] of packed sequences. A query sees only the run of equal ids at its own
            position, and only those pairs are computed. The position of every query must be that of a key.
        scale: factor of the scores, z = scale * similarity: a number or a tensor broadcastable to [B, H, Tq].
            Default: 1/sqrt(D) for the dot product and the Euclidean similarity, 1 for the cosine. Kernels without a
            scale raise an error if one is given.
        params: parameters of the spec (`spec.params`), as numbers or tensors broadcastable to [B, H, Tq]. The `ridge`
            of a local linear model may also be [B, H, Tq, D], one value per coordinate; the `probe` of
            `solver=learned` must be [B, H, Tq, D].
        enable_gqa: let each key head serve H / Hkv query heads (grouped-query attention).
        layout: "bthd" for tensors with tokens before heads, [B, T, H, D], as in flash-attention: query, key, value,
            output, and tensors of three or four axes in `scale` and `params`. Masks and diagnostics stay as they are.
        impl: "auto", or the name of an implementation (`regard.explain` lists them).
        return_diagnostics: also return a `Diagnostics`.

    Returns:
        The output [B, H, Tq, Dv] in the dtype of `query`, or (output, Diagnostics). Rows without a visible key
        are 0, with gradient 0. A row that sees a non-finite or too large query, key or value, or has a parameter that
        is NaN or infinite, is NaN and its gradient is 0. What a row cannot see never changes it, even NaN. Too large
        means: an entry beyond 2^56 (2^500 in float64), or beyond 2^28 (2^250) for similarities that square it (relu2,
        euclidean); or a query whose absolute entries times the scale sum to more than 2^70 (2^522). An output or
        gradient beyond the range of its dtype (65504 in float16) is infinite, as elsewhere in torch.

    Raises:
        ArgumentError: shapes, dtypes or names that do not fit.

    Precision: float32 (float64 for float64 inputs) for features, scores, thresholds and sums. Cost: depends on the
    implementation, see `regard.explain`.
    """
    spec = as_spec(spec, CALL)
    options = (is_causal, exclude_self, window, query_offset, scale, enable_gqa, return_diagnostics)
    plan = plan_of(spec, (query, key, value), options, (attn_mask, segment_ids, params), impl)
    problem, visible = plan.problem, Visibility(*plan.visibility)
    with full_precision(problem.device):
        inputs, non_finite = _prepare(query, key, value, plan, visible)
        bad = _clean_numbers(inputs, plan.local)
        if bad is not None:
            ones = bad.new_ones(problem.batch, problem.heads, problem.keys)
            non_finite = either(non_finite, bad & visible.any_seen(ones))
        out, diagnostics = plan.implementation.run(inputs)
        out = out if non_finite is None else torch.where(non_finite[..., None], torch.nan, out)
        out = out if out.dtype == query.dtype else out.to(query.dtype)
    return (out, diagnostics) if return_diagnostics else out


def diagnosed_attention(query: Tensor, key: Tensor, value: Tensor, spec: Spec | str, **arguments: Any) -> Any:
    """Return (output, Diagnostics) of `attention`; the weights of the reference implementation carry gradients."""
    return attention.__wrapped__(query, key, value, spec, return_diagnostics=True, **arguments)  # type: ignore[attr-defined]


def _prepare(
    query: Tensor, key: Tensor, value: Tensor, plan: Plan, visible: Visibility
) -> tuple[Inputs, Tensor | None]:
    """Return the inputs of the implementation, and which rows [B, H, Tq] see a non-finite number (None for none), which
    the caller turns into NaN. Non-finite vectors become 0, so that a zero weight never multiplies a NaN, forward or
    backward. A `raw` implementation does both itself."""
    problem, implementation, scale, native, raw = plan.problem, plan.implementation, plan.scale, plan.native, plan.raw
    clean_inputs = plan.as_given and clearly_clean(query) and clearly_clean(key) and clearly_clean(value)
    if clean_inputs and not checks.debugging():
        return Inputs(query, key, value, None, None, visible, problem, scale, dict(plan.numbers), factor=scale), None
    look: Any = getattr(implementation, "clean", clean_each)
    spec, shared = problem.spec, key is query
    if checks.debugging():
        for name, tensor in (("query", query), ("key", key), ("value", value)):
            checks.finite(CALL, name, tensor)
    if not native and query.dtype not in (torch.float32, torch.float64):
        query, key, value = query.float(), key.float(), value.float()
    given = (query, value) if shared else (query, key, value)
    query_bad = key_bad = value_bad = None
    if not raw:
        looked = look(*given)
        (query, query_bad), (key, key_bad), (value, value_bad) = looked[0], looked[-2], looked[-1]
    q, k = (query, key) if native else spec.similarity.features(query, key)
    if not native and getattr(spec.similarity, "grows", True):
        (q, q_bad), (k, k_bad) = clean(q), clean(k)
        query_bad, key_bad = either(query_bad, q_bad), either(key_bad, k_bad)
    over = overflowing(q, scale)
    if over is not None:
        shared, query_bad, q = False, either(query_bad, over), torch.where(over[..., None], 0, q)
        scale = torch.where(over, 1, scale) if isinstance(scale, Tensor) else scale  # zero times NaN is NaN
    non_finite = None
    if query_bad is not None or key_bad is not None or value_bad is not None:
        see = _seen_rows if raw else getattr(implementation, "seen_rows", _seen_rows)
        non_finite = see(visible, query.shape[1], query_bad, key_bad, value_bad)
    factor: float | Tensor = 1.0
    if native:
        factor = scale
    elif isinstance(scale, Tensor):
        q = q * scale[..., None]
    elif shared and getattr(spec.similarity, "symmetric", False):
        # the queries are the keys: keep one tensor for the backward pass
        q = k = k if scale == 1.0 else k * scale**0.5
    elif spec.takes_scale or not isinstance(scale, float) or scale != 1.0:
        q = q * scale  # not by one, which would keep another copy of the queries for the backward pass
    x, y = (query, key) if spec.degree else (None, None)
    return Inputs(q, k, value, x, y, visible, problem, scale, dict(plan.numbers), factor=factor, raw=raw), non_finite


def _clean_numbers(inputs: Inputs, local: Mapping[str, float | Tensor]) -> Tensor | None:
    """Set the ridge and the probe of a local linear model. Replace unusable numbers (NaN, or infinite but for
    a ridge) by 1, as products over rows would spread them. Return which rows [B, H, Tq] have one, or None."""
    if not inputs.params and not inputs.spec.degree:
        return None
    bad_rows, most = None, torch.finfo(inputs.q.dtype).max
    for name, x in inputs.params.items():
        inputs.params[name], bad = _usable(x, most)
        bad_rows = either(bad_rows, bad)
    if not inputs.spec.degree:
        return bad_rows
    ridge, probe = local.get("ridge", inputs.spec.ridge), local.get("probe")
    fits = isinstance(probe, Tensor) and probe.shape[-1] == inputs.x.shape[-1]
    if inputs.spec.solver.name == "learned" and not fits:
        raise ArgumentError(
            f"{CALL}: the solver learned takes t from the caller; give params={{'probe': r}}, r a tensor that "
            f"broadcasts to [B, H, Tq, D] with D = {inputs.x.shape[-1]}."
        )
    ridge, ridge_bad = _usable(ridge, torch.inf)
    probe, probe_bad = _usable(probe, most)
    inputs.ridge = ridge.clamp(max=LARGEST) if isinstance(ridge, Tensor) else min(ridge, LARGEST)
    inputs.probe = probe if isinstance(probe, Tensor) else None
    bad = either(ridge_bad, probe_bad)
    return either(bad_rows, None if bad is None else bad.any(-1))


def _usable(x: Any, most: float) -> tuple[Any, Tensor | None]:
    """Replace NaN, -inf and what is above `most` in a tensor by 1; return it and where these were."""
    if not isinstance(x, Tensor):
        return x, None
    bad = ~((x > -torch.inf) & (x <= most))
    return torch.where(bad, 1, x), bad


def _seen_rows(
    visible: Visibility, heads: int, query_bad: Tensor | None, key_bad: Tensor | None, value_bad: Tensor | None
) -> Tensor | None:
    """Return the rows [B, H, Tq] that see a non-finite pair, or see any pair and have a non-finite query."""
    seen, bad = None, either(key_bad, value_bad)
    if bad is not None:
        seen = visible.any_seen(repeat_heads(bad, heads))
    if query_bad is not None:
        ones = query_bad.new_ones(*query_bad.shape[:2], visible.keys)
        seen = either(seen, query_bad & visible.any_seen(ones))
    return seen


def explain(
    spec: Spec | str,
    query_shape: Sequence[int],
    key_shape: Sequence[int] | None = None,
    value_dim: int | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    is_causal: bool = False,
    exclude_self: bool = False,
    window: int | None = None,
    query_offset: int | None = None,
    mask: str | None = None,
    segments: bool = False,
    return_diagnostics: bool = False,
) -> Explanation:
    """Return which implementation `regard.attention(..., impl="auto")` would run, and why none of the others.

    Args:
        spec: an attention spec or its text.
        query_shape: (B, H, Tq, D).
        key_shape: (B, Hkv, Tk, D); that of the query by default.
        value_dim: Dv; D by default.
        segments: whether `segment_ids` are given.
        mask: None, "keys" (one mask over keys for all queries) or "pairs" (Tq x Tk).
        dtype, device and the rest: as in `attention`.

    Returns:
        An `Explanation`: `print` it.

    Raises:
        ArgumentError: a shape that is not four whole numbers, or an unknown kind of mask.
    """
    key_shape = query_shape if key_shape is None else key_shape
    call = "explain"
    for name, axes in (("query_shape", query_shape), ("key_shape", key_shape)):
        known = isinstance(axes, Sequence) and all(type(n) is int and 0 <= n <= FAR for n in axes)
        if not known or len(axes) != 4:
            raise refuse(call, name, axes, "four whole numbers (B, H, T, D)")
    if not isinstance(mask, (str, type(None))) or mask not in (None, "keys", "pairs"):
        raise refuse(call, "mask", mask, "None, 'keys' or 'pairs'")
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point or dtype.itemsize == 1:
        raise refuse(call, "dtype", dtype, "a floating-point torch.dtype")
    checks.flags(call, is_causal=is_causal, exclude_self=exclude_self, segments=segments)
    checks.flags(call, return_diagnostics=return_diagnostics)
    checks.optional_whole(call, "value_dim", value_dim, 1, FAR)
    checks.optional_whole(call, "query_offset", query_offset)
    values = (*key_shape[:3], value_dim or query_shape[3])
    problem = Problem(
        as_spec(spec, call), *check_sizes(call, query_shape, key_shape, values, True, "_shape"), dtype,
        _device_type(call, device),
        causal=is_causal or exclude_self, strict=exclude_self, window=check_window(call, window),
        offset=key_shape[2] - query_shape[2] if query_offset is None else query_offset, mask=mask,
        diagnostics=return_diagnostics, segments=segments,
    )  # fmt: skip
    return explain_problem(problem)


def _device_type(call: str, device: Any) -> str:
    """Return the type of a device, such as "cuda", which this machine need not have."""
    try:
        return torch.device(checks.instance(call, "device", device, (str, torch.device), "a device or its name")).type
    except RuntimeError:
        raise refuse(call, "device", device, "a device or its name, such as 'cuda'") from None
