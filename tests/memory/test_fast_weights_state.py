"""The state of fast-weight product-key memory: beams, copies, files, other processes, and what does not fit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import regard
from regard.checks import ArgumentError
from regard.memory.fast_weights import FastWeightState, flush

IMPLS = ("reference", "auto")
Given = tuple[Tensor, Tensor, Tensor]


def draw(rows: int, tokens: int, seed: int = 0) -> Given:
    """query [rows, tokens, 2, 6], value [rows, tokens, 4], gate [rows, tokens]."""
    make = torch.Generator().manual_seed(seed)
    query, value = (
        torch.randn(s, generator=make, dtype=torch.float64) for s in ((rows, tokens, 2, 6), (rows, tokens, 4))
    )
    return query, value, torch.rand(rows, tokens, generator=make, dtype=torch.float64)


def memory() -> tuple[Tensor, Tensor]:
    make = torch.Generator().manual_seed(99)
    keys, values = (torch.randn(s, generator=make, dtype=torch.float64) for s in ((2, 2, 6, 3), (36, 4)))
    return keys, values


def call(given: Given, **how: Any) -> tuple[Tensor, FastWeightState]:
    options = {"rule": regard.WriteRule(address_weight=0.3), "top_k": 4, "chunk_size": 5, **how}
    return regard.fast_weight_memory(*given, *memory(), **options)


def turned(given: Given, index: Any) -> Given:
    return tuple(x[index] for x in given)  # type: ignore[return-value]


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("uneven", [False, True], ids=["even", "uneven"])
def test_beams(uneven: bool, impl: str) -> None:
    """Rows selected, doubled and dropped go on as those that they were, and each on its own."""
    given, more = draw(3, 8), draw(3, 9, seed=1)
    mask = torch.ones(3, 8, dtype=torch.bool)
    if uneven:
        mask[1, :3] = mask[2, 6:] = False
    _, state = call(given, mask=mask, impl=impl)
    for index in (torch.tensor([2, 2, 0]), torch.tensor([True, False, True])):
        rows = index.nonzero().squeeze(1) if index.dtype == torch.bool else index
        out, after = call(turned(more, slice(0, len(rows))), state=state.select(index), impl=impl)
        for place, row in enumerate(rows.tolist()):
            alone = call(turned(given, slice(row, row + 1)), mask=mask[row : row + 1], impl=impl)[1]
            own, last = call(turned(more, slice(place, place + 1)), state=alone, impl=impl)
            assert (out[place] - own[0]).abs().max() < 1e-11
            assert (after.values.dense()[place] - last.values.dense()[0]).abs().max() < 1e-11
            assert after.seen[place] == last.seen[0]
    twice = state.repeat(2)
    out, _ = call(turned(more, torch.tensor([0, 0, 1, 1, 2, 2])), state=twice, impl=impl)
    assert (out[::2] - call(more, state=state, impl=impl)[0]).abs().max() < 1e-11
    assert torch.equal(out[::2], out[1::2])


def test_the_shorter_rows_of_an_uneven_batch() -> None:
    """Selected alone, they go on evenly, and then with padding again."""
    given, one, more = draw(3, 9), draw(2, 1, seed=1), draw(2, 6, seed=2)
    mask = torch.ones(3, 9, dtype=torch.bool)
    mask[:2, 7:] = False
    _, state = call(given, mask=mask)
    assert state.waiting.counts == (2, 2, 4)
    later = torch.ones(2, 6, dtype=torch.bool)
    later[0, :3] = False
    _, after = call(one, state=state.select(torch.tensor([0, 1])))
    out, after = call(more, state=after, mask=later)
    for row in range(2):
        real = slice(3 - 3 * row, 6)
        _, own = call(tuple(x[row : row + 1, :7] for x in given))  # type: ignore[arg-type]
        _, own = call(turned(one, slice(row, row + 1)), state=own)
        read, own = call(tuple(x[row : row + 1, real] for x in more), state=own)  # type: ignore[arg-type]
        assert (out[row, real] - read[0]).abs().max() < 1e-11
        assert (after.values.dense()[row] - own.values.dense()[0]).abs().max() < 1e-11
        assert after.waiting.counts[row] == own.waiting.counts[0]


@pytest.mark.parametrize("impl", IMPLS)
def test_a_state_does_not_change_when_it_is_used(impl: str) -> None:
    _, state = call(draw(2, 13), impl=impl)
    held = {name: x.clone() for name, x in state.to_tensors().items()}
    copy = state.clone()
    first, _ = call(draw(2, 20, seed=1), state=state, impl=impl)
    second, _ = call(draw(2, 20, seed=2), state=state, impl=impl)
    assert all(torch.equal(x, held[name]) for name, x in state.to_tensors().items())
    assert torch.equal(call(draw(2, 20, seed=1), state=state, impl=impl)[0], first)
    assert torch.equal(call(draw(2, 20, seed=2), state=copy, impl=impl)[0], second)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("shared", [False, True], ids=["own", "shared"])
def test_a_state_from_a_file_goes_on_as_it_was(shared: bool, impl: str, tmp_path: Path) -> None:
    _, state = call(draw(2, 13), impl=impl, shared=shared)
    torch.save(state.to_tensors(), tmp_path / "state.pt")
    back = FastWeightState.from_tensors(torch.load(tmp_path / "state.pt", weights_only=True))
    assert type(back.values) is type(state.values)
    assert (
        (back.seen, back.tokens, back.writes)
        == (state.seen, state.tokens, state.writes)
        == ((13, 13), 13, state.writes)
    )
    more = draw(2, 11, seed=1)
    out, after = call(more, state=back, shared=shared)
    expected, own = call(more, state=state, shared=shared)
    assert torch.equal(out, expected)
    assert torch.equal(after.values.dense(), own.values.dense())
    moved = state.map(lambda x: x.to("cpu", copy=True))
    assert torch.equal(call(more, state=moved, shared=shared)[0], expected)
    assert all(x.is_contiguous() for x in state.to_tensors().values())


def test_files_that_are_none() -> None:
    _, state = call(draw(2, 13))
    tensors = state.to_tensors()
    for name in ("keys", "seen", "store", "waiting.slots"):
        with pytest.raises(ArgumentError, match="from_tensors"):
            FastWeightState.from_tensors({k: v for k, v in tensors.items() if k != name})
    with pytest.raises(ArgumentError, match="unknown tensor 'more'"):
        FastWeightState.from_tensors({**tensors, "more": tensors["keys"]})


@pytest.mark.parametrize("impl", IMPLS)
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
    tensors = call(draw(2, 13), impl=impl)[1].to_tensors()
    with pytest.raises(
        ArgumentError, match=r"from_tensors: .* is \[.*but the other tensors need|from_tensors: keys is"
    ):
        FastWeightState.from_tensors({**tensors, name: cut(tensors[name])})


def test_values_of_another_memory_do_not_fit() -> None:
    tensors, other = (call(draw(rows, 13), impl="reference")[1].to_tensors() for rows in (2, 3))
    values = {name: x for name, x in other.items() if name.startswith("values.")}
    with pytest.raises(ArgumentError, match=r"values is \[3, 36\], but the other tensors need \[2, 36\]"):
        FastWeightState.from_tensors({**tensors, **values})


@pytest.mark.parametrize("impl", IMPLS)
def test_a_memory_begun_anew(impl: str) -> None:
    given = draw(2, 13)
    _, state = call(draw(2, 17, seed=1), impl=impl)
    again = state.reset()
    assert again.values.written().tolist() == [0, 0]
    assert (again.tokens, again.seen, again.waiting.counts, again.writes) == (0, (0, 0), (0, 0), (0, 0))
    assert torch.equal(call(given, state=again)[0], call(given, impl=impl)[0])
    half = state.restart(torch.tensor([True, False]))
    out, _ = call(given, state=half)
    assert (out[0] - call(given, impl=impl)[0][0]).abs().max() < 1e-11
    assert (out[1] - call(given, state=state)[0][1]).abs().max() < 1e-11


def test_memory_is_counted() -> None:
    keys, values = memory()
    _, state = call(draw(2, 5), impl="reference", rule=regard.WriteRule(key_update="none"))
    waiting = 2 * 5 * (2 * 4 * (8 + 8) + 4 * 8 + 4 * 8 + 8 + 8)  # slots and weights, read, value, gate, position
    own = 3 * keys.numel() * 8  # of two memories, and the first
    assert state.bytes == waiting + own + values.numel() * 8
    _, state = call(draw(2, 6), impl="reference")
    assert state.bytes > own + 3 * values.numel() * 8


def test_tokens_that_wait_are_copied_seldom() -> None:
    """Given one by one they are kept in pieces of powers of two, so that each is copied log2 times at most."""
    given, state = draw(2, 44), None
    for t in range(44):
        _, state = call(turned(given, (slice(None), slice(t, t + 1))), state=state, chunk_size=1000)
    assert state is not None
    assert [piece["slots"].shape[1] for piece in state.waiting.pieces] == [32, 8, 4]
    assert torch.equal(state.waiting.tokens()["value"], given[1])


def test_crop_only_to_what_it_is() -> None:
    _, state = call(draw(2, 5))
    assert state.crop(5) is state
    with pytest.raises(ArgumentError, match="cannot go back"):
        state.crop(4)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"top_k": 7}, "top_k is 7"),
        ({"chunk_size": 1}, "chunk_size is 1"),
        ({"chunk_size": 0}, "chunk_size is 0"),
        ({"eps": -1.0}, "eps"),
        ({"score": "cos"}, "unknown slot score 'cos'"),
        ({"meta_grad": 0}, "meta_grad is 0"),
        ({"sync": "all_gather"}, "shared=True"),
        ({"sync": "reduce", "shared": True}, "sync is 'reduce'"),
        ({"impl": "dens"}, "Did you mean 'dense'"),
        ({"storage": torch.int8}, "storage is torch.int8"),
        ({"storage": "bf16"}, "storage is 'bf16'"),
        ({"mask": torch.ones(2, 5)}, "mask has dtype"),
        ({"mask": torch.ones(2, 4, dtype=torch.bool)}, "mask has shape \\[2, 4\\]"),
        ({"segment_ids": torch.zeros(2, 4, dtype=torch.long)}, "segment_ids has shape"),
        ({"spec": "euclid"}, "unknown"),
        ({"state": 3}, "state is a int"),
        ({"sync": "all_gather", "shared": True, "chunk_size": 2}, "init_process_group"),
    ],
)
def test_what_does_not_fit(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        call(draw(2, 5), **change)


def test_tensors_that_do_not_fit() -> None:
    (query, value, gate), (keys, values) = draw(2, 5), memory()
    for given, words in (
        ((query[0], value, gate, keys, values), "query is"),
        ((query, value[:, :4], gate, keys, values), "expected \\[36, Dv\\] and \\[2, 5, Dv\\]"),
        ((query, value, gate[..., None], keys, values), "gate is \\[2, 5, 1\\]"),
        ((query, value, gate, keys[:1], values), "keys is"),
        ((query, value, gate, keys, values[:35]), "values is \\[35, 4\\]"),
        ((query, value.long(), gate, keys, values), "value has dtype"),
    ):
        with pytest.raises(ArgumentError, match=words):
            regard.fast_weight_memory(*given, top_k=4)


def test_states_of_another_memory() -> None:
    given, (keys, values) = draw(2, 7), memory()
    _, state = call(given)
    _, shared = call(given, shared=True)
    with pytest.raises(ArgumentError, match="shared=True"):
        call(given, state=state, shared=True)
    with pytest.raises(ArgumentError, match="give each memory its own state"):
        regard.fast_weight_memory(given[0], given[1][..., :3], given[2], keys, values[:, :3], state=state, top_k=4)
    with pytest.raises(ArgumentError, match="2 sequences, but 3"):
        call(draw(3, 7), state=state)
    with pytest.raises(ArgumentError, match="flush"):
        call(draw(3, 7), state=shared, shared=True)
    with pytest.raises(ArgumentError, match="top_k is 3"):
        call(given, state=state, top_k=3)
    with pytest.raises(ArgumentError, match="another top_k, key_update or gate"):
        call((given[0], given[1], None), state=state)
    with pytest.raises(ArgumentError, match="beam search"):
        shared.select(torch.tensor([1, 0]))
    with pytest.raises(ArgumentError, match="beam search"):
        shared.repeat(2)
    _, plain = call(given, rule=regard.WriteRule(key_update="none"))
    with pytest.raises(ArgumentError, match="read under 'none'"):
        flush(plain, rule=regard.WriteRule())


def test_a_shared_memory_outlives_its_batch() -> None:
    """Once nothing waits, other rows may go on in it."""
    rule = regard.WriteRule(address_weight=0.3)
    _, state = call(draw(2, 7), shared=True)
    out, after = call(draw(3, 4, seed=1), state=flush(state, rule=rule), shared=True)
    assert after.seen == (11, 11, 11)
    assert out.shape == (3, 4, 4)


# Processes ------------------------------------------------------------------------------------------------------------


def work(rank: int, folder: str) -> None:
    """One of two processes, with a row of each batch."""
    from torch import distributed

    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    query, value, gate = draw(2, 17)
    query[1, 4] = torch.nan
    given = tuple(x[rank : rank + 1].clone().requires_grad_() for x in (query, value, gate))
    out, state = call(given, shared=True, sync="all_gather")  # type: ignore[arg-type]
    grads = torch.autograd.grad(out.square().sum(), given)
    state = flush(state, rule=regard.WriteRule(address_weight=0.3), sync="all_gather")
    found = {"out": out, "keys": state.keys, "values": state.values.dense(), "grad": grads[1]}
    torch.save({name: x.detach() for name, x in found.items()}, f"{folder}/{rank}.pt")
    distributed.destroy_process_group()


def test_processes_share_one_memory(tmp_path: Path) -> None:
    """Both hold what one process with the whole batch would, bit for bit the same; gradients of a row reach its own."""
    torch.multiprocessing.spawn(work, (str(tmp_path),), nprocs=2)
    query, value, gate = draw(2, 17)
    query[1, 4] = torch.nan
    out, state = call((query, value, gate), shared=True)
    state = flush(state, rule=regard.WriteRule(address_weight=0.3))
    found = [torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(2)]
    for rank in range(2):
        assert (found[rank]["out"][0] - out[rank]).abs().max() < 1e-12
        assert (found[rank]["keys"] - state.keys).abs().max() < 1e-12
        assert (found[rank]["values"] - state.values.dense()).abs().max() < 1e-12
        assert found[rank]["grad"].abs().max() > 0
    assert torch.equal(found[0]["keys"], found[1]["keys"])
    assert torch.equal(found[0]["values"], found[1]["values"])
