"""Argument checks that the calls with a state share, and the handling of non-finite inputs.

Legend: B batch, H query heads, Hkv key heads, T positions, D channels of a key, Dv of a value, F features.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple, TypeVar, get_args

import torch
from torch import Tensor

from .. import checks
from ..checks import ArgumentError, shape, within
from ..pairwise.layout import repeat_heads
from ..pairwise.plan import check_tensors
from ..pairwise.visibility import Visibility
from ..precision import clean, full_precision, row_number
from .packing import Documents, by_document, documents
from .states import Sizes, State, require_state, zeros

S = TypeVar("S", bound=State)
Form = Literal["chunked", "parallel", "recurrent"]
FAR = 2**31 - 1
"""An upper bound of the whole numbers that operators take."""


class Call(NamedTuple):
    """The checked arguments that all calls share: mask [B, 1, Tk] or None, and `dtype`, that of the computation."""

    name: str
    causal: bool
    strict: bool
    form: str
    chunk: int | None
    mask: Tensor | None
    packed: Documents | None
    dtype: torch.dtype

    @property
    def how(self) -> dict[str, Any]:
        return {"causal": self.causal, "strict": self.strict, "form": self.form, "chunk": self.chunk}

    def state(self, state: S | None, kind: type[S], key: Tensor, sizes: Sizes) -> S:
        """Return `state`, checked to be a `kind` with tensors of these sizes per head, or without one an empty one."""
        heads = (key.shape[0] if self.packed is None else self.packed.count, key.shape[1])
        if state is None:
            return kind(**zeros(heads[0], heads[1], self.dtype, key.device, **sizes))
        wanted = {name: None if size is None else (*heads, *size) for name, size in sizes.items()}
        require_state(self.name, state, kind, wanted, key.new_empty(0, dtype=self.dtype))
        return state

    def visible(self, qkv: "Tokens", mask: Tensor | None) -> Visibility:
        """Return which keys the queries see; mask [B, 1, Tk]."""
        mask = None if mask is None else mask[:, :, None]
        return Visibility(qkv.query.shape[2], qkv.key.shape[2], self.causal, self.strict, mask=mask)

    def run(self, compute: Any, inputs: tuple[Any, ...], state: Any, **how: Any) -> tuple[Any, Any]:
        """Return compute(inputs, mask, state, call=self, **how) over all documents, in full precision."""
        with full_precision(inputs[0].query.device.type):
            return by_document(self.packed, partial(compute, call=self, **how), inputs, self.mask, state)


def begin(
    name: str, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, form: str, chunk_size: int | None,
    is_causal: Any, exclude_self: Any, segment_ids: Any,
) -> Call:  # fmt: skip
    """Check the arguments that all calls share."""
    causal = order(name, is_causal, exclude_self)
    _check_tensors(name, query, key, value, causal)
    checks.choice(name, "form", form, get_args(Form))
    checks.optional_whole(name, "chunk_size", chunk_size, 1)
    mask = key_mask(name, attn_mask, key)
    mask = None if mask is None else mask[:, None]
    dtype = torch.promote_types(query.dtype, torch.float32)
    return Call(name, causal, exclude_self, form, chunk_size, mask, documents(name, segment_ids, query, key), dtype)


def _check_tensors(call: str, query: Tensor, key: Tensor, value: Tensor, causal: bool) -> None:
    _, heads, _, queries, keys, *_ = within(call, None, check_tensors, query, key, value, True)
    for name, x in (("query", query), ("key", key), ("value", value)):
        if x.layout != torch.strided:
            raise ArgumentError(f"{call}: {name} is a {x.layout} tensor {shape(x)}, expected a dense one.")
    if heads == 0 or (causal and queries != keys):
        needs = "causal order needs a key for every query (pass is_causal=False to read a state)"
        what = needs if heads else "there are no heads"
        raise ArgumentError(f"{call}: {what}: query {shape(query)}, key {shape(key)}, value {shape(value)}.")


def key_mask(call: str, mask: Tensor | None, key: Tensor) -> Tensor | None:
    """Return a boolean mask over keys, given as [B, Tk] or [B, 1, 1, Tk], as [B, Tk], or None."""
    if mask is None:
        return None
    checks.boolean_mask(call, "attn_mask", mask)
    # torch.compile cannot trace the text of a symbolic length
    if mask.dim() not in (1, 2, 4) or (mask.dim() == 4 and mask.shape[1:3] != (1, 1)):
        one = "it must be the same for all queries and heads, which share a state"
        raise ArgumentError(f"{call}: attn_mask has shape {shape(mask)}, expected [B, Tk] or [B, 1, 1, Tk]: {one}.")
    checks.on_device(call, "attn_mask", mask, key.device)
    batch, keys = key.shape[0], key.shape[2]
    checks.broadcastable(call, "attn_mask", mask, (batch, keys) if mask.dim() <= 2 else (batch, 1, 1, keys))
    return (mask[:, 0, 0] if mask.dim() == 4 else mask).expand(batch, keys)


def read_state(run: Callable[..., Any], query: Tensor, state: Any, *spec: Any, **how: Any) -> Any:
    """Return the output of the call `run` for queries that read a state only."""
    checks.tensor(run.__name__, "query", query, "batch", "heads", "length", "dim")
    sizes = (query.shape[0], state.values.shape[1], 0)
    nothing = query.new_empty(*sizes, query.shape[3]), query.new_empty(*sizes, state.values.shape[3])
    return run(query, *nothing, *spec, state=state, is_causal=False, **how)[0]


def order(call: str, is_causal: Any, exclude_self: Any) -> bool:
    """Check both flags and return whether the call is causal."""
    checks.flags(call, is_causal=is_causal, exclude_self=exclude_self)
    return bool(is_causal or exclude_self)


class PerKey(NamedTuple):
    """A number for every key [B, Hkv, T, ...], and the keys [B, Hkv, T] whose number was not finite (set to 0)."""

    value: Tensor
    bad: Tensor

    def kept(self, mask: Tensor | None) -> "PerKey":
        """Return the same with 0 where `mask` [B, 1, T] is False."""
        if mask is None:
            return self
        value = torch.where(mask if self.value.dim() == 3 else mask[..., None], self.value, 0)
        return PerKey(value, self.bad & mask)


def log_decays(call: str, log_decay: Any, key: Tensor, features: int | None, dtype: torch.dtype) -> PerKey | None:
    """Return log_decay as [B, Hkv, T, 1 or F], None for None; `features` is None if it may not differ by feature."""
    if log_decay is None:
        return None
    checks.in_range(call, "log_decay", log_decay, high=0.0, strict=False)
    rows = (key.shape[0], key.shape[1], key.shape[2])
    sizes: AxisSizes = {0: ((), ""), 1: ((rows[1],), "per key head"), 3: (rows, "per token")}
    if features is not None:
        sizes[4] = ((*rows, features), "per feature")
    elif isinstance(log_decay, Tensor) and log_decay.shape[-1:] == (1,):
        sizes[4] = ((*rows, 1), "")
    g = four_axes(call, "log_decay", log_decay, sizes, dtype, key.device)
    g = g.expand(*rows, g.shape[-1])
    bad = ~(g.detach() < torch.inf)  # also NaN; -inf is allowed
    return PerKey(torch.where(bad, 0, g), bad.any(-1))


AxisSizes = dict[int, tuple[tuple[int, ...], str]]
"""By the number of axes of an argument: the largest size, and what each of its numbers belongs to ("": not named)."""


def four_axes(call: str, name: str, value: Any, sizes: AxisSizes, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a number, or a tensor that broadcasts to one of `sizes`, with four axes [B, H, T, X]."""
    if not isinstance(value, Tensor):
        return torch.full((1,) * 4, max(float(value), torch.finfo(dtype).min), dtype=dtype, device=device)
    checks.floating(call, name, value)
    checks.on_device(call, name, value, device)
    if value.dim() not in sizes:
        *most, last = (f"{list(size)} ({each})" for size, each in sizes.values() if each)
        expected = f"{', '.join(most)} or {last}" if most else last
        raise ArgumentError(f"{call}: {name} has shape {shape(value)}, expected {expected}.")
    checks.broadcastable(call, name, value, sizes[value.dim()][0])
    every = slice(None)
    axes: list[Any] = [(None,) * 4, (None, every, None, None), (None, every, None), (..., None), ...]
    return value.to(dtype)[axes[value.dim()]]


