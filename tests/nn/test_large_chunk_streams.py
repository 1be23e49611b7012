"""LaCT as a stream: any cut, padding, packed documents, gradients through its writes, and its states."""

from __future__ import annotations

from itertools import accumulate, pairwise
from types import SimpleNamespace

import pytest
import torch
from lact_oracle import (
    CHUNK,
    MASK,
    WINDOW,
    B,
    C,
    H,
    T,
    angles,
    cache,
    close,
    expected_reads,
    in_pieces,
    inputs,
    layer,
    numbers,
    tokens,
    weights,
)
from torch import Tensor
from torch.autograd import grad

from regard.memory.large_chunk import OPTIMIZERS, flush, large_chunk_ttt
from regard.nn.memory.large_chunk_ttt import WindowState

everyone = pytest.mark.parametrize("optimizer", list(OPTIMIZERS))

# Streams --------------------------------------------------------------------------------------------------------

PARTITIONS = {
    "tokens": [1] * T,
    "chunks": [CHUNK] * 3 + [3],
    "odd": [1, CHUNK - 1, CHUNK, CHUNK + 1, 2],
    "late": [14, 1],
}


@everyone
@pytest.mark.parametrize("parts", PARTITIONS.values(), ids=PARTITIONS)
def test_any_partition_of_a_stream_gives_the_same(parts, optimizer):
    made, hidden = layer(optimizer=optimizer), tokens()
    expected, _ = made(hidden, angles())
    _, whole = in_pieces(made, hidden, [T])
    out, state = in_pieces(made, hidden, parts)
    close(out, expected, 1e-10)
    for name, x in state.memory.items():
        close(x, getattr(whole, name), 1e-10)
    assert (state.waits, state.writes, state.tokens) == ((3,) * B, (3,) * B, T)


def test_long_stream_in_float32():
    made, hidden = layer(chunk_size=64, window=32).float(), tokens(600, rows=1).float()
    with torch.no_grad():
        made.rate_proj.bias.fill_(0.0)
        whole, kept, out = made(hidden)[0], cache(), []
        for first, last in pairwise(accumulate([1] * 70 + [63, 64, 65, 1, 200, 137], initial=0)):
            out.append(made(hidden[:, first:last], past_key_values=kept)[0])
    assert (torch.cat(out, 1) - whole).abs().max() < 1e-5


def test_the_last_complete_chunk_is_learned():
    made, hidden = layer(), tokens(8)
    _, state = in_pieces(made, hidden, [8])
    assert (state.waits, state.writes) == ((4,) * B, (1,) * B)
    after = made.flush(state)
    assert (after.waits, after.writes) == ((0,) * B, (2,) * B)
    _, longer = in_pieces(made, tokens(9), [9])
    _, other = in_pieces(made, torch.cat([hidden, tokens(1, seed=7)], 1), [9])
    close(after.down, other.down)
    assert longer.writes == (2,) * B
    assert flush(after) is after


def test_a_later_token_changes_nothing_before_it():
    made, hidden = layer(), tokens().requires_grad_()
    out, _ = made(hidden, angles())
    for t in (0, 3, 4, 8, T - 2):
        back = grad(out[:, t].sum(), hidden, retain_graph=True)[0]
        assert (back[:, t + 1 :] == 0).all()
        assert (back[:, t] != 0).any()
    assert (grad(out[:, -1].sum(), hidden, retain_graph=True)[0][:, 0] != 0).any()  # beyond the window, it was learned
    changed = hidden.detach().clone()
    changed[:, 9] += 1
    close(made(changed, angles())[0][:, :9], out[:, :9], 0)


@pytest.mark.parametrize("parts", [[T], [1] * T, [3, 7, 5]], ids=["once", "tokens", "pieces"])
def test_padding_at_the_left_is_as_if_removed(parts):
    made = layer()
    padded = tokens().masked_fill(~MASK[..., None], torch.nan).requires_grad_()
    out, state = in_pieces(made, padded, parts, MASK)
    assert (out[~MASK] == 0).all()
    for b, first in enumerate((5, 1, 0)):
        expected, alone = in_pieces(made, padded[b : b + 1, first:].detach(), [T - first])
        close(out[b, first:], expected[0], 1e-10)
        close(state.down[b], alone.down[0], 1e-10)
        assert (state.waits[b], state.writes[b]) == (alone.waits[0], alone.writes[0])
    back = grad(out.square().sum(), padded)[0]
    assert back.isfinite().all()
    assert (back[~MASK] == 0).all()


