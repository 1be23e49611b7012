"""Reading and writing of fast-weight product-key memory against dense losses and autograd, in float64."""

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from dense_fast_weights import Dense, all_scores, best, half_scores
from oracles import entmax_rows
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

import regard
from regard.memory.fast_weights import FastWeightState, flush

IMPLS = ("reference", "auto")
CHUNK, TOP_K = 5, 3
Streams = Sequence[Tensor]


def draw(
    tokens: int, rows: int = 2, heads: int = 2, n: int = 5, half: int = 3, width: int = 4, seed: int = 0,
    dtype: torch.dtype = torch.float64,
) -> Streams:  # fmt: skip
    """query [rows, tokens, heads, 2 half], value [rows, tokens, width], gate [rows, tokens], keys, values."""
    make = torch.Generator().manual_seed(seed)
    tables = ((heads, 2, n, half), (n * n, width))
    shapes = ((rows, tokens, heads, 2 * half), (rows, tokens, width), (rows, tokens), *tables)
    query, value, gate, keys, values = (torch.randn(s, generator=make, dtype=torch.float64).to(dtype) for s in shapes)
    return query, value, gate.sigmoid(), keys, values


def call(given: Streams, rule: regard.WriteRule, **how: Any) -> tuple[Tensor, FastWeightState]:
    return regard.fast_weight_memory(*given, rule=rule, **{"top_k": TOP_K, "chunk_size": CHUNK, **how})


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("heads", [1, 3])
def test_one_write_of_a_single_pair_is_exact(heads: int, impl: str) -> None:
    """In float32, also for a query that sits on a key (all weight on one slot) and where heads meet in a slot."""
    rule = regard.WriteRule(key_update="none", look_ahead=False)
    for seed in range(20):
        query, value, _, keys, values = draw(1, 2, heads, seed=seed, dtype=torch.float32)
        if seed % 2:
            keys[:] = keys[:1]
            query[:, 0] = torch.cat([keys[0, 0, 2], keys[0, 1, 3]])
        given = (query, value, None, keys, values)
        before, state = call(given, rule, impl=impl)
        after, _ = call(given, rule, state=flush(state, rule=rule), frozen=True)
        assert (after - value).norm() < 1e-5 * (before - value).norm()


def repeated(step: str, times: int, on_key: float) -> list[float]:
    """The errors of a chunk of queries near keys, written again and again."""
    query, value, _, keys, values = draw(9, 1, 1, n=8, seed=3)
    place = torch.arange(9) % 4
    query[0, :, 0] = torch.cat([keys[0, 0, place], keys[0, 1, place]], -1) + on_key * query[0, :, 0]
    rule = regard.WriteRule(step, key_update="none", look_ahead=False)
    state, errors = None, []
    for _ in range(times):
        read, state = call((query, value, None, keys, values), rule, state=state, chunk_size=9)
        state = flush(state, rule=rule)
        errors.append(float((read - value).norm()))
    return errors


@pytest.mark.parametrize("on_key", [0.0, 0.01, 0.3, 1.0])
def test_writing_again_never_expands(on_key: float) -> None:
    errors = repeated("normalized", 12, on_key)
    assert all(b <= a * (1 + 1e-9) for a, b in itertools.pairwise(errors))
    assert errors[-1] < 0.9 * errors[0]


def test_the_released_rule_diverges_on_a_key() -> None:
    errors = repeated("reference", 12, 0.0)
    assert errors[-1] > 100 * errors[0]


@pytest.mark.parametrize("clustered", [False, True], ids=["random", "clustered"])
@pytest.mark.parametrize("address", [0.01, 1.0, 10.0])
def test_a_key_update_does_not_lower_the_entropy(address: float, clustered: bool) -> None:
    """In 38 of 40 random chunks."""
    risen = 0
    for seed in range(40):
        make = torch.Generator().manual_seed(seed)
        query = torch.randn(1, 256, 1, 32, generator=make, dtype=torch.float64)
        if clustered:
            query = query[:, torch.randint(0, 6, (256,), generator=make)] + 0.2 * query
        keys = torch.randn(1, 2, 32, 16, generator=make, dtype=torch.float64)
        values, value = torch.zeros(1024, 2, dtype=torch.float64), torch.zeros(1, 256, 2, dtype=torch.float64)
        rule = regard.WriteRule(address_weight=address)
        _, state = call((query, value, None, keys, values), rule, chunk_size=256, top_k=8)
        after = flush(state, rule=rule)
        before = Dense(keys, values, 8).entropy(query)
        risen += bool(Dense(after.keys[0], values, 8).entropy(query) >= before)
    assert risen >= 38


