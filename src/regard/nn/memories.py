"""The registry of memory layers, one file each in `memory/`, which `HybridConfig.memories` places in a model.

Shapes: B batch, T tokens, C model width.
"""

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from torch import Tensor, nn

from ..registry import Registry


class MemoryLayer(nn.Module):
    """A module `cls(hidden_size, **options)` whose output is added to the residual stream
    (docs/protocols/memory-layer.md).

    It is called with hidden [B, T, C], `mask` (boolean [B, T], true where a token is real; None: all), `state` (of the
    previous call, or None) and, if `honours_segments`, `segment_ids` (integers [B or 1, T], documents packed into a
    row; None: one). It returns (output [B, T, C], state); the state is None if `remembers` is False. Layers that
    remember also have `chunk_size` and `frozen`, which may be set at any time, and `flush(state)`.
    """

    # it replaces a feed-forward layer and reads the normalised stream; otherwise its output is added before or after
    # the mixer, and it normalises the stream itself
    replaces_feed_forward: ClassVar[bool] = False
    remembers: ClassVar[bool] = True  # it is written while it is read, and has a state
    honours_segments: ClassVar[bool] = False  # each document of a packed row gets the result that it gets alone
    defaults: ClassVar[Mapping[str, Any]]  # options and their defaults, if they are not the keywords of the class
    forward: Callable[..., tuple[Tensor, Any]]

    def reset_parameters(self) -> None:
        """Draw new initial values of the layer's own tensors; by default there are none."""

    def fast_numbers(self) -> int:
        """Return how many numbers are written at test time and are not parameters."""
        return 0


memory_layers: Registry[type[MemoryLayer]] = Registry("memory", "regard.memory_layers", home="regard.nn.memory")
