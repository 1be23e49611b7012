"""Keys and values of memories: what a memory unit of Memory Mosaics makes of its input before anything is compared.

    key    k_t = Norm(kt_t + lambda kt_{t-1} + lambda^2 kt_{t-2} + ...)     kt = W x,  lambda = e^{-rate}
    value  v_t = Norm(vt_t + c vt_{t+1})                                    vt = W x

(sparse-attention paper, equation 10). A value looks one token ahead, so that a key says what was seen and its value
what followed. Parametrisations and starting values are those of the released programs (Memory Mosaics, Zhang et al.
2025, github.com/facebookresearch/MemoryMosaics): numbers that are learned per head stand for ten times themselves, so
that one learning rate suits them and the matrices.

Shapes: B batch, T tokens, C model width, H heads, D channels of a head.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor, nn

from ...checks import number, require
from ...recurrent.leaky import LeakyState, leaky_average

GAIN = 10.0
"""What a learned number of a head is multiplied by."""
RATES = (0.5, 5.0)
"""Decay rates, in nats a token, of the first and the last head at the start."""
SCALE_START = 1.0
"""log beta at the start: scores are beta^2 cosines."""
VALUE_START = -0.5
"""Logarithm of the length of values at the start."""
SCALE_LIMIT = 10.0
"""log beta^2 ends here, where float16 would overflow."""
LOOK_AHEAD = ("sum", "convex")
"""How a value takes in the next token: as in the paper, as in the released programs."""


def unit(x: Tensor, eps: float = 0.0) -> Tensor:
    """x / (|x| + eps) over the last axis, in float32 at least and given back in the dtype of x. A zero vector stays
    zero and has gradient zero."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    square = wide.square().sum(-1, keepdim=True)
    square = square.masked_fill(square == 0, torch.inf)  # divided by which all is zero, and so is every derivative
    inverse = 1 / (square.sqrt() + eps) if eps else square.rsqrt()
    return (wide * inverse).to(x.dtype)


def split_heads(x: Tensor, heads: int) -> Tensor:
    """[B, T, C] -> [B, H, T, D]."""
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def without_hidden(x: Tensor, mask: Tensor | None) -> Tensor:
    """x [B, T, C] with zeros where the mask [B, T] hides a token, so that no product, forward or backward, meets
    what stood there."""
    return x if mask is None else torch.where(mask[..., None], x, 0)


class OutputProjection(nn.Linear):
    """The last projection of a memory, [.., H D] to [.., C]: a class of its own, since models with many layers begin
    with smaller weights here."""


class HeadNumbers(Protocol):
    """A module with parameters [H], numbers that are learned per head."""

    def number_starts(self) -> dict[str, Tensor]:
        """Their values as learning begins, by name."""
        ...


@torch.no_grad()
def begin(module: HeadNumbers) -> None:
    """Put a module's numbers of heads where learning begins."""
    for name, value in module.number_starts().items():
        getattr(module, name).copy_(value)


class Sharpness(nn.Module):
    """beta^2, which multiplies cosines of keys, learned per head: exp(min(20 scale, limit)), e^2 at the start.

    Args:
        num_heads: H.
        limit: where log beta^2 ends. Beyond it there is no gradient.
    """

    def __init__(self, num_heads: int, limit: float = SCALE_LIMIT) -> None:
        super().__init__()
        number("Sharpness", "limit", limit)
        self.limit = limit
        self.scale = nn.Parameter(torch.empty(num_heads))
        begin(self)

    def number_starts(self) -> dict[str, Tensor]:
        """What is learned per head, as learning begins."""
        return {"scale": torch.full(self.scale.shape, SCALE_START / GAIN)}

    def forward(self) -> Tensor:
        """beta^2, [H]."""
        scale = self.scale.to(torch.promote_types(self.scale.dtype, torch.float32))  # float16 ends at e^11
        return (2 * GAIN * scale).clamp(max=self.limit).exp()


