"""`regard.attention`: checks, features and the choice of an implementation."""

from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any, TypeAlias

import torch
from torch import Tensor

from .. import checks
from ..checks import ArgumentError, refuse, shape
from ..grammar import Spec, as_spec
from ..grammar.spec import LOCAL_LINEAR
from ..grammar.systems import LARGEST
from ..precision import all_clean, clean, clean_each, either, full_precision, overflowing, row_number, transformed
from .dispatch import Explanation, Inputs, Problem, choose, explain_problem
from .layout import Layout, any_layout, repeat_heads
from .visibility import Visibility, runs_of

CALL = "attention"
FAR = 2**48
"""Positions are cut here, which leaves room for their sums in int64."""
Sizes: TypeAlias = "tuple[int, int, int, int, int, int, int]"
"""B, H, Hkv, Tq, Tk, D and Dv of a call."""


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
    checks.flags(CALL, is_causal=is_causal, exclude_self=exclude_self)
    checks.flags(CALL, enable_gqa=enable_gqa, return_diagnostics=return_diagnostics)
    sizes, device = _check_tensors(query, key, value, enable_gqa), query.device
    batch, heads, _, queries, keys, dim, _ = sizes
    rows = (batch, heads, queries)
    offset = _check_offset(query_offset, batch, keys - queries, device)
    visible = Visibility(
        queries=queries,
        keys=keys,
        causal=is_causal or exclude_self,
        strict=exclude_self,
        window=window if window is None else _check_window(CALL, window),
        offset=offset,
        mask=_check_mask(attn_mask, (*rows, keys), device),
        runs=_check_segments(segment_ids, offset, batch, queries, keys, device),
    )
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    named = {} if params is None else checks.mapping(CALL, "params", params)
    given = {n: _number(n, p, (*rows, dim), dtype, device) for n, p in named.items()}
    if scale is not None:
        checks.in_range(CALL, "scale", scale, low=0.0, strict=True)
        scale = row_number(CALL, "scale", scale, rows, dtype, device)
    scale, numbers = spec.resolve(dim, scale, given)
    local = {n: given[n] for n in LOCAL_LINEAR if n in given}
    problem = _problem(spec, sizes, (query, key, value), visible, scale, {**numbers, **local}, return_diagnostics)
    implementation = choose(problem, impl)
    with full_precision(device.type):
        inputs, non_finite = _prepare(query, key, value, problem, visible, scale, numbers, implementation)
        bad = _clean_numbers(inputs, local)
        if bad is not None:
            ones = bad.new_ones(batch, heads, keys)
            non_finite = either(non_finite, bad & visible.any_seen(ones))
        out, diagnostics = implementation.run(inputs)
        out = out if non_finite is None else torch.where(non_finite[..., None], torch.nan, out)
        out = out if out.dtype == query.dtype else out.to(query.dtype)
    return (out, diagnostics) if return_diagnostics else out


def diagnosed_attention(query: Tensor, key: Tensor, value: Tensor, spec: Spec | str, **arguments: Any) -> Any:
    """Return (output, Diagnostics) of `attention`; the weights of the reference implementation carry gradients."""
    return attention.__wrapped__(query, key, value, spec, return_diagnostics=True, **arguments)  # type: ignore[attr-defined]


def _never(problem: Problem) -> bool:
    return False


def _problem(
    spec: Spec,
    sizes: Sizes,
    tensors: tuple[Tensor, ...],
    visible: Visibility,
    scale: float | Tensor,
    numbers: dict[str, float | Tensor],
    diagnostics: bool,
) -> Problem:
    mask, offset = visible.mask, visible.offset
    return Problem(
        spec,
        *sizes,
        dtype=tensors[0].dtype,
        device=tensors[0].device.type,
        causal=visible.causal,
        strict=visible.strict,
        window=visible.window,
        offset=None if isinstance(offset, Tensor) else offset,
        mask=None if mask is None else ("keys" if mask.shape[-2] == 1 else "pairs"),
        params=tuple([n for n, p in numbers.items() if isinstance(p, Tensor)]) if numbers else (),
        numbers=tuple([(n, p) for n, p in numbers.items() if not isinstance(p, Tensor)]) if numbers else (),
        scale="tensor" if isinstance(scale, Tensor) else "number",
        gradient=torch.is_grad_enabled()
        and any(x.requires_grad for x in (*tensors, scale, *numbers.values()) if isinstance(x, Tensor)),
        diagnostics=diagnostics,
        transformed=transformed(),
        segments=visible.runs is not None,
    )


