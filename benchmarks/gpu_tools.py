"""Part `tools` of `gpu.py`: which kernels a call takes its time in, by torch's profiler and by ncu, and whether
compute-sanitizer finds fault with them.

A row of compute-sanitizer or ncu runs this file in a process of its own under that program, if the machine has it:

    python benchmarks/gpu_tools.py biweight --small
"""

import contextlib
import csv
import glob
import importlib.util
import io
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
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

SPECS = ("biweight", "relumax", "local-linear", "softmax")
MECHANISMS = (*SPECS, "normrelu", *(f"decoding, {spec}" for spec in SPECS), "memory", "memory, backward")
"""Forward and backward passes of attention, one query against a cache, a memory read and written."""
MORE = ("training step, GDN", "training step, GDN + FwPKM")
"""Of which there are profiles only."""
LENGTH, SMALL = 8192, 208
"""Tokens; the smaller is no multiple of a block."""
SANITIZERS = ("memcheck", "racecheck")
LIMIT = 60
"""Seconds of a program."""
METRICS = {
    "us": ("gpu__time_duration.sum", 1e-3),
    "mib": ("dram__bytes.sum", 2.0**-20),
    "of_memory": ("dram__throughput.avg.pct_of_peak_sustained_elapsed", 1e-2),
    "of_compute": ("sm__throughput.avg.pct_of_peak_sustained_elapsed", 1e-2),
}
"""Of ncu, in its base units, and what turns them into those of the name."""
OTHERS = {
    "of_issue": ("sm__inst_issued.avg.pct_of_peak_sustained_active", 1e-2),
    "of_tensor": ("sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active", 1e-2),
    "of_xu": ("sm__inst_executed_pipe_xu.avg.pct_of_peak_sustained_active", 1e-2),
    "of_warps": ("sm__warps_active.avg.pct_of_peak_sustained_active", 1e-2),
    "registers": ("launch__registers_per_thread", 1),
}
"""Those that not every version of ncu knows, which then has to do without."""
PARALLEL = 7
"""Sanitizers at once, while kernels are compiled."""
MOST = 5
"""Kernels that ncu looks at, the longest first."""


def rows(bench: Bench) -> Iterator[Row]:
    if bench.compiling:
        if bench.at == "cpu":  # what the sanitizers find compiled
            for name in MECHANISMS:
                yield Row(f"regard, small, {name}", "tools", 0, partial(compiled, name, bench))
        return
    for name in (*MECHANISMS, *MORE):
        priority, tunes = (5, 2) if "training" in name else (3, 0)
        yield Row(f"profile, {name}", "tools", priority, partial(profiled, name, bench), 10, tunes)
    for tool in SANITIZERS:
        for name in MECHANISMS:
            yield Row(f"{tool}, {name}", "tools", 12, partial(sanitized, tool, name, bench), LIMIT)
    for name in MECHANISMS:
        yield Row(f"ncu, {name}", "tools", 13, partial(counted, name, bench), LIMIT)


def call_of(name: str, bench: Bench, small: bool) -> tuple[Callable[[], Any], dict[str, Any]]:
    """Return a call of a mechanism, at its smallest size or at that of the other rows, and what it is of."""
    toy = bench.dry or small
    if name.startswith("memory"):
        return memory_call(name, bench, toy)
    if name.startswith("training step"):
        return training_call(name.partition(", ")[2], bench)
    length, dtype = (48, torch.float32) if bench.dry else (SMALL if small else LENGTH, torch.bfloat16)
    spec = name.rpartition(", ")[2]
    if name.startswith("decoding"):
        import gpu_decoding

        batch, dim = 1, 16 if bench.dry else 64 if small else 128
        length = length if toy else 2 * LENGTH
        q, k, v = gpu_decoding.inputs(bench, length, batch, dim)
        config = {"length": length, "batch": batch, "heads": q.shape[1], "kv_heads": k.shape[1], "dim": dim}
        call = torch.no_grad()(partial(gpu_decoding.attend, spec, q, k, v))
        return call, {**config, "dtype": "bfloat16"}
    shape = (1 if toy else 2, 2 if toy else 16, length, 16 if bench.dry else 64)
    q, k, v = (torch.randn(shape, device=bench.device, generator=bench.generator(i)).to(dtype) for i in range(3))

    def both() -> Any:
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        out = regard.attention(*leaves, spec, is_causal=True, impl="triton")
        return torch.autograd.grad(out, leaves, torch.ones_like(out))

    config = dict(zip(("batch", "heads", "length", "dim"), shape, strict=True))
    return both, {**config, "dtype": str(dtype).removeprefix("torch."), "pass": "forward and backward"}


def compiled(name: str, bench: Bench) -> dict[str, Any]:
    call_of(name, bench, small=True)[0]()
    return {}


