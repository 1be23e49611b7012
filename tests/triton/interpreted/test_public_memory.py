"""`regard.fast_weight_memory(..., impl="triton")` from outside: streams against a memory of plain sums over every slot
in float64; and what a call promises whatever it computes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import bounds
import pytest
import torch
from dense_oracles import Memory, near, stream
from torch import Tensor

import regard
from regard import nn
from regard.estimators.fast_weights import flush

CHUNK, T = 4, 10
"""Two writes, and two tokens that wait."""


@pytest.fixture(autouse=True)
def no_illegal_access() -> Iterator[None]:
    """Every test here fails where a kernel reads or writes outside of the tensors that it was given."""
    with bounds.watched():
        yield


def draw(
    batch: int = 1, tokens: int = T, heads: int = 1, n: int = 6, half: int = 3, width: int = 7, *, seed: int = 0,
    dtype: torch.dtype = torch.float32, grad: bool = True,
) -> list[Tensor]:  # fmt: skip
    """Query, value, gate, sub-keys and values."""
    make = torch.Generator().manual_seed(seed)
    normal = lambda *size: torch.randn(*size, generator=make)  # noqa: E731
    found = [
        normal(batch, tokens, heads, 2 * half).to(dtype),
        normal(batch, tokens, width).to(dtype),
        torch.rand(batch, tokens, generator=make).to(dtype),
        normal(heads, 2, n, half),
        normal(n * n, width),
    ]
    return [x.requires_grad_(grad) for x in found]


def triton(leaves: list[Tensor], **call: Any) -> tuple[Tensor, Any]:
    return regard.fast_weight_memory(*leaves, impl="triton", **{"top_k": 4, "chunk_size": CHUNK, **call})


def rule(step: str = "normalized", update: str = "entropy") -> regard.WriteRule:
    return regard.WriteRule(step, address_weight=0.5, key_update=update)  # type: ignore[arg-type]


def dense(leaves: list[Tensor], chunk: int = CHUNK, **how: Any) -> Tensor:
    """Every row of the batch with a memory of its own."""
    query, value, gate, keys, values = leaves
    rows = zip(query, value, gate, strict=True)
    return torch.stack([stream(Memory(keys, values, **{"address": 0.5, **how}), *row, chunk) for row in rows])


def wide(leaves: list[Tensor]) -> list[Tensor]:
    return [x.detach().double().requires_grad_() for x in leaves]


def weight_of(out: Tensor, seed: int = 9) -> Tensor:
    return torch.randn(out.shape, generator=torch.Generator().manual_seed(seed)).to(out.dtype)


def grads(loss: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    found = torch.autograd.grad(loss, leaves, retain_graph=True, allow_unused=True)
    return [torch.zeros_like(x) if g is None else g for g, x in zip(found, leaves, strict=True)]


def compared(
    out: Tensor, expected: Tensor, leaves: list[Tensor], exact: list[Tensor], most: tuple[float, float]
) -> None:
    weight = weight_of(out)
    found = [out, *grads((out * weight).sum(), leaves)]
    near(found, [expected, *grads((expected * weight.double()).sum(), exact)], (most[0], *[most[1]] * len(leaves)))


# Values and gradients -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("step", "update", "score", "heads"),
    [
        ("normalized", "entropy", "idw", 2),
        ("paper", "none", "dot", 1),
        *(
            pytest.param(step, update, score, heads, marks=pytest.mark.slow)
            for step, update in (("normalized", "entropy"), ("normalized", "none"), ("paper", "entropy"))
            for score in ("idw", "dot")
            for heads in (1, 3)
        ),
    ],
)
def test_streams(step: str, update: str, score: str, heads: int, poisoned: None) -> None:
    """Reads, and gradients through reads and writes, of every argument."""
    leaves = draw(heads=heads)
    exact = wide(leaves)
    out, _ = triton(leaves, rule=rule(step, update), score=score)
    expected = dense(exact, score=score, step=step, key_update=update)
    compared(out, expected, leaves, exact, (2e-5, 5e-4))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("n", "half", "width", "k"),
    [
        (1, 1, 1, 1), (33, 5, 3, 8),
        pytest.param(2, 3, 5, 2, marks=pytest.mark.slow), pytest.param(7, 16, 40, 7, marks=pytest.mark.slow),
        pytest.param(40, 64, 100, 32, marks=pytest.mark.slow), pytest.param(16, 128, 256, 16, marks=pytest.mark.slow),
        pytest.param(65, 7, 300, 13, marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_every_size(n: int, half: int, width: int, k: int, poisoned: None) -> None:
    for tokens, chunk in ((1, 2), (7, 4)):
        leaves = draw(1, tokens, 2, n, half, width, seed=n)
        exact = wide(leaves)
        out, _ = triton(leaves, rule=rule(update="none"), top_k=k, chunk_size=chunk)
        compared(out, dense(exact, chunk, k=k, key_update="none"), leaves, exact, (3e-5, 1e-3))


@pytest.mark.slow
def test_many_tokens_of_a_chunk(poisoned: None) -> None:
    """More tokens than a block of any kernel holds, more than one of which meet in every slot."""
    leaves = draw(1, 300, 2, 5, 4, 9)
    exact = wide(leaves)
    out, _ = triton(leaves, rule=rule(), chunk_size=137)
    compared(out, dense(exact, 137), leaves, exact, (3e-5, 1e-3))


@pytest.mark.slow
def test_bfloat16() -> None:
    """Of tokens and of what is stored: scores and sums stay in float32."""
    leaves = draw(dtype=torch.bfloat16)
    exact = wide(leaves)
    out, _ = triton(leaves, rule=rule())
    assert out.dtype == torch.bfloat16
    compared(out, dense(exact), leaves, exact, (4e-3, 1e-2))
    leaves = draw(grad=False)
    out, state = triton(leaves, rule=rule(), storage=torch.bfloat16)
    near([out], [dense([x.double() for x in leaves])], 2e-2)
    assert state.values.dense().dtype == torch.bfloat16


@pytest.mark.slow
def test_without_gates() -> None:
    leaves = draw()
    exact = wide(leaves)
    out, _ = regard.fast_weight_memory(
        *leaves[:2], None, *leaves[3:], rule=rule(), top_k=4, chunk_size=CHUNK, impl="triton"
    )
    exact[2] = torch.ones_like(exact[2])
    expected = dense(exact)
    at = [0, 1, 3, 4]
    compared(out, expected, [leaves[i] for i in at], [exact[i] for i in at], (2e-5, 5e-4))


@pytest.mark.slow
@pytest.mark.parametrize("spec", ["sparsemax", "biweight"])
def test_other_weights_of_the_selected(spec: str) -> None:
    """Of one read, by the package entmax."""
    from entmax import entmax15, sparsemax

    query, _, _, keys, values = leaves = draw(tokens=4, heads=2)
    out, _ = triton(leaves, spec=spec)
    q, _, _, ks, vs = wide(leaves)
    halves = -torch.log(1e-3 + (q.unflatten(-1, (2, -1))[..., None, :] - ks).square().sum(-1))
    total = (halves[..., 0, :, None] + halves[..., 1, None, :]).flatten(-2)
    best, at = total.topk(4, -1)
    p = {"sparsemax": sparsemax, "biweight": entmax15}[spec](best.flatten(-2), -1).view_as(best)
    expected = (p[..., None] * vs[at]).sum((-2, -3))
    weight = weight_of(out)
    found = torch.autograd.grad((out * weight).sum(), [query, keys, values])
    wanted = torch.autograd.grad((expected * weight.double()).sum(), [q, ks, vs])
    near([out, *found], [expected, *wanted], (1e-5, *[2e-4] * 3))


class Told:
    """What an observer is told."""

    def __init__(self) -> None:
        self.slots: list[Tensor] = []
        self.written: list[Tensor] = []

    def on_read(self, slots: Tensor, weights: Tensor, *_: Any) -> None:
        self.slots.append(slots)

    def on_write(self, slots: Tensor, shares: Tensor, *_: Any) -> None:
        self.written.append(shares)


@pytest.mark.parametrize("score", ["idw", pytest.param("dot", marks=pytest.mark.slow)])
def test_the_lowest_index_comes_first_among_equals(score: str) -> None:
    """Whole numbers, so that scores are exact and many are equal."""
    make = torch.Generator().manual_seed(0)
    whole = lambda *size: torch.randint(-1, 2, size, generator=make).float()  # noqa: E731
    query, keys = whole(2, 20, 2, 4), whole(2, 2, 9, 2)
    told = Told()
    triton([query, whole(2, 20, 3), torch.ones(2, 20), keys, whole(81, 3)], score=score, chunk_size=64, observer=told)
    q = query.unflatten(-1, (2, -1))[..., None, :]
    halves = -(q - keys).square().sum(-1) if score == "idw" else (q * keys).sum(-1)
    if score == "idw":
        halves = -torch.log(1e-3 - halves.double())
    total = (halves[..., 0, :, None] + halves[..., 1, None, :]).flatten(-2)
    expected = torch.sort((total * 2**20).round(), dim=-1, descending=True, stable=True).indices[..., :4]
    assert torch.equal(torch.cat(told.slots, 1).view(2, 20, 2, 4), expected)


@pytest.mark.slow
def test_near_and_far_keys() -> None:
    """Squared distances are those of the numbers: at a key, and among keys close together far from the origin."""
    make = torch.Generator().manual_seed(0)
    keys = torch.randn(1, 2, 8, 4, generator=make) * 1e-2 + 30
    query = keys[:, :, :4].permute(2, 0, 1, 3).reshape(1, 4, 1, 8).clone()
    query[:, 2:] += 1e-3 * torch.randn(1, 2, 1, 8, generator=make)
    leaves = [query, torch.randn(1, 4, 5, generator=make), torch.ones(1, 4), keys, torch.randn(64, 5, generator=make)]
    leaves = [x.requires_grad_() for x in leaves]
    exact = wide(leaves)
    out, _ = triton(leaves, eps=1e-4)
    expected = dense(exact, eps=1e-4)
    weight = weight_of(out)
    near([out], [expected], 1e-4)
    found, wanted = grads((out * weight).sum(), leaves), grads((expected * weight.double()).sum(), exact)
    near([found[0], found[3], found[4]], [wanted[0], wanted[3], wanted[4]], 3e-3)


@pytest.mark.slow
@pytest.mark.parametrize("meta", [False, 2])
def test_gradients_that_end_at_a_write(meta: bool | int) -> None:
    """Never through a write; through at most one."""
    leaves = draw(1)
    out, _ = triton(leaves, rule=rule(), meta_grad=meta)
    q, v, g, keys, values = exact = wide(leaves)
    memory, parts = Memory(keys, values, address=0.5), []
    for count, start in enumerate(range(0, T, CHUNK)):
        if start:
            span = slice(start - CHUNK, start)
            inputs = [q[0, span], v[0, start - CHUNK + 1 : start + 1], g[0, span]]
            if not meta or count % meta == 0:
                memory.write(*(x.detach() for x in inputs))
                memory.keys, memory.values = memory.keys.detach(), memory.values.detach()
            else:
                memory.write(*inputs)
        parts.append(memory.read(q[0, start : start + CHUNK]))
    compared(out, torch.cat(parts)[None], leaves, exact, (2e-5, 5e-4))


# Streams, states ------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("cuts", [[3, 2, 5], pytest.param([1] * T, marks=pytest.mark.slow)])
def test_calls_of_any_length_are_one_stream(cuts: list[int]) -> None:
    """With gradients through the state."""
    leaves = draw()
    state, parts, start = None, [], 0
    for size in cuts:
        at = slice(start, start + size)
        out, state = triton([*(x[:, at] for x in leaves[:3]), *leaves[3:]], rule=rule(), state=state)
        parts.append(out)
        start += size
    exact = wide(leaves)
    compared(torch.cat(parts, 1), dense(exact), leaves, exact, (2e-5, 5e-4))


def test_a_state_is_not_changed_by_what_follows() -> None:
    """Two continuations of one state, and the state itself between and after them; what was given is as it was."""
    leaves = draw(grad=False)
    given = [x.clone() for x in leaves]
    first = [x[:, :7] for x in leaves[:3]]
    out, state = triton([*first, *leaves[3:]], rule=rule())
    kept = {name: x.clone() for name, x in state.to_tensors().items()}
    again = draw(seed=4, grad=False)[:3]
    one, after = triton([*again, *leaves[3:]], rule=rule(), state=state)
    triton([*(2 * x for x in again), *leaves[3:]], rule=rule(), state=state)
    further = {name: x.clone() for name, x in after.to_tensors().items()}
    two, other = triton([*again, *leaves[3:]], rule=rule(), state=state)
    assert torch.equal(one, two)
    for name, x in state.to_tensors().items():
        assert torch.equal(x, kept[name]), name
    for name, x in after.to_tensors().items():
        assert torch.equal(x, further[name]), name
        assert torch.equal(x, other.to_tensors()[name]), name
    for x, y in zip(leaves, given, strict=True):
        assert torch.equal(x, y)
    assert torch.equal(out, triton([*first, *leaves[3:]], rule=rule())[0])


def test_gradients_of_an_early_read_after_late_writes() -> None:
    """In any order, twice, and of several continuations of one state."""
    leaves = draw(1)
    exact = wide(leaves)
    cut = [x[:, :6] for x in leaves[:3]]
    early, state = triton([*cut, *leaves[3:]], rule=rule())
    late, _ = triton([*(x[:, 6:] for x in leaves[:3]), *leaves[3:]], rule=rule(), state=state)
    other, _ = triton([*(x[:, 6:].flip(1) for x in leaves[:3]), *leaves[3:]], rule=rule(), state=state)
    expected = dense(exact)
    turned = [torch.cat([x[:, :6], x[:, 6:].flip(1)], 1) for x in exact[:3]]
    branch = dense([*turned, *exact[3:]])
    weight = weight_of(expected)
    pairs = ((early, expected[:, :6]), (other, branch[:, 6:]), (late, expected[:, 6:]), (early, expected[:, :6]))
    for found, wanted in pairs:
        size = found.shape[1]
        one = grads((found * weight[:, :size].float()).sum(), leaves)
        two = grads((wanted * weight[:, :size]).sum(), exact)
        near([found, *one], [wanted, *two], (2e-5, *[5e-4] * 5))


@pytest.mark.slow
def test_a_state_goes_through_files() -> None:
    leaves = draw(grad=False)
    first, rest = [x[:, :6] for x in leaves[:3]], [x[:, 6:] for x in leaves[:3]]
    _, state = triton([*first, *leaves[3:]], rule=rule())
    read = type(state).from_tensors({name: x.clone() for name, x in state.to_tensors().items()})
    expected = dense([x.double() for x in leaves])[:, 6:]
    for known in (state, read, state.clone() if hasattr(state, "clone") else state):
        near([triton([*rest, *leaves[3:]], rule=rule(), state=known)[0]], [expected], 2e-5)


@pytest.mark.slow
def test_only_reading_leaves_the_memory_as_it_was() -> None:
    leaves = draw(grad=False)
    _, state = triton(leaves, rule=rule())
    kept = {name: x.clone() for name, x in state.to_tensors().items()}
    out, same = triton(leaves, rule=rule(), state=state, frozen=True)
    memory = Memory(leaves[3].double(), leaves[4].double(), address=0.5)
    q, v, g = (x[0].double() for x in leaves[:3])
    stream(memory, q, v, g, CHUNK)
    near([out[0]], [memory.read(q)], 2e-5)
    for name, x in same.to_tensors().items():
        assert torch.equal(x, kept[name]), name


@pytest.mark.slow
def test_flush_writes_what_waits() -> None:
    leaves = draw(1, grad=False)
    _, state = triton(leaves, rule=rule())
    after = flush(state, rule=rule())
    memory = Memory(leaves[3].double(), leaves[4].double(), address=0.5)
    q, v, g = (x[0].double() for x in leaves[:3])
    stream(memory, q, v, g, CHUNK)
    # two tokens wait, of which the first has a target; the other counts as read
    keys, values = memory.keys, memory.values
    weights, met = memory.shares(q[8:])
    total, hits = weights.sum(1), met.sum(1)
    step = g[8:9] / (total[:1].square() / hits[:1].clamp(min=1)).sum(-1)
    moved = (step[:, None] * total[:1]).T @ (total[:1] @ values - v[9:10]) / hits.sum(0).clamp(min=1)[:, None]
    keys = keys.clone().requires_grad_()
    rise = torch.autograd.grad(memory.entropy(q[8:], keys), keys)[0]
    near([after.values.dense()[0], after.keys[0]], [values - moved, keys.detach() + 0.5 * rise], 2e-5)
    assert after.waiting.empty


@pytest.mark.slow
def test_one_memory_for_the_batch() -> None:
    """Whose rows are written together: equal to one row with the tokens of both in a chunk."""
    leaves = draw(2, 2 * CHUNK + 3)
    out, _ = triton(leaves, rule=rule(), shared=True)
    q, v, g, keys, values = exact = wide(leaves)
    memory, parts = Memory(keys, values, address=0.5), []
    for start in range(0, 2 * CHUNK + 3, CHUNK):
        if start:
            span = slice(start - CHUNK, start)
            after = slice(start - CHUNK + 1, start + 1)
            memory.write(q[:, span].flatten(0, 1), v[:, after].flatten(0, 1), g[:, span].flatten())
        parts.append(memory.read(q[:, start : start + CHUNK].flatten(0, 1)).unflatten(0, (2, -1)))
    compared(out, torch.cat(parts, 1), leaves, exact, (2e-5, 5e-4))


# Promises -------------------------------------------------------------------------------------------------------


def test_padding_is_as_if_it_were_removed() -> None:
    """NaN in it, too: to the last bit, and with gradient 0."""
    leaves = draw(2, 12)
    mask = torch.rand(2, 12, generator=torch.Generator().manual_seed(1)) > 0.3
    counts = mask.sum(1).tolist()
    found = []
    for what in (0.0, torch.nan):
        given = [x.detach().clone() for x in leaves]
        for x in given[:3]:
            x[~mask] = what
        given = [x.requires_grad_() for x in given]
        out, _ = triton(given, rule=rule(), mask=mask)
        found.append([out.detach(), *grads((out * weight_of(out)).sum(), given)])
    assert not found[0][0][~mask].any()
    for x in found[0][1:4]:
        assert not x[~mask].any()
    for other in found[1:]:
        for one, two in zip(found[0], other, strict=True):
            assert torch.equal(one, two)
    for row, count in enumerate(counts):
        own = [x[row, mask[row]].detach().double() for x in leaves[:3]]
        memory = Memory(leaves[3].detach().double(), leaves[4].detach().double(), address=0.5)
        expected = stream(memory, *own, CHUNK)
        assert len(expected) == count
        near([found[0][0][row][mask[row]]], [expected], 2e-5)


def test_a_token_that_is_not_finite_is_not_written() -> None:
    """It keeps its place, reads 0, and is nobody's target; all else is finite."""
    leaves = [x.detach() for x in draw(1)]
    leaves[0][0, 3, 0, 2], leaves[1][0, 5, 1], leaves[2][0, 7] = torch.nan, torch.inf, torch.nan
    leaves = [x.requires_grad_() for x in leaves]
    out, state = triton(leaves, rule=rule())
    for t in (3, 5, 7):
        assert not out[0, t].any()
    assert bool(out.isfinite().all())
    assert all(bool(g.isfinite().all()) for g in grads(out.sum(), leaves))
    assert bool(state.values.dense().isfinite().all())
    query, keys, values = (leaves[i].detach().double() for i in (0, 3, 4))
    near([out[0, :3]], [Memory(keys, values).read(query[0, :3])], 2e-5)


