"""Variants of the delta rule in the literature, each against a loop over its own formula in float64."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize

import regard

FORMS = ("chunked", "parallel", "recurrent")
BATCH, HEADS, LENGTH, DIM, WIDE = 2, 3, 20, 4, 5


def draw(*more: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, unit keys, v and beta in [0, 1], with `more` axes after that of the positions for all but q."""
    make = torch.Generator().manual_seed(0)
    sizes = ((DIM,), (*more, DIM), (*more, WIDE), more)
    found = [torch.randn(BATCH, HEADS, LENGTH, *s, generator=make, dtype=torch.float64) for s in sizes]
    leaves = (found[0], normalize(found[1], dim=-1), found[2], found[3].sigmoid())
    return tuple(x.detach().requires_grad_() for x in leaves)  # type: ignore[return-value]


def places() -> Iterator[tuple[int, int]]:
    return itertools.product(range(BATCH), range(HEADS))


def stacked(rows: dict[tuple[int, int], list[Tensor]]) -> Tensor:
    return torch.stack([torch.stack(rows[at]) for at in places()]).view(BATCH, HEADS, LENGTH, WIDE)


def agree(out: Tensor, expected: Tensor, leaves: tuple[Tensor, ...]) -> None:
    """Outputs to 1e-11 and gradients to 1e-10."""
    torch.testing.assert_close(out, expected, rtol=1e-11, atol=1e-11)
    wanted = torch.autograd.grad(expected.sin().sum(), leaves, retain_graph=True)
    for got, want in zip(torch.autograd.grad(out.sin().sum(), leaves), wanted, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("form", FORMS)
def test_gated_delta_net(form: str) -> None:
    """S_t = alpha_t S_{t-1} (I - beta_t k_t k_t^T) + beta_t v_t k_t^T, with alpha 0 at one place."""
    q, k, v, beta = draw()
    alpha = torch.rand(BATCH, HEADS, LENGTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    alpha[0, 1, 7] = 0
    rows: dict[tuple[int, int], list[Tensor]] = {}
    for b, h in places():
        state = torch.zeros(WIDE, DIM, dtype=torch.float64)
        for t in range(LENGTH):
            at, step = k[b, h, t], beta[b, h, t]
            turn = torch.eye(DIM, dtype=torch.float64) - step * torch.outer(at, at)
            state = alpha[b, h, t] * state @ turn + step * torch.outer(v[b, h, t], at)
            rows.setdefault((b, h), []).append(state @ q[b, h, t])
    out = regard.delta_rule(q, k, v, beta, log_decay=alpha.log(), form=form, chunk_size=6)[0]
    agree(out, stacked(rows), (q, k, v, beta))


@pytest.mark.parametrize("form", FORMS)
def test_steps_beyond_one(form: str) -> None:
    """beta in [1, 2]: eigenvalues down to -1. A step of 2 with v = 0 reflects the state; two undo it."""
    q, k, v, beta = draw()
    rows: dict[tuple[int, int], list[Tensor]] = {}
    for b, h in places():
        state = torch.zeros(WIDE, DIM, dtype=torch.float64)
        for t in range(LENGTH):
            error = v[b, h, t] - state @ k[b, h, t]
            state = state + (1 + beta[b, h, t]) * torch.outer(error, k[b, h, t])
            rows.setdefault((b, h), []).append(state @ q[b, h, t])
    agree(regard.delta_rule(q, k, v, 1 + beta, form=form, chunk_size=6)[0], stacked(rows), (q, k, v, beta))
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
    g = -torch.rand(BATCH, HEADS, LENGTH, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    g.requires_grad_()
    rows: dict[tuple[int, int], list[Tensor]] = {}
    for b, h in places():
        state = torch.zeros(WIDE, DIM, dtype=torch.float64)
        for t in range(LENGTH):
            state = g[b, h, t].exp() * state
            for j in range(n):
                error = v[b, h, t, j] - state @ k[b, h, t, j]
                state = state + beta[b, h, t, j] * torch.outer(error, k[b, h, t, j])
            rows.setdefault((b, h), []).append(state @ q[b, h, t])
    decays = torch.cat([g[..., None], torch.zeros(BATCH, HEADS, LENGTH, n - 1, dtype=g.dtype)], -1).flatten(2)
    inputs = (x.flatten(2, 3) for x in (q[:, :, :, None].expand(-1, -1, -1, n, -1), k, v, beta))
    out = regard.delta_rule(*inputs, log_decay=decays, form=form, chunk_size=7)[0][:, :, n - 1 :: n]
    agree(out, stacked(rows), (q, k, v, beta, g))


@pytest.mark.parametrize("form", FORMS)
def test_kimi_delta_attention(form: str) -> None:
    """S [D, Dv] as there: S_t = (I - beta k k^T) Diag(alpha_t) S_{t-1} + beta k v^T, o = S^T q, a channel forgotten."""
    q, k, v, beta = draw()
    alpha = torch.rand(BATCH, HEADS, LENGTH, DIM, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    alpha[1, 0, 5, 2] = 0
    rows: dict[tuple[int, int], list[Tensor]] = {}
    for b, h in places():
        state = torch.zeros(DIM, WIDE, dtype=torch.float64)
        for t in range(LENGTH):
            at, step = k[b, h, t], beta[b, h, t]
            state = alpha[b, h, t][:, None] * state
            state = state + step * torch.outer(at, v[b, h, t] - at @ state)
            rows.setdefault((b, h), []).append(q[b, h, t] @ state)
    out = regard.delta_rule(q, k, v, beta, log_decay=alpha.log(), form=form, chunk_size=6)[0]
    agree(out, stacked(rows), (q, k, v, beta))
