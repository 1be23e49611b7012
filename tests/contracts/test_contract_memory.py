"""Memory beside inputs and gradients, measured in a fresh process: the peak of the whole run (VmHWM) over what
the process held before it, after a warm-up at a small length.

glibc is told to give freed blocks back at once. Left to itself it keeps some, differently from run to run, which says
nothing about what a pass needs.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from .cases import PRESETS, SPECS

LIMIT_MIB = 64

PROGRAM = """
import sys
import torch
import regard

label, impl, length, dim = sys.argv[1], sys.argv[2], int(sys.argv[3]), 64
torch.set_num_threads(1)
spec = regard.Spec.parse(label)


def status(field):
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith(field)) / 1024


def inputs(length):
    make = torch.Generator().manual_seed(0)
    return [torch.randn(1, 1, length, dim, generator=make) for _ in range(4)]  # q, k, v and the output's gradient


def step(q, k, v, g):
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    out = regard.attention(q, k, v, spec, is_causal=True, impl=impl)
    return torch.autograd.grad(out, (q, k, v), g, allow_unused=True)


step(*inputs(256))
given = inputs(length)
before = status("VmRSS")
found = step(*given)
gradients = sum(x.numel() * 4 for x in found if x is not None) / 2**20
print(status("VmHWM") - before - gradients)
"""


def extra(label: str, impl: str, length: int) -> float:
    """MiB of one causal forward and backward pass of one head of 64 features, float32, beside its inputs and
    gradients."""
    command = [sys.executable, "-c", PROGRAM, label, impl, str(length)]
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "131072"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=580, env=environment)
    assert done.returncode == 0, done.stderr
    return float(done.stdout)


ON_LINUX = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
DENSE = [n for n in PRESETS if SPECS.get(n) is not None and SPECS[n].degree == 0]
VARIED = [
    "biweight*nearest(k=32)",
    "gaussian*nearest(k=32,gradient=soft)",
    "gaussian*nearest(k=32,gradient=straight-through)",
    "gaussian*anchored",
    "uniform*anchored",
    "polynomial(r=0.5)*adaptive",
    "polynomial(r=1.5)*adaptive",
]


@ON_LINUX
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("label", "impl"), [*((name, "blocked") for name in (*DENSE, *VARIED)), ("softmax", "sdpa"), ("rbf", "sdpa")]
)
def test_16384_positions_within_64_mib(label: str, impl: str) -> None:
    assert extra(label, impl, 16384) <= LIMIT_MIB


@ON_LINUX
def test_the_measure_sees_all_pairs() -> None:
    """The reference at 2048 builds several tensors of 16 MiB: a measure that missed them would prove nothing."""
    assert extra("relumax", "reference", 2048) > 48
