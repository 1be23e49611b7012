"""Keys and values of the memories of Memory Mosaics.

    key    k_t = Norm(kt_t + lambda kt_{t-1} + lambda^2 kt_{t-2} + ...)     kt = W x,  lambda = e^{-rate}
    value  v_t = Norm(vt_t + c vt_{t+1})                                    vt = W x

(sparse-attention paper, equation 10). A value looks one token ahead: a key encodes the tokens seen, its value the next
one. Parametrisations and initial values are those of the released programs (Memory Mosaics, Zhang et al. 2025,
github.com/facebookresearch/MemoryMosaics): parameters per head are stored divided by ten, so that one learning rate
suits them and the matrices.

Shapes: B batch, T tokens, C model width, H heads, D channels of a head.
"""

from typing import Any

import torch
from torch import Tensor, nn

from ...recurrent.leaky import LeakyState, leaky_average

GAIN = 10.0
"""Factor of the parameters per head."""
RATES = (0.5, 5.0)
"""Initial decay rates of the first and the last head, in nats per token."""
SCALE_START = 1.0
"""Initial log beta; scores are beta^2 times cosines."""
VALUE_START = -0.5
"""Initial logarithm of the length of values."""
SCALE_LIMIT = 10.0
"""Upper limit of log beta^2, so that float16 does not overflow."""
LOOK_AHEAD = ("sum", "convex")
"""How a value includes the next token: as in the paper, or as in the released programs."""


def unit(x: Tensor, eps: float = 0.0) -> Tensor:
    """Return x / (|x| + eps) over the last axis, computed at least in float32. Vectors whose square
    underflows (shorter than 1e-19 in float32) count as zero: output and gradient are 0."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    square = wide.square().sum(-1, keepdim=True)
    tiny = torch.finfo(wide.dtype).tiny
    square = square.masked_fill(square < tiny, torch.inf)  # makes the output and all derivatives zero
    return (wide / (square.sqrt() + eps)).to(x.dtype)  # autograd cubes the result of rsqrt, which overflows


def split_heads(x: Tensor, heads: int) -> Tensor:
    """Return [B, H, T, D] for x [B, T, C]."""
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def without_hidden(x: Tensor, mask: Tensor | None) -> Tensor:
    """Return x [B, T, C] with zeros at masked tokens, so that NaN there reaches no product, forward or backward."""
    return x if mask is None else torch.where(mask[..., None], x, 0)


class OutputProjection(nn.Linear):
    """The output projection of a memory, a separate class because models initialise it with smaller weights."""


@torch.no_grad()
def initialise(module: Any) -> None:
    """Set a module's parameters per head to the values of `number_starts`."""
    for name, value in module.number_starts().items():
        getattr(module, name).copy_(value)


class Sharpness(nn.Module):
    """beta^2, the factor of cosines of keys, learned per head: exp(min(20 scale, limit)), initially e^2. Above the
    upper limit of log beta^2, the gradient is zero."""

    def __init__(self, num_heads: int, limit: float) -> None:
        super().__init__()
        self.limit = limit
        self.scale = nn.Parameter(torch.empty(num_heads))
        initialise(self)

    def number_starts(self) -> dict[str, Tensor]:
        return {"scale": torch.full(self.scale.shape, SCALE_START / GAIN)}

    def forward(self) -> Tensor:
        """Return beta^2, [H]."""
        scale = self.scale.to(torch.promote_types(self.scale.dtype, torch.float32))  # float16 overflows at e^11
        return (2 * GAIN * scale).clamp(max=self.limit).exp()


class KeyFeatures(nn.Module):
    """Unit keys: the normalised leaky average of a projection, with a decay of |10 rate| nats per token and head.

    `average` multiplies the sum by 1 - e^-rate, as the released programs do; it matters only if `eps` is not 0. `eps`
    is added to the length that keys are divided by: 0 in the paper, 1e-6 and 1e-10 in released programs. Zero vectors
    are safe with any value.
    """

    def __init__(
        self, hidden_size: int, num_heads: int, head_dim: int, *, bias: bool, average: bool, eps: float
    ) -> None:
        super().__init__()
        self.num_heads, self.average, self.eps = num_heads, average, eps
        self.proj = nn.Linear(hidden_size, num_heads * head_dim, bias=bias)
        self.rate = nn.Parameter(torch.empty(num_heads))
        initialise(self)

    def number_starts(self) -> dict[str, Tensor]:
        return {"rate": torch.linspace(*RATES, self.num_heads) / GAIN}

    def forward(
        self, x: Tensor, mask: Tensor | None = None, state: LeakyState | None = None, segment_ids: Tensor | None = None
    ) -> tuple[Tensor, LeakyState]:
        """Return unit keys [B, H, T, D] of x [B, T, C], which is zero at masked tokens, and the state after them; zero
        sums give zero keys. `state` is of the tokens before these; packed documents have separate averages."""
        projected = split_heads(self.proj(x), self.num_heads)
        rates = (GAIN * self.rate).abs()
        leaky, after = leaky_average(
            projected, rates, mask=mask, segment_ids=segment_ids, state=state, average=self.average
        )
        return unit(leaky, self.eps), after


class ValueFeatures(nn.Module):
    """Values that look one token ahead: a projection v mixed with the next token's, v', of length exp(10 scale).

    `look_ahead` is "sum", v + c v', as in the paper, or "convex", c v + (1 - c) v', as in the released programs. c is
    `mix` [H], initially uniform between 0 and 1.
    """

    def __init__(self, hidden_size: int, num_heads: int, head_dim: int, *, bias: bool, look_ahead: str) -> None:
        super().__init__()
        self.num_heads, self.look_ahead = num_heads, look_ahead
        self.proj = nn.Linear(hidden_size, num_heads * head_dim, bias=bias)
        self.mix = nn.Parameter(torch.empty(num_heads))
        self.scale = nn.Parameter(torch.empty(num_heads))
        initialise(self)

    def number_starts(self) -> dict[str, Tensor]:
        """Return the initial parameters; c is drawn from torch's generator."""
        return {"mix": torch.rand(self.num_heads), "scale": torch.full((self.num_heads,), VALUE_START / GAIN)}

    def forward(self, x: Tensor, following: Tensor | None = None) -> Tensor:
        """Return projections [B, H, T, D] of x [B, T, C]; or values [B, H, T, D], if x are the projections of tokens
        and `following` those of the tokens after them. Both are in forward, whose hooks load weights from a disk."""
        if following is None:
            return split_heads(self.proj(x), self.num_heads)
        mix = self.mix.to(x.dtype)[:, None, None]
        mixed = x + mix * following if self.look_ahead == "sum" else mix * x + (1 - mix) * following
        return unit(mixed) * (GAIN * self.scale).exp().to(x.dtype)[:, None, None]