def _prepare(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    problem: Problem,
    visible: Visibility,
    scale: float | Tensor,
    numbers: dict[str, float | Tensor],
    implementation: Any,
) -> tuple[Inputs, Tensor | None]:
    """Return the inputs of the implementation, and which rows [B, H, Tq] see a non-finite number (None for none), which
    the caller turns into NaN. Non-finite vectors become 0, so that a zero weight never multiplies a NaN, forward or
    backward. A `raw` implementation does both itself."""
    native = getattr(implementation, "native", _never)(problem)
    raw = native and getattr(implementation, "raw", _never)(problem)
    look: Any = getattr(implementation, "clean", clean_each)
    spec, shared = problem.spec, key is query
    if checks.debugging():
        for name, tensor in (("query", query), ("key", key), ("value", value)):
            checks.finite(CALL, name, tensor)
    if not native and query.dtype not in (torch.float32, torch.float64):
        query, key, value = query.float(), key.float(), value.float()
    given = (query, value) if shared else (query, key, value)
    if raw:
        looked: Any = [(x, None) for x in given]
    elif look is clean_each and all_clean(*given):
        looked = [(x.contiguous(), None) for x in given]  # the layout of `clean_each`
    else:
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
    see = _seen_rows if raw else getattr(implementation, "seen_rows", _seen_rows)
    sound = raw and over is None  # or left to the implementation
    non_finite = None if sound else see(visible, query.shape[1], query_bad, key_bad, value_bad)
    factor: float | Tensor = 1.0
    if native:
        factor = scale
    elif isinstance(scale, Tensor):
        q = q * scale[..., None]
    elif shared and getattr(spec.similarity, "symmetric", False):
        # the queries are the keys: keep one tensor for the backward pass
        q = k = k if scale == 1.0 else k * scale**0.5
    elif not spec.takes_scale and isinstance(scale, float) and scale == 1.0:
        pass  # multiplying by one would keep another copy of the queries for the backward pass
    else:
        q = q * scale
    x, y = (query, key) if spec.degree else (None, None)
    return Inputs(q, k, value, x, y, visible, problem, scale, numbers, factor=factor, raw=raw), non_finite


def _number(
    name: str, value: float | Tensor, rows: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device
) -> float | Tensor:
    """Check a parameter; return a number or a tensor [B, H, Tq], [B, H, Tq, 1 or D] for a local linear model."""
    label = f"params[{name!r}]"
    if name not in LOCAL_LINEAR or not isinstance(value, Tensor):
        return row_number(CALL, label, value, rows[:3], dtype, device)
    if value.dim() < 4:
        return row_number(CALL, label, value, rows[:3], dtype, device)[..., None]  # type: ignore[index]
    checks.floating(CALL, label, value)
    checks.broadcastable(CALL, label, value, rows)
    checks.on_device(CALL, label, value, device)
    return value.to(dtype).expand(*rows[:3], value.shape[3])


def _clean_numbers(inputs: Inputs, local: Mapping[str, float | Tensor]) -> Tensor | None:
    """Set the ridge and the probe of a local linear model. Replace unusable numbers (NaN, or infinite but for
    a ridge) by 1, as products over rows would spread them. Return which rows [B, H, Tq] have one, or None."""
    if not inputs.params and not inputs.spec.degree:
        return None
    found, most = None, torch.finfo(inputs.q.dtype).max
    for name, x in inputs.params.items():
        inputs.params[name], bad = _usable(x, most)
        found = either(found, bad)
    if not inputs.spec.degree:
        return found
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
    return either(found, None if bad is None else bad.any(-1))


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


