"""The device of a run, by name, its default dtype, and the processes of one that torchrun started."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed

from .._version import __version__
from ..checks import ArgumentError, require

if TYPE_CHECKING:
    from .config import TrainConfig


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
    there = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    available = [kind for kind, found in there.items() if found]
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
    """Check that all processes of a run have the same options, data (`source`, of `folder.text_source`) and versions;
    raise `ArgumentError` in every process if one differs from the first."""
    if not (distributed.is_available() and distributed.is_initialized()):
        return
    versions = f"regard {__version__}, torch {torch.__version__}"
    options = {f"--{name.replace('_', '-')}": repr(value) for name, value in vars(config).items()}
    own = {**options, "the data's hash": source["sha256"], "versions": versions}
    found: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(found, own)
    for rank, other in enumerate(found):
        for name, value in other.items():
            if value != found[0][name]:
                raise ArgumentError(
                    f"{call}: {name} is {value} in process {rank}, but {found[0][name]} in process 0; start all "
                    f"processes with the same command, data and versions."
                )


def check_sharding(config: TrainConfig, *, call: str) -> None:
    """Raise `ArgumentError` if `--shard` cannot be followed, or if accelerate is told to shard the model."""
    if os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true":
        raise ArgumentError(f"{call}: ACCELERATE_USE_FSDP is set; unset it, and give --shard.")
    if config.shard:
        alone = os.environ.get("WORLD_SIZE", "1") == "1"
        require(not alone, call, "--shard splits the model over several processes, got 1; start them with torchrun.")
        muon = config.optimizer == "muon"
        require(not muon, call, "--shard does not take --optimizer muon, which needs whole matrices; choose adamw.")
