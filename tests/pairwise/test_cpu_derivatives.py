"""entmax and its kin with impl="cpu" in all that torch does with functions: derivatives of both orders, transforms,
graphs and export; which implementation runs, with and without numba; and memory. Expected values are finite
differences, the formulas of the derivative and dense float64 formulas."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import dense
import oracles
import pytest
import torch
from dense import close
from test_cpu_normalisers import ALPHAS, CALLS, Call, normal, ours
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck
from torch.utils._python_dispatch import TorchDispatchMode

import regard
from regard.checks import ArgumentError

pytest.importorskip("numba")

from regard.pairwise.cpu import implementation as cpu

SMOOTH = {name: call for name, call in CALLS.items() if name != "topk_uniform"}

# Derivatives -------------------------------------------------------------------------------------------------

APART = torch.tensor(
    [[0.93, -0.21, 0.55, -1.74, 0.17, 0.31], [-0.42, 1.37, 1.18, 0.61, -2.3, 0.97]], dtype=torch.float64
)
"""Scores well apart, and away from every threshold used here."""


def column(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)[:, None]


LEARNED: dict[str, tuple[Call, Tensor]] = {
    "alpha": (regard.entmax, column(1.5, 1.2)),
    "alpha-above-2": (regard.entmax, column(2.6, 3.1)),
    "alpha-at-2": (regard.entmax, column(2.0, 2.0)),
    "alpha-shared": (regard.entmax, torch.tensor(1.4, dtype=torch.float64)),
    "margin": (regard.relumax, column(0.9, 1.6)),
    "bias": (regard.normrelu, column(0.3, -0.5)),
    "bias-shared": (regard.normrelu, torch.tensor(0.25, dtype=torch.float64)),
}


@pytest.mark.parametrize("name", SMOOTH)
def test_derivatives_in_the_scores(name: str) -> None:
    z = APART.clone().requires_grad_()
    assert gradcheck(ours(name), z, atol=1e-7)
    assert gradgradcheck(ours(name), z, atol=1e-7)


@pytest.mark.parametrize("name", LEARNED)
def test_derivatives_in_scores_and_number(name: str) -> None:
    call, value = LEARNED[name]
    inputs = APART.clone().requires_grad_(), value.clone().requires_grad_()
    assert gradcheck(lambda z, x: call(z, x, impl="cpu"), inputs, atol=1e-7)
    assert gradgradcheck(lambda z, x: call(z, x, impl="cpu"), inputs, atol=1e-7)


@pytest.mark.parametrize("alpha", ALPHAS)
def test_the_gradient_by_its_formula(alpha: float) -> None:
    """With u = p^(2 - alpha) on the support: dz = u (g - <u, g> / <u, 1>), and dL/dalpha = sum of g times
    (p - v)/(alpha - 1)^2 - (p log p - v sum p log p)/(alpha - 1), v = u/<u, 1>."""
    z, g = normal(3, 1500).requires_grad_(), normal(3, 1500, seed=1)
    a = torch.full((3, 1), alpha, dtype=torch.float64, requires_grad=True)
    p = torch.from_numpy(oracles.entmax_rows(z.detach().numpy(), alpha).astype(float))
    u = torch.where(p > 0, torch.where(p > 0, p, 1.0) ** (2 - alpha), 0.0)
    v = u / u.sum(-1, keepdim=True)
    dz = u * (g - (v * g).sum(-1, keepdim=True))
    plogp = torch.special.xlogy(p, p)
    da = (p - v) / (alpha - 1) ** 2 - (plogp - v * plogp.sum(-1, keepdim=True)) / (alpha - 1)
    da = (da * g).sum(-1, keepdim=True)
    # With r < 1 the slope is without bound at the threshold, where p is small and its own error is large.
    loose = 1e-10 if alpha <= 2 else 1e-5
    for number in (alpha, a):
        found = torch.autograd.grad(regard.entmax(z, number, impl="cpu"), (z, a), g, allow_unused=True)
        close(found[0], dz, loose)
        if number is a:
            close(found[1], da, loose * 100)
    with torch.no_grad():
        z32 = z.float()
    z32.requires_grad_()
    if alpha <= 2:
        close(torch.autograd.grad(regard.entmax(z32, alpha, impl="cpu"), z32, g.float())[0], dz, 1e-5)


@pytest.mark.parametrize("name", [*SMOOTH, *LEARNED])
def test_second_derivatives_are_those_of_the_reference(name: str) -> None:
    """On rows of several spans, with respect to everything, the upstream gradient included."""

    def second(impl: str) -> list[Tensor | None]:
        z, g = normal(4, 600).requires_grad_(), normal(4, 600, seed=1).requires_grad_()
        leaves = [z, g]
        if name in SMOOTH:
            p = SMOOTH[name](z, impl=impl)
        else:
            call, value = LEARNED[name]
            number = (value[:1] if value.dim() else value).clone().requires_grad_()
            leaves.append(number)
            p = call(z, number, impl=impl)
        first = torch.autograd.grad(p, [x for x in leaves if x is not g], g, create_graph=True)
        total = sum((d * normal(d.numel(), seed=2).reshape(d.shape)).sum() for d in first)
        return list(torch.autograd.grad(total, leaves, allow_unused=True))

    for one, other in zip(second("cpu"), second("reference"), strict=True):
        assert (one is None) == (other is None)
        if one is not None and other is not None:
            close(one, other, 1e-9)


def test_no_gradient_is_wanted() -> None:
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


def test_only_the_number_learns() -> None:
    z, alpha = normal(3, 20), torch.tensor(1.5, dtype=torch.float64, requires_grad=True)
    (regard.entmax(z, alpha, impl="cpu") * z).sum().backward()
    h = 1e-6
    up, down = ((regard.entmax(z, 1.5 + e, impl="cpu") * z).sum() for e in (h, -h))
    close(alpha.grad, (up - down) / (2 * h), 1e-7)


# Transforms, graphs, export ----------------------------------------------------------------------------------


def jacobian_of_entmax(z: Tensor, alpha: float) -> Tensor:
    p = dense.weights(z, "adaptive", r=1 / (alpha - 1))
    u = torch.where(p > 0, torch.where(p > 0, p, 1.0) ** (2 - alpha), 0.0)
    return torch.diag(u) - torch.outer(u, u) / u.sum()


def test_transforms_take_the_plain_form() -> None:
    """vmap, jvp, jacrev, jacfwd and their compositions of impl="auto"; impl="cpu" says that it has none."""
    z, t = normal(4, 30), normal(4, 30, seed=1)
    for alpha in (4 / 3, 1.5, 2.0):

        def run(x: Tensor, alpha: float = alpha, impl: str = "auto") -> Tensor:
            return regard.entmax(x, alpha, impl=impl)

        expected = dense.weights(z, "adaptive", r=1 / (alpha - 1))
        full = torch.stack([jacobian_of_entmax(row, alpha) for row in z])
        close(torch.func.vmap(run)(z), expected, 1e-12)
        close(torch.func.vmap(run, in_dims=1)(z.T.contiguous()), expected, 1e-12)
        value, tangent = torch.func.jvp(run, (z,), (t,))
        close(value, expected, 1e-12)
        close(tangent, (full @ t[..., None])[..., 0], 1e-11)
        close(torch.func.jacrev(run)(z[0]), full[0], 1e-11)
        close(torch.func.jacfwd(run)(z[0]), full[0], 1e-11)
        close(torch.func.vmap(torch.func.jacrev(run))(z), full, 1e-11)
        close(torch.func.grad(lambda x: (run(x) * t[0]).sum())(z[0]), full[0] @ t[0], 1e-11)
        with pytest.raises(ArgumentError, match="impl='cpu'"):
            torch.func.vmap(lambda x: run(x, impl="cpu"))(z)
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(z, t)
            tangent = torch.autograd.forward_ad.unpack_dual(run(dual)).tangent
            close(tangent, (full @ t[..., None])[..., 0], 1e-11)
            with pytest.raises(ArgumentError, match="impl='cpu'"):
                run(dual, impl="cpu")


class Recorder(TorchDispatchMode):
    """Notes the calls of regard's own operators."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "regard":
            self.calls.append((func, args))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ["entmax-1.5", "normrelu-nearest", "topk_softmax", *LEARNED])
