"""Parameter groups for optimisers of models with memories.

A step reads only a few rows of a memory's table, and weight decay would shrink the other rows between reads. Memory
Layers at Scale (arXiv:2412.09764) uses a constant rate of 1e-3 without decay for values.
"""

from typing import Any, NamedTuple

from torch import nn

from ..checks import flag, instance, number
from .memories import MemoryLayer

MEMORY_RATE = 1e-3


class OptimizerGroups(NamedTuple):
    """Parameter groups for `torch.optim`, each a dict with "name", "params" and settings: `dense` for AdamW or similar
    ("matrices" with decay, "vectors" without, "memory" without and with its own rate), and `sparse`, tables with sparse
    gradients (`sparse_grad`), for `torch.optim.SparseAdam`."""

    dense: list[dict[str, Any]]
    sparse: list[dict[str, Any]]


def optimizer_groups(
    model: nn.Module, *, weight_decay: float = 0.1, memory_rate: float = MEMORY_RATE, memory_keys: bool = True
) -> OptimizerGroups:
    """Return nonempty groups of the trainable parameters of `model`, each parameter in one group.

    Args:
        weight_decay: of parameters with two or more axes; vectors and memories have none.
        memory_rate: learning rate of the keys and values of memory layers (not of their projections). Schedulers should
            not change it: the group has "fixed_rate" True.
        memory_keys: whether keys are in the memory group; otherwise they count as matrices.

    Raises:
        ArgumentError: a model that is no `nn.Module`, or a number below 0.
    """
    call = "optimizer_groups"
    instance(call, "model", model, nn.Module, "a torch.nn.Module")
    number(call, "weight_decay", weight_decay, low=0.0)
    number(call, "memory_rate", memory_rate, low=0.0)
    flag(call, "memory_keys", memory_keys)
    constant: dict[str, Any] = {"lr": memory_rate, "fixed_rate": True}
    settings: dict[str, dict[str, Any]] = {
        "matrices": {"weight_decay": weight_decay},
        "vectors": {"weight_decay": 0.0},
        "memory": {"weight_decay": 0.0, **constant},
        "sparse": constant,
    }
    held, sparse = memory_parameters(model, keys=memory_keys)
    groups: dict[str, list[nn.Parameter]] = {name: [] for name in settings}
    for parameter in model.parameters():
        if parameter.requires_grad:
            kind = "sparse" if id(parameter) in sparse else "memory" if id(parameter) in held else None
            groups[kind or ("matrices" if parameter.dim() >= 2 else "vectors")].append(parameter)
    made = [{"name": name, "params": members, **settings[name]} for name, members in groups.items() if members]
    return OptimizerGroups([g for g in made if g["name"] != "sparse"], [g for g in made if g["name"] == "sparse"])


def memory_parameters(model: nn.Module, *, keys: bool = True) -> tuple[set[int], set[int]]:
    """Return the ids of the parameters that memory layers hold directly, and of those with sparse gradients."""
    held, sparse = set(), set()
    for module in model.modules():
        if isinstance(module, MemoryLayer):
            ids = {name: id(p) for name, p in module.named_parameters(recurse=False) if keys or name != "keys"}
            held |= set(ids.values())
            if getattr(module, "sparse_grad", False):
                sparse.add(ids["values"])
    return held, sparse
