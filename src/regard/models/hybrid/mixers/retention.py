"""Retention (RetNet, Sun et al. 2023, arXiv:2307.08621): linear attention whose heads forget at fixed rates."""

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from ....recurrent.states import State
from ..token_mixers import Heads, RecurrentMixer, decaying_attention, token_mixers


@token_mixers.register("retention")
class Retention(RecurrentMixer):
    """Linear attention with the decay factor 1 - 2^(-5 - h) per token in head h.

    The reference rotates queries and keys by their positions; here the decay alone tells positions apart.
    """

    defaults: ClassVar[Mapping[str, Any]] = {"conv_size": 1}

    def recall(self, heads: Heads) -> tuple[Tensor, State]:
        wide = torch.promote_types(heads.query.dtype, torch.float32)
        h = torch.arange(self.num_heads, device=heads.query.device, dtype=wide)
        return decaying_attention(heads, torch.log1p(-(2.0 ** (-5.0 - h))))
