"""Checks and defaults of the arguments that every language model takes.

Shapes: B batch, T tokens in this call, N tokens so far (cached ones included).
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.cache_utils import Cache
from transformers.modeling_outputs import BaseModelOutputWithPast

from ...checks import ArgumentError, closest, is_integer, refuse, require, shape, token_numbers
from . import packing
from .packing import Documents

IGNORED = -100  # label of a position that the loss leaves out
CACHE_NAMES = ("cache", "past_key_values")  # of a cache in transformers: since 5.24, and before
CACHE = next(name for name in CACHE_NAMES if name in BaseModelOutputWithPast.__dataclass_fields__)  # as installed
_ARGUMENTS = (
    *("input_ids", "attention_mask", "position_ids", "cache", "past_key_values", "inputs_embeds", "labels"),
    *("use_cache", "logits_to_keep", "output_attentions", "output_hidden_states", "return_dict", *packing.ARGUMENTS),
)


def one_cache(call: str, cache: Cache | None, past_key_values: Cache | None) -> Cache | None:
    """Return the cache that was given under either of its names; None if there is none."""
    both = cache is not None and past_key_values is not None and cache is not past_key_values
    require(not both, call, "cache and past_key_values are two names of one argument; leave one out.")
    return past_key_values if cache is None else cache


def positions_kept(call: str, logits_to_keep: int | Tensor, labels: Tensor | None) -> slice | Tensor:
    if isinstance(logits_to_keep, Tensor):
        why = "which need neighbouring positions; give a number, or label -100 where no token is predicted"
        require(labels is None, call, f"logits_to_keep is a tensor of positions and labels are given, {why}.")
        return logits_to_keep
    if not isinstance(logits_to_keep, int) or logits_to_keep < 0:
        raise ArgumentError(f"{call}: logits_to_keep is {logits_to_keep!r}, expected 0 (all), a number or positions.")
    return slice(-logits_to_keep, None)


def all_real(mask: Tensor | None) -> bool:
    """Return whether a mask is known to hide nothing; only CPU masks are read, and none in a compiled graph."""
    if mask is None:
        return True
    return mask.device.type == "cpu" and not torch.compiler.is_compiling() and bool(mask.all())


def refuse_misspelt(call: str, extra: dict[str, Any]) -> None:
    """Refuse a keyword that is nearly the name of an argument; passed on to the loss, it would be lost silently."""
    for name in () if torch.compiler.is_compiling() else extra:
        close = closest(name, _ARGUMENTS, 0.85)[:1]
        require(not close, call, f"unknown argument {name!r}. Did you mean {', '.join(map(repr, close))}?")


def outside(call: str, tokens: Tensor, vocabulary: int) -> str:
    """Return the message for tokens that are not integers from 0 to `vocabulary` - 1."""
    low, high = tokens.min().item(), tokens.max().item()
    span = str(low) if low == high else f"{low} to {high}"
    return f"{call}: input_ids holds {span}, expected integers from 0 to {vocabulary - 1}, the vocabulary."


def key_mask(call: str, attention_mask: Tensor | None, batch: int, tokens: int, places: int = 0) -> Tensor | None:
    """Return the attention mask as booleans [B, N], after checking its type and shape. With `places`, the length of a
    cache whose token count is on a device, N is from `tokens` to `places`; further columns are of unfilled places."""
    if attention_mask is None:
        return None
    numbers = isinstance(attention_mask, Tensor) and attention_mask.is_floating_point()  # as PEFT's virtual tokens give
    if not numbers and not is_integer(attention_mask) and getattr(attention_mask, "dtype", None) != torch.bool:
        raise refuse(call, "attention_mask", attention_mask, "booleans or integers, nonzero where a token is real")
    fits = attention_mask.dim() == 2 and tokens <= attention_mask.shape[1] <= places
    if tuple(attention_mask.shape) != (batch, tokens) and not (fits and attention_mask.shape[0] == batch):
        expected = f"expected [{batch}, {tokens}]: one entry per token so far, cached ones included"
        raise ArgumentError(f"{call}: attention_mask has shape {shape(attention_mask)}, {expected}.")
    if numbers:
        _refuse_additive(call, attention_mask)
    return attention_mask != 0


def _refuse_additive(call: str, mask: Tensor) -> None:
    """Refuse a floating-point mask [B, N] that may be one to add to scores, which is 0 where a token is real."""
    real = mask == 1
    fits = (real | (mask == 0)).all() & real.any(-1).all()
    expected = "expected 0 and 1, with a 1 in every row; write mask == 0 for a mask that is added to scores"
    text = f"attention_mask is a floating-point tensor of other numbers, {expected}."
    if torch.compiler.is_compiling():
        torch._assert_async(fits, f"{call}: {text}")
    elif not mask.is_meta:
        require(bool(fits), call, text)


def columns(mask: Tensor, past: int | Tensor, tokens: int) -> Tensor:
    """Return the columns [B, T] of this call's tokens, for a mask or numbers [B, N] of all tokens so far."""
    if isinstance(past, Tensor):  # of a cache of fixed length
        return mask.index_select(-1, past + torch.arange(tokens, device=mask.device))
    return mask[:, past : past + tokens]


def token_positions(
    call: str, position_ids: Tensor | None, mask: Tensor | None, past: int | Tensor, hidden: Tensor
) -> Tensor:
    """Return positions [B or 1, T]: those given, or the number of real tokens before each."""
    batch, tokens = hidden.shape[:2]
    if position_ids is not None:
        token_numbers(call, "position_ids", position_ids, batch, tokens)
        return position_ids
    if mask is None:
        return (torch.arange(tokens, device=hidden.device) + past)[None]
    return columns(counted(mask), past, tokens)


def counted(mask: Tensor) -> Tensor:
    """Return the number of real tokens before each, [B, N], for booleans [B, N]; that of a token before for padding."""
    return (mask.cumsum(-1) - 1).clamp_min(0)


def not_predicted(attention_mask: Tensor | None, documents: Documents | None, last: int) -> Tensor | None:
    """Return which of the last positions are not predicted, boolean [B or 1, last], or None if all are: masked ones,
    those after a masked one (which would be predicted from padding), and the first of each document."""
    excluded = None
    if attention_mask is not None:
        visible = attention_mask[:, -last:] != 0
        excluded = ~(visible & F.pad(visible[:, :-1], (1, 0), value=False))
    if documents is not None:
        begins = documents.begins[:, -last:]
        excluded = begins if excluded is None else excluded | begins
    return excluded
