"""Linear attention under torch.compile, its operators as torch wants them, and its memory."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import regard


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def draw(length: int, seed: int = 0) -> list[Tensor]:
    make = torch.Generator().manual_seed(seed)
    return [torch.randn(2, h, length, 4, generator=make).requires_grad_() for h in (4, 2, 2)]


@pytest.mark.parametrize(
    "spec",
    ["linear", *(pytest.param(s, marks=pytest.mark.slow) for s in ("shift-cosine", "relu", "linear*fixed*normalised"))],
)
def test_one_whole_graph(spec: str) -> None:
    """Prefill and a later chunk with its state, forward and backward, at several lengths."""

    def run(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        half = q.shape[2] // 2
        first, state = regard.linear_attention(
            q[:, :, :half], k[:, :, :half], v[:, :, :half], spec, attn_mask=mask[:, :half]
        )
        second, state = regard.linear_attention(
            q[:, :, half:], k[:, :, half:], v[:, :, half:], spec, state=state, attn_mask=mask[:, half:]
        )
        return torch.cat([first, second], 2), state.values

    compiled = torch.compile(run, backend="aot_eager", fullgraph=True, dynamic=True)
    for length in (10, 24, 70):
        mask = torch.ones(2, length, dtype=torch.bool)
        mask[0, :3] = False
        results = []
        for fn in (run, compiled):
            inputs = draw(length)
            found = fn(*inputs, mask)
            grads = torch.autograd.grad(found[0].sin().sum() + found[1].sum(), inputs)
            results.append((*found, *grads))
        for one, two in zip(*results, strict=True):
            torch.testing.assert_close(two, one, rtol=1e-4, atol=1e-4)


def test_a_step_compiles_once() -> None:
    """Decoding: the state goes in and out, and its size never changes."""
    spec = "elu"
    count = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")

    def step(q: Tensor, k: Tensor, v: Tensor, state: Any) -> Any:
        return regard.linear_attention(q, k, v, spec, state=state)

    compiled = torch.compile(step, backend=count, fullgraph=True)
    inputs = [x.detach() for x in draw(12)]
    state = regard.linear_attention(*(x[:, :, :4] for x in inputs), spec)[1]
    whole, _ = regard.linear_attention(*inputs, spec)
    counts = []
    with torch.no_grad():
        for t in range(4, 12):
            out, state = compiled(*(x[:, :, t : t + 1].contiguous() for x in inputs), state)
            torch.testing.assert_close(out, whole[:, :, t : t + 1], rtol=1e-5, atol=1e-5)
            counts.append(count.frame_count)
    assert state.tokens == 12
    assert counts[2:] == [counts[2]] * 6  # once dynamo knows that the number of tokens changes


class Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "regard":
            self.calls.append((func, args))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("spec", ["shift-cosine", "linear*fixed*normalised"])
def test_opcheck(spec: str) -> None:
    """Every operator that a forward and a backward pass calls, with a state, a mask and a learned bias."""
    first = regard.linear_attention(*draw(3, seed=1), spec)[1].detach()
    mask = torch.ones(2, 9, dtype=torch.bool)
    mask[0, :3] = False
    bias = torch.full((2, 4, 9), 0.5, requires_grad=True)
    for call in ({}, {"state": first, "attn_mask": mask, "params": {"bias": bias}}):
        with Recorder() as seen:
            out, state = regard.linear_attention(*draw(9), spec, chunk_size=4, **call)
            (out.sum() + state.values.sum()).backward()
        assert [func.name() for func, _ in seen.calls][-2:] == ["regard::linear_forward", "regard::linear_backward"]
        for func, args in seen.calls[-2:]:
            gradient = "forward" in func.name()  # differentiable once
            fresh = [
                x.detach().clone().requires_grad_(gradient and x.is_floating_point()) if isinstance(x, Tensor) else x
                for x in args
            ]
            torch.library.opcheck(func, tuple(fresh))


PROGRAM = """
import sys
import torch
import regard

length = int(sys.argv[1])
torch.set_num_threads(1)


def status(field):
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith(field)) / 1024


def inputs(length):
    make = torch.Generator().manual_seed(0)
    return [torch.randn(1, 1, length, 64, generator=make) for _ in range(4)]


def step(q, k, v, g):
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    out, _ = regard.linear_attention(q, k, v, "shift-cosine")
    return torch.autograd.grad(out, (q, k, v), g)


step(*inputs(256))
given = inputs(length)
before = status("VmRSS")
found = step(*given)
print(status("VmHWM") - before)
"""


def peak(length: int) -> float:
    """MiB of one forward and backward pass beside its inputs, in a fresh process."""
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "131072"}
    command = [sys.executable, "-c", PROGRAM, str(length)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr
    return float(done.stdout)


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_memory_grows_with_the_length_and_no_faster() -> None:
    """A tensor of a position's 64 features is 16 MiB at 65536; all pairs would be 16 GiB."""
    short, long = peak(16384), peak(65536)
    assert long <= 4.4 * short
    assert long <= 16 * 16
