"""What a memory of fast weights gives hangs on the stream alone: not on calls, padding, neighbours or the future."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from dense_fast_weights import Dense, stream
from torch import Tensor

import regard
from regard.checks import ArgumentError
from regard.memory.fast_weights import FastWeightState, flush

IMPLS = ("reference", "auto")
Given = tuple[Tensor, Tensor, Tensor]
HEADS, N, TOP_K, CHUNK = 2, 6, 4, 5


def draw(rows: int, tokens: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Given:
    """query [rows, tokens, 2, 6], value [rows, tokens, 4], gate [rows, tokens]."""
    make = torch.Generator().manual_seed(seed)
    shapes = ((rows, tokens, HEADS, 6), (rows, tokens, 4), (rows, tokens))
    query, value, gate = (torch.randn(s, generator=make, dtype=torch.float64).to(dtype) for s in shapes)
    return query, value, gate.sigmoid()


def memory(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    make = torch.Generator().manual_seed(99)
    keys, values = (torch.randn(s, generator=make, dtype=torch.float64) for s in ((HEADS, 2, N, 3), (N * N, 4)))
    return keys.to(dtype), values.to(dtype)


def call(given: Given, **how: Any) -> tuple[Tensor, FastWeightState]:
    options = {"rule": regard.WriteRule(address_weight=0.3), "top_k": TOP_K, "chunk_size": CHUNK, **how}
    return regard.fast_weight_memory(*given, *memory(given[0].dtype), **options)


def pieces(given: Given, cuts: list[int], **how: Any) -> tuple[Tensor, FastWeightState]:
    """The stream, given in calls of so many tokens."""
    state, out = how.pop("state", None), []
    for part in zip(*(x.split(cuts, 1) for x in given), strict=True):
        read, state = call(part, state=state, **how)
        out.append(read)
    assert state is not None
    return torch.cat(out, 1), state


def rows(given: Given, at: int) -> Given:
    return tuple(x[at : at + 1] for x in given)  # type: ignore[return-value]


def padded(given: Given, places: list[list[int]], width: int) -> tuple[Given, Tensor]:
    """Row b's tokens in `places[b]` of `width`, NaN in the others, and the mask."""
    mask = torch.zeros(len(places), width, dtype=torch.bool)
    out = tuple(torch.full((len(places), width, *x.shape[2:]), torch.nan, dtype=x.dtype) for x in given)
    for b, place in enumerate(places):
        mask[b, place] = True
        for full, x in zip(out, given, strict=True):
            full[b, place] = x[b, : len(place)]
    return out, mask  # type: ignore[return-value]


def near(a: FastWeightState, b: FastWeightState, tolerance: float, rows: Any = slice(None)) -> bool:
    """The same memories, of `rows` of the first."""
    keys = (a.keys[rows] - b.keys).abs().max()
    return bool(torch.maximum(keys, (a.values.dense()[rows] - b.values.dense()).abs().max()) < tolerance)


def random_cuts(total: int, seed: int, most: int) -> list[int]:
    make, cuts = torch.Generator().manual_seed(seed), []
    while sum(cuts) < total:
        cuts.append(min(total - sum(cuts), int(torch.randint(1, most, (), generator=make))))
    return cuts


# Calls ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("shared", [False, True], ids=["own", "shared"])
@pytest.mark.parametrize("step", ["normalized", "paper", "reference"])
def test_any_way_of_cutting_gives_the_same(step: str, shared: bool, impl: str) -> None:
    given = draw(3, 41)
    how = {"rule": regard.WriteRule(step, learning_rate=0.5, address_weight=0.3), "shared": shared, "impl": impl}
    whole, state = call(given, **how)
    for cuts in ([1] * 41, [4, 37], [5, 36], [6, 35], [5, 1, 5, 30], random_cuts(41, 1, 9), random_cuts(41, 2, 4)):
        out, after = pieces(given, cuts, **how)
        assert (out - whole).abs().max() < 1e-11
        assert near(after, state, 1e-11)
        assert near(flush(after, **how), flush(state, **how), 1e-11)
        assert after.seen == state.seen == (41, 41, 41)
        assert after.tokens == 41


