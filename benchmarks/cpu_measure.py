"""Measure for `cpu.py`: times in turns, memory in fresh processes, and the machine and versions."""

import contextlib
import datetime
import gc
import importlib.metadata
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from regard.doctor import processor

ROOT = Path(__file__).resolve().parents[1]
PASSES = ("forward", "both")
"""The forward pass without a graph, and forward and backward through autograd."""
Function = Callable[..., Tensor]
MALLOC = {"MALLOC_MMAP_THRESHOLD_": "131072", "MALLOC_TRIM_THRESHOLD_": "131072"}
"""Settings of the processes whose memory is measured: glibc then gives freed blocks back at once. Left to itself it
keeps some, differently from run to run, which says nothing about what a pass needs."""


def say(text: str) -> None:
    print(text, flush=True)


def runner(function: Function, inputs: Sequence[Tensor], cotangent: Tensor, which: str) -> Callable[[], Any]:
    """One pass as a call without arguments; the leaves of "both" are fresh each time."""

    def forward() -> Tensor:
        with torch.no_grad():
            return function(*inputs)

    def both() -> tuple[Tensor, ...]:
        leaves = [x.detach().requires_grad_() for x in inputs]
        return torch.autograd.grad(function(*leaves), leaves, cotangent)

    return forward if which == "forward" else both


def warm_up(functions: dict[str, Function], make: Callable[[dict[str, Any]], Any], config: dict[str, Any]) -> None:
    """Both passes of every function at a small size: what compiles does so here, and not while it is timed."""
    say("  warming up; the first run ever compiles, which takes a minute")
    inputs, cotangent = make({**config, "warm": True})
    for function in functions.values():
        for which in PASSES:
            runner(function, inputs, cotangent, which)()


def interleaved(calls: dict[str, Callable[[], Any]], *, most: int, budget: float) -> dict[str, list[float]]:
    """Seconds of every call by name, taken in turns so that whatever else the machine does meets all alike.

    Args:
        calls: name to call; each runs once or twice before, uncounted.
        most: samples of a call at most; three at least, or two of a call that takes over three seconds.
        budget: seconds that the samples of one call may take together, roughly.

    A slow call, which gets fewer samples, has them spread over the rounds.
    """
    counts = {}
    for name, call in calls.items():
        warm = timed(call)
        if warm < budget:
            warm = timed(call)
        counts[name] = min(most, max(int(budget / warm), 2 if warm > 3 else 3))
    rounds = max(counts.values())
    fewer = ", ".join(f"{name} {n}" for name, n in counts.items() if n < rounds)
    say(f"    {rounds} rounds of {len(calls)} contestants" + (f"; fewer samples: {fewer}" if fewer else ""))
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(rounds):
        for name, call in calls.items():
            if (turn + 1) * counts[name] // rounds > turn * counts[name] // rounds:
                samples[name].append(timed(call))
    return samples


def timed(call: Callable[[], Any]) -> float:
    """Seconds of one call; no garbage collection in between, and what it returns is freed after the clock stopped."""
    gc.disable()
    start = time.perf_counter()
    found = call()
    seconds = time.perf_counter() - start
    gc.enable()
    del found
    return seconds


def digits(x: float, n: int = 4) -> float:
    """x with n significant digits: more would only be noise in a stored file."""
    return float(f"{x:.{n}g}")


def summary(samples: dict[str, list[float]], baseline: str) -> dict[str, dict[str, Any]]:
    """By name: median_ms, min_ms, spread (interquartile range over median), ratio and ratio_min to the baseline's
    median and minimum, and raw_ms."""
    found = {}
    for name, seconds in samples.items():
        middle = statistics.median(seconds)
        low, _, high = statistics.quantiles(seconds, n=4, method="inclusive") if len(seconds) > 1 else [middle] * 3
        found[name] = {
            "median_ms": digits(middle * 1e3),
            "min_ms": digits(min(seconds) * 1e3),
            "spread": digits((high - low) / middle, 2),
            "ratio": digits(middle / statistics.median(samples[baseline])),
            "ratio_min": digits(min(seconds) / min(samples[baseline])),
            "raw_ms": [digits(s * 1e3) for s in seconds],
        }
    return found


def growth(points: Iterable[tuple[float, float]]) -> dict[str, float]:
    """Exponents of time in length: `fitted` by least squares of log(time) on log(length), `last` between the two
    longest."""
    logs = sorted((math.log(length), math.log(seconds)) for length, seconds in points)
    x, y = zip(*logs, strict=True)
    return {
        "fitted": digits(statistics.linear_regression(x, y).slope, 3),
        "last": digits((y[-1] - y[-2]) / (x[-1] - x[-2]), 3),
    }


# Memory ------------------------------------------------------------------------------------------------------


def child_peaks(part: str, name: str, config: dict[str, Any], threads: int) -> dict[str, float]:
    """MiB by pass, beside the inputs, of one contestant in a fresh process (`peaks`)."""
    order = json.dumps({"part": part, "name": name, "config": config, "threads": threads})
    command = [sys.executable, str(Path(__file__).with_name("cpu.py")), "--child", order]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **MALLOC}, timeout=600)
    if done.returncode:
        raise RuntimeError(f"memory of {name} with {config}:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def peaks(function: Function, make: Callable[[dict[str, Any]], Any], config: dict[str, Any]) -> dict[str, float]:
    """MiB by pass that this process held at most (VmHWM), beyond what it held before the pass with inputs and
    cotangent made (VmRSS). Output and gradients count. A pass at a small size goes before, to warm up."""
    small, small_cotangent = make({**config, "warm": True})
    given, cotangent = make(config)
    found = {}
    for which in PASSES:
        runner(function, small, small_cotangent, which)()
        gc.collect()
        with contextlib.suppress(OSError), open("/proc/self/clear_refs", "w") as peak:
            peak.write("5")  # VmHWM starts anew from VmRSS; where that is refused, an earlier peak may count
        before = _status("VmRSS")
        held = runner(function, given, cotangent, which)()
        found[which] = round(_status("VmHWM") - before, 2)
        del held
    return found


def _status(field: str) -> float:
    """A field of /proc/self/status, in MiB."""
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith(field)) / 1024


# Provenance --------------------------------------------------------------------------------------------------


def provenance(quick: bool) -> dict[str, Any]:
    """Where, when and with what a part is measured."""
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "command": " ".join([Path(sys.executable).name, *sys.argv]),
        "quick": quick,
        "cpu": processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load": [round(x, 2) for x in os.getloadavg()],
        "environment": {k: v for k, v in sorted(os.environ.items()) if k.endswith("_NUM_THREADS") or k in MALLOC},
        "memory_environment": MALLOC,
        "versions": {
            "python": platform.python_version(),
            **{
                name: importlib.metadata.version(name)
                for name in ("regard", "torch", "numba", "entmax", "transformers")
            },
        },
        "commit": _git("rev-parse", "HEAD"),
        "changed_files": len(_git("status", "--porcelain", "--untracked-files=no").splitlines()),
    }


def _git(*arguments: str) -> str:
    """What git says, or nothing where there is no repository."""
    try:
        return subprocess.run(
            ["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=True
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""
