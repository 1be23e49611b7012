"""Argument checks that the calls with a state share, and the handling of non-finite inputs.

Legend: B batch, H query heads, Hkv key heads, T positions, D channels of a key, Dv of a value, F features.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from ..checks import (
    ArgumentError,
    boolean_mask,
    broadcastable,
    choice,
    finite,
    flags,
    floating,
    in_range,
    on_device,
    optional_whole,
    shape,
)
from ..pairwise.local_regression import repeat_heads
from ..pairwise.visibility import Visibility
from ..precision import clean, row_number

Form = Literal["chunked", "parallel", "recurrent"]
FAR = 2**31 - 1
"""An upper bound of the whole numbers that operators take."""


def check(
    call: str,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    form: str,
    chunk_size: int | None,
    causal: bool,
) -> Tensor | None:
    """Check what all calls share. Return the mask as [B, 1, Tk], or None."""
    named = {"query": query, "key": key, "value": value}
    for name, tensor in named.items():
        floating(call, name, tensor)
        if tensor.dim() != 4 or tensor.layout != torch.strided:
            raise ArgumentError(
                f"{call}: {name} is a {tensor.layout} tensor {shape(tensor)}, expected a dense one [batch, heads, "
                f"length, dim]."
            )
    if any(x.dtype != query.dtype or x.device != query.device for x in named.values()):
        kinds = ", ".join(f"{name} {x.dtype} on {x.device}" for name, x in named.items())
        raise ArgumentError(f"{call}: dtypes or devices differ: {kinds}; convert with .to().")
    (batch, heads, queries, dim), (_, kv_heads, keys, _) = query.shape, key.shape
    for fits, what in (
        (batch == key.shape[0] == value.shape[0], "batch sizes differ"),
        (dim == key.shape[3], "query and key differ in their last axis"),
        (dim > 0 and value.shape[3] > 0, "there are no features"),
        (key.shape[1:3] == value.shape[1:3], "key and value differ in heads or length"),
        (
            heads > 0 and kv_heads > 0 and heads % kv_heads == 0,
            "the query heads cannot be shared out among the key heads; their number must be a multiple",
        ),
        (
            not causal or queries == keys,
            "causal order needs a key for every query; to read a state without keys, pass is_causal=False",
        ),
    ):
        if not fits:
            raise ArgumentError(f"{call}: {what}: query {shape(query)}, key {shape(key)}, value {shape(value)}.")
    choice(call, "form", form, get_args(Form))
    optional_whole(call, "chunk_size", chunk_size, 1)
    mask = key_mask(call, mask, key)
    return None if mask is None else mask[:, None]


def key_mask(call: str, mask: Tensor | None, key: Tensor) -> Tensor | None:
    """Return a mask over keys as [B, Tk], or None.

    Raises:
        ArgumentError: it is not boolean, or does not broadcast to [B, Tk] or [B, 1, 1, Tk].
    """
    if mask is None:
        return None
    boolean_mask(call, "attn_mask", mask)
    if mask.dim() not in (1, 2, 4):
        raise ArgumentError(f"{call}: attn_mask has shape {shape(mask)}, expected [B, Tk] or [B, 1, 1, Tk].")
    on_device(call, "attn_mask", mask, key.device)
    batch, keys = key.shape[0], key.shape[2]
    broadcastable(call, "attn_mask", mask, (batch, keys) if mask.dim() <= 2 else (batch, 1, 1, keys))
    mask = mask[:, 0, 0] if mask.dim() == 4 else mask
    return mask.expand(batch, keys)


def no_pairs(call: str, query: Tensor, kv_heads: int, value_dim: int) -> tuple[Tensor, Tensor]:
    """Return keys and values of length 0, for queries that read a state only."""
    floating(call, "query", query)
    if query.dim() != 4:
        raise ArgumentError(f"{call}: query has shape {shape(query)}, expected [batch, heads, length, dim].")
    sizes = (query.shape[0], kv_heads, 0)
    return query.new_empty(*sizes, query.shape[3]), query.new_empty(*sizes, value_dim)


def order(call: str, is_causal: Any, exclude_self: Any) -> bool:
    """Check both flags and return whether the call is causal."""
    flags(call, is_causal=is_causal, exclude_self=exclude_self)
    return bool(is_causal or exclude_self)


class PerKey(NamedTuple):
    """A number for every key [B, Hkv, T, ...], and the keys [B, Hkv, T] whose number was not finite (set to 0)."""

    value: Tensor
    bad: Tensor

    def kept(self, mask: Tensor | None) -> PerKey:
        """Return the same with 0 where `mask` [B, 1, T] is False."""
        if mask is None:
            return self
        value = torch.where(mask if self.value.dim() == 3 else mask[..., None], self.value, 0)
        return PerKey(value, self.bad & mask)


def log_decays(call: str, log_decay: Any, key: Tensor, features: int | None, dtype: torch.dtype) -> PerKey | None:
    """Return log_decay as [B, Hkv, T, 1 or F]; None for None.

    Args:
        features: F, or None if the call takes no decay per feature.

    Raises:
        ArgumentError: a shape that does not fit; a number above 0 (tensors only under `regard.checks.debug`).
    """
    if log_decay is None:
        return None
    in_range(call, "log_decay", log_decay, high=0.0, strict=False)
    rows = (key.shape[0], key.shape[1], key.shape[2])
    if not isinstance(log_decay, Tensor):
        log_decay = torch.full((1,), max(float(log_decay), torch.finfo(dtype).min), dtype=dtype, device=key.device)
    floating(call, "log_decay", log_decay)
    on_device(call, "log_decay", log_decay, key.device)
    per_feature = "" if features is None else f" or {[*rows, features]} (per feature)"
    expected = f"[{rows[1]}] (per key head), {list(rows)} (per token){per_feature}"
    g = log_decay
    if g.dim() not in (0, 1, 3, 4) or (g.dim() == 4 and features is None and g.shape[-1] != 1):
        raise ArgumentError(f"{call}: log_decay has shape {shape(g)}, expected {expected}.")
    if g.dim() <= 1:
        broadcastable(call, "log_decay", g, (rows[1],))
        g = g.expand(rows[1])[:, None, None]
    elif g.dim() == 3:
        broadcastable(call, "log_decay", g, rows)
        g = g[..., None]
    else:
        broadcastable(call, "log_decay", g, (*rows, features or 1))
    g = g.to(dtype).expand(*rows, g.shape[-1])
    bad = ~(g.detach() < torch.inf)  # also NaN; -inf is allowed
    return PerKey(torch.where(bad, 0, g), bad.any(-1))


def per_key(call: str, name: str, value: Any, key: Tensor, dtype: torch.dtype) -> PerKey:
    """Return a number >= 0 or a tensor broadcastable to [B, Hkv, T] as a tensor of that shape."""
    in_range(call, name, value, low=0.0, strict=False)
    number = row_number(call, name, value, (key.shape[0], key.shape[1], key.shape[2]), dtype, key.device)
    if not isinstance(number, Tensor):
        number = torch.full(key.shape[:3], number, dtype=dtype, device=key.device)
    bad = ~number.detach().isfinite()
    return PerKey(torch.where(bad, 0, number), bad)


class Clean(NamedTuple):
    """Finite inputs in the computing dtype.

    Attributes:
        query, key, value: non-finite vectors and masked keys and values are zero.
        poisoned: [B, H, Tq], the rows of the output that must be NaN.
        spoilt: [B, Hkv], whether a visible key or value of this call was not finite.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    poisoned: Tensor
    spoilt: Tensor


