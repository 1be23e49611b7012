"""Autocast does not round an expected embedding, neither forward nor backward."""

import torch

from regard.nn import expected_embedding


def test_an_expected_embedding_is_not_rounded():
    torch.manual_seed(0)
    f, table = torch.randn(5, 8, requires_grad=True), torch.randn(11, 8, requires_grad=True)

    def gradients():
        return torch.autograd.grad(expected_embedding(f, table, chunk=4).square().sum(), (f, table))

    wanted = gradients()
    with torch.autocast("cpu", torch.bfloat16):
        found = gradients()
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