def memory_call(name: str, bench: Bench, toy: bool) -> tuple[Callable[[], Any], dict[str, Any]]:
    import gpu_memory

    tokens, sub_keys, width = (24, 8, 16) if toy else (gpu_memory.TOKENS, gpu_memory.SUB_KEYS, gpu_memory.WIDTH)
    given = gpu_memory.inputs(bench, tokens, sub_keys, width)
    how: dict[str, Any] = {"chunk_size": tokens // 8 if not toy else 8, "top_k": 4 if toy else gpu_memory.TOP_K}
    config = {"tokens": tokens, "sub_keys": sub_keys, "width": width, "heads": 1, **how, "dtype": "float32"}

    def both() -> Any:
        leaves = {key: given[key].detach().requires_grad_() for key in ("query", "value", "gate")}
        out, _ = regard.fast_weight_memory(**{**given, **leaves}, **how, mix=True, impl="triton")
        return torch.autograd.grad(out.square().sum(), list(leaves.values()))

    if name.endswith("backward"):
        return both, {**config, "pass": "forward and backward"}
    call = partial(regard.fast_weight_memory, **given, **how, mix=True, impl="triton")
    return torch.no_grad()(call), {**config, "pass": "forward"}


def training_call(name: str, bench: Bench) -> tuple[Callable[[], Any], dict[str, Any]]:
    import gpu_models

    config, batch, tokens, _ = gpu_models.layout(name, bench)
    sizes = {"layers": config.num_hidden_layers, "features": config.hidden_size, "dtype": "bfloat16 autocast"}
    return gpu_models.stepper(config, batch, tokens, bench), {"batch": batch, "tokens": tokens, **sizes}


def work_of(name: str, bench: Bench, config: dict[str, Any]) -> dict[str, float]:
    """Bytes that must move, each number once, and operations, where other rows count them, too: of attention over all
    visible pairs, of local linear attention with the steps that it takes; of one query, but for local linear models."""
    import gpu_compact
    import gpu_local_linear
    import gpu_memory

    if name == "memory":
        return {"bytes": gpu_memory.moved(config["tokens"], config["top_k"], config["width"])}
    if name.startswith(("memory", "training step")):
        return {}
    heads, length, dim = config["batch"] * config["heads"], config["length"], config["dim"]
    if name.startswith("decoding"):
        operations = {} if name.endswith("local-linear") else {"operations": 4.0 * heads * length * dim}
        return {"bytes": 4.0 * config["batch"] * config["kv_heads"] * length * dim, **operations}
    if name == "local-linear":
        work = gpu_local_linear.flops(f"regard {name}", bench, length, dim, heads)
    else:
        work = gpu_compact.flops(length, dim, config["batch"], config["heads"])
    assert work is not None
    size = 2 if config["dtype"] == "bfloat16" else 4
    return {"bytes": 8.0 * size * heads * length * dim, "operations": work["both"]}  # q, k, v, out and their gradients


def profiled(name: str, bench: Bench) -> dict[str, Any]:
    """Every kernel of a call: how often it starts, its microseconds, and its share; the time of the call and of its
    part on the host, and there the longest operations; bytes, operations and the rates that they amount to."""
    if bench.dry:
        raise gpu_peers.Missing("a profile needs a GPU")
    from torch.profiler import ProfilerActivity, profile

    call, config = call_of(name, bench, small=False)
    call()
    torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    host = time.perf_counter() - start
    torch.cuda.synchronize()
    wall = time.perf_counter() - start
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
    work = work_of(name, bench, config)
    rates = {rate: digits(work[key] / total / scale)
             for key, (rate, scale) in {"bytes": ("gbps", 1e3), "operations": ("tflops", 1e6)}.items()
             if key in work}  # fmt: skip
    told = sorted(profiler.key_averages(), key=lambda own: -own.self_cpu_time_total)
    host_ops = [{"op": own.key, "calls": own.count, "us": digits(own.self_cpu_time_total)} for own in told[:12]]
    return {
        "config": config, "us": digits(total), "launches": sum(map(len, found.values())), "wall_ms": digits(1e3 * wall),
        "host_ms": digits(1e3 * host), "cpu_us": digits(sum(own.self_cpu_time_total for own in told)),
        "kernels": kernels[:60], "host": host_ops, **work, **rates,
    }  # fmt: skip


def sanitized(tool: str, name: str, bench: Bench) -> dict[str, Any]:
    """What a tool of compute-sanitizer says of the smallest call."""
    text = ran(["compute-sanitizer", "--tool", tool, "--error-exitcode", "99"], name, bench, small=True)
    lines = [line.strip("= ") for line in text.splitlines()]
    said = [line for line in lines if "SUMMARY" in line]
    if not said:
        raise RuntimeError(f"compute-sanitizer gave no summary: {' '.join(lines[-4:])[:400]}")
    right = any(": 0 errors" in line or ": 0 hazards" in line for line in said)
    faults = [line for line in lines if "Invalid" in line or "hazard" in line.lower() or "Error:" in line]
    return {"tool": tool, "said": said[-1:], "right": right, **({} if right else {"faults": faults[:8]})}


def counted(name: str, bench: Bench) -> dict[str, Any]:
    """What ncu counts in the longest kernels of a call."""
    command = ["ncu", "--csv", "--print-units", "base", "--clock-control", "none", "--profile-from-start", "off"]
    for wanted in ({**METRICS, **OTHERS}, METRICS):
        metrics = ",".join(metric for metric, _ in wanted.values())
        text = ran([*command, "--launch-count", "100", "--metrics", metrics], name, bench, small=False)
        if "Failed to find metric" not in text:
            break
    return {"config": call_of(name, bench, small=False)[1], "kernels": read_ncu(text)}


def read_ncu(text: str) -> list[dict[str, Any]]:
    """Return the longest kernels in the CSV that ncu prints, one row for each kernel and metric."""
    lines = text.splitlines()
    first = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), None)
    if first is None:
        raise RuntimeError(f"ncu printed no table: {' '.join(lines[-3:])[:300]}")
    names = {metric: (name, factor) for name, (metric, factor) in {**METRICS, **OTHERS}.items()}
    found: dict[str, dict[str, Any]] = {}
    for row in csv.DictReader(io.StringIO("\n".join(lines[first:]))):
        own = found.setdefault(row["ID"], {"kernel": row["Kernel Name"].split("(")[0]})
        name, factor = names[row["Metric Name"]]
        with contextlib.suppress(ValueError):  # "n/a"
            own[name] = digits(float(row["Metric Value"].replace(",", "")) * factor)
    longest: dict[str, dict[str, Any]] = {}
    for own in sorted(found.values(), key=lambda own: -own.get("us", 0.0)):
        longest.setdefault(own["kernel"], own)
    return list(longest.values())[:MOST]


