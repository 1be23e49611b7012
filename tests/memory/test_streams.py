"""What a memory that is written in chunks gives depends on the stream alone, not on calls; its states, and where its
gradients are cut. Padding, documents, frozen reads and changes of the chunk are in `test_random_lives.py`, layers with
these memories in `tests/contracts`, and models with them in `tests/models`."""

import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from dense_fast_weights import close
from mistakes import refuses
from streams import CHUNK, KINDS, SHARED, Fields, call, draw, first, flush, pieces, rows, spoil, written
from torch import Tensor
from torch.autograd import grad

from regard.memory.fast_weight_mlp import FastMLPState, fast_weight_mlp
from regard.memory.fast_weights import FastWeightState, fast_weight_memory
from regard.memory.large_chunk import LargeChunkState, large_chunk_ttt
from regard.memory.stream import schedule

T = 23
every = pytest.mark.parametrize("kind", KINDS)
everywhere = pytest.mark.parametrize("kind", [*KINDS, *SHARED])
SOME: dict[str, bool] = {"allow_unused": True, "materialize_grads": True}


@everywhere
@pytest.mark.parametrize("frozen", [False, True])
def test_calls_without_a_real_token(kind: str, frozen: bool) -> None:
    """Zeros, no gradients, and a state that goes on as before."""
    _, state = call(kind, draw(kind, 2, 8))
    expected, _ = call(kind, draw(kind, 2, 6, 1), state=state)
    nothing = spoil(draw(kind, 2, 3), torch.ones(2, 3, dtype=torch.bool))
    for begun in ({}, {"state": state}):
        leaves, firsts = {n: x.clone().requires_grad_() for n, x in nothing.items()}, first(kind)
        out, after = call(kind, leaves, firsts, mask=torch.zeros(2, 3, dtype=torch.bool), frozen=frozen, **begun)
        assert not out.any()
        assert not out.requires_grad or not any(x.any() for x in grad(out.sum(), [*leaves.values(), *firsts], **SOME))
    close(call(kind, draw(kind, 2, 6, 1), state=after)[0], expected, 0)


@everywhere
def test_a_chunk_without_a_finite_token_changes_nothing(kind: str) -> None:
    """Neither what was written nor, of large chunks, the last steps, which momentum adds again."""
    given = draw(kind, 2, 3 * CHUNK)
    second_chunk = torch.zeros(2, 3 * CHUNK, dtype=torch.bool)
    second_chunk[:, CHUNK : 2 * CHUNK] = True
    _, state = call(kind, spoil(given, second_chunk))
    _, before = call(kind, rows(given, slice(0, 2), slice(0, CHUNK)))
    assert state.writes == tuple(n + 2 for n in before.writes)
    close(written(state), written(flush(kind, before)), 0)
    if kind in KINDS:  # not finite in row 0 alone: row 1 is written as usual
        _, state = call(kind, spoil(given, second_chunk & torch.tensor([[True], [False]])))
        _, whole = call(kind, given)
        close([x[1] for x in written(state)], [x[1] for x in written(whole)])
        close([x[0] for x in written(state)], [x[0] for x in written(flush(kind, before))])


@everywhere
def test_a_state_is_not_changed_and_goes_through_files(kind: str) -> None:
    _, state = call(kind, draw(kind, 2, 13))
    held = {name: x.clone() for name, x in state.to_tensors().items()}
    found = [call(kind, draw(kind, 2, 20, seed), state=state)[0] for seed in (1, 2, 1)]
    close(found[2], found[0], 0)
    tensors = state.to_tensors()
    assert all(torch.equal(x, held[name]) and x.is_contiguous() for name, x in tensors.items())
    back = type(state).from_tensors(tensors)
    assert (back.waits, back.writes, back.shared, back.tokens) == (state.waits, state.writes, kind in SHARED, 13)
    for other in (back, state.clone()):
        close(call(kind, draw(kind, 2, 20, 2), state=other)[0], found[1], 0)


@pytest.mark.parametrize("kind", SHARED)
def test_a_shared_memory_refuses_beams_and_documents(kind: str) -> None:
    given = draw(kind, 2, 7)
    _, state = call(kind, given)
    for change in (lambda: state.select(torch.tensor([0, 0])), lambda: state.repeat(2)):
        refuses("shared by the batch", change)
    refuses("memory per document", call, kind, given, segment_ids=torch.zeros(2, 7, dtype=torch.long))


def loss_of(out: Tensor) -> Tensor:
    return out.square().sum()


