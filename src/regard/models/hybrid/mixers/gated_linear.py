"""Gated linear attention (GLA, Yang et al. 2023, arXiv:2312.06635): every channel of the keys forgets at a rate of its
own, which depends on the token."""

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ....recurrent.states import State
from ..token_mixers import Heads, RecurrentMixer, decaying_attention, token_mixers

RANK = 16  # of the projection that gives the rates
SHARE = 16.0  # which root of the sigmoid is taken, so that rates are near one at first


@token_mixers.register("gla")
class GatedLinearAttention(RecurrentMixer):
    """Linear attention with a decay sigmoid(w)^(1/16) for each token and channel of the keys."""

    defaults: ClassVar[Mapping[str, Any]] = {"conv_size": 1}

    def make(self, hidden_size: int) -> None:
        inner = self.num_heads * self.head_dim
        self.decay = nn.Sequential(nn.Linear(hidden_size, RANK, bias=False), nn.Linear(RANK, inner))

    def recall(self, heads: Heads) -> tuple[Tensor, State]:
        decay = self.decay(heads.hidden).unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2).contiguous()
        decay = F.logsigmoid(decay.to(torch.promote_types(decay.dtype, torch.float32))) / SHARE
        return decaying_attention(heads, decay)
