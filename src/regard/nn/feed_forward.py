"""Feed-forward layers, applied to every token separately.

Shapes: B batch, T tokens, C model width, F inner width.
"""

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from ..registry import Registry

feed_forwards: Registry[Any] = Registry("feed-forward", "regard.feed_forwards")
"""Name to class: `cls(hidden_size, intermediate_size)` maps [B, T, C] to [B, T, C]; `cls.width(C)` is the default F."""


@feed_forwards.register("swiglu")
class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x)) without biases (Shazeer 2020, arXiv:2002.05202): 3 C F parameters."""

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    @staticmethod
    def width(hidden_size: int) -> int:
        """Return 8/3 C, rounded up to a multiple of 8: about as many parameters as `gelu` has."""
        return -(-hidden_size // 3) * 8

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


@feed_forwards.register("gelu")
class GELUFeedForward(nn.Module):
    """down(gelu(up(x))) with biases, as in GPT-2 but with the exact GELU: 2 C F + C + F parameters."""

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.up_proj = nn.Linear(hidden_size, intermediate_size)
        self.down_proj = nn.Linear(intermediate_size, hidden_size)

    @staticmethod
    def width(hidden_size: int) -> int:
        """Return 4 C."""
        return 4 * hidden_size

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.gelu(self.up_proj(x)))


@feed_forwards.register("none")
class NoFeedForward(nn.Module):
    """No feed-forward layer: an attention-only model. The widths are ignored."""

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()

    width = staticmethod(GELUFeedForward.width)  # a config must hold a positive width