def leaves_of(kind: str, batch: int, tokens: int, seed: int = 0) -> Fields:
    return {n: x.requires_grad_() for n, x in draw(kind, batch, tokens, seed).items()}


@every
def test_gradients_cross_calls_until_detached(kind: str) -> None:
    given, firsts = leaves_of(kind, 1, 13), first(kind)
    _, state = call(kind, rows(given, 0, slice(0, 6)), firsts)
    again, _ = call(kind, rows(given, 0, slice(6, 13)), firsts, state=state.detach())
    for x in grad(loss_of(again), list(given.values()), **SOME):
        assert not x[:, :6].any()
        assert x[:, 6:].any()


def reach(kind: str, meta_grad: bool | int) -> list[list[bool]]:
    """Whether what chunk c reads has gradients by the first values, and by the tokens of each chunk before it."""
    given, firsts = leaves_of(kind, 2, 4 * CHUNK), first(kind)
    out, _ = call(kind, given, firsts, meta_grad=meta_grad)
    found = []
    for c in range(4):
        loss = loss_of(out[:, c * CHUNK : (c + 1) * CHUNK])
        *by_tokens, by_first = grad(loss, [*given.values(), firsts[-1]], retain_graph=True, **SOME)
        # the last token of a chunk is left out: it is the target of the one before it, and read in the next chunk
        chunks = [any(bool(x[:, d * CHUNK + 1 : d * CHUNK + CHUNK].any()) for x in by_tokens) for d in range(c)]
        found.append([bool(by_first.any()), *chunks])
    return found


@every
def test_gradients_through_writes_can_be_cut(kind: str) -> None:
    assert reach(kind, True) == [[True] * (c + 1) for c in range(4)]
    for cut in (False, 1):
        assert reach(kind, cut) == [[True], [False] * 2, [False] * 3, [False] * 4]
    norms = "heads" in kind  # every write of these brings rows to the norms of the first weights
    assert reach(kind, 2) == [[True], [True] * 2, [False] * 3, [norms, False, False, True]]
    assert reach(kind, 3) == [[True], [True] * 2, [True] * 3, [False] * 4]


@every
@pytest.mark.parametrize("meta_grad", [False, 2, 3])
def test_cuts_leave_the_numbers_and_are_made_row_by_row(kind: str, meta_grad: bool | int) -> None:
    """Gradients of a row depend neither on the row beside it nor on how the stream is cut into calls."""
    given, firsts = leaves_of(kind, 2, T), first(kind)
    leaves = [*given.values(), *firsts]
    mask = torch.ones(2, T, dtype=torch.bool)
    mask[1, :2] = mask[1, 9] = False
    both, after = pieces(kind, given, [7, 16], firsts, mask=mask, meta_grad=meta_grad)
    whole, state = call(kind, given, mask=mask)
    close([both, *written(after)], [whole, *written(state)])
    assert (after.waits, after.writes, after.tokens) == (state.waits, state.writes, T)
    for row in range(2):
        alone, _ = call(kind, rows(given, row, mask[row]), firsts, meta_grad=meta_grad)
        expected = grad(loss_of(alone), leaves, **SOME)
        close(list(grad(loss_of(both[row]), leaves, retain_graph=True, **SOME)), list(expected))


