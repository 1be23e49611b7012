"""Variants of the delta rule in the literature, each against a loop over its own formula in float64."""

import pytest
import torch
from recurrences import FORMS, close
from torch import Tensor
from torch.nn.functional import normalize

import regard

BATCH, HEADS, LENGTH, DIM, WIDE = 2, 3, 20, 4, 5
F64 = torch.float64


def draw(*more: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, unit keys, v and beta in [0, 1], with `more` axes after that of the positions for all but q."""
    make = torch.Generator().manual_seed(0)
    sizes = ((DIM,), (*more, DIM), (*more, WIDE), more)
    found = [torch.randn(BATCH, HEADS, LENGTH, *s, generator=make, dtype=F64) for s in sizes]
    leaves = (found[0], normalize(found[1], dim=-1), found[2], found[3].sigmoid())
    return tuple(x.detach().requires_grad_() for x in leaves)  # type: ignore[return-value]


def decay(seed: int, *more: int) -> Tensor:
    """alpha in [0, 1]."""
    return torch.rand(BATCH, HEADS, LENGTH, *more, generator=torch.Generator().manual_seed(seed), dtype=F64)


def outer(x: Tensor, y: Tensor) -> Tensor:
    return x[..., :, None] * y[..., None, :]


def apply(state: Tensor, x: Tensor) -> Tensor:
    return (state @ x[..., None])[..., 0]


def agree(out: Tensor, rows: list[Tensor], leaves: tuple[Tensor, ...]) -> None:
    """Outputs to 1e-11 and gradients to 1e-10."""
    expected = torch.stack(rows, 2)
    torch.testing.assert_close(out, expected, rtol=1e-11, atol=1e-11)
    wanted = torch.autograd.grad(expected.sin().sum(), leaves, retain_graph=True)
    torch.testing.assert_close(torch.autograd.grad(out.sin().sum(), leaves), wanted, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("form", FORMS)
def test_steps_beyond_one(form: str) -> None:
    """beta in [1, 2]: eigenvalues down to -1. A step of 2 with v = 0 reflects the state; two undo it."""
    q, k, v, beta = draw()
    state, rows = torch.zeros(BATCH, HEADS, WIDE, DIM, dtype=F64), []
    for t in range(LENGTH):
        error = v[:, :, t] - apply(state, k[:, :, t])
        state = state + (1 + beta[:, :, t, None, None]) * outer(error, k[:, :, t])
        rows.append(apply(state, q[:, :, t]))
    agree(regard.delta_rule(q, k, v, 1 + beta, form=form, chunk_size=6)[0], rows, (q, k, v, beta))
    state = regard.delta_rule(q, k, v, beta, form=form)[1]
    same, nothing = k[:, :, :1].expand(-1, -1, 2, -1), torch.zeros_like(v[:, :, :2])
    for steps in (1, 2):
        after = regard.delta_rule(*(x[:, :, :steps] for x in (same, same, nothing)), 2.0, state=state, form=form)[1]
        along = (state.values * k[:, :, 0, :, None]).sum(2), (after.values * k[:, :, 0, :, None]).sum(2)
        torch.testing.assert_close(along[1], along[0] * (-1) ** steps, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("form", FORMS)
def test_delta_product(form: str) -> None:
    """n steps a token after one decay: S <- alpha_t S, then a step S <- S (I - beta k k^T) + beta v k^T a pair."""
    n = 3
    q, k, v, beta = draw(n)
    g = (-decay(2)).requires_grad_()
    state, rows = torch.zeros(BATCH, HEADS, WIDE, DIM, dtype=F64), []
    for t in range(LENGTH):
        state = g[:, :, t, None, None].exp() * state
        for j in range(n):
            error = v[:, :, t, j] - apply(state, k[:, :, t, j])
            state = state + beta[:, :, t, j, None, None] * outer(error, k[:, :, t, j])
        rows.append(apply(state, q[:, :, t]))
    decays = torch.cat([g[..., None], torch.zeros(BATCH, HEADS, LENGTH, n - 1, dtype=F64)], -1).flatten(2)
    inputs = (x.flatten(2, 3) for x in (q[:, :, :, None].expand(-1, -1, -1, n, -1), k, v, beta))
    out = regard.delta_rule(*inputs, log_decay=decays, form=form, chunk_size=7)[0][:, :, n - 1 :: n]
    agree(out, rows, (q, k, v, beta, g))


def test_a_full_step_stores_the_pair() -> None:
    """beta |k|^2 = 1: what was just written is read back, and orthogonal keys do not disturb it."""
    keys = torch.linalg.qr(torch.randn(1, 2, 6, 6, dtype=F64))[0]
    values = torch.randn(1, 2, 6, 3, dtype=F64)
    out, state = regard.delta_rule(keys, keys, values, 1.0, chunk_size=4)
    close(out, values, 1e-12)
    close(state.read(keys), values, 1e-12)
    again, _ = regard.delta_rule(keys, keys, values.flip(2), 1.0, state=state)
    close(again, values.flip(2), 1e-12)  # old values are overwritten, not added to