def test_padding_inside_takes_no_place_in_a_chunk():
    given, w = inputs(), weights()
    mask = numbers(B, T, seed=40) > -0.5
    out, state = large_chunk_ttt(
        **{n: x.masked_fill(~mask.view(B, T, *(1,) * (x.dim() - 2)), torch.nan) for n, x in given.items()},
        weights=w,
        mask=mask,
        chunk_size=CHUNK,
    )
    assert (out[~mask] == 0).all()
    for b in range(B):
        expected, alone = large_chunk_ttt(
            **{n: x[b : b + 1, mask[b]] for n, x in given.items()}, weights=w, chunk_size=CHUNK
        )
        close(out[b, mask[b]], expected[0])
        close(state.up[b], alone.up[0])


def test_a_call_of_padding_alone_changes_nothing():
    made, hidden, kept = layer(), tokens(), cache()
    made(hidden, past_key_values=kept)
    before = kept.layers[0].fast_state
    mask = torch.cat([torch.ones(B, T, dtype=torch.bool), torch.zeros(B, 2, dtype=torch.bool)], 1)
    out, _ = made(hidden[:, :2], None, mask, kept)
    assert (out == 0).all()
    after = kept.layers[0].fast_state
    assert all(torch.equal(x, after.memory[name]) for name, x in before.memory.items())
    assert after.waits == before.waits


def test_rows_know_nothing_of_each_other():
    made, hidden, order = layer(), tokens(), torch.tensor([2, 0, 1])
    out, state = in_pieces(made, hidden, [T], MASK)
    turned, moved = in_pieces(made, hidden[order], [T], MASK[order])
    close(turned, out[order])
    close(moved.gate, state.gate[order])


def test_packed_documents_are_sequences_of_their_own():
    made, hidden = layer(), tokens()
    ids = torch.tensor([7] * 6 + [3] + [7] * 8).expand(B, T).clone()
    ids[1] = torch.tensor([1] * 5 + [2] * 10)
    out, _ = made(hidden, segment_ids=ids)
    for b, cuts in enumerate([(0, 6, 7, T), (0, 5, T), (0, 6, 7, T)]):
        for a, z in pairwise(cuts):
            close(out[b, a:z], made(hidden[b : b + 1, a:z])[0][0])
    kept, parts = cache(), []
    for piece, part in zip(hidden.split([3, 7, 5], 1), ids.split([3, 7, 5], 1), strict=True):
        parts.append(made(piece, past_key_values=kept, segment_ids=part)[0])
    close(torch.cat(parts, 1), out)


def test_documents_and_padding_together():
    made, hidden = layer(), tokens()
    ids = torch.tensor([1] * 7 + [2] * 8).expand(B, T).clone()
    mask = MASK.clone()
    mask[2, 7], mask[2, 12:] = False, False
    ids[~mask] = -1
    out, _ = made(hidden.masked_fill(~mask[..., None], torch.inf), None, mask, segment_ids=ids)
    for b in range(B):
        for span in (slice(0, 7), slice(7, T)):
            close(out[b, span][mask[b, span]], made(hidden[b : b + 1, span][:, mask[b, span]])[0][0])


# Gradients ------------------------------------------------------------------------------------------------------


def chunk_gradients(meta_grad: bool | int) -> list[list[bool]]:
    """Whether what chunk c reads has a gradient to the keys of chunk d, [c][d]."""
    given = {name: x.requires_grad_() for name, x in inputs(length=16).items()}
    out, _ = large_chunk_ttt(**given, weights=weights(), chunk_size=4, meta_grad=meta_grad)
    found = []
    for c in range(0, 16, 4):
        back = grad(out[:, c : c + 4].sum(), list(given.values()), retain_graph=True, allow_unused=True)
        back = [torch.zeros(B, 16) if g is None else g.flatten(2) for g in back]
        found.append([any(bool((g[:, d : d + 4] != 0).any()) for g in back) for d in range(0, c + 4, 4)])
    return found


def test_gradients_through_writes_can_be_cut():
    assert chunk_gradients(True) == [[True], [True] * 2, [True] * 3, [True] * 4]
    assert chunk_gradients(False) == [[True], [False, True], [False, False, True], [False, False, False, True]]
    assert chunk_gradients(2) == [[True], [True, True], [False, False, True], [False, False, True, True]]