class KeyFeatures(nn.Module):
    """Unit keys: a projection, its leaky average with a learned rate per head, and the length taken out.

    Args:
        hidden_size: C; num_heads: H; head_dim: D.
        bias: of the projection.
        average: times 1 - e^-rate, as in the released programs; differs where `eps` is not 0.
        eps: added to the length that keys are divided by: 0 in the paper, 1e-6 and 1e-10 in released programs. Zero
            vectors are safe with any.

    Attributes:
        rate: [H], the decay rate is |10 rate| nats a token: from 0.5 to 5 across heads at the start.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        head_dim: int,
        *,
        bias: bool = False,
        average: bool = False,
        eps: float = 0.0,
    ) -> None:
        super().__init__()
        number("KeyFeatures", "eps", eps, low=0.0)
        self.num_heads, self.average, self.eps = num_heads, average, eps
        self.proj = nn.Linear(hidden_size, num_heads * head_dim, bias=bias)
        self.rate = nn.Parameter(torch.empty(num_heads))
        begin(self)

    def number_starts(self) -> dict[str, Tensor]:
        """What is learned per head, as learning begins."""
        return {"rate": torch.linspace(*RATES, self.num_heads) / GAIN}

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None = None,
        state: LeakyState | None = None,
        segment_ids: Tensor | None = None,
    ) -> tuple[Tensor, LeakyState]:
        """Unit keys [B, H, T, D] of x [B, T, C], and the state after them; zero where nothing but zeros was seen.

        Args:
            mask: boolean [B, T], True where a token is real. Hidden tokens must have been put to zero.
            segment_ids: integers [B or 1, T] of packed documents; the averages of each begin with its first token.
        """
        projected = split_heads(self.proj(x), self.num_heads)
        rates = (GAIN * self.rate).abs()
        leaky, after = leaky_average(
            projected, rates, mask=mask, segment_ids=segment_ids, state=state, average=self.average
        )
        return unit(leaky, self.eps), after


class ValueFeatures(nn.Module):
    """Values that look one token ahead: a projection, mixed with the next one's, at a learned length per head.

    Args:
        hidden_size: C; num_heads: H; head_dim: D.
        bias: of the projection.
        look_ahead: "sum", v + c v', as in the paper; "convex", c v + (1 - c) v', as in the released programs. v' is the
            next token's projection. Both start with c between 0 and 1, at random.
        eps: added to the length that values are divided by.

    Attributes:
        mix: c [H]. scale: [H], values have length exp(10 scale).
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        head_dim: int,
        *,
        bias: bool = False,
        look_ahead: str = "sum",
        eps: float = 0.0,
    ) -> None:
        super().__init__()
        known = " or ".join(map(repr, LOOK_AHEAD))
        require(look_ahead in LOOK_AHEAD, "ValueFeatures", f"look_ahead is {look_ahead!r}, expected {known}.")
        self.num_heads, self.look_ahead, self.eps = num_heads, look_ahead, eps
        self.proj = nn.Linear(hidden_size, num_heads * head_dim, bias=bias)
        self.mix = nn.Parameter(torch.empty(num_heads))
        self.scale = nn.Parameter(torch.empty(num_heads))
        begin(self)

    def number_starts(self) -> dict[str, Tensor]:
        """What is learned per head, as learning begins; c is drawn from torch's generator."""
        return {"mix": torch.rand(self.num_heads), "scale": torch.full((self.num_heads,), VALUE_START / GAIN)}

    def forward(self, x: Tensor) -> Tensor:
        """Projections vt [B, H, T, D] of x [B, T, C], for `combine`."""
        return split_heads(self.proj(x), self.num_heads)

    def combine(self, now: Tensor, following: Tensor) -> Tensor:
        """Values [B, H, T, D] of the projections of tokens and of those that follow them."""
        mix = self.mix.to(now.dtype)[:, None, None]
        mixed = now + mix * following if self.look_ahead == "sum" else mix * now + (1 - mix) * following
        return unit(mixed, self.eps) * (GAIN * self.scale).exp().to(now.dtype)[:, None, None]