@pytest.mark.slow
def test_documents_begin_anew() -> None:
    """And none changes a bit of another, forward or backward."""
    leaves = draw(1, 23)
    ids = torch.tensor([[0] * 9 + [3] * 8 + [1] * 6])

    def run(given: list[Tensor], weight: Tensor) -> list[Tensor]:
        given = [x.detach().requires_grad_() for x in given]
        out, _ = triton(given, rule=rule(), segment_ids=ids)
        return [out.detach(), *grads((out * weight).sum(), given)]

    weight = torch.randn(1, 23, 7, generator=torch.Generator().manual_seed(2))
    before = run(leaves, weight)
    exact = [x.detach().double() for x in leaves]
    parts = [dense([*(x[:, a:b] for x in exact[:3]), *exact[3:]]) for a, b in ((0, 9), (9, 17), (17, 23))]
    near([before[0]], [torch.cat(parts, 1)], 2e-5)
    changed = [x.detach().clone() for x in leaves]
    for x in changed[:3]:
        x[:, 9:17] *= -7
    after = run(changed, weight)
    for one, other in zip(before[:4], after[:4], strict=True):
        assert torch.equal(one[:, :9], other[:, :9])
        assert torch.equal(one[:, 17:], other[:, 17:])


def test_a_batch_is_a_loop() -> None:
    """To the last bit."""
    leaves = draw(2, grad=False)
    out, state = triton(leaves, rule=rule())
    for b in range(2):
        own, left = triton([*(x[b : b + 1] for x in leaves[:3]), *leaves[3:]], rule=rule())
        assert torch.equal(own, out[b : b + 1])
        assert torch.equal(left.values.dense()[0], state.values.dense()[b])
        assert torch.equal(left.keys[0], state.keys[b])


