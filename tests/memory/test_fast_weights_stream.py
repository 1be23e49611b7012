"""Streams of fast-weight product-key memory beyond what `test_streams.py` and `test_random_lives.py` test of every
memory: long streams, large chunks, batches of a shared memory, observers, and states that do not fit."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from dense_fast_weights import close
from mistakes import refuses
from streams import CHUNK, call, draw, first, rows, spoil, written
from torch import Tensor

import regard
from regard.memory.fast_weights import FastWeightState, flush

TOP_K = 4
RULE = regard.WriteRule(address_weight=0.3)


@pytest.mark.parametrize("impl", ["reference", "auto"])
def test_long_float32_streams_agree_to_1e5(impl: str) -> None:
    """2048 tokens in chunks of 64, whole and in calls of 1, 63, 64, 65 and other numbers of tokens."""
    make = torch.Generator().manual_seed(7)
    query, value = torch.randn(1, 2048, 1, 32, generator=make), torch.randn(1, 2048, 16, generator=make)
    gate = torch.rand(1, 2048, generator=make)
    keys, values = torch.randn(1, 2, 16, 16, generator=make), torch.randn(256, 16, generator=make) / 4
    states, outs = [], []
    for cuts in ([2048], [1] * 2048, [63] * 32 + [32], [64] * 32, [65] * 31 + [33], [137, 200, 1, 2, 300, 400, 1008]):
        state, out = None, []
        for part in zip(query.split(cuts, 1), value.split(cuts, 1), gate.split(cuts, 1), strict=True):
            with torch.no_grad():
                read, state = regard.fast_weight_memory(*part, keys, values, chunk_size=64, state=state, impl=impl)
            out.append(read)
        outs.append(torch.cat(out, 1))
        states.append(written(state))
    for out, state in zip(outs[1:], states[1:], strict=True):
        close([out, *state], [outs[0], *states[0]], 1e-5)
    assert (states[0][1][0] - values).abs().max() > 1


@pytest.mark.parametrize("key_update", ["entropy", "mse"])
def test_large_chunks_are_read_in_blocks(key_update: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given, rule = draw("slots", 2, 23), regard.WriteRule(address_weight=0.3, key_update=key_update)
    whole, state = call("slots", given, chunk_size=20, rule=rule)
    monkeypatch.setattr("regard.memory.fast_weights.BLOCK", 6)
    monkeypatch.setattr("regard.memory.fast_weight_rules.BLOCK", 4)
    blocks, after = call("slots", given, chunk_size=20, rule=rule)
    close([blocks, *written(after)], [whole, *written(state)], 1e-12)


def test_no_position_at_all() -> None:
    given = rows(draw("slots", 2, 1), slice(0, 2), slice(0, 0))
    for how in ({}, {"frozen": True}, {"shared": True}):
        assert call("slots", given, **how)[0].shape == (2, 0, 4)


def test_a_shared_memory_outlives_its_batch() -> None:
    _, state = call("slots", draw("slots", 2, 7), shared=True)
    out, after = call("slots", draw("slots", 3, 4, 1), state=flush(state, rule=RULE), shared=True)
    assert after.seen == (11, 11, 11)
    assert out.shape == (3, 4, 4)


class Notes:
    """What an observer receives, as rows of (row, position, target, slots or share)."""

    def __init__(self) -> None:
        self.reads: list[tuple[int, int]] = []
        self.writes: list[tuple[int, int, int, float]] = []

    def on_read(self, slots: Tensor, weights: Tensor, position: Tensor, valid: Tensor, row: Tensor) -> None:
        assert not weights.requires_grad
        close(weights.sum(-1)[valid], torch.ones_like(weights.sum(-1)[valid]), 1e-6)
        self.reads += list(zip(row[valid].tolist(), position[valid].tolist(), strict=True))

    def on_write(
        self, slots: Tensor, shares: Tensor, position: Tensor, target: Tensor, written: Tensor, row: Tensor
    ) -> None:
        assert not shares.requires_grad
        told = (row, position, target, shares.sum(-1))
        self.writes += list(zip(*(x[written].tolist() for x in told), strict=True))


@pytest.mark.parametrize("shared", [False, True], ids=["own", "shared"])
def test_observers_receive_every_token_once(shared: bool) -> None:
    given, notes = draw("slots", 2, 14), Notes()
    given["query"].requires_grad_()
    how: dict[str, Any] = {"rule": regard.WriteRule("paper"), "observer": notes}
    mask = torch.ones(2, 14, dtype=torch.bool)
    mask[0, :2] = mask[1, 9:] = False
    _, state = call("slots", spoil(given, ~mask), mask=mask, shared=shared, **how)
    _, state = call("slots", draw("slots", 2, 4, 8), state=state, shared=shared, **how)
    flush(state, **how)
    assert sorted(notes.reads) == [(0, t) for t in range(16)] + [(1, t) for t in range(13)]
    pairs = [(b, t, t + 1) for b, last in [(0, 15), (1, 12)] for t in range(last)]
    if shared:  # row 1's ninth token has no next one when its chunk of columns is written
        pairs.remove((1, 8, 9))
    assert sorted(x[:3] for x in notes.writes) == pairs
    gates = {(b, t): float(given["gate"][b, mask[b]][t]) for b, count in ((0, 12), (1, 9)) for t in range(count)}
    for row, place, _, share in notes.writes:
        assert share == pytest.approx(gates.get((row, place), share), abs=1e-9)


def test_observers_receive_rows_of_the_batch_for_packed_documents() -> None:
    notes, ids = Notes(), torch.tensor([[0] * 5 + [1] * 7, [0] * 12])
    call("slots", draw("slots", 2, 12), segment_ids=ids, observer=notes)
    assert sorted(notes.reads) == [(b, t) for b in range(2) for t in range(12)]
    assert (0, 4, 5) not in [x[:3] for x in notes.writes]
    assert {x[0] for x in notes.writes} == {0, 1}


def test_files_that_are_none() -> None:
    tensors = call("slots", draw("slots", 2, 13))[1].to_tensors()
    for name in ("keys", "seen", "store", "waiting.slots"):
        refuses("from_tensors", FastWeightState.from_tensors, {k: v for k, v in tensors.items() if k != name})
    refuses("unknown tensor 'more'", FastWeightState.from_tensors, {**tensors, "more": tensors["keys"]})


@pytest.mark.parametrize("impl", ["reference", "auto"])
@pytest.mark.parametrize(
    ("name", "cut"),
    [
        ("keys", lambda x: x[:1]),
        ("keys", lambda x: x[..., :2]),
        ("keys", lambda x: x[0]),
        ("initial_keys", lambda x: x[:, :, :5]),
        ("counts", lambda x: x[:1]),
        ("counts", lambda x: x + 9),
        ("writes", lambda x: x[:1]),
        ("seen", lambda x: x[:1]),
        ("shared", torch.logical_not),
        ("waiting.slots", lambda x: x[:, :, :1]),
        ("waiting.slots", lambda x: x[0]),
        ("waiting.weights", lambda x: x[..., :3]),
        ("waiting.value", lambda x: x[..., :3]),
        ("waiting.query", lambda x: x[:, :1]),
        ("waiting.position", lambda x: x[:1]),
    ],
)
def test_files_of_parts_that_do_not_fit(name: str, cut: Callable[[Tensor], Tensor], impl: str) -> None:
    tensors = call("slots", draw("slots", 2, 13), impl=impl)[1].to_tensors()
    expected = r"from_tensors: .* is \[.*but the other tensors need|from_tensors: keys is"
    refuses(expected, FastWeightState.from_tensors, {**tensors, name: cut(tensors[name])})


def test_values_of_another_memory_do_not_fit() -> None:
    tensors, other = (call("slots-dense", draw("slots", rows, 13))[1].to_tensors() for rows in (2, 3))
    mixed = {**tensors, **{name: x for name, x in other.items() if name.startswith("values.")}}
    refuses(r"values is \[3, 36\], but the other tensors need \[2, 36\]", FastWeightState.from_tensors, mixed)


def test_memory_is_counted() -> None:
    keys, values = first("slots")
    _, state = call("slots-dense", draw("slots", 2, 5), rule=regard.WriteRule(key_update="none"))
    waiting = 2 * 5 * (2 * 4 * (8 + 8) + 4 * 8 + 4 * 8 + 8 + 8)  # slots and weights, read, value, gate, position
    own = 3 * keys.numel() * 8  # of two memories, and the first
    assert state.bytes == waiting + own + values.numel() * 8
    _, state = call("slots-dense", draw("slots", 2, 6))
    assert state.bytes > own + 3 * values.numel() * 8


def test_waiting_tokens_are_copied_seldom() -> None:
    """Given one by one they are kept in pieces of powers of two, so that each is copied log2 times at most."""
    given, state = draw("slots", 2, 44), None
    for t in range(44):
        _, state = call("slots", rows(given, slice(0, 2), slice(t, t + 1)), state=state, chunk_size=1000)
    assert [piece["slots"].shape[1] for piece in state.waiting.pieces] == [32, 8, 4]
    close(state.waiting.tokens()["value"], given["value"], 0)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"sync": "all_gather"}, "shared=True"),
        ({"sync": "reduce", "shared": True}, "unknown sync='reduce'"),
        ({"sync": "all_gather", "shared": True, "chunk_size": 2}, "init_process_group"),
        ({"values": torch.zeros(35, 4).double()}, "values has shape \\[35, 4\\]"),
    ],
)
def test_arguments_that_do_not_fit(change: dict[str, Any], words: str) -> None:
    keys, values = (x.detach() for x in first("slots"))
    given = {**draw("slots", 2, 5), "keys": keys, "values": values, "top_k": TOP_K, "chunk_size": CHUNK}
    refuses(words, regard.fast_weight_memory, **{**given, **change})


def test_states_of_another_memory() -> None:
    given, more = draw("slots", 2, 7), draw("slots", 3, 7)
    narrow = {**given, "value": given["value"][..., :3]}
    keys, values = (x.detach() for x in first("slots"))
    _, state = call("slots", given)
    _, shared = call("slots", given, shared=True)
    _, plain = call("slots", given, rule=regard.WriteRule(key_update="none"))
    for words, wrong in (
        ("shared=True", lambda: call("slots", given, state=state, shared=True)),
        ("give each memory its own state", lambda: call("slots", narrow, [keys, values[:, :3]], state=state)),
        ("2 sequences, but the input has 3", lambda: call("slots", more, state=state)),
        ("flush", lambda: call("slots", more, state=shared, shared=True)),
        ("top_k is 3", lambda: call("slots", given, state=state, top_k=3)),
        ("another top_k, key_update or gate", lambda: call("slots", {**given, "gate": None}, state=state)),
        ("read with another; flush", lambda: flush(plain, rule=regard.WriteRule())),
        ("read with another; flush", lambda: flush(state, rule=regard.WriteRule(key_update="mse"))),
    ):
        refuses(words, wrong)
