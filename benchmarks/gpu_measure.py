"""Measure for `gpu.py`: medians by triton's do_bench, peaks of the allocator, the limits of the device, and the
versions."""

import contextlib
import datetime
import gc
import hashlib
import importlib.metadata
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from cpu_measure import ROOT, digits
from torch import Tensor

SLOW_MS = 150.0
"""Calls that take longer are timed three times, by events: do_bench would run each nine times at least."""
Function = Callable[..., Tensor]
PACKAGES = ("regard", "torch", "triton", "transformers", "adasplash", "fla-core")


@dataclass(frozen=True)
class Row:
    """What is measured at once, and stored.

    Attributes:
        name: of the row, unlike all others.
        part: of which table it is.
        priority: rows with smaller numbers come first.
        run: measures it; gives what is stored.
        seconds: that it is expected to take, compiling included; one is not begun when less is left.
        tunes: whether kernels of a peer tune themselves in it: 0 no; 1 they may take over what an earlier row chose; 2
            they try all configurations.
    """

    name: str
    part: str
    priority: int
    run: Callable[[], dict[str, Any]]
    seconds: float = 8.0
    tunes: int = 0


@dataclass(frozen=True)
class Bench:
    """Where rows run: on the GPU at full size; dry, at toy size, in Triton's interpreter on the CPU; or compiling, at
    full size, with tensors `at` the CPU or the GPU and nothing launched."""

    dry: bool
    tune_peers: bool = False
    compiling: bool = False
    at: str = "cpu"

    @property
    def device(self) -> torch.device:
        return torch.device("cpu" if self.dry else self.at if self.compiling else "cuda")

    def generator(self, seed: int = 0) -> torch.Generator:
        return torch.Generator(self.device).manual_seed(seed)

    def milliseconds(self, call: Callable[[], Any]) -> float:
        """The median time of a call, which runs once before; dry, the time of its one run."""
        if self.dry or self.compiling:
            start = time.perf_counter()
            call()
            return 1e3 * (time.perf_counter() - start)
        call()
        once = _events(call)
        if once > SLOW_MS:
            return statistics.median([once, _events(call), _events(call)])
        from triton.testing import do_bench

        return float(do_bench(call, warmup=20, rep=80, return_mode="median"))

    def peak(self, call: Callable[[], Any]) -> float | None:
        """MiB that a call holds at most beyond what was held before it; None on the CPU."""
        if self.dry or self.compiling:
            return None
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        held = call()
        torch.cuda.synchronize()
        found = (torch.cuda.max_memory_allocated() - before) / 2**20
        del held
        return digits(found)

    def graphed(self, call: Callable[[], Any]) -> Callable[[], Any]:
        """The call as a CUDA graph: what is left is the device's own time. On the CPU the call itself."""
        if self.dry or self.compiling:
            return call
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                call()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            kept = call()

        def replay() -> Any:
            graph.replay()
            return kept

        return replay


def _events(call: Callable[[], Any]) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    call()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end))


def passes(function: Function, inputs: Sequence[Tensor], cotangent: Tensor) -> dict[str, Callable[[], Any]]:
    """ "forward" without a graph, and "both", forward and backward through autograd, as calls without arguments."""

    def forward() -> Tensor:
        with torch.no_grad():
            return function(*inputs)

    def both() -> tuple[Tensor, ...]:
        leaves = [x.detach().requires_grad_() for x in inputs]
        return torch.autograd.grad(function(*leaves), leaves, cotangent)

    return {"forward": forward, "both": both}