@pytest.mark.slow
def test_what_comes_later_changes_no_bit() -> None:
    leaves = draw(1, grad=False)
    out, _ = triton(leaves, rule=rule())
    for cut in (3, 4, 5, 9):
        given = [x.clone() for x in leaves]
        for x in given[:3]:
            x[:, cut:] *= 30
        assert torch.equal(triton(given, rule=rule())[0][:, :cut], out[:, :cut])


@pytest.mark.slow
def test_it_is_the_same_again() -> None:
    """Although many tokens meet in every slot: sums have an order."""
    leaves = draw(2, 64, 2, 3, 2, 5)
    found = []
    for _ in range(2):
        out, state = triton(leaves, rule=rule(), chunk_size=32, top_k=3)
        found.append([out, *grads((out * weight_of(out)).sum(), leaves), *state.to_tensors().values()])
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


@pytest.mark.slow
def test_tensors_that_are_not_contiguous() -> None:
    leaves = [x.detach() for x in draw(2, T, 2)]

    def run(given: list[Tensor]) -> list[Tensor]:
        given = [x.requires_grad_() for x in given]
        out, _ = triton(given, rule=rule())
        return [out.detach(), *grads(out.sum(), given)]

    turned = [x.mT.contiguous().mT for x in leaves]
    sparse = [torch.stack([x, torch.full_like(x, torch.nan)], -1).flatten(-2)[..., ::2] for x in leaves]
    for other in (turned, sparse):
        for one, two in zip(run(leaves), run(other), strict=True):
            assert torch.equal(one, two)


