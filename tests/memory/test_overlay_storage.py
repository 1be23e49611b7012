"""How a store keeps what was written: narrow numbers, full tables, copies, tensors."""

import copy
import pickle
from typing import Any

import pytest
import torch
from dense_fast_weights import numbers as drawn
from mistakes import refuses
from store_programs import agree, dense_read, dense_write, picks
from test_overlay import Chunks

from regard.checks import ArgumentError
from regard.memory.fast_weights import WriteRule, fast_weight_memory
from regard.memory.stores.overlay import OverlayValues


@torch.no_grad()
def test_a_memory_that_is_mostly_written_becomes_a_full_table() -> None:
    base = drawn(40, 4)
    store, wanted = OverlayValues.start(base, 2), base.expand(2, -1, -1).clone()
    counted = torch.tensor([[True] * 3, [False] * 3])
    for i in range(9):
        slots = torch.arange(3 * i, 3 * i + 3).view(1, 3, 1).expand(2, 3, 1)
        shares = torch.ones(2, 3, 1, dtype=torch.float64) * counted[..., None]
        store = store.write(slots, shares, drawn(2, 3, 4, seed=i), counted)
        wanted = dense_write(wanted, slots, shares, drawn(2, 3, 4, seed=i), counted)
        agree([store.dense()], [wanted])
    assert store.written().tolist() == [27, 0]
    assert (store.where[0] != -1).all()
    assert (store.where[1] == -1).all()
    again = store.reset(torch.tensor([True, False]))
    assert torch.equal(again.dense()[0], base)
    assert again.written().tolist() == [0, 0]


@pytest.mark.parametrize(("dtype", "atol"), [(torch.float32, 1e-5), (torch.bfloat16, 0.05)])
def test_storage_is_narrow_and_arithmetic_is_not(dtype: torch.dtype, atol: float) -> None:
    """Rounding happens once a write, to the rows that are stored, and to the base when it is read."""
    chunks = Chunks(count=2)
    base = chunks.base.detach().float()
    store = OverlayValues.start(base, 2, dtype)
    table = base.to(dtype).double().expand(2, -1, -1)
    for c, at in enumerate(chunks.slots):
        read = store.read(chunks.weights[c].float(), at)
        assert read.dtype == torch.float32
        torch.testing.assert_close(read.double(), dense_read(table, chunks.weights[c], at), atol=1e-5, rtol=0)
        args = (at, chunks.share(c), chunks.values[c], chunks.counted[c])
        store = store.write(*args)
        table = dense_write(table, *args).to(dtype).double()
        one = 1e-6 if dtype == torch.float32 else 2.0**-6  # a sum may round to the neighbour
        assert (store.dense().double() - table).abs().max() <= one * table.abs().max()
        table = store.dense().double()
    assert store.pool.dtype == dtype
    (grad,) = torch.autograd.grad(store.dense().sum(), chunks.values[1])
    hot = torch.nn.functional.one_hot(chunks.slots[1], 12).double()
    number = torch.einsum("mpkn,mp->mn", hot, chunks.counted[1].double()).clamp(min=1)
    wanted = -torch.einsum("mpkn,mpk,mn->mp", hot, chunks.share(1).detach(), 1 / number)
    torch.testing.assert_close(grad, wanted[..., None].expand_as(grad), atol=atol, rtol=0)


@pytest.mark.parametrize("address", [1.0, 10.0])
@torch.no_grad()
def test_half_as_wide_storage_remembers_as_well(address: float) -> None:
    """300 chunks of a stream whose queries come in clusters: what a memory then recalls of each is, in squared error,
    within 2 % of what float32 recalls."""
    centres, targets = drawn(64, 32, seed=1, dtype=torch.float32), drawn(64, 32, seed=2, dtype=torch.float32)
    keys = drawn(1, 2, 32, 16, seed=3, dtype=torch.float32) * 0.5
    base = drawn(1024, 32, seed=4, dtype=torch.float32) * 32**-0.5
    which = torch.randint(64, (300 * 64 + 1,), generator=torch.Generator().manual_seed(5))
    query = centres[which] + 0.3 * drawn(len(which), 32, seed=6, dtype=torch.float32)
    value = targets[which] + 0.1 * drawn(len(which), 32, seed=7, dtype=torch.float32)
    asked = torch.arange(64).repeat(20)
    question = centres[asked] + 0.3 * drawn(len(asked), 32, seed=8, dtype=torch.float32)
    how: dict[str, Any] = {"rule": WriteRule(address_weight=address, look_ahead=False), "chunk_size": 64}
    errors = []
    for storage in (torch.float32, torch.bfloat16):
        stream = (query[None, :, None], value[None], None, keys, base)
        _, state = fast_weight_memory(*stream, **how, impl="sparse", storage=storage)
        assert state.values.pool.dtype == storage
        nothing = torch.zeros(1, len(asked), 32)
        read, _ = fast_weight_memory(
            question[None, :, None], nothing, None, keys, base, **how, state=state, frozen=True
        )
        errors.append((read[0] - targets[asked]).square().mean().item())
    assert errors[0] < 0.2  # of 1: something was learned
    assert abs(errors[1] / errors[0] - 1) < 0.02


