"""Compile the kernels of a call for a GPU that is not there, and report the resources of each.

    resources_of(lambda: regard.attention(q, k, v, "biweight", impl="triton"), arch=90)

The tensors lie on the CPU. The call prepares its launches as on a device, and every kernel is compiled for its launch
instead of being started. Allocated tensors hold zeros, since no kernel fills them.
"""

import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from regard.checks import ArgumentError
from regard.triton.runtime.interpreting import interpreted
from regard.triton.runtime.launch import watched

CALL = "resources_of"
SHARED = {80: 163 * 1024, 90: 227 * 1024}  # most bytes of shared memory of a program, by compute capability
_FILLED = ((torch, "empty"), (torch, "empty_like"), (torch, "empty_strided"), (Tensor, "new_empty"))


@dataclass(frozen=True)
class Resources:
    """What one kernel takes, as it is launched."""

    kernel: str  # name of the kernel
    arch: int  # compute capability that it was compiled for, 80 or 90
    registers: int  # registers of a thread
    local: int  # bytes of local memory of a thread: its stack frame, which holds spilled registers
    shared: int  # bytes of shared memory of a program
    warps: int  # warps of a program
    launches: int = 1  # how often the call would start it, with any constants

    def worst(self, other: "Resources") -> "Resources":
        """Return the largest of each number of two variants of a kernel."""
        names = ("registers", "local", "shared", "warps")
        most = {name: max(getattr(self, name), getattr(other, name)) for name in names}
        return replace(self, launches=self.launches + other.launches, **most)


def resources_of(call: Callable[[], Any], arch: int = 90) -> list[Resources]:
    """Compile every kernel that `call` would launch, for compute capability `arch`.

    Args:
        call: function without arguments whose tensors lie on the CPU. Its result is meaningless.
        arch: 80 or 90.

    Returns:
        One entry for each kernel, in the order of first launches; for variants of a kernel the largest numbers.

    Raises:
        ArgumentError: another `arch`; a process with TRITON_INTERPRET=1.
        triton.compiler.errors.CompilationError: a kernel does not compile.

    Cost: seconds for each kernel, the first time; Triton caches what it compiled."""
    if arch not in SHARED:
        raise ArgumentError(f"{CALL}: arch is {arch!r}, expected one of {', '.join(map(str, SHARED))}.")
    if interpreted():
        raise ArgumentError(f"{CALL}: TRITON_INTERPRET=1 is set, so that nothing is compiled; unset it.")
    found: dict[str, Resources] = {}

    def compiled(kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], options: dict[str, Any]) -> None:
        one = kernel.warmup(*args, grid=grid, **options)
        shared, warps = one.metadata.shared, one.metadata.num_warps  # Triton's figure, which counts all
        own = Resources(one.metadata.name, arch, *_usage(one.asm["cubin"]), shared, warps)
        found[own.kernel] = found[own.kernel].worst(own) if own.kernel in found else own

    with pretended(arch), zeros(), watched(compiled):
        call()
    return list(found.values())


@cache
def _usage(cubin: bytes) -> tuple[int, int]:
    """Return (registers, bytes of local memory) of a thread, from the cuobjdump in Triton's package."""
    from triton import knobs

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        command = [knobs.nvidia.cuobjdump.path, "-res-usage", str(path)]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    numbers = {name: int(found) for name, found in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", text)}
    return numbers["REG"], numbers["STACK"] + numbers["LOCAL"]


@contextmanager
def pretended(arch: int) -> Iterator[None]:
    """Let Triton compile for that capability, with the part of a driver that compiling needs."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime.driver import driver

    try:
        before = driver.active
    except RuntimeError:  # there is no device
        before = None
    known = {
        "get_current_target": GPUTarget("cuda", arch, 32),
        "get_current_device": arch,  # one device for each capability, since Triton caches by device
        "get_current_stream": 0,
        "get_active_torch_device": torch.device("cpu"),
        "get_device_interface": torch.cuda,
        "is_active": True,
    }
    driver.set_active(SimpleNamespace(**{name: lambda *_, found=found: found for name, found in known.items()}))
    try:
        yield
    finally:
        driver.set_active(before)


@contextmanager
def zeros() -> Iterator[None]:
    """Fill allocated tensors with zeros: torch operations between two launches must find numbers in range."""

    def filled(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda *args, **options: make(*args, **options).zero_()

    with ExitStack() as stack:
        for owner, name in _FILLED:
            stack.enter_context(mock.patch.object(owner, name, filled(getattr(owner, name))))
        yield
