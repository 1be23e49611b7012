"""Large-chunk test-time training (`regard.nn.LargeChunkTTT`) as a token mixer."""

from collections.abc import Mapping
from typing import Any, ClassVar

from transformers import initialization as init

from ....memory.large_chunk import LargeChunkState
from ....nn.memory.large_chunk_ttt import LargeChunkTTT, WindowState
from ...base.cache_layers import StateCacheLayer
from ..token_mixers import TokenMixer, token_mixers


class LargeChunkCacheLayer(StateCacheLayer):
    """The states of one layer, None before the first token."""

    held = ("window_state", "fast_state")
    positional = ("window_state",)
    window_state: WindowState | None  # keys and values of the window
    fast_state: LargeChunkState | None  # the fast weights, and the tokens that wait for the end of a chunk


@token_mixers.register("lact")
class LargeChunkMixer(LargeChunkTTT, TokenMixer):
    """Window attention, and fast weights that learn each chunk of the text (`regard.nn.LargeChunkTTT`)."""

    honours_segments = True
    defaults: ClassVar[Mapping[str, Any]] = {
        "fast_heads": 4, "inner": 1.0, "window": 2048, "chunk_size": 512, "optimizer": "momentum", "bias": False,
        "qk_norm": False, "fast_rotary": True, "meta_grad": True,
    }  # fmt: skip
    cache_layer = LargeChunkCacheLayer

    @staticmethod
    def build(config: Any, layer_idx: int, options: Mapping[str, Any]) -> TokenMixer:
        sizes, eps = (config.hidden_size, config.num_attention_heads), config.rms_norm_eps
        return LargeChunkMixer(*sizes, layer_idx=layer_idx, norm_eps=eps, **options)

    def init_weights(self) -> None:
        """Set the first fast weights, and the scales and shifts of queries and keys."""
        self.reset_parameters()
        for part in ("q", "k"):
            init.ones_(getattr(self, f"{part}_scale"))
            init.zeros_(getattr(self, f"{part}_shift"))

    def write_waiting(self, layer: LargeChunkCacheLayer) -> None:
        if layer.fast_state is not None:
            layer.fast_state = self.flush(layer.fast_state)
