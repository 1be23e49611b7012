"""The softmax-like functions with impl="cpu": derivatives, transforms, graphs, export; with and without numba."""

import builtins
from typing import Any

import pytest
import torch
from contracts import oracle
from contracts.oracle import close
from mistakes import refuses
from normalisers import CALLS, LEARNED, function, normal
from operators import check_operators
from programs import python
from torch import Tensor

import regard

pytest.importorskip("numba")

from regard.grammar.kernels.uniform import Uniform
from regard.pairwise.cpu import implementation as cpu


def ours(name: str):
    return function(name, "cpu")


def with_parameter(name: str, z: Tensor, impl: str = "cpu") -> tuple[Tensor, Tensor]:
    """(weights, parameter): the parameter of one row for all rows, collecting gradients."""
    call, value = LEARNED[name]
    number = (value[:1] if value.dim() else value).clone().requires_grad_()
    return call(z, number, impl=impl), number


def test_gradients_are_made_where_they_are_wanted() -> None:
    z = normal(3, 20)
    with torch.no_grad():
        assert not regard.entmax(z.requires_grad_(), impl="cpu").requires_grad
    with torch.inference_mode():
        close(regard.entmax(z, impl="cpu").sum(-1), torch.ones(3), 1e-14)
    p = regard.entmax(z, impl="cpu")
    p.sum().backward(retain_graph=True)
    p.sum().backward()  # twice through one graph
    close(z.grad, torch.zeros(3, 20), 1e-14)
    assert not regard.topk_uniform(z, 3, impl="cpu").requires_grad  # a choice has no gradient


def test_transforms_are_refused() -> None:
    """impl="cpu" has none; impl="auto" runs the reference under them, as tests/contracts checks."""
    z = normal(4, 30)
    with torch.autograd.forward_ad.dual_level():
        refuses("impl='cpu'", regard.entmax, torch.autograd.forward_ad.make_dual(z, z), impl="cpu")
    refuses("impl='cpu'", torch.func.vmap(lambda x: regard.entmax(x, impl="cpu")), z)


def test_what_has_no_loop_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    refuses("runs on the CPU only; the scores are on meta", regard.entmax, normal(2, 3).to("meta"), impl="cpu")
    monkeypatch.setattr(Uniform, "numba_relative", staticmethod(lambda d, reach: (1.0, 0.0)), raising=False)
    only = "supports numba_relative only for compact kernels that are continuous at the threshold and have no param"
    refuses(only, regard.attention, *normal(3, 1, 1, 4, 2), "uniform*anchored", impl="cpu")


@pytest.mark.parametrize("name", ["entmax-1.5", "normrelu-nearest", "topk_softmax", *LEARNED])
def test_opcheck(name: str) -> None:
    z = normal(3, 40).requires_grad_()
    check_operators(lambda: with_parameter(name, z)[0] if name in LEARNED else ours(name)(z), "normalise")


def test_the_reference_exports_to_operators_of_torch_alone() -> None:
    class Layer(torch.nn.Module):
        def forward(self, z: Tensor) -> Tensor:
            return regard.entmax(z, 1.5, impl="reference") + regard.relumax(z, impl="reference")

    z = normal(3, 40)
    program = torch.export.export(Layer(), (z,))
    assert not any("regard" in str(node.target) for node in program.graph.nodes)
    for other in (z, normal(3, 40, seed=9)):
        expected = oracle.of_scores(other, "adaptive", r=2.0) + oracle.of_scores(other, "anchored", margin=1.0)
        close(program.module()(other), expected, 1e-12)


def test_auto_takes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    z, ran = normal(3, 20), []
    plain = cpu.normalise
    monkeypatch.setattr(cpu, "normalise", lambda *given: ran.append(1) or plain(*given))
    for name, call in CALLS.items():
        ran.clear()
        call(z)
        assert ran, name
    ran.clear()
    regard.entmax(z, 1.0)
    regard.topk_softmax(z, 3, gradient="soft")
    regard.topk_softmax(z, 3, gradient="straight-through")
    regard.entmax(z, impl="reference")
    assert not ran
    refuses("impl='cpu'", regard.entmax, z, 1.0, impl="cpu")
    refuses("impl='cpu'", regard.topk_softmax, z, 3, gradient="soft", impl="cpu")
    refuses("Did you mean 'cpu'", regard.entmax, z, impl="cpuu")


NO_NUMBA = """
import sys
sys.modules["numba"] = None  # what cannot be imported
import torch, regard
from regard.checks import ArgumentError
z = torch.tensor([1.0, 0.5, -1.0])
assert (regard.sparsemax(z) - torch.tensor([0.75, 0.25, 0.0])).abs().max() <= 1e-6
for call in (lambda: regard.sparsemax(z, impl="cpu"),
             lambda: regard.attention(*[z.view(1, 1, 3, 1)] * 3, "sparsemax", impl="cpu")):
    try:
        call()
    except ArgumentError as error:
        assert "pip install 'regard[cpu]'" in str(error), error
    else:
        raise AssertionError("no error")
explained = regard.explain("sparsemax", (1, 1, 3, 1))
assert explained.chosen == "blocked" and "regard[cpu]" in str(explained)
regard.attention(*[z.view(1, 1, 3, 1)] * 3, "sparsemax")
"""


def test_in_a_process_without_numba() -> None:
    python("-c", NO_NUMBA)


def test_a_numba_that_does_not_import_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def refuse(name: str, *args: Any, **kwargs: Any) -> Any:
        fromlist = args[2] if len(args) > 2 else ()
        if fromlist and "rows" in fromlist:
            raise ImportError("numba needs another numpy")
        return real(name, *args, **kwargs)

    cpu._rows.cache_clear()
    cpu._broken.cache_clear()
    monkeypatch.setattr(builtins, "__import__", refuse)
    try:
        refuses(r"cannot be imported .numba needs another numpy", regard.entmax, torch.randn(2, 3), impl="cpu")
        assert regard.explain("biweight", (1, 1, 8, 4)).chosen == "blocked"
        assert regard.entmax(torch.zeros(1, 4)).tolist() == [[0.25] * 4]
    finally:
        monkeypatch.undo()
        cpu._rows.cache_clear()
        cpu._broken.cache_clear()
