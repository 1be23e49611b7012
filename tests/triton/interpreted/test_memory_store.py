"""Tables of values that kernels write in place, in Triton's interpreter: every version stays what it was, and gradients
go through all of them, against float64 sums over entries."""

import copy

import pytest
import torch
from attention_calls import some
from memory_calls import drawn, gap, written_by_hand
from mistakes import refuses
from store_programs import Program
from torch import Tensor

from regard.triton.memory.values import TableValues
from regard.triton.memory.versions import Version

pytestmark = pytest.mark.usefixtures("poisoned")


class Chunks:
    """Writes of a store, and the tables after each of them by hand."""

    def __init__(self, number: int = 3, rows: int = 8, width: int = 3) -> None:
        self.base = drawn(rows, width)
        self.slots = torch.randint(0, rows, (number, 2, 4, 2), generator=torch.Generator().manual_seed(1))
        self.shares, self.errors = drawn(number, 2, 4, 2, seed=2), drawn(number, 2, 4, width, seed=3)
        self.counted = torch.ones(2, 4, dtype=torch.bool)

    def of(self, i: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.slots[i], self.shares[i], self.errors[i], self.counted

    def after(self, *writes: int) -> Tensor:
        table = self.base.expand(2, -1, -1)
        for i in writes:
            table = written_by_hand(table, *self.of(i))
        return table.double()


@pytest.mark.parametrize("recorded", [True, False], ids=["recorded", "without-gradients"])
@pytest.mark.parametrize("seed", some(range(8), range(3)))
def test_a_random_program_gives_what_plain_tables_give(seed: int, recorded: bool) -> None:
    """Stores stay what they were, whatever is written from them or made of them. Logs of up to two writes are shorter
    than the table."""
    program = Program("triton", seed, recorded, slots=40)
    for _ in range(30):
        program.step()
    if recorded:
        program.gradients_agree()


def test_versions_share_a_table_and_a_backward_pass_leaves_them_as_they_were() -> None:
    """One that comes after others have gone on; a second one gives the same."""
    chunks = Chunks(rows=40)
    shares = chunks.shares[0].clone().requires_grad_()
    store = TableValues.start(chunks.base, 2).write(chunks.slots[0], shares, *chunks.of(0)[2:])
    read = store.read(shares, chunks.slots[0])
    later = store.detach().write(*chunks.of(1)).write(*chunks.of(2))
    fork = store.detach().write(*chunks.of(2))
    first = torch.autograd.grad(read.square().sum(), shares, retain_graph=True)[0]
    copied = store.clone().read(shares, chunks.slots[0])
    assert gap(torch.autograd.grad(copied.square().sum(), shares, retain_graph=True)[0], first) < 1e-6
    assert torch.equal(torch.autograd.grad(read.square().sum(), shares)[0], first)
    for found, writes in ((later, (0, 1, 2)), (store.detach(), (0,)), (fork, (0, 2))):
        assert gap(found.dense(), chunks.after(*writes)) < 1e-6
    assert len({x.version.table.data_ptr() for x in (store, later, fork)}) == 1
    assert torch.equal(chunks.base, drawn(40, 3))


def test_gradients_end_where_memories_are_detached() -> None:
    """Those that are reset after that have gradients of the first values."""
    chunks, first = Chunks(2), torch.tensor([True, False])
    base, shares = chunks.base.clone().requires_grad_(), chunks.shares[0].clone().requires_grad_()
    store = TableValues.start(base, 2).write(chunks.slots[0], shares, *chunks.of(0)[2:])
    slope = torch.autograd.grad(store.detach(first).dense().sum(), shares)[0]
    assert not slope[0].any()
    assert slope[1].any()
    assert not store.detach().dense().requires_grad
    fresh = store.detach().reset(first).dense()
    assert torch.equal(torch.autograd.grad(fresh.sum(), base)[0], torch.ones_like(base))


def test_old_versions_do_not_outgrow_the_table() -> None:
    """One that is kept through many writes gets a table of its own, and the logs between go."""
    chunks = Chunks()
    kept = TableValues.start(chunks.base, 2).write(*chunks.of(0))
    newest = kept
    for i in (1, 2, 0, 1, 2, 0):
        newest = newest.write(*chunks.of(i))
    assert kept.version.table.data_ptr() != newest.version.table.data_ptr()
    assert gap(kept.dense(), chunks.after(0)) < 1e-6
    assert gap(newest.dense(), chunks.after(0, 1, 2, 0, 1, 2, 0)) < 1e-6


def test_a_stream_of_which_nothing_is_kept_copies_no_table(monkeypatch: pytest.MonkeyPatch) -> None:
    settled: list[Version] = []
    monkeypatch.setattr(Version, "settle", settled.append)
    chunks = Chunks()
    store = TableValues.start(chunks.base, 2)
    for i in (0, 1, 2, 0, 1, 2):  # whose logs would fill the table
        store = store.write(*chunks.of(i))
    assert not settled
    assert gap(store.dense(), chunks.after(0, 1, 2, 0, 1, 2)) < 1e-6


def test_files_and_copies() -> None:
    chunks = Chunks(2)
    store = TableValues.start(chunks.base, 2).write(*chunks.of(0))
    back, copied = TableValues.from_tensors(store.to_tensors()), copy.deepcopy(store)
    for other in (back, copied):
        assert gap(other.write(*chunks.of(1)).dense(), chunks.after(0, 1)) < 1e-6
    assert gap(store.dense(), chunks.after(0)) < 1e-6
    touched = (store.dense() != chunks.base).any(-1).sum(1)
    assert torch.equal(store.written(), touched)
    assert store.bytes == 3 * chunks.base.numel() * 4
    refuses("from_tensors", TableValues.from_tensors, {"values": chunks.base})