@pytest.mark.parametrize("what", ["read", "rows", "write", "base"])
def test_second_derivatives_are_refused(what: str) -> None:
    chunks = Chunks(count=2)
    store = OverlayValues.start(chunks.base if what == "base" else chunks.base.detach(), 2)
    if what == "base":
        out, leaf = store.rows(chunks.slots[0]), chunks.base
    elif what == "read":
        out, leaf = store.read(chunks.weights[0], chunks.slots[0]), chunks.weights[0]
    else:
        store = store.write(*chunks.write(0))
        ones = torch.ones_like(chunks.weights[0])
        out = store.rows(chunks.slots[0]) if what == "rows" else store.read(ones, chunks.slots[0])
        leaf = chunks.values[0]
    with pytest.raises(ArgumentError, match=r"create_graph=True .* choose impl='reference'"):
        torch.autograd.grad(out.square().sum(), leaf, create_graph=True)


def test_a_base_that_changes_before_the_backward_pass_is_an_error() -> None:
    chunks = Chunks(count=1)
    base = chunks.base.detach().clone()
    read = OverlayValues.start(base, 2).read(chunks.weights[0], chunks.slots[0])
    base.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        read.sum().backward()


@torch.no_grad()
def test_tensors_tell_everything() -> None:
    chunks = Chunks(count=2)
    _, store = chunks.sparse()
    tensors = {name: x.clone() for name, x in store.to_tensors().items()}
    assert sum(x.numel() for x in tensors.values()) <= 12 * 5 + 24 * 5 + 24
    again = OverlayValues.from_tensors(tensors)
    assert torch.equal(again.dense(), store.dense())
    assert torch.equal(again.written(), store.written())
    copied = store.clone().write(*chunks.write(0))
    assert torch.equal(again.dense(), store.dense())
    assert not torch.equal(copied.dense(), store.dense())
    for wrong, said in (
        ({"base": tensors["base"]}, "got base, expected base, rows, where"),
        ({**tensors, "rows": tensors["rows"][:, :2]}, r"rows \[\d+, 2\]"),
        ({**tensors, "rows": tensors["rows"][:3]}, "where points at row"),
        ({**tensors, "where": tensors["where"].long()}, "int64"),
    ):
        refuses(said, OverlayValues.from_tensors, wrong)


@pytest.mark.parametrize("how", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_copies_go_on_by_themselves(how: Any) -> None:
    chunks = Chunks(count=3)
    _, store = chunks.sparse()
    wanted = store.dense().detach().clone()
    copied = how(store)
    args = chunks.write(0)
    with torch.no_grad():
        other = dense_write(wanted, *args)
        after = copied.write(*args)
        store.write(*args)
        del store
        again = copied.write(*args).write(*args)
        agree([copied.dense(), after.dense()], [wanted, other])
        agree([again.dense()], [dense_write(other, *args)])
    base = torch.nn.Parameter(drawn(12, 5))
    both = copy.deepcopy([base, OverlayValues.start(base, 1)])
    with torch.no_grad():
        base.zero_()
    assert torch.equal(both[1].dense()[0], both[0])
    assert both[0].abs().sum() > 0


@torch.no_grad()
def test_a_long_stream_leaves_no_trail() -> None:
    """What is kept of who holds what does not grow with the writes, those that change nothing among them."""
    base, counted = drawn(3000, 2), torch.ones(1, 4, dtype=torch.bool)
    store = OverlayValues.start(base, 1)
    for i in range(300):
        slots = picks(1, 4, 3, 3000, seed=i)
        shares = torch.full((1, 4, 3), float(i % 3 == 0), dtype=torch.float64)
        store = store.write(slots, shares, drawn(1, 4, 2, seed=i), counted)
    assert len(store.pool._holds) == 1
    assert len(store.reach.hold.spans) == 1
    assert store.write(slots, shares * 0, drawn(1, 4, 2), counted) is store


@torch.no_grad()
def test_bytes_count_pointers_pool_and_base() -> None:
    store = OverlayValues.start(drawn(50, 4, dtype=torch.float32), 3)
    before = store.bytes
    assert before == 3 * 50 * 4 + 50 * 4 * 4
    slots, ones = torch.arange(6).view(1, 2, 3).expand(3, 2, 3), torch.ones(3, 2, 3)
    written = store.write(slots, ones, torch.ones(3, 2, 4), torch.ones(3, 2, dtype=torch.bool))
    assert written.bytes == before + 18 * 4 * 4
    assert (written.memories, written.slots, written.width) == (3, 50, 4)