@pytest.mark.parametrize("impl", IMPLS)
def test_long_float32_streams_agree_to_1e5(impl: str) -> None:
    """2048 tokens in chunks of 64, whole and in calls of 1, 63, 64, 65 and any number of tokens."""
    make = torch.Generator().manual_seed(7)
    query, value = torch.randn(1, 2048, 1, 32, generator=make), torch.randn(1, 2048, 16, generator=make)
    gate = torch.rand(1, 2048, generator=make)
    keys, values = torch.randn(1, 2, 16, 16, generator=make), torch.randn(256, 16, generator=make) / 4
    states, outs = [], []
    for cuts in ([2048], [1] * 2048, [63] * 32 + [32], [64] * 32, [65] * 31 + [33], random_cuts(2048, 3, 200)):
        state, out = None, []
        for part in zip(query.split(cuts, 1), value.split(cuts, 1), gate.split(cuts, 1), strict=True):
            with torch.no_grad():
                read, state = regard.fast_weight_memory(*part, keys, values, chunk_size=64, state=state, impl=impl)
            out.append(read)
        outs.append(torch.cat(out, 1))
        states.append(state)
    for out, state in zip(outs[1:], states[1:], strict=True):
        assert (out - outs[0]).abs().max() < 1e-5
        assert near(state, states[0], 1e-5)
    assert (states[0].values.dense()[0] - values).abs().max() > 1


def test_the_chunk_may_change_between_calls() -> None:
    """From 5 to 3: four tokens wait, more than a chunk, and are written when the next one is there."""
    given, (keys, values) = draw(1, 17), memory()
    first, then = (tuple(x.split([9, 8], 1)[i] for x in given) for i in (0, 1))
    out, state = call(first)
    assert state.waiting.counts == (4,)
    again, state = call(then, state=state, chunk_size=3)
    oracle = Dense(keys, values, TOP_K, address=0.3)
    q, v, g = given
    expected = []
    for a, b in ((0, 5), (5, 9), (9, 12), (12, 15), (15, 17)):
        if a:
            last = slice({5: 0, 9: 5, 12: 9, 15: 12}[a], a)
            oracle.write(q[:, last], v[:, last], g[:, last], v[:, a])
        expected.append(oracle.read(q[:, a:b]))
    assert (torch.cat([out, again], 1) - torch.cat(expected, 1)).abs().max() < 1e-11
    assert state.waiting.counts == (2,)


def test_a_chunk_larger_than_the_stream_writes_at_the_flush() -> None:
    given, (keys, values) = draw(2, 12), memory()
    out, state = call(given, chunk_size=10**8)
    assert state.values.written().tolist() == [0, 0]
    oracle = Dense(keys, values, TOP_K, address=0.3)
    assert (out[1:] - oracle.read(given[0][1:])).abs().max() < 1e-12
    oracle.write(*rows(given, 1), None)
    after = flush(state, rule=regard.WriteRule(address_weight=0.3))
    assert (after.values.dense()[1] - oracle.values).abs().max() < 1e-11
    assert after.waiting.counts == (0, 0)


def test_large_chunks_are_read_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    given = draw(2, 23)
    whole = call(given, chunk_size=20)
    monkeypatch.setattr("regard.memory.slot_memory.BLOCK", 6)
    monkeypatch.setattr("regard.memory.fast_weight_rules.BLOCK", 4)
    for key_update in ("entropy", "mse"):
        rule = regard.WriteRule(address_weight=0.3, key_update=key_update)
        blocks = call(given, chunk_size=20, rule=rule)
        if key_update == "entropy":
            assert (blocks[0] - whole[0]).abs().max() < 1e-12
            assert near(blocks[1], whole[1], 1e-12)
        monkeypatch.undo()
        assert near(call(given, chunk_size=20, rule=rule)[1], blocks[1], 1e-12)
        monkeypatch.setattr("regard.memory.fast_weight_rules.BLOCK", 4)


