"""Compile the kernels of `gpu.py` in several processes into Triton's cache, before and while it measures.

Compiling takes longer than measuring, and one process compiles one kernel after another. Here every process goes
through all rows with nothing launched, and compiles the kernels that no other process has claimed; of kernels that tune
themselves every configuration. `gpu.py` waits for what it needs first; the rest is compiled while it measures.
"""

import contextlib
import gc
import hashlib
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

MOST = 16
"""Processes; a container may have fewer cores than it sees."""
GRACE = 25.0
"""Seconds that the sanitizers may take beyond what is compiled first."""
WAIT = 240.0
"""Seconds that a process waits for the configurations that a peer's first row finds."""


def own(row: Any) -> bool:
    """Whether a row runs regard's own kernels alone."""
    kernels = "regard" in row.name or row.part == "correctness" or row.name.startswith(("memory", "floor"))
    return kernels and ("impl=" not in row.name or "impl=triton" in row.name)


def kinds(rows: Sequence[Any]) -> list[Any]:
    """Of rows of regard's own kernels that differ in lengths and inputs alone, the first: nothing is compiled for
    lengths, which are all multiples of 16 (`tests/triton/test_lengths.py`)."""
    found: dict[str, Any] = {}
    for row in filter(own, rows):
        found.setdefault(kind(row.name), row)
    return list(found.values())


def kind(name: str) -> str:
    return re.sub(r"T \d+|\d+ keys, B \d+|live [\d.]+, |floor, \w+, ", "", name)


def peers(rows: Sequence[Any]) -> tuple[list[Any], list[Any], list[Any]]:
    """The rows whose kernels tune themselves, once for every length: of AdaSplash those that try all configurations,
    of training steps, and of AdaSplash those that take over what was chosen."""
    found: dict[str, Any] = {}
    for row in rows:
        if row.tunes:
            found.setdefault(mark_of(row), row)
    splash = [row for row in found.values() if "adasplash" in row.name]
    first, late = ([row for row in splash if row.tunes == tunes] for tunes in (2, 1))
    return first, [row for row in found.values() if "training step" in row.name], late


def mark_of(row: Any) -> str:
    """What a process marks once the kernels of a row are compiled, which are those of other inputs, too."""
    return hashlib.sha256(re.sub(r"live [\d.]+, |^profile, ", "", row.name).encode()).hexdigest()[:16]


# What every process does -----------------------------------------------------------------------------------------


def compile_share(cpu: Sequence[Any], device: Sequence[Any], arch: int, claims: Path, number: int) -> None:
    """Go through the rows and compile what is left to claim. A row that fails will fail again where it is measured, and
    be told.

    Args:
        cpu, device: all rows, with tensors on the CPU, and on the device, which training steps need.
        number: of this process; a file of this name says that what is needed first is done.
    """
    os.nice(10)
    splash, _, late = peers(cpu)
    for row in [*kinds(cpu), *splash, *peers(device)[1]]:
        if row.priority:  # rows of no priority are those of the sanitizers
            (claims / f"small-{number}").touch()
        compiled(row, arch, claims)
        (claims / f"{mark_of(row)}-{number}").touch()
    (claims / f"early-{number}").touch()
    import gpu_peers

    end = time.monotonic() + WAIT
    for row in late:
        while not gpu_peers.chosen_of(row.name) and time.monotonic() < end:
            time.sleep(1)
        compiled(row, arch, claims)
        (claims / f"{mark_of(row)}-{number}").touch()


def compiled(row: Any, arch: int, claims: Path) -> None:
    start = time.perf_counter()
    on_device = "training step" in row.name
    with contextlib.suppress(Exception), warming(arch, claims, pretend=not on_device):
        row.run()
    if on_device:  # its memory is for what is measured
        import torch

        gc.collect()
        torch.cuda.empty_cache()
    print(f"{time.perf_counter() - start:.1f} s  {row.name}", flush=True)


