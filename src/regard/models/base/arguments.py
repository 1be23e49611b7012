"""Checks of what language models are called with, and what is left out where nothing is said.

Shapes: B batch, T tokens given now, N tokens so far (those in the cache and T).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...checks import ArgumentError, closest, require, shape
from . import packing
from .packing import Documents

IGNORED = -100  # the label that the loss leaves out
_ARGUMENTS = (
    "input_ids",
    "attention_mask",
    "position_ids",
    "past_key_values",
    "inputs_embeds",
    "labels",
    "use_cache",
    "logits_to_keep",
    "output_attentions",
    "output_hidden_states",
    "return_dict",
    *packing.ARGUMENTS,
)


def kind(given: object) -> str:
    """What an argument is, for messages."""
    return str(given.dtype) if isinstance(given, Tensor) else type(given).__name__


def positions_kept(call: str, logits_to_keep: int | Tensor, labels: Tensor | None) -> slice | Tensor:
    """An index of the positions that get logits.

    Raises:
        ArgumentError: a negative number, or a choice of positions with labels, which need neighbours.
    """
    if isinstance(logits_to_keep, Tensor):
        if labels is not None:
            raise ArgumentError(
                f"{call}: logits_to_keep is a tensor of positions and labels are given; labels are shifted by one and "
                f"need neighbouring positions, so give a number, or -100 where no token is to be predicted."
            )
        return logits_to_keep
    if not isinstance(logits_to_keep, int) or logits_to_keep < 0:
        raise ArgumentError(f"{call}: logits_to_keep is {logits_to_keep!r}, expected 0 (all), a number or positions.")
    return slice(-logits_to_keep, None)


def refuse_misspelt(call: str, extra: dict[str, Any]) -> None:
    """No further keyword is nearly the name of an argument.

    Raises:
        ArgumentError: one is: handed on to the loss, it would be lost, and another thing computed than was asked for.
    """
    for name in () if torch.compiler.is_compiling() else extra:
        close = closest(name, _ARGUMENTS, 0.85)[:1]
        require(not close, call, f"unknown argument {name!r}. Did you mean {', '.join(map(repr, close))}?")


def outside(call: str, tokens: Tensor, vocabulary: int) -> str:
    """The message for tokens that are not integers from 0 to `vocabulary` - 1."""
    found = f"{tokens.min().item()} to {tokens.max().item()}"
    return f"{call}: input_ids holds {found}, expected integers from 0 to {vocabulary - 1}, the vocabulary."


def key_mask(call: str, attention_mask: Tensor | None, batch: int, tokens: int) -> Tensor | None:
    """The attention mask as booleans [B, N].

    Raises:
        ArgumentError: not a boolean or integer tensor of shape [batch, tokens].
    """
    if attention_mask is None:
        return None
    if not isinstance(attention_mask, Tensor) or attention_mask.is_floating_point() or attention_mask.is_complex():
        raise ArgumentError(
            f"{call}: attention_mask is {kind(attention_mask)}, expected a boolean or integer tensor, true where a "
            f"token is real."
        )
    if tuple(attention_mask.shape) != (batch, tokens):
        raise ArgumentError(
            f"{call}: attention_mask has shape {shape(attention_mask)}, expected [{batch}, {tokens}]: one "
            f"entry for every token so far, those in the cache included."
        )
    return attention_mask != 0


def token_positions(call: str, position_ids: Tensor | None, mask: Tensor | None, past: int, hidden: Tensor) -> Tensor:
    """Positions [B or 1, T]: as given, else the number of real tokens before each.

    Raises:
        ArgumentError: `position_ids` is not an integer tensor of shape [B or 1, T].
    """
    batch, tokens = hidden.shape[:2]
    if position_ids is not None:
        if not isinstance(position_ids, Tensor):
            raise ArgumentError(f"{call}: position_ids is {kind(position_ids)}, expected an integer tensor.")
        fits = tuple(position_ids.shape) in ((batch, tokens), (1, tokens))
        if not fits or position_ids.is_floating_point():
            raise ArgumentError(
                f"{call}: position_ids has shape {shape(position_ids)} and dtype {position_ids.dtype}, "
                f"expected integers [{batch}, {tokens}] or [1, {tokens}]."
            )
        return position_ids
    if mask is None:
        return torch.arange(past, past + tokens, device=hidden.device)[None]
    return (mask.cumsum(-1) - 1).clamp_min(0)[:, past:]


def check_labels(call: str, name: str, labels: Tensor, logits: Tensor) -> None:
    """There is a label for each position that has logits.

    Raises:
        ArgumentError: it is no integer tensor of that shape.
    """
    if not isinstance(labels, Tensor) or labels.is_floating_point():
        raise ArgumentError(f"{call}: {name} is {kind(labels)}, expected an integer tensor [B, T].")
    if tuple(labels.shape) != tuple(logits.shape[:2]):
        raise ArgumentError(
            f"{call}: {name} has shape {shape(labels)}, expected {shape(logits[..., 0])}, one for each "
            f"position that has logits."
        )


def not_predicted(attention_mask: Tensor | None, documents: Documents | None, last: int) -> Tensor | None:
    """Which of the last positions are not predicted, boolean [B or 1, last]: those that the mask hides, those after a
    hidden one, and the first ones of documents. None where all are.

    Without the second, the first real token of a left-padded row would be predicted from padding, and padding
    would be trained.
    """
    found = None
    if attention_mask is not None:
        visible = attention_mask[:, -last:] != 0
        found = ~(visible & F.pad(visible[:, :-1], (1, 0), value=False))
    if documents is not None:
        begins = documents.begins[:, -last:]
        found = begins if found is None else found | begins
    return found
