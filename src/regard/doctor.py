"""What this machine and this installation can do: versions, devices, implementations."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version

PACKAGES = (
    *("torch", "transformers", "tokenizers", "safetensors", "accelerate", "triton", "numba"),
    *("tyro", "rich", "matplotlib", "jinja2", "tensorboard"),
)


def report() -> dict[str, dict[str, str]]:
    """Sections of (name, text): versions, devices, implementations."""
    return {"versions": _versions(), "devices": _devices(), "implementations": _implementations()}


def _versions() -> dict[str, str]:
    from ._version import __version__

    found = {"regard": __version__, "python": f"{platform.python_version()} on {platform.platform()}"}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


def _devices() -> dict[str, str]:
    import torch

    found = {"cpu": f"{os.cpu_count()} cores, {torch.get_num_threads()} threads in use"}
    if torch.cuda.is_available():
        for i in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(i)
            found[f"cuda:{i}"] = f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB"
    else:
        built = torch.version.cuda
        found["cuda"] = (
            f"not available: torch was built for CUDA {built}, and no device answers"
            if built
            else "not available: this torch was built without CUDA"
        )
    if torch.backends.mps.is_available():
        found["mps"] = "Apple GPU"
    return found


def _implementations() -> dict[str, str]:
    from .pairwise.dispatch import implementations

    return {name: "can run" if reason is None else f"cannot run: {reason}" for name, reason in implementations()}