@pytest.mark.slow
def test_slots_that_lie_far_apart() -> None:
    """Offsets of 2^31 and more in the table that is given, and in the tokens."""
    leaves = draw(2, 7, 1, 2, 2, 3, grad=False)
    expected, _ = triton(leaves, top_k=2)
    for place, axis in ((4, 0), (3, 2), (0, 0), (1, 0)):
        stride = list(torch.empty(leaves[place].shape).stride())
        stride[axis] = 2**30 + 16 if place == 4 else 2**31 + 16
        spread = torch.empty_strided(leaves[place].shape, stride).copy_(leaves[place])
        out, _ = triton([*leaves[:place], spread, *leaves[place + 1 :]], top_k=2)
        assert torch.equal(out, expected)


@pytest.mark.slow
def test_autocast_changes_nothing() -> None:
    leaves = draw()
    found = []
    for on in (False, True):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=on):
            out, _ = triton(leaves, rule=rule())
        found.append([out, *grads((out * weight_of(out)).sum(), leaves)])
    for one, other in zip(*found, strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)


@pytest.mark.parametrize("sizes", [(0, 5), (2, 0)])
def test_nothing_at_all(sizes: tuple[int, int]) -> None:
    leaves = draw(*sizes)
    out, _ = triton(leaves)
    assert out.shape == (*sizes, 7)
    assert [g.shape for g in grads(out.sum(), leaves)] == [x.shape for x in leaves]


