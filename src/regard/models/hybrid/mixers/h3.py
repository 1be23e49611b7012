"""H3 (Fu et al. 2023, arXiv:2212.14052): products of queries with a diagonal state space model of keys times values."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import initialization as init

from ....recurrent.states import State
from ..token_mixers import LongConvolution, long_convolution, token_mixers

MODES = 16  # decaying sums of each channel
RATES = (1e-3, 1.0)  # the least and the largest rate of decay per token at the beginning


@dataclass(frozen=True)
class DiagonalState(State):
    """Decaying sums of all inputs so far, [B, H, D, modes]."""

    sums: Tensor


@token_mixers.register("h3")
class H3(LongConvolution):
    """q * SSM(k * v), channel by channel, with real decay rates, after a short convolution.

    The paper's state space model has complex rates. Cost: O(T^2) time and O(T) memory a channel and mode.
    """

    def make(self, hidden_size: int) -> None:
        sizes = (self.num_heads, self.head_dim)
        self.log_rate = nn.Parameter(torch.zeros(*sizes, MODES))
        self.weight = nn.Parameter(torch.zeros(*sizes, MODES))
        self.skip = nn.Parameter(torch.ones(sizes))

    def init_weights(self) -> None:
        """Spread the rates of each channel evenly in their logarithm, and draw the weights of its sums."""
        low, high = (torch.tensor(rate).log().item() for rate in RATES)
        init.copy_(self.log_rate, torch.linspace(low, high, MODES).expand_as(self.log_rate))
        init.normal_(self.weight, std=MODES**-0.5)
        init.ones_(self.skip)

    def convolve(self, inputs: Tensor, real: Tensor | None, state: Any) -> tuple[Tensor, State]:
        tokens, wide = inputs.shape[-1], inputs.dtype
        rate, weight = self.log_rate.to(wide).exp(), self.weight.to(wide)
        lags = torch.arange(tokens + 1, device=inputs.device)
        fading = torch.exp(-rate[..., None] * lags)  # [H, D, modes, T + 1]
        out = long_convolution(inputs, (weight[..., None] * fading[..., :-1]).sum(-2))
        # real tokens stand first, so that the age of token j in the end is the number of real ones after it
        count = inputs.new_full((len(inputs),), tokens) if real is None else real.sum(-1).to(wide)
        age = (count[:, None] - 1 - lags[:-1]).clamp_min(0)
        sums = torch.einsum("bhdt,bhdmt->bhdm", inputs, torch.exp(-rate[..., None] * age[:, None, None, None]))
        if state is not None:
            out = out + torch.einsum("hdm,hdmt,bhdm->bhdt", weight, fading[..., 1:], state.sums)
            sums = sums + state.sums * torch.exp(-rate * count[:, None, None, None])
        return out, DiagonalState(sums, tokens=tokens + (0 if state is None else state.tokens))
