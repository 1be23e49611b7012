"""What a call of `regard.attention` computes: its checked arguments without the contents of query, key and value.

For a decoded token checks and the choice of an implementation take longer than the arithmetic. Their result is kept for
later calls with the same arguments, such as those of the other layers of a model.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from .. import checks
from ..checks import ArgumentError, shape
from ..grammar import Spec
from ..grammar.spec import LOCAL_LINEAR
from ..precision import PLAIN, readable, row_number, scale_in_range, transformed
from . import dispatch
from .dispatch import Problem, choose
from .visibility import runs_of

CALL = "attention"
FAR = 2**48
"""Positions are cut here, which leaves room for their sums in int64."""
Sizes: TypeAlias = "tuple[int, int, int, int, int, int, int]"
"""B, H, Hkv, Tq, Tk, D and Dv of a call."""
Tensors: TypeAlias = "tuple[Tensor, Tensor, Tensor]"
"""Query, key and value."""
MOST = 1024
"""Plans that are kept."""
_SIMPLE, _PLAIN = {type(None), bool, int, float, str}, set(PLAIN)


class Plan(NamedTuple):
    """What a call computes.

    Attributes:
        scale: of the scores: a number or [B, H, Tq].
        numbers: parameters of the weighting; not to be changed.
        local: parameters of the local linear model.
        visibility: arguments of `Visibility`.
        native, raw: what the implementation takes (see `Inputs`).
        as_given: whether the implementation takes tensors as they are if `precision.clearly_clean` holds for each.
    """

    problem: Problem
    implementation: Any
    scale: float | Tensor
    numbers: Mapping[str, float | Tensor]
    local: Mapping[str, float | Tensor]
    visibility: tuple[Any, ...]
    native: bool
    raw: bool
    as_given: bool


def plan_of(spec: Spec, tensors: Tensors, options: tuple[Any, ...], others: tuple[Any, Any, Any], impl: str) -> Plan:
    """Return the plan of a call with options (is_causal, exclude_self, window, query_offset, scale, enable_gqa,
    return_diagnostics) and others (attn_mask, segment_ids, params). It is kept if there are no others and impl is
    "auto"."""
    attn_mask, segment_ids, params = others
    plain = impl == "auto" and attn_mask is None and segment_ids is None and params is None
    signature, plans = _signature(spec, tensors, options) if plain else None, dispatch.plans
    try:
        plan: Plan | None = None if signature is None else plans.get(signature)
    except TypeError:  # a kernel without a hash
        plan = signature = None
    if plan is None:
        plan = _plan(spec, tensors, options, others, impl)
        if signature is not None:
            if len(plans) >= MOST:
                plans.clear()
            plans[signature] = plan
    return plan


def _signature(spec: Spec, tensors: Tensors, options: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """Return all that `_plan` depends on as a key, or None for a call with further tensors, or one that is recorded or
    transformed. Types are part of it, since True equals 1."""
    types = tuple(map(type, options))
    if not (_SIMPLE.issuperset(types) and _PLAIN.issuperset(map(type, tensors))):
        return None
    if torch.compiler.is_compiling() or torch.jit.is_tracing() or transformed():
        return None
    query, key, value = tensors
    return (
        spec, types, options, query.shape, key.shape, value.shape, query.dtype, key.dtype, value.dtype, query.device,
        key.device, value.device,
        torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad),
    )  # fmt: skip


def _plan(spec: Spec, tensors: Tensors, options: tuple[Any, ...], others: tuple[Any, Any, Any], impl: str) -> Plan:
    """Check the arguments of a call and choose the implementation."""
    is_causal, exclude_self, window, query_offset, scale, enable_gqa, return_diagnostics = options
    attn_mask, segment_ids, params = others
    checks.flags(CALL, is_causal=is_causal, exclude_self=exclude_self)
    checks.flags(CALL, enable_gqa=enable_gqa, return_diagnostics=return_diagnostics)
    query, key, value = tensors
    sizes, device = check_tensors(query, key, value, enable_gqa), query.device
    batch, heads, _, queries, keys, dim, _ = sizes
    rows = (batch, heads, queries)
    offset = _check_offset(query_offset, batch, keys - queries, device)
    window = window if window is None else check_window(CALL, window)
    mask = _check_mask(attn_mask, (*rows, keys), device)
    runs = _check_segments(segment_ids, offset, batch, queries, keys, device)
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    named = {} if params is None else checks.mapping(CALL, "params", params)
    given = {n: _number(n, p, (*rows, dim), dtype, device) for n, p in named.items()}
    if scale is not None:
        checks.in_range(CALL, "scale", scale, low=0.0, strict=True)
        scale = row_number(CALL, "scale", scale, rows, dtype, device)
    scale, numbers = spec.resolve(dim, scale, given)
    local = {n: given[n] for n in LOCAL_LINEAR if n in given}
    every = {**numbers, **local}
    grown = [x for x in (*tensors, scale, *every.values()) if isinstance(x, Tensor)]
    problem = Problem(
        spec, *sizes, dtype=query.dtype, device=device.type,
        causal=is_causal or exclude_self, strict=exclude_self, window=window,
        offset=None if isinstance(offset, Tensor) else offset,
        mask=None if mask is None else ("keys" if mask.shape[-2] == 1 else "pairs"),
        params=tuple([n for n, p in every.items() if isinstance(p, Tensor)]),
        numbers=tuple([(n, p) for n, p in every.items() if not isinstance(p, Tensor)]),
        scale="tensor" if isinstance(scale, Tensor) else "number",
        gradient=torch.is_grad_enabled() and any(x.requires_grad for x in grown),
        diagnostics=return_diagnostics, transformed=transformed(), segments=runs is not None,
    )  # fmt: skip
    implementation = choose(problem, impl)
    native = bool(getattr(implementation, "native", lambda _: False)(problem))
    raw = native and bool(getattr(implementation, "raw", lambda _: False)(problem))
    visibility = (queries, keys, problem.causal, exclude_self, window, offset, mask, runs)
    plain = native and not (raw or spec.degree or hasattr(implementation, "clean"))
    as_given = plain and scale_in_range(dim, scale, query.dtype) and readable(*tensors)
    return Plan(problem, implementation, scale, numbers, local, visibility, native, raw, as_given)


def _number(
    name: str, value: float | Tensor, rows: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device
) -> float | Tensor:
    """Check a parameter; return a number or a tensor [B, H, Tq], [B, H, Tq, 1 or D] for a local linear model."""
    label = f"params[{name!r}]"
    if name not in LOCAL_LINEAR or not isinstance(value, Tensor) or value.dim() < 4:
        number = row_number(CALL, label, value, rows[:3], dtype, device)
        return number[..., None] if name in LOCAL_LINEAR and isinstance(number, Tensor) else number
    checks.floating(CALL, label, value)
    checks.broadcastable(CALL, label, value, rows)
    checks.on_device(CALL, label, value, device)
    return value.to(dtype).expand(*rows[:3], value.shape[3])


def check_tensors(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> Sizes:
    """Return the sizes of a call after checking its tensors."""
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
    return check_sizes(CALL, query.shape, key.shape, value.shape, enable_gqa)


def check_sizes(
    call: str, query: Sequence[int], key: Sequence[int], value: Sequence[int], enable_gqa: bool, suffix: str = ""
) -> Sizes:
    """Return the sizes of a call after checking that these shapes fit together. `suffix` ends their names."""
    (batch, heads, queries, dim), (key_batch, kv_heads, keys, key_dim) = query, key
    value_batch, value_heads, values, value_dim = value
    problem = None
    if not batch == key_batch == value_batch:
        problem = "batch sizes differ"
    elif dim != key_dim:
        problem = "query and key differ in their last axis"
    elif dim == 0:
        problem = "query and key have no features"
    elif value_dim == 0:
        problem = "value has no features"
    elif kv_heads != value_heads or keys != values:
        problem = "key and value differ in heads or length"
    elif heads != kv_heads and not enable_gqa:
        problem = "query and key differ in heads; pass enable_gqa=True to let a key head serve several query heads"
    elif heads != kv_heads and (kv_heads == 0 or heads % kv_heads):
        problem = f"{heads} query heads cannot be divided among {kv_heads} key heads; the former must be a multiple"
    if problem is not None:
        given = f"query{suffix} {list(query)}, key{suffix} {list(key)}, value{suffix} {list(value)}"
        raise ArgumentError(f"{call}: {problem}: {given}.")
    return batch, heads, kv_heads, queries, keys, dim, value_dim


def check_window(call: str, window: int | None) -> int | None:
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