def test_opcheck(name: str) -> None:
    z = normal(3, 40).requires_grad_()
    with Recorder() as seen:
        if name in LEARNED:
            call, value = LEARNED[name]
            p = call(z, (value[:1] if value.dim() else value).clone().requires_grad_(), impl="cpu")
        else:
            p = ours(name)(z)
        p.square().sum().backward()
    assert [func.name() for func, _ in seen.calls] == ["regard::normalise_forward", "regard::normalise_backward"]
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
@pytest.mark.parametrize("name", ["entmax-1.5", "entmax-tensor", "sparsemax", "relumax", "normrelu", "topk_softmax"])
def test_compiled_equals_eager(name: str, backend: str) -> None:
    """One whole graph, forward and backward, bit for bit: the same loops run."""
    compiled = torch.compile(ours(name), backend=backend, fullgraph=True)
    for n in (40, 700):
        one, two = (normal(3, n, dtype=torch.float32).requires_grad_() for _ in range(2))
        p, q = ours(name)(one), compiled(two)
        assert torch.equal(p, q)
        g = normal(3, n, dtype=torch.float32, seed=1)
        assert torch.equal(torch.autograd.grad(p, one, g)[0], torch.autograd.grad(q, two, g)[0])


def test_the_plain_form_exports() -> None:
    """To a graph of torch's own operators alone."""

    class Layer(torch.nn.Module):
        def forward(self, z: Tensor) -> Tensor:
            return regard.entmax(z, 1.5, impl="reference") + regard.relumax(z, impl="reference")

    z = normal(3, 40)
    program = torch.export.export(Layer(), (z,))
    assert not any("regard" in str(node.target) for node in program.graph.nodes)
    for other in (z, normal(3, 40, seed=9)):
        expected = dense.weights(other, "adaptive", r=2.0) + dense.weights(other, "anchored", number=1.0)
        close(program.module()(other), expected, 1e-12)


