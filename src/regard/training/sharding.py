"""Models whose weights, gradients and optimiser states are split over the processes of a run (torch's FSDP2).

A process gathers the weights of a block while it computes with them. What is saved are whole tensors: a run folder has
the same files as that of one process.
"""

from typing import Any

import torch
from torch import Tensor, distributed, nn

from ..checks import require


def shard(model: Any) -> None:
    """Split the parameters of a transformers model in place, block by block (`_no_split_modules`); raise
    `ArgumentError` for a parameter without axes, which cannot be split."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    scalar = next((name for name, parameter in model.named_parameters() if parameter.dim() == 0), None)
    require(scalar is None, "train", f"--shard: parameter {scalar} has no axes and cannot be split; omit --shard.")
    device = next(model.parameters()).device.type
    mesh = init_device_mesh(device, (distributed.get_world_size(),))
    for module in model.modules():
        if type(module).__name__ in model._no_split_modules:
            fully_shard(module, mesh=mesh)
    fully_shard(model, mesh=mesh)


def is_sharded(model: nn.Module) -> bool:
    """Return whether the parameters of a model are split."""
    from torch.distributed.fsdp import FSDPModule

    return isinstance(model, FSDPModule)


def whole(value: Any) -> Any:
    """Return nested data with the parts of split tensors gathered on the CPU. All processes must call it together."""
    from torch.utils._pytree import tree_map_only

    return tree_map_only(Tensor, lambda tensor: gathered(tensor).cpu(), value)


def gathered(tensor: Tensor) -> Tensor:
    """Return a tensor whose parts are gathered if it is split. All processes must call it together."""
    from torch.distributed.tensor import DTensor

    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def whole_weights(model: nn.Module) -> dict[str, Tensor] | None:
    """Return the state dict of a sharded model as whole tensors on the CPU, tied ones once; None for other models. All
    processes must call it together."""
    if not is_sharded(model):
        return None
    named = {id(tensor): (name, tensor) for name, tensor in reversed(model.state_dict(keep_vars=True).items())}
    return {name: whole(tensor.detach()) for name, tensor in reversed(named.values())}


def split_states(optimizer: torch.optim.Optimizer) -> None:
    """Split the states of an optimiser, which were loaded whole, as its parameters are."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    for parameter, state in optimizer.state.items():
        for name, value in state.items():
            if isinstance(parameter, DTensor) and isinstance(value, Tensor) and value.shape == parameter.shape:
                state[name] = distribute_tensor(value.to(parameter.device), parameter.device_mesh, parameter.placements)


def finite_everywhere(loss: Tensor) -> bool:
    """Return whether the losses of all processes are finite. All processes must call it together."""
    lost = (~torch.isfinite(loss.detach())).float()
    distributed.all_reduce(lost)
    return not bool(lost)
