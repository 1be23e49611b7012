"""MesaNet (von Oswald et al. 2025, arXiv:2506.05233): the best linear model of all pairs so far as a token mixer."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import initialization as init

from ....recurrent.arguments import l2_normalized
from ....recurrent.mesa import mesa_attention
from ....recurrent.states import State
from ..token_mixers import Heads, RecurrentMixer, gates, token_mixers

LEAST_RIDGE = 1e-2


@token_mixers.register("mesa")
class MesaNet(RecurrentMixer):
    """Ridge regression of values on keys of length one, with gates for forgetting and writing, and a learned ridge for
    every channel of every head (`regard.mesa_attention`)."""

    def make(self, hidden_size: int) -> None:
        self.keep = nn.Linear(hidden_size, self.num_heads)
        self.write = nn.Linear(hidden_size, self.num_heads)
        self.ridge = nn.Parameter(torch.zeros(self.num_heads, self.head_dim))

    def init_weights(self) -> None:
        """Initialise the ridges, and the forget gates near 1."""
        init.constant_(self.keep.bias, 4.0)
        init.zeros_(self.ridge)

    def recall(self, heads: Heads) -> tuple[Tensor, State]:
        rates: dict[str, Any] = {
            "ridge": F.softplus(self.ridge.to(torch.promote_types(self.ridge.dtype, torch.float32))) + LEAST_RIDGE,
            "log_decay": F.logsigmoid(gates(self.keep(heads.hidden))),
            "beta": gates(self.write(heads.hidden)).sigmoid(),
        }
        query, key = l2_normalized(heads.query), l2_normalized(heads.key)
        return mesa_attention(query, key, heads.value, **rates, **heads.how)
