"""Linear attention against dense float64 formulas written here: values, gradients, states and their guard."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

import regard
from regard.checks import ArgumentError

FORMS = (("parallel", None), ("recurrent", None), ("chunked", 1), ("chunked", 4), ("chunked", 5), ("chunked", None))


def unit(x: Tensor) -> Tensor:
    return x / (1e-3 + (x * x).sum(-1, keepdim=True)).sqrt()


def half_square(q: Tensor, k: Tensor) -> Tensor:
    return -(q[..., :, None, :] - k[..., None, :, :]).square().sum(-1) / 2


def elu(x: Tensor) -> Tensor:
    return torch.where(x > 0, x + 1, torch.exp(torch.where(x > 0, 0, x)))


def dot(q: Tensor, k: Tensor) -> Tensor:
    return torch.einsum("bhid,bhjd->bhij", q, k)


# Sentence: (similarity of q and k, scale at D = 4, bias, whether divided by the sum).
SENTENCES: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], float, float, bool]] = {
    "linear": (dot, 0.5, 0.0, False),
    "linear*fixed(bias=0.4)": (dot, 0.5, 0.4, False),
    "linear*fixed*normalised": (dot, 0.5, 0.0, True),
    "cosine": (lambda q, k: dot(unit(q), unit(k)), 1.0, 0.0, False),
    "linear*fixed*cosine*normalised": (lambda q, k: dot(unit(q), unit(k)), 1.0, 0.0, True),
    "shift-cosine": (lambda q, k: dot(unit(q), unit(k)), 1.0, 1.0, True),
    "linear*fixed(bias=1)*cosine*unnormalised": (lambda q, k: dot(unit(q), unit(k)), 1.0, 1.0, False),
    "relu": (lambda q, k: dot(q.relu(), k.relu()), 1.0, 1e-4, True),
    "relu2": (lambda q, k: dot(q.relu() ** 2, k.relu() ** 2), 1.0, 1e-4, True),
    "elu": (lambda q, k: dot(elu(q), elu(k)), 1.0, 0.0, True),
    "linear*fixed*elu*unnormalised": (lambda q, k: dot(elu(q), elu(k)), 1.0, 0.0, False),
    "linear*fixed*euclidean": (half_square, 0.5, 0.0, False),
    "linear*fixed*euclidean*normalised": (half_square, 0.5, 0.0, True),
}
GUARDED = ("linear*fixed*normalised", "linear*fixed*cosine*normalised", "linear*fixed*euclidean*normalised")
ORDERS = {"causal": {}, "strict": {"exclude_self": True}, "all": {"is_causal": False}}


def dense(
    text: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    order: str = "causal",
    mask: Tensor | None = None,
    scale: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """All pairs, one formula: w = scale s + bias, divided by its sum or by what holds it off zero."""
    similarity, default_scale, default_bias, divided = SENTENCES[text]
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril({"causal": 0, "strict": -1, "all": 10**6}[order])
    seen = seen.expand(q.shape[0], 1, -1, -1)
    seen = seen if mask is None else seen & mask[:, None, None]
    w = similarity(q, k) * (default_scale if scale is None else scale[..., None])
    w = torch.where(seen, w + (default_bias if bias is None else bias[..., None]), 0)
    if not divided:
        return w @ v
    total = w.sum(-1, keepdim=True)
    if text in GUARDED:
        square = (w * w).sum(-1, keepdim=True)
        size = torch.where(square > 0, seen.sum(-1, keepdim=True) * torch.where(square > 0, square, 1), 0)
        size = torch.where(size > 0, torch.where(size > 0, size, 1).sqrt(), 0)
        total = torch.where(total.abs() < 1e-3 * size, 1e-3 * torch.where(total < 0, -size, size), total)
    return w @ v / torch.where(total == 0, 1, total)


def draw(
    length: int = 13, *, heads: int = 4, kv_heads: int = 2, seed: int = 0, keys: int | None = None, dim: int = 4
) -> list[Tensor]:
    make = torch.Generator().manual_seed(seed)
    keys = length if keys is None else keys
    sizes = ((heads, length, dim), (kv_heads, keys, dim), (kv_heads, keys, 3))
    return [torch.randn(2, *s, generator=make, dtype=torch.float64).requires_grad_() for s in sizes]


def key_mask(length: int = 13) -> Tensor:
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
@pytest.mark.parametrize("text", SENTENCES)
def test_every_form_is_the_dense_formula(text: str, order: str) -> None:
    """Outputs to 1e-12 and gradients, grouped heads, with and without a mask, for chunks that do and do not divide
    the length."""
    loose = 100 if text in GUARDED else 1  # a sum held near zero multiplies rounding by up to 1/GUARD
    for mask in (None, key_mask()):
        inputs = draw()
        expected = dense(text, *inputs, order, mask)
        wanted = torch.autograd.grad(loss(expected), inputs)
        states = []
        for form, chunk in FORMS:
            out, state = regard.linear_attention(
                *inputs, text, form=form, chunk_size=chunk, attn_mask=mask, **ORDERS[order]
            )
            what = f"{form} {chunk}"
            close(out, expected, 1e-12 * loose, what)
            for got, grad in zip(torch.autograd.grad(loss(out), inputs), wanted, strict=True):
                close(got, grad, 1e-11 * loose**1.5, what)
            states.append(state)
        for state in states[1:]:
            assert state.tokens == states[0].tokens == 13
            for name in ("values", "keys", "squares"):
                one, two = getattr(state, name), getattr(states[0], name)
                assert (one is None) == (two is None) == (name == "squares" and text not in GUARDED)
                if one is not None:
                    close(one, two, 1e-12, name)


@pytest.mark.parametrize("order", ["causal", "strict"])
@pytest.mark.parametrize("text", SENTENCES)
def test_prefill_is_chunks_is_steps(text: str, order: str) -> None:
    """However the sequence is cut, with gradients that flow through the states."""
    inputs, mask = draw(), key_mask()
    expected = dense(text, *inputs, order, mask)
    wanted = torch.autograd.grad(loss(expected), inputs)
    loose = 100 if text in GUARDED else 1
    for ends in ([13], [4, 5, 11, 13], list(range(1, 14))):
        for form in ("chunked", "parallel", "recurrent"):
            state, parts = None, []
            for start, end in zip([0, *ends], ends, strict=False):
                part = [x[:, :, start:end] for x in inputs]
                out, state = regard.linear_attention(
                    *part, text, state=state, form=form, chunk_size=3, attn_mask=mask[:, start:end], **ORDERS[order]
                )
                parts.append(out)
            whole = torch.cat(parts, 2)
            close(whole, expected, 1e-12 * loose, f"{form} {ends}")
            for got, grad in zip(torch.autograd.grad(loss(whole), inputs), wanted, strict=True):
                close(got, grad, 1e-11 * loose**1.5, f"{form} {ends}")
            assert state.tokens == 13


@pytest.mark.parametrize("text", SENTENCES)
def test_the_state_is_the_sums(text: str) -> None:
    """Reading the state with queries of another time equals attending to all pairs; writing alone needs no query."""
    _, k, v = draw()
    q = draw(5, seed=3)[0]
    mask = key_mask()
    none = q[:, :, :0]
    out, state = regard.linear_attention(none, k, v, text, is_causal=False, attn_mask=mask)
    assert out.shape == (2, 4, 0, 3)
    loose = 100 if text in GUARDED else 1
    for form in ("chunked", "parallel", "recurrent"):
        out, same = regard.linear_attention(q, k[:, :, :0], v[:, :, :0], text, state=state, is_causal=False, form=form)
        close(out, dense(text, q, k, v, "all", mask), 1e-12 * loose, form)
        assert same.tokens == 13
        assert torch.equal(same.values, state.values)


@pytest.mark.parametrize("form", ["chunked", "parallel", "recurrent"])
@pytest.mark.parametrize("text", ["linear", "shift-cosine", "relu2", "linear*fixed*normalised"])
def test_gradcheck(text: str, form: str) -> None:
    """Finite differences in queries, keys, values, scale, bias and the state that comes in."""
    q, k, v = (x.detach()[:1, :, :5].requires_grad_() for x in draw(5, heads=2, kv_heads=1, dim=2))
    make = torch.Generator().manual_seed(4)
    bias = (0.3 + torch.rand(1, 2, 5, generator=make, dtype=torch.float64)).requires_grad_()
    scale = (0.5 + torch.rand(1, 2, 5, generator=make, dtype=torch.float64)).requires_grad_()
    scaled = regard.Spec.parse(text).takes_scale
    earlier = [x.detach() for x in draw(3, heads=2, kv_heads=1, dim=2, seed=8)]
    first = regard.linear_attention(*(x[:1] for x in earlier), text)[1]
    sums = [x.detach().requires_grad_() for x in (first.values, first.keys) if x is not None]
    mask = torch.tensor([[True, True, False, True, True]])

    def run(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, scale: Tensor, values: Tensor, keys: Tensor) -> Any:
        state = regard.LinearState(values, keys, first.squares, first.poisoned, tokens=first.tokens)
        out, state = regard.linear_attention(
            q, k, v, text, state=state, form=form, chunk_size=2, attn_mask=mask,
            scale=scale if scaled else None, params={"bias": bias},
        )  # fmt: skip
        return out, state.values, state.keys

    given = (q, k, v, bias, scale, *sums)
    assert gradcheck(run, given, eps=1e-6, atol=1e-6, rtol=1e-5)
    if form != "chunked":
        assert gradgradcheck(run, given, eps=1e-6, atol=1e-4, rtol=1e-3, fast_mode=True)


def test_gradcheck_of_the_squares() -> None:
    """The second moments of the state: finite differences through the guard, held and not."""
    q, k, v = (x.detach()[:1] for x in draw(4, heads=1, kv_heads=1, dim=2))
    text = "linear*fixed*normalised"
    first = regard.linear_attention(*(x.detach()[:1] for x in draw(3, heads=1, kv_heads=1, dim=2, seed=8)), text)[1]
    held = k.clone()
    held[:, :, 1] = -held[:, :, 0]  # two keys whose weights cancel
    for keys, start in ((k, first), (held[:, :, :2], None)):
        length = keys.shape[2]
        own = first if start is not None else first.reset()
        squares = own.squares.detach().requires_grad_()
        leaf = keys.detach().requires_grad_()
        grads = []
        for form in ("chunked", "parallel"):

            def run(keys: Tensor, squares: Tensor, form: str = form, own: Any = own, length: int = length) -> Any:
                state = regard.LinearState(own.values, own.keys, squares, own.poisoned, tokens=own.tokens)
                out, after = regard.linear_attention(
                    q[:, :, :length], keys, v[:, :, :length], text, state=state, form=form, chunk_size=3
                )
                return out, after.squares

            if start is not None:
                assert gradcheck(run, (leaf, squares), eps=1e-6, atol=1e-5, rtol=1e-4)
            out, after = run(leaf, squares)
            grads.append(torch.autograd.grad(loss(out) + loss(after), (leaf, squares)))
        for one, two in zip(*grads, strict=True):
            close(one, two, 1e-9)


@pytest.mark.parametrize("text", GUARDED[:1])
def test_the_guard_holds_a_sum_that_cancels(text: str) -> None:
    """Weights 1 and -1 are divided by 1e-3 sqrt(2 (1 + 1)); weights of zero by one; squares of 2^50 do not overflow."""
    one = torch.ones(1, 1, 2, 1)
    k = torch.tensor([1.0, -1.0]).view(1, 1, 2, 1)
    v = torch.eye(2)[None, None]
    for form in ("chunked", "parallel", "recurrent"):
        for size in (1.0, 2.0**-40, 2.0**50):
            out, _ = regard.linear_attention(one * size, k * size, v, text, form=form, scale=1.0)
            torch.testing.assert_close(out[0, 0], torch.tensor([[1.0, 0.0], [500.0, -500.0]]), rtol=1e-6, atol=0)
        leaf = torch.zeros(1, 1, 2, 1, requires_grad=True)
        out, _ = regard.linear_attention(one * 3, leaf, v, text, form=form, scale=1.0)
        assert (out == 0).all()
        (grad,) = torch.autograd.grad(out[0, 0, 1, 0], leaf)
        assert grad.flatten().tolist() == [3.0, 0.0]


@pytest.mark.parametrize("text", ["linear", "cosine", "shift-cosine", "relu", "elu", "linear*fixed*normalised"])
@pytest.mark.parametrize("form", ["chunked", "recurrent"])
def test_precision(text: str, form: str) -> None:
    """float32 within 1e-5 of the float64 formula; bfloat16 in, float32 inside, bfloat16 out, float32 state."""
    exact = [x.detach() for x in draw(70)]
    loose = 300 if text in GUARDED else 1
    out, state = regard.linear_attention(*(x.float() for x in exact), text, form=form)
    assert out.dtype == state.values.dtype == torch.float32
    close(out, dense(text, *(x.float().double() for x in exact)), 1e-5 * loose)
    half = [x.bfloat16() for x in exact]
    out, state = regard.linear_attention(*half, text, form=form)
    assert out.dtype == torch.bfloat16
    assert state.values.dtype == torch.float32
    truth = dense(text, *(x.double() for x in half))
    assert ((out.double() - truth).abs() <= 2**-8 * truth.abs() + 1e-5 * loose * truth.abs().max()).all()


BAD = (float("nan"), float("inf"), torch.finfo(torch.float64).max)


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("form", ["chunked", "parallel", "recurrent"])
@pytest.mark.parametrize("text", ["linear", "relu2", "linear*fixed*cosine*normalised"])
def test_hidden_content_never_matters(text: str, form: str, bad: float) -> None:
    """NaN in padded keys and values: the same bits out, and gradients of exactly zero there."""
    clean, mask = draw(), key_mask()
    spoilt = [x.detach().clone() for x in clean]
    for x in spoilt[1:]:
        x.transpose(1, 2)[~mask] = bad
    spoilt = [x.requires_grad_() for x in spoilt]
    results = []
    for inputs in (clean, spoilt):
        out, state = regard.linear_attention(*inputs, text, form=form, chunk_size=4, attn_mask=mask)
        grads = torch.autograd.grad(loss(out) + loss(state.values), inputs)
        assert all((g.transpose(1, 2)[~mask] == 0).all() for g in grads[1:])
        results.append((out, state.values, state.keys, *grads))
    for one, two in zip(*results, strict=True):
        assert torch.equal(one, two)


@pytest.mark.parametrize("form", ["chunked", "parallel", "recurrent"])
@pytest.mark.parametrize("which", [0, 1, 2])
def test_what_is_not_finite_shows_in_exactly_the_rows_that_see_it(which: int, form: str) -> None:
    """Also in the calls that come after, through the state."""
    clean = [x.detach() for x in draw()]
    spoilt = [x.clone() for x in clean]
    spoilt[which][0, 0, 5, 1] = float("nan")
    outs = []
    for inputs in (clean, spoilt):
        first, state = regard.linear_attention(*(x[:, :, :7] for x in inputs), "elu", form=form, chunk_size=4)
        second, _ = regard.linear_attention(*(x[:, :, 7:] for x in inputs), "elu", state=state, form=form, chunk_size=4)
        outs.append(torch.cat([first, second], 2))
    hit = torch.zeros(2, 4, 13, dtype=torch.bool)
    if which == 0:
        hit[0, 0, 5] = True
    else:
        hit[0, :2, 5:] = True  # the two query heads of the key head
    assert outs[1][hit].isnan().all()
    assert torch.equal(outs[1][~hit], outs[0][~hit])


def test_a_row_that_sees_nothing_is_zero_with_gradient_zero() -> None:
    for text in SENTENCES:
        inputs = draw()
        mask = torch.ones(2, 13, dtype=torch.bool)
        mask[1] = False
        out, _ = regard.linear_attention(*inputs, text, exclude_self=True, attn_mask=mask[:, None, None])
        assert (out[:, :, 0] == 0).all()
        assert (out[1] == 0).all()
        grads = torch.autograd.grad(loss(out), inputs)
        assert all((g[1] == 0).all() and g.isfinite().all() for g in grads)
        assert (grads[0][:, :, 0] == 0).all()


def test_later_tokens_leave_earlier_rows_alone() -> None:
    """To the last bit, whatever they become."""
    inputs = [x.detach().float() for x in draw()]
    for text in SENTENCES:
        out, _ = regard.linear_attention(*inputs, text, chunk_size=4)
        for fill in (1e4, float("nan"), torch.finfo(torch.float32).max):
            later = [x.clone() for x in inputs]
            for x in later:
                x[:, :, 7:] = fill
            assert torch.equal(regard.linear_attention(*later, text, chunk_size=4)[0][:, :, :7], out[:, :, :7])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ({"spec": "softmax"}, "softmax has no finite features"),
        ({"spec": "biweight"}, "those that have: linear, cosine, shift-cosine, relu, relu2, elu"),
        ({"spec": "local-linear"}, "no finite features"),
        ({"form": "chunks"}, "Did you mean 'chunked'"),
        ({"is_causal": 1}, "is_causal is 1, expected True or False"),
        ({"chunk_size": 0}, "chunk_size is 0, expected a whole number >= 1"),
        ({"attn_mask": torch.ones(2, 13)}, "expected torch.bool"),
        ({"attn_mask": torch.ones(2, 4, 13, 13, dtype=torch.bool)}, "does not broadcast"),
        ({"state": 3}, "state is a int, expected a LinearState"),
        ({"scale": 2.0}, "takes no scale"),
        ({"params": {"margin": 1.0}}, "unknown parameter 'margin'"),
    ],
)
def test_mistakes_are_named(call: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        regard.linear_attention(*draw(), **call)
    assert message in str(caught.value)


def test_shapes_and_states_that_do_not_fit() -> None:
    q, k, v = draw()
    with pytest.raises(ArgumentError, match="causal order needs a key for every query"):
        regard.linear_attention(q[:, :, :5], k, v)
    with pytest.raises(ArgumentError, match="cannot be shared out"):
        regard.linear_attention(q[:, :3], k, v)
    with pytest.raises(ArgumentError, match="key and value differ in heads or length"):
        regard.linear_attention(q, k, v[:, :, :5])
    with pytest.raises(ArgumentError, match=r"value torch\.float32 on cpu"):
        regard.linear_attention(q, k, v.float())
    state = regard.linear_attention(q, k, v, "elu")[1]
    with pytest.raises(ArgumentError, match="give each layer its own state"):
        regard.linear_attention(q, k, v, "linear*fixed*normalised", state=state)
    with pytest.raises(ArgumentError, match="give each layer its own state"):
        regard.linear_attention(q, k[:, :1], v[:, :1], "elu", state=state)


def test_second_derivatives_of_the_chunked_form_are_refused() -> None:
    q, k, v = draw()
    out, _ = regard.linear_attention(q, k, v, "elu")
    first = torch.autograd.grad(out.square().sum(), q, create_graph=True)[0]
    with pytest.raises(ArgumentError, match="form='parallel'"):
        torch.autograd.grad(first.square().sum(), k)


@pytest.mark.parametrize("text", ["relu2", "linear*fixed*normalised"])
def test_forward_mode_and_transforms_see_the_derivative(text: str) -> None:
    """The tangent is a central difference; vmap over sequences is a loop."""
    q, k, v = (x.detach() for x in draw())
    direction = torch.linspace(-1, 1, k.numel(), dtype=torch.float64).view_as(k)

    def run(keys: Tensor) -> Tensor:
        return regard.linear_attention(q, keys, v, text, chunk_size=4)[0]

    out, tangent = torch.func.jvp(run, (k,), (direction,))
    expected = (dense(text, q, k + 1e-6 * direction, v) - dense(text, q, k - 1e-6 * direction, v)) / 2e-6
    close(out, dense(text, q, k, v), 1e-10)
    close(tangent, expected, 1e-5)
    assert expected.abs().max() > 0.1
    each = torch.func.vmap(lambda *x: regard.linear_attention(*(y[None] for y in x), text)[0][0])
    close(each(q, k, v), dense(text, q, k, v), 1e-10)


def test_autocast_changes_nothing() -> None:
    """Forward and backward in full precision, with autocast on around both."""
    results = []
    for on in (False, True):
        inputs = [x.detach().float().requires_grad_() for x in draw()]
        with torch.autocast("cpu", torch.bfloat16, enabled=on):
            out, state = regard.linear_attention(*inputs, "shift-cosine", chunk_size=4)
            grads = torch.autograd.grad(loss(out) + loss(state.values), inputs)
        results.append((out, state.values, *grads))
    for one, two in zip(*results, strict=True):
        assert one.dtype == torch.float32
        assert torch.equal(one, two)


@pytest.mark.parametrize("form", ["chunked", "parallel", "recurrent"])
def test_nothing_to_do(form: str) -> None:
    """No sequences, and no tokens: empty outputs, a state that has not changed, no error of torch's own."""
    for text in ("elu", "linear*fixed*normalised"):
        out, state = regard.linear_attention(*(x[:0] for x in draw()), text, form=form, chunk_size=4)
        assert out.shape == (0, 4, 13, 3)
        assert state.values.shape == (0, 2, 5, 3)
        before = regard.linear_attention(*draw(), text)[1]
        out, state = regard.linear_attention(*(x[:, :, :0] for x in draw()), text, state=before, form=form)
        assert out.shape == (2, 4, 0, 3)
        assert torch.equal(state.values, before.values)
        assert state.tokens == 13
