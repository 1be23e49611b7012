"""Every file of `interpreted/` in a process of its own, with Triton's interpreter on: the kernels run on the CPU,
statement by statement, and are compared with dense float64 formulas there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

HERE = Path(__file__).resolve().parent
FILES = sorted(path.name for path in (HERE / "interpreted").glob("test_*.py"))
NO_TESTS = 5
"""What pytest returns where nothing was chosen."""


def run(name: str, marks: str) -> tuple[int, str]:
    """(exit code, output) of the tests of a file that have these marks."""
    command = [sys.executable, "-m", "pytest", str(HERE / "interpreted" / name), "-q", "-m", marks]
    command += ["-p", "no:cacheprovider", "-p", "no:xdist", "--timeout", "560", "--durations", "3"]
    # what the process that asks was told (by pytest-xdist, for one) is not for this one
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    environment = {**inherited, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=590, env=environment, cwd=HERE.parents[1], check=False
    )
    return done.returncode, done.stdout + done.stderr


def passed(output: str) -> int:
    found = re.search(r"(\d+) passed", output)
    return int(found[1]) if found else 0


def tail(output: str) -> str:
    return "\n".join(output.splitlines()[-60:])


def test_there_are_files_to_run() -> None:
    assert FILES


@pytest.mark.parametrize("name", FILES)
def test_kernels_in_the_interpreter(name: str) -> None:
    code, output = run(name, "not slow")
    assert code == 0, tail(output)
    assert passed(output) > 0, tail(output)


@pytest.mark.slow
@pytest.mark.parametrize("name", FILES)
def test_kernels_in_the_interpreter_at_length(name: str) -> None:
    code, output = run(name, "slow")
    assert code in (0, NO_TESTS), tail(output)
    assert passed(output) > 0 or code == NO_TESTS, tail(output)


def test_without_the_interpreter_its_tests_are_left_out() -> None:
    """A process that has triton compile cannot run them."""
    command = [sys.executable, "-m", "pytest", str(HERE / "interpreted"), "-q", "--collect-only", "-p", "no:xdist"]
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET" and not k.startswith("PYTEST_")}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment, check=False)
    assert done.returncode == NO_TESTS, tail(done.stdout)