class Calls(torch.utils._python_dispatch.TorchDispatchMode):
    """The operators of regard that were called, with their arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.made: dict[Any, tuple[Any, Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "regard" and func not in self.made:
            copied = tuple(
                x.detach().clone().requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x for x in args
            )
            self.made[func] = (copied, kwargs or {})
        return func(*args, **(kwargs or {}))


def test_operators_are_what_they_say() -> None:
    """opcheck: schema, fake kernels and autograd of every operator that a call makes."""
    leaves, calls = draw(1, 6), Calls()
    with calls:
        triton(leaves, rule=rule())[0].sum().backward()
    assert any("triton" in func.name() for func in calls.made), list(calls.made)
    for func, (args, kwargs) in calls.made.items():
        if "triton" in func.name():
            checks = ("test_schema", "test_autograd_registration", "test_faketensor")
            torch.library.opcheck(func, args, kwargs, test_utils=checks)


# The layer, and where it does not run ---------------------------------------------------------------------------


@pytest.mark.parametrize("heads", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_the_layer(heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """`nn.FastWeightProductKeyMemory(impl="triton")` reads what plain sums read of its projections, and learns."""
    from regard.nn import fast_weight_product_key_memory as module

    torch.manual_seed(0)
    layer = nn.FastWeightProductKeyMemory(
        12, sub_keys=5, key_dim=6, value_dim=8, heads=heads, top_k=3, chunk_size=4, address_weight=0.5, impl="triton"
    )
    seen: list[tuple[tuple[Any, ...], dict[str, Any], Tensor]] = []
    real = module.fast_weight_memory

    def watch(*args: Any, **how: Any) -> Any:
        found = real(*args, **how)
        seen.append((args, how, found[0]))
        return found

    monkeypatch.setattr(module, "fast_weight_memory", watch)
    x = torch.randn(1, 7, 12, requires_grad=True)
    out = layer(x)
    out = out[0] if isinstance(out, tuple) else out
    (args, how, read), *_ = seen
    assert how["impl"] == "triton"
    expected = dense([y.detach().double() for y in args], 4, k=3)
    near([read], [expected], 3e-5)
    out.square().sum().backward()
    assert x.grad is not None
    assert bool(x.grad.isfinite().all())
    assert all(p.grad is not None and bool(p.grad.any()) for p in layer.parameters())


def test_a_store_of_another_kind_is_not_taken_for_it() -> None:
    """impl chooses at the start of a stream; a state keeps its own kind."""
    leaves = draw(grad=False)
    _, state = triton(leaves)
    _, plain = regard.fast_weight_memory(*leaves, top_k=4, chunk_size=CHUNK, impl="reference")
    assert type(state.values) is not type(plain.values)
    assert type(triton(leaves, state=state)[1].values) is type(state.values)


def test_what_it_cannot_do() -> None:
    with pytest.raises(regard.checks.ArgumentError, match="tritn"):
        regard.fast_weight_memory(*draw(), top_k=4, impl="tritn")
    with pytest.raises(regard.checks.ArgumentError, match="float32"):
        triton([x.detach().double() for x in draw()], rule=rule())


ALONE = """
import sys
import torch
import regard

