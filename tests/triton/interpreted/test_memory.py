"""Writing, keys and the whole of fast-weight product-key memory in Triton's interpreter, against dense float64
formulas: every entry written out, and torch's autograd through all of it."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from memory_calls import drawn, gap, written_by_hand
from torch import Tensor

import regard
from regard.checks import ArgumentError
from regard.memory.fast_weights import flush
from regard.triton.memory import write as memory_write
from regard.triton.memory.keys import marginal_of, moved_keys
from regard.triton.memory.targets import errors_of, shares_of
from regard.triton.memory.values import TableValues

pytestmark = pytest.mark.usefixtures("poisoned")
EPS = 1e-3


# Writing ------------------------------------------------------------------------------------------------------


def a_write(tokens: int, k: int, rows: int, width: int) -> tuple[Tensor, ...]:
    """slots, of which one is met by all tokens, shares, errors, counted; nothing that does not count is finite."""
    slots = torch.randint(0, rows, (2, tokens, k), generator=torch.Generator().manual_seed(5))
    slots[:, :, 0] = 3
    counted = torch.rand(2, tokens, generator=torch.Generator().manual_seed(6)) > 0.3
    shares, errors = drawn(2, tokens, k, seed=7), drawn(2, tokens, width, seed=8)
    shares[:, ::3] = 0
    shares[~counted] = errors[~counted] = math.nan
    return slots, shares, errors, counted


@pytest.mark.parametrize("sort", [False, True], ids=["counted", "sorted"])
@pytest.mark.parametrize(("tokens", "k", "rows", "width"), [(9, 3, 12, 5), (1, 2, 5, 17), (13, 1, 40, 1)])
def test_writing_rows(tokens: int, k: int, rows: int, width: int, sort: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """In place, with a log that takes it back and does it again, to the bit."""
    monkeypatch.setattr(memory_write, "COUNTED", 0 if sort else 1 << 20)
    slots, shares, errors, counted = a_write(tokens, k, rows, width)
    before = drawn(2, rows, width)
    order = memory_write.order_of(slots, counted, rows)
    table, log = before.clone(), torch.empty(2, tokens * k, width)
    memory_write.written(table, order.slots, order.entries, shares, errors, log)
    after = table.clone()
    assert gap(table, written_by_hand(before, slots, shares, errors, counted)) < 1e-6
    memory_write.swapped(table, order.slots, log)
    assert torch.equal(table, before)
    memory_write.swapped(table, order.slots, log)
    assert torch.equal(table, after)
    again = before.clone()
    memory_write.written(again, order.slots, order.entries, shares, errors)
    assert torch.equal(again, after)
    hit = torch.zeros(2, rows, dtype=torch.bool)
    for m in range(2):
        hit[m, slots[m][counted[m]].flatten()] = True
    assert torch.equal(after[~hit], before[~hit])


def test_rows_in_bfloat16_are_rounded_once() -> None:
    slots, shares, errors, counted = a_write(9, 3, 12, 5)
    table = drawn(2, 12, 5).bfloat16()
    wanted = written_by_hand(table, slots, shares, errors, counted)
    order = memory_write.order_of(slots, counted, 12)
    memory_write.written(table, order.slots, order.entries, shares, errors)
    assert ((table.double() - wanted).abs() <= 2**-8 * wanted.abs() + 1e-6).all()


def test_both_ways_of_ordering_are_one() -> None:
    slots, _, _, counted = a_write(11, 3, 9, 1)
    for flags in (counted, None):
        one, other = memory_write.order_of(slots, flags, 9), memory_write._sorted(slots, flags, 9)
        for a, b in zip(one, other, strict=True):
            assert a.dtype == b.dtype == torch.int32
            assert torch.equal(a, b)


@pytest.mark.parametrize("border", [True, False])
@pytest.mark.parametrize("look_ahead", [True, False])
def test_errors_against_the_next_good_token(look_ahead: bool, border: bool) -> None:
    read, value, following = drawn(2, 19, 5), drawn(2, 19, 5, seed=1), drawn(2, 1, 5, seed=2)
    good = torch.rand(2, 19, generator=torch.Generator().manual_seed(3)) > 0.4
    good[:, -2:] = torch.tensor([[True, False], [True, True]])
    good_next = torch.tensor([[True], [False]])
    value[~good], following[1] = math.nan, math.nan
    wanted, written = torch.zeros(2, 19, 5, dtype=torch.float64), torch.zeros(2, 19, dtype=torch.bool)
    for row, t in torch.cartesian_prod(torch.arange(2), torch.arange(19)).tolist():
        later = [u for u in range(t + 1, 19) if good[row, u]] if look_ahead else [t]
        target = value[row, later[0]] if later else following[row, 0] if border and good_next[row, 0] else None
        if good[row, t] and target is not None:
            written[row, t] = True
            wanted[row, t] = read[row, t].double() - target.double()
    after = (following, good_next) if border else (None, None)
    errors, found, _ = errors_of(read, value, after[0], good, after[1], look_ahead)
    assert torch.equal(found, written)
    assert gap(errors, wanted) < 1e-7


@pytest.mark.parametrize("rule", ["normalized", "paper", "reference"])
@pytest.mark.parametrize("heads", [1, 2])
def test_shares_of_every_rule(rule: str, heads: int) -> None:
    weights, gate = drawn(2, 5, heads, 3).flatten(-2).softmax(-1).view(2, 5, heads, 3), drawn(2, 5, seed=1).sigmoid()
    slots = torch.tensor([4, 1, 7, 1, 4, 9][: heads * 3]).expand(2, 5, -1).reshape(2, 5, heads, 3)
    counted = torch.tensor([[True, True, False, True, True], [True] * 5])
    written = counted & torch.tensor([[True, True, True, True, False]])
    step = torch.ones(2, 5, dtype=torch.float64)
    if rule == "reference":
        step = step * heads * 3 * counted.sum(1, keepdim=True) / written.sum(1, keepdim=True)
    elif rule == "normalized":
        hits = torch.nn.functional.one_hot(slots.flatten(-2), 10).double()  # [2, 5, K, N]
        whole, number = (hits * weights.double().flatten(-2)[..., None]).sum(-2), hits.sum(-2)
        step = 1 / (whole.square() / number.clamp(min=1)).sum(-1)
    wanted = 0.7 * torch.where(written, gate * step, 0)[..., None, None] * weights
    assert gap(shares_of(weights, slots, gate, counted, written, rule, 0.7), wanted) < 1e-6


# Keys ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("distance", [True, False], ids=["idw", "dot"])
@pytest.mark.parametrize(("memories", "heads", "n", "d", "k"), [(2, 1, 37, 5, 3), (1, 2, 9, 17, 4)])
def test_keys_climb_the_entropy(memories: int, heads: int, n: int, d: int, k: int, distance: bool) -> None:
    """Against autograd of the dense loss."""
    query, keys = drawn(2, 7, heads, 2 * d), drawn(memories, heads, 2, n, d, seed=1)
    counted = torch.rand(2, 7, generator=torch.Generator().manual_seed(2)) > 0.3
    wide = keys.double().requires_grad_()
    gaps = query.double().unflatten(-1, (2, -1))[..., None, :] - wide[:, None]
    own = -torch.log(EPS + gaps.square().sum(-1)) if distance else (
        query.double().unflatten(-1, (2, -1))[..., None, :] * wide[:, None]
    ).sum(-1)  # fmt: skip
    at = own.detach().sort(dim=-1, descending=True, stable=True).indices[..., :k]
    scores = own.gather(-1, at)
    p = torch.zeros_like(own).scatter(-1, at, scores.softmax(-1)) * counted[..., None, None, None]
    p = p.reshape(memories, -1, heads, 2, n).sum(1) / counted.view(memories, -1).sum(1).view(-1, 1, 1, 1)
    loss = (p * (p + 1e-8).log()).sum()
    wanted = wide - 0.9 * torch.autograd.grad(loss, wide)[0]
    flags = counted.view(memories, -1)
    given = scores.detach().float()
    mean, slope = marginal_of(given, at, flags, memories, n)
    assert gap(mean, p.detach().reshape(mean.shape)) < 1e-6
    found = moved_keys(keys, query, given, at, flags, slope, 0.9, distance=distance)
    assert gap(found - keys, (wanted - keys).detach()) < 2e-5
    assert torch.equal(moved_keys(keys, query, given, at, flags, slope, 0.9, distance=distance), found)


# The whole memory ---------------------------------------------------------------------------------------------


class Dense:
    """One memory in float64, every slot written out; all of it is differentiable."""

    def __init__(self, keys: Tensor, values: Tensor, k: int, rule: regard.WriteRule, score: str) -> None:
        self.keys, self.values, self.k, self.rule, self.score = keys, values, k, rule, score

    def halves(self, query: Tensor, keys: Tensor) -> Tensor:
        q = query.unflatten(-1, (2, -1))[..., None, :]
        return (q * keys).sum(-1) if self.score == "dot" else -torch.log(EPS + (q - keys).square().sum(-1))

    def kept(self, scores: Tensor) -> Tensor:
        at = scores.detach().sort(dim=-1, descending=True, stable=True).indices[..., : self.k]
        return torch.full_like(scores, -torch.inf).scatter(-1, at, scores.gather(-1, at))

    def weights(self, query: Tensor) -> Tensor:
        """[P, H, N], of which all of a token sum to one."""
        halves = self.halves(query, self.keys)
        scores = self.kept((halves[..., 0, :, None] + halves[..., 1, None, :]).flatten(-2))
        return scores.flatten(-2).softmax(-1).view(scores.shape)

    def read(self, query: Tensor) -> Tensor:
        return self.weights(query).sum(1) @ self.values

    def write(self, query: Tensor, target: Tensor, gate: Tensor, pairs: Tensor) -> None:
        """Tokens query [P, H, 2 d] that were read, of which those of `pairs` [P] have a target [P, Dv]."""
        rule, weights = self.rule, self.weights(query)
        whole, hits = weights.sum(1), (weights > 0).sum(1)
        step = torch.ones(len(query), dtype=torch.float64)
        if rule.name == "normalized":
            step = 1 / (whole.square() / hits.clamp(min=1)).sum(-1)
        elif rule.name == "reference":
            step = step * weights.shape[1] * self.k * len(query) / pairs.sum().clamp(min=1)
        error = torch.where(pairs[:, None], whole @ self.values - target, 0)
        moved = (rule.learning_rate * step * gate)[:, None] * whole
        values = self.values - moved.T @ error / hits.sum(0).clamp(min=1)[:, None]
        if rule.key_update == "entropy":
            keys = self.keys if self.keys.requires_grad else self.keys.clone().requires_grad_()
            p = self.kept(self.halves(query, keys)).softmax(-1).mean(0)
            loss = rule.address_weight * (p * (p + 1e-8).log()).sum()
            self.keys = self.keys - rule.learning_rate * torch.autograd.grad(loss, keys, create_graph=True)[0]
        self.values = values


def dense_streams(given: list[Tensor], good: Tensor, chunk: int, k: int, rule: Any, score: str, shared: bool) -> Any:
    """What rows read, and keys and values at the end, when all but the last token were written."""
    query, value, gate, keys, values = given
    rows = [tuple(range(len(query)))] if shared else [(row,) for row in range(len(query))]
    memories, read = [Dense(keys, values, k, rule, score) for _ in rows], torch.zeros_like(value)
    for memory, own in zip(memories, rows, strict=True):
        for start in range(0, query.shape[1], chunk):
            stop = min(start + chunk, query.shape[1])
            tokens = [(b, t) for b in own for t in range(start, stop) if good[b, t]]
            following = {(b, t): next((u for u in range(t + 1, stop) if good[b, u]), None) for b, t in tokens}
            if stop < query.shape[1] and rule.border:
                following = {
                    (b, t): stop if u is None and good[b, stop] else u for (b, t), u in following.items()
                }  # fmt: skip
            if not rule.look_ahead:
                following = {(b, t): t for b, t in tokens}
            at = tuple(torch.tensor(x) for x in zip(*tokens, strict=True))
            read = read.index_put(at, memory.read(query[at]))
            pairs = torch.tensor([following[each] is not None for each in tokens])
            to = torch.tensor([0 if following[each] is None else following[each] for each in tokens])
            memory.write(query[at], value[at[0], to], gate[at], pairs)
    return read, torch.stack([x.keys for x in memories]), torch.stack([x.values for x in memories])


def inputs(rows: int, tokens: int, heads: int, n: int, d: int, width: int) -> list[Tensor]:
    shapes = ((rows, tokens, heads, 2 * d), (rows, tokens, width), (rows, tokens), (heads, 2, n, d), (n * n, width))
    query, value, gate, keys, values = (drawn(*shape, seed=seed) for seed, shape in enumerate(shapes))
    return [query, value, gate.sigmoid(), keys, values]


def check_streams(
    given: list[Tensor], chunk: int, k: int, rule: regard.WriteRule, score: str, shared: bool, bad: Tensor | None = None
) -> None:
    good = torch.ones(given[2].shape, dtype=torch.bool) if bad is None else ~bad
    wide = [x.double().requires_grad_() for x in given]
    outs = dense_streams(wide, good, chunk, k, rule, score, shared)
    factors = [drawn(*x.shape, seed=20 + i) for i, x in enumerate(outs)]
    grads = torch.autograd.grad(sum((x * f).sum() for x, f in zip(outs, factors, strict=True)), wide)
    own = [x.clone() for x in given]
    if bad is not None:
        own[0][bad] = math.nan
        own[1][bad] = math.inf
    own = [x.requires_grad_() for x in own]
    how = {"rule": rule, "chunk_size": chunk, "top_k": k, "score": score, "shared": shared, "impl": "triton"}
    read, state = regard.fast_weight_memory(*own, **how)
    state = flush(state, **how)
    assert isinstance(state.values, TableValues)
    found = read, state.keys, state.values.dense()
    for a, b in zip(found, outs, strict=True):
        assert gap(a.detach(), b.detach()) < 2e-6
    loss = sum((x * f).sum() for x, f in zip(found, factors, strict=True))
    for name, a, b in zip(
        ["query", "value", "gate", "keys", "values"], torch.autograd.grad(loss, own), grads, strict=True
    ):
        if bad is not None and name in ("query", "value", "gate"):
            assert not a[bad].any(), name
        assert gap(a, b) < 2e-5, name


def sizes(*numbers: int) -> dict[str, int]:
    return dict(zip(("rows", "tokens", "heads", "n", "d", "width"), numbers, strict=True))


CASES = {
    "one": (sizes(1, 6, 1, 20, 3, 3), regard.WriteRule(address_weight=0.5), "idw", False),
    "dot": (sizes(1, 5, 1, 6, 3, 2), regard.WriteRule(address_weight=0.2), "dot", False),
    "heads": (sizes(1, 5, 2, 5, 2, 2), regard.WriteRule(address_weight=0.3), "idw", False),
    "own": (
        sizes(2, 5, 1, 5, 2, 2), regard.WriteRule("paper", address_weight=0.3), "idw", False
    ),
    "shared": (
        sizes(2, 5, 1, 5, 2, 2),
        regard.WriteRule("reference", learning_rate=0.2, border=False), "idw", True,
    ),
    "still": (
        sizes(1, 5, 1, 5, 2, 2),
        regard.WriteRule(key_update="none", look_ahead=False, gate_loss=True), "idw", False,
    ),
}  # fmt: skip


SLOW = ("dot", "heads", "own", "still")


@pytest.mark.parametrize("case", [pytest.param(x, marks=pytest.mark.slow) if x in SLOW else x for x in CASES])
def test_three_chunks_and_their_gradients(case: str) -> None:
    given, rule, score, shared = CASES[case]
    check_streams(inputs(**given), (given["tokens"] + 2) // 3, 3, rule, score, shared)


def test_what_is_not_finite_is_not_there() -> None:
    given = inputs(rows=2, tokens=7, heads=1, n=5, d=2, width=3)
    bad = torch.zeros(2, 7, dtype=torch.bool)
    bad[0, 2] = bad[1, 0] = bad[1, 3] = True
    check_streams(given, 3, 3, regard.WriteRule(address_weight=0.3), "idw", False, bad)


SMALL = {"rows": 2, "tokens": 7, "heads": 1, "n": 5, "d": 2, "width": 3}
HOW: dict[str, Any] = {"rule": regard.WriteRule(address_weight=0.3), "chunk_size": 3, "top_k": 2}


def test_the_same_bits_again() -> None:
    def once() -> list[Tensor]:
        given = [x.requires_grad_() for x in inputs(**SMALL)]
        read, state = regard.fast_weight_memory(*given, impl="triton", **HOW)
        return [read, state.keys, state.values.dense(), *torch.autograd.grad(read.square().sum(), given)]

    for one, other in zip(once(), once(), strict=True):
        assert torch.equal(one, other)


def test_other_weights_and_keys_that_follow_the_error() -> None:
    """What kernels do not know is done around them."""
    given = inputs(**SMALL)
    for how in (
        {"spec": "sparsemax"},
        {"rule": regard.WriteRule(key_update="mse", learning_rate=0.5)},
        {"rule": regard.WriteRule(key_update="pooled-entropy", learning_rate=0.5)},
    ):
        outs = [
            regard.fast_weight_memory(*(x.to(t) for x in given), **{**HOW, **how, "impl": impl})
            for impl, t in (("triton", torch.float32), ("reference", torch.float64))
        ]
        assert gap(outs[0][0], outs[1][0]) < 2e-6
        assert gap(outs[0][1].keys, outs[1][1].keys) < 2e-6


@pytest.mark.slow
def test_calls_of_any_length_and_padding() -> None:
    given = inputs(**SMALL)
    whole, end = regard.fast_weight_memory(*given, impl="triton", **HOW)
    state, read = None, []
    for cut in (slice(0, 1), slice(1, 5), slice(5, 7)):
        part = [x[:, cut] for x in given[:3]]
        out, state = regard.fast_weight_memory(*part, *given[3:], state=state, impl="triton", **HOW)
        read.append(out)
    assert gap(torch.cat(read, 1), whole.double()) < 1e-6
    assert gap(state.values.dense(), end.values.dense().double()) < 1e-6
    mask = torch.tensor([[True, False, True, True, False, True, True], [True] * 7])
    padded, _ = regard.fast_weight_memory(*given, mask=mask, impl="triton", **HOW)
    alone, _ = regard.fast_weight_memory(*(x[:1, mask[0]] for x in given[:3]), *given[3:], impl="triton", **HOW)
    assert gap(padded[:1, mask[0]], alone.double()) < 1e-6
    assert not padded[~mask].any()


# What is refused ----------------------------------------------------------------------------------------------


def test_what_kernels_do_not_do_is_said() -> None:
    given = inputs(**SMALL)

    def call(dtype: torch.dtype = torch.float32, **how: Any) -> None:
        regard.fast_weight_memory(*(x.to(dtype) for x in given), **{"impl": "triton", **HOW, **how})

    with pytest.raises(ArgumentError, match=r"impl='triton' stores values in float32 and bfloat16; .*float64"):
        call(torch.float64)
    with pytest.raises(ArgumentError, match=r"stores values in float32 and bfloat16; .*float16"):
        call(storage=torch.float16)
    wide = [*given[:3], torch.zeros(1, 2, 4097, 2), torch.zeros(1, 1).expand(4097**2, 3)]
    with pytest.raises(ArgumentError, match=r"at most 4096 sub-keys of a half; these are 4097"):
        regard.fast_weight_memory(*wide, impl="triton", **HOW)
    with pytest.raises(ArgumentError, match=r"joins at most 8192 pairs of a token; top_k=65"):
        regard.fast_weight_memory(
            *given[:3], drawn(1, 2, 66, 2), drawn(66**2, 3), impl="triton", **{**HOW, "top_k": 65}
        )
    leaf = given[1].clone().requires_grad_()
    read, _ = regard.fast_weight_memory(given[0], leaf, *given[2:], impl="triton", **HOW)
    with pytest.raises(ArgumentError, match="create_graph"):
        torch.autograd.grad(read.sum(), leaf, create_graph=True)
    _, state = regard.fast_weight_memory(*given, **HOW)
    assert not isinstance(state.values, TableValues)  # "auto" on a CPU
