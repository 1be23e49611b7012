"""Token mixers that keep states of fixed size: padding, packed documents and the cache are handled here.

Shapes: B batch, T tokens given now, C model width.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from ...checks import require, segments
from ..base.arguments import all_real
from ..base.cache_layers import StateCacheLayer, own_layer
from .token_mixers import TokenMixer

States = tuple[Any, ...]
"""What a mixer keeps, in the order of `cache_layer.held`; None before the first token."""


class StateMixer(TokenMixer):
    """A token mixer with a `StateCacheLayer`; a subclass defines `advance`."""

    honours_segments = True
    cache_layer: ClassVar[type[StateCacheLayer]]
    layer_idx: int | None

    @abstractmethod
    def advance(
        self, hidden: Tensor, real: Tensor | None, states: States, remember: bool, segment_ids: Tensor | None
    ) -> tuple[Tensor, States]:
        """Return the output [B, T, C] and the states after all tokens.

        Args:
            hidden: [B, T, C], zeros at padding.
            real: boolean [B, T]; the real tokens of each row come first. None: all are real.
            states: of the earlier tokens.
            remember: whether the states are used.
            segment_ids: integers [B or 1, T]; a change begins a new document. Only without states.
        """

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: Cache | None = None,
        output_attentions: bool = False,
        segment_ids: Tensor | None = None,
    ) -> tuple[Tensor, None]:
        """Return [B, T, C] for hidden states [B, T, C], and None: there are no weights. Positions are not used.

        A change in `segment_ids` [B or 1, T] begins a new document.

        Raises:
            ArgumentError: a cache without this layer's state, or with `segment_ids`.
        """
        call, kept = type(self).__name__, None
        batch, tokens, _ = hidden_states.shape
        if segment_ids is not None:
            require(past_key_values is None, call, "segment_ids were given with a cache; leave one out.")
            segments(call, segment_ids, batch, tokens, hidden_states.device)
        if past_key_values is not None:
            kept = own_layer(call, past_key_values, self.layer_idx or 0, self.cache_layer)
        mask = None if attention_mask is None else attention_mask[:, -tokens:]
        held = self.cache_layer.held
        states = tuple(None if kept is None else getattr(kept, name) for name in held)
        out, states = self.mix(hidden_states, mask, states, remember=kept is not None, segment_ids=segment_ids)
        if kept is not None:
            for name, state in zip(held, states, strict=True):
                setattr(kept, name, state)
        return out, None

    def mix(
        self, hidden: Tensor, mask: Tensor | None, states: States, *, remember: bool = True,
        segment_ids: Tensor | None = None,
    ) -> tuple[Tensor, States]:  # fmt: skip
        """Do what `advance` does for any mask [B, T] of real tokens; padding gives 0 and changes nothing else."""
        if all_real(mask):
            return self.advance(hidden, None, states, remember, segment_ids)
        assert mask is not None
        # Move the real tokens of each row to the front, so that no real token follows padding.
        order = (~mask).to(torch.int8).argsort(dim=1, stable=True)
        place = order[..., None].expand_as(hidden)
        real = mask.gather(1, order)
        hidden = hidden.gather(1, place).masked_fill(~real[..., None], 0)
        segment_ids = None if segment_ids is None else segment_ids.expand_as(order).gather(1, order)
        out, states = self.advance(hidden, real, states, remember, segment_ids)
        return torch.zeros_like(out).scatter(1, place, out.masked_fill(~real[..., None], 0)), states
