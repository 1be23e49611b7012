"""`regard.fast_weight_memory(..., impl="triton")` from outside: streams against a memory of plain sums over every slot
in float64; and what a call promises whatever it computes."""

from collections.abc import Mapping
from types import MappingProxyType, SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from attention_calls import compared, some, wide
from dense_fast_weights import all_scores, best, half_scores, stream
from dense_oracles import equal, near
from memory_calls import CHUNK, T, blend, dense, draw, grads, memory, rule, triton, weight_of
from torch import Tensor

import regard

pytestmark = pytest.mark.usefixtures("in_bounds")


class Case(NamedTuple):
    """A stream, the lengths of its calls, and the relative errors of outputs and gradients."""

    sizes: Mapping[str, Any] = MappingProxyType({})
    step: str = "normalized"
    update: str = "entropy"
    score: str = "idw"
    k: int = 4
    chunk: int = CHUNK
    mix: bool = False
    gates: bool = True
    shared: bool = False
    cuts: int | list[int] = T
    most: tuple[float, float] = (2e-5, 5e-4)


def of_size(n: int, half: int, width: int, k: int, tokens: int, chunk: int) -> Case:
    sizes = {"tokens": tokens, "heads": 2, "n": n, "half": half, "width": width, "seed": n}
    return Case(sizes, update="none", k=k, chunk=chunk, cuts=tokens, most=(3e-5, 1e-3))


SHORT = {"dtype": torch.bfloat16}
ROUGH = (4e-3, 1e-2)
CASES = {
    "two heads": Case({"heads": 2}),
    "paper": Case({}, "paper", "none", "dot"),
    "mixed": Case({"batch": 2}, mix=True),
    **{
        f"{step}, {update}, {score}, {heads} heads": Case({"heads": heads}, step, update, score)
        for step, update in (("normalized", "entropy"), ("normalized", "none"), ("paper", "entropy"))
        for score in ("idw", "dot")
        for heads in (1, 3)
    },
    "mixed, paper, two heads": Case({"batch": 2, "heads": 2}, "paper", mix=True),
    "mixed, paper, three heads": Case({"batch": 2, "heads": 3}, "paper", "none", "dot", mix=True),
    "without gates": Case(gates=False),
    **{
        f"calls of {cuts}, mixed {mix}": Case(mix=mix, gates=not mix, cuts=cuts)
        for cuts in ([3, 2, 5], [1] * T)
        for mix in (False, True)
    },
    "wide rows of many slots": of_size(17, 4, 1100, 9, 5, CHUNK)._replace(mix=True),
    **{
        f"{n} keys, {tokens} tokens": of_size(n, half, width, k, tokens, chunk)
        for n, half, width, k in (
            (1, 1, 1, 1), (33, 5, 3, 8), (2, 3, 5, 2), (7, 16, 40, 7), (40, 64, 100, 32), (16, 128, 256, 16),
            (65, 7, 300, 13),
        )
        for tokens, chunk in ((1, 2), (7, 4))
    },
    # more tokens than a block of any kernel holds, many of which meet in every slot
    "many tokens": Case(
        {"tokens": 300, "heads": 2, "n": 5, "half": 4, "width": 9}, chunk=137, cuts=300, most=(3e-5, 1e-3)
    ),
    "bfloat16": Case(SHORT, most=ROUGH),
    "bfloat16, mixed": Case(SHORT, mix=True, most=ROUGH),
    # written together: one row with the tokens of both in a chunk
    **{f"shared, mixed {x}": Case({"batch": 2, "tokens": 11}, shared=True, mix=x, cuts=11) for x in (False, True)},
}  # fmt: skip


@pytest.mark.parametrize("name", some(CASES, ("two heads", "paper", "mixed")))
def test_streams(name: str, poisoned: None) -> None:
    """What is read, or its mix with the tokens' own values, and gradients of every argument through all writes."""
    case = CASES[name]
    leaves = draw(**case.sizes)
    exact, at = wide(leaves), range(5)
    if not case.gates:
        exact[2], at = torch.ones_like(exact[2]), (0, 1, 3, 4)
    how: dict[str, Any] = {"rule": rule(case.step, case.update), "top_k": case.k, "chunk_size": case.chunk}
    state, parts = None, []
    for query, value, gate in zip(*(x.split(case.cuts, 1) for x in leaves[:3]), strict=True):
        tokens = [query, value, gate if case.gates else None]
        more = {"score": case.score, "mix": case.mix, "shared": case.shared}
        out, state = triton([*tokens, *leaves[3:]], state=state, **how, **more)
        parts.append(out)
    plain = {"k": case.k, "score": case.score, "step": case.step, "key_update": case.update}
    if case.shared:
        expected = stream(memory(*exact[3:], **plain), *exact[:3], case.chunk)
    else:
        expected = dense(exact, case.chunk, **plain)
    if case.mix:
        expected = blend(expected, exact[1], exact[2] if case.gates else None)
    compared(torch.cat(parts, 1), expected, [leaves[i] for i in at], [exact[i] for i in at], case.most, name)


