"""Mesa attention against the ridge regression written out here in float64, one position after the other."""

from __future__ import annotations

import itertools
import time
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

from regard import MesaState, mesa_attention
from regard.checks import ArgumentError

WAYS = (
    ("parallel", None, "auto"),
    ("recurrent", None, "auto"),
    ("chunked", 1, "auto"),
    ("chunked", 4, "cholesky"),
    ("chunked", 5, "auto"),
    ("chunked", None, "auto"),
    ("chunked", 4, "cg"),
)
RIDGES = ("number", "head", "dimension", "token", "all")
ORDERS: dict[str, dict[str, bool]] = {"causal": {}, "strict": {"exclude_self": True}, "all": {"is_causal": False}}


def dense(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ridge: Tensor,
    g: Tensor | None = None,
    beta: Tensor | None = None,
    order: str = "causal",
    mask: Tensor | None = None,
) -> Tensor:
    """Equation 2 for every position: both sums made anew, one solve. ridge [B, H, T, D], g and beta [B, Hkv, T]."""
    (batch, heads, length, dim), ratio = q.shape, q.shape[1] // k.shape[1]
    rows = []
    for b, h, i in itertools.product(range(batch), range(heads), range(length)):
        last = {"causal": i, "strict": i - 1, "all": length - 1}[order]
        seen = [j for j in range(last + 1) if mask is None or mask[b, j]]
        gram, cross = torch.zeros(dim, dim, dtype=q.dtype), torch.zeros(v.shape[3], dim, dtype=q.dtype)
        for j in seen:
            weight = torch.ones((), dtype=q.dtype) if beta is None else beta[b, h // ratio, j]
            if g is not None:
                weight = weight * torch.exp(sum((g[b, h // ratio, m] for m in seen if m > j), torch.zeros(())))
            gram = gram + weight * torch.outer(k[b, h // ratio, j], k[b, h // ratio, j])
            cross = cross + weight * torch.outer(v[b, h // ratio, j], k[b, h // ratio, j])
        rows.append(cross @ torch.linalg.solve(gram + torch.diag(ridge[b, h, i]), q[b, h, i]))
    return torch.stack(rows).view(batch, heads, length, -1)


def draw(length: int = 9, seed: int = 0, dim: int = 4) -> list[Tensor]:
    """q, k, v, log_decay and beta per token."""
    make = torch.Generator().manual_seed(seed)
    q, k, v = (
        torch.randn(2, h, length, d, generator=make, dtype=torch.float64) for h, d in ((4, dim), (2, dim), (2, 3))
    )
    g, beta = (torch.rand(2, 2, length, generator=make, dtype=torch.float64) for _ in range(2))
    return [x.requires_grad_() for x in (q, k, v, -g, beta + 0.1)]


def ridge_of(kind: str, length: int = 9, dim: int = 4) -> Tensor:
    shape = {"number": (), "head": (4,), "dimension": (4, dim), "token": (2, 4, length), "all": (2, 4, length, dim)}[
        kind
    ]
    drawn = torch.rand(shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64) + 0.3
    return drawn.requires_grad_()


def full(ridge: Tensor, length: int = 9, dim: int = 4) -> Tensor:
    at = {0: (None,) * 4, 1: (None, slice(None), None, None), 2: (None, slice(None), None), 3: (..., None), 4: ...}
    return ridge[at[ridge.dim()]].expand(2, 4, length, dim)


def key_mask(length: int = 9) -> Tensor:
    mask = torch.rand(2, length, generator=torch.Generator().manual_seed(9)) < 0.7
    mask[0, :3] = False  # left padding
    return mask


def loss(out: Tensor) -> Tensor:
    return (out * torch.arange(1.0, out.numel() + 1, dtype=out.dtype).view(out.shape).cos()).sum()


def close(found: Tensor, expected: Tensor, tolerance: float, what: str = "") -> None:
    assert found.shape == expected.shape, what
    size = max(1.0, expected.abs().max().item())
    gap = (found.double() - expected.double()).abs().max().item()
    assert gap <= tolerance * size, f"{what}: differs by {gap:.3g} (size {size:.3g})"


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("kind", RIDGES)
@pytest.mark.parametrize("fading", [False, True])
def test_every_form_is_the_ridge_regression(fading: bool, kind: str, order: str) -> None:
    """Outputs to 1e-12 and gradients (of ridge, decay and beta too), grouped heads, with and without a mask."""
    for mask in (None, key_mask()):
        q, k, v, g, beta = draw()
        ridge = ridge_of(kind)
        leaves = [q, k, v, ridge, *((g, beta) if fading else ())]
        expected = dense(q, k, v, full(ridge), *((g, beta) if fading else (None, None)), order, mask)
        wanted = torch.autograd.grad(loss(expected), leaves)
        for form, chunk, solver in WAYS:
            how: dict[str, Any] = {"form": form, "chunk_size": chunk, "solver": solver, "attn_mask": mask}
            extra = {"log_decay": g, "beta": beta} if fading else {}
            out, state, found = mesa_attention(
                q, k, v, ridge=ridge, return_diagnostics=True, **extra, **how, **ORDERS[order]
            )
            close(out, expected, 1e-12, f"{form} {chunk} {solver}")
            for got, grad in zip(torch.autograd.grad(loss(out), leaves), wanted, strict=True):
                close(got, grad, 1e-11, f"{form} {chunk} {solver}")
            assert state.tokens == 9
            assert (found["status"] == 0).all()
            assert found["residual"].shape == (2, 4, 9)
            assert found["residual"].max() <= 1e-12


def test_a_number_is_a_constant_tensor() -> None:
    q, k, v, _, _ = (x.detach() for x in draw())
    expected = dense(q, k, v, torch.full_like(q, 0.7))
    close(mesa_attention(q, k, v, ridge=0.7)[0], expected, 1e-12)
    close(mesa_attention(q, k, v, ridge=0.7, scale=3.0)[0], 3 * expected, 1e-12)


def test_it_is_least_squares() -> None:
    """Against torch.linalg.lstsq on the data with sqrt(ridge) I below; and a linear map is found from D pairs on."""
    q, k, v, _, _ = (x.detach() for x in draw(12))
    out, _ = mesa_attention(q, k, v, ridge=0.5)
    for b, h, i in itertools.product(range(2), range(4), (0, 3, 11)):
        rows = torch.cat([k[b, h // 2, : i + 1], 0.5**0.5 * torch.eye(4, dtype=torch.float64)])
        right = torch.cat([v[b, h // 2, : i + 1], torch.zeros(4, 3, dtype=torch.float64)])
        close(out[b, h, i], q[b, h, i] @ torch.linalg.lstsq(rows, right).solution, 1e-12)
    truth = torch.randn(4, 3, dtype=torch.float64)
    out, _ = mesa_attention(q, k, k @ truth, ridge=1e-9, tol=1e-5)
    close(out[:, :, 6:], q[:, :, 6:] @ truth, 1e-6)


@pytest.mark.parametrize("fading", [False, True])
@pytest.mark.parametrize("length", [1, 63, 65])
def test_float32_and_lengths(length: int, fading: bool) -> None:
    """All forms to 1e-5 of the exact sums, with the state they leave."""
    q, k, v, g, beta = (x.detach() for x in draw(length, dim=8))
    g = g if fading else torch.zeros_like(g)
    beta = beta if fading else torch.ones_like(beta)
    gram, cross, rows = torch.zeros(2, 2, 8, 8).double(), torch.zeros(2, 2, 8, 3).double(), []
    for t in range(length):
        fade, count = g[:, :, t, None, None].exp(), beta[:, :, t, None, None]
        gram = fade * gram + count * k[:, :, t, :, None] * k[:, :, t, None]
        cross = fade * cross + count * k[:, :, t, :, None] * v[:, :, t, None]
        inverse = torch.linalg.inv(gram + 0.5 * torch.eye(8, dtype=torch.float64)) @ cross
        rows.append((q[:, :, t, None] @ inverse.repeat_interleave(2, 1))[:, :, 0])
    extra = {"log_decay": g.float(), "beta": beta.float()} if fading else {}
    for form, solver in (("chunked", "auto"), ("chunked", "cg"), ("parallel", "auto"), ("recurrent", "auto")):
        small = [x.float() for x in (q, k, v)]
        out, state = mesa_attention(*small, ridge=0.5, form=form, solver=solver, **extra)
        close(out, torch.stack(rows, 2), 1e-5, f"{form} {solver}")
        close(state.gram, gram, 1e-5)
        close(state.values, cross, 1e-5)


@pytest.mark.parametrize(
    ("form", "solver"), [("chunked", "auto"), ("chunked", "cg"), ("parallel", "auto"), ("recurrent", "auto")]
)
@pytest.mark.parametrize("fading", [False, True])
def test_states_at_any_cut(fading: bool, form: str, solver: str) -> None:
    """Prefill and steps are one call; left padding is nothing, whatever it holds."""
    q, k, v, g, beta = (x.detach() for x in draw())
    ridge = ridge_of("all").detach()
    expected = dense(q, k, v, ridge, *((g, beta) if fading else ()))
    how: dict[str, Any] = {"form": form, "chunk_size": 3, "solver": solver}
    for cuts in ((0, 9), (0, 4, 9), (0, 1, 2, 3, 9), (0, 8, 9)):
        state, outs = None, []
        for a, b in itertools.pairwise(cuts):
            extra = {"log_decay": g[:, :, a:b], "beta": beta[:, :, a:b]} if fading else {}
            new = [x[:, :, a:b] for x in (q, k, v)]
            out, state = mesa_attention(*new, ridge=ridge[:, :, a:b], state=state, **how, **extra)
            outs.append(out)
        close(torch.cat(outs, 2), expected, 1e-12)
    before = lambda x, n: torch.nn.functional.pad(x, (0, 0) * n + (5, 0), value=torch.nan)  # noqa: E731
    extra = {"log_decay": before(g, 0), "beta": before(beta, 0)} if fading else {}
    padded = [before(x, 1) for x in (q, k, v)]
    own = torch.nn.functional.pad(ridge, (0, 0, 5, 0), value=1.0)
    out, last = mesa_attention(*padded, ridge=own, attn_mask=torch.arange(14) >= 5, **how, **extra)
    close(out[:, :, 5:], expected, 1e-12)
    assert state is not None
    close(last.gram, state.gram, 1e-12)
    close(last.values, state.values, 1e-12)


@pytest.mark.slow
def test_derivatives() -> None:
    """Against finite differences, with a state; second ones too where they exist, and refused where not."""
    q, k, v, g, beta = draw(5)
    ridge = ridge_of("all", 5)
    _, before = mesa_attention(*(x.detach() for x in draw(6, 1)[:3]), ridge=1.0)
    values, half = (x.detach().requires_grad_() for x in (before.values, torch.linalg.cholesky(before.gram)))

    def run(*x: Tensor, form: str = "chunked", solver: str = "auto") -> tuple[Tensor, ...]:
        state = MesaState(x[6], x[7] @ x[7].mT, before.poisoned, tokens=6)
        out, after = mesa_attention(
            *x[:3], ridge=x[5], log_decay=x[3], beta=x[4], state=state, chunk_size=3, form=form, solver=solver
        )
        return out, after.values, after.gram

    for solver in ("auto", "cg"):
        assert gradcheck(lambda *x, solver=solver: run(*x, solver=solver), (q, k, v, g, beta, ridge, values, half))
    number = torch.tensor(0.5, dtype=torch.float64, requires_grad=True)
    assert gradcheck(lambda *x: mesa_attention(*x[:3], ridge=x[3], chunk_size=3)[0], (q, k, v, number))
    few = [x.detach()[:1, :2, :3].requires_grad_() for x in (q, k, v)]
    for form in ("parallel", "recurrent"):
        assert gradgradcheck(lambda *x, form=form: mesa_attention(*x[:3], ridge=x[3], form=form)[0], (*few, number))
    out, _ = mesa_attention(*few, ridge=number)
    first = torch.autograd.grad(out.square().sum(), few[0], create_graph=True)[0]
    with pytest.raises(ArgumentError, match="form='parallel'"):
        torch.autograd.grad(first.square().sum(), few[1])


def test_forward_mode_sees_the_derivative() -> None:
    q, k, v, _, _ = (x.detach() for x in draw())
    direction = torch.linspace(-1, 1, k.numel(), dtype=torch.float64).view_as(k)
    run = lambda x: mesa_attention(q, x, v, ridge=0.5, chunk_size=4)[0]  # noqa: E731
    _, tangent = torch.func.jvp(run, (k,), (direction,))
    ends = [dense(q, k + e * direction, v, torch.full_like(q, 0.5)) for e in (1e-6, -1e-6)]
    close(tangent, (ends[0] - ends[1]) / 2e-6, 1e-7)
    assert tangent.abs().max() > 0.1


@pytest.mark.parametrize("fading", [False, True])
def test_one_whole_graph(fading: bool) -> None:
    def run(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        extra = {"log_decay": g, "beta": beta} if fading else {}
        out, state = mesa_attention(q, k, v, ridge=0.5, chunk_size=4, attn_mask=mask, **extra)
        return out, state.gram

    torch._dynamo.reset()
    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    inputs = [x.detach().float().requires_grad_() for x in draw()]
    used = inputs if fading else inputs[:3]
    results = []
    for fn in (run, compiled):
        found = fn(*inputs, key_mask())
        results.append((*found, *torch.autograd.grad(found[0].sin().sum() + found[1].sum(), used)))
    for one, two in zip(*results, strict=True):
        torch.testing.assert_close(two, one, rtol=1e-4, atol=1e-4)


def test_bfloat16_is_rounded_once() -> None:
    q, k, v, g, beta = (x.detach().bfloat16() for x in draw())
    out, state = mesa_attention(q, k, v, ridge=0.5, log_decay=g, beta=beta)
    assert out.dtype == torch.bfloat16
    assert state.gram.dtype == state.values.dtype == torch.float32
    expected = dense(*(x.double() for x in (q, k, v)), torch.full_like(q, 0.5).double(), g.double(), beta.double())
    assert ((out.double() - expected).abs() <= 2**-8 * expected.abs() + 1e-5).all()


@pytest.mark.parametrize(
    ("form", "solver"), [("chunked", "auto"), ("chunked", "cg"), ("parallel", "auto"), ("recurrent", "auto")]
)
def test_what_is_not_finite_shows_in_the_rows_that_see_it(form: str, solver: str) -> None:
    for which in range(5):
        clean = [x.detach() for x in draw()]
        spoilt = [x.clone() for x in clean]
        spoilt[which].view(2, spoilt[which].shape[1], 9, -1)[0, 0, 5, 0] = torch.nan
        outs = []
        for q, k, v, g, beta in (clean, spoilt):
            how: dict[str, Any] = {"form": form, "chunk_size": 4, "solver": solver, "ridge": 0.5}
            first, state = mesa_attention(
                *(x[:, :, :7] for x in (q, k, v)), log_decay=g[:, :, :7], beta=beta[:, :, :7], **how
            )
            second, _ = mesa_attention(
                *(x[:, :, 7:] for x in (q, k, v)), log_decay=g[:, :, 7:], beta=beta[:, :, 7:], state=state, **how
            )
            outs.append(torch.cat([first, second], 2))
        hit = torch.zeros(2, 4, 9, dtype=torch.bool)
        if which == 0:
            hit[0, 0, 5] = True
        else:
            hit[0, :2, 5:] = True
        assert outs[1][hit].isnan().all()
        assert torch.equal(outs[1][~hit], outs[0][~hit])


@pytest.mark.parametrize("solver", ["cholesky", "cg"])
@pytest.mark.parametrize("fading", [False, True])
def test_later_tokens_leave_earlier_rows_alone(fading: bool, solver: str) -> None:
    """To the last bit, whatever they become; 2^55 is the largest that counts as finite."""
    inputs = [x.detach().float() for x in draw()]
    how: dict[str, Any] = {"ridge": 0.5, "chunk_size": 4, "solver": solver}
    fade = {"log_decay": -0.1} if fading else {}
    out, _ = mesa_attention(*inputs[:3], **fade, **how)
    for fill in (1e4, 2.0**55, torch.nan, torch.finfo(torch.float32).max):
        later = [x.clone() for x in inputs[:3]]
        for x in later:
            x[:, :, 6:] = fill
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            assert torch.equal(mesa_attention(*later, **fade, **how)[0][:, :, :6], out[:, :, :6])


def test_hard_keys_are_answered_or_reported() -> None:
    """Duplicated, collinear, zero and enormous keys; a ridge too small for the precision."""
    q, k, v, _, _ = (x.detach().float() for x in draw(40, dim=8))
    same = k[:, :, :1].expand_as(k)
    for keys in (same, torch.zeros_like(k), k[..., :1] * torch.ones(8), k * 1e4):
        few = [x[:, :, :8] for x in (q, keys, v)]
        exact = dense(*(x.double() for x in few), torch.ones(2, 4, 8, 8).double())
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # the enormous ones
            out, _, found = mesa_attention(*few, ridge=1.0, return_diagnostics=True)
        sound = found["status"] == 0
        close(torch.where(sound[..., None], out, 0), torch.where(sound[..., None], exact, 0), 2e-3)
        assert out.isfinite().all()
    with pytest.warns(RuntimeWarning, match="systems are unconverged, with residuals up to"):
        found = mesa_attention(q, k * 1e4, v, ridge=1e-6, return_diagnostics=True)[2]
    assert (found["status"] == 3).any()
    with pytest.warns(RuntimeWarning, match="unconverged"):
        found = mesa_attention(q, k, v, ridge=0.5, solver="cg", max_iter=2, return_diagnostics=True)[2]
    assert found["iterations"].max() == 2
    assert ((found["residual"] > 3.5e-4) == (found["status"] == 3)).all()


def test_a_state_is_read_anywhere_and_kept() -> None:
    """read(q) is what a query gets that comes after all pairs; the state protocol."""
    q, k, v, g, _ = (x.detach() for x in draw())
    ridge = ridge_of("dimension").detach()
    _, state = mesa_attention(q, k, v, ridge=ridge, log_decay=g)
    others = torch.randn(2, 4, 3, 4, dtype=torch.float64)
    fade = (g.flip(-1).cumsum(-1).flip(-1) - g).exp()
    gram = torch.einsum("bht,bhtf,bhtd->bhfd", fade, k, k).repeat_interleave(2, 1)
    sums = torch.einsum("bht,bhtf,bhtd->bhfd", fade, k, v).repeat_interleave(2, 1)
    for own in (ridge[None, :, None], ridge_of("all", 3).detach()):
        whole = gram[:, :, None] + torch.diag_embed(own.expand(2, 4, 3, 4))
        expected = (torch.linalg.inv(whole) @ others[..., None])[..., 0][..., None, :] @ sums[:, :, None]
        read = state.read(others, ridge=own if own.shape[2] == 3 else ridge)
        close(read, expected[..., 0, :], 1e-12)
    order = torch.tensor([1, 0, 1])
    assert torch.equal(state.select(order).read(others[order], ridge=1.0), state.read(others, ridge=1.0)[order])
    assert torch.equal(state.repeat(2).gram, state.gram.repeat_interleave(2, 0))
    again = MesaState.from_tensors(state.to_tensors())
    assert torch.equal(again.gram, state.gram)
    assert again.tokens == 9
    assert state.bytes == 8 * 2 * 2 * (16 + 12) + 4
    assert not state.reset().gram.any()
    assert state.crop(9) is state
    with pytest.raises(ArgumentError, match=r"MesaState\.crop: cannot go back from 9 tokens to 3"):
        state.crop(3)


@pytest.mark.parametrize("form", ["parallel", "recurrent", "chunked"])
def test_nothing_to_do_and_nothing_seen(form: str) -> None:
    inputs = draw()[:3]
    before = mesa_attention(*inputs, ridge=1.0)[1]
    out, state = mesa_attention(*(x[:, :, :0] for x in inputs), ridge=1.0, state=before, form=form)
    assert out.shape == (2, 4, 0, 3)
    assert torch.equal(state.gram, before.gram)
    mask = torch.ones(2, 9, dtype=torch.bool)
    mask[1] = False
    out, _ = mesa_attention(*inputs, ridge=1.0, exclude_self=True, attn_mask=mask, form=form)
    assert (out[:, :, 0] == 0).all()
    assert (out[1] == 0).all()
    for grad in torch.autograd.grad(loss(out), inputs):
        assert (grad[1] == 0).all()
        assert grad.isfinite().all()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ({"ridge": 0.0}, "ridge is 0, expected ridge > 0"),
        ({"ridge": -1}, "ridge is -1, expected ridge > 0"),
        ({"ridge": torch.ones(3)}, "ridge has shape [3], which does not broadcast to [4]"),
        (
            {"ridge": torch.ones(1, 1, 1, 1, 1)},
            "expected [4] (per head), [4, 4] (and dimension), [2, 4, 9] (per token)",
        ),
        ({"solver": "cgg"}, "unknown solver='cgg'. Did you mean 'cg'?"),
        ({"solver": "cg", "form": "parallel"}, "form='parallel' solves directly; solver='cg' is for form='chunked'"),
        ({"max_iter": 0}, "max_iter is 0, expected a whole number >= 1"),
        ({"tol": 0.0}, "tol is 0, expected tol > 0"),
        ({"form": "chunks"}, "Did you mean 'chunked'"),
        ({"log_decay": torch.zeros(2, 2, 9, 4)}, "expected [2] (per key head), [2, 2, 9] (per token)."),
        ({"beta": -1.0}, "beta is -1, expected beta >= 0"),
        ({"state": 3}, "state is a int, expected a MesaState"),
        ({"state": MesaState.empty(2, 1, 4, 3, dtype=torch.float64)}, "give each layer its own state"),
        ({"state": MesaState.empty(2, 2, 4, 3)}, "convert it with state.map"),
    ],
)
def test_mistakes_are_named(call: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        mesa_attention(*draw()[:3], **{"ridge": 1.0, **call})
    assert message in str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize(("decay", "factor"), [(None, 2.0), (-0.05, 1.1)])
def test_chunks_are_faster_than_steps(decay: float | None, factor: float) -> None:
    """T = 1024, D = 128, forward and backward, in time of this process; the best of three. Measured on an
    idle machine: 11 and 2 times."""
    make = torch.Generator().manual_seed(0)
    inputs = [torch.randn(1, 1, 1024, 128, generator=make).requires_grad_() for _ in range(3)]
    best, threads = {}, torch.get_num_threads()
    torch.set_num_threads(1)  # others would spend the time of the process waiting for each other
    for form in ("chunked", "recurrent"):
        times = []
        for _ in range(3):
            start = time.process_time()
            out, _ = mesa_attention(*inputs, ridge=1.0, form=form, log_decay=decay)
            torch.autograd.grad(out.sum(), inputs)
            times.append(time.process_time() - start)
        best[form] = min(times)
    torch.set_num_threads(threads)
    assert best["recurrent"] >= factor * best["chunked"], best
