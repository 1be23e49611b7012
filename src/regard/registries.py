"""Every registry by the name of what it holds, for whoever iterates them (tests, command line, docs)."""

from __future__ import annotations

from typing import Any

from .estimators.fast_weight_rules import step_rules
from .estimators.product_key import slot_scores
from .estimators.slot_values import slot_values
from .experiments.recipes import recipes
from .grammar import bandwidths, kernels, presets_registry, similarities, solvers, trends
from .memory import energies
from .nn.feed_forward import feed_forwards
from .nn.memories import memory_layers
from .nn.ridge import ridges
from .nn.temperature import temperatures
from .ops import implementations_registry
from .registry import Registry
from .tasks import tasks


def registries() -> dict[str, Registry[Any]]:
    """Name of the axis to its registry."""
    return {
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
        "recipe": recipes,
        "task": tasks,
    }