def _check_tensors(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> Sizes:
    dtype = device = None
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        checks.floating(CALL, name, tensor)
        if tensor.ndim != 4:
            raise ArgumentError(
                f"{CALL}: {name} has shape {shape(tensor)}, expected [batch, heads, length, dim]; add the "
                f"missing axes with unsqueeze."
            )
        dtype, device = dtype or tensor.dtype, device or tensor.device
        if tensor.dtype != dtype or tensor.device != device:
            raise ArgumentError(
                f"{CALL}: {name} is {tensor.dtype} on {tensor.device}, but query is {dtype} on {device}; convert one "
                f"with .to()."
            )
    return _sizes(CALL, query.shape, key.shape, value.shape, enable_gqa)


def _sizes(call: str, query: Sequence[int], key: Sequence[int], value: Sequence[int], enable_gqa: bool) -> Sizes:
    """Return the sizes of a call after checking that these shapes fit together."""
    (batch, heads, queries, dim), (key_batch, kv_heads, keys, key_dim) = query, key
    value_batch, value_heads, values, value_dim = value
    wrong = None
    if not batch == key_batch == value_batch:
        wrong = "batch sizes differ"
    elif dim != key_dim:
        wrong = "query and key differ in their last axis"
    elif dim == 0:
        wrong = "query and key have no features"
    elif value_dim == 0:
        wrong = "value has no features"
    elif kv_heads != value_heads or keys != values:
        wrong = "key and value differ in heads or length"
    elif heads != kv_heads and not enable_gqa:
        wrong = "query and key differ in heads; pass enable_gqa=True to let a key head serve several query heads"
    elif heads != kv_heads and (kv_heads == 0 or heads % kv_heads):
        wrong = f"{heads} query heads cannot be shared out among {kv_heads} key heads; the former must be a multiple"
    if wrong is not None:
        raise ArgumentError(f"{call}: {wrong}: query {list(query)}, key {list(key)}, value {list(value)}.")
    return batch, heads, kv_heads, queries, keys, dim, value_dim


def _check_window(call: str, window: int | None) -> int | None:
    window = checks.optional_whole(call, "window", window, 1)
    return window if window is None else min(window, FAR)


def _check_offset(offset: int | Tensor | None, batch: int, default: int, device: torch.device) -> int | Tensor:
    if offset is None:
        return default
    if isinstance(offset, Tensor):
        if not checks.is_integer(offset) or offset.shape != (batch,) or offset.is_meta != (device.type == "meta"):
            raise ArgumentError(
                f"{CALL}: query_offset is {offset.dtype} {shape(offset)}, expected integers [{batch}], one a sequence."
            )
        return offset.to(device=device, dtype=torch.int64)
    return max(-FAR, min(checks.whole(CALL, "query_offset", offset, why=" or integers [B]"), FAR))


def _check_segments(
    ids: Tensor | None, first: int | Tensor, batch: int, queries: int, keys: int, device: torch.device
) -> Tensor | None:
    if ids is None:
        return None
    checks.segments(CALL, ids, batch, keys, device)
    if isinstance(first, Tensor) or first < 0 or first + queries > keys:
        raise ArgumentError(
            f"{CALL}: with segment_ids the position of every query must be that of one of the {keys} keys, whose "
            f"segment it shares; query_offset={'a tensor' if isinstance(first, Tensor) else first} gives {queries} "
            f"queries other positions."
        )
    return runs_of(ids)


def _check_mask(mask: Tensor | None, target: tuple[int, ...], device: torch.device) -> Tensor | None:
    if mask is None:
        return None
    checks.boolean_mask(CALL, "attn_mask", mask)
    checks.on_device(CALL, "attn_mask", mask, device)
    checks.broadcastable(CALL, "attn_mask", mask, target)
    mask = mask.reshape((1,) * (4 - mask.dim()) + tuple(mask.shape))
    return mask.expand(*mask.shape[:3], target[3])


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
    """Return which implementation `regard.attention(..., impl="auto")` would run, and why not the others.

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
        as_spec(spec, call), *_sizes(call, query_shape, key_shape, values, True), dtype, _device_type(call, device),
        causal=is_causal or exclude_self, strict=exclude_self, window=_check_window(call, window),
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
