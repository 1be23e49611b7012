"""Part `tools` of `gpu.py`: which kernels a call takes its time in, by torch's profiler and by ncu, and whether
compute-sanitizer finds fault with them.

A row of compute-sanitizer or ncu runs this file in a process of its own under that program, if the machine has it:

    python benchmarks/gpu_tools.py biweight --small
"""

from __future__ import annotations

import csv
import importlib.util
import io
import shutil
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

if importlib.util.find_spec("regard") is None:  # a machine with torch and these sources alone
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

import gpu_peers
from cpu_measure import digits
from gpu_measure import Bench, Row, small_tiles

import regard

SPECS = ("biweight", "relumax", "local-linear")
MECHANISMS = (*SPECS, *(f"decoding, {spec}" for spec in SPECS), "memory")
"""Forward and backward passes of attention, one query against a cache, a memory read and written."""
LENGTH = 8192
SANITIZERS = ("memcheck", "racecheck")
METRICS = {
    "us": ("gpu__time_duration.sum", 1e-3),
    "mib": ("dram__bytes.sum", 2.0**-20),
    "of_memory": ("dram__throughput.avg.pct_of_peak_sustained_elapsed", 1e-2),
    "of_compute": ("sm__throughput.avg.pct_of_peak_sustained_elapsed", 1e-2),
}
"""Of ncu, in its base units, and what turns them into those of the name."""
MOST = 5
"""Kernels that ncu looks at, the longest first."""


def rows(bench: Bench) -> Iterator[Row]:
    if bench.compiling:
        return
    for name in MECHANISMS:
        yield Row(f"profile, {name}", "tools", 7, partial(profiled, name, bench), 10)
    for tool in SANITIZERS:
        for name in MECHANISMS:
            yield Row(f"{tool}, {name}", "tools", 12, partial(sanitized, tool, name, bench), 60)
    for name in MECHANISMS:
        yield Row(f"ncu, {name}", "tools", 13, partial(counted, name, bench), 60)


def call_of(name: str, bench: Bench, small: bool) -> Callable[[], Any]:
    """Return a call of a mechanism, at its smallest size or at that of the other rows."""
    length = 48 if bench.dry else 200 if small else LENGTH
    make = partial(torch.randn, device=bench.device, generator=bench.generator())
    dtype, dim = (torch.float32, 16) if bench.dry else (torch.bfloat16, 64)
    if name == "memory":
        import gpu_memory

        sizes = (24, 8, 16) if bench.dry or small else (gpu_memory.TOKENS, gpu_memory.SUB_KEYS, gpu_memory.WIDTH)
        given = gpu_memory.inputs(bench, *sizes)
        return lambda: regard.fast_weight_memory(**given, chunk_size=max(8, sizes[0] // 8), top_k=4, impl="triton")
    spec, one = name.rpartition(", ")[2], name.startswith("decoding")
    heads = 1 if small or bench.dry else 16
    shapes = [(1, heads, 1 if one else length, dim), *2 * [(1, heads, length, dim)]]
    q, k, v = (make(*shape).to(dtype) for shape in shapes)
    if one:
        return torch.no_grad()(lambda: regard.attention(q, k, v, spec, is_causal=True, impl="triton"))

    def both() -> Any:
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        out = regard.attention(*leaves, spec, is_causal=True, impl="triton")
        return torch.autograd.grad(out, leaves, torch.ones_like(out))

    return both


def profiled(name: str, bench: Bench) -> dict[str, Any]:
    """Every kernel of a call: how often it starts, its microseconds, and its share."""
    if bench.dry:
        raise gpu_peers.Missing("a profile needs a GPU")
    from torch.profiler import ProfilerActivity, profile

    call = call_of(name, bench, small=False)
    call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiler:
        call()
        torch.cuda.synchronize()
    found: dict[str, list[float]] = defaultdict(list)
    for event in profiler.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            found[event.name].append(event.time_range.elapsed_us())
    total = sum(map(sum, found.values()))
    kernels = [
        {"kernel": kernel, "launches": len(times), "us": digits(sum(times)), "share": digits(sum(times) / total, 3)}
        for kernel, times in sorted(found.items(), key=lambda item: -sum(item[1]))
    ]
    return {"config": {"length": LENGTH}, "us": digits(total), "kernels": kernels}


def sanitized(tool: str, name: str, bench: Bench) -> dict[str, Any]:
    """What a tool of compute-sanitizer says of the smallest call."""
    text = ran(["compute-sanitizer", "--tool", tool, "--error-exitcode", "99"], name, bench, small=True)
    said = [line.strip("= ") for line in text.splitlines() if "SUMMARY" in line]
    right = any(": 0 errors" in line or ": 0 hazards" in line for line in said)
    return {"tool": tool, "said": said[-1:] or text.splitlines()[-3:], "right": right}


def counted(name: str, bench: Bench) -> dict[str, Any]:
    """What ncu counts in the longest kernels of a call."""
    metrics = ",".join(metric for metric, _ in METRICS.values())
    command = ["ncu", "--csv", "--print-units", "base", "--metrics", metrics, "--launch-count", "200"]
    return {"config": {"length": LENGTH}, "kernels": read_ncu(ran(command, name, bench, small=False))}


def read_ncu(text: str) -> list[dict[str, Any]]:
    """Return the longest kernels in the CSV that ncu prints, one row for each kernel and metric."""
    lines = text.splitlines()
    first = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), None)
    if first is None:
        raise RuntimeError(f"ncu printed no table: {' '.join(lines[-3:])[:300]}")
    names = {metric: (name, factor) for name, (metric, factor) in METRICS.items()}
    found: dict[str, dict[str, Any]] = {}
    for row in csv.DictReader(io.StringIO("\n".join(lines[first:]))):
        own = found.setdefault(row["ID"], {"kernel": row["Kernel Name"].split("(")[0]})
        name, factor = names[row["Metric Name"]]
        own[name] = digits(float(row["Metric Value"].replace(",", "")) * factor)
    return sorted(found.values(), key=lambda own: -own.get("us", 0.0))[:MOST]


def ran(command: list[str], name: str, bench: Bench, small: bool) -> str:
    """Return what a program prints that runs a call.

    Raises:
        gpu_peers.Missing: the machine does not have it.
    """
    if bench.dry or shutil.which(command[0]) is None:
        raise gpu_peers.Missing(f"{command[0]} is not on this machine" if not bench.dry else "it needs a GPU")
    own = [sys.executable, str(Path(__file__).resolve()), name, *["--small"] * small]
    done = subprocess.run([*command, *own], capture_output=True, text=True, timeout=110, check=False)
    return done.stdout + done.stderr


def main() -> None:
    """Run the call of a mechanism once."""
    name, dry = sys.argv[1], not torch.cuda.is_available()
    bench = Bench(dry)
    with small_tiles(bench):
        call_of(name, bench, "--small" in sys.argv)()
    if not dry:
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
