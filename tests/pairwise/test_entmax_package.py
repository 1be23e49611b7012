"""Values and gradients against the `entmax` package, on finite rows (where it is right)."""

from __future__ import annotations

import entmax as peer
import pytest
import torch
from torch import Tensor

import regard


def scores(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)


def gradients(call, z: Tensor, g: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
    """(output, gradient by z, gradients by the others) of sum(g * call(z, *others))."""
    leaves = [t.clone().requires_grad_() for t in (z, *others)]
    out = call(*leaves)
    return out.detach(), *torch.autograd.grad((out * g).sum(), leaves)


CALLS = {
    "sparsemax": (regard.sparsemax, lambda z: peer.sparsemax(z, dim=-1)),
    "entmax15": (regard.entmax, lambda z: peer.entmax15(z, dim=-1)),
    "entmax-1.5": (lambda z: regard.entmax(z, 1.5), lambda z: peer.entmax_bisect(z, alpha=1.5, n_iter=100)),
    "entmax-1.2": (lambda z: regard.entmax(z, 1.2), lambda z: peer.entmax_bisect(z, alpha=1.2, n_iter=100)),
    "entmax-4/3": (
        lambda z: regard.entmax(z, 4 / 3),
        lambda z: peer.entmax_bisect(z, alpha=4 / 3, n_iter=100),
    ),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("shape", [(5, 1), (4, 2), (6, 33), (2, 3, 257)])
def test_values_and_score_gradients(name: str, shape: tuple[int, ...]) -> None:
    ours, theirs = CALLS[name]
    z, g = scores(*shape) * 2, scores(*shape, 1)[..., 0]
    for a, b in zip(gradients(ours, z, g), gradients(theirs, z, g), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-10)


@pytest.mark.parametrize("dim", [0, 1, -2])
def test_other_axes(dim: int) -> None:
    z, g = scores(3, 7, 5), scores(3, 7, 5, 1)[..., 0]
    mine = gradients(lambda x: regard.entmax(x, 1.5, dim), z, g)
    peers = gradients(lambda x: peer.entmax_bisect(x, 1.5, dim % 3, n_iter=100), z, g)
    for a, b in zip(mine, peers, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-10)


def test_alpha_gradient() -> None:
    """A different alpha a row, with its gradient."""
    z, g = scores(6, 40), scores(6, 40, 1)[..., 0]
    alpha = torch.tensor([1.05, 1.2, 1.4, 1.5, 1.7, 1.95], dtype=torch.float64)[:, None]
    mine = gradients(regard.entmax, z, g, alpha)
    peers = gradients(lambda x, a: peer.entmax_bisect(x, a, n_iter=100), z, g, alpha)
    for a, b in zip(mine, peers, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-10)


def test_alpha_gradient_sums_over_the_rows_that_share_it() -> None:
    z, g = scores(4, 5, 12), scores(4, 5, 12, 1)[..., 0]
    alpha = torch.tensor([1.3, 1.6, 1.9, 1.1], dtype=torch.float64)[:, None, None]
    shared = gradients(regard.entmax, z, g, alpha)[2]
    apart = gradients(lambda x, a: peer.entmax_bisect(x, a, n_iter=100), z, g, alpha.expand(4, 5, 1).clone())[2]
    torch.testing.assert_close(shared, apart.sum(1, keepdim=True), rtol=1e-8, atol=1e-10)
