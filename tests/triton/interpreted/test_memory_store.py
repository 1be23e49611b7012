"""Tables of values that kernels write in place, in Triton's interpreter: every version stays what it was, and gradients
go through all of them, against float64 sums over entries."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from memory_calls import drawn, gap, written_by_hand
from torch import Tensor

from regard.checks import ArgumentError
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


def test_every_version_stays_what_it_was() -> None:
    """Read in any order, two that go on from one included; and all without a table of their own."""
    chunks = Chunks(rows=40)
    start = TableValues.start(chunks.base, 2)
    a = start.write(*chunks.of(0))
    b = a.write(*chunks.of(1))
    c = b.write(*chunks.of(2))
    fork = a.write(*chunks.of(2))
    versions = {start: (), a: (0,), b: (0, 1), c: (0, 1, 2), fork: (0, 2)}
    for order in (versions, reversed(versions), [b, fork, b, start, c, a]):
        for store in order:
            assert gap(store.dense(), chunks.after(*versions[store])) < 1e-6
    assert len({x.version.table.data_ptr() for x in (a, b, c, fork)}) == 1
    assert torch.equal(chunks.base, drawn(40, 3))
    again = fork.write(*chunks.of(1))
    assert gap(c.read(chunks.shares[0], chunks.slots[0]), read_by_hand(chunks, chunks.after(0, 1, 2))) < 1e-6
    assert gap(again.dense(), chunks.after(0, 2, 1)) < 1e-6


def read_by_hand(chunks: Chunks, table: Tensor) -> Tensor:
    rows = torch.stack([table[m][chunks.slots[0, m]] for m in range(2)])
    return (chunks.shares[0].double()[..., None] * rows).sum(-2)


WAYS: dict[str, tuple[Callable[[Any], Any], Callable[[Tensor, Tensor], Tensor]]] = {
    "clone": (lambda x: x.clone(), lambda t, base: t),
    "detach": (lambda x: x.detach(), lambda t, base: t.detach()),
    "one detached": (
        lambda x: x.detach(torch.tensor([True, False])), lambda t, base: torch.stack([t[0].detach(), t[1]])
    ),
    "turned": (lambda x: x.select(torch.tensor([1, 0])), lambda t, base: t.flip(0)),
    "twice the second": (lambda x: x.select(torch.tensor([1, 1])), lambda t, base: t[[1, 1]]),
    "chosen and repeated": (
        lambda x: x.select(torch.tensor([False, True])).repeat(2), lambda t, base: t[[1, 1]]
    ),
    "reset": (lambda x: x.reset(torch.tensor([False, True])), lambda t, base: torch.stack([t[0], base])),
}  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
def test_what_becomes_of_a_store_and_its_gradients(way: str) -> None:
    """Against autograd of sums over one-hot entries."""
    chunks = Chunks(2)
    own, plain = WAYS[way]
    leaves = [chunks.base, chunks.shares, chunks.errors]
    mine, wide = ([x.to(t).requires_grad_() for x in leaves] for t in (torch.float32, torch.float64))
    store = TableValues.start(mine[0], 2)
    tables = wide[0].expand(2, -1, -1)
    for i in range(2):
        store = store.write(chunks.slots[i], mine[1][i], mine[2][i], chunks.counted)
        hits = torch.nn.functional.one_hot(chunks.slots[i], 8).double()  # [2, 4, 2, N]
        moved = torch.einsum("mpj,mpjn,mpd->mnd", wide[1][i], hits, wide[2][i])
        tables = tables - moved / hits.sum((1, 2)).clamp(min=1)[..., None]
        if i == 0:
            store, tables = own(store), plain(tables, wide[0])
    rows = torch.einsum("mpjn,mnd->mpjd", torch.nn.functional.one_hot(chunks.slots[0], 8).double(), tables)
    outs = [store.read(mine[1][0], chunks.slots[0]), store.dense(), store.rows(chunks.slots[0])]
    wanted = [(wide[1][0][..., None] * rows).sum(-2), tables, rows]
    factors = [drawn(*x.shape, seed=30 + i) for i, x in enumerate(wanted)]
    for a, b in zip(outs, wanted, strict=True):
        assert gap(a.detach(), b.detach()) < 1e-6
    losses = (sum((x * f).sum() for x, f in zip(xs, factors, strict=True)) for xs in (outs, wanted))
    some = {"materialize_grads": True, "allow_unused": True}
    grads = (torch.autograd.grad(loss, x, **some) for loss, x in zip(losses, (mine, wide), strict=True))
    for a, b in zip(*grads, strict=True):
        assert float((a - b).abs().max()) < 1e-5 * (1 + float(b.abs().max()))


def test_a_backward_pass_after_others_have_gone_on() -> None:
    """It goes back through the versions and leaves all of them as they were; a second one gives the same."""
    chunks = Chunks()
    shares = chunks.shares[0].clone().requires_grad_()
    store = TableValues.start(chunks.base, 2).write(chunks.slots[0], shares, *chunks.of(0)[2:])
    read = store.read(shares, chunks.slots[0])
    later = store.detach().write(*chunks.of(1)).write(*chunks.of(2))
    first = torch.autograd.grad(read.square().sum(), shares, retain_graph=True)[0]
    assert gap(later.dense(), chunks.after(0, 1, 2)) < 1e-6
    assert torch.equal(torch.autograd.grad(read.square().sum(), shares)[0], first)
    assert gap(store.detach().dense(), chunks.after(0)) < 1e-6
    alone = TableValues.start(chunks.base, 2).write(chunks.slots[0], shares, *chunks.of(0)[2:])
    assert torch.equal(torch.autograd.grad(alone.read(shares, chunks.slots[0]).square().sum(), shares)[0], first)


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
    with pytest.raises(ArgumentError, match="from_tensors"):
        TableValues.from_tensors({"values": chunks.base})
