"""The sparse store of memories' values: every number against dense float64 torch that is written here."""

import pytest
import torch
from dense_fast_weights import numbers as drawn
from operators import Allocations
from store_programs import agree, dense_read, dense_write, picks
from torch import Tensor

from regard.memory.stores.overlay import OverlayValues


class Chunks:
    """Random chunks of reads and writes."""

    def __init__(self, memories: int = 2, count: int = 3, tokens: int = 7, selected: int = 3, slots: int = 12) -> None:
        sizes = (memories, tokens, selected)
        self.slots = [picks(*sizes, slots, seed=c) for c in range(count)]
        self.weights = [drawn(*sizes, seed=10 + c).softmax(-1).requires_grad_() for c in range(count)]
        self.shares = [drawn(*sizes, seed=20 + c).requires_grad_() for c in range(count)]
        self.values = [drawn(memories, tokens, 5, seed=30 + c).requires_grad_() for c in range(count)]
        self.counted = [
            torch.rand(memories, tokens, generator=torch.Generator().manual_seed(c)) < 0.8 for c in range(count)
        ]
        self.base = drawn(slots, 5, seed=40).requires_grad_()
        self.leaves = [*self.weights, *self.shares, *self.values, self.base]

    def share(self, chunk: int) -> Tensor:
        """Tokens that are not counted write nothing."""
        return torch.where(self.counted[chunk][..., None], self.shares[chunk], 0)

    def write(self, chunk: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The arguments of a write."""
        return self.slots[chunk], self.share(chunk), self.values[chunk], self.counted[chunk]

    def dense(self) -> tuple[Tensor, Tensor]:
        table = self.base.expand(self.slots[0].shape[0], -1, -1)
        reads = []
        for c, slots in enumerate(self.slots):
            reads.append(dense_read(table, self.weights[c], slots))
            table = dense_write(table, slots, self.share(c), reads[-1] - self.values[c], self.counted[c])
        return torch.stack(reads), table

    def sparse(self) -> tuple[Tensor, OverlayValues]:
        store = OverlayValues.start(self.base, self.slots[0].shape[0])
        reads = []
        for c, slots in enumerate(self.slots):
            reads.append(store.read(self.weights[c], slots))
            store = store.write(slots, self.share(c), reads[-1] - self.values[c], self.counted[c])
        return torch.stack(reads), store


def test_gradients_do_not_depend_on_earlier_or_partial_backward_passes() -> None:
    """Of one graph: twice the same, and what a pass that asks for a few inputs left behind does no harm."""
    chunks = Chunks(count=4)
    wanted = torch.autograd.grad(chunks.dense()[0].square().sum(), chunks.leaves[:-1], allow_unused=True)
    found, _ = chunks.sparse()
    loss = found.square().sum()
    torch.autograd.grad(loss, chunks.weights[3], retain_graph=True)
    torch.autograd.grad(found[1].sum(), chunks.weights[0], retain_graph=True)
    for _ in range(2):
        given = torch.autograd.grad(loss, chunks.leaves[:-1], retain_graph=True, allow_unused=True)
        for a, b in zip(given, wanted, strict=True):
            a, b = (torch.zeros(1) if x is None else x for x in (a, b))
            assert torch.allclose(a.double(), b.double(), atol=1e-11)


def pass_of(slots: int, wants_base: bool) -> list[tuple[int, str]]:
    """What a forward and backward pass of four chunks allocates, D = 5; 21 rows a chunk and memory."""
    chunks = Chunks(count=4, slots=slots)
    base = chunks.base if wants_base else chunks.base.detach()
    with Allocations() as seen:
        store, loss = OverlayValues.start(base, 2), 0.0
        for c, at in enumerate(chunks.slots):
            read = store.read(chunks.weights[c], at)
            store = store.write(at, chunks.share(c), read - chunks.values[c], chunks.counted[c])
            loss = loss + read.square().sum()
        loss.backward()
    return [(size, name) for size, name in seen.sizes if size >= slots * 5 and "detach" not in name]


def test_no_table_is_allocated_for_a_chunk() -> None:
    """Nothing of N D numbers forward or backward, but for the gradient of a base that wants one: once, at the end."""
    assert pass_of(3000, wants_base=False) == []
    large = {name.split(".")[1] for _, name in pass_of(3000, wants_base=True)}
    assert large <= {"zeros_like", "empty_like", "zero_", "index_copy_"}
    made = [name for size, name in pass_of(3000, wants_base=True) if "zeros_like" in name]
    assert len(made) == 1


@torch.no_grad()
def test_rows_that_nothing_points_at_go() -> None:
    """A thousand writes to the same slots keep no more rows than a few writes."""
    base = drawn(1000, 4)
    slots = torch.arange(12).view(1, 4, 3)
    counted, wanted = torch.ones(1, 4, dtype=torch.bool), base.clone()[None]
    store = OverlayValues.start(base, 1)
    first = store
    for i in range(1000):
        shares, errors = drawn(1, 4, 3, seed=i).abs() * 0.1, drawn(1, 4, 4, seed=i + 1)
        store = store.write(slots, shares, errors, counted)
        wanted[0, :12] -= (shares[..., None] * errors[:, :, None]).view(12, 4)
        assert store.pool.bytes <= 6 * 12 * 4 * 8
    agree([store.dense()], [wanted])
    assert store.written().tolist() == [12]
    assert torch.equal(first.dense()[0], base)


@pytest.mark.parametrize("recorded", [False, True])
def test_attempts_that_are_given_up_leave_nothing(recorded: bool) -> None:
    """Going on from one kept store again and again; what somebody still holds stays."""
    chunks = Chunks(count=3, memories=1, slots=400)
    with torch.set_grad_enabled(recorded):
        args = [chunks.write(c) for c in range(3)]
        store = OverlayValues.start(chunks.base, 1).write(*args[0])
        kept = store.write(*args[1])
        wanted = kept.dense().detach().clone()
        sizes = []
        for i in range(40):
            attempt = store.write(*args[2])
            for _ in range(i % 3):
                attempt = attempt.write(*args[2])
            sizes.append(store.bytes)
        assert len(set(sizes[10:])) == 1
        assert torch.equal(kept.dense(), wanted)
        if recorded:
            table = chunks.base.expand(1, -1, -1)
            for c in (0, 1):
                table = dense_write(table, *args[c])
            leaves = [*chunks.shares[:2], *chunks.values[:2]]
            agree(
                torch.autograd.grad(kept.dense().square().sum(), leaves, retain_graph=True),
                torch.autograd.grad(table.square().sum(), leaves),
            )


def test_reads_of_what_was_written_compile_whole() -> None:
    chunks = Chunks(count=3)
    with torch.no_grad():
        _, store = chunks.sparse()
    weights = chunks.weights[0].detach().requires_grad_()
    call = lambda w, s: store.read(w, s)  # noqa: E731
    out = torch.compile(call, fullgraph=True, backend="aot_eager")(weights, chunks.slots[0])
    with torch.no_grad():
        table = chunks.dense()[1]
    wanted = dense_read(table, weights, chunks.slots[0])
    agree([out], [wanted])
    agree(torch.autograd.grad(out.sum(), weights), torch.autograd.grad(wanted.sum(), weights))


@pytest.mark.parametrize("recorded", [False, True])
def test_the_same_again_is_the_same_to_the_last_bit(recorded: bool) -> None:
    """Whatever else grew from the store in between, and so wherever the pieces of the pool end."""
    store = OverlayValues.start(drawn(40, 5, dtype=torch.float32), 1)
    counted = torch.ones(1, 4, dtype=torch.bool)

    def go_on(store: OverlayValues, seed: int) -> tuple[Tensor, OverlayValues]:
        reads = []
        for i in range(seed, seed + 6):
            slots, shares = picks(1, 4, 3, 40, seed=i), drawn(1, 4, 3, seed=i, dtype=torch.float32) * 0.3
            reads.append(store.read(shares, slots))
            store = store.write(slots, shares, reads[-1].requires_grad_(recorded), counted)
        return torch.stack(reads), store

    with torch.set_grad_enabled(recorded):
        _, store = go_on(store, 0)
        first, _ = go_on(store, 6)
        for i in range(5):
            go_on(store, 7 * i)
            again, _ = go_on(store, 6)
            assert torch.equal(again, first)
