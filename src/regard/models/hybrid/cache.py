"""What a hybrid model remembers between calls: pairs where it must, sums where it can, states where there are some.

A mixer whose weights are dot products of finite features (linear, cosine, shift-cosine, relu, relu2, elu) needs no
pairs of earlier tokens: a sum of fixed size says all that a later query can ask. `hybrid_cache` gives every layer of a
model the kind that suits its mixer, in one transformers `Cache`; behind them stand the states of its memories.

Shapes: B batch, H key/value heads, F features of a key, Dv channels of a value.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicLayer, DynamicSlidingWindowLayer

from ... import Spec
from ...checks import ArgumentError
from ...nn.memories import memory_layers
from ...recurrent.linear import LinearState, finite_features
from ..base.cache_layers import StateCacheLayer
from .configuration_hybrid import HybridConfig
from .token_mixers import token_mixers


class RegardCacheLayer(StateCacheLayer):
    """The sums of one layer: B H F (Dv + 1) numbers, in float32 at least, however many tokens were seen.

    `regard.nn.Attention` reads and replaces `linear_state`.

    Attributes:
        linear_state: the sums, None before the first token.
    """

    held = ("linear_state",)
    positional = ("linear_state",)
    update_refusal = (
        "RegardCacheLayer: holds sums, which regard.nn.Attention adds to; a layer that needs pairs needs a "
        "transformers.DynamicCache."
    )
    no_way_back = (
        "RegardCacheLayer: tokens cannot be taken back from sums, as assisted decoding does; leave past_key_values out "
        "or give a transformers.DynamicCache, which keeps pairs."
    )
    linear_state: LinearState | None


class MemoryCacheLayer(StateCacheLayer):
    """The state of one memory that is written at test time (`regard.nn.memory_layers`), None before the first token.

    Args:
        depth: of the layer at which the memory stands.
    """

    held = ("memory",)
    update_refusal = "MemoryCacheLayer: holds the state of a memory, which writes it itself."
    no_way_back = (
        "MemoryCacheLayer: what was written into a memory cannot be taken out, as assisted and prompt-lookup decoding "
        "do; decode without an assistant."
    )
    memory: Any

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.depth = depth

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row b becomes what row `beam_idx[b]` was.

        Raises:
            ArgumentError: the rows have one memory in common.
        """
        if getattr(self.memory, "shared", False):
            raise ArgumentError(
                "MemoryCacheLayer: beam search needs a memory for every beam, and this one is shared by the batch; "
                "sample or decode greedily, or build the model with shared=False in its memory_options."
            )
        super().reorder_cache(beam_idx)


def hybrid_cache(config: HybridConfig, *, pairs: bool = False) -> Cache:
    """An empty cache for a hybrid model.

    Args:
        config: of the model.
        pairs: keep the pairs of every attention layer, where they must be seen again one by one: for weights
            (`output_attentions`), and where tokens are taken back. Cost: O(T) memory and O(T) time a token.

    Returns:
        Sums for each layer whose mixer has finite features and looks at all tokens; pairs (those of the window,
        where there is one) for the other sentences; the state of a mixer that has one; behind them a
        `MemoryCacheLayer` for each memory that remembers. For a model of sentences alone a plain
        `transformers.DynamicCache` keeps pairs for all and works too.
    """
    mixers, windows = config.layer_mixers(), config.layer_windows()
    layers = [_mixer_layer(config, *kind, pairs) for kind in zip(mixers, windows, strict=True)]
    memories = [MemoryCacheLayer(depth) for depth in remembering(config.layer_memories())]
    if not memories and all(type(layer) is DynamicLayer for layer in layers):
        return DynamicCache(config=config)
    return Cache(layers=[*layers, *memories])


def remembering(memories: Mapping[int, Any]) -> list[int]:
    """The depths of the memories that carry a state, in order."""
    return [depth for depth, names in sorted(memories.items()) if any(memory_layers.get(n).remembers for n in names)]


def _mixer_layer(config: HybridConfig, mixer: Spec | str, window: int | None, pairs: bool) -> CacheLayerMixin:
    if isinstance(mixer, str):
        return token_mixers.get(mixer).cache_layer()
    if window is not None:  # transformers counts the present token, too
        return DynamicSlidingWindowLayer(sliding_window=window + int(config.exclude_self))
    return DynamicLayer() if pairs or not finite_features(mixer) else RegardCacheLayer()
