"""The public names of `import regard`, all loaded when the first of them is used."""

from typing import Any

from .grammar import Spec, bandwidths, kernels, presets, presets_registry, similarities, solvers
from .memory.associative import AssociativeMemory, energies
from .memory.fast_weight_rules import step_rules
from .memory.fast_weights import FastWeightState, WriteRule, fast_weight_memory
from .memory.product_key import slot_scores
from .memory.stores.slot_values import slot_values
from .nn.attention.ridge import ridges
from .nn.attention.temperature import temperatures
from .nn.feed_forward import feed_forwards
from .nn.memories import memory_layers
from .pairwise.attention import attention, explain
from .pairwise.diagnostics import Diagnostics
from .pairwise.dispatch import implementations_registry
from .pairwise.local_linear_attention import local_linear_attention
from .pairwise.normalisers import entmax, normrelu, relumax, sparsemax, topk_softmax, topk_uniform
from .pairwise.varlen import segment_ids, varlen_attention
from .recipes import recipes
from .recurrent.delta import DeltaState, delta_rule
from .recurrent.interpolated import interpolated_attention
from .recurrent.linear import LinearState, linear_attention
from .recurrent.mesa import MesaState, mesa_attention
from .recurrent.trends import trends
from .registry import Registry

__all__ = [
    "AssociativeMemory", "DeltaState", "Diagnostics", "FastWeightState", "LinearState", "MesaState", "Spec",
    "WriteRule", "attention", "delta_rule", "entmax", "explain", "fast_weight_memory", "interpolated_attention",
    "linear_attention", "local_linear_attention", "mesa_attention", "normrelu", "presets", "registries", "relumax",
    "segment_ids", "sparsemax", "topk_softmax", "topk_uniform", "varlen_attention",
]  # fmt: skip


_LOADED: dict[str, Registry[Any]] = {
    "preset": presets_registry,
    "kernel": kernels,
    "bandwidth": bandwidths,
    "similarity": similarities,
    "solver": solvers,
    "trend": trends,
    "temperature": temperatures,
    "ridge": ridges,
    "feed-forward": feed_forwards,
    "memory": memory_layers,
    "slot-score": slot_scores,
    "step-rule": step_rules,
    "slot-values": slot_values,
    "impl": implementations_registry,
    "energy": energies,
}
for _registry in _LOADED.values():  # now: entry points cannot be searched while a graph is compiled
    _registry.names()


def registries() -> dict[str, Registry[Any]]:
    """Return every registry by the kind of its objects."""
    from .tasks import tasks  # like recipes, not needed by a call

    return {**_LOADED, "recipe": recipes, "task": tasks}
