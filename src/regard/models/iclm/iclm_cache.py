"""What an ICLM remembers between calls.

Covariate layers keep keys and values of every slot. An f layer keeps one key a pair and one that waits for its value;
the values, embeddings of the tokens, are the same for all layers and stand in one shared layer (variant "wv" projects
them, so that each layer keeps its own). With several gradient steps the shared layer holds E(w|f) of every pair and
later step too. All of it can be taken back, so that assisted decoding works.

Shapes: B batch, H heads, n pairs so far, D channels of what is kept.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicLayer

from ...checks import ArgumentError, require


class ICLMCache(Cache):
    """The layers of an ICLM: covariate blocks, then f blocks, then the values that all f blocks share.

    Args:
        covariate_layers: how many covariate blocks.
        function_layers: how many f blocks.
        start: whether a start slot stands before the first token.
    """

    def __init__(self, covariate_layers: int, function_layers: int, start: bool) -> None:
        slots: list[Any] = [SlotLayer(start) for _ in range(covariate_layers)]
        super().__init__(layers=slots + [PairLayer(start) for _ in range(function_layers + 1)])
        self.covariate_layers, self.function_layers = covariate_layers, function_layers

    def function_layer(self, layer: int) -> PairLayer:
        """The keys of f block `layer`."""
        return self.layers[self.covariate_layers + layer]

    @property
    def shared(self) -> PairLayer:
        """What all f blocks share."""
        return self.layers[-1]

    def require_fits(self, call: str, batch: int, covariate_layers: int, function_layers: int) -> None:
        """The cache belongs to a model of this many blocks and to this many sequences.

        Raises:
            ArgumentError: it does not.
        """
        require(
            (self.covariate_layers, self.function_layers) == (covariate_layers, function_layers),
            call,
            f"past_key_values is for {self.covariate_layers} covariate and {self.function_layers} f blocks, the model "
            f"has {covariate_layers} and {function_layers}; use model.model.new_cache().",
        )
        held = next((x.shape[0] for x in self.shared.grown.values()), batch)
        require(
            held == batch,
            call,
            f"past_key_values is of {held} sequences and the tokens of {batch}; give every batch a cache of its own.",
        )


class SlotLayer(DynamicLayer):
    """Keys and values of a covariate block, of all slots; counts tokens."""

    def __init__(self, start: bool) -> None:
        super().__init__()
        self.start = int(start)

    def get_seq_length(self) -> int:
        """Tokens seen, padding included."""
        return max(super().get_seq_length() - self.start, 0)

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last tokens, given as a negative number; all of them and the start slot, too, where none is left.

        Raises:
            ArgumentError: a positive number.
        """
        check_crop(tokens_to_remove)
        if self.is_initialized and -tokens_to_remove >= self.get_seq_length():
            self.reset()
        else:
            super().crop(tokens_to_remove)


class PairLayer(CacheLayerMixin):
    """Tensors [B, H, n, D] that grow by pairs, some of which wait for their value.

    Attributes:
        grown: by name, what every pair has.
        waiting: by name, what the next pair will have, [B, H, 1, D].
    """

    is_sliding = False
    is_croppable = True
    supports_early_init = False

    def __init__(self, start: bool) -> None:
        super().__init__()
        self.start = int(start)
        self.grown: dict[str, Tensor] = {}
        self.waiting: dict[str, Tensor] = {}
        self.device: torch.device | None = None

    def pending(self, name: str) -> Tensor | None:
        """What waits for the next value, or None before the first row."""
        return self.waiting.get(name)

    def extend(self, pending: dict[str, Tensor], **new: Tensor) -> dict[str, Tensor]:
        """Append pairs; all of them so far, by name. `pending` then waits."""
        self.grown = {
            name: torch.cat((self.grown[name], x), -2) if name in self.grown else x for name, x in new.items()
        }
        self.waiting = dict(pending)
        self.is_initialized, self.device = True, next(iter(new.values())).device
        return self.grown

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to prepare: the first tokens make the tensors."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Refused: keys and values do not come at the same time.

        Raises:
            ArgumentError: always.
        """
        raise ArgumentError("PairLayer.update: keys wait for their values here; use extend.")

    def get_seq_length(self) -> int:
        """Tokens seen, padding included: one a pair, and the one that has the first slot where that is a token."""
        if not self.grown:
            return 0
        return next(iter(self.grown.values())).shape[-2] + 1 - self.start

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(columns of the mask, the first of them): all tokens so far."""
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        """-1: there is none."""
        return -1

    @property
    def bytes(self) -> int:
        """The memory of the tensors."""
        return sum(x.nbytes for kept in (self.grown, self.waiting) for x in kept.values())

    def reset(self) -> None:
        """Forget every token."""
        self.grown, self.waiting, self.is_initialized = {}, {}, False

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last tokens, given as a negative number. What the first of them was paired with waits again.

        Raises:
            ArgumentError: a positive number.
        """
        check_crop(tokens_to_remove)
        removed = -tokens_to_remove
        if removed == 0 or not self.grown:
            return
        if removed >= self.get_seq_length():
            self.reset()
            return
        kept = self.get_seq_length() - 1 + self.start - removed
        self.waiting = {name: self.grown[name][..., kept : kept + 1, :] for name in self.waiting}
        self.grown = {name: x[..., :kept, :] for name, x in self.grown.items()}

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row b becomes what row `beam_idx[b]` was."""
        self._map(lambda x: x.index_select(0, beam_idx.to(x.device)))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Only the rows `indices`, numbers or flags."""
        self._map(lambda x: x[indices.to(x.device)])

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every row `repeats` times in a row."""
        self._map(lambda x: x.repeat_interleave(repeats, dim=0))

    def offload(self) -> None:
        """Move the tensors to main memory."""
        self._map(lambda x: x.to("cpu", non_blocking=True))

    def prefetch(self) -> None:
        """Move the tensors back to where they came from."""
        if self.device is not None:
            self._map(lambda x: x.to(self.device, non_blocking=True))

    def _map(self, fn: Callable[[Tensor], Tensor]) -> None:
        self.grown = {name: fn(x) for name, x in self.grown.items()}
        self.waiting = {name: fn(x) for name, x in self.waiting.items()}


def check_crop(tokens_to_remove: int) -> None:
    """How many tokens to forget is given as a number that is not positive.

    Raises:
        ArgumentError: it is.
    """
    if tokens_to_remove > 0:
        raise ArgumentError(
            f"ICLMCache.crop: got {tokens_to_remove}, expected a number <= 0: minus the tokens to be forgotten."
        )
