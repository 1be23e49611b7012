"""Equation 9 of the local-linear-attention paper against its parts, written out one after the other."""

from typing import Any

import pytest
import torch
from contracts import oracle
from mistakes import error_of, refuses
from packed import runs
from recurrences import ORDERS, close, key_mask, recurrence
from torch import Tensor
from torch.autograd import gradcheck

import regard

F64 = torch.float64
TRENDS: dict[str, tuple[str, dict[str, float]]] = {
    "linear-attention": ("sum", {}),
    "linear-attention(log_decay=-0.3)": ("sum", {"g": -0.3}),
    "mesa": ("mesa", {"ridge": 1.0}),
    "mesa(ridge=0.2,log_decay=-0.3)": ("mesa", {"ridge": 0.2, "g": -0.3}),
    "delta": ("delta", {"beta": 1.0}),
    "delta(beta=0.4)": ("delta", {"beta": 0.4}),
    "gated-delta": ("delta", {"beta": 1.0, "g": -0.01}),
    "gated-delta(beta=0.7,log_decay=-0.2)": ("delta", {"beta": 0.7, "g": -0.2}),
}
"""The rule of `recurrences.recurrence` and its numbers; the steps of the delta rule are beta / |k|^2."""
SPECS = ("softmax", "relumax")


def dense(
    q: Tensor, k: Tensor, v: Tensor, trend: str, spec: str = "softmax", order: str = "causal",
    mask: Tensor | None = None, offset: int = 0,
) -> Tensor:  # fmt: skip
    """o_i = sum_j s_ij (v_j - W_i k_j) + W_i q_i = obar_i + W_i (q_i - kbar_i)."""
    (batch, heads, queries, _), keys = q.shape, k.shape[2]
    how = {"is_causal": order == "causal", "exclude_self": order == "strict", "query_offset": offset}
    seen = oracle.visible(batch, heads, queries, keys, **how)
    seen = seen if mask is None else seen & mask[:, None, None]
    both, _ = oracle.attention(oracle.PRESETS[spec], q, k, torch.cat([v, k], -1), seen)
    mean, centre = both.split([v.shape[3], k.shape[3]], -1)
    rule, numbers = TRENDS[trend]
    given = {name: torch.tensor(number, dtype=F64) for name, number in numbers.items()}
    if rule == "delta":
        given["beta"] = given["beta"] / k.square().sum(-1)
    return mean + recurrence(rule)({"q": q - centre, "k": k, "v": v, **given}, order, mask, offset)[0]


def draw(length: int = 7, heads: int = 4, seed: int = 0) -> list[Tensor]:
    make = torch.Generator().manual_seed(seed)
    sizes = ((heads, 4), (2, 4), (2, 3))
    return [torch.randn(2, h, length, d, generator=make, dtype=F64).requires_grad_() for h, d in sizes]


def agree(out: Tensor, expected: Tensor, inputs: list[Tensor]) -> None:
    """Outputs and gradients."""
    close(out, expected, 1e-11)
    close(*(torch.autograd.grad(x.sin().sum(), inputs) for x in (out, expected)), 1e-10)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("trend", TRENDS)
def test_it_is_equation_9(trend: str, spec: str, order: str) -> None:
    """Outputs and gradients, grouped heads, with and without a mask."""
    for mask in (None, key_mask(7)):
        inputs = draw()
        expected = dense(*inputs, trend, spec, order, mask)
        out = regard.interpolated_attention(*inputs, trend, spec, attn_mask=mask, enable_gqa=True, **ORDERS[order])
        agree(out, expected, inputs)


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("trend", TRENDS)
def test_queries_anywhere_among_the_keys(trend: str, strict: bool) -> None:
    """Decoding: the last query, the last few, before all keys and after them."""
    q, k, v = (x.detach() for x in draw())
    for rows, offset in ((1, None), (3, None), (3, 2), (3, -2), (2, 6), (2, 7), (2, 20)):
        first = 7 - rows if offset is None else offset
        out = regard.interpolated_attention(
            q[:, :, :rows], k, v, trend, query_offset=offset, exclude_self=strict, enable_gqa=True
        )
        order = "strict" if strict else "causal"
        close(out, dense(q[:, :, :rows], k, v, trend, order=order, offset=first), 1e-11)


def test_a_linear_world_is_found() -> None:
    """Where v = W k, the residuals of the best linear model vanish, and q is answered by W q; attention cannot."""
    q, k, _ = (x.detach() for x in draw(12, heads=2))
    truth = torch.randn(4, 3, dtype=F64)
    close(regard.interpolated_attention(q, k, k @ truth, "mesa(ridge=1e-7)")[:, :, 6:], q[:, :, 6:] @ truth, 1e-5)


