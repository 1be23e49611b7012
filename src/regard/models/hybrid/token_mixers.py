"""Token mixers: layers that mix tokens without being attention with a spec.

A mixer is one file in `mixers/` that ends with

    @token_mixers.register("my-mixer")
    class MyMixer(TokenMixer): ...

and `HybridConfig.mixers` may then name it for any layer.

Shapes: B batch, T tokens in this call, N tokens so far (cached ones included), C model width.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from torch import Tensor, nn
from transformers.cache_utils import CacheLayerMixin

from ...registry import Registry


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
    def build(config: Any, layer_idx: int, options: Mapping[str, Any]) -> TokenMixer:
        """Build the module of layer `layer_idx` of a model with this `HybridConfig` and these options."""

    def write_waiting(self, layer: Any) -> None:
        """Write the tokens that wait for the end of a chunk in this mixer's cache layer; by default there are none."""

    def init_weights(self) -> None:
        """Initialise the parameters that transformers does not know, after its own initialisation; by default none.

        Use `transformers.initialization`, which leaves loaded parameters unchanged. transformers passes over a module
        without parameters of its own, so a submodule whose parameters need this defines `init_weights` itself.
        """


token_mixers: Registry[type[TokenMixer]] = Registry(
    "token mixer", "regard.token_mixers", home="regard.models.hybrid.mixers"
)
