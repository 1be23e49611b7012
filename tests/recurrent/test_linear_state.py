"""The state of linear attention as an object: what beam search, batching, saving and resetting do to it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import regard
from regard import LinearState
from regard.checks import ArgumentError

SPECS = ("shift-cosine", "linear*fixed*normalised")


def draw(length: int = 6, batch: int = 3) -> list[Tensor]:
    make = torch.Generator().manual_seed(1)
    return [torch.randn(batch, h, length, 4, generator=make, dtype=torch.float64) for h in (4, 2, 2)]


def after(spec: str, length: int = 6) -> LinearState:
    return regard.linear_attention(*draw(length), spec)[1]


def tensors(state: LinearState) -> list[Tensor]:
    found = (state.values, state.keys, state.squares, state.poisoned)
    return [x for x in found if x is not None]


@pytest.mark.parametrize("spec", SPECS)
def test_sums_by_hand(spec: str) -> None:
    """Equations 13 and 14: sum psi v^T and sum psi with psi = [features; 1]."""
    _, k, v = draw()
    state = after(spec)
    if spec == "shift-cosine":
        k = k / (1e-3 + (k * k).sum(-1, keepdim=True)).sqrt()
    psi = torch.cat([k, torch.ones_like(k[..., :1])], -1)
    torch.testing.assert_close(state.values, torch.einsum("bhtf,bhtd->bhfd", psi, v), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(state.keys, psi.sum(2), rtol=1e-12, atol=1e-12)
    if spec == "shift-cosine":
        assert state.squares is None
    else:
        torch.testing.assert_close(state.squares, torch.einsum("bhtf,bhtg->bhfg", psi, psi), rtol=1e-12, atol=1e-12)
    assert not state.poisoned.any()
    assert (state.keys[..., -1] == 6).all()


@pytest.mark.parametrize("spec", SPECS)
def test_empty_and_reset_are_the_beginning(spec: str) -> None:
    """Going on from either is beginning anew."""
    inputs = draw()
    out, state = regard.linear_attention(*inputs, spec)
    for start in (LinearState.empty(spec, 3, 2, 4, 4, dtype=torch.float64), state.reset()):
        assert start.tokens == 0
        assert all(not x.any() for x in tensors(start))
        again, _ = regard.linear_attention(*inputs, spec, state=start)
        assert torch.equal(again, out)
    assert state.tokens == 6
    assert state.values.any()
    assert LinearState.empty("elu", 1, 1, 4, dtype=torch.bfloat16).values.dtype == torch.float32
    assert LinearState.empty("linear*fixed*euclidean", 1, 1, 4, 2).values.shape == (1, 1, 7, 2)


@pytest.mark.parametrize("spec", SPECS)
def test_select_and_repeat_sequences(spec: str) -> None:
    """What comes next depends on the sequences chosen alone."""
    state, new = after(spec), [x[:, :, :1] for x in draw(1)]
    expected, _ = regard.linear_attention(*new, spec, state=state)
    order = torch.tensor([2, 0, 0, 1])
    found, _ = regard.linear_attention(*(x[order] for x in new), spec, state=state.select(order))
    assert torch.equal(found, expected[order])
    twice = state.repeat(2)
    assert twice.tokens == 6
    found, _ = regard.linear_attention(*(x.repeat_interleave(2, 0) for x in new), spec, state=twice)
    assert torch.equal(found, expected.repeat_interleave(2, 0))


def test_a_poisoned_sequence_stays_its_own() -> None:
    q, k, v = draw()
    k[1, 0, 3, 2] = float("nan")
    state = regard.linear_attention(q, k, v, "elu")[1]
    assert state.poisoned.tolist() == [[False, False], [True, False], [False, False]]
    assert all(bool(x.isfinite().all()) for x in tensors(state))
    found, _ = regard.linear_attention(*draw(1), "elu", state=state.select(torch.tensor([1, 0, 2])))
    assert found.isnan().flatten(1).any(1).tolist() == [True, False, False]
    assert not state.reset().poisoned.any()


@pytest.mark.parametrize("spec", SPECS)
def test_clone_and_detach(spec: str) -> None:
    q, k, v = (x.requires_grad_() for x in draw())
    state = regard.linear_attention(q, k, v, spec)[1]
    copy = state.clone()
    for one, two in zip(tensors(copy), tensors(state), strict=True):
        assert torch.equal(one, two)
        assert one.data_ptr() != two.data_ptr()
    assert copy.values.requires_grad
    cut = state.detach()
    assert not any(x.requires_grad for x in tensors(cut))
    out, _ = regard.linear_attention(*draw(1), spec, state=cut)
    assert not out.requires_grad


def test_a_sum_cannot_forget() -> None:
    state = after("elu")
    assert state.crop(6) is state
    assert state.crop(9) is state
    for n in (5, 0, -1):
        with pytest.raises(ArgumentError, match="cannot forget"):
            state.crop(n)


@pytest.mark.parametrize("spec", SPECS)
def test_bytes_do_not_grow(spec: str) -> None:
    short, long = after(spec, 1), after(spec, 200)
    assert short.bytes == long.bytes
    numbers = 3 * 2 * (5 * 4 + 5 + (25 if spec == SPECS[1] else 0))
    assert short.bytes == 8 * numbers + 3 * 2
    assert (short.tokens, long.tokens) == (1, 200)


@pytest.mark.parametrize("spec", SPECS)
def test_to_tensors_and_back(spec: str) -> None:
    state = after(spec)
    saved = state.to_tensors()
    assert all(isinstance(x, Tensor) and x.is_contiguous() for x in saved.values())
    again = LinearState.from_tensors(saved)
    assert again.tokens == 6
    assert all(torch.equal(a, b) for a, b in zip(tensors(again), tensors(state), strict=True))
    with pytest.raises(ArgumentError, match=r"LinearState\.from_tensors: got keys"):
        LinearState.from_tensors({"keys": saved["keys"]})


def test_nothing_is_mutated() -> None:
    inputs = draw()
    before = [x.clone() for x in inputs]
    state = regard.linear_attention(*inputs, "linear*fixed*normalised")[1]
    kept = [x.clone() for x in tensors(state)]
    for form in ("chunked", "parallel", "recurrent"):
        regard.linear_attention(*inputs, "linear*fixed*normalised", state=state, form=form)
        regard.linear_attention(*draw(1), "linear*fixed*normalised", state=state, form=form)
    assert all(torch.equal(a, b) for a, b in zip(tensors(state), kept, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(inputs, before, strict=True))
