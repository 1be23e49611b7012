"""Which device a run uses, by name."""

from __future__ import annotations

import torch

from ..checks import ArgumentError


def available_devices() -> dict[str, str]:
    """Device kinds that work here, fastest first, each with a description."""
    found = {}
    if torch.cuda.is_available():
        found["cuda"] = ", ".join(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))
    if torch.backends.mps.is_available():
        found["mps"] = "Apple GPU"
    found["cpu"] = f"{torch.get_num_threads()} threads"
    return found


def resolve_device(name: str, *, call: str) -> str:
    """ "cpu", "cuda" or "mps" for a name that may also be "auto".

    Raises:
        ArgumentError: an unknown name, or a device that is not there; the message says what is.
    """
    here = available_devices()
    if name == "auto":
        return next(iter(here))
    if name in here:
        return name
    if name.partition(":")[0] in ("cuda", "mps") and name.partition(":")[0] in here:
        raise ArgumentError(
            f"{call}: device {name!r}: choose one of several by CUDA_VISIBLE_DEVICES and say --device cuda."
        )
    if name.partition(":")[0] in ("cuda", "mps"):
        raise ArgumentError(f"{call}: device {name!r} is not available here; available: {', '.join(here)}.")
    raise ArgumentError(f"{call}: unknown device {name!r}. Choose from: auto, cpu, cuda, mps.")
