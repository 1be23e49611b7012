"""What a call would launch, compiled for a GPU that is not there, and what each kernel takes of it.

    resources_of(lambda: regard.attention(q, k, v, "biweight", impl="triton"), arch=90)

The tensors lie on the CPU; the call prepares its launches from them as it would on a device, and every kernel is
compiled for that very launch instead of being started. What is allocated holds zeros meanwhile, since no kernel fills
it. Triton must compile, not interpret: in a process with TRITON_INTERPRET=1 this raises.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from ...checks import ArgumentError
from ..runtime.launch import watched
from ..runtime.support import interpreted

CALL = "resources_of"
SHARED = {80: 163 * 1024, 90: 227 * 1024}
"""Bytes of shared memory that a program may have, by compute capability: what can be compiled for."""
_FILLED = ((torch, "empty"), (torch, "empty_like"), (torch, "empty_strided"), (Tensor, "new_empty"))


@dataclass(frozen=True)
class Resources:
    """What one kernel takes, as it is launched.

    Attributes:
        kernel: its name.
        arch: compute capability it was compiled for, 80 or 90.
        registers: of a thread.
        local: bytes of local memory of a thread: its stack frame, where registers that do not fit are spilt.
        shared: bytes of shared memory of a program.
        warps: of a program.
        launches: how often the call would start it, with constants whatever.
    """

    kernel: str
    arch: int
    registers: int
    local: int
    shared: int
    warps: int
    launches: int = 1

    def worst(self, other: Resources) -> Resources:
        """The largest of each number, of two variants of a kernel."""
        return Resources(
            self.kernel,
            self.arch,
            max(self.registers, other.registers),
            max(self.local, other.local),
            max(self.shared, other.shared),
            max(self.warps, other.warps),
            self.launches + other.launches,
        )


def resources_of(call: Callable[[], Any], arch: int = 90) -> list[Resources]:
    """Compile every kernel that `call` would launch, for compute capability `arch`.

    Args:
        call: without arguments; its tensors lie on the CPU. What it computes is worth nothing.
        arch: 80 or 90.

    Returns:
        One for each kernel, in the order of the first launch; of variants of a kernel the largest numbers.

    Raises:
        ArgumentError: another `arch`; a process with TRITON_INTERPRET=1.
        triton.compiler.errors.CompilationError: a kernel does not compile.

    Cost: seconds for each kernel, the first time; Triton keeps what it compiled.
    """
    if arch not in SHARED:
        raise ArgumentError(f"{CALL}: arch is {arch!r}, expected one of {', '.join(map(str, SHARED))}.")
    if interpreted():
        raise ArgumentError(f"{CALL}: TRITON_INTERPRET=1 is set, so that nothing is compiled; unset it.")
    found: dict[str, Resources] = {}

    def compiled(kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], options: dict[str, Any]) -> None:
        own = _measured(kernel.warmup(*args, grid=grid, **options), arch)
        found[own.kernel] = found[own.kernel].worst(own) if own.kernel in found else own

    with _pretended(arch), _zeros(), watched(compiled):
        call()
    return list(found.values())


_KNOWN: dict[str, Resources] = {}


def _measured(compiled: Any, arch: int) -> Resources:
    """The resources of what Triton compiled. cuobjdump's figure for shared memory leaves out what is asked for at the
    launch, so that this one is Triton's own."""
    if compiled.hash not in _KNOWN:
        name, metadata = compiled.metadata.name, compiled.metadata
        registers, local = _usage(compiled.asm["cubin"])
        _KNOWN[compiled.hash] = Resources(name, arch, registers, local, metadata.shared, metadata.num_warps)
    return _KNOWN[compiled.hash]


def _usage(cubin: bytes) -> tuple[int, int]:
    """(registers, bytes of local memory) of a thread, from the cuobjdump in Triton's package."""
    from triton import knobs

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        command = [knobs.nvidia.cuobjdump.path, "-res-usage", str(path)]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    numbers = {name: int(found) for name, found in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", text)}
    return numbers["REG"], numbers["STACK"] + numbers["LOCAL"]


# A device that is not there -----------------------------------------------------------------------------------


class _Driver:
    """What Triton asks a driver before it compiles, and no more: whatever would run something is missing."""

    def __init__(self, arch: int) -> None:
        self.arch = arch

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.arch, 32)

    def get_current_device(self) -> int:
        return self.arch  # a device for each capability, since Triton keeps what it compiled by device

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def is_active(self) -> bool:
        return True

    def get_device_interface(self) -> Any:
        return torch.cuda


@contextmanager
def _pretended(arch: int) -> Iterator[None]:
    """Within it Triton compiles for that capability."""
    from triton.runtime.driver import driver

    try:
        before = driver.active
    except RuntimeError:  # as there is no device; it looks for one again where there is no driver
        before = None
    driver.set_active(_Driver(arch))
    try:
        yield
    finally:
        driver.set_active(before)


@contextmanager
def _zeros() -> Iterator[None]:
    """Within it what is allocated is zero: torch's own operations between two launches must find numbers in range."""

    def filled(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda *args, **options: make(*args, **options).zero_()

    with ExitStack() as stack:
        for owner, name in _FILLED:
            stack.enter_context(mock.patch.object(owner, name, filled(getattr(owner, name))))
        yield