@everyone
def test_documents_begin_with_the_weights_given_now_after_a_cut(optimizer):
    """What goes on keeps the norms of the weights with which it began, and teaches no others."""
    past, given, t = inputs(rows=1), inputs(seed=7, rows=1), 6
    _, state = large_chunk_ttt(**past, weights=weights(), chunk_size=CHUNK, optimizer=optimizer)
    firsts = [(1.5 * x.flip(-1)).requires_grad_() for x in weights()]
    ids = torch.tensor([[0] * t + [1] * (T - t)])
    out, after = large_chunk_ttt(
        **given,
        weights=tuple(firsts),
        chunk_size=CHUNK,
        optimizer=optimizer,
        state=state.detach(),
        segment_ids=ids,
    )
    assert after.writes == ((T - t - 1) // CHUNK,) == (2,)
    own, learners = expected_reads({n: x[:, t:] for n, x in given.items()}, tuple(firsts), optimizer, CHUNK)
    close(out[:, t:], own, 1e-10)
    found = grad(out[:, t:].square().sum(), firsts, retain_graph=True)
    for a, b in zip(found, grad(own.square().sum(), firsts), strict=True):
        close(a, b, 1e-8)
        assert b.abs().max() > 0.01
    close(after.gate[0, 0], learners[0][0].w[0], 1e-10)
    whole, _ = expected_reads(
        {n: torch.cat([past[n], x[:, :t]], 1) for n, x in given.items()}, weights(), optimizer, CHUNK
    )
    close(out[:, :t], whole[:, T:], 1e-10)
    ended = grad(out[:, :t].square().sum(), firsts, allow_unused=True, materialize_grads=True)
    assert not any(x.any() for x in ended)


@everyone
def test_a_state_begun_anew_after_a_cut_teaches_its_first_weights(optimizer):
    given, firsts = inputs(), [x.requires_grad_() for x in weights()]
    how = {"weights": tuple(firsts), "chunk_size": CHUNK, "optimizer": optimizer}
    _, state = large_chunk_ttt(**given, **how)
    out, _ = large_chunk_ttt(**given, **how, state=state.detach().reset())
    own, _ = expected_reads(given, tuple(firsts), optimizer, CHUNK)
    for a, b in zip(grad(out.square().sum(), firsts), grad(own.square().sum(), firsts), strict=True):
        close(a, b, 1e-8)


def test_first_weights_are_learned():
    made = layer()
    made(tokens())[0].square().sum().backward()
    assert all((x.grad is not None) and bool((x.grad != 0).any()) for x in made.parameters())


# The state ------------------------------------------------------------------------------------------------------


def test_states_select_repeat_and_are_restored():
    made, hidden, kept = layer(), tokens(), cache()
    place = torch.arange(T)[None]
    made(hidden[:, :7], angles(place[:, :7]), MASK[:, :7], kept)
    window, fast = kept.layers[0].window_state, kept.layers[0].fast_state

    def rest(rows: Tensor, change) -> Tensor:
        now = SimpleNamespace(layers=[SimpleNamespace(window_state=change(window), fast_state=change(fast))])
        return made(hidden[rows, 7:], angles(place[:, 7:]), MASK[rows], now)[0]

    everything = torch.arange(B)
    expected = rest(everything, lambda state: state)
    order = torch.tensor([2, 2, 0])
    close(rest(order, lambda state: state.select(order)), expected[order])
    doubled = everything.repeat_interleave(2)
    close(rest(doubled, lambda state: state.repeat(2)), expected[doubled])
    close(rest(everything, lambda state: type(state).from_tensors(state.to_tensors())), expected, 0)
    close(rest(everything, lambda state: state.clone().detach()), expected, 0)


def test_reset_goes_back_to_the_first_weights():
    given, w = inputs(), weights()
    expected, state = large_chunk_ttt(**given, weights=w, chunk_size=CHUNK)
    again = state.reset()
    close(large_chunk_ttt(**given, weights=w, chunk_size=CHUNK, state=again)[0], expected)
    assert again.tokens == 0
    assert (again.waits, again.writes) == ((0,) * B, (0,) * B)
    some = state.restart(torch.tensor([False, True, False]))
    close(some.down[1], w[2])
    close(some.down[0], state.down[0], 0)
    assert (some.gate_step[1] == 0).all()


def test_window_holds_no_more_than_it_reaches():
    made, kept = layer(), cache()
    for _ in range(3):
        made(tokens(4), past_key_values=kept)
    window = kept.layers[0].window_state
    assert isinstance(window, WindowState)
    assert window.key.shape == (B, H, WINDOW - 1, C // H)
    assert window.tokens == kept.layers[0].fast_state.tokens == 12


def test_a_call_changes_no_state_but_the_cache():
    made, hidden, kept = layer(), tokens(), cache()
    made(hidden, past_key_values=kept)
    states = (kept.layers[0].window_state, kept.layers[0].fast_state)
    before = [{name: x.clone() for name, x in state.to_tensors().items()} for state in states]
    made(hidden, past_key_values=kept)
    for state, then in zip(states, before, strict=True):
        assert all(torch.equal(x, then[name]) for name, x in state.to_tensors().items())


def test_frozen_reads_and_leaves_the_state():
    made, hidden, kept = layer(), tokens(), cache()
    made(hidden, past_key_values=kept)
    state = kept.layers[0].fast_state
    made.frozen = True
    out, _ = made(hidden, past_key_values=kept)
    assert kept.layers[0].fast_state is state
    assert (out - layer()(hidden)[0]).abs().max() > 1e-6
