"""The files of `interpreted/` in processes of their own, with Triton's interpreter on: the kernels run on the CPU,
statement by statement, and are compared with dense float64 formulas there."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from programs import python

pytest.importorskip("triton")

HERE = Path(__file__).resolve().parent
FILES = sorted(path.name for path in (HERE / "interpreted").glob("test_*.py"))
KINDS = ("attention", "compact", "decode", "local_linear", "memory", "others")
GROUPS: dict[str, list[str]] = {kind: [] for kind in KINDS}
for file in FILES:
    GROUPS[next((kind for kind in KINDS if file.startswith(f"test_{kind}")), "others")].append(file)
"""Files that share a process where they are not run at length: every start takes seconds."""
NO_TESTS = 5
"""What pytest returns where nothing was chosen."""


def run(names: list[str], marks: str, seconds: int = 590, *more: str) -> tuple[int, str]:
    """(exit code, output) of the tests of files that have these marks; none may take more than some minutes, nor all
    of them so many seconds."""
    command = [sys.executable, "-m", "pytest", *(str(HERE / "interpreted" / name) for name in names), "-q", "-m", marks]
    command += ["-p", "no:cacheprovider", "-p", "pytest_timeout", "--timeout", "560", "--durations", "3", *more]
    # what the process that asks was told (by pytest-xdist, for one) is not for this one, and plugins take seconds
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    own = {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    environment = {**inherited, **own}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=seconds, env=environment, cwd=HERE.parents[1], check=False
    )
    return done.returncode, done.stdout + done.stderr


def passed(output: str) -> int:
    found = re.search(r"(\d+) passed", output)
    return int(found[1]) if found else 0


def tail(output: str) -> str:
    return "\n".join(output.splitlines()[-60:])


def test_there_are_files_to_run() -> None:
    assert all(GROUPS.values())


def test_a_few_cases_of_every_file_in_the_interpreter() -> None:
    code, output = run(FILES, "not slow", 590, "--few", "3")
    assert code == 0, tail(output)
    assert passed(output) > 2 * len(FILES), tail(output)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_kernels_in_the_interpreter(kind: str) -> None:
    code, output = run(GROUPS[kind], "not slow")
    assert code == 0, tail(output)
    assert passed(output) > 0, tail(output)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", FILES)
def test_kernels_in_the_interpreter_at_length(name: str) -> None:
    code, output = run([name], "slow", 1780)
    assert code in (0, NO_TESTS), tail(output)
    assert passed(output) > 0 or code == NO_TESTS, tail(output)


def test_without_the_interpreter_its_tests_are_left_out() -> None:
    """A process that has triton compile cannot run them."""
    words = ("-m", "pytest", HERE / "interpreted", "-q", "--collect-only", "-p", "no:xdist")
    python(*words, code=NO_TESTS, TRITON_INTERPRET="0", PYTEST_ADDOPTS="")
