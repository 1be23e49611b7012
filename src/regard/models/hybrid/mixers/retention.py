"""Retention (RetNet, Sun et al. 2023, arXiv:2307.08621): linear attention whose heads forget at fixed rates."""

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor

from ....recurrent.decay import retention_log_decay
from ....recurrent.states import State
from ..token_mixers import Heads, RecurrentMixer, decaying_attention, token_mixers


@token_mixers.register("retention")
class Retention(RecurrentMixer):
    """Linear attention with the decay factor 1 - 2^(-5 - h) per token in head h.

    The reference rotates queries and keys by their positions; here the decay alone tells positions apart.
    """

    defaults: ClassVar[Mapping[str, Any]] = {"conv_size": 1}

    def recall(self, heads: Heads) -> tuple[Tensor, State]:
        return decaying_attention(heads, retention_log_decay(heads.query, self.num_heads))