@pytest.mark.parametrize(("spec", "alpha"), [("sparsemax", 2.0), ("biweight", 1.5), ("triweight", 4 / 3)])
def test_other_weights_of_the_slots(spec: str, alpha: float) -> None:
    """One write moves each selected slot by its share of the error, all heads' slots weighed together."""
    query, value, _, keys, values = draw(2, 1, 2)
    rule = regard.WriteRule("paper", key_update="none")
    read, state = call((query, value, None, keys, values), rule, spec=spec)
    after = flush(state, rule=rule, spec=spec).values.dense()[0]
    scores = all_scores(half_scores(query[0], keys))
    at = best(scores, TOP_K)
    weights = torch.from_numpy(entmax_rows(scores.gather(-1, at).flatten(-2).numpy(), alpha).astype(float))
    places = at.flatten(-2)
    expected = (weights[..., None] * values[places]).sum(1)
    assert (read[0] - expected).abs().max() < 1e-12
    readers = torch.bincount(places.flatten(), minlength=25).clamp(min=1)
    share = torch.zeros(25, dtype=torch.float64).index_add(0, places[0], weights[0]) / readers
    moved = values - share[:, None] * (expected[0] - value[0, 1])
    assert (after - moved).abs().max() < 1e-12


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("heads", [1, 2])
def test_a_token_that_gives_no_slot_weight(heads: int, impl: str) -> None:
    """Token 1 is written, and token 9 ends a chunk without a target. Both read 0, and their gates matter to nothing."""
    given = draw(tokens=15, rows=1, heads=heads)
    given[0][:, [1, 9]] += 100
    leaves = [x.requires_grad_() for x in given]
    rule = regard.WriteRule(key_update="none", border=False)
    out, _ = call(leaves, rule, impl=impl, spec="biweight*fixed(bias=3,empty=zero)")
    assert not out[:, [1, 9]].any()
    assert out[:, 10:].all()
    found = torch.autograd.grad(out.square().sum(), leaves)
    assert all(x.isfinite().all() for x in (out, *found))
    assert not found[2][:, [1, 9]].any()
    assert found[2][:, 0].all()


@pytest.mark.parametrize("spec", ["sparsemax", "biweight", "epanechnikov*anchored"])
def test_the_error_reaches_keys_through_any_weights(spec: str) -> None:
    """key_update="mse" against finite differences of the chunk's error by the keys."""
    query, value, gate, keys, values = draw(4, 1, 1)
    rule = regard.WriteRule("paper", key_update="mse")
    _, state = call((query, value, gate, keys, values), rule, spec=spec)
    moved = flush(state, rule=rule, spec=spec).keys[0] - keys

    def error(own: Tensor) -> float:
        read, _ = call((query, value, gate, own, values), rule, spec=spec, frozen=True)
        each = (read[:, :3] - value[:, 1:]).square().mean(-1) / 2
        return float((gate[:, :3] * each).mean())

    for at in itertools.product([0], [0, 1], range(5), [1]):
        step = torch.zeros_like(keys)
        step[at] = 1e-6
        slope = (error(keys + step) - error(keys - step)) / 2e-6
        assert abs(float(moved[at]) + slope) < 1e-6
    assert moved.abs().max() > 1e-3


def leaves(n: int, tokens: int = 11, rows: int = 1) -> list[Tensor]:
    return [x.requires_grad_() for x in draw(tokens, rows, 1, n, half=2, width=2)]


def read_of(given: list[Tensor], **how: Any) -> tuple[Tensor, FastWeightState]:
    return call(given, how.pop("rule", regard.WriteRule(address_weight=0.3)), chunk_size=3, **how)


@pytest.mark.parametrize("spec", ["sparsemax", "biweight"])
@pytest.mark.parametrize("key_update", ["entropy", "pooled-entropy", "mse"])
def test_gradients_under_other_weights(spec: str, key_update: str) -> None:
    rule = regard.WriteRule(address_weight=0.3, key_update=key_update)
    assert gradcheck(lambda *x: read_of(list(x), rule=rule, spec=spec)[0], leaves(4), fast_mode=True)


def test_second_derivatives_of_the_reference() -> None:
    assert gradgradcheck(lambda *x: read_of(list(x), impl="reference")[0], leaves(3, tokens=7))


@pytest.mark.parametrize("impl", IMPLS)
def test_autocast_changes_no_bit(impl: str) -> None:
    given = [x.detach().float().requires_grad_() for x in leaves(5, rows=2)]
    plain, state = read_of(given, impl=impl)
    grads = torch.autograd.grad(plain.square().sum(), given)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast, after = read_of(given, impl=impl)
    found = (cast, after.keys, *torch.autograd.grad(cast.square().sum(), given))
    assert all(torch.equal(a, b) for a, b in zip(found, (plain, state.keys, *grads), strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_inputs_are_computed_in_float32(dtype: torch.dtype) -> None:
    given = [x.detach().to(dtype) for x in leaves(5, rows=2)]
    read, state = read_of(given, storage=torch.float32)
    wide, _ = read_of([x.float() for x in given])
    assert read.dtype == dtype
    assert state.keys.dtype == torch.float32
    assert torch.equal(read, wide.to(dtype))


@pytest.mark.parametrize("impl", IMPLS)
def test_bfloat16_storage_rounds_what_is_written(impl: str) -> None:
    given = [x.detach().float() for x in leaves(5, tokens=40, rows=2)]
    exact, _ = read_of(given, impl=impl)
    read, state = read_of(given, impl=impl, storage=torch.bfloat16)
    written = state.values.dense()
    assert torch.equal(written, written.bfloat16().to(written.dtype))
    assert read.dtype == state.keys.dtype == torch.float32
    error = float((read - exact).norm() / exact.norm())
    assert 1e-5 < error < 0.02