def test_a_large_ridge_is_attention() -> None:
    inputs = [x.detach() for x in draw(heads=2)]
    z = (inputs[0] @ inputs[1].mT / 2).masked_fill(~torch.ones(7, 7, dtype=torch.bool).tril(), -torch.inf)
    close(regard.interpolated_attention(*inputs, "mesa(ridge=1e12)"), z.softmax(-1) @ inputs[2], 1e-10)


def test_a_function_learns_its_numbers() -> None:
    q, k, v = draw(5, heads=2)
    amount = torch.tensor(0.7, dtype=F64, requires_grad=True)
    beta = torch.full((2, 2, 5), 0.4, dtype=F64, requires_grad=True)

    mesa = lambda number: lambda *x, **how: regard.mesa_attention(*x, ridge=number, **how)[0]  # noqa: E731
    delta = lambda number: lambda *x, **how: regard.delta_rule(*x, number, **how)[0]  # noqa: E731
    assert gradcheck(lambda q, k, v, n: regard.interpolated_attention(q, k, v, mesa(n)), (q, k, v, amount))
    run = lambda q, k, v, n: regard.interpolated_attention(q, k, v, delta(n), exclude_self=True)  # noqa: E731
    assert gradcheck(run, (q, k, v, beta))


def test_low_precision_is_rounded_once() -> None:
    q, k, v = (x.detach().bfloat16() for x in draw(heads=2))
    for trend in ("mesa", "delta", "linear-attention"):
        out = regard.interpolated_attention(q, k, v, trend)
        assert out.dtype == torch.bfloat16
        expected = dense(q.double(), k.double(), v.double(), trend)
        assert ((out.double() - expected).abs() <= 2**-8 * expected.abs() + 1e-4).all()


@pytest.mark.parametrize("trend", ["mesa", "delta", "linear-attention", "gated-delta"])
def test_what_is_hidden_never_matters(trend: str) -> None:
    """Masked places hold NaN; a visible NaN shows in the rows that see it, and in no other."""
    q, k, v = (x.detach() for x in draw())
    mask = key_mask(7)
    expected = dense(q, k, v, trend, mask=mask)
    k[:, :, :, 0] = torch.where(mask[:, None], k[:, :, :, 0], torch.nan)
    v[:, :, :, 1] = torch.where(mask[:, None], v[:, :, :, 1], torch.nan)
    out = regard.interpolated_attention(q, k, v, trend, attn_mask=mask[:, None, None], enable_gqa=True)
    close(out, expected, 1e-11)
    q, k, v = (x.detach() for x in draw())
    clean = regard.interpolated_attention(q, k, v, trend, enable_gqa=True)
    k[0, 0, 4, 1] = torch.nan
    out = regard.interpolated_attention(q, k, v, trend, enable_gqa=True)
    assert out[0, :2, 4:].isnan().all()
    out[0, :2, 4:] = clean[0, :2, 4:]
    assert torch.equal(out, clean)


@pytest.mark.parametrize("size", [1e-12, 1e-20, 1e-30])
def test_a_tiny_key_spoils_no_row(size: float) -> None:
    """In float32 one over the square of 1e-20 is infinite."""
    q, k, v = (x.detach().float() for x in draw())
    k[:, :, 2] *= size
    k.requires_grad_()
    mask = torch.arange(7) != 2
    for shown in (None, mask[None]):
        out = regard.interpolated_attention(q, k, v, "delta", attn_mask=shown, enable_gqa=True)
        assert out.isfinite().all()
    assert torch.autograd.grad(out.sum(), k)[0].isfinite().all()  # the key is masked


@pytest.mark.slow
@pytest.mark.parametrize("trend", ["mesa", "delta", "linear-attention", "gated-delta"])
@pytest.mark.usefixtures("fresh_dynamo")
def test_one_whole_graph(trend: str) -> None:
    run = lambda *x: regard.interpolated_attention(*x, trend)  # noqa: E731
    inputs = [x.detach().float().requires_grad_() for x in draw(heads=2)]
    results = []
    for fn in (run, torch.compile(run, backend="aot_eager", fullgraph=True)):
        out = fn(*inputs)
        results.append((out, *torch.autograd.grad(out.sin().sum(), inputs)))
    torch.testing.assert_close(*reversed(results), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ({"trend": "messa"}, "unknown trend 'messa'. Did you mean 'mesa'?"),
        ({"trend": "gated-delta(log_decay=1)"}, "log_decay is 1, expected log_decay <= 0"),
        ({"spec": "local-linear"}, "local-linear has its own linear model"),
        ({"spec": "linear"}, "linear has weights that do not sum to one"),
        ({"attn_mask": torch.ones(2, 2, 7, 7, dtype=torch.bool)}, "must be the same for all queries and heads"),
        ({"attn_mask": torch.ones(2, 6, dtype=torch.bool)}, "attn_mask has shape [2, 6]"),
        ({"query_offset": 0.5}, "query_offset is 0.5, expected a whole number"),
        ({"trend": lambda *x, **how: x[2], "query_offset": 1}, "a function as trend needs query_offset 0"),
    ],
)
def test_mistakes_are_named(call: dict[str, Any], message: str) -> None:
    assert message in error_of(regard.interpolated_attention, *(x.detach() for x in draw(heads=2)), **call)


