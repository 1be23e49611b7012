"""What one does with the memories of a model, whichever they are: freeze, flush, carry, reset, take out and put in.

The memories themselves are layers (`regard.nn.memory_layers`); what they hold of a stream is in the model's cache.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from transformers.cache_utils import Cache

from ...checks import ArgumentError
from ...nn.memories import MemoryLayer
from ..base.base_config import RegardConfig
from ..base.cache_layers import StateCacheLayer
from ..base.catalogue import model_of
from .cache import MemoryCacheLayer
from .token_mixers import TokenMixer

if TYPE_CHECKING:
    from torch import nn


def memory_modules(model: nn.Module) -> dict[int, MemoryLayer]:
    """The memories of a hybrid model that are written at test time, by the depth at which they stand."""
    layers = enumerate(getattr(getattr(model, "model", model), "layers", ()))
    return {depth: m for depth, layer in layers if (m := getattr(layer, "memory", None)) is not None and m.remembers}


def _written(model: nn.Module) -> list[nn.Module]:
    """All that is written in chunks: memories, and mixers with fast weights."""
    return [m for m in model.modules() if hasattr(m, "frozen") and hasattr(m, "chunk_size")]


@contextmanager
def frozen_memory(model: nn.Module) -> Iterator[None]:
    """Inside, memories and the fast weights of mixers are read and not written: the states of memories stay as they are
    to the bit."""
    yield from _with(model, "frozen", True)


@contextmanager
def chunk_size(model: nn.Module, tokens: int) -> Iterator[None]:
    """Inside, memories and the fast weights of mixers are written after every `tokens` tokens.

    Raises:
        ArgumentError: a memory cannot be written so often.
    """
    yield from _with(model, "chunk_size", tokens)


def _with(model: nn.Module, name: str, value: Any) -> Iterator[None]:
    modules = _written(model)
    before = [getattr(module, name) for module in modules]
    try:
        for module in modules:
            setattr(module, name, value)
        yield
    finally:
        for module, old in zip(modules, before, strict=True):
            setattr(module, name, old)


def flush_memory(model: nn.Module, cache: Cache) -> None:
    """Write what waits in `cache`, in memories and in fast weights of mixers, as if the chunk ended here: every pair
    whose target is there. The last token, whose target is not, is no longer waited for."""
    modules = memory_modules(model)
    for layer in _memory_layers(cache):
        if layer.memory is not None:
            layer.memory = modules[layer.depth].flush(layer.memory)
    mixers = [decoder.self_attn for decoder in getattr(model, "model", model).layers]
    for mixer, layer in zip(mixers, cache.layers, strict=False):  # memories stand behind the mixers
        if isinstance(mixer, TokenMixer):
            mixer.write_waiting(layer)


def keep_memory(model: nn.Module, cache: Cache, *, memory: bool = True, recurrent: bool = False) -> Cache:
    """A new cache with a part of what `cache` holds, for a text whose positions begin at 0; `cache` stays as it is.

    Args:
        model: whose cache it is.
        memory: the states of memories go on.
        recurrent: the states of recurrent mixers go on: of Gated DeltaNet, which knows no positions, and the fast
            weights of LaCT, which were learned at the positions of the text before and are read at those of the new
            one; not windows, pairs, and sums, whose keys would stand in the new text's future.
    """
    fresh = getattr(model, "model", model).new_cache()
    for old, new in zip(cache.layers, fresh.layers, strict=True):
        if not isinstance(new, StateCacheLayer) or not (memory if isinstance(new, MemoryCacheLayer) else recurrent):
            continue
        for name in new.held:
            state = getattr(old, name)
            if state is not None and name not in new.positional:
                # A cache counts by its first layer; memories count their own stream.
                setattr(new, name, state if isinstance(new, MemoryCacheLayer) else replace(state, tokens=0))
    return fresh


def reset_memory(cache: Cache) -> None:
    """Forget, in `cache`, what the memories hold; the rest stays."""
    for layer in _memory_layers(cache):
        layer.memory = None


def memory_states(cache: Cache) -> dict[int, Any]:
    """A snapshot: the states by depth, None where nothing was read. They are never changed in place, so that this costs
    nothing."""
    return {layer.depth: layer.memory for layer in _memory_layers(cache)}


def with_memory(model: nn.Module, cache: Cache | None, states: Mapping[int, Any]) -> Cache:
    """A cache with the memories' states of a snapshot.

    Args:
        model: whose cache it is.
        cache: one whose other layers go on (they are shared with the new one); None for an empty one.
        states: of `memory_states`.

    Raises:
        ArgumentError: the snapshot is of memories at other depths.
    """
    fresh = getattr(model, "model", model).new_cache()
    known = [layer.depth for layer in _memory_layers(fresh)]
    if sorted(states) != sorted(known):
        raise ArgumentError(
            f"with_memory: the snapshot is of memories at layers {sorted(states)}, this model has them at "
            f"{sorted(known)}; take it from a cache of this model."
        )
    if cache is not None:
        shared = [copy.copy(layer) if isinstance(layer, MemoryCacheLayer) else layer for layer in cache.layers]
        fresh = Cache(layers=shared)
    for layer in _memory_layers(fresh):
        layer.memory = states[layer.depth]
    return fresh


def count_fast_weights(config: RegardConfig) -> int:
    """How many numbers of a model of `config` are written at test time. Nothing is allocated."""
    with torch.device("meta"):
        model = model_of(config)(copy.deepcopy(config))
    return sum(module.fast_numbers() for module in model.modules() if isinstance(module, MemoryLayer))


def _memory_layers(cache: Cache) -> list[MemoryCacheLayer]:
    return [layer for layer in cache.layers if isinstance(layer, MemoryCacheLayer)]
