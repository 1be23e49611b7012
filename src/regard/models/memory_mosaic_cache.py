"""What a Memory Mosaic remembers between calls, in transformers' `Cache`.

Per block: the leaky sums of both memories, the key and the projected value of the last token, which wait for the next
one, and the pairs of the contextual memory. Pairs grow with the text, the rest does not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from ..checks import ArgumentError
from ..estimators.leaky import LeakyState
from ..estimators.states import State
from ..nn.contextual_memory import ContextualState

_NO_WAY_BACK = (
    "MemoryMosaicCacheLayer: tokens cannot be taken back from leaky sums, as assisted and prompt-lookup decoding do; "
    "decode without an assistant."
)


class MemoryMosaicCacheLayer(CacheLayerMixin):
    """The states of one block's memories; the block reads and replaces them, nothing changes one in place.

    Attributes:
        contextual: None before the first token.
        persistent: None before the first token, and where keys are shared.
    """

    is_sliding = False
    supports_early_init = False

    def __init__(self) -> None:
        super().__init__()
        self.contextual: ContextualState | None = None
        self.persistent: LeakyState | None = None
        self.device: torch.device | None = None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to prepare: the first tokens make the states."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Refused: pairs are made of two tokens each.

        Raises:
            ArgumentError: always.
        """
        raise ArgumentError("MemoryMosaicCacheLayer: holds states that the blocks of a Memory Mosaic fill themselves.")

    def get_seq_length(self) -> int:
        """Tokens seen, padding included."""
        return 0 if self.contextual is None else self.contextual.tokens

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(columns of the mask, the first of them): all tokens so far."""
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        """-1: there is none."""
        return -1

    @property
    def bytes(self) -> int:
        """The memory of the states."""
        return sum(state.bytes for state in (self.contextual, self.persistent) if state is not None)

    def reset(self) -> None:
        """Forget every token."""
        self.contextual, self.persistent = None, None

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row b becomes what row `beam_idx[b]` was."""
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Only the rows `indices`, numbers or flags."""
        self._replace(lambda state: state.select(indices))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every row `repeats` times in a row."""
        self._replace(lambda state: state.repeat(repeats))

    def offload(self) -> None:
        """Move the states to main memory."""
        if self.contextual is not None:
            self.device = self.contextual.sums.device
        self._replace(lambda state: state.map(lambda x: x.to("cpu", non_blocking=True)))

    def prefetch(self) -> None:
        """Move the states back to where they came from."""
        if self.device is not None:
            self._replace(lambda state: state.map(lambda x: x.to(self.device, non_blocking=True)))

    def crop(self, tokens_to_remove: int) -> None:
        """Nothing for 0.

        Raises:
            ArgumentError: tokens are to be taken back.
        """
        if tokens_to_remove and self.contextual is not None:
            raise ArgumentError(_NO_WAY_BACK)

    def activate_past_recording(self) -> None:
        """Refused: transformers announces by this that it will crop.

        Raises:
            ArgumentError: always.
        """
        raise ArgumentError(_NO_WAY_BACK)

    def _replace(self, fn: Callable[[Any], State]) -> None:
        for name in ("contextual", "persistent"):
            state = getattr(self, name)
            if state is not None:
                setattr(self, name, fn(state))


def memory_mosaic_cache(blocks: int) -> Cache:
    """An empty cache for a Memory Mosaic of so many blocks."""
    return Cache(layers=[MemoryMosaicCacheLayer() for _ in range(blocks)])