def passed(
    bench: Bench, calls: dict[str, Callable[[], Any]], work: dict[str, float] | None, rate: str
) -> dict[str, dict[str, Any]]:
    """Time, peak and, of what is multiplied, `rate` in TFLOP/s of every pass. One that does not fit into the device's
    memory has no time."""
    found: dict[str, dict[str, Any]] = {}
    for which, call in calls.items():
        try:
            ms = bench.milliseconds(call)
            found[which] = {"ms": digits(ms), "mib": bench.peak(call)}
        except torch.cuda.OutOfMemoryError:
            found[which] = {"ms": None, "mib": None, "error": "out of memory"}
            torch.cuda.empty_cache()
            continue
        if work is not None:
            speed = work[which] / ms / 1e9
            found[which] |= {rate: digits(speed), "of_ceiling": digits(speed / ceilings(bench)["tflops"], 3)}
    return found


def rms_ratio(found: Tensor, wanted: Tensor) -> float:
    """|found - wanted| / |wanted| in float64; NaN anywhere gives NaN."""
    found, wanted = found.detach().double(), wanted.detach().double()
    return digits(float((found - wanted).norm() / wanted.norm().clamp(min=1e-300)), 3)


def finite(x: float | None) -> float | None:
    """None for a number that JSON does not know."""
    return None if x is None or x != x or x in (float("inf"), float("-inf")) else x


# Ceilings ------------------------------------------------------------------------------------------------------


@lru_cache
def ceilings(bench: Bench) -> dict[str, float]:
    """What this device reaches: TFLOP/s of a large bfloat16 product of random matrices by torch, and GB/s of a large
    copy, bytes read and written counted."""
    n, size = (64, 2**12) if bench.dry or bench.compiling else (8192, 2**31)
    a, b = (torch.randn(n, n, device=bench.device, generator=bench.generator(i)).bfloat16() for i in range(2))
    product = bench.milliseconds(lambda: a @ b)
    source = torch.empty(size // 4, device=bench.device, dtype=torch.int32).random_()
    target = torch.empty_like(source)
    copy = bench.milliseconds(lambda: target.copy_(source))
    return {"tflops": digits(2 * n**3 / product / 1e9), "gbps": digits(2 * size / copy / 1e6)}


# Provenance ----------------------------------------------------------------------------------------------------


def provenance(bench: Bench) -> dict[str, Any]:
    """Where, when and with what this run measures."""
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "command": " ".join([Path(sys.executable).name, *sys.argv]),
        "dry": bench.dry,
        "hardware": hardware(bench),
        "versions": {"python": platform.python_version(), **{name: version(name) for name in PACKAGES}},
        "commit": _said("git", "-C", str(ROOT), "rev-parse", "HEAD"),
        "kernels": kernels(ROOT),
    }


def kernels(root: Path) -> str:
    """A hash of the sources of the kernels: a copy of the tree on another machine may have an older commit's name."""
    found = hashlib.sha256()
    for path in sorted((root / "src" / "regard" / "triton").rglob("*.py")):
        found.update(path.relative_to(root).as_posix().encode() + path.read_bytes())
    return found.hexdigest()[:12]


def hardware(bench: Bench) -> dict[str, Any]:
    if bench.dry:
        return {"name": f"Triton's interpreter on {platform.machine()}"}
    own = torch.cuda.get_device_properties(0)
    card = _said("nvidia-smi", "--query-gpu=uuid", "--format=csv,noheader")
    return {
        "name": own.name,
        "capability": f"{own.major}.{own.minor}",
        "multiprocessors": own.multi_processor_count,
        "gib": round(own.total_memory / 2**30, 1),
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "card": hashlib.sha256(card.encode()).hexdigest()[:8] if card else None,
        "driver": _said("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
    }


def version(package: str) -> str:
    """The version that is installed; of regard, which may run from its sources, the module's own."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(package)
    return importlib.import_module("regard").__version__ if package == "regard" else "not installed"


def _said(*command: str) -> str:
    """What a command says, or nothing where it cannot be run."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


# The interpreter -----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def small_tiles(bench: Bench) -> Iterator[None]:
    """Within it a dry run's toy lengths have several blocks."""
    if not bench.dry:
        yield
        return
    from regard.triton.runtime.tiles import forced

    with forced(rows=16, keys=16):
        yield
