"""Which parameters an optimiser is to treat how, in models with memories.

Every step reads a few rows of a memory's table. Weight decay would wear away the rest between two readings, and the
rate that suits matrices, which warms up and falls, is not theirs: Memory Layers at Scale (arXiv:2412.09764) gives
values a fixed rate of 1e-3 and no decay. Fast weights are buffers and appear in no group.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import nn

from ..checks import flag, instance, number
from .memories import MemoryLayer

MEMORY_RATE = 1e-3


class OptimizerGroups(NamedTuple):
    """Groups of parameters, for `torch.optim`; each a dict with "name", "params" and settings.

    Attributes:
        dense: for AdamW or the like: "matrices" (decayed), "vectors" (not) and "memory" (not, with a rate of its own).
        sparse: tables with sparse gradients, for `torch.optim.SparseAdam`; empty where no layer has `sparse_grad`.
    """

    dense: list[dict[str, Any]]
    sparse: list[dict[str, Any]]


def optimizer_groups(
    model: nn.Module,
    *,
    weight_decay: float = 0.1,
    memory_rate: float = MEMORY_RATE,
    memory_keys: bool = True,
) -> OptimizerGroups:
    """All parameters of `model` that learn, each in one group.

    Args:
        weight_decay: of parameters with two or more axes; vectors and memories have none.
        memory_rate: learning rate of what a memory layer itself holds (its keys and values, not its projections). Keep
            schedulers off it: the group has "fixed_rate" True.
        memory_keys: keys are memory too; else matrices.

    Returns:
        The groups, without empty ones.

    Raises:
        ArgumentError: a number below 0.
    """
    call = "optimizer_groups"
    instance(call, "model", model, nn.Module, "a torch.nn.Module")
    number(call, "weight_decay", weight_decay, low=0.0)
    number(call, "memory_rate", memory_rate, low=0.0)
    flag(call, "memory_keys", memory_keys)
    held, sparse = memory_parameters(model, keys=memory_keys)
    groups: dict[str, list[nn.Parameter]] = {"matrices": [], "vectors": [], "memory": [], "sparse": []}
    for parameter in model.parameters():
        if parameter.requires_grad:
            kind = "sparse" if id(parameter) in sparse else "memory" if id(parameter) in held else None
            groups[kind or ("matrices" if parameter.dim() >= 2 else "vectors")].append(parameter)
    own: dict[str, Any] = {"lr": memory_rate, "fixed_rate": True}
    settings: dict[str, dict[str, Any]] = {
        "matrices": {"weight_decay": weight_decay},
        "vectors": {"weight_decay": 0.0},
        "memory": {"weight_decay": 0.0, **own},
        "sparse": own,
    }
    made = {name: {"name": name, "params": found, **settings[name]} for name, found in groups.items() if found}
    return OptimizerGroups([g for n, g in made.items() if n != "sparse"], [g for n, g in made.items() if n == "sparse"])


def memory_parameters(model: nn.Module, *, keys: bool = True) -> tuple[set[int], set[int]]:
    """The ids of the parameters that memory layers themselves hold, and of those among them with sparse gradients."""
    held, sparse = set(), set()
    for module in model.modules():
        if isinstance(module, MemoryLayer):
            own = {name: id(p) for name, p in module.named_parameters(recurse=False) if keys or name != "keys"}
            held |= set(own.values())
            if getattr(module, "sparse_grad", False):
                sparse.add(own["values"])
    return held, sparse
