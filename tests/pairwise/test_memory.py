"""Peak memory of a forward and a backward pass, measured in a fresh process."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("numba")

PROGRAM = """
import sys
import torch, regard

torch.set_num_threads(1)
call, shape = eval(sys.argv[1]), tuple(map(int, sys.argv[2:]))


def status(field):
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith(field)) / 1024


def step(*shape):
    make = torch.Generator().manual_seed(0)
    count = call.__code__.co_argcount
    inputs = [torch.randn(shape, generator=make).requires_grad_() for _ in range(count)]
    upstream = torch.randn(shape, generator=make)
    before = status("VmRSS")
    torch.autograd.grad(call(*inputs), inputs, upstream)
    return status("VmHWM") - before


step(*shape[:-2], 256, shape[-1])
print(step(*shape))
"""

SCORES = (2048, 2048)  # 16 MiB
HEAD = (1, 1, 16384, 64)  # all pairs at once are 1024 MiB
HEADS = (1, 8, 8192, 64)  # 16 MiB; all pairs at once are 256 MiB a head
NORMALISERS = ("entmax(z, 1.5", "entmax(z, 3.0", "sparsemax(z", "relumax(z", "normrelu(z", "topk_softmax(z, 32")
SPECS = ("biweight", "sparsemax", "relumax", "topk-softmax", "biweight*nearest(k=32)")
CASES = [
    *((f"lambda z: regard.{call}, impl='cpu')", SCORES, 2.6 * 16) for call in NORMALISERS),
    *((f"lambda q, k, v: regard.attention(q, k, v, '{s}', is_causal=True, impl='cpu')", HEAD, 64) for s in SPECS),
    *(
        (
            f"lambda q, k, v: regard.local_linear_attention(q, k, v, spec='{s}', ridge=0.1, tol=1e-3, is_causal=True)",
            HEADS,
            12 * 16 + 64,
        )
        for s in ("softmax", "biweight")
    ),
]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize(("call", "shape", "most"), CASES)
def test_peak_memory(call: str, shape: tuple[int, ...], most: float) -> None:
    """MiB beyond the inputs and the upstream gradient; output and gradients are included."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, call, *map(str, shape)], capture_output=True, text=True, timeout=880,
        env={**os.environ, "MALLOC_MMAP_THRESHOLD_": "131072"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert 1 < float(done.stdout) <= most
