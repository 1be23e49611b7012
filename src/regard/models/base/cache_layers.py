"""Layers of a transformers `Cache` that hold states in the place of pairs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from ...checks import ArgumentError
from ...recurrent.states import State


class StateCacheLayer(CacheLayerMixin):
    """A layer of a cache that holds states (`regard.recurrent.states.State`) in the place of pairs. The model's layer
    reads and replaces them; nothing changes one in place. What was seen cannot be taken out again: decoding that takes
    tokens back (assisted, prompt lookup) is refused before it begins.

    Attributes:
        held: the names of the attributes with states, each None before the first token; the first one counts tokens.
        positional: those of them that hold keys turned by their positions: they cannot go on in a text whose positions
            begin anew.
        update_refusal, no_way_back: what is said to those who ask for what cannot be done.
    """

    is_sliding = False
    supports_early_init = False
    held: ClassVar[tuple[str, ...]]
    positional: ClassVar[tuple[str, ...]] = ()
    update_refusal: ClassVar[str]
    no_way_back: ClassVar[str]

    def __init__(self) -> None:
        super().__init__()
        for name in self.held:
            setattr(self, name, None)
        self.device: torch.device | None = None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to prepare: the first tokens make the states."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Refused: there are no pairs to give back.

        Raises:
            ArgumentError: always.
        """
        raise ArgumentError(self.update_refusal)

    def get_seq_length(self) -> int:
        """Tokens seen, padding included."""
        first = getattr(self, self.held[0])
        return 0 if first is None else first.tokens

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(columns of the mask, the first of them): all tokens so far, since padding among them is masked."""
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        """-1: there is none."""
        return -1

    @property
    def bytes(self) -> int:
        """The memory of the states."""
        return sum(state.bytes for name in self.held if (state := getattr(self, name)) is not None)

    def reset(self) -> None:
        """Forget every token."""
        for name in self.held:
            setattr(self, name, None)

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

        def leave(x: Tensor) -> Tensor:
            self.device = x.device
            return x.to("cpu", non_blocking=True)

        self._replace(lambda state: state.map(leave))

    def prefetch(self) -> None:
        """Move the states back to where they came from."""
        if self.device is not None:
            self._replace(lambda state: state.map(lambda x: x.to(self.device, non_blocking=True)))

    def crop(self, tokens_to_remove: int) -> None:
        """Nothing for 0.

        Raises:
            ArgumentError: tokens are to be taken back.
        """
        if tokens_to_remove and self.get_seq_length():
            raise ArgumentError(self.no_way_back)

    def activate_past_recording(self) -> None:
        """Refused: transformers announces by this that it will crop.

        Raises:
            ArgumentError: always.
        """
        raise ArgumentError(self.no_way_back)

    def _replace(self, fn: Callable[[State], State]) -> None:
        for name in self.held:
            state = getattr(self, name)
            if state is not None:
                setattr(self, name, fn(state))
