"""The delta rule against its recurrence of matrices, written out here in float64."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck
from torch.nn.functional import normalize

from regard import DeltaState, delta_rule
from regard.checks import ArgumentError

FORMS = (("parallel", None), ("recurrent", None), ("chunked", 1), ("chunked", 4), ("chunked", 5), ("chunked", None))
KINDS = ("none", "head", "token", "feature")
ORDERS: dict[str, dict[str, bool]] = {"causal": {}, "strict": {"exclude_self": True}, "all": {"is_causal": False}}


def dense(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g: Tensor | None, order: str = "causal", mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """W <- W Diag(exp g) (I - beta k k^T) + beta v k^T, one matrix after the other: (outputs, W [B, Hkv, Dv, D])."""
    (batch, heads, length, dim), kv_heads = q.shape, k.shape[1]
    ratio = heads // kv_heads
    if g is not None:
        g = g[None, :, None, None] if g.dim() == 1 else g if g.dim() == 4 else g[..., None]
        g = g.expand(batch, kv_heads, length, dim)
    rows, last = {}, []
    for b, n in itertools.product(range(batch), range(kv_heads)):
        states = [torch.zeros(v.shape[3], dim, dtype=q.dtype)]
        for t in range(length):
            w, at, step = states[-1], k[b, n, t], beta[b, n, t]
            if mask is None or mask[b, t]:
                w = w if g is None else w @ torch.diag(g[b, n, t].exp())
                w = w @ (torch.eye(dim, dtype=q.dtype) - step * torch.outer(at, at)) + step * torch.outer(
                    v[b, n, t], at
                )
            states.append(w)
        for r, t in itertools.product(range(ratio), range(length)):
            place = {"causal": t + 1, "strict": t, "all": length}[order]
            rows[b, n * ratio + r, t] = states[place] @ q[b, n * ratio + r, t]
        last.append(states[-1])
    out = torch.stack([rows[at] for at in itertools.product(range(batch), range(heads), range(length))])
    return out.view(batch, heads, length, -1), torch.stack(last).view(batch, kv_heads, v.shape[3], dim)


def draw(kind: str, length: int = 9, seed: int = 0, dim: int = 4) -> list[Tensor]:
    """q, k, v, beta and g (missing for "none")."""
    make = torch.Generator().manual_seed(seed)
    q, k, v = (
        torch.randn(2, h, length, d, generator=make, dtype=torch.float64) for h, d in ((4, dim), (2, dim), (2, 3))
    )
    beta = torch.rand(2, 2, length, generator=make, dtype=torch.float64)
    shape = {"none": (0,), "head": (2,), "token": (2, 2, length), "feature": (2, 2, length, dim)}[kind]
    g = -torch.rand(shape, generator=make, dtype=torch.float64)
    found = [q, normalize(k, dim=-1) * 1.2, v, beta, *([] if kind == "none" else [g])]
    return [x.requires_grad_() for x in found]


def call(*inputs: Tensor, **how: Any) -> tuple[Tensor, DeltaState]:
    return delta_rule(*inputs[:4], log_decay=inputs[4] if len(inputs) > 4 else None, **how)


def written(*inputs: Tensor, **how: Any) -> tuple[Tensor, Tensor]:
    return dense(*inputs[:4], inputs[4] if len(inputs) > 4 else None, **how)


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
@pytest.mark.parametrize("kind", KINDS)
def test_every_form_is_the_recurrence(kind: str, order: str) -> None:
    """Outputs, states and gradients, grouped heads, with and without a mask, for chunks that do and do not divide T."""
    for mask in (None, key_mask()):
        inputs = draw(kind)
        expected, last = written(*inputs, order=order, mask=mask)
        wanted = torch.autograd.grad(loss(expected), inputs)
        for form, chunk in FORMS:
            out, state = call(*inputs, form=form, chunk_size=chunk, attn_mask=mask, **ORDERS[order])
            close(out, expected, 1e-12, f"{form} {chunk}")
            close(state.values, last.mT, 1e-12, f"{form} {chunk}")
            for got, grad in zip(torch.autograd.grad(loss(out), inputs), wanted, strict=True):
                close(got, grad, 1e-11, f"{form} {chunk}")
            assert state.tokens == 9


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", [1, 63, 65])
def test_float32_and_lengths(length: int, kind: str) -> None:
    inputs = [x.detach() for x in draw(kind, length)]
    expected, last = written(*inputs)
    for form in ("parallel", "recurrent", "chunked"):
        out, state = call(*(x.float() for x in inputs), form=form)
        close(out, expected, 1e-5, form)
        close(state.values, last.mT, 1e-5, form)


def test_a_full_step_stores_the_pair() -> None:
    """beta |k|^2 = 1: what was just written is read back, and orthogonal keys do not disturb it."""
    keys = torch.linalg.qr(torch.randn(1, 2, 6, 6, dtype=torch.float64))[0]
    values = torch.randn(1, 2, 6, 3, dtype=torch.float64)
    out, state = delta_rule(keys, keys, values, 1.0, chunk_size=4)
    close(out, values, 1e-12)
    close(state.read(keys), values, 1e-12)
    again, _ = delta_rule(keys, keys, values.flip(2), 1.0, state=state)
    close(again, values.flip(2), 1e-12)  # old values are overwritten, not added to


def test_strong_decay_is_exact() -> None:
    """-20 a token, one step of -1e4 between weak ones, and -inf: no overflow, no loss of digits, finite gradients."""
    for kind, strength in itertools.product(("head", "token", "feature"), (-20.0, -1e4, -torch.inf)):
        *inputs, g = (x.detach() for x in draw(kind, 40))
        strong = torch.full_like(g, strength)
        if kind != "head" and strength < -20:
            strong = torch.where(torch.arange(40).view(-1, *(1,) * (g.dim() - 3)) % 10 == 5, strength, g)
        expected, _ = written(*inputs, strong.clamp(min=-1e5))
        for form, chunk in FORMS:
            small = [x.float().requires_grad_() for x in (*inputs, strong)]
            out, _ = call(*small, form=form, chunk_size=chunk)
            close(out.detach(), expected, 2e-6, f"{form} {chunk} {strength}")
            assert all(x.isfinite().all() for x in torch.autograd.grad(loss(out), small))


@pytest.mark.parametrize("form", ["parallel", "recurrent", "chunked"])
@pytest.mark.parametrize("kind", KINDS)
def test_states_at_any_cut(kind: str, form: str) -> None:
    """Prefill and steps are one call; left padding is nothing, whatever it holds."""
    inputs = [x.detach() for x in draw(kind)]
    expected, last = written(*inputs)
    for cuts in ((0, 9), (0, 4, 9), (0, 1, 2, 3, 9), (0, 8, 9)):
        state, outs = None, []
        for a, b in itertools.pairwise(cuts):
            new = [x if x.dim() == 1 else x[:, :, a:b] for x in inputs]
            out, state = call(*new, state=state, form=form, chunk_size=3)
            outs.append(out)
        close(torch.cat(outs, 2), expected, 1e-12)
        close(state.values, last.mT, 1e-12)
    padded = [x if x.dim() == 1 else torch.cat([torch.full_like(x[:, :, :5], torch.nan), x], 2) for x in inputs]
    out, state = call(*padded, attn_mask=torch.arange(14) >= 5, form=form, chunk_size=4)
    close(out[:, :, 5:], expected, 1e-12)
    close(state.values, last.mT, 1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_derivatives(kind: str) -> None:
    """Against finite differences, with a state."""
    inputs = draw(kind, 5)
    start = torch.randn(2, 2, 4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(2)).requires_grad_()

    def run(values: Tensor, *x: Tensor) -> tuple[Tensor, Tensor]:
        state = DeltaState(values, torch.zeros(2, 2, dtype=torch.bool))
        out, after = call(*x, state=state, chunk_size=3)
        return out, after.values

    assert gradcheck(run, (start, *inputs))


def test_second_derivatives() -> None:
    few = [x.detach()[:1, :1, :4].requires_grad_() for x in draw("token")]
    assert gradgradcheck(lambda *x: call(*x, chunk_size=2)[0], few)


def test_forward_mode_sees_the_derivative() -> None:
    inputs = [x.detach() for x in draw("token")]
    direction = torch.linspace(-1, 1, inputs[1].numel(), dtype=torch.float64).view_as(inputs[1])
    ends = [written(inputs[0], inputs[1] + e * direction, *inputs[2:])[0] for e in (1e-6, -1e-6)]
    run = lambda x: call(inputs[0], x, *inputs[2:], chunk_size=4)[0]  # noqa: E731
    _, tangent = torch.func.jvp(run, (inputs[1],), (direction,))
    close(tangent, (ends[0] - ends[1]) / 2e-6, 1e-7)
    assert tangent.abs().max() > 0.1


@pytest.mark.parametrize("kind", KINDS)
def test_one_whole_graph(kind: str) -> None:
    def run(mask: Tensor, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        out, state = call(*inputs, chunk_size=4, attn_mask=mask)
        return out, state.values

    torch._dynamo.reset()
    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    inputs = [x.detach().float().requires_grad_() for x in draw(kind)]
    results = []
    for fn in (run, compiled):
        found = fn(key_mask(), *inputs)
        results.append((*found, *torch.autograd.grad(found[0].sin().sum() + found[1].sum(), inputs)))
    for one, two in zip(*results, strict=True):
        torch.testing.assert_close(two, one, rtol=1e-5, atol=1e-5)


def test_bfloat16_is_rounded_once() -> None:
    inputs = [x.detach().bfloat16() for x in draw("token")]
    out, state = call(*inputs)
    assert out.dtype == torch.bfloat16
    assert state.values.dtype == torch.float32
    expected, _ = written(*(x.double() for x in inputs))
    assert ((out.double() - expected).abs() <= 2**-8 * expected.abs() + 1e-5).all()


@pytest.mark.parametrize("form", ["parallel", "recurrent", "chunked"])
def test_what_is_not_finite_shows_in_the_rows_that_see_it(form: str) -> None:
    for which in range(5):
        clean = [x.detach() for x in draw("token")]
        spoilt = [x.clone() for x in clean]
        spoilt[which].view(2, spoilt[which].shape[1], 9, -1)[0, 0, 5, 0] = torch.nan
        outs = []
        for inputs in (clean, spoilt):
            first, state = call(*(x[:, :, :7] for x in inputs), form=form, chunk_size=4)
            second, _ = call(*(x[:, :, 7:] for x in inputs), state=state, form=form, chunk_size=4)
            outs.append(torch.cat([first, second], 2))
        hit = torch.zeros(2, 4, 9, dtype=torch.bool)
        if which == 0:
            hit[0, 0, 5] = True
        else:
            hit[0, :2, 5:] = True
        assert outs[1][hit].isnan().all()
        assert torch.equal(outs[1][~hit], outs[0][~hit])


@pytest.mark.parametrize("kind", KINDS)
def test_later_tokens_leave_earlier_rows_alone(kind: str) -> None:
    """To the last bit, whatever they become."""
    inputs = [x.detach().float() for x in draw(kind)]
    out, _ = call(*inputs, chunk_size=4)
    for fill in (1e4, torch.nan, torch.finfo(torch.float32).max):
        later = [x.clone() for x in inputs]
        for x in later[:3]:
            x[:, :, 6:] = fill
        assert torch.equal(call(*later, chunk_size=4)[0][:, :, :6], out[:, :, :6])


def test_a_state_is_read_anywhere_and_kept() -> None:
    inputs = [x.detach() for x in draw("token")]
    _, state = call(*inputs)
    _, last = written(*inputs)
    others = torch.randn(2, 4, 3, 4, dtype=torch.float64)
    close(state.read(others, scale=2.0), 2 * others @ last.mT.repeat_interleave(2, 1), 1e-12)
    order = torch.tensor([1, 0, 1])
    assert torch.equal(state.select(order).read(others[order]), state.read(others)[order])
    assert torch.equal(state.repeat(2).values, state.values.repeat_interleave(2, 0))
    again = DeltaState.from_tensors(state.to_tensors())
    assert torch.equal(again.values, state.values)
    assert again.tokens == 9
    assert state.bytes == 8 * 2 * 2 * 12 + 4
    assert not state.reset().values.any()
    with pytest.raises(ArgumentError, match=r"DeltaState\.crop: cannot go back from 9 tokens to 8"):
        state.crop(-1)


@pytest.mark.parametrize("form", ["parallel", "recurrent", "chunked"])
def test_nothing_to_do_and_nothing_seen(form: str) -> None:
    inputs = draw("token")
    before = call(*inputs)[1]
    out, state = call(*(x[:, :, :0] for x in inputs), state=before, form=form)
    assert out.shape == (2, 4, 0, 3)
    assert torch.equal(state.values, before.values)
    mask = torch.ones(2, 9, dtype=torch.bool)
    mask[1] = False
    out, _ = call(*inputs, exclude_self=True, attn_mask=mask, form=form)
    assert (out[:, :, 0] == 0).all()
    assert (out[1] == 0).all()
    for grad in torch.autograd.grad(loss(out), inputs):
        assert (grad[1] == 0).all()
        assert grad.isfinite().all()


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"beta": -0.5}, "beta is -0.5, expected beta >= 0"),
        ({"beta": torch.ones(2, 4, 9)}, "beta has shape [2, 4, 9], which does not broadcast to [2, 2, 9]"),
        ({"log_decay": 0.1}, "log_decay is 0.1, expected log_decay <= 0"),
        ({"form": "wy"}, "unknown form='wy'"),
        ({"chunk_size": 0}, "chunk_size is 0, expected a whole number >= 1"),
        ({"scale": 0.0}, "scale is 0, expected scale > 0"),
        ({"exclude_self": 1}, "exclude_self is 1, expected True or False"),
        ({"state": 3}, "state is a int, expected a DeltaState"),
        ({"state": DeltaState.empty(2, 1, 4, 3, dtype=torch.float64)}, "give each layer its own state"),
    ],
)
def test_mistakes_are_named(how: dict[str, Any], message: str) -> None:
    q, k, v, beta = (x.detach() for x in draw("none"))
    with pytest.raises(ArgumentError) as caught:
        delta_rule(q, k, v, how.pop("beta", beta), **how)
    assert message in str(caught.value)