def cleaned(
    call: str,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dtype: torch.dtype,
    visible: Visibility,
    held: Tensor,
    poisoned: Tensor,
    *more: PerKey | None,
) -> Clean:
    """Zero non-finite vectors and find the rows that see one.

    Args:
        visible: its mask is [B, 1, 1, Tk] or None.
        held: [B, Hkv], whether the state is not empty.
        poisoned: [B, Hkv], whether the state has seen a non-finite token.
        more: further numbers of the keys.
    """
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        finite(call, name, tensor)
    (query, query_bad), (key, key_bad), (value, value_bad) = (clean(x.to(dtype)) for x in (query, key, value))
    pair_bad = key.new_zeros(key.shape[:3], dtype=torch.bool)
    for bad in (key_bad, value_bad, *(x.bad for x in more if x is not None)):
        pair_bad = pair_bad if bad is None else pair_bad | bad
    heads, mask = query.shape[1], visible.mask
    rows = repeat_heads(visible.any_seen(pair_bad) | poisoned[..., None], heads)
    if query_bad is not None:
        rows = rows | (query_bad & ((visible.counts(query.device) > 0) | repeat_heads(held[..., None], heads)))
    spoilt = pair_bad
    if mask is not None:
        kept = mask[:, 0, 0][:, None]
        key, value = torch.where(kept[..., None], key, 0), torch.where(kept[..., None], value, 0)
        spoilt = pair_bad & kept
    return Clean(query, key, value, rows, spoilt.any(-1))
