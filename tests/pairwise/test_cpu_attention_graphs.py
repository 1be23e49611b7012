"""impl="cpu" of attention as torch and its callers see it: operators, compiled graphs, which implementation runs with
and without numba, and memory."""

from typing import Any

import pytest
import torch
from contracts.oracle import close
from operators import check_operators
from test_cpu_attention import CASES, KEYS, K, arguments, attend, clustered, gradients, truth
from torch import Tensor

import regard
from regard.checks import ArgumentError

pytest.importorskip("numba")

from regard.pairwise.cpu import implementation as cpu

# Operators and graphs ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("label", ["biweight", "relumax", f"biweight*nearest(k={K})", "epanechnikov*fixed(bias=0.5)"])
def test_opcheck(label: str) -> None:
    for keys, name in ((40, "pairs, causal"), (KEYS, "offsets, padding")):
        data = clustered(label, 17, keys, batch=2, heads=2, kv_heads=1, learned=True)
        check_operators(lambda: attend(label, data, arguments(name, 2, 2, 17, keys)), "blocked")  # noqa: B023


@pytest.mark.usefixtures("fresh_dynamo")
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
