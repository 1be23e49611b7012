"""The device of a run, its default dtype, and the processes that torchrun started for it.

With `--shard` the processes share weights, gradients and optimiser states (torch's FSDP2): each gathers the weights of
a block while it computes with them. Whole tensors are saved, so the run folder has the same files as with one process.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.utils._pytree import tree_map_only

from .._version import __version__
from ..checks import ArgumentError, require
from .config import TrainConfig
from .fields import flag


@contextmanager
def float32_by_default() -> Iterator[None]:
    """Make float32 torch's default dtype inside a block or a decorated function."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def resolve_device(name: str, *, call: str) -> str:
    """Return "cpu", "cuda" or "mps" for a name ("auto": the fastest); raise `ArgumentError` if it is not available."""
    usable = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    available = [kind for kind in usable if usable[kind]]
    if name == "auto":
        return available[0]
    if name in available:
        return name
    kind = name.partition(":")[0]
    if kind in ("cuda", "mps") and kind in available:
        raise ArgumentError(f"{call}: device {name!r}: use --device cuda and select one with CUDA_VISIBLE_DEVICES.")
    if kind in ("cuda", "mps"):
        raise ArgumentError(f"{call}: device {name!r} is not available here; available: {', '.join(available)}.")
    raise ArgumentError(f"{call}: unknown device {name!r}. Choose from: auto, cpu, cuda, mps.")


def main_process() -> bool:
    """Return whether this process writes: the only one, or the first of those that torchrun started."""
    return os.environ.get("RANK", "0") == "0"


def check_agreement(config: TrainConfig, source: dict[str, Any], *, call: str) -> None:
    """Raise `ArgumentError` in every process if one has other options, data (`source`) or versions."""
    if not (distributed.is_available() and distributed.is_initialized()):
        return
    versions = f"regard {__version__}, torch {torch.__version__}"
    options = {flag(name): repr(value) for name, value in vars(config).items()}
    every: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(every, {**options, "the data's hash": source["sha256"], "versions": versions})
    for rank, settings in enumerate(every):
        for name, value in settings.items():
            differs = f"{name} is {value} in process {rank}, but {every[0][name]} in process 0"
            hint = "start all processes with the same command, data and versions"
            require(value == every[0][name], call, f"{differs}; {hint}.")


def check_sharding(config: TrainConfig, *, call: str) -> None:
    """Raise `ArgumentError` if `--shard` cannot be followed, or if accelerate is told to shard the model."""
    unset = os.environ.get("ACCELERATE_USE_FSDP", "false").lower() != "true"
    require(unset, call, "ACCELERATE_USE_FSDP is set; unset it, and give --shard.")
    if config.shard:
        alone = os.environ.get("WORLD_SIZE", "1") == "1"
        require(not alone, call, "--shard splits the model over several processes, got 1; start them with torchrun.")
        muon = config.optimizer == "muon"
        require(not muon, call, "--shard does not take --optimizer muon, which needs whole matrices; choose adamw.")


def shard(model: Any) -> None:
    """Split the parameters of a model in place, block by block; raise `ArgumentError` for one without axes."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    for name, parameter in model.named_parameters():
        text = f"--shard: parameter {name} has no axes and cannot be split; omit --shard."
        require(parameter.dim() > 0, "train", text)
    mesh = init_device_mesh(next(model.parameters()).device.type, (distributed.get_world_size(),))
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
    return tree_map_only(Tensor, lambda tensor: gathered(tensor).cpu(), value)


def gathered(tensor: Tensor) -> Tensor:
    """Return a tensor whose parts are gathered if it is split. All processes must call it together."""
    from torch.distributed.tensor import DTensor

    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def whole_weights(model: nn.Module) -> dict[str, Tensor] | None:
    """Return the state dict of a sharded model as whole tensors on the CPU, tied ones once; None for other models.
    All processes must call it together."""
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