# Which implementation runs -----------------------------------------------------------------------------------

WITHOUT = "needs numba, which is not installed: pip install 'regard[cpu]'"


def test_auto_takes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is a loop for the weighting, and not where there is none."""
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
    for call in (
        lambda: regard.entmax(z, 1.0, impl="cpu"),
        lambda: regard.topk_softmax(z, 3, gradient="soft", impl="cpu"),
    ):
        with pytest.raises(ArgumentError, match="impl='cpu'"):
            call()
    with pytest.raises(ArgumentError, match="Did you mean 'cpu'"):
        regard.entmax(z, impl="cpuu")


def test_without_numba(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "MISSING", WITHOUT)
    monkeypatch.setattr(cpu, "normalise", lambda *_: pytest.fail("the row solvers ran"))
    z = normal(3, 40)
    close(regard.entmax(z, 1.5), dense.weights(z, "adaptive", r=2.0), 1e-12)
    for name in CALLS:
        with pytest.raises(ArgumentError, match=r"impl='cpu' needs numba.*pip install 'regard\[cpu\]'") as caught:
            ours(name)(z)
        assert "\n" not in str(caught.value)


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
    done = subprocess.run([sys.executable, "-c", NO_NUMBA], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


# Memory ------------------------------------------------------------------------------------------------------

PROGRAM = """
import sys
import torch, regard
torch.set_num_threads(1)
def status(field):
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith(field)) * 1024
call = eval(sys.argv[1])
def step(z, g):
    return torch.autograd.grad(call(z), z, g)
def given(rows, n):
    make = torch.Generator().manual_seed(0)
    return torch.randn(rows, n, generator=make).requires_grad_(), torch.randn(rows, n, generator=make)
step(*given(4, 100))
z, g = given(2048, 2048)
before = status("VmRSS")
step(z, g)
print((status("VmHWM") - before) / (z.numel() * 4))
"""


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize(
    "call",
    [
        "lambda z: regard.entmax(z, 1.5, impl='cpu')",
        "lambda z: regard.entmax(z, 3.0, impl='cpu')",
        "lambda z: regard.sparsemax(z, impl='cpu')",
        "lambda z: regard.relumax(z, impl='cpu')",
        "lambda z: regard.normrelu(z, impl='cpu')",
        "lambda z: regard.topk_softmax(z, 32, impl='cpu')",
    ],
)
def test_4m_scores_take_at_most_2_6_tensors_more(call: str) -> None:
    """Forward and backward, weights and gradient included."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, call], capture_output=True, text=True, timeout=580,
        env={**os.environ, "MALLOC_MMAP_THRESHOLD_": "131072"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert 1.5 <= float(done.stdout) <= 2.6