def test_a_token_that_gives_no_slot_weight() -> None:
    """Token 1 is written, and token 7 ends a chunk without a target."""
    leaves = draw()
    with torch.no_grad():
        leaves[0][:, [1, 7]] += 100
    how = regard.WriteRule(key_update="none", border=False)
    out, _ = triton(leaves, rule=how, spec="biweight*fixed(bias=3,empty=zero)")
    assert not out[:, [1, 7]].any()
    found = grads(out.square().sum(), leaves)
    assert all(x.isfinite().all() for x in (out, *found))
    assert not found[2][:, [1, 7]].any()


@pytest.mark.slow
@pytest.mark.parametrize("mix", [False, True])
def test_values_stored_in_bfloat16(mix: bool) -> None:
    leaves = draw(grad=False)
    exact = wide(leaves)
    out, state = triton(leaves, rule=rule(), storage=torch.bfloat16, mix=mix)
    near([out], [blend(dense(exact), *exact[1:3]) if mix else dense(exact)], 2e-2)
    assert state.values.dense().dtype == torch.bfloat16


@pytest.mark.parametrize("score", ["idw", pytest.param("dot", marks=pytest.mark.slow)])
def test_the_lowest_index_comes_first_among_equals(score: str) -> None:
    """Whole numbers, so that scores are exact and many are equal."""
    make = torch.Generator().manual_seed(0)
    whole = lambda *size: torch.randint(-1, 2, size, generator=make).float()  # noqa: E731
    query, keys = whole(2, 20, 2, 4), whole(2, 2, 9, 2)
    read: list[Any] = []
    observer = SimpleNamespace(on_read=lambda slots, *_: read.append(slots), on_write=lambda *_: None)
    triton(
        [query, whole(2, 20, 3), torch.ones(2, 20), keys, whole(81, 3)], score=score, chunk_size=64, observer=observer
    )
    expected = best(all_scores(half_scores(query.double(), keys.double(), score)), 4)
    assert torch.equal(torch.cat(read, 1).view(2, 20, 2, 4), expected)


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
    expected, parts = memory(keys, values), []
    for count, start in enumerate(range(0, T, CHUNK)):
        if start:
            span = slice(start - CHUNK, start)
            inputs = [q[0, span], v[0, start - CHUNK + 1 : start + 1], g[0, span], torch.ones(CHUNK, dtype=torch.bool)]
            ends = not meta or count % meta == 0
            expected.learn(*(x.detach() if ends else x for x in inputs))
            if ends:
                expected.keys, expected.values = expected.keys.detach(), expected.values.detach()
        parts.append(expected.read(q[0, start : start + CHUNK]))
    compared(out, torch.cat(parts)[None], leaves, exact, (2e-5, 5e-4))


def test_a_state_is_not_changed_by_what_follows() -> None:
    """Two continuations of one state, a third from a file, and a call that only reads; what was given is as it was."""
    leaves, again = draw(grad=False), draw(seed=4, grad=False)[:3]
    given, first = [x.clone() for x in leaves], [x[:, :7] for x in leaves[:3]]

    def call(tokens: list[Tensor], **how: Any) -> tuple[Tensor, Any]:
        return triton([*tokens, *leaves[3:]], rule=rule(), **how)

    def copied(state: Any) -> dict[str, Tensor]:
        return {name: x.clone() for name, x in state.to_tensors().items()}

    out, state = call(first)
    kept = copied(state)
    one, after = call(again, state=state)
    call([2 * x for x in again], state=state)
    further = copied(after)
    two, other = call(again, state=state)
    third, _ = call(again, state=type(state).from_tensors(kept))
    frozen, same = call(again, state=state, frozen=True)
    assert same is state
    assert torch.equal(frozen[:, :1], one[:, :1])  # before the first write
    equal([*leaves, call(first)[0], two, third], [*given, out, one, one])
    for now, before in ((state, kept), (after, further), (other, further)):
        equal(list(copied(now).values()), list(before.values()))


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
