"""The cache of a hybrid model: sums, keys and values, and states.

Attention whose weights are dot products of finite features (linear, cosine, shift-cosine, relu, relu2, elu) needs no
keys and values of earlier tokens: it keeps a sum of fixed size.

Shapes: B batch, H key/value heads, F features of a key, Dv channels of a value.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from transformers import cache_utils as caches
from transformers.cache_utils import Cache, DynamicLayer, StaticLayer

from ... import Spec
from ...checks import require
from ...nn.arguments import positive_int
from ...nn.memories import memory_layers
from ...recurrent.linear import LinearState, finite_features
from ..base.cache_layers import StateCacheLayer
from .configuration_hybrid import HybridConfig
from .token_mixers import token_mixers


class RegardCacheLayer(StateCacheLayer):
    """The sums of one layer: B H F (Dv + 1) numbers for any number of tokens, at least in float32.

    `regard.nn.Attention` reads and replaces `linear_state`, which is None before the first token.
    """

    held = ("linear_state",)
    positional = ("linear_state",)
    update_refusal = (
        "this layer holds sums, which regard.nn.Attention updates; for keys and values use a transformers.DynamicCache."
    )
    no_way_back = (
        "tokens cannot be removed from sums, as assisted decoding does; leave the cache out or give a "
        "transformers.DynamicCache, which keeps keys and values."
    )
    linear_state: LinearState | None


class MemoryCacheLayer(StateCacheLayer):
    """The state of the memory of layer `depth` that is written at test time, None before the first token."""

    held = ("memory",)
    memory: Any

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.depth = depth

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Replace row b by row `beam_idx[b]`; raise `ArgumentError` if the rows share one memory."""
        shared = "beam search needs a memory for every beam, and this one is shared by the batch"
        hint = "sample or decode greedily, or build the model with shared=False in its memory_options"
        require(not getattr(self.memory, "shared", False), "MemoryCacheLayer", f"{shared}; {hint}.")
        super().reorder_cache(beam_idx)


def hybrid_cache(config: HybridConfig, *, pairs: bool = False, length: int | None = None) -> Cache:
    """Return an empty cache for the hybrid model of a configuration.

    Args:
        pairs: keep keys and values in every attention layer, as attention weights (`output_attentions`) and the removal
            of tokens need them. Cost: O(T) memory, and O(T) time per token.
        length: keep keys and values in tensors with places for this many tokens from the beginning, so that their
            shapes and addresses stay equal, as compiled graphs need; states have a fixed size in any case.

    Returns:
        One layer per layer of the model: sums for attention with finite features and no window; keys and values, of the
        window if there is one, for other attention; the state of a token mixer. A `MemoryCacheLayer` for each memory
        with a state follows. A model without token mixers and memories also works with a `transformers.DynamicCache`.
    """
    mixers, windows = config.layer_mixers(), config.layer_windows()
    if length is not None:
        positive_int("hybrid_cache", "length", length)
    layers = [_mixer_layer(config, *kind, pairs, length) for kind in zip(mixers, windows, strict=True)]
    memories = [MemoryCacheLayer(depth) for depth in remembering(config.layer_memories())]
    if not memories and all(type(layer) is DynamicLayer for layer in layers):
        return caches.DynamicCache(config=config)
    if length is not None and not memories and all(type(layer) is StaticLayer for layer in layers):
        return caches.StaticCache(config, max_cache_len=length)
    return Cache(layers=[*layers, *memories])


def remembering(memories: Mapping[int, Any]) -> list[int]:
    """Return the indices of the layers whose memory has a state, in order."""
    return [depth for depth, names in sorted(memories.items()) if any(memory_layers.get(n).remembers for n in names)]


def _mixer_layer(
    config: HybridConfig, mixer: Spec | str, window: int | None, pairs: bool, length: int | None
) -> caches.CacheLayerMixin:
    if isinstance(mixer, str):
        return token_mixers.get(mixer).cache_layer()
    if window is not None:
        window += int(config.exclude_self)  # transformers counts the current token, too
        if length is not None:
            return caches.StaticSlidingWindowLayer(max_cache_len=length, sliding_window=window)
        return caches.DynamicSlidingWindowLayer(sliding_window=window)
    if not pairs and finite_features(mixer):
        return RegardCacheLayer()
    return DynamicLayer() if length is None else StaticLayer(max_cache_len=length)
