"""The state space model of Mamba-2 (Dao and Gu 2024, arXiv:2405.21060) as linear attention with a decay per token."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import initialization as init

from ....recurrent.states import State
from ..token_mixers import Heads, RecurrentMixer, decaying_attention, gates, token_mixers

STEPS = (1e-3, 1e-1)  # the least and the largest step at the beginning


@token_mixers.register("mamba2")
class Mamba2(RecurrentMixer):
    """Linear attention with a step d for each token: the state is multiplied by exp(-a d), and d v k^T is added.

    C and B of the paper are queries and keys, one of each a head. The paper's skip of the values is left out.
    """

    def make(self, hidden_size: int) -> None:
        self.step = nn.Linear(hidden_size, self.num_heads, bias=False)
        self.step_bias = nn.Parameter(torch.zeros(self.num_heads))
        self.log_rate = nn.Parameter(torch.zeros(self.num_heads))

    def init_weights(self) -> None:
        """Draw rates from 1 to 16, and steps whose logarithm is uniform, as Mamba-2 does."""
        low, high = (torch.tensor(step).log().item() for step in STEPS)
        steps = torch.empty_like(self.step_bias, device="cpu").uniform_(low, high).exp()
        init.copy_(self.step_bias, steps + torch.log(-torch.expm1(-steps)))  # whose softplus is the step
        init.copy_(self.log_rate, torch.empty_like(self.log_rate, device="cpu").uniform_(1, 16).log())

    def recall(self, heads: Heads) -> tuple[Tensor, State]:
        step = F.softplus(gates(self.step(heads.hidden)) + self.step_bias[:, None])
        decay = -self.log_rate.to(step.dtype).exp()[:, None] * step
        value = heads.value * step[..., None].to(heads.value.dtype)
        return decaying_attention(heads._replace(value=value), decay)