def per_key(call: str, name: str, value: Any, key: Tensor, dtype: torch.dtype) -> PerKey:
    """Return a number >= 0 or a tensor broadcastable to [B, Hkv, T] as a tensor of that shape."""
    checks.in_range(call, name, value, low=0.0, strict=False)
    number = row_number(call, name, value, (key.shape[0], key.shape[1], key.shape[2]), dtype, key.device)
    if not isinstance(number, Tensor):
        number = torch.full(key.shape[:3], number, dtype=dtype, device=key.device)
    bad = ~number.detach().isfinite()
    return PerKey(torch.where(bad, 0, number), bad)


def row_numbers(
    call: str, query: Tensor, scale: float | Tensor | None, params: Any, dtype: torch.dtype
) -> tuple[float | Tensor | None, dict[str, float | Tensor]]:
    """Return scale and params as numbers or tensors [B, H, Tq] of the queries [B, H, Tq, D]."""
    rows: tuple[Any, ...] = (tuple(query.shape[:3]), dtype, query.device)
    if scale is not None:
        checks.in_range(call, "scale", scale, low=0.0, strict=True)
        scale = row_number(call, "scale", scale, *rows)
    given = checks.mapping(call, "params", params)
    return scale, {name: row_number(call, f"params[{name!r}]", n, *rows) for name, n in given.items()}


