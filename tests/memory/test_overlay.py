"""The sparse store of memories' values: every number against dense float64 torch that is written here, random
operations on both stores, and how a store keeps what was written."""

import copy
import pickle
from typing import Any

import pytest
import torch
from dense_fast_weights import close
from dense_fast_weights import numbers as drawn
from mistakes import refuses
from operators import Allocations
from store_programs import SELECTED, SLOTS, TOKENS, WIDTH, Program, dense_read, dense_write, picks
from torch import Tensor

from regard.memory.fast_weights import WriteRule, fast_weight_memory
from regard.memory.stores.overlay import OverlayValues
from regard.memory.stores.slot_values import DenseValues

SOME: dict[str, bool] = {"allow_unused": True, "materialize_grads": True}


class Chunks:
    """Random chunks of reads and writes."""

    def __init__(self, memories: int = 2, count: int = 3, tokens: int = 7, selected: int = 3, slots: int = 12) -> None:
        sizes = (memories, tokens, selected)
        self.slots = [picks(*sizes, slots, seed=c) for c in range(count)]
        self.weights = [drawn(*sizes, seed=10 + c).softmax(-1).requires_grad_() for c in range(count)]
        self.shares = [drawn(*sizes, seed=20 + c).requires_grad_() for c in range(count)]
        self.values = [drawn(memories, tokens, 5, seed=30 + c).requires_grad_() for c in range(count)]
        draws = (torch.Generator().manual_seed(c) for c in range(count))
        self.counted = [torch.rand(memories, tokens, generator=draw) < 0.8 for draw in draws]
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
    wanted = torch.autograd.grad(chunks.dense()[0].square().sum(), chunks.leaves[:-1], **SOME)
    found, _ = chunks.sparse()
    loss = found.square().sum()
    torch.autograd.grad(loss, chunks.weights[3], retain_graph=True)
    torch.autograd.grad(found[1].sum(), chunks.weights[0], retain_graph=True)
    for _ in range(2):
        close(torch.autograd.grad(loss, chunks.leaves[:-1], retain_graph=True, **SOME), wanted, 1e-11)


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
    assert len([name for size, name in pass_of(3000, wants_base=True) if "zeros_like" in name]) == 1


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
    close(store.dense(), wanted, 1e-11)
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
            table = dense_write(dense_write(chunks.base.expand(1, -1, -1), *args[0]), *args[1])
            leaves = [*chunks.shares[:2], *chunks.values[:2]]
            grads = (torch.autograd.grad(x.square().sum(), leaves, retain_graph=True) for x in (kept.dense(), table))
            close(*grads, 1e-11)


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
    close(out, wanted, 1e-11)
    close(torch.autograd.grad(out.sum(), weights), torch.autograd.grad(wanted.sum(), weights), 1e-11)


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
        close(store.dense(), wanted, 1e-11)
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
    """After 300 chunks of clustered queries it recalls each within 2 % of the squared error of float32."""
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
        given = (question[None, :, None], torch.zeros(1, len(asked), 32), None, keys, base)
        read, _ = fast_weight_memory(*given, **how, state=state, frozen=True)
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
    said = r"create_graph=True .* choose impl='reference'"
    refuses(said, torch.autograd.grad, out.square().sum(), leaf, create_graph=True)


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
    whole = {"base": tensors["base"], "values": tensors["base"][None, 1:]}
    said = r"values \[1, 11, 5\] \(torch.float64\) and base \[12, 5\] .*, expected \[M, N, Dv\] and \[N, Dv\]"
    refuses(said, DenseValues.from_tensors, whole)


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
        close([copied.dense(), after.dense()], [wanted, other], 1e-11)
        close(again.dense(), dense_write(other, *args), 1e-11)
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


@pytest.mark.parametrize("recorded", [True, False], ids=["recorded", "without-gradients"])
@pytest.mark.parametrize("seed", [*range(12), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(12, 40))])
@pytest.mark.parametrize("name", ["reference", "sparse"])
def test_a_random_program_gives_what_plain_tables_give(name: str, seed: int, recorded: bool) -> None:
    program = Program(name, seed, recorded)
    for _ in range(30):
        program.step()
    if recorded:
        program.gradients_agree()


def test_shares_of_zero_leave_no_trace() -> None:
    base = torch.randn(SLOTS, WIDTH, dtype=torch.float64, requires_grad=True)
    nothing = torch.zeros(2, TOKENS, SELECTED, dtype=torch.float64, requires_grad=True)
    ones = torch.ones(2, TOKENS, WIDTH, dtype=torch.float64)
    args = (picks(2, TOKENS, SELECTED, SLOTS, 0), nothing, ones, ones[..., 0] > 0)
    store = OverlayValues.start(base, 2)
    assert store.write(*args).written().tolist() == [0, 0]
    with torch.no_grad():
        assert OverlayValues.start(base, 2).write(*args).pool.bytes == 0
    held = store.pool.bytes
    store.select(torch.tensor([1, 1, 0])).repeat(2)
    assert store.pool.bytes == held
