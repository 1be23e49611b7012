"""Autocast neither rounds products inside a call nor in its backward pass, wherever `backward()` is called."""

import pytest
import torch

import regard
from regard.nn import expected_embedding


@pytest.mark.parametrize(
    ("impl", "spec"),
    [
        ("cpu", "biweight"),
        ("cpu", "local-linear[biweight]"),
        ("blocked", "relumax"),
        ("blocked", "local-linear"),
        ("sdpa", "softmax"),
        ("linear", "elu"),
    ],
)
def test_the_backward_pass_may_run_under_autocast(impl, spec):
    pytest.importorskip("numba" if impl == "cpu" else "torch")
    torch.manual_seed(0)
    inputs = [torch.randn(1, 2, 40, 8, requires_grad=True) for _ in range(3)]

    def gradients():
        out = regard.attention(*inputs, spec, is_causal=True, impl=impl)
        return torch.autograd.grad(out.square().sum(), inputs)

    wanted = gradients()
    with torch.autocast("cpu", torch.bfloat16):
        found = gradients()
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_an_expected_embedding_is_not_rounded_either():
    torch.manual_seed(0)
    f, table = torch.randn(5, 8, requires_grad=True), torch.randn(11, 8, requires_grad=True)

    def gradients():
        return torch.autograd.grad(expected_embedding(f, table, chunk=4).square().sum(), (f, table))

    wanted = gradients()
    with torch.autocast("cpu", torch.bfloat16):
        found = gradients()
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
