"""What every state of fixed size can do: beam search, batching, saving, resetting, reading, in memory linear in the
length; and wrong arguments of the calls with a state."""

from typing import Any

import pytest
import torch
from mistakes import error_of, refuses
from peak import on_linux, peak
from recurrences import CASES, FORMS, Case, Inputs, close, cut, fields, key_mask
from torch import Tensor

import regard
from regard import DeltaState, LinearState, MesaState
from regard.recurrent.leaky import LeakyState

F64 = torch.float64
SIGNED = "linear*fixed*normalised"
STATES: dict[str, tuple[Case, Any, int]] = {
    "shift-cosine": (CASES["shift-cosine"], LinearState.empty("shift-cosine", 2, 2, 4, 3, dtype=F64), 5 * 3 + 5),
    SIGNED: (CASES[SIGNED], LinearState.empty(SIGNED, 2, 2, 4, 3, dtype=F64), 5 * 3 + 5 + 25),
    "delta": (CASES["delta, decay by token"], DeltaState.empty(2, 2, 4, 3, dtype=F64), 12),
    "mesa": (CASES["mesa, ridge by token, decay"], MesaState.empty(2, 2, 4, 3, dtype=F64), 12 + 16),
    "leaky": (CASES["leaky"], LeakyState.empty(2, 2, 3, dtype=F64), 3),
}
"""A call, its state before the first token, and how many numbers a head has."""


def same(one: Any, two: Any) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one._tensors().values(), two._tensors().values(), strict=True))


@pytest.mark.parametrize("name", STATES)
def test_empty_and_reset_are_the_beginning(name: str) -> None:
    case, empty, _ = STATES[name]
    x = case.draw(grad=False)
    out, state = case.run(x)
    for start in (empty, state.reset()):
        assert start.tokens == 0
        assert not any(t.any() for t in start._tensors().values())
        assert torch.equal(case.run(x, state=start)[0], out)
    assert state.tokens == 9
    assert any(t.any() for t in fields(state))


def test_empty_states_are_float32_at_least() -> None:
    assert LinearState.empty("elu", 1, 1, 4, dtype=torch.bfloat16).values.dtype == torch.float32
    assert LinearState.empty("linear*fixed*euclidean", 1, 1, 4, 2).values.shape == (1, 1, 7, 2)


@pytest.mark.parametrize("name", STATES)
def test_sequences_are_selected_and_repeated(name: str) -> None:
    """What comes next depends on the sequences chosen alone."""
    case = STATES[name][0]
    state, new = case.run(case.draw(grad=False))[1], case.draw(1, 5, grad=False)
    expected, _ = case.run(new, state=state)
    for order, chosen in (
        (torch.tensor([1, 0, 1]), state.select(torch.tensor([1, 0, 1]))),
        (torch.tensor([1]), state.select(torch.tensor([False, True]))),
        (torch.tensor([0, 0, 1, 1]), state.repeat(2)),
    ):
        assert chosen.tokens == 9
        some = {n: t[order] if t.dim() > 2 else t for n, t in new.items()}
        assert torch.equal(case.run(some, state=chosen)[0], expected[order])


@pytest.mark.parametrize("name", STATES)
def test_a_state_is_cloned_detached_saved_and_never_changed(name: str) -> None:
    case, _, numbers = STATES[name]
    x = case.draw()
    before, state = {n: t.clone() for n, t in x.items()}, case.run(x)[1]
    copy = state.clone()
    assert same(copy, state)
    assert fields(copy)[0].requires_grad
    assert fields(copy)[0].data_ptr() != fields(state)[0].data_ptr()
    assert not any(t.requires_grad for t in state.detach()._tensors().values())
    assert not case.run(case.draw(1, grad=False), state=state.detach())[0].requires_grad
    for way in case.few:
        case.run(x, state=state, **way)
        case.run(cut(x, 0, 1), state=state, **way)
    assert same(copy, state)
    assert all(torch.equal(t, before[n]) for n, t in x.items())
    saved = state.to_tensors()
    assert all(t.is_contiguous() for t in saved.values())
    again = type(state).from_tensors(saved)
    assert again.tokens == 9
    assert same(again, state)
    only = {"non_finite": saved["non_finite"]}
    refuses(rf"{type(state).__name__}\.from_tensors: got non_finite", type(state).from_tensors, only)
    assert state.bytes == case.run(case.draw(200))[1].bytes == 2 * 2 * (8 * numbers + 1)


@pytest.mark.parametrize("name", STATES)
def test_a_state_is_no_view_of_what_the_call_made(name: str) -> None:
    case = STATES[name][0]
    for way in case.few:
        state = case.run(case.draw(200, grad=False), **way)[1]
        parts = [t.untyped_storage() for t in state._tensors().values()]
        assert sum({part.data_ptr(): part.nbytes() for part in parts}.values()) <= 1.01 * state.bytes


