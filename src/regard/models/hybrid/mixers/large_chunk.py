"""Large-chunk test-time training (`regard.nn.LargeChunkTTT`) as a mixer of tokens in a model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from ....memory.large_chunk import LargeChunkState
from ....nn.memory.large_chunk_ttt import LargeChunkTTT, WindowState
from ...base.cache_layers import StateCacheLayer
from ..token_mixers import TokenMixer, token_mixers

if TYPE_CHECKING:
    from ..configuration_hybrid import HybridConfig


class LargeChunkCacheLayer(StateCacheLayer):
    """The states of one layer, None before the first token.

    Attributes:
        window_state: the pairs of the window.
        fast_state: the fast weights and what waits for the end of its chunk.
    """

    held = ("window_state", "fast_state")
    positional = ("window_state",)
    update_refusal = "LargeChunkCacheLayer: holds states that nn.LargeChunkTTT fills itself."
    no_way_back = (
        "LargeChunkCacheLayer: what fast weights have learned cannot be taken out, as assisted and prompt-lookup "
        "decoding do; decode without an assistant."
    )
    window_state: WindowState | None
    fast_state: LargeChunkState | None


@token_mixers.register("lact")
class LargeChunkMixer(LargeChunkTTT, TokenMixer):
    """Attention to a window, and fast weights that learn each chunk of the text: `regard.nn.LargeChunkTTT`."""

    honours_segments = True
    defaults: ClassVar[Mapping[str, Any]] = {
        "fast_heads": 4,
        "inner": 1.0,
        "window": 2048,
        "chunk_size": 512,
        "optimizer": "momentum",
        "bias": False,
        "qk_norm": False,
        "fast_rotary": True,
        "meta_grad": True,
    }
    cache_layer = LargeChunkCacheLayer

    @staticmethod
    def build(config: HybridConfig, layer_idx: int, options: Mapping[str, Any]) -> LargeChunkMixer:
        """The layer of a hybrid model; its heads are the model's, keys and values have as many as queries."""
        return LargeChunkMixer(
            config.hidden_size, config.num_attention_heads, layer_idx=layer_idx, norm_eps=config.rms_norm_eps, **options
        )

    def init_weights(self) -> None:
        """Set the first fast weights."""
        self.reset_parameters()

    def write_waiting(self, layer: LargeChunkCacheLayer) -> None:
        """Write the last, incomplete chunk."""
        if layer.fast_state is not None:
            layer.fast_state = self.flush(layer.fast_state)