# The future -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shared", [False, True], ids=["own", "shared"])
def test_a_token_changes_nothing_before_it(shared: bool) -> None:
    given = draw(2, 18)
    whole, _ = call(given, shared=shared)
    for t in range(18):
        changed = tuple(x.clone() for x in given)
        for x in changed:
            x[0, t:] += 1.0
        out, _ = call(changed, shared=shared)  # type: ignore[arg-type]
        assert torch.equal(out[:, :t], whole[:, :t])
        assert not torch.equal(out[0, t:], whole[0, t:])


def test_a_target_is_learned_when_it_is_there() -> None:
    """The value of token 5, the first after a chunk of 5, is in the memory that token 5 reads, and in none before."""
    given = draw(1, 7)
    changed = tuple(x.clone() for x in given)
    changed[1][0, 5] += 1.0
    outs = [call(x)[0] for x in (given, changed)]
    assert torch.equal(outs[0][:, :5], outs[1][:, :5])
    assert not torch.equal(outs[0][:, 5], outs[1][:, 5])
    _, state = call(tuple(x[:, :5] for x in given))  # type: ignore[arg-type]
    assert state.values.written().tolist() == [0]


# Rows -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("impl", IMPLS)
def test_rows_know_nothing_of_each_other(impl: str) -> None:
    given = draw(4, 23)
    whole, state = call(given, impl=impl)
    for b in range(4):
        alone, own = call(rows(given, b), impl=impl)
        assert (whole[b : b + 1] - alone).abs().max() < 1e-11
        assert near(state, own, 1e-11, slice(b, b + 1))
    turned, after = call(tuple(x.flip(0) for x in given), impl=impl)  # type: ignore[arg-type]
    assert (turned.flip(0) - whole).abs().max() < 1e-11
    assert near(after, state, 1e-11, torch.tensor([3, 2, 1, 0]))


LENGTHS = (17, 9, 0, 12)
PLACES = {
    "right": [list(range(n)) for n in LENGTHS],
    "left": [list(range(20 - n, 20)) for n in LENGTHS],
    "middle": [sorted(torch.randperm(20, generator=torch.Generator().manual_seed(n))[:n].tolist()) for n in LENGTHS],
}


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("where", PLACES)
def test_padding_is_as_if_removed(where: str, impl: str) -> None:
    """NaN stands in the padding, and the rows go on afterwards with padding elsewhere."""
    given = draw(4, 20)
    first, mask = padded(given, PLACES[where], 20)
    out, state = call(first, mask=mask, impl=impl)
    more = draw(4, 11, seed=5)
    later = [list(range(b, 11 - b)) for b in range(4)]
    second, second_mask = padded(more, later, 11)
    again, after = call(second, mask=second_mask, state=state, impl=impl)
    assert out[~mask].abs().max() == again[~second_mask].abs().max() == 0
    for b, length in enumerate(LENGTHS):
        kept = tuple(x[:, :length] for x in rows(given, b))
        own, one = call(kept, impl=impl)  # type: ignore[arg-type]
        assert length == 0 or (out[b, PLACES[where][b]] - own[0]).abs().max() < 1e-11
        assert near(state, one, 1e-11, slice(b, b + 1))
        assert state.seen[b] == length
        tail = tuple(x[:, : len(later[b])] for x in rows(more, b))
        own, one = call(tail, state=one, impl=impl)  # type: ignore[arg-type]
        assert (again[b, later[b]] - own[0]).abs().max() < 1e-11
        assert near(after, one, 1e-11, slice(b, b + 1))
        assert near(
            flush(after, rule=regard.WriteRule(address_weight=0.3)),
            flush(one, rule=regard.WriteRule(address_weight=0.3)),
            1e-11,
            slice(b, b + 1),
        )


def test_an_open_mask_changes_no_bit() -> None:
    given = draw(3, 17)
    assert torch.equal(call(given, mask=torch.ones(3, 17, dtype=torch.bool))[0], call(given)[0])


def test_gradients_of_padding_are_zero() -> None:
    given = draw(2, 20)
    (query, value, gate), mask = padded(given, [list(range(3, 17)), list(range(9))], 20)
    leaves = [x.requires_grad_() for x in (query, value, gate)]
    out, _ = call(tuple(leaves), mask=mask)  # type: ignore[arg-type]
    out.square().sum().backward()
    for x in leaves:
        assert x.grad.isfinite().all()
        assert x.grad[~mask].abs().max() == 0
        assert x.grad[mask].abs().max() > 0


