"""Packed sequences: `segment_ids` of the calls with a state against every document in a call of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from regression import ratio
from torch import Tensor
from torch.nn.functional import normalize

import regard
from regard.checks import ArgumentError
from regard.recurrent.packing import Documents

LENGTH = 100
ROWS = [[0] * 17 + [7] + [0] * 12 + [5] * 9 + [4] * 61, [2] * 70 + [3] * 2 + [9] * 20 + [-1] * 8]
"""Ids are names, in no order; 0 comes back and is another document then; the last is padding."""
IDS = torch.tensor(ROWS)
RUNS = [
    (0, 0, 17),
    (0, 17, 18),
    (0, 18, 30),
    (0, 30, 39),
    (0, 39, 100),
    (1, 0, 70),
    (1, 70, 72),
    (1, 72, 92),
    (1, 92, 100),
]
"""Row, begin and end of every document."""
ORDERS: dict[str, dict[str, bool]] = {"causal": {}, "strict": {"exclude_self": True}, "all": {"is_causal": False}}
FORMS = ("chunked", "parallel", "recurrent")

Inputs = dict[str, Tensor]
Call = Callable[..., Any]


def linear(spec: str) -> Call:
    scaled = lambda x: x["scale"] if spec == "linear" else None  # noqa: E731
    return lambda x, **how: regard.linear_attention(x["q"], x["k"], x["v"], spec, scale=scaled(x), **how)


def decayed(name: str) -> Call:
    return lambda x, **how: regard.linear_attention(x["q"], x["k"], x["v"], "linear", log_decay=x[name], **how)


def delta(name: str | None) -> Call:
    fade = lambda x: None if name is None else x[name]  # noqa: E731
    return lambda x, **how: regard.delta_rule(x["q"], x["k"], x["v"], x["beta"], log_decay=fade(x), **how)


def mesa(name: str | None, ridge: str = "ridge", **more: Any) -> Call:
    numbers = lambda x: {"ridge": x[ridge], "log_decay": None if name is None else x[name]}  # noqa: E731
    return lambda x, **how: regard.mesa_attention(x["q"], x["k"], x["v"], beta=x["beta"], **numbers(x), **more, **how)


CALLS: dict[str, Call] = {
    "linear": linear("linear"),
    "elu": linear("elu"),
    "signed": linear("linear*fixed*normalised"),
    "bias": linear("linear*fixed(bias=2)*cosine*unnormalised"),
    "retnet": decayed("head"),
    "mamba2": decayed("token"),
    "gla": decayed("channel"),
    "delta": delta(None),
    "gated-delta": delta("token"),
    "kda": delta("channel"),
    "mesa": mesa(None),
    "mesa-decay": mesa("token", "ridges"),
}
TENSORS = dict.fromkeys(CALLS, ("q", "k", "v")) | {
    "linear": ("q", "k", "v", "scale"),
    "retnet": ("q", "k", "v", "head"),
    "mamba2": ("q", "k", "v", "token"),
    "gla": ("q", "k", "v", "channel"),
    "delta": ("q", "k", "v", "beta"),
    "gated-delta": ("q", "k", "v", "beta", "token"),
    "kda": ("q", "k", "v", "beta", "channel"),
    "mesa": ("q", "k", "v", "beta", "ridge"),
    "mesa-decay": ("q", "k", "v", "beta", "ridges", "token"),
}
"""The inputs whose gradients are compared."""


def draw(dtype: torch.dtype = torch.float64) -> Inputs:
    make = torch.Generator().manual_seed(3)
    rand = lambda *sizes: torch.rand(*sizes, generator=make, dtype=torch.float64)  # noqa: E731
    randn = lambda *sizes: torch.randn(*sizes, generator=make, dtype=torch.float64)  # noqa: E731
    found = {
        "q": randn(2, 4, LENGTH, 5), "k": normalize(randn(2, 2, LENGTH, 5), dim=-1), "v": randn(2, 2, LENGTH, 3),
        "scale": 0.5 + rand(2, 4, LENGTH), "beta": rand(2, 2, LENGTH), "head": -rand(2),
        "token": -rand(2, 2, LENGTH), "channel": -rand(2, 2, LENGTH, 5), "ridge": 0.5 + rand(4),
        "ridges": 0.5 + rand(2, 4, LENGTH),
    }  # fmt: skip
    found["token"][0, 1, 40] = -torch.inf
    return {name: x.to(dtype).requires_grad_() for name, x in found.items()}


def key_mask() -> Tensor:
    """Random, with a whole document hidden and another hidden at its beginning."""
    mask = torch.rand(2, LENGTH, generator=torch.Generator().manual_seed(4)) < 0.7
    mask[0, 18:30] = mask[1, :5] = mask[1, 92:] = False
    return mask


def one(x: Inputs, row: int, begin: int, end: int) -> Inputs:
    """The inputs of one document."""
    return {name: t if t.dim() == 1 else t[row : row + 1, :, begin:end] for name, t in x.items()}


def alone(call: Call, x: Inputs, mask: Tensor | None, states: Any = None, **how: Any) -> tuple[Tensor, list[Any]]:
    """Every document in a call of its own: (the rows [B, H, T, Dv], the states)."""
    rows: list[list[Tensor]] = [[], []]
    after = []
    for n, (row, begin, end) in enumerate(RUNS):
        own = None if mask is None else mask[row : row + 1, begin:end]
        state = None if states is None else states.select(torch.tensor([n]))
        out, state, *_ = call(one(x, row, begin, end), attn_mask=own, state=state, **how)
        rows[row].append(out)
        after.append(state)
    return torch.cat([torch.cat(row, 2) for row in rows]), after


def loss(out: Tensor, fields: list[Tensor]) -> Tensor:
    """A number that depends on every entry of the output and of the states in a way of its own."""
    weigh = lambda t: (t * torch.arange(1.0, t.numel() + 1, dtype=t.dtype).view(t.shape).cos()).sum()  # noqa: E731
    return weigh(out) + sum(0.1 * weigh(t) for t in fields)


def fields(state: Any) -> list[Tensor]:
    """What a state holds that has derivatives."""
    return [t for t in state._tensors().values() if t.is_floating_point()]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", CALLS)
def test_packed_is_every_document_alone(name: str, form: str, order: str) -> None:
    """Outputs, states and every gradient, with a mask: float64 to 1e-10, float32 to 1e-5."""
    how = {**ORDERS[order], "form": form, "chunk_size": 8 if form == "chunked" else None}
    call, mask = CALLS[name], key_mask()
    for dtype, tolerance in ((torch.float64, 1e-10), (torch.float32, 1e-5)):
        x = draw(dtype)
        leaves = [x[n] for n in TENSORS[name]]
        expected, states = alone(call, x, mask, **how)
        wanted = [torch.cat(same) for same in zip(*map(fields, states), strict=True)]
        out, state = call(x, attn_mask=mask, segment_ids=IDS, **how)
        assert ratio(out, expected) <= tolerance
        for got, want in zip(fields(state), wanted, strict=True):
            assert got.shape[0] == len(RUNS)
            assert ratio(got, want) <= tolerance
        assert state.tokens == max(end - begin for _, begin, end in RUNS)
        grads = torch.autograd.grad(loss(out, fields(state)), leaves)
        targets = torch.autograd.grad(loss(expected, wanted), leaves)
        for label, got, want in zip(TENSORS[name], grads, targets, strict=True):
            assert ratio(got, want) <= 10 * tolerance, label


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", CALLS)
def test_going_on_from_states_of_documents(name: str, form: str) -> None:
    """Documents that began in an earlier packed call go on in this one; gradients reach the states that came in."""
    call, x = CALLS[name], draw()
    before = call(x, segment_ids=IDS, form=form)[1].detach().map(
        lambda t: t.requires_grad_() if t.is_floating_point() else t
    )  # fmt: skip
    expected, states = alone(call, x, None, before, form=form)
    out, state = call(x, segment_ids=IDS, state=before, form=form)
    wanted = [torch.cat(same) for same in zip(*map(fields, states), strict=True)]
    assert ratio(out, expected) <= 1e-10
    for got, want in zip(fields(state), wanted, strict=True):
        assert ratio(got, want) <= 1e-10
    assert state.tokens == 2 * 70
    grads = torch.autograd.grad(loss(out, fields(state)), fields(before))
    for got, want in zip(grads, torch.autograd.grad(loss(expected, wanted), fields(before)), strict=True):
        assert ratio(got, want) <= 1e-10


@pytest.mark.parametrize("name", CALLS)
def test_decoding_goes_on_from_a_packed_prefill(name: str) -> None:
    """The state of a packed prefill is the state of a batch with a document in each row: single steps go on from it."""
    call, x = CALLS[name], draw()
    state = call(x, segment_ids=IDS)[1]
    new = {n: t if t.dim() == 1 else t[:1, :, :1].expand(9, *t.shape[1:2], 1, *t.shape[3:]) for n, t in x.items()}
    out = call(new, state=state)[0]
    for n, (row, begin, end) in enumerate(RUNS):
        own = one(x, row, begin, end)
        longer = {m: t if t.dim() == 1 else torch.cat([t, new[m][n : n + 1]], 2) for m, t in own.items()}
        assert ratio(out[n : n + 1], call(longer)[0][:, :, -1:]) <= 1e-9


@pytest.mark.parametrize("name", CALLS)
def test_another_document_changes_no_bit(name: str) -> None:
    """Whatever one document holds, NaN included, no bit of another's rows, state or gradients changes."""
    call, x = CALLS[name], {n: t.detach() for n, t in draw(torch.float32).items()}
    seen = []
    for bad in (0.5, torch.nan, torch.inf, 1e30):
        y = {n: t.clone() for n, t in x.items()}
        for n in ("q", "k", "v"):
            y[n][0, :, 18:30] = bad
        v = y["v"].requires_grad_()
        out, state = call(y, segment_ids=IDS)
        assert bool(out[0, :, 18:30].isnan().any()) == (bad != 0.5)
        out = torch.cat([out[0, :, :18], out[0, :, 30:], out[1]], 1)
        grad = torch.autograd.grad(out.square().sum(), v)[0]
        assert not grad[0, :, 18:30].any()
        seen.append([out, grad[1], *(torch.cat([t[:2], t[3:]]) for t in state._tensors().values())])
    for other in seen[1:]:
        for a, b in zip(seen[0], other, strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("name", ["elu", "gated-delta", "mesa"])
def test_ids_of_one_row_and_of_none(name: str) -> None:
    """Ids [1, T] serve every row; where every row is one document nothing changes; no tokens are no documents."""
    call, x = CALLS[name], draw()
    shared, state = call(x, segment_ids=IDS[:1])
    assert torch.equal(shared, call(x, segment_ids=IDS[:1].expand(2, -1))[0])
    assert fields(state)[0].shape[0] == 10
    whole, state = call(x, segment_ids=torch.zeros(1, LENGTH, dtype=torch.int8))
    assert torch.equal(whole, call(x)[0])
    assert fields(state)[0].shape[0] == 2
    nothing = {n: t if t.dim() == 1 else t[:, :, :0] for n, t in x.items()}
    out, state = call(nothing, segment_ids=IDS[:, :0])
    assert out.shape == (2, 4, 0, 3)
    assert fields(state)[0].shape[0] == 0
    batchless = {n: t if t.dim() == 1 else t[:0] for n, t in x.items()}
    out, state = call(batchless, segment_ids=IDS[:0])
    assert out.shape == (0, 4, LENGTH, 3)
    assert fields(state)[0].shape[0] == 0


@pytest.mark.parametrize("solver", ["cholesky", "cg"])
def test_diagnostics_of_mesa(solver: str) -> None:
    """Statistics stand at the places of their queries."""
    call, x = mesa(None, solver=solver, return_diagnostics=True), draw()
    out, _, found = call(x, segment_ids=IDS)
    for row, begin, end in RUNS:
        own, _, wanted = call(one(x, row, begin, end))
        assert ratio(out[row : row + 1, :, begin:end], own) <= 1e-9
        assert torch.equal(found["status"][row : row + 1, :, begin:end], wanted["status"])
        assert (found["residual"] <= 1e-12).all()
        assert (found["iterations"] > 0).any() == (solver == "cg")


def test_derivatives_of_any_kind() -> None:
    """Second derivatives and forward mode pass through the packing."""
    ids = IDS[:1, 14:20]
    q, k, v = (t.detach()[:1, :, 14:20].requires_grad_() for t in (draw()["q"], draw()["k"], draw()["v"]))
    run = lambda *x: regard.delta_rule(*x, 0.5, segment_ids=ids)[0]  # noqa: E731
    assert torch.autograd.gradgradcheck(run, (q, k, v))
    assert torch.autograd.gradcheck(run, (q, k, v), check_forward_ad=True)


def test_documents_cost_their_own_length() -> None:
    """At most a third of the positions is added, and batches are few, whatever the lengths."""
    make = torch.Generator().manual_seed(0)
    for lengths in ([1] * 500, [3000] + [2] * 400, torch.randint(1, 900, (60,), generator=make).tolist(), [7] * 30):
        ids = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))[None]
        packed = Documents(ids)
        assert packed.count == len(lengths)
        assert sum(b.real.numel() for b in packed._buckets) <= 4 / 3 * ids.numel()
        assert sum(int(b.real.sum()) for b in packed._buckets) == ids.numel()
        assert len(packed._buckets) <= 30
    assert len(Documents(torch.arange(500)[None])._buckets) == 1


