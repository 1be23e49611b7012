"""The cache layer of a Memory Mosaic block.

It holds the leaky sums of both memories, the key and the projected value of the last token, which wait for the next
one, and the pairs of the contextual memory. The pairs grow with the text, the rest has a fixed size.
"""

from __future__ import annotations

from ...nn.mosaic.contextual_memory import ContextualState
from ...recurrent.leaky import LeakyState
from ..base.cache_layers import StateCacheLayer


class MemoryMosaicCacheLayer(StateCacheLayer):
    """The states of a block's memories, which the block reads and replaces.

    Attributes:
        contextual: None before the first token.
        persistent: None before the first token, and if keys are shared.
    """

    held = ("contextual", "persistent")
    contextual: ContextualState | None
    persistent: LeakyState | None