def test_shared_columns_are_counted_where_any_row_is_real() -> None:
    """Two columns of padding in all rows are as if removed; a row that ends early writes and counts no more."""
    given = draw(2, 12)
    keep = [0, 1, 2, 4, 5, 6, 7, 8, 9, 11, 12, 13]  # columns 3 and 10 are padding
    (query, value, gate), mask = padded(given, [keep, keep], 14)
    mask[1, 9:] = False
    value[1, 9:] = torch.nan
    out, state = call((query, value, gate), mask=mask, shared=True)
    short = [x.clone() for x in given]
    real = torch.ones(2, 12, dtype=torch.bool)
    real[1, 8:] = False  # of the columns kept, those before place 9
    expected, own = call(tuple(short), mask=real, shared=True)  # type: ignore[arg-type]
    assert (out[:, keep] - expected).abs().max() < 1e-12
    assert near(state, own, 1e-12)
    assert state.waiting.counts == (2,)
    keys, values = memory()
    oracle = SharedOracle(keys, values)
    assert (expected - oracle.run(*given, real)).abs().max() < 1e-11
    assert (state.values.dense()[0] - oracle.memory.values).abs().max() < 1e-11
    assert (state.keys[0] - oracle.memory.keys).abs().max() < 1e-11


class SharedOracle:
    """A shared memory of rows of which some end, token by token: keeps the list of all tokens of a chunk."""

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        self.memory = Dense(keys, values, TOP_K, address=0.3)

    def run(self, query: Tensor, value: Tensor, gate: Tensor, real: Tensor) -> Tensor:
        out = torch.zeros_like(value)
        for start in range(0, query.shape[1], CHUNK):
            if start:
                self.write(query, value, gate, real, range(start - CHUNK, start))
            span = slice(start, start + CHUNK)
            out[:, span] = torch.where(real[:, span, None], self.memory.read(query[:, span]), 0)
        return out

    def write(self, query: Tensor, value: Tensor, gate: Tensor, real: Tensor, columns: range) -> None:
        """One chunk as rows of one token each; a token without a target in its row has gate 0 and its own value."""
        tokens = [(b, t) for b in range(len(query)) for t in columns if real[b, t]]
        has = [t + 1 < query.shape[1] and bool(real[b, t + 1]) for b, t in tokens]
        pick = lambda x, shift=0: torch.stack([x[b, t + shift * h] for (b, t), h in zip(tokens, has, strict=True)])  # noqa: E731
        weigh = pick(gate) * torch.tensor(has, dtype=torch.float64)
        self.memory.look_ahead = False
        self.memory.write(pick(query)[:, None], pick(value, 1)[:, None], weigh[:, None], None)


# Documents ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("hidden", [False, True], ids=["whole", "padded"])
def test_packed_documents_are_sequences_of_their_own(hidden: bool, impl: str) -> None:
    """The first goes on from the state, the last leaves it."""
    before, given = draw(2, 8, seed=3), draw(2, 30)
    ids = torch.tensor([[0] * 7 + [1] * 12 + [2] * 11, [5] * 30])
    mask = torch.ones(2, 30, dtype=torch.bool)
    if hidden:
        mask[0, 5:9] = mask[1, ::4] = False
    _, state = call(before, impl=impl)
    out, after = call(given, state=state, segment_ids=ids, mask=mask, impl=impl)
    for b, parts in enumerate([[range(7), range(7, 19), range(19, 30)], [range(30)]]):
        own: FastWeightState | None = call(rows(before, b), impl=impl)[1]
        for part in parts:
            real = [t for t in part if mask[b, t]]
            read, own = call(tuple(x[:, real] for x in rows(given, b)), state=own, impl=impl)  # type: ignore[arg-type]
            assert (out[b, real] - read[0]).abs().max() < 1e-11
            last, own = own, None
        assert near(after, last, 1e-11, slice(b, b + 1))
        assert after.waiting.counts[b] == last.waiting.counts[0]
        assert after.seen[b] == 8 + int(mask[b].sum())
    if hidden:
        assert out[~mask].abs().max() == 0