@pytest.mark.parametrize("name", STATES)
def test_a_sum_cannot_forget(name: str) -> None:
    state = STATES[name][0].run(STATES[name][0].draw())[1]
    assert state.crop(9) is state.crop(12) is state
    for n in (8, 0, -1):
        refuses(rf"State\.crop: cannot go back from 9 tokens to {n % 9}.*cannot forget", state.crop, n)


@pytest.mark.parametrize("name", STATES)
def test_a_non_finite_token_marks_its_sequence_alone(name: str) -> None:
    case = STATES[name][0]
    x = case.draw(grad=False)
    x["v"][1, 0, 3, 2] = torch.nan
    state = case.run(x)[1]
    assert state.non_finite.tolist() == [[False, False], [True, False]]
    assert all(t.isfinite().all() for t in fields(state))
    found, _ = case.run(case.draw(1, grad=False), state=state.select(torch.tensor([1, 0])))
    assert found.isnan().flatten(1).any(1).tolist() == [True, False]
    assert not state.reset().non_finite.any()


def part(x: Inputs, names: str, length: int) -> Inputs:
    """The first positions of some of the inputs."""
    return {n: cut({n: t}, 0, length)[n] if n in names.split() else t for n, t in x.items()}


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if "all" in case.orders])
def test_a_state_is_written_without_queries_and_read_without_keys(name: str) -> None:
    """What other queries read is what they would be given after all pairs."""
    case, mask = CASES[name], key_mask()
    x = {**case.draw(grad=False), "q": case.draw(seed=3, grad=False)["q"]}
    expected, _ = case.define(x, "all", mask)
    out, state = case.run(part(x, "q scale bias ridge", 0), is_causal=False, attn_mask=mask)
    assert out.shape == (2, 4, 0, 3)
    for form in FORMS:
        out, after = case.run(part(x, "k v g beta", 0), state=state, is_causal=False, form=form)
        close(out, expected, 1e-12 * case.loose, form)
        assert after.tokens == 9
        assert same(after, state)
    if name.startswith("mesa"):
        more: dict[str, Any] = {"ridge": x["ridge"]}
    else:
        given: dict[str, Tensor] = {"bias": x["bias"]} if "bias" in x else {}
        more = {"scale": x.get("scale")} | ({} if "delta" in name else {"spec": name.split(",")[0], "params": given})
    close(state.read(x["q"], **more), expected, 1e-12 * case.loose)


