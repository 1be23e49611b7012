"""The device of a run, by name."""

from __future__ import annotations

import torch

from ..checks import ArgumentError


def available_devices() -> dict[str, str]:
    """Return the available device types, fastest first, each with a description."""
    devices = {}
    if torch.cuda.is_available():
        devices["cuda"] = ", ".join(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))
    if torch.backends.mps.is_available():
        devices["mps"] = "Apple GPU"
    devices["cpu"] = f"{torch.get_num_threads()} threads"
    return devices


def resolve_device(name: str, *, call: str) -> str:
    """Return "cpu", "cuda" or "mps" for a name that may be "auto"; raise `ArgumentError` if it is not available."""
    available = available_devices()
    if name == "auto":
        return next(iter(available))
    if name in available:
        return name
    kind = name.partition(":")[0]
    if kind in ("cuda", "mps") and kind in available:
        raise ArgumentError(f"{call}: device {name!r}: use --device cuda and select one with CUDA_VISIBLE_DEVICES.")
    if kind in ("cuda", "mps"):
        raise ArgumentError(f"{call}: device {name!r} is not available here; available: {', '.join(available)}.")
    raise ArgumentError(f"{call}: unknown device {name!r}. Choose from: auto, cpu, cuda, mps.")
