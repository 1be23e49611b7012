"""Memories that stand at chosen depths of a model, by name: what `HybridConfig.memories` may name.

A memory is one file in `memory/` that ends with

    @memory_layers.register("my-memory")
    class MyMemory(MemoryLayer): ...

Shapes: B batch, T tokens, C model width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from torch import Tensor, nn

from ..registry import Registry


class MemoryLayer(nn.Module):
    """A module `cls(hidden_size, **options)` whose output is added to the residual stream.

    Called with hidden [B, T, C], `mask` (bool [B, T], true where a token is real; None: all), `state` (of an earlier
    call, or None) and `segment_ids` (int [B or 1, T], documents packed into a row; None: one), it gives
    (output [B, T, C], state), the state None where `remembers` is False. `segment_ids` come only to a memory that says
    `honours_segments`.

    Those that remember have, besides:

        chunk_size: tokens read between two writes; may be set at any time.
        frozen: nothing is written; may be set at any time.
        flush: a state to one whose waiting pairs are written.

    Attributes:
        replaces_feed_forward: it stands in the place of a feed-forward layer (and reads the normed stream), not beside
            one (and norms the raw stream itself).
        remembers: it is written while it reads, and carries a state.
        honours_segments: each document of a packed row gives what it gives alone; where that does not hold, models
            refuse packed documents.
    """

    replaces_feed_forward: ClassVar[bool] = False
    remembers: ClassVar[bool] = True
    honours_segments: ClassVar[bool] = False
    forward: Callable[..., tuple[Tensor, Any]]

    def fast_numbers(self) -> int:
        """How many numbers of the memory are written at test time, for counts beside `parameters()`."""
        return 0


memory_layers: Registry[type[MemoryLayer]] = Registry("memory", "regard.memory_layers", home="regard.nn.memory")
