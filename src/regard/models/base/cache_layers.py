"""Layers of a transformers `Cache` that a model's own layer fills."""

from abc import abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from ...checks import ArgumentError
from ...nn.arguments import layer_of
from ...recurrent.states import State


class OwnCacheLayer(CacheLayerMixin):
    """A cache layer that the model's layer reads and writes itself; `update` is refused with `update_refusal`."""

    is_sliding = False
    supports_early_init = False
    update_refusal: ClassVar[str] = "this layer holds states, which the model updates itself."

    def __init__(self) -> None:
        super().__init__()
        self.device: torch.device | None = None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Do nothing: the first tokens create the tensors."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Raise `ArgumentError`: the layer has no keys and values to return."""
        raise ArgumentError(f"{type(self).__name__}.update: {self.update_refusal}")

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the number of mask columns, one per token so far, and the first column, 0."""
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        """Return -1: the length is not limited."""
        return -1

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        self._map(lambda x: x[indices.to(x.device)])

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._map(lambda x: x.repeat_interleave(repeats, dim=0))

    def offload(self) -> None:
        def leave(x: Tensor) -> Tensor:
            self.device = x.device
            return x.to("cpu", non_blocking=True)

        self._map(leave)

    def prefetch(self) -> None:
        if self.device is not None:
            self._map(lambda x: x.to(self.device, non_blocking=True))

    @abstractmethod
    def _map(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Apply `fn` to every tensor."""


class StateCacheLayer(OwnCacheLayer):
    """A cache layer that holds states (`regard.recurrent.states.State`) instead of keys and values.

    The model's layer replaces the states and never changes one in place. Tokens cannot be removed from a state, so
    assisted and prompt-lookup decoding are refused before they start.
    """

    held: ClassVar[tuple[str, ...]]  # attributes with states, None before the first token; the first one counts tokens
    positional: ClassVar[tuple[str, ...]] = ()  # those with rotated keys, which cannot continue if positions restart
    no_way_back: ClassVar[str] = (
        "tokens cannot be removed from a state, as assisted and prompt-lookup decoding do; decode without an assistant."
    )

    def __init__(self) -> None:
        super().__init__()
        self.reset()

    def get_seq_length(self) -> int:
        first = getattr(self, self.held[0])
        return 0 if first is None else first.tokens

    @property
    def bytes(self) -> int:
        return sum(state.bytes for name in self.held if (state := getattr(self, name)) is not None)

    def reset(self) -> None:
        for name in self.held:
            setattr(self, name, None)

    def batch_select_indices(self, indices: Tensor) -> None:
        self._replace(lambda state: state.select(indices))

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._replace(lambda state: state.repeat(repeats))

    def crop(self, tokens_to_remove: int) -> None:
        """Do nothing for 0, and raise `ArgumentError` if tokens are to be removed."""
        if tokens_to_remove and self.get_seq_length():
            self.activate_past_recording()

    def activate_past_recording(self) -> None:
        """Raise `ArgumentError`: transformers calls this before it crops."""
        raise ArgumentError(f"{type(self).__name__}.crop: {self.no_way_back}")

    def _map(self, fn: Callable[[Tensor], Tensor]) -> None:
        self._replace(lambda state: state.map(fn))

    def _replace(self, fn: Callable[[State], State]) -> None:
        for name in self.held:
            state = getattr(self, name)
            if state is not None:
                setattr(self, name, fn(state))


def fixed_length(cache: Cache | None) -> int:
    """Return the number of places of a cache that has a fixed number in every layer; 0 if it grows or has windows only.

    Only in such a cache may the number of tokens so far be a tensor, which nothing on the host waits for.
    """
    if cache is None or not cache.is_compileable:
        return 0
    return max([0, *(layer.max_cache_len for layer in cache.layers if not layer.is_sliding)])


def tokens_cached(cache: Cache | None) -> int | Tensor:
    """Return the number of tokens in a cache, padding included: a tensor if every layer counts on a device."""
    if cache is None or not cache.layers:
        return 0
    counts = [layer.get_seq_length() for layer in cache.layers]
    return next((n for n in counts if not isinstance(n, Tensor)), counts[0])


Kind = TypeVar("Kind", bound=StateCacheLayer)


def own_layer(call: str, cache: Cache | None, index: int, kind: type[Kind]) -> Kind | None:
    """Return layer `index` of a cache (None: None); raise `ArgumentError` if it holds no states of this kind."""
    layer = None if cache is None else layer_of(call, cache, index)
    if cache is not None and not isinstance(layer, kind):
        kinds = f"cache is a {type(cache).__name__} without {kind.__name__} at layer {index}"
        raise ArgumentError(f"{call}: {kinds}; leave it out, or take model.model.new_cache().")
    return layer