def test_forward_mode() -> None:
    q, k, v = (x.detach() for x in draw())
    direction = torch.linspace(-1, 1, q.numel(), dtype=F64).view_as(q)
    run = lambda x: regard.interpolated_attention(x, k, v, enable_gqa=True)  # noqa: E731
    _, tangent = torch.func.jvp(run, (q,), (direction,))
    ends = [dense(q + e * direction, k, v, "mesa") for e in (1e-6, -1e-6)]
    close(tangent, (ends[0] - ends[1]) / 2e-6, 1e-6)


def test_a_row_that_sees_nan_gives_others_no_gradient_of_it() -> None:
    """The pairs before the one that is not finite get the gradients of the rows before it."""
    q, k, v = draw(heads=2)
    wanted = torch.autograd.grad(regard.interpolated_attention(q, k, v)[:, :, :4].sin().sum(), (q, k, v))
    broken = k.detach().clone()
    broken[:, :, 4] = torch.nan
    broken.requires_grad_()
    out = regard.interpolated_attention(q, broken, v)
    assert out[:, :, 4:].isnan().all()
    torch.testing.assert_close(torch.autograd.grad(out[:, :, :4].sin().sum(), (q, broken, v)), wanted)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("trend", TRENDS)
def test_packed_is_every_document_alone(trend: str, order: str) -> None:
    """Weights and model see one document: outputs and gradients against equation 9, document by document."""
    ids = torch.tensor([[1, 1, 1, 0, 0, 0, 0], [4, 4, 5, 5, 5, 5, 4]])
    for mask in (None, key_mask(7)):
        inputs = draw()
        rows: list[list[Tensor]] = [[], []]
        for b, at in runs(ids):
            own = None if mask is None else mask[b : b + 1, at]
            rows[b].append(dense(*(x[b : b + 1, :, at] for x in inputs), trend, order=order, mask=own))
        expected = torch.cat([torch.cat(row, 2) for row in rows])
        how: dict[str, Any] = {"attn_mask": mask, "segment_ids": ids, "enable_gqa": True, **ORDERS[order]}
        agree(regard.interpolated_attention(*inputs, trend, **how), expected, inputs)
        if trend == "mesa":
            model = lambda q, k, v, **more: regard.mesa_attention(q, k, v, ridge=1.0, **more)[0]  # noqa: E731
            close(regard.interpolated_attention(*inputs, model, **how), expected, 1e-11)


def test_packing_needs_a_query_at_every_key() -> None:
    q, k, v = (x.detach() for x in draw())
    how: dict[str, Any] = {"segment_ids": torch.zeros(1, 7, dtype=torch.int64), "enable_gqa": True}
    refuses("takes segments only with a query at every key", regard.interpolated_attention, q[:, :, 5:], k, v, **how)


def test_the_error_of_second_derivatives_names_no_argument_of_another_function() -> None:
    q, k, v = draw()
    out = regard.interpolated_attention(q, k, v, "mesa", "biweight", enable_gqa=True)
    (slope,) = torch.autograd.grad(out.sin().sum(), q, create_graph=True)
    refuses("call regard.attention .* with impl='reference'", torch.autograd.grad, slope.sum(), k)


def test_a_layer_tells_observers_of_the_weights() -> None:
    pytest.importorskip("transformers")
    from regard.models.hybrid.mixers.interpolated import InterpolatedMixer

    layer, x, told = InterpolatedMixer(8, 2, spec="biweight", layer_idx=3), torch.randn(2, 6, 8), []
    expected = layer(x)[0]
    layer.observer = lambda index, diagnostics: told.append((index, diagnostics.support.shape))
    assert torch.equal(layer(x)[0], expected)
    assert told == [(3, (2, 2, 6))]
    refuses("spec linear has weights that do not sum to one", InterpolatedMixer, 8, 2, spec="linear")
