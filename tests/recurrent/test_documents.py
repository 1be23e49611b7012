"""Packed sequences: `segment_ids` of the calls with a state against every document in a call of its own."""

from typing import Any

import pytest
import torch
from mistakes import refuses
from packed import runs
from recurrences import CASES, FORMS, ORDERS, Case, Inputs, fields, grads, loss
from regression import ratio
from torch import Tensor

import regard
from regard.recurrent.packing import Documents

LENGTH = 100
ROWS = [[0] * 17 + [7] + [0] * 12 + [5] * 9 + [4] * 61, [2] * 70 + [3] * 2 + [9] * 20 + [-1] * 8]
"""Ids are names, in no order; 0 comes back and is another document then; the last is padding."""
IDS = torch.tensor(ROWS)
RUNS = [(row, span.start, span.stop) for row, span in runs(IDS)]
"""Row, begin and end of every document."""
NAMES = [
    "linear, given", "elu", "linear*fixed*normalised", "linear*fixed(bias=1)*cosine*unnormalised",
    "linear, decay by head", "linear, decay by token", "linear, decay by feature", "delta", "delta, decay by token",
    "delta, decay by feature", "mesa, ridge by head", "mesa, ridge by token, decay",
]  # fmt: skip


def draw(name: str, dtype: torch.dtype = torch.float64, grad: bool = True) -> Inputs:
    """The inputs of a case, with everything forgotten at one place."""
    x = CASES[name].draw(LENGTH, 3, dtype, grad=False)
    if name.endswith("decay by token"):
        x["g"][0, 1, 40] = -torch.inf
    return {n: t.requires_grad_(grad) for n, t in x.items()}


def key_mask() -> Tensor:
    """Random, with a whole document hidden and another hidden at its beginning."""
    mask = torch.rand(2, LENGTH, generator=torch.Generator().manual_seed(4)) < 0.7
    mask[0, 18:30] = mask[1, :5] = mask[1, 92:] = False
    return mask


def one(x: Inputs, row: int, begin: int, end: int) -> Inputs:
    """The inputs of one document."""
    return {name: t if t.dim() < 3 else t[row : row + 1, :, begin:end] for name, t in x.items()}


def alone(case: Case, x: Inputs, mask: Tensor | None, states: Any = None, **how: Any) -> tuple[Tensor, list[Tensor]]:
    """Every document in a call of its own: (the rows [B, H, T, Dv], what the states hold, joined)."""
    rows: list[list[Tensor]] = [[], []]
    after = []
    for n, (row, begin, end) in enumerate(RUNS):
        own = None if mask is None else mask[row : row + 1, begin:end]
        state = None if states is None else states.select(torch.tensor([n]))
        out, state, *_ = case.run(one(x, row, begin, end), attn_mask=own, state=state, **how)
        rows[row].append(out)
        after.append(fields(state))
    return torch.cat([torch.cat(row, 2) for row in rows]), [torch.cat(same) for same in zip(*after, strict=True)]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", NAMES)
def test_packed_is_every_document_alone(name: str, form: str, order: str) -> None:
    """Outputs, states and every gradient, with a mask: float64 to 1e-10, float32 to 1e-5."""
    how = {**ORDERS[order], "form": form, "chunk_size": 8 if form == "chunked" else None}
    case, mask = CASES[name], key_mask()
    for dtype, tolerance in ((torch.float64, 1e-10), (torch.float32, 1e-5)):
        x = draw(name, dtype)
        expected, wanted = alone(case, x, mask, **how)
        out, state = case.run(x, attn_mask=mask, segment_ids=IDS, **how)
        assert ratio(out, expected) <= tolerance
        for got, want in zip(fields(state), wanted, strict=True):
            assert got.shape[0] == len(RUNS)
            assert ratio(got, want) <= tolerance
        assert state.tokens == max(end - begin for _, begin, end in RUNS)
        for label, got, want in zip(x, grads(out, fields(state), x), grads(expected, wanted, x), strict=True):
            assert ratio(got, want) <= 10 * tolerance, label


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", NAMES)
def test_going_on_from_states_of_documents(name: str, form: str) -> None:
    """Documents that began in an earlier packed call go on in this one; gradients reach the states that came in."""
    case, x = CASES[name], draw(name)
    before = case.run(x, segment_ids=IDS, form=form)[1].detach().map(
        lambda t: t.requires_grad_() if t.is_floating_point() else t
    )  # fmt: skip
    expected, wanted = alone(case, x, None, before, form=form)
    out, state = case.run(x, segment_ids=IDS, state=before, form=form)
    assert ratio(out, expected) <= 1e-10
    for got, want in zip(fields(state), wanted, strict=True):
        assert ratio(got, want) <= 1e-10
    assert state.tokens == 2 * 70
    found = torch.autograd.grad(loss(out, fields(state)), fields(before))
    for got, want in zip(found, torch.autograd.grad(loss(expected, wanted), fields(before)), strict=True):
        assert ratio(got, want) <= 1e-10


@pytest.mark.parametrize("name", NAMES)
def test_decoding_goes_on_from_a_packed_prefill(name: str) -> None:
    """The state of a packed prefill is the state of a batch with a document in each row: single steps go on from it."""
    case, x = CASES[name], draw(name)
    state = case.run(x, segment_ids=IDS)[1]
    new = {n: t if t.dim() < 3 else t[:1, :, :1].expand(9, *t.shape[1:2], 1, *t.shape[3:]) for n, t in x.items()}
    out = case.run(new, state=state)[0]
    for n, (row, begin, end) in enumerate(RUNS):
        own = one(x, row, begin, end)
        longer = {m: t if t.dim() < 3 else torch.cat([t, new[m][n : n + 1]], 2) for m, t in own.items()}
        assert ratio(out[n : n + 1], case.run(longer)[0][:, :, -1:]) <= 1e-9


