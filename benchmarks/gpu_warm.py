"""Before `gpu.py` measures: compile the kernels of its rows in several processes at once, into Triton's cache.

Compiling takes longer than measuring, and one process compiles one kernel after another. Here every process runs its
share of the rows with tensors on the CPU, and compiles what they would launch (`regard.triton.tools.compiled`).
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

MOST = 8
"""Processes."""


def kinds(rows: Sequence[Any]) -> list[Any]:
    """Of rows of regard's own kernels that differ in lengths and inputs alone, the first: nothing is compiled for
    lengths, which are all multiples of 16 (`tests/triton/test_lengths.py`)."""
    found: dict[str, Any] = {}
    for row in rows:
        own = "regard" in row.name or row.part == "correctness" or row.name.startswith(("memory", "floor"))
        if own and ("impl=" not in row.name or "impl=triton" in row.name):
            found.setdefault(kind(row.name), row)
    return list(found.values())


def kind(name: str) -> str:
    return re.sub(r"T \d+|\d+ keys, B \d+|live [\d.]+, |floor, \w+, ", "", name)


def compile_share(rows: Sequence[Any], number: int, of: int, arch: int) -> None:
    """What the process `number` of so many does. A row that fails will fail again where it is measured, and be told."""
    from regard.triton.tools.compiled import resources_of

    for row in kinds(rows)[number::of]:
        with contextlib.suppress(Exception):
            start = time.perf_counter()
            resources_of(row.run, arch)
            print(f"{time.perf_counter() - start:.1f} s  {row.name}", flush=True)


def warm(arguments: Sequence[str], seconds: float, arch: int) -> int:
    """Start the processes and wait until they are done, or the time is up; how many were done by themselves.

    Args:
        arguments: of `gpu.py`, which choose the rows.
    """
    count = max(1, min(MOST, (os.cpu_count() or 1) // 2))
    script, end = str(Path(__file__).with_name("gpu.py")), time.monotonic() + seconds
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    started = [
        subprocess.Popen(
            [sys.executable, script, *arguments, "--compile", f"{i}/{count}/{arch}"], env=environment, **quiet
        )  # type: ignore[call-overload]
        for i in range(count)
    ]
    done = 0
    for process in started:
        try:
            process.wait(max(0.1, end - time.monotonic()))
            done += 1
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    return done
