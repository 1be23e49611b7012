"""What a Memory Mosaic remembers between calls, in transformers' `Cache`.

Per block: the leaky sums of both memories, the key and the projected value of the last token, which wait for the next
one, and the pairs of the contextual memory. Pairs grow with the text, the rest does not.
"""

from __future__ import annotations

from transformers.cache_utils import Cache

from ...nn.mosaic.contextual_memory import ContextualState
from ...recurrent.leaky import LeakyState
from ..base.cache_layers import StateCacheLayer


class MemoryMosaicCacheLayer(StateCacheLayer):
    """The states of one block's memories; the block reads and replaces them.

    Attributes:
        contextual: None before the first token.
        persistent: None before the first token, and where keys are shared.
    """

    held = ("contextual", "persistent")
    update_refusal = "MemoryMosaicCacheLayer: holds states that the blocks of a Memory Mosaic fill themselves."
    no_way_back = (
        "MemoryMosaicCacheLayer: tokens cannot be taken back from leaky sums, as assisted and prompt-lookup decoding "
        "do; decode without an assistant."
    )
    contextual: ContextualState | None
    persistent: LeakyState | None


def memory_mosaic_cache(blocks: int) -> Cache:
    """An empty cache for a Memory Mosaic of so many blocks."""
    return Cache(layers=[MemoryMosaicCacheLayer() for _ in range(blocks)])
