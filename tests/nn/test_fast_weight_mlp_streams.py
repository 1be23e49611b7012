"""FwMLP as a stream: any cut, padding, shared memories, packed documents, gradients through its writes, its state."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from fwmlp_oracle import (
    CHUNK,
    DIN,
    DV,
    MASK,
    RATE,
    B,
    C,
    T,
    close,
    layer,
    network,
    numbers,
    same,
    taught,
    tokens,
    weights,
)
from torch.autograd import grad

from regard.checks import ArgumentError
from regard.memory.fast_weight_mlp import FastMLPState, fast_weight_mlp, flush

# Streams --------------------------------------------------------------------------------------------------------

PARTITIONS = {
    "tokens": [1] * T,
    "chunks": [CHUNK] * 3 + [2],
    "odd": [1, CHUNK - 1, CHUNK, CHUNK + 1, 1],
    "late": [13, 1],
}


@pytest.mark.parametrize("parts", PARTITIONS.values(), ids=PARTITIONS)
@pytest.mark.parametrize("shared", [False, True])
def test_any_partition_of_a_stream_gives_the_same(parts, shared):
    made, hidden = layer(shared=shared), tokens()
    expected, state = made(hidden)
    now, out = None, []
    for piece in hidden.split(parts, 1):
        part, now = made(piece, state=now)
        out.append(part)
    close(torch.cat(out, 1), expected)
    same(now, state)
    assert (now.waits, now.writes, now.tokens) == (state.waits, state.writes, T)
    close(made.flush(now).down, made.flush(state).down)


def test_a_later_token_changes_nothing_before_it():
    made, hidden = layer(), tokens().requires_grad_()
    out, _ = made(hidden)
    for t in (0, 3, 4, 8, T - 2):
        back = grad(out[:, t].sum(), hidden, retain_graph=True)[0]
        assert (back[:, t + 1 :] == 0).all()
        assert (back[:, t] != 0).any()
    changed = hidden.detach().clone()
    changed[:, 9] += 1
    close(made(changed)[0][:, :9], out[:, :9], 0)
    assert (made(changed)[0][:, 12:] - out[:, 12:]).abs().max() > 1e-6  # it was learned


@pytest.mark.parametrize("parts", [[T], [1] * T, [2, 7, 5]], ids=["once", "tokens", "pieces"])
def test_padding_is_as_if_removed(parts):
    made, hidden = layer(), tokens()
    padded = hidden.masked_fill(~MASK[..., None], torch.nan).requires_grad_()
    now, out = None, []
    for piece, mask in zip(padded.split(parts, 1), MASK.split(parts, 1), strict=True):
        part, now = made(piece, mask, now)
        out.append(part)
    whole = torch.cat(out, 1)
    assert (whole[~MASK] == 0).all()
    for b in range(B):
        expected, state = made(hidden[b : b + 1, MASK[b]])
        close(whole[b, MASK[b]], expected[0])
        close(now.down[b], state.down[0])
        assert (now.waits[b], now.writes[b]) == (state.waits[0], state.writes[0])
    back = grad(whole.square().sum(), padded)[0]
    assert back.isfinite().all()
    assert (back[~MASK] == 0).all()


def test_a_call_of_padding_alone_changes_nothing():
    made, hidden = layer(), tokens()
    _, state = made(hidden)
    none = torch.zeros(B, 3, dtype=torch.bool)
    out, after = made(hidden[:, :3], none, state)
    assert (out == 0).all()
    same(after, state, 0)
    assert after.tokens == T + 3
    close(made(hidden, state=after)[0], made(hidden, state=state)[0], 0)
    close(made(hidden[:, :3], none)[0], torch.zeros(B, 3, C, dtype=torch.float64), 0)


def test_rows_know_nothing_of_each_other():
    made, hidden = layer(), tokens()
    order = torch.tensor([2, 0, 1])
    out, state = made(hidden, MASK)
    turned, moved = made(hidden[order], MASK[order])
    close(turned, out[order])
    close(moved.gate, state.gate[order])


@pytest.mark.parametrize("parts", [[T], [3, 4, 7]], ids=["once", "pieces"])
def test_a_shared_network_learns_from_all_rows_at_once(parts):
    query, value, w = numbers(B, T, DIN), numbers(B, T, DV, seed=1), weights()
    now, out = None, []
    for q, v in zip(query.split(parts, 1), value.split(parts, 1), strict=True):
        options = {"chunk_size": CHUNK, "learning_rate": RATE, "shared": True}
        part, now = fast_weight_mlp(q, v, w, state=now, **options)
        out.append(part)
    net = w
    for start in range(0, T, CHUNK):
        stop = min(start + CHUNK, T)
        close(torch.cat(out, 1)[:, start:stop], network(query[:, start:stop], net))
        if start + CHUNK < T:
            rows = [[(query[b, t], value[b, t]) for t in range(start, stop + 1)] for b in range(B)]
            net = taught(net, rows, "mean")
    close(now.down[0], net[2])
    assert now.down.shape[0] == 1


def test_shared_network_and_padding():
    query, value, w = numbers(2, 6, DIN), numbers(2, 6, DV, seed=1), weights()
    mask = torch.ones(2, 6, dtype=torch.bool)
    mask[0, :2], mask[1, 5:], mask[:, 3] = False, False, False
    options = {"chunk_size": 4, "learning_rate": RATE, "shared": True}
    out, state = fast_weight_mlp(query.masked_fill(~mask[..., None], torch.nan), value, w, mask=mask, **options)
    columns = [0, 1, 2, 4, 5]  # the clock of the batch does not count column 3
    rows = [[(query[b, t], value[b, t]) for t in columns if mask[b, t]] for b in range(2)]
    net = taught(w, rows, "mean")
    close(state.down[0], net[2])
    close(out[0, 5], network(query[0, 5], net))
    assert (out[~mask] == 0).all()


def test_packed_documents_are_sequences_of_their_own():
    made, hidden = layer(), tokens()
    ids = torch.tensor([7] * 6 + [3] + [8] * 7).expand(B, T).clone()
    ids[1] = torch.tensor([1] * 5 + [2] * 9)
    out, state = made(hidden, segment_ids=ids)
    for b, cuts in enumerate([(0, 6, 7, T), (0, 5, T), (0, 6, 7, T)]):
        for a, z in pairwise(cuts):
            expected, alone = made(hidden[b : b + 1, a:z])
            close(out[b, a:z], expected[0])
        close(state.gate[b], alone.gate[0])
    now, parts = None, []
    for piece, part in zip(hidden.split([3, 7, 4], 1), ids.split([3, 7, 4], 1), strict=True):
        x, now = made(piece, state=now, segment_ids=part)
        parts.append(x)
    close(torch.cat(parts, 1), out)  # a document goes on where a call ends inside it


def test_documents_and_padding_together():
    made, hidden = layer(), tokens()
    ids = torch.tensor([1] * 7 + [2] * 7).expand(B, T)
    out, _ = made(hidden.masked_fill(~MASK[..., None], torch.inf), MASK, segment_ids=ids)
    for b in range(B):
        for span in (slice(0, 7), slice(7, T)):
            if MASK[b, span].any():
                expected, _ = made(hidden[b : b + 1, span][:, MASK[b, span]])
                close(out[b, span][MASK[b, span]], expected[0])


def test_chunk_size_may_change_between_calls():
    made, hidden = layer(), tokens(12, rows=1)
    _, state = made(hidden[:, :4])
    assert state.waits == (4,)
    made.chunk_size = 3
    _, state = made(hidden[:, 4:], state=state)
    assert state.writes == (3,)  # the four that waited, then 4..6 and 7..9
    made.chunk_size = 100
    _, state = made(tokens(50, rows=1), state=state)
    assert state.writes == (3,)


# Gradients ------------------------------------------------------------------------------------------------------


def chunk_gradients(meta_grad: bool | int) -> list[list[bool]]:
    """Whether what chunk c reads has a gradient to the tokens of chunk d, [c][d]."""
    made, hidden = layer(meta_grad=meta_grad), tokens(16).requires_grad_()
    out, _state = made(hidden)
    own = [grad(out[:, c : c + 4].sum(), hidden, retain_graph=True)[0] for c in range(0, 16, 4)]
    return [[bool((g[:, d : d + 4] != 0).any()) for d in range(0, c * 4 + 4, 4)] for c, g in enumerate(own)]


def test_gradients_through_writes_can_be_cut():
    assert chunk_gradients(True) == [[True], [True] * 2, [True] * 3, [True] * 4]
    assert chunk_gradients(False) == [[True], [False, True], [False, False, True], [False, False, False, True]]
    assert chunk_gradients(2) == [[True], [True, True], [False, False, True], [False, False, True, True]]


def test_cut_gradients_leave_the_numbers_and_the_cut_of_padded_rows():
    hidden = tokens()
    expected, _ = layer()(hidden, MASK)
    for meta_grad in (False, 1, 2):
        close(layer(meta_grad=meta_grad)(hidden, MASK)[0], expected)
    made, given = layer(meta_grad=2), hidden.clone().requires_grad_()
    whole = grad(made(given, MASK)[0].square().sum(), given)[0]
    for b in range(B):
        row = hidden[b : b + 1, MASK[b]].clone().requires_grad_()
        close(whole[b, MASK[b]], grad(made(row)[0].square().sum(), row)[0][0])


def test_gradients_cross_calls_until_detached():
    made, hidden = layer(), tokens().requires_grad_()
    _, state = made(hidden[:, :6])
    for now, found in ((state, True), (state.detach(), False)):
        out, _ = made(hidden[:, 6:], state=now)
        assert bool((grad(out.sum(), hidden, retain_graph=True)[0][:, :6] != 0).any()) is found


@pytest.mark.parametrize("reset", [False, True])
@pytest.mark.parametrize("meta_grad", [True, False, 2])
def test_what_begins_after_a_cut_begins_with_the_weights_given_now(meta_grad, reset):
    """Documents of a later call, and states begun anew, teach the first weights of their own call."""
    query, value = numbers(2, T, DIN), numbers(2, T, DV, seed=1)
    _, state = fast_weight_mlp(query, value, weights(), chunk_size=CHUNK)
    firsts = [x.requires_grad_() for x in weights(seed=50)]
    if reset:
        _, state = fast_weight_mlp(query, value, tuple(firsts), chunk_size=CHUNK)
    query, value = numbers(2, T, DIN, seed=2), numbers(2, T, DV, seed=3)
    begun = [(0, 0), (1, 0)] if reset else [(0, 3), (1, 5)]
    ids = None if reset else torch.tensor([[0] * t + [1] * (T - t) for _, t in begun])
    state = state.detach().reset() if reset else state.detach()
    out, after = fast_weight_mlp(
        query, value, tuple(firsts), chunk_size=CHUNK, state=state, segment_ids=ids, meta_grad=meta_grad
    )
    found = grad(sum(out[b, t:].square().sum() for b, t in begun), firsts, retain_graph=True)
    assert after.writes == tuple((T - t - 1) // CHUNK for _, t in begun)
    expected = 0
    for b, t in begun:
        net, waits, writes = tuple(firsts), [], 0
        for q, v in zip(query[b, t:], value[b, t:], strict=True):
            if len(waits) == CHUNK:
                net, waits, writes = taught(net, [[*waits, (q, v)]], "mean"), [], writes + 1
                if meta_grad is not True and writes % (meta_grad or 1) == 0:
                    net = tuple(x.detach().requires_grad_() for x in net)
            expected = expected + network(q, net).square().sum()
            waits.append((q, v))
    for a, b in zip(found, grad(expected, firsts), strict=True):
        close(a, b)
        assert b.abs().max() > 0.01
    if not reset:  # what goes on from before the cut is not taught
        went_on = sum(out[b, :t].square().sum() for b, t in begun)
        assert not went_on.requires_grad or not any(
            x.any() for x in grad(went_on, firsts, allow_unused=True, materialize_grads=True)
        )


def test_the_first_weights_can_be_learned():
    made = layer(learn_initial=True)
    out, _ = made(tokens())
    out.square().sum().backward()
    assert all((getattr(made, name).grad != 0).any() for name in ("gate", "up", "down"))


# The state ------------------------------------------------------------------------------------------------------


def test_state_selects_repeats_resets_and_is_restored():
    made, hidden = layer(), tokens()
    _, state = made(hidden[:, :7], MASK[:, :7])
    rest, mask = hidden[:, 7:], MASK[:, 7:]
    expected, _ = made(rest, mask, state)
    order = torch.tensor([2, 2, 0])
    close(made(rest[order], mask[order], state.select(order))[0], expected[order])
    flags = torch.tensor([True, False, True])
    close(made(rest[flags], mask[flags], state.select(flags))[0], expected[flags])
    doubled = torch.arange(B).repeat_interleave(2)
    close(made(rest[doubled], mask[doubled], state.repeat(2))[0], expected[doubled])
    again = FastMLPState.from_tensors(state.to_tensors())
    assert (again.waits, again.writes, again.shared, again.tokens) == (state.waits, state.writes, False, 7)
    close(made(rest, mask, again)[0], expected, 0)
    close(made(rest, mask, state.clone().detach())[0], expected, 0)
    close(made(hidden, MASK, state.reset())[0], made(hidden, MASK)[0], 0)
    assert state.reset().tokens == 0


def test_state_is_not_changed_by_a_call():
    made, hidden = layer(), tokens()
    _, state = made(hidden)
    before = {name: x.clone() for name, x in state.to_tensors().items()}
    made(hidden, state=state)
    assert all(torch.equal(x, before[name]) for name, x in state.to_tensors().items())


def test_frozen_reads_and_leaves_the_state():
    made, hidden = layer(), tokens()
    _, state = made(hidden[:, :6])
    made.frozen = True
    out, after = made(hidden[:, 6:], MASK[:, 6:], state)
    assert after is state
    made.frozen = False
    made.chunk_size = 100  # nothing is written for want of tokens
    close(out, made(hidden[:, 6:], MASK[:, 6:], state)[0])
    made.frozen = True
    assert made(hidden)[1].writes == (0,) * B


def test_flush_writes_the_pairs_that_are_there():
    query, value, w = numbers(1, 7, DIN), numbers(1, 7, DV, seed=1), weights()
    _, state = fast_weight_mlp(query, value, w, chunk_size=4, learning_rate=RATE)
    after = flush(state, learning_rate=RATE)
    rows = list(zip(query[0], value[0], strict=True))
    expected = taught(taught(w, [rows[:5]], "mean"), [rows[4:]], "mean")
    close(after.up[0], expected[1])
    assert after.waits == (0,)
    assert flush(after) is after


def test_a_shared_network_refuses_beams():
    _, state = layer(shared=True)(tokens())
    for call in (lambda: state.select(torch.tensor([0, 0])), lambda: state.repeat(2)):
        with pytest.raises(ArgumentError, match="shared by the batch"):
            call()
