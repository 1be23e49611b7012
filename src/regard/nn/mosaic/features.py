"""Keys and values of the memories of Memory Mosaics.

    key    k_t = Norm(kt_t + lambda kt_{t-1} + lambda^2 kt_{t-2} + ...)     kt = W x,  lambda = e^{-rate}
    value  v_t = Norm(vt_t + c vt_{t+1})                                    vt = W x

(sparse-attention paper, equation 10). A value looks one token ahead: a key encodes the tokens seen, its value the next
one. Parametrisations and initial values are those of the released programs (Memory Mosaics, Zhang et al. 2025,
github.com/facebookresearch/MemoryMosaics): parameters per head are stored divided by ten, so that one learning rate
suits them and the matrices.

Shapes: B batch, T tokens, C model width, H heads, D channels of a head.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ...recurrent.leaky import LeakyState, leaky_average
from ..attention.rotary import in_heads

GAIN = 10.0  # factor of the parameters per head
RATES = (0.5, 5.0)  # initial decay rates of the first and the last head, in nats per token
SCALE_START = 1.0  # initial log beta; scores are beta^2 times cosines
VALUE_START = -0.5  # initial logarithm of the length of values
SCALE_LIMIT = 10.0  # upper limit of log beta^2, so that float16 does not overflow
LOOK_AHEAD = ("sum", "convex")  # how a value includes the next token: as in the paper, or as in the released programs


def unit(x: Tensor, eps: float = 0.0) -> Tensor:
    """Return x / (|x| + eps) over the last axis, computed at least in float32. Vectors whose square
    underflows (shorter than 1e-19 in float32) count as zero: output and gradient are 0."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    square = wide.square().sum(-1, keepdim=True)
    tiny = torch.finfo(wide.dtype).tiny
    square = square.masked_fill(square < tiny, torch.inf)  # makes the output and all derivatives zero
    return (wide / (square.sqrt() + eps)).to(x.dtype)  # autograd cubes the result of rsqrt, which overflows


def without_hidden(x: Tensor, mask: Tensor | None) -> Tensor:
    """Return x [B, T, C] with zeros at masked tokens, so that NaN there reaches no product, forward or backward."""
    return x if mask is None else torch.where(mask[..., None], x, 0)


class OutputProjection(nn.Linear):
    """The output projection of a memory, a separate class because models initialise it with smaller weights."""


class PerHead(nn.Module):
    """A module with parameters per head, [H]."""

    def add_numbers(self, heads: int, **starts: float | Callable[[int], Tensor]) -> None:
        """Make parameters with these initial values, each a number or a function of H."""
        self.num_heads, self._starts = heads, starts
        for name, value in self.number_starts().items():
            self.register_parameter(name, nn.Parameter(value))

    def number_starts(self) -> dict[str, Tensor]:
        """Return initial values of the parameters, which models set again; some are drawn from torch's generator."""
        heads, starts = self.num_heads, self._starts.items()
        return {name: start(heads) if callable(start) else torch.full((heads,), start) for name, start in starts}


class Sharpness(PerHead):
    """beta^2, the factor of cosines of keys, learned per head: exp(min(20 scale, limit)), initially e^2. Above the
    upper limit of log beta^2, the gradient is zero."""

    scale: Tensor

    def __init__(self, num_heads: int, limit: float) -> None:
        super().__init__()
        self.limit = limit
        self.add_numbers(num_heads, scale=SCALE_START / GAIN)

    def forward(self) -> Tensor:
        """Return beta^2, [H]."""
        scale = self.scale.to(torch.promote_types(self.scale.dtype, torch.float32))  # float16 overflows at e^11
        return (2 * GAIN * scale).clamp(max=self.limit).exp()


def spread_rates(heads: int) -> Tensor:
    return torch.linspace(*RATES, heads) / GAIN


class KeyFeatures(PerHead):
    """Unit keys: the normalised leaky average of a projection, with a decay of |10 rate| nats per token and head.

    `average` multiplies the sum by 1 - e^-rate, as the released programs do; it matters only if `eps` is not 0. `eps`,
    added to the length that keys are divided by, is 0 in the paper and 1e-6 or 1e-10 in released programs; zero
    vectors are safe with any value.
    """

    rate: Tensor

    def __init__(
        self, hidden_size: int, num_heads: int, head_dim: int, *, bias: bool, average: bool, eps: float
    ) -> None:
        super().__init__()
        self.head_dim, self.average, self.eps = head_dim, average, eps
        self.proj = nn.Linear(hidden_size, num_heads * head_dim, bias=bias)
        self.add_numbers(num_heads, rate=spread_rates)

    def forward(
        self, x: Tensor, mask: Tensor | None = None, state: LeakyState | None = None, segment_ids: Tensor | None = None
    ) -> tuple[Tensor, LeakyState]:
        """Return unit keys [B, H, T, D] of x [B, T, C], which is zero at masked tokens, and the state after them; zero
        sums give zero keys. `state` is of the tokens before these; packed documents have separate averages."""
        projected, rates = in_heads(self.proj(x), self.head_dim), (GAIN * self.rate).abs()
        how: Any = {"mask": mask, "segment_ids": segment_ids, "state": state, "average": self.average}
        leaky, after = leaky_average(projected, rates, **how)
        return unit(leaky, self.eps), after


class ValueFeatures(PerHead):
    """Values that look one token ahead: a projection v mixed with the next token's, v', of length exp(10 scale).

    `look_ahead` is "sum", v + c v', as in the paper, or "convex", c v + (1 - c) v', as in the released programs. c is
    `mix` [H], initially uniform between 0 and 1.
    """

    mix: Tensor
    scale: Tensor

    def __init__(self, hidden_size: int, num_heads: int, head_dim: int, *, bias: bool, look_ahead: str) -> None:
        super().__init__()
        self.head_dim, self.look_ahead = head_dim, look_ahead
        self.proj = nn.Linear(hidden_size, num_heads * head_dim, bias=bias)
        self.add_numbers(num_heads, mix=torch.rand, scale=VALUE_START / GAIN)

    def forward(self, x: Tensor, following: Tensor | None = None) -> Tensor:
        """Return projections [B, H, T, D] of x [B, T, C]; or values [B, H, T, D], if x are the projections of tokens
        and `following` those of the tokens after them. Both are in forward, whose hooks load weights from a disk."""
        if following is None:
            return in_heads(self.proj(x), self.head_dim)
        mix = self.mix.to(x.dtype)[:, None, None]
        mixed = x + mix * following if self.look_ahead == "sum" else mix * x + (1 - mix) * following
        return unit(mixed) * (GAIN * self.scale).exp().to(x.dtype)[:, None, None]