def ran(command: list[str], name: str, bench: Bench, small: bool) -> str:
    """Return what a program prints that runs a call.

    Raises:
        gpu_peers.Missing: the machine does not have it.
    """
    program = found(command[0])
    if bench.dry or program is None:
        raise gpu_peers.Missing(f"{command[0]} is not on this machine" if not bench.dry else "it needs a GPU")
    own = [sys.executable, str(Path(__file__).resolve()), name, *["--small"] * small]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    if "memcheck" in command:  # a tensor of its own for every allocation, beyond which it looks
        environment["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
    with tempfile.TemporaryFile("w+", errors="replace") as said:
        process = subprocess.Popen(
            [program, *command[1:], *own], stdout=said, stderr=said, env=environment, start_new_session=True
        )
        RUNNING.add(process.pid)
        try:
            process.wait(LIMIT)
        finally:
            RUNNING.discard(process.pid)
            kill(process.pid)
        said.seek(0)
        return said.read()


def found(program: str) -> str | None:
    """Where a program is: on the path, or where CUDA is installed."""
    places = ("/usr/local/cuda*/bin", "/opt/nvidia/nsight-compute/*", "/usr/local/cuda*/compute-sanitizer")
    more = [path for place in places for path in sorted(glob.glob(f"{place}/{program}"))]
    return shutil.which(program) or next(iter(more), None)


RUNNING: set[int] = set()
"""Programs that run now, each the leader of a group."""


def kill(group: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


class Beside:
    """Rows of compute-sanitizer, several at once, while kernels are compiled.

    Args:
        rows: all that may be run.
        ready: whether the kernels of small calls are compiled.
    """

    def __init__(self, rows: Sequence[Row], ready: Callable[[], bool]) -> None:
        self.found: dict[str, dict[str, Any]] = {}
        self.stopped = threading.Event()
        self.threads = []
        checks = [row for row in rows if row.name.startswith(SANITIZERS)]
        for i in range(min(PARALLEL, len(checks))):
            self.threads.append(threading.Thread(target=self._run, args=(checks[i::PARALLEL], ready), daemon=True))
        for thread in self.threads:
            thread.start()

    def _run(self, rows: Sequence[Row], ready: Callable[[], bool]) -> None:
        from gpu_worker import found as entry_of

        while not ready() and not self.stopped.wait(0.2):
            pass
        for row in rows:
            if not self.stopped.is_set():
                entry = entry_of(row, Bench(dry=True))  # which asks nothing of the device
                if not self.stopped.is_set():
                    self.found[row.name] = entry

    def done(self) -> bool:
        return not any(thread.is_alive() for thread in self.threads)

    def stop(self) -> dict[str, dict[str, Any]]:
        """Return what was found; what still runs is killed, and left for later."""
        self.stopped.set()
        for group in list(RUNNING):
            kill(group)
        return dict(self.found)


def main() -> None:
    """Run the call of a mechanism once; what ncu sees only once it is warm."""
    name, dry, small = sys.argv[1], not torch.cuda.is_available(), "--small" in sys.argv
    bench = Bench(dry)
    with small_tiles(bench):
        call, _ = call_of(name, bench, small)
        call()
        if not dry and not small:
            torch.cuda.synchronize()
            torch.cuda.profiler.start()
            call()
            torch.cuda.synchronize()
            torch.cuda.profiler.stop()
    if not dry:
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