@pytest.mark.parametrize("name", NAMES)
def test_another_document_changes_no_bit(name: str) -> None:
    """Whatever one document holds, NaN included, no bit of another's rows, state or gradients changes."""
    case, x = CASES[name], draw(name, torch.float32, grad=False)
    seen = []
    for bad in (0.5, torch.nan, torch.inf, 1e30):
        y = {n: t.clone() for n, t in x.items()}
        for n in "qkv":
            y[n][0, :, 18:30] = bad
        v = y["v"].requires_grad_()
        out, state = case.run(y, segment_ids=IDS)
        assert bool(out[0, :, 18:30].isnan().any()) == (bad != 0.5)
        out = torch.cat([out[0, :, :18], out[0, :, 30:], out[1]], 1)
        grad = torch.autograd.grad(out.square().sum(), v)[0]
        assert not grad[0, :, 18:30].any()
        seen.append([out, grad[1], *(torch.cat([t[:2], t[3:]]) for t in state._tensors().values())])
    for other in seen[1:]:
        assert all(torch.equal(a, b) for a, b in zip(seen[0], other, strict=True))


@pytest.mark.parametrize("name", ["elu", "delta, decay by token", "mesa, ridge by head"])
def test_ids_of_one_row_and_of_none(name: str) -> None:
    """Ids [1, T] serve every row; where every row is one document nothing changes; no tokens are no documents."""
    case, x = CASES[name], draw(name)
    shared, state = case.run(x, segment_ids=IDS[:1])
    assert torch.equal(shared, case.run(x, segment_ids=IDS[:1].expand(2, -1))[0])
    assert fields(state)[0].shape[0] == 10
    whole, state = case.run(x, segment_ids=torch.zeros(1, LENGTH, dtype=torch.int8))
    assert torch.equal(whole, case.run(x)[0])
    assert fields(state)[0].shape[0] == 2
    for part, size in (((slice(None), slice(None), slice(0)), (2, 4, 0, 3)), ((slice(0),), (0, 4, LENGTH, 3))):
        nothing = {n: t if t.dim() < 3 else t[part] for n, t in x.items()}
        out, state = case.run(nothing, segment_ids=IDS[part[0], part[-1]] if len(part) > 1 else IDS[:0])
        assert out.shape == size
        assert fields(state)[0].shape[0] == 0


@pytest.mark.parametrize("solver", ["cholesky", "cg"])
def test_diagnostics_of_mesa(solver: str) -> None:
    """Statistics stand at the places of their queries."""
    name = "mesa, ridge by head"
    x, how = draw(name), {"solver": solver, "return_diagnostics": True}
    out, _, found = CASES[name].run(x, segment_ids=IDS, **how)
    for row, begin, end in RUNS:
        own, _, wanted = CASES[name].run(one(x, row, begin, end), **how)
        assert ratio(out[row : row + 1, :, begin:end], own) <= 1e-9
        assert torch.equal(found["status"][row : row + 1, :, begin:end], wanted["status"])
    assert (found["residual"] <= 1e-12).all()
    assert (found["iterations"] > 0).any() == (solver == "cg")


def test_derivatives_of_any_kind() -> None:
    """Second derivatives and forward mode pass through the packing."""
    ids = IDS[:1, 14:20]
    tensors = [t.detach()[:1, :, 14:20].requires_grad_() for t in list(draw("delta").values())[:3]]
    run = lambda *x: regard.delta_rule(*x, 0.5, segment_ids=ids)[0]  # noqa: E731
    assert torch.autograd.gradgradcheck(run, tensors)
    assert torch.autograd.gradcheck(run, tensors, check_forward_ad=True)


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


@pytest.mark.parametrize("name", ["linear, given", "delta", "mesa, ridge by head"])
def test_ids_that_do_not_fit_are_refused(name: str) -> None:
    """The error names the call and segment_ids."""
    case, x = CASES[name], draw(name)
    bad: list[Any] = [
        IDS.float(), IDS > 0, IDS.to(torch.complex64), IDS[0], IDS[:, 1:], IDS.expand(1, 2, LENGTH),
        IDS[:1].expand(3, -1), IDS.tolist(), "packed", 3, True, IDS.to("meta"),
    ]  # fmt: skip
    for ids in bad:
        refuses(r"^\w+: segment_ids", case.run, x, segment_ids=ids)
    few = {n: t[:, :, :50] if n in ("q", "scale", "bias") else t for n, t in x.items()}
    refuses("segment_ids", case.run, few, segment_ids=IDS, is_causal=False)
    refuses("state", case.run, x, segment_ids=IDS, state=case.run(x)[1])


def test_attention_on_meta_tensors_reads_no_ids() -> None:
    q, k, v = torch.empty(3, 1, 1, 8, 4, device="meta")
    ids = torch.empty(1, 8, dtype=torch.long, device="meta")
    refuses("reads the segment ids on the host", regard.attention, q, k, v, "elu", segment_ids=ids, impl="linear")


@pytest.mark.slow
def test_compiled_is_eager() -> None:
    """A packed call inside a compiled function, for one packing after another."""
    q, k, v, _ = draw("delta").values()
    run = torch.compile(lambda q, ids: regard.delta_rule(2 * q, k, v, 0.5, segment_ids=ids)[0].sin())
    for first in (3, 50, 98):
        ids = (torch.arange(LENGTH) >= first).long()[None]
        assert ratio(run(q, ids), regard.delta_rule(2 * q, k, v, 0.5, segment_ids=ids)[0].sin()) <= 1e-12