assert "triton" not in sys.modules, "importing regard imports triton"
x = torch.randn(1, 1, 8, 4)
calls = {
    "attention": lambda: regard.attention(x, x, x, "biweight", impl="triton"),
    "linear": lambda: regard.local_linear_attention(x, x, x, impl="triton"),
    "memory": lambda: regard.fast_weight_memory(
        torch.randn(1, 3, 1, 4), torch.randn(1, 3, 5), None, torch.randn(1, 2, 3, 2), torch.randn(9, 5), top_k=2,
        impl="triton",
    ),
}
for name, call in calls.items():
    try:
        call()
    except regard.checks.ArgumentError as error:
        text = str(error)
        assert "CUDA" in text and "triton" in text and "\\n" not in text, (name, text)
        print(name, text)
    else:
        raise AssertionError(name + " ran")
told = regard.explain("biweight", (1, 1, 8, 4))
reasons = {name: reason for name, reason, _ in told.rows}
assert told.chosen != "triton" and "CUDA" in reasons["triton"], told
for spec in ("biweight", "softmax", "local-linear"):
    out = regard.attention(x, x, x, spec)
    assert out.isfinite().all()
regard.fast_weight_memory(
    torch.randn(1, 3, 1, 4), torch.randn(1, 3, 5), None, torch.randn(1, 2, 3, 2), torch.randn(9, 5), top_k=2
)
print("fine")
"""


@pytest.mark.parametrize("hidden", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_without_the_interpreter(hidden: bool) -> None:
    """On the CPU it is refused with a reason; importing regard imports no triton, which need not be there at all."""
    code = ALONE
    if hidden:
        missing = "import sys\nsys.modules['triton'] = None\nimport importlib.util as u\nreal = u.find_spec\n"
        missing += "u.find_spec = lambda n, *a: None if n == 'triton' else real(n, *a)\n"
        code = missing + ALONE.replace('"triton" not in sys.modules', "True").replace('"CUDA" in', '"triton" in')
        code = code.replace('"triton" in reasons["triton"]', '"needs triton" in reasons["triton"]')
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET" and not k.startswith("PYTEST_")}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=200, env=environment, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "fine" in done.stdout
