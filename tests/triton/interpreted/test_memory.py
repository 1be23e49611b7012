"""`regard.fast_weight_memory(..., impl="triton")` from outside: streams against a memory of plain sums over every slot
in float64; and what a call promises whatever it computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attention_calls import compared, wide
from dense_fast_weights import stream
from dense_oracles import near
from memory_calls import CHUNK, T, blend, dense, draw, grads, memory, rule, triton, weight_of
from torch import Tensor

import regard
from regard.memory.fast_weights import flush

pytestmark = pytest.mark.usefixtures("in_bounds")


class Told:
    """What an observer is told."""

    def __init__(self) -> None:
        self.slots: list[Tensor] = []
        self.written: list[Tensor] = []

    def on_read(self, slots: Tensor, weights: Tensor, *_: Any) -> None:
        self.slots.append(slots)

    def on_write(self, slots: Tensor, shares: Tensor, *_: Any) -> None:
        self.written.append(shares)


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


@pytest.mark.parametrize(
    ("heads", "more"),
    [
        (1, {}),
        pytest.param(3, {"step": "paper", "key_update": "none", "score": "dot"}, marks=pytest.mark.slow),
        pytest.param(2, {"step": "paper"}, marks=pytest.mark.slow),
    ],
)
def test_mixed_with_the_tokens_own_values(heads: int, more: dict[str, str], poisoned: None) -> None:
    leaves = draw(2, heads=heads)
    exact = wide(leaves)
    own = rule(more.get("step", "normalized"), more.get("key_update", "entropy"))
    out, _ = triton(leaves, rule=own, score=more.get("score", "idw"), mix=True)
    compared(out, blend(dense(exact, **more), *exact[1:3]), leaves, exact, (2e-5, 5e-4))


@pytest.mark.slow
@pytest.mark.parametrize("cuts", [[T], [3, 2, 5], [1] * T])
def test_mixed_without_gates_in_calls_of_any_length(cuts: list[int], poisoned: None) -> None:
    leaves = draw()
    exact = wide(leaves)
    exact[2] = torch.ones_like(exact[2])
    state, parts = None, []
    for query, value in zip(*(x.split(cuts, 1) for x in leaves[:2]), strict=True):
        out, state = triton([query, value, None, *leaves[3:]], rule=rule(), state=state, mix=True)
        parts.append(out)
    expected = blend(dense(exact), exact[1], None)
    at = [0, 1, 3, 4]
    compared(torch.cat(parts, 1), expected, [leaves[i] for i in at], [exact[i] for i in at], (1e-5, 5e-4))


@pytest.mark.slow
def test_mixed_in_wide_rows_of_many_slots(poisoned: None) -> None:
    """Of more numbers than a program holds at once."""
    leaves = draw(1, 5, 2, 17, 4, 1100)
    exact = wide(leaves)
    out, _ = triton(leaves, rule=rule(update="none"), top_k=9, mix=True)
    expected = blend(dense(exact, k=9, key_update="none"), *exact[1:3])
    compared(out, expected, leaves, exact, (3e-5, 1e-3))


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
    for mix, expected in ((False, dense(exact)), (True, blend(dense(exact), *exact[1:3]))):
        out, _ = triton(leaves, rule=rule(), mix=mix)
        assert out.dtype == torch.bfloat16
        compared(out, expected, leaves, exact, (4e-3, 1e-2))
    leaves = draw(grad=False)
    exact = wide(leaves)
    for mix, expected in ((False, dense(exact)), (True, blend(dense(exact), *exact[1:3]))):
        out, state = triton(leaves, rule=rule(), storage=torch.bfloat16, mix=mix)
        near([out], [expected], 2e-2)
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
    own, parts = memory(keys, values), []
    for count, start in enumerate(range(0, T, CHUNK)):
        if start:
            span = slice(start - CHUNK, start)
            inputs = [q[0, span], v[0, start - CHUNK + 1 : start + 1], g[0, span], torch.ones(CHUNK, dtype=torch.bool)]
            if not meta or count % meta == 0:
                own.learn(*(x.detach() for x in inputs))
                own.keys, own.values = own.keys.detach(), own.values.detach()
            else:
                own.learn(*inputs)
        parts.append(own.read(q[0, start : start + CHUNK]))
    compared(out, torch.cat(parts)[None], leaves, exact, (2e-5, 5e-4))


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
    q, v, g, *tables = (x.double() for x in leaves)
    own = memory(*tables)
    stream(own, q, v, g, CHUNK)
    near([out], [own.read(q)], 2e-5)
    for name, x in same.to_tensors().items():
        assert torch.equal(x, kept[name]), name


@pytest.mark.slow
def test_flush_writes_what_waits() -> None:
    leaves = draw(1, grad=False)
    _, state = triton(leaves, rule=rule())
    after = flush(state, rule=rule())
    *tokens, keys, values = (x.double() for x in leaves)
    own = memory(keys, values)
    stream(own, *tokens, CHUNK)
    own.write(*(x[:, 8:] for x in tokens), None)  # of the two that wait, the first has a target
    near([after.values.dense()[0], after.keys[0]], [own.values, own.keys], 2e-5)
    assert after.waiting.empty


@pytest.mark.slow
@pytest.mark.parametrize("mix", [False, True])
def test_one_memory_for_the_batch(mix: bool) -> None:
    """Whose rows are written together: equal to one row with the tokens of both in a chunk."""
    leaves = draw(2, 2 * CHUNK + 3)
    out, _ = triton(leaves, rule=rule(), shared=True, mix=mix)
    q, v, g, keys, values = exact = wide(leaves)
    read = stream(memory(keys, values), q, v, g, CHUNK)
    compared(out, blend(read, v, g) if mix else read, leaves, exact, (2e-5, 5e-4))