def row_scale(call: Call, scale: float | Tensor | None, query: Tensor) -> float | Tensor:
    """Return the factor of the queries, default 1, as a number or [B, H, Tq, 1]."""
    factor = row_numbers(call.name, query, 1.0 if scale is None else scale, None, call.dtype)[0]
    return factor[..., None] if isinstance(factor, Tensor) else factor


class Tokens(NamedTuple):
    """Inputs with zeros for non-finite vectors; which queries [B, H, Tq] (or None) and keys [B, Hkv, Tk] had any."""

    query: Tensor
    key: Tensor
    value: Tensor
    bad_query: Tensor | None
    bad_key: Tensor

    def masked(self, mask: Tensor | None) -> "Tokens":
        """Return the same with zeros for keys and values where `mask` [B, 1, Tk] is False."""
        if mask is None:
            return self
        kept = mask[..., None]
        return self._replace(key=torch.where(kept, self.key, 0), value=torch.where(kept, self.value, 0))

    def non_finite(self, visible: Visibility, held: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
        """Return the rows [B, H, Tq] that see a non-finite number, and [B, Hkv] whether a key was non-finite so far;
        `held` and `before` [B, Hkv]: the state holds keys, and non-finite ones."""
        heads = self.query.shape[1]
        rows = repeat_heads(visible.any_seen(self.bad_key) | before[..., None], heads)
        if self.bad_query is not None:
            some = (visible.counts(self.query.device) > 0) | repeat_heads(held[..., None], heads)
            rows = rows | (self.bad_query & some)
        bad = self.bad_key if visible.mask is None else self.bad_key & visible.mask[:, :, 0]
        return rows, before | bad.any(-1)


def tokens(call: Call, query: Tensor, key: Tensor, value: Tensor, *more: PerKey | None) -> Tokens:
    """Return the inputs of a call as `Tokens`; `more` are further numbers of the keys."""
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        checks.finite(call.name, name, tensor)
    (query, bad_query), (key, bad), (value, bad_value) = (clean(x.to(call.dtype)) for x in (query, key, value))
    bad_key = key.new_zeros(key.shape[:3], dtype=torch.bool)
    for flags in (bad, bad_value, *(x.bad for x in more if x is not None)):
        bad_key = bad_key if flags is None else bad_key | flags
    return Tokens(query, key, value, bad_query, bad_key)


def l2_normalized(x: Tensor) -> Tensor:
    """Return vectors divided by sqrt(|x|^2 + 1e-6), computed in float32 at least."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (wide * (wide.square().sum(-1, keepdim=True) + 1e-6).rsqrt()).to(x.dtype)