@pytest.mark.parametrize("name", ["linear", "delta", "mesa"])
def test_ids_that_do_not_fit_are_refused(name: str) -> None:
    """The error names the call and segment_ids."""
    call, x = CALLS[name], draw()
    bad: list[Any] = [
        IDS.float(), IDS > 0, IDS.to(torch.complex64), IDS[0], IDS[:, 1:], IDS.expand(1, 2, LENGTH),
        IDS[:1].expand(3, -1), IDS.tolist(), "packed", 3, True, IDS.to("meta"),
    ]  # fmt: skip
    for ids in bad:
        with pytest.raises(ArgumentError, match=r"^\w+: segment_ids"):
            call(x, segment_ids=ids)
    with pytest.raises(ArgumentError, match="segment_ids"):
        call({**x, "q": x["q"][:, :, :50], "scale": x["scale"][:, :, :50]}, segment_ids=IDS, is_causal=False)
    with pytest.raises(ArgumentError, match="state"):
        call(x, segment_ids=IDS, state=call(x)[1])


@pytest.mark.slow
def test_compiled_is_eager() -> None:
    """A packed call inside a compiled function, for one packing after another."""
    x = draw()
    run = torch.compile(lambda q, ids: regard.delta_rule(2 * q, x["k"], x["v"], 0.5, segment_ids=ids)[0].sin())
    for first in (3, 50, 98):
        ids = (torch.arange(LENGTH) >= first).long()[None]
        expected = regard.delta_rule(2 * x["q"], x["k"], x["v"], 0.5, segment_ids=ids)[0].sin()
        assert ratio(run(x["q"], ids), expected) <= 1e-12