@contextlib.contextmanager
def warming(arch: int, claims: Path, pretend: bool = True) -> Iterator[None]:
    """Within it kernels are compiled instead of being started, those alone that no other process has claimed.

    Args:
        pretend: tensors lie on the CPU, whether or not there is a device.
    """
    import torch
    from gpu_compiled import pretended, zeros
    from triton.runtime.autotuner import Autotuner
    from triton.runtime.jit import JITFunction

    from regard.triton.runtime.launch import watched

    real, pretend = JITFunction.run, pretend or not torch.cuda.is_available()

    def run(kernel: Any, *args: Any, grid: Any, warmup: bool = False, **options: Any) -> None:
        if claimed(claims, key_of(kernel, args, options)):
            with contextlib.suppress(Exception):  # a configuration that does not compile is left out when it is timed
                real(kernel, *args, grid=grid, warmup=True, **options)

    def tune(tuner: Any, *args: Any, **options: Any) -> None:
        tuner.nargs = dict(zip(tuner.arg_names, args, strict=False))
        for config in tuner.prune_configs(options):
            tuner.fn.run(*args, **options, **config.all_kwargs())

    def start(kernel: Any, grid: Any, args: Any, options: Any) -> None:
        run(kernel, *args, grid=grid, **options)

    def blank(*sizes: Any, generator: Any = None, **how: Any) -> Any:
        return torch.zeros(*sizes, **how)  # pages that nothing writes take no time

    with contextlib.ExitStack() as stack:
        for owner, name, other in ((JITFunction, "run", run), (Autotuner, "run", tune)):
            stack.enter_context(mock.patch.object(owner, name, other))
        if pretend:
            stack.enter_context(pretended(arch))
            stack.enter_context(watched(start))
            for name in ("randn", "rand"):
                stack.enter_context(mock.patch.object(torch, name, blank))
        stack.enter_context(zeros())
        yield


def claimed(claims: Path, key: str) -> bool:
    """Whether this process is the first to ask for a key, in which case it is its own."""
    try:
        os.close(os.open(claims / hashlib.sha256(key.encode()).hexdigest(), os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


def key_of(kernel: Any, args: Sequence[Any], options: dict[str, Any]) -> str:
    """What Triton compiles a kernel for."""
    params = {param.name: param for param in kernel.params}
    given = {**dict(zip(params, args, strict=False)), **options}
    constants = {name for name in given if name not in params or params[name].is_constexpr}
    free = {name for name, param in params.items() if param.do_not_specialize}
    said = (f"{name} {repr(x) if name in constants else shown(x, name in free)}" for name, x in sorted(given.items()))
    return f"{kernel.module}.{kernel.__name__}: {'; '.join(said)}"


def shown(x: Any, free: bool) -> str:
    """What of an argument counts: a number's, if it is not `free`, whether it is 1 or a multiple of 16."""
    if hasattr(x, "data_ptr"):
        return f"{x.dtype} {x.data_ptr() % 16 == 0}"
    if isinstance(x, tuple | list):
        return f"({', '.join(shown(part, free) for part in x)})"
    if type(x) is int:
        return f"int {x >= 2**31}" if free else f"int {x >= 2**31} {x == 1} {x % 16 == 0}"
    return "float" if type(x) is float else repr(x)


# What `gpu.py` does ----------------------------------------------------------------------------------------------


class Warming:
    """The processes.

    Args:
        script: what they run, with `arguments` and "--compile NUMBER/ARCH/CLAIMS".
        arch: compute capability, 80 or 90.
        claims: an empty folder, where kernels are claimed and processes leave marks NAME-NUMBER.
    """

    def __init__(self, script: str, arguments: Sequence[str], arch: int, claims: Path) -> None:
        self.claims, count = claims, max(1, min(MOST, len(os.sched_getaffinity(0))))
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self.processes = []
        for i in range(count):
            command = [sys.executable, str(Path(__file__).with_name(script)), *arguments]
            with (claims / f"log-{i}").open("w") as log:
                more = ["--compile", f"{i}/{arch}/{claims}"]
                self.processes.append(subprocess.Popen([*command, *more], env=environment, stdout=log, stderr=log))

    def reached(self, mark: str) -> bool:
        """Whether all processes have left a mark, or have ended."""
        ended = [process.poll() is not None for process in self.processes]
        return all(end or (self.claims / f"{mark}-{i}").exists() for i, end in enumerate(ended))

    def wait(self, mark: str, seconds: float, also: Callable[[], bool] = lambda: True) -> int:
        """Wait until all have left a mark, and then for `also`, GRACE seconds at most; return how many have."""
        end = last = time.monotonic() + seconds
        while time.monotonic() < min(end, last):
            if self.reached(mark):
                last = min(last, time.monotonic() + GRACE)
                if also():
                    break
            time.sleep(0.1)
        return sum((self.claims / f"{mark}-{i}").exists() for i in range(len(self.processes)))

    def stop(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()
