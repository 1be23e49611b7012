"""Token mixers: what may mix the tokens of a layer beside attention with a spec.

A mixer is one file in `mixers/` that ends with

    @token_mixers.register("my-mixer")
    class MyMixer(TokenMixer): ...

and `HybridConfig.mixers` may then name it for any layer.

Shapes: B batch, T tokens given now, N tokens so far, C model width.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from torch import Tensor, nn
from transformers.cache_utils import Cache, CacheLayerMixin

from ...checks import ArgumentError
from ...registry import Registry
from ..base.cache_layers import StateCacheLayer


class TokenMixer(nn.Module, ABC):
    """A module that mixes tokens and remembers in a state of its own.

    Called as `regard.nn.Attention` is: hidden states [B, T, C], (cos, sin) of the positions, a boolean mask [B, N], a
    cache and `output_attentions`; it gives (output [B, T, C], weights or None).

    Where documents are packed into rows, a mixer that says `honours_segments` is also called with `segment_ids`,
    integers [B or 1, T] that grow by one where a document begins. Each document must then give what it gives alone.
    There is no cache in such a call.

    Attributes:
        honours_segments: whether it takes `segment_ids`; where it does not, packed documents are refused.
        defaults: the options, and what they are when nothing is said.
        cache_layer: the class of what it keeps in a cache, a layer of a transformers `Cache`; made without arguments.
    """

    honours_segments: ClassVar[bool] = False
    defaults: ClassVar[Mapping[str, Any]] = {}
    cache_layer: ClassVar[type[CacheLayerMixin]]
    forward: Callable[..., tuple[Tensor, Tensor | None]]

    @staticmethod
    @abstractmethod
    def build(config: Any, layer_idx: int, options: Mapping[str, Any]) -> TokenMixer:
        """Build the module of layer `layer_idx` of a model with this `HybridConfig` and these options."""

    def write_waiting(self, layer: Any) -> None:
        """Write what waits for the end of a chunk in this mixer's layer of a cache; by default nothing does."""

    def init_weights(self) -> None:
        """Set the initial values of the parameters that transformers does not know; by default there are none.

        Use the functions of `transformers.initialization`, which leave loaded parameters as they are. The model calls
        this once its modules have been initialised as transformers does it.
        """


token_mixers: Registry[type[TokenMixer]] = Registry(
    "token mixer", "regard.token_mixers", home="regard.models.hybrid.mixers"
)


def own_layer(call: str, cache: Cache, index: int, kind: type[StateCacheLayer]) -> Any:
    """The layer of a cache that a mixer of this kind filled or may fill.

    Raises:
        ArgumentError: it is of another kind: the cache is another model's, or a plain one.
    """
    layers = getattr(cache, "layers", ())
    layer = layers[index] if index < len(layers) else None
    if not isinstance(layer, kind):
        raise ArgumentError(
            f"{call}: past_key_values is a {type(cache).__name__} without {kind.__name__} at layer {index}; leave it "
            f"out, or take model.model.new_cache()."
        )
    return layer