def test_one_row_of_ids_serves_all() -> None:
    given, ids = draw(2, 12), torch.arange(12)[None] // 6
    assert torch.equal(call(given, segment_ids=ids)[0], call(given, segment_ids=ids.expand(2, 12))[0])
    with pytest.raises(ArgumentError, match="memory per document"):
        call(given, segment_ids=ids, shared=True)


# Tokens that are not finite -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shared", [False, True], ids=["own", "shared"])
@pytest.mark.parametrize("part", [0, 1, 2], ids=["query", "value", "gate"])
def test_a_token_that_is_not_finite_takes_no_part(part: int, shared: bool) -> None:
    """It keeps its place in the chunk, reads 0, and what was before it is bound to what comes after."""
    given = draw(1, 17)
    spoilt = [x.clone() for x in given]
    spoilt[part][0, 3] = torch.nan
    spoilt[part][0, 9] = torch.inf
    leaves = [x.requires_grad_() for x in spoilt]
    out, state = call(tuple(leaves), shared=shared)  # type: ignore[arg-type]
    assert out[0, [3, 9]].abs().max() == 0
    assert out.isfinite().all()
    keys, values = memory()
    oracle = Dense(keys, values, TOP_K, address=0.3)
    query, value, gate = given
    first, second = [0, 1, 2, 4], [5, 6, 7, 8]  # token 8 is bound to 10, which is not there when its chunk is written
    oracle.write(query[:, first], value[:, first], gate[:, first], value[:, 5])
    oracle.write(query[:, second], value[:, second], gate[:, second], value[:, 10])
    assert (out[:, 10:15] - oracle.read(query[:, 10:15])).abs().max() < 1e-11
    out.square().sum().backward()
    for x in leaves:
        assert x.grad[:, [3, 9]].abs().max() == 0
        assert x.grad.isfinite().all()
    assert state.seen == (17,)


# Freezing -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("hidden", [False, True], ids=["whole", "padded"])
def test_a_frozen_memory_stays_as_it_is(hidden: bool, impl: str) -> None:
    given, new = draw(2, 13), draw(2, 30, seed=4)
    _, state = call(given, impl=impl)
    held = {name: x.clone() for name, x in state.to_tensors().items()}
    mask = torch.rand(2, 30, generator=torch.Generator().manual_seed(1)) < 0.7 if hidden else None
    out, after = call(new, state=state, frozen=True, mask=mask, impl=impl)
    assert after is state
    assert all(torch.equal(x, held[name]) for name, x in after.to_tensors().items())
    for b in range(2):
        expected = Dense(state.keys[b], state.values.dense()[b], TOP_K).read(new[0][b : b + 1])[0]
        real = torch.ones(30, dtype=torch.bool) if mask is None else mask[b]
        assert (out[b] - expected)[real].abs().max() < 1e-11
        assert not real.all() or not hidden
        assert out[b, ~real].abs().sum() == 0


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("shared", [False, True], ids=["own", "shared"])
def test_calls_without_a_real_token(shared: bool, frozen: bool, impl: str) -> None:
    """Only padding, or no position at all: zeros, and a state that goes on as before."""
    _, state = call(draw(2, 8), shared=shared, impl=impl)
    expected, _ = call(draw(2, 6, seed=1), state=state, shared=shared)
    for tokens in (3, 0):
        hidden = tuple(torch.full_like(x, torch.nan) for x in draw(2, tokens))
        for how in ({}, {"state": state}):
            mask, notes = torch.zeros(2, tokens, dtype=torch.bool), Notes()
            out, after = call(hidden, mask=mask, shared=shared, frozen=frozen, observer=notes, impl=impl, **how)  # type: ignore[arg-type]
            assert out.shape == (2, tokens, 4)
            assert not out.any()
            assert not notes.reads
        assert torch.equal(call(draw(2, 6, seed=1), state=after, shared=shared)[0], expected)
    none = call(tuple(x[:, :0] for x in draw(2, 1)), frozen=frozen, shared=shared, impl=impl)[0]  # type: ignore[arg-type]
    assert none.shape == (2, 0, 4)


