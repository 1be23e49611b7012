"""A report on this installation: versions, devices, available implementations."""

import os
import platform
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from ._version import __version__
from .pairwise import dispatch
from .triton.runtime.interpreting import interpreted

PACKAGES = (
    *("torch", "transformers", "tokenizers", "safetensors", "accelerate", "triton", "numba"),
    *("tyro", "rich", "matplotlib", "jinja2", "tensorboard"),
)


def report() -> dict[str, dict[str, str]]:
    """Return sections of names and texts: versions, devices, implementations."""
    return {"versions": _versions(), "devices": _devices(), "implementations": _implementations()}


def _versions() -> dict[str, str]:
    entries = {"regard": __version__, "python": f"{platform.python_version()} on {platform.platform()}"}
    for package in PACKAGES:
        try:
            entries[package] = version(package)
        except PackageNotFoundError:
            entries[package] = "not installed"
    return entries | {"torch": str(torch.__version__)}  # with the build, such as +cu130


def processor() -> str:
    """Return the name of the processor."""
    with suppress(OSError):  # only Linux has this file
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _devices() -> dict[str, str]:
    entries = {"cpu": f"{processor()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads in use"}
    if torch.cuda.is_available():
        for i in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(i)
            entries[f"cuda:{i}"] = f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB"
    else:
        built = torch.version.cuda
        reason = f"no device was found (torch was built for CUDA {built})" if built else "torch was built without CUDA"
        entries["cuda"] = f"not available: {reason}"
    if torch.backends.mps.is_available():
        entries["mps"] = "Apple GPU"
    return entries


def _implementations() -> dict[str, str]:
    implementations = dispatch.implementations()
    entries = {name: "can run" if reason is None else f"cannot run: {reason}" for name, reason in implementations}
    if entries.get("triton") == "can run" and not (torch.cuda.is_available() or interpreted()):
        entries["triton"] = "installed, but no CUDA device"
    return entries