@every
@pytest.mark.parametrize("meta_grad", [True, False, 2])
@pytest.mark.parametrize("reset", [False, True], ids=["documents", "reset"])
def test_what_begins_after_a_cut_teaches_the_first_values_given_now(
    kind: str, meta_grad: bool | int, reset: bool
) -> None:
    """Documents of a later call, and states that were reset. What goes on from before the cut teaches none."""
    before, given = draw(kind, 2, 11), draw(kind, 2, 17, 1)
    firsts = first(kind, seed=50)
    old = firsts if "slots" in kind else first(kind)  # a store of slots keeps the values with which it began
    _, state = call(kind, before, firsts if reset else old)
    begun = [(0, 0), (1, 0)] if reset else [(0, 3), (1, 5)]
    ids = None if reset else torch.tensor([[0] * t + [1] * (17 - t) for _, t in begun])
    state = state.detach().reset() if reset else state.detach()
    out, _ = call(kind, given, firsts, state=state, segment_ids=ids, meta_grad=meta_grad)
    found = grad(sum(loss_of(out[b, t:]) for b, t in begun), firsts, retain_graph=True)
    alone = [call(kind, rows(given, b, slice(t, 17)), firsts, meta_grad=meta_grad)[0] for b, t in begun]
    close([out[b, t:] for b, t in begun], [x[0] for x in alone])
    expected = grad(sum(loss_of(x) for x in alone), firsts)
    close(list(found), list(expected), 1e-8)
    assert all(x.abs().max() > 1e-3 for x in expected)
    if not reset:
        went_on = sum(loss_of(out[b, :t]) for b, t in begun)
        assert not went_on.requires_grad or not any(x.any() for x in grad(went_on, [*firsts, *old], **SOME))
        close(out[:, :3], call(kind, rows(given, slice(0, 2), slice(0, 3)), old, state=state)[0])


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind == "slots-dense" or "slots" not in kind])
def test_second_derivatives_beside_a_row_that_is_not_written(kind: str) -> None:
    given, firsts = leaves_of(kind, 2, 13), first(kind)
    leaves, mask = [*given.values(), *firsts], torch.arange(13) < torch.tensor([[13], [4]])

    def twice(loss: Tensor) -> list[Tensor]:
        slopes = grad(loss, leaves, create_graph=True, **SOME)
        return list(grad(sum(x.square().sum() for x in slopes if x.requires_grad), leaves, **SOME))

    alone = [call(kind, rows(given, b, mask[b]), firsts)[0] for b in (0, 1)]
    close(twice(loss_of(call(kind, given, firsts, mask=mask)[0])), twice(loss_of(alone[0]) + loss_of(alone[1])), 1e-7)


@every
def test_vmap(kind: str) -> None:
    """With one mask and one cut into documents for all; those that vmap runs over are refused."""
    given, firsts = draw(kind, 2, 13), [x.detach() for x in first(kind)]
    masks = torch.arange(13) < torch.tensor([[[13], [4]], [[5], [13]]])

    def read(value: Tensor, **how: Tensor) -> Tensor:
        return call(kind, {**given, "value": value}, firsts, **how)[0]

    values, ids = torch.stack([given["value"], given["value"] / 2]), masks[0].long()
    for how in ({}, {"mask": masks[0]}, {"segment_ids": ids}, {"mask": masks[1], "segment_ids": ids}):
        run = partial(read, **how)
        close(torch.func.vmap(run)(values), torch.stack([run(value) for value in values]))
    for name, mapped in (("mask", masks), ("segment_ids", masks.long())):
        one = lambda value, x: read(value, **{name: x})  # noqa: B023, E731
        refuses(f"vmap runs over {name}", torch.func.vmap(one), values, mapped)
        slope = torch.func.grad(lambda value, x: one(value, x).sum())  # noqa: B023
        refuses(f"vmap runs over {name}", torch.func.vmap(slope), values, mapped)


def test_uniform_rows_take_no_more_rounds_than_one():
    assert len(schedule([0, 0], [8, 8], 4)) == 2
    assert all(step.uniform for step in schedule([3, 3], [9, 9], 4))
    assert not schedule([0, 5], [3, 9], 4)[0].uniform
    assert schedule([2], [0], 4) == []
    assert max(step.width for step in schedule([1, 3], [9, 2], 4)) == 4


DATA = Path(__file__).parents[1] / "data"
sys.path.insert(0, str(DATA))
import make_memory_states as saved  # noqa: E402

SAVED = {
    "fast_weight_memory": (fast_weight_memory, FastWeightState),
    "fast_weight_mlp": (fast_weight_mlp, FastMLPState),
    "large_chunk_ttt": (large_chunk_ttt, LargeChunkState),
}  # the states in tests/data were saved by an earlier version


@pytest.mark.parametrize(("name", "shared"), [(name, way) for name, ways in saved.SHARED.items() for way in ways])
def test_a_saved_state_loads_goes_on_and_keeps_its_names(name: str, shared: bool) -> None:
    held = np.load(DATA / "memory_states.npz")
    prefix = f"{name} {shared} state "
    tensors = {key.removeprefix(prefix): torch.tensor(held[key]) for key in held if key.startswith(prefix)}
    function, kind = SAVED[name]
    state = kind.from_tensors(tensors)
    out, after = function(**saved.calls(name, shared)[1], state=state)
    torch.testing.assert_close(out, torch.tensor(held[f"{name} {shared} out"]), rtol=0, atol=1e-12)
    assert state.to_tensors().keys() == tensors.keys()
    assert after.to_tensors().keys() - {"waiting.good"} == tensors.keys() - {"waiting.good"}