CALLS: dict[str, Any] = {
    "linear": lambda q, k, v, **how: regard.linear_attention(q, k, v, how.pop("spec", "elu"), **how),
    "delta": lambda q, k, v, **how: regard.delta_rule(q, k, v, how.pop("beta", 1.0), **how),
    "mesa": lambda q, k, v, **how: regard.mesa_attention(q, k, v, **{"ridge": 1.0, **how}),
}
EVERY: list[tuple[dict[str, Any], str]] = [
    ({"form": "chunks"}, "unknown form='chunks'. Did you mean 'chunked'"),
    ({"is_causal": 1}, "is_causal is 1, expected True or False"),
    ({"exclude_self": 1}, "exclude_self is 1, expected True or False"),
    ({"chunk_size": 0}, "chunk_size is 0, expected a whole number >= 1"),
    ({"attn_mask": torch.ones(2, 9)}, "expected torch.bool"),
    ({"attn_mask": torch.ones(2, 4, 9, 9, dtype=torch.bool)}, "must be the same for all queries and heads"),
    ({"scale": 0.0}, "scale is 0, expected scale > 0"),
    ({"log_decay": 0.5}, "log_decay is 0.5, expected log_decay <= 0"),
    ({"log_decay": torch.zeros(4)}, "log_decay has shape [4], which does not broadcast to [2]"),
    ({"log_decay": torch.zeros(2, 9)}, "expected [2] (per key head)"),
    ({"log_decay": "fast"}, "log_decay is 'fast' (str), expected a number or tensor"),
    ({"state": 3}, "state is 3 (int), expected None or the "),
]
OWN: list[tuple[str, dict[str, Any], str]] = [
    ("linear", {"spec": "softmax"}, "softmax has no finite features"),
    ("linear", {"spec": "biweight"}, "those that have: linear, cosine, shift-cosine, relu, relu2, elu"),
    ("linear", {"spec": "local-linear"}, "no finite features"),
    ("linear", {"scale": 2.0}, "takes no scale"),
    ("linear", {"params": {"margin": 1.0}}, "unknown parameter 'margin'"),
    ("linear", {"spec": "linear*fixed*normalised", "log_decay": -1.0}, "divides signed weights by their sum"),
    ("linear", {"spec": "linear*fixed(bias=1)", "log_decay": torch.zeros(2, 2, 9, 4)}, "which belongs to no feature"),
    ("linear", {"log_decay": torch.zeros(2, 9)}, "[2, 2, 9] (per token) or [2, 2, 9, 4] (per feature)"),
    ("linear", {"state": LinearState.empty("linear*fixed*normalised", 2, 2, 4, 3, dtype=F64)}, "its own state"),
    ("linear", {"state": LinearState.empty("elu", 2, 1, 4, 3, dtype=F64)}, "give each layer its own state"),
    ("delta", {"beta": -0.5}, "beta is -0.5, expected beta >= 0"),
    ("delta", {"beta": torch.ones(2, 4, 9)}, "beta has shape [2, 4, 9], which does not broadcast to [2, 2, 9]"),
    ("delta", {"state": DeltaState.empty(2, 1, 4, 3, dtype=F64)}, "give each layer its own state"),
    ("mesa", {"ridge": 0.0}, "ridge is 0, expected ridge > 0"),
    ("mesa", {"ridge": -1}, "ridge is -1, expected ridge > 0"),
    ("mesa", {"ridge": torch.ones(3)}, "ridge has shape [3], which does not broadcast to [4]"),
    ("mesa", {"ridge": torch.ones(1, 1, 1, 1, 1)}, "[4] (per head), [4, 4] (and dimension), [2, 4, 9] (per token)"),
    ("mesa", {"solver": "cgg"}, "unknown solver='cgg'. Did you mean 'cg'?"),
    ("mesa", {"solver": "cg", "form": "parallel"}, "form='parallel' solves directly; solver='cg' is for"),
    ("mesa", {"max_iter": 0}, "max_iter is 0, expected a whole number >= 1"),
    ("mesa", {"tol": 0.0}, "tol is 0, expected tol > 0"),
    ("mesa", {"log_decay": torch.zeros(2, 2, 9, 4)}, "expected [2] (per key head) or [2, 2, 9] (per token)."),
    ("mesa", {"beta": -1.0}, "beta is -1, expected beta >= 0"),
    ("mesa", {"state": MesaState.empty(2, 1, 4, 3, dtype=F64)}, "give each layer its own state"),
    ("mesa", {"state": MesaState.empty(2, 2, 4, 3)}, "convert it with state.map"),
]


@pytest.mark.parametrize(("name", "how", "message"), [*((name, *case) for name in CALLS for case in EVERY), *OWN])
def test_mistakes_are_named(name: str, how: dict[str, Any], message: str) -> None:
    assert message in error_of(CALLS[name], *CASES["elu"].draw(grad=False).values(), **how)


@pytest.mark.parametrize("name", CALLS)
def test_tensors_that_do_not_fit_each_other(name: str) -> None:
    q, k, v = CASES["elu"].draw(grad=False).values()
    for tensors, message in (
        ((q[:, :, :5], k, v), "causal order needs a key for every query"),
        ((q[:, :3], k, v), "must be a multiple"),
        ((q, k, v[:, :, :5]), "key and value differ in heads or length"),
        ((q, k, v.float()), r"value is torch\.float32 on cpu"),
    ):
        refuses(message, CALLS[name], *tensors)


MEASURED = {
    "linear": "regard.linear_attention(q, k, v, 'shift-cosine')[0]",
    "decay": "regard.linear_attention(q, k, v, 'linear', log_decay=-0.01)[0]",
    "delta": "regard.delta_rule(q, k / 8, v, 1.0)[0]",
    "mesa": "regard.mesa_attention(q, k, v, ridge=1.0)[0]",
    "fading mesa": "regard.mesa_attention(q, k, v, ridge=1.0, log_decay=-0.01)[0]",
    "leaky": "leaky_average(q + k + v, 0.1)[0]",
    "packed leaky": "leaky_average(q + k + v, 0.1, segment_ids=torch.arange(q.shape[2])[None] // 100)[0]",
}


@pytest.mark.slow
@on_linux
@pytest.mark.parametrize(("which", "long"), [(name, 65536 if name == "linear" else 16384) for name in MEASURED])
def test_memory_grows_with_the_length_and_no_faster(which: str, long: int) -> None:
    """The queries are 4 MiB at 16384, where a matrix for every query would be 256 MiB and all pairs 1 GiB."""
    few, many = (peak(f"lambda q, k, v: {MEASURED[which]}", 1, 1, length, 64)[0] for length in (long // 4, long))
    assert many <= 4.4 * few
    assert many <= 24 * long / 4096
