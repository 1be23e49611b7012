"""impl="cpu" of attention as torch and its callers see it: operators, compiled graphs, which implementation runs with
and without numba, and memory."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from dense import close
from test_cpu_attention import CASES, KEYS, K, arguments, attend, clustered, gradients, truth
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import regard
from regard.checks import ArgumentError

pytest.importorskip("numba")

from regard.pairwise.cpu import implementation as cpu

# Operators and graphs ----------------------------------------------------------------------------------------


class Recorder(TorchDispatchMode):
    """Notes the calls of regard's own operators."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "regard":
            self.calls.append((func, args))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("label", ["biweight", "relumax", f"biweight*nearest(k={K})", "normrelu"])
def test_opcheck(label: str) -> None:
    for keys, name in ((40, "pairs, causal"), (KEYS, "offsets, padding")):
        data = clustered(label, 17, keys, batch=2, heads=2, kv_heads=1, learned=True)
        with Recorder() as seen:
            attend(label, data, arguments(name, 2, 2, 17, keys)).sum().backward()
        assert [func.name() for func, _ in seen.calls] == [
            "regard::local_constant_forward",
            "regard::local_constant_backward",
        ]
        for func, args in seen.calls:
            once = "backward" in func.name()
            fresh = tuple(
                x.detach().clone().requires_grad_(not once and x.is_floating_point()) if isinstance(x, Tensor) else x
                for x in args
            )
            torch.library.opcheck(func, fresh)


@pytest.fixture
def _fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("_fresh_dynamo")
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("label", ["biweight", "relumax", f"gaussian*nearest(k={K})"])
def test_compiled_equals_eager(label: str, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu.NumbaRows, "elements", 1)  # blocks of one head, which leave keys out

    def run(q: Tensor, k: Tensor, v: Tensor, scale: Tensor, params: dict[str, Tensor]) -> Tensor:
        return regard.attention(q, k, v, label, scale=scale, params=params, is_causal=True, impl="cpu")

    compiled = torch.compile(run, backend=backend, fullgraph=True)
    data = clustered(label, 40, KEYS, learned=True)
    again = data.to(torch.float64)
    one = run(data.q, data.k, data.v, data.scale, data.params)
    two = compiled(again.q, again.k, again.v, again.scale, again.params)
    close(two, one, 1e-12)
    for (name, a), b in zip(gradients(one, data).items(), gradients(two, again).values(), strict=True):
        close(b, a, 1e-11, name)


def test_one_derivative_and_no_transform() -> None:
    data = clustered("biweight", 5, 9)
    out = attend("biweight", data, {})
    first = torch.autograd.grad(out.sum(), data.q, create_graph=True)[0]
    with pytest.raises(ArgumentError, match="impl='reference'"):
        torch.autograd.grad(first.sum(), data.k)
    with pytest.raises(ArgumentError, match="impl='cpu'"):
        torch.func.vmap(lambda q: regard.attention(q, data.k, data.v, "biweight", impl="cpu"))(data.q[None])


# Which implementation runs -----------------------------------------------------------------------------------

WITHOUT = "needs numba, which is not installed: pip install 'regard[cpu]'"


def test_auto_takes_it_and_says_so() -> None:
    for label in (*CASES, "local-linear[biweight]"):
        assert regard.explain(label, (1, 2, 300, 16)).chosen == "cpu", label
    for label in ("softmax", "linear", "gaussian*nearest(k=5,gradient=soft)", "local-linear"):
        explained = regard.explain(label, (1, 2, 300, 16))
        assert explained.chosen != "cpu"
        assert next(reason for name, reason, _ in explained.rows if name == "cpu")


def test_without_numba(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "MISSING", WITHOUT)
    data = clustered("biweight", 20, 40)
    with pytest.raises(ArgumentError, match=r"pip install 'regard\[cpu\]'") as caught:
        attend("biweight", data, {})
    assert "impl='cpu'" in str(caught.value)
    assert "blocked" in str(caught.value)
    assert "\n" not in str(caught.value)
    explained = regard.explain("biweight", (1, 1, 20, 9))
    assert explained.chosen == "blocked"
    assert ("cpu", WITHOUT, None) in explained.rows
    assert WITHOUT in str(explained)

    def fail(*_: Any, **__: Any) -> None:
        raise AssertionError("the row solvers ran")

    monkeypatch.setattr(cpu.NumbaRows, "solve", fail)
    out = regard.attention(data.q, data.k, data.v, "biweight", scale=data.scale, params=data.params)
    close(out, truth("biweight", data, {}), 1e-11)
    close(gradients(out, data)["key"], gradients(truth("biweight", data, {}), data)["key"], 1e-11)


# Memory ------------------------------------------------------------------------------------------------------

PROGRAM = """
import sys
import torch, regard
torch.set_num_threads(1)
label, length = sys.argv[1], int(sys.argv[2])
def status(field):
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith(field)) / 1024
def step(length):
    make = torch.Generator().manual_seed(0)
    q, k, v, g = (torch.randn(1, 1, length, 64, generator=make) for _ in range(4))
    before = status("VmRSS")
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    torch.autograd.grad(regard.attention(q, k, v, label, is_causal=True, impl="cpu"), (q, k, v), g)
    return status("VmHWM") - before
step(256)
print(step(length))
"""


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize("label", ["biweight", "sparsemax", "relumax", "topk-softmax", "biweight*nearest(k=32)"])
def test_16384_positions_within_64_mib(label: str) -> None:
    """One head of 64 features, forward and backward: all the memory beside the inputs, output and gradients included;
    all pairs at once would be 1024 MiB a tensor."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, label, "16384"], capture_output=True, text=True, timeout=580,
        env={**os.environ, "MALLOC_MMAP_THRESHOLD_": "131072"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) <= 64
