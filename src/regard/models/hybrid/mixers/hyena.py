"""Hyena (Poli et al. 2023, arXiv:2302.10866): products of queries with a long convolution of keys times values."""

from dataclasses import dataclass
from math import pi
from typing import Any

import torch
from torch import Tensor, nn
from transformers import initialization as init

from ....nn.arguments import plain_linear
from ....recurrent.states import State
from ..token_mixers import LongConvolution, long_convolution, token_mixers

WAVES, WIDTH = 8, 32
"""Frequencies of a position, and hidden units of the network that makes filters of them."""
LONGEST = 4096  # positions over which the slowest frequency makes one turn


@dataclass(frozen=True)
class Inputs(State):
    """All inputs so far, keys times values [B, H, D, N], 0 at padding: a long convolution has no shorter state."""

    products: Tensor


@token_mixers.register("hyena")
class Hyena(LongConvolution):
    """q * (h conv k v), channel by channel; a small network computes the filter h from the lag, with a decay.

    This is the paper's operator of order two. Cost: O(N^2) time and O(N) memory a channel, also for one more token.
    """

    def make(self, hidden_size: int) -> None:
        self.filter_in = nn.Linear(2 * WAVES + 1, WIDTH)
        self.filter_out = nn.Linear(WIDTH, self.num_heads * self.head_dim, bias=False)
        self.log_rate = nn.Parameter(torch.zeros(self.num_heads, self.head_dim))
        self.skip = nn.Parameter(torch.ones(self.num_heads, self.head_dim))

    def init_weights(self) -> None:
        """Spread how fast filters fade over the channels, and draw the network so that its waves differ."""
        fast, slow = 0.3, 3e-3
        spread = torch.linspace(torch.tensor(fast).log().item(), torch.tensor(slow).log().item(), self.log_rate.numel())
        init.copy_(self.log_rate, spread.view_as(self.log_rate))
        init.normal_(self.filter_in.weight, std=1.0)
        init.normal_(self.filter_out.weight, std=WIDTH**-0.5)
        init.ones_(self.skip)

    def filters(self, length: int) -> Tensor:
        """Return the filter of each channel at the lags 0 to `length` - 1, [H, D, length]."""
        wide = torch.promote_types(self.log_rate.dtype, torch.float32)
        lag = torch.arange(length, device=self.log_rate.device, dtype=wide)
        turns = lag[:, None] * 2.0 ** torch.arange(WAVES, device=lag.device) * (2 * pi / LONGEST)
        features = torch.cat([lag[:, None] / LONGEST, turns.sin(), turns.cos()], -1)
        first, shift = plain_linear("Hyena: filter_in", self.filter_in, lag.device)
        last, _ = plain_linear("Hyena: filter_out", self.filter_out, lag.device)
        assert shift is not None
        hidden = nn.functional.linear(features, first.to(wide), shift.to(wide)).sin()
        made = nn.functional.linear(hidden, last.to(wide)).T.unflatten(0, self.log_rate.shape)
        return made * torch.exp(-self.log_rate.to(wide).exp()[..., None] * lag)

    def convolve(self, inputs: Tensor, real: Tensor | None, state: Any) -> tuple[Tensor, State]:
        every = inputs if state is None else torch.cat([state.products.to(inputs.dtype), inputs], -1)
        n = every.shape[-1]
        out = long_convolution(every, self.filters(n))[..., -inputs.shape[-1] :]
        if real is not None:  # padding moves in front of the real tokens, where it keeps none of them from the next
            at = (torch.arange(n, device=every.device) - (~real).sum(-1)[:, None]) % n
            every = every.gather(-1, at[:, None, None].expand_as(every))
        return out, Inputs(every, tokens=n)
