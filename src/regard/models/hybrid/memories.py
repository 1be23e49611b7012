"""Functions on the memories of a model: freeze, flush, carry over, reset, save and restore.

The memories are layers (`regard.nn.memory_layers`); their states are in the model's cache.
"""

import copy
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from transformers.cache_utils import Cache

from ...checks import require
from ...nn.hooks import temporarily
from ...nn.memories import MemoryLayer
from ..base.base_config import RegardConfig
from ..base.cache_layers import StateCacheLayer
from ..base.catalogue import model_of
from .cache import MemoryCacheLayer
from .token_mixers import TokenMixer


def memory_modules(model: nn.Module) -> dict[int, MemoryLayer]:
    """Return the memories of a hybrid model that are written at test time, by layer."""
    layers = enumerate(getattr(getattr(model, "model", model), "layers", ()))
    return {depth: m for depth, layer in layers if (m := getattr(layer, "memory", None)) is not None and m.remembers}


def frozen_memory(model: nn.Module) -> AbstractContextManager[None]:
    """Read memories and fast weights in this context without writing them; states stay the same bit for bit."""
    return _with(model, frozen=True)


def chunk_size(model: nn.Module, tokens: int) -> AbstractContextManager[None]:
    """Write memories and fast weights after every `tokens` tokens in this context. With a size that a memory cannot
    have, the next forward pass raises an ArgumentError."""
    return _with(model, chunk_size=tokens)


def _with(model: nn.Module, **values: Any) -> AbstractContextManager[None]:
    """Set attributes of the modules that are written in chunks: memories, and token mixers with fast weights."""
    written = (module for module in model.modules() if hasattr(module, "frozen") and hasattr(module, "chunk_size"))
    return temporarily(*written, **values)


def flush_memory(model: nn.Module, cache: Cache) -> None:
    """Write the tokens that wait in `cache` into memories and fast weights, as if the chunk ended here, but for the
    last, whose target is unknown."""
    modules = memory_modules(model)
    for layer in _memory_layers(cache):
        if layer.memory is not None:
            layer.memory = modules[layer.depth].flush(layer.memory)
    mixers = [decoder.self_attn for decoder in getattr(model, "model", model).layers]
    for mixer, layer in zip(mixers, cache.layers, strict=False):  # the layers of memories follow those of the mixers
        if isinstance(mixer, TokenMixer):
            mixer.write_waiting(layer)


def keep_memory(model: nn.Module, cache: Cache | None, *, memory: bool = True, recurrent: bool = False) -> Cache:
    """Return a new cache with some states of `cache`, which is not changed, for a text whose positions begin at 0.
    Without a cache (None), nothing was read yet, and the new one is empty.

    Args:
        memory: keep the states of memories.
        recurrent: keep the states of recurrent mixers: of Gated DeltaNet, which has no positions, and the fast weights
            of LaCT, which are then read at positions other than those at which they were learned. Windows, keys and
            values, and sums are never kept: their keys would have later positions than the new text.
    """
    fresh = getattr(model, "model", model).new_cache()
    if cache is None:
        return fresh
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
    """Reset the memories in `cache`; the other states stay."""
    for layer in _memory_layers(cache):
        layer.memory = None


def memory_states(cache: Cache) -> dict[int, Any]:
    """Return the states of the memories by layer, None before the first token; no copies, as states never change."""
    return {layer.depth: layer.memory for layer in _memory_layers(cache)}


def with_memory(model: nn.Module, cache: Cache | None, states: Mapping[int, Any]) -> Cache:
    """Return a cache with the memory states of a snapshot (`memory_states`); `cache` provides the other layers, which
    both caches then share (None: empty ones). Raises ArgumentError if the snapshot has memories at other layers."""
    fresh = getattr(model, "model", model).new_cache()
    known = [layer.depth for layer in _memory_layers(fresh)]
    layers = f"layers {sorted(states)}, this model has them at {sorted(known)}; take it from a cache of this model."
    require(sorted(states) == sorted(known), "with_memory", f"the snapshot is of memories at {layers}")
    if cache is not None:
        shared = [copy.copy(layer) if isinstance(layer, MemoryCacheLayer) else layer for layer in cache.layers]
        fresh = Cache(layers=shared)
    for layer in _memory_layers(fresh):
        layer.memory = states[layer.depth]
    return fresh


def count_fast_weights(config: RegardConfig) -> int:
    """Return how many numbers of a model of `config` are written at test time; allocates no memory."""
    with torch.device("meta"):
        model = model_of(config)(copy.deepcopy(config))
    return sum(module.fast_numbers() for module in model.modules() if isinstance(module, MemoryLayer))


def _memory_layers(cache: Cache) -> list[MemoryCacheLayer]:
    return [layer for layer in cache.layers if isinstance(layer, MemoryCacheLayer)]
