"""Several processes of one run, as torchrun starts them."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed

from .._version import __version__
from ..checks import ArgumentError, require

if TYPE_CHECKING:
    from .config import TrainConfig


def main_process() -> bool:
    """Return whether this process writes: the only one, or the first of those that torchrun started."""
    return os.environ.get("RANK", "0") == "0"


def refuse_several(what: str, *, call: str) -> None:
    """Raise `ArgumentError` if this process is one of several."""
    several = os.environ.get("WORLD_SIZE", "1")
    require(several == "1", call, f"{what} takes one process, got {several} of torchrun; start it without torchrun.")


def check_agreement(config: TrainConfig, source: dict[str, Any], *, call: str) -> None:
    """Check that all processes of a run have the same options, data and versions; does nothing for one process.

    Args:
        config: the options of the run.
        source: the data, as `folder.text_source` or `folder.task_source` describe them.

    Raises:
        ArgumentError: in every process, if one differs from the first.
    """
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


def refuse_sharding_on_cpu(device: str, *, call: str) -> None:
    """Raise `ArgumentError` if FSDP is asked for on a CPU, where accelerate would replicate the model instead."""
    if device == "cpu" and os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true":
        raise ArgumentError(
            f"{call}: ACCELERATE_USE_FSDP is set, but accelerate shards models on accelerators only and would "
            f"replicate this one; unset it, or choose --device cuda."
        )