def test_a_frozen_call_compiles_whole() -> None:
    given, (keys, values) = draw(2, 9, dtype=torch.float32), memory(torch.float32)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def read(query: Tensor, value: Tensor, gate: Tensor) -> Tensor:
        return regard.fast_weight_memory(query, value, gate, keys, values, top_k=TOP_K, frozen=True, impl="reference")[
            0
        ]

    expected = Dense(keys.double(), values.double(), TOP_K).read(given[0].double())
    assert (read(*given) - expected).abs().max() < 1e-5


# Who looks on ---------------------------------------------------------------------------------------------------------


class Notes:
    """All that an observer is told, as rows of (row, position, target or -1, slots)."""

    def __init__(self) -> None:
        self.reads: list[tuple[int, int, tuple[int, ...]]] = []
        self.writes: list[tuple[int, int, int, float]] = []

    def on_read(self, slots: Tensor, weights: Tensor, position: Tensor, valid: Tensor, row: Tensor) -> None:
        assert not weights.requires_grad
        for m, p in valid.nonzero().tolist():
            self.reads.append((int(row[m, p]), int(position[m, p]), tuple(slots[m, p].tolist())))
            assert abs(float(weights[m, p].sum()) - 1) < 1e-6

    def on_write(
        self, slots: Tensor, shares: Tensor, position: Tensor, target: Tensor, written: Tensor, row: Tensor
    ) -> None:
        assert not shares.requires_grad
        for m, p in written.nonzero().tolist():
            self.writes.append((int(row[m, p]), int(position[m, p]), int(target[m, p]), float(shares[m, p].sum())))


@pytest.mark.parametrize("shared", [False, True], ids=["own", "shared"])
def test_observers_hear_of_every_token_once(shared: bool) -> None:
    given, notes = draw(2, 14), Notes()
    given[0].requires_grad_()
    rule = regard.WriteRule("paper")
    first, mask = padded(given, [list(range(2, 14)), list(range(9))], 14)
    _, state = call(first, mask=mask, observer=notes, rule=rule, shared=shared)
    _, state = call(draw(2, 4, seed=8), state=state, observer=notes, rule=rule, shared=shared)
    flush(state, rule=rule, observer=notes)
    assert sorted(x[:2] for x in notes.reads) == [(0, t) for t in range(16)] + [(1, t) for t in range(13)]
    heard = sorted(x[:3] for x in notes.writes)
    borders = [(0, 15), (1, 12)]
    pairs = [(b, t, t + 1) for b, last in borders for t in range(last)]
    if shared:  # row 1's ninth token has no next one when its chunk of columns is written
        pairs.remove((1, 8, 9))
    assert heard == pairs
    gates = {(b, t): float(given[2][b, t]) for b, count in ((0, 12), (1, 9)) for t in range(count)}
    for row, place, _, share in notes.writes:
        if (row, place) in gates:
            assert abs(share - gates[row, place]) < 1e-9


def test_observers_hear_rows_of_the_batch_for_packed_documents() -> None:
    given, notes = draw(2, 12), Notes()
    ids = torch.tensor([[0] * 5 + [1] * 7, [0] * 12])
    call(given, segment_ids=ids, observer=notes)
    assert sorted(x[:2] for x in notes.reads) == [(b, t) for b in range(2) for t in range(12)]
    assert (0, 4, 5) not in [x[:3] for x in notes.writes]
    assert {x[0] for x in notes.writes} == {0, 1}


def test_the_oracle_of_whole_streams_is_the_stream_of_rows() -> None:
    """Two oracles of this folder agree: rows of a shared memory as one, and token by token."""
    given, (keys, values) = draw(2, 15), memory()
    dense = stream(Dense(keys, values, TOP_K, address=0.3), *given, CHUNK)
    tokens = SharedOracle(keys, values).run(*given, torch.ones(2, 15, dtype=torch.bool))
    assert (dense - tokens).abs().max() < 1e-12
