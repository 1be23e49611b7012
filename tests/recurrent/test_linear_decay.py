"""Linear attention with decay against sums over all pairs written out here in float64."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

import regard
from regard.checks import ArgumentError

FORMS = (("parallel", None), ("recurrent", None), ("chunked", 1), ("chunked", 4), ("chunked", 5), ("chunked", None))
KINDS = ("head", "token", "feature")
ORDERS: dict[str, dict[str, bool]] = {"causal": {}, "strict": {"exclude_self": True}, "all": {"is_causal": False}}


def elu(x: Tensor) -> Tensor:
    return torch.where(x > 0, x + 1, torch.exp(torch.where(x > 0, 0, x)))


def full(g: Tensor, batch: int, length: int) -> Tensor:
    """log_decay of any kind as [B, Hkv, T, F]."""
    g = g[None, :, None, None] if g.dim() == 1 else g if g.dim() == 4 else g[..., None]
    return g.expand(batch, -1, length, 4)


def dense(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, text: str = "linear", order: str = "causal", mask: Tensor | None = None
) -> Tensor:
    """One pair after the other: w_ij = sum_f q_if k_jf exp(sum_{j < l <= i} g_lf), l over what is not masked."""
    (batch, heads, length, _), ratio = q.shape, q.shape[1] // k.shape[1]
    q, k = (elu(q), elu(k)) if text == "elu" else (q / 2, k)
    g = full(g, batch, length)
    rows = []
    for b in range(batch):
        kept = [j for j in range(length) if mask is None or mask[b, j]]
        for h in range(heads):
            for i in range(length):
                last = {"causal": i, "strict": i - 1, "all": length - 1}[order]
                row, mass = torch.zeros(v.shape[3], dtype=q.dtype), torch.zeros((), dtype=q.dtype)
                for j in (j for j in kept if j <= last):
                    between = [g[b, h // ratio, m] for m in kept if j < m <= last]
                    fade = torch.stack(between).sum(0).exp() if between else torch.ones(4, dtype=q.dtype)
                    w = (q[b, h, i] * k[b, h // ratio, j] * fade).sum()
                    row, mass = row + w * v[b, h // ratio, j], mass + w
                rows.append(row / mass if text == "elu" and last >= min(kept, default=length) else row)
    return torch.stack(rows).view(batch, heads, length, -1)


def draw(kind: str, length: int = 9, seed: int = 0, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    make = torch.Generator().manual_seed(seed)
    sizes = ((2, 4, length, 4), (2, 2, length, 4), (2, 2, length, 3))
    q, k, v = (torch.randn(*s, generator=make, dtype=torch.float64) for s in sizes)
    shape = {"head": (2,), "token": (2, 2, length), "feature": (2, 2, length, 4)}[kind]
    g = -torch.rand(shape, generator=make, dtype=torch.float64) * 2
    return [x.to(dtype).requires_grad_() for x in (q, k, v, g)]


def key_mask(length: int = 9) -> Tensor:
    mask = torch.rand(2, length, generator=torch.Generator().manual_seed(9)) < 0.7
    mask[0, :3] = False  # left padding
    return mask


def loss(out: Tensor) -> Tensor:
    return (out * torch.arange(1.0, out.numel() + 1, dtype=out.dtype).view(out.shape).cos()).sum()


def close(found: Tensor, expected: Tensor, tolerance: float, what: str = "") -> None:
    assert found.shape == expected.shape, what
    size = max(1.0, expected.abs().max().item()) if expected.numel() else 1.0
    gap = (found.double() - expected.double()).abs().max().item() if expected.numel() else 0.0
    assert gap <= tolerance * size, f"{what}: differs by {gap:.3g} (size {size:.3g})"


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", ["linear", "elu"])
def test_every_form_is_the_sum_over_pairs(text: str, kind: str, order: str) -> None:
    """Outputs and gradients, grouped heads, with and without a mask, for chunks that do and do not divide T."""
    for mask in (None, key_mask()):
        *inputs, g = draw(kind)
        expected = dense(*inputs, g, text, order, mask)
        wanted = torch.autograd.grad(loss(expected), [*inputs, g])
        for form, chunk in FORMS:
            how: dict[str, Any] = {"form": form, "chunk_size": chunk, "attn_mask": mask, **ORDERS[order]}
            out, state = regard.linear_attention(*inputs, text, log_decay=g, **how)
            close(out, expected, 1e-12, f"{form} {chunk}")
            for got, grad in zip(torch.autograd.grad(loss(out), [*inputs, g]), wanted, strict=True):
                close(got, grad, 1e-11, f"{form} {chunk}")
            assert state.tokens == 9


@pytest.mark.parametrize("kind", KINDS)
def test_float32_and_lengths(kind: str) -> None:
    for length in (1, 63, 65):
        *inputs, g = draw(kind, length)
        whole = full(g.detach(), 2, length)
        state, rows = torch.zeros(2, 2, 4, 3, dtype=torch.float64), []
        for t in range(length):
            write = inputs[1][:, :, t, :, None] * inputs[2][:, :, t, None]
            state = state * whole[:, :, t, :, None].exp() + write
            rows.append((inputs[0][:, :, t, None] / 2 @ state.repeat_interleave(2, 1))[:, :, 0])
        for form in ("parallel", "recurrent", "chunked"):
            small = [x.detach().float() for x in (*inputs, g)]
            out, after = regard.linear_attention(*small[:3], "linear", log_decay=small[3], form=form)
            close(out, torch.stack(rows, 2), 1e-5, form)
            close(after.values[:, :, :4], state, 1e-5, form)


@pytest.mark.parametrize("kind", KINDS)
def test_strong_decay_is_exact(kind: str) -> None:
    """-20 a token, one step of -1e4 between weak ones, and -inf: no overflow, no loss of digits, finite gradients."""
    for strength in (-20.0, -1e4, -torch.inf):
        *inputs, g = (x.detach() for x in draw(kind, 40))
        strong = torch.full_like(g, strength)
        if kind != "head" and strength < -20:
            strong = torch.where(torch.arange(40).view(-1, *(1,) * (g.dim() - 3)) % 10 == 5, strength, g)
        finite = strong.clamp(min=-1e5)  # exp(-1e5) is 0, as exp(-inf)
        expected = dense(*inputs, finite)
        for form, chunk in FORMS:
            small = [x.float().requires_grad_() for x in (*inputs, strong)]
            out, _ = regard.linear_attention(*small[:3], "linear", log_decay=small[3], form=form, chunk_size=chunk)
            close(out.detach(), expected, 1e-6, f"{form} {chunk} {strength}")
            assert all(x.isfinite().all() for x in torch.autograd.grad(loss(out), small))


@pytest.mark.parametrize("form", ["parallel", "recurrent", "chunked"])
@pytest.mark.parametrize("kind", KINDS)
def test_states_at_any_cut(kind: str, form: str) -> None:
    """Prefill and steps are one call; left padding is nothing."""
    *inputs, g = (x.detach() for x in draw(kind))
    whole, last = regard.linear_attention(*inputs, "elu", log_decay=g, form="recurrent")
    part = lambda x, cut: x if x.dim() == 1 else x[:, :, cut]  # noqa: E731
    for cuts in ((0, 4, 9), (0, 1, 2, 3, 9), (0, 8, 9)):
        state, outs = None, []
        for a, b in itertools.pairwise(cuts):
            cut = slice(a, b)
            new = [part(x, cut) for x in inputs]
            how: dict[str, Any] = {"state": state, "form": form, "chunk_size": 3}
            out, state = regard.linear_attention(*new, "elu", log_decay=part(g, cut), **how)
            outs.append(out)
        close(torch.cat(outs, 2), whole, 1e-12)
        close(state.values, last.values, 1e-12)
        close(state.keys, last.keys, 1e-12)
    padded = [torch.nn.functional.pad(x, (0, 0, 5, 0), value=torch.nan) for x in inputs]
    fade = g if g.dim() == 1 else torch.cat([torch.full_like(g[:, :, :5], torch.nan), g], 2)
    mask = torch.arange(14) >= 5
    out, state = regard.linear_attention(*padded, "elu", log_decay=fade, attn_mask=mask, form=form, chunk_size=4)
    close(out[:, :, 5:], whole, 1e-12)
    close(state.values, last.values, 1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_derivatives(kind: str) -> None:
    """First and second, against finite differences, with a state."""
    *inputs, g = draw(kind, 5)
    before = regard.linear_attention(*(x.detach() for x in draw(kind, 3, 1)[:3]), "linear")[1]
    start = before.values.clone().requires_grad_()

    def run(q: Tensor, k: Tensor, v: Tensor, fade: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        state = regard.LinearState(values, before.keys, None, before.poisoned, tokens=3)
        out, after = regard.linear_attention(q, k, v, "linear", log_decay=fade, state=state, chunk_size=3)
        return out, after.values

    assert gradcheck(run, (*inputs, g, start))


def test_second_derivatives() -> None:
    *inputs, g = (x.detach()[:1, :2, :4].requires_grad_() for x in draw("token"))
    inputs = [inputs[0], *(x.detach()[:, :1].requires_grad_() for x in inputs[1:])]
    fade = g.detach()[:, :1].requires_grad_()
    run = lambda *x: regard.linear_attention(*x[:3], "linear", log_decay=x[3], chunk_size=2)[0]  # noqa: E731
    assert gradgradcheck(run, (*inputs, fade))


def test_forward_mode_sees_the_derivative() -> None:
    *inputs, g = (x.detach() for x in draw("token"))
    direction = torch.linspace(-1, 1, g.numel(), dtype=torch.float64).view_as(g)
    run = lambda x: regard.linear_attention(*inputs, "linear", log_decay=x, chunk_size=4)[0]  # noqa: E731
    _, tangent = torch.func.jvp(run, (g,), (direction,))
    expected = (dense(*inputs, g + 1e-6 * direction) - dense(*inputs, g - 1e-6 * direction)) / 2e-6
    close(tangent, expected, 1e-7)
    assert expected.abs().max() > 0.1


@pytest.mark.parametrize("kind", KINDS)
def test_one_whole_graph(kind: str) -> None:
    def run(q: Tensor, k: Tensor, v: Tensor, g: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        out, state = regard.linear_attention(q, k, v, "elu", log_decay=g, chunk_size=4, attn_mask=mask)
        return out, state.values

    torch._dynamo.reset()
    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    inputs = draw(kind, dtype=torch.float32)
    results = []
    for fn in (run, compiled):
        found = fn(*inputs, key_mask())
        results.append((*found, *torch.autograd.grad(found[0].sin().sum() + found[1].sum(), inputs)))
    for one, two in zip(*results, strict=True):
        torch.testing.assert_close(two, one, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_bfloat16_is_rounded_once(kind: str) -> None:
    """Inputs and output are rounded, nothing between."""
    *inputs, g = (x.detach().bfloat16() for x in draw(kind))
    out, state = regard.linear_attention(*inputs, "linear", log_decay=g)
    assert out.dtype == torch.bfloat16
    assert state.values.dtype == torch.float32
    expected = dense(*(x.double() for x in (*inputs, g)))
    assert ((out.double() - expected).abs() <= 2**-8 * expected.abs() + 1e-6).all()


@pytest.mark.parametrize("form", ["parallel", "recurrent", "chunked"])
def test_what_is_not_finite_shows_in_the_rows_that_see_it(form: str) -> None:
    for which in range(4):
        clean = [x.detach() for x in draw("token")]
        spoilt = [x.clone() for x in clean]
        spoilt[which].view(2, spoilt[which].shape[1], 9, -1)[0, 0, 5, 0] = torch.nan
        outs = [
            regard.linear_attention(*x[:3], "linear", log_decay=x[3], form=form, chunk_size=4)[0]
            for x in (clean, spoilt)
        ]
        hit = torch.zeros(2, 4, 9, dtype=torch.bool)
        if which == 0:
            hit[0, 0, 5] = True
        else:
            hit[0, :2, 5:] = True
        assert outs[1][hit].isnan().all()
        assert torch.equal(outs[1][~hit], outs[0][~hit])


def test_a_state_is_read_anywhere() -> None:
    """read(q) is what a query gets that comes after all pairs."""
    *inputs, g = (x.detach() for x in draw("token"))
    _, state = regard.linear_attention(*inputs, "linear", log_decay=g)
    others = torch.randn(2, 4, 3, 4, dtype=torch.float64)
    fade = g.flip(-1).cumsum(-1).flip(-1) - g
    sums = torch.einsum("bht,bhtf,bhtd->bhfd", fade.exp(), inputs[1], inputs[2])
    close(state.read(others, "linear"), others / 2 @ sums.repeat_interleave(2, 1), 1e-12)


@pytest.mark.parametrize(
    ("spec", "g", "message"),
    [
        ("linear", 0.5, "log_decay is 0.5, expected log_decay <= 0"),
        ("linear", torch.zeros(4), r"log_decay has shape [4], which does not broadcast to [2]"),
        (
            "linear",
            torch.zeros(2, 9),
            "expected [2] (per key head), [2, 2, 9] (per token) or [2, 2, 9, 4] (per feature)",
        ),
        ("linear*fixed*normalised", -1.0, "divides signed weights by their sum"),
        ("linear*fixed(bias=0.4)", torch.zeros(2, 2, 9, 4), "has a bias, which belongs to no feature"),
        ("linear", "fast", "log_decay is 'fast' (str), expected a number or tensor"),
    ],
)
def test_mistakes_are_named(spec: str, g: Any, message: str) -> None:
    q, k, v, _ = (x.detach() for x in draw("token"))
    with pytest.raises(ArgumentError) as caught:
        regard.linear_attention(q, k, v, spec, log_decay=g)
    assert message in str(caught.value)


def test_a_bias_fades_with_its_key() -> None:
    """(q . k + bias) exp(...), and the sum it is divided by."""
    *inputs, g = (x.detach() for x in draw("token"))
    q, k, v = (elu(inputs[0]) - 1, elu(inputs[1]) - 1, inputs[2])
    out, _ = regard.linear_attention(q, k, v, "linear*fixed(bias=1.5)", log_decay=g, chunk_size=4)
    ones = [torch.ones_like(x) for x in inputs[:2]]  # their dot product is 4, halved by the scale
    close(out, dense(q, k, v, g) + dense(*ones, v, g) * 0.75, 1e-12)


@pytest.mark.parametrize("form", ["parallel", "recurrent", "chunked"])
def test_nothing_to_do(form: str) -> None:
    *inputs, g = (x.detach() for x in draw("feature"))
    before = regard.linear_attention(*inputs, "linear", log_decay=g)[1]
    none = [x[:, :, :0] for x in (*inputs, g)]
    out, state = regard.linear_attention(*none[:3], "linear", log_decay=none[3], state=before, form=form)
    assert out.shape == (2, 4, 0, 3)
    assert torch.equal(state.values, before.values)
