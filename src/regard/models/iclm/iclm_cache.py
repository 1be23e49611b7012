"""The cache of an ICLM.

Covariate layers keep keys and values of every slot. An f layer keeps one key per pair and one that waits for its value.
The values, embeddings of the tokens, are the same for all layers and kept in one shared layer (variant "wv" projects
them, so that each layer keeps its own). With several gradient steps the shared layer also keeps E(w|f) of every pair
and later step. All layers can be cropped, so that assisted decoding works.

Shapes: B batch, H heads, n pairs so far, D channels.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

from ...checks import require
from ..base.cache_layers import OwnCacheLayer


class ICLMCache(Cache):
    """Layers for the covariate blocks, the f blocks and the values that all f blocks share, in this order; `start` says
    whether there is a start slot before the first token."""

    def __init__(self, covariate_layers: int, function_layers: int, start: bool) -> None:
        slots: list[Any] = [SlotLayer(start) for _ in range(covariate_layers)]
        super().__init__(layers=slots + [PairLayer(start) for _ in range(function_layers + 1)])
        self.covariate_layers, self.function_layers = covariate_layers, function_layers

    def function_layer(self, layer: int) -> "PairLayer":
        return self.layers[self.covariate_layers + layer]

    @property
    def shared(self) -> "PairLayer":
        """Return the layer that all f blocks share."""
        return self.layers[-1]


class SlotLayer(DynamicLayer):
    """Keys and values of all slots of a covariate block; its length is counted in tokens."""

    def __init__(self, start: bool) -> None:
        super().__init__()
        self.start = int(start)

    def get_seq_length(self) -> int:
        return max(super().get_seq_length() - self.start, 0)

    def reset(self) -> None:
        """Forget every token; older releases of transformers set keys and values to zero and keep their number."""
        self.keys = self.values = None
        self.is_initialized = False

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last tokens, given as a negative number; and the start slot, if no token is left."""
        check_crop(tokens_to_remove)
        if self.is_initialized and -tokens_to_remove >= self.get_seq_length():
            self.reset()
        else:
            super().crop(tokens_to_remove)


class PairLayer(OwnCacheLayer):
    """Tensors by name, with one entry per pair, and the entries that wait for their value."""

    is_croppable = True
    update_refusal = "keys wait for their values here; use extend."
    grown: dict[str, Tensor]  # [B, H, n, D]
    waiting: dict[str, Tensor]  # [B, H, 1, D]

    def __init__(self, start: bool) -> None:
        super().__init__()
        self.start = int(start)
        self.reset()

    def pending(self, name: str) -> Tensor | None:
        """Return the entry that waits for its value, or None before the first row."""
        return self.waiting.get(name)

    def extend(self, pending: dict[str, Tensor], **new: Tensor) -> dict[str, Tensor]:
        """Append pairs and replace the waiting entries by `pending`; return all pairs so far, by name."""
        old = self.grown
        self.grown = {name: torch.cat((old[name], x), -2) if name in old else x for name, x in new.items()}
        self.waiting = dict(pending)
        self.is_initialized = True
        return self.grown

    def get_seq_length(self) -> int:
        """Return the number of tokens seen, padding included: one per pair, and a first one without a start slot."""
        if not self.grown:
            return 0
        return next(iter(self.grown.values())).shape[-2] + 1 - self.start

    @property
    def bytes(self) -> int:
        return sum(x.nbytes for kept in (self.grown, self.waiting) for x in kept.values())

    def reset(self) -> None:
        self.grown, self.waiting, self.is_initialized = {}, {}, False

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last tokens, given as a negative number; the covariate of the first one removed waits again."""
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

    def _map(self, fn: Callable[[Tensor], Tensor]) -> None:
        self.grown = {name: fn(x) for name, x in self.grown.items()}
        self.waiting = {name: fn(x) for name, x in self.waiting.items()}


def check_crop(tokens_to_remove: int) -> None:
    """Check that the number of tokens to remove is given as a number <= 0."""
    text = f"got {tokens_to_remove}, expected a number <= 0, minus the tokens to remove."
    require(tokens_to_remove <= 0, "ICLMCache.crop", text)
