"""Memory of the calls with a state, forward and backward, in a fresh process: linear in the length."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

PROGRAM = """
import sys
import torch
import regard
from regard.recurrent.leaky import leaky_average

which, length = sys.argv[1], int(sys.argv[2])
torch.set_num_threads(1)
CALLS = {
    "linear": lambda q, k, v: regard.linear_attention(q, k, v, "shift-cosine"),
    "decay": lambda q, k, v: regard.linear_attention(q, k, v, "linear", log_decay=-0.01),
    "delta": lambda q, k, v: regard.delta_rule(q, k / 8, v, 1.0),
    "mesa": lambda q, k, v: regard.mesa_attention(q, k, v, ridge=1.0),
    "fading mesa": lambda q, k, v: regard.mesa_attention(q, k, v, ridge=1.0, log_decay=-0.01),
    "leaky": lambda q, k, v: leaky_average(q + k + v, 0.1),
    "packed leaky": lambda q, k, v: leaky_average(q + k + v, 0.1, segment_ids=torch.arange(q.shape[2])[None] // 100),
}


def status(field):
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith(field)) / 1024


def step(length):
    make = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 1, length, 64, generator=make).requires_grad_() for _ in range(3))
    before = status("VmRSS")
    torch.autograd.grad(CALLS[which](q, k, v)[0].sum(), (q, k, v))
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
@pytest.mark.parametrize(
    ("which", "long"),
    [
        ("linear", 65536), ("decay", 16384), ("delta", 16384), ("mesa", 16384), ("fading mesa", 16384),
        ("leaky", 16384), ("packed leaky", 16384),
    ],
)  # fmt: skip
def test_memory_grows_with_the_length_and_no_faster(which: str, long: int) -> None:
    """The queries are 4 MiB at 16384, where a matrix for every query would be 256 MiB and all pairs 1 GiB."""
    few, many = peak(which, long // 4), peak(which, long)
    assert many <= 4.4 * few
    assert many <= 24 * long / 4096
