"""Memory of the global linear relatives, forward and backward, in a fresh process: linear in the length."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

PROGRAM = """
import sys
import torch
import regard

which, length = sys.argv[1], int(sys.argv[2])
torch.set_num_threads(1)


def status(field):
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith(field)) / 1024


def run(q, k, v):
    if which == "mesa":
        return regard.mesa_attention(q, k, v, ridge=1.0)[0]
    if which == "fading mesa":
        return regard.mesa_attention(q, k, v, ridge=1.0, log_decay=-0.01)[0]
    if which == "delta":
        return regard.delta_rule(q, k / 8, v, 1.0)[0]
    return regard.linear_attention(q, k, v, "linear", log_decay=-0.01)[0]


def step(length):
    make = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 1, length, 64, generator=make).requires_grad_() for _ in range(3))
    before = status("VmRSS")
    torch.autograd.grad(run(q, k, v).sum(), (q, k, v))
    return status("VmHWM") - before


step(256)
print(step(length))
"""


def peak(which: str, length: int) -> float:
    """MiB of one forward and backward pass beside its inputs."""
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "131072"}
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM, which, str(length)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr
    return float(done.stdout)


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize("which", ["mesa", "fading mesa", "delta", "decay"])
def test_memory_grows_with_the_length_and_no_faster(which: str) -> None:
    """The queries are 1 MiB at 4096, 4 at 16384; a matrix for every query would be 256 MiB; all pairs 1 GiB."""
    short, long = peak(which, 4096), peak(which, 16384)
    assert long <= 4.4 * short
    assert long <= 24 * 4
