"""Token mixers: layers that mix tokens without being attention with a spec.

A mixer is one file in `mixers/` that ends with

    @token_mixers.register("my-mixer")
    class MyMixer(TokenMixer): ...

and `HybridConfig.mixers` may then name it for any layer.

Shapes: B batch, T tokens in this call, N tokens so far (cached ones included), C model width.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, CacheLayerMixin

from ...checks import require, segments
from ...registry import Registry
from ..base.arguments import all_real
from ..base.cache_layers import StateCacheLayer, own_layer


class TokenMixer(nn.Module, ABC):
    """A module that mixes tokens and keeps its own state.

    It is called as `regard.nn.Attention`: with hidden states [B, T, C], (cos, sin) of the positions, a boolean mask
    [B, N], a cache and `output_attentions`; it returns (output [B, T, C], weights or None).

    For packed documents, a mixer with `honours_segments` is also given `segment_ids`, integers [B or 1, T] that
    increase by one where a document begins, and no cache. Each document must give the same output as it gives alone.

    Attributes:
        honours_segments: whether `segment_ids` are accepted; if not, packed documents are refused.
        defaults: the options with their default values.
        cache_layer: the class of the mixer's layer in a transformers `Cache`; created without arguments.
    """

    honours_segments: ClassVar[bool] = False
    defaults: ClassVar[Mapping[str, Any]] = {}
    cache_layer: ClassVar[type[CacheLayerMixin]]
    forward: Callable[..., tuple[Tensor, Tensor | None]]

    @staticmethod
    @abstractmethod
    def build(config: Any, layer_idx: int, options: Mapping[str, Any]) -> "TokenMixer":
        """Build the module of layer `layer_idx` of a model with this `HybridConfig` and these options."""

    def write_waiting(self, layer: Any) -> None:
        """Write the tokens that wait for the end of a chunk in this mixer's cache layer; by default there are none."""

    def init_weights(self) -> None:
        """Initialise the parameters that transformers does not know, after its own initialisation; by default none. Use
        `transformers.initialization`, which leaves loaded parameters unchanged. transformers passes over a module
        without parameters of its own, so a submodule whose parameters need this defines `init_weights` itself."""


States = tuple[Any, ...]
"""What a mixer keeps, in the order of `cache_layer.held`; None before the first token."""


class StateMixer(TokenMixer):
    """A token mixer with states of fixed size in a `StateCacheLayer`; a subclass defines `advance`. Padding, packed
    documents and the cache are handled here."""

    honours_segments = True
    cache_layer: ClassVar[type[StateCacheLayer]]
    layer_idx: int | None

    @abstractmethod
    def advance(
        self, hidden: Tensor, real: Tensor | None, states: States, segment_ids: Tensor | None
    ) -> tuple[Tensor, States]:
        """Return the output [B, T, C] and the states after all tokens.

        `hidden` [B, T, C] is zero at padding. `real`, boolean [B, T], has the real tokens of each row first; None: all
        are real. `segment_ids`, integers [B or 1, T], change where a document begins, and come without states.
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
        """Return [B, T, C], and None: there are no weights. Positions are not used. A cache without this layer's state,
        or with `segment_ids`, is an ArgumentError."""
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
        out, states = self.mix(hidden_states, mask, states, segment_ids)
        if kept is not None:
            for name, state in zip(held, states, strict=True):
                setattr(kept, name, state)
        return out, None

    def mix(
        self, hidden: Tensor, mask: Tensor | None, states: States, segment_ids: Tensor | None = None
    ) -> tuple[Tensor, States]:
        """Do what `advance` does for any mask [B, T] of real tokens; padding gives 0 and changes nothing else."""
        if all_real(mask):
            return self.advance(hidden, None, states, segment_ids)
        assert mask is not None
        # Move the real tokens of each row to the front, so that no real token follows padding.
        order = (~mask).to(torch.int8).argsort(dim=1, stable=True)
        place = order[..., None].expand_as(hidden)
        real = mask.gather(1, order)
        hidden = hidden.gather(1, place).masked_fill(~real[..., None], 0)
        segment_ids = None if segment_ids is None else segment_ids.expand_as(order).gather(1, order)
        out, states = self.advance(hidden, real, states, segment_ids)
        return torch.zeros_like(out).scatter(1, place, out.masked_fill(~real[..., None], 0)), states


token_mixers: Registry[type[TokenMixer]] = Registry(
    "token mixer", "regard.token_mixers", home="regard.models.hybrid.mixers"
)
