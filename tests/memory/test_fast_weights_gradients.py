"""Gradients through the writes of fast-weight product-key memory: against finite differences, and where they end."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

import regard
from regard.memory.fast_weights import FastWeightState, flush

IMPLS = ("reference", "auto")
CHUNK = 3


def draw(n: int, tokens: int = 11, rows: int = 1, heads: int = 1, seed: int = 0, width: int = 2) -> list[Tensor]:
    """query [rows, tokens, heads, 4], value [rows, tokens, width], gate, keys, values: leaves in float64."""
    make = torch.Generator().manual_seed(seed)
    shapes = ((rows, tokens, heads, 4), (rows, tokens, width), (rows, tokens), (heads, 2, n, 2), (n * n, width))
    query, value, gate, keys, values = (torch.randn(s, generator=make, dtype=torch.float64) for s in shapes)
    return [x.requires_grad_() for x in (query, value, gate.sigmoid(), keys, values)]


def call(given: list[Tensor], **how: Any) -> tuple[Tensor, FastWeightState]:
    options = {"rule": regard.WriteRule(address_weight=0.3), "top_k": 3, "chunk_size": CHUNK, **how}
    return regard.fast_weight_memory(*given, **options)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize(("n", "rows", "heads"), [(4, 1, 1), (4, 2, 2), (8, 2, 2), (32, 1, 1)])
def test_gradients_through_three_writes(n: int, rows: int, heads: int, impl: str) -> None:
    """Of reads and of the memory that is left, by query, value, gate, first keys and first values."""
    given = draw(n, tokens=10, rows=rows, heads=heads)

    def out(*inputs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        read, state = call(list(inputs), impl=impl)
        after = flush(state, rule=regard.WriteRule(address_weight=0.3))
        return read, after.keys, after.values.dense()

    assert gradcheck(out, given, fast_mode=n > 4 or rows > 1)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("step", ["paper", "reference"])
@pytest.mark.parametrize("key_update", ["mse", "none"])
@pytest.mark.parametrize("shared", [False, True], ids=["own", "shared"])
def test_gradients_of_every_rule(step: str, key_update: str, shared: bool, impl: str) -> None:
    rule = regard.WriteRule(step, learning_rate=0.5, key_update=key_update)
    given = draw(4, rows=2)
    assert gradcheck(lambda *x: call(list(x), rule=rule, shared=shared, impl=impl)[0], given, fast_mode=True)


@pytest.mark.parametrize("spec", ["sparsemax", "biweight"])
@pytest.mark.parametrize("key_update", ["entropy", "pooled-entropy", "mse"])
def test_gradients_under_other_weights(spec: str, key_update: str) -> None:
    rule = regard.WriteRule(address_weight=0.3, key_update=key_update)
    assert gradcheck(lambda *x: call(list(x), rule=rule, spec=spec)[0], draw(4), fast_mode=True)


def test_gradients_with_padding_between() -> None:
    mask = torch.ones(2, 11, dtype=torch.bool)
    mask[0, :3] = mask[1, 4:6] = False
    assert gradcheck(lambda *x: call(list(x), mask=mask)[0], draw(4, rows=2), fast_mode=True)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("shared", [False, True], ids=["own", "shared"])
def test_padding_alone_has_gradients_of_zero(shared: bool, impl: str) -> None:
    given = draw(4, rows=2)
    read, _ = call(given, mask=torch.zeros(2, 11, dtype=torch.bool), shared=shared, impl=impl)
    assert not read.any()
    read.sum().backward()
    assert all(x.grad is None or not x.grad.any() for x in given)


def test_second_derivatives_of_the_reference() -> None:
    given = draw(3, tokens=7)
    assert gradgradcheck(lambda *x: call(list(x), impl="reference")[0], given)


@pytest.mark.parametrize("impl", IMPLS)
def test_gradients_cross_calls_until_detached(impl: str) -> None:
    given = draw(5)
    whole = torch.autograd.grad(call(given, impl=impl)[0].square().sum(), given)
    parts = [[x[:, :5] for x in given[:3]] + given[3:], [x[:, 5:] for x in given[:3]] + given[3:]]
    read, state = call(parts[0], impl=impl)
    again, _ = call(parts[1], impl=impl, state=state)
    cut = torch.autograd.grad((read.square().sum() + again.square().sum()), given)
    for a, b in zip(whole, cut, strict=True):
        assert (a - b).abs().max() < 1e-12
    again, _ = call(parts[1], impl=impl, state=state.detach())
    grads = torch.autograd.grad(again.square().sum(), given, allow_unused=True, materialize_grads=True)
    for x in grads[:3]:
        assert x[:, :5].abs().max() == 0
        assert x[:, 5:].abs().max() > 0


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("meta_grad", [True, False, 2])
def test_documents_begin_with_gradients_also_after_a_cut(meta_grad: bool | int, impl: str) -> None:
    """First keys and values that are learned hear of every document that begins, in whichever call."""
    given, later = draw(4, rows=2), draw(4, rows=2, seed=1)
    firsts = given[3:]
    _, state = call(given, impl=impl, meta_grad=meta_grad)
    ids = torch.tensor([[0] * 5 + [1] * 6, [0] * 4 + [1] * 7])
    read, _ = call(later[:3] + firsts, state=state.detach(), segment_ids=ids, impl=impl, meta_grad=meta_grad)
    begun = [(0, 5), (1, 4)]
    found = torch.autograd.grad(sum(read[b, t:].square().sum() for b, t in begun), firsts, retain_graph=True)
    fresh = [call([x[b : b + 1, t:] for x in later[:3]] + firsts, impl=impl, meta_grad=meta_grad)[0] for b, t in begun]
    expected = torch.autograd.grad(sum(x.square().sum() for x in fresh), firsts)
    for a, b in zip(found, expected, strict=True):
        assert (a - b).abs().max() < 1e-11
        assert b.abs().max() > 0.01
    went_on = sum(read[b, :t].square().sum() for b, t in begun)
    ended = torch.autograd.grad(went_on, firsts, allow_unused=True, materialize_grads=True)
    assert all(not x.any() for x in ended)


def reach(given: list[Tensor], meta_grad: bool | int, chunk: int, **how: Any) -> list[bool]:
    """Whether what chunk `chunk` reads has gradients by the first values, and by those of each chunk before it."""
    read, _ = call(given, meta_grad=meta_grad, **how)
    loss = read[:, chunk * CHUNK : (chunk + 1) * CHUNK].square().sum()
    value, first = torch.autograd.grad(loss, [given[1], given[4]], allow_unused=True, materialize_grads=True)
    found = [bool(value[:, c * CHUNK + 1 : (c + 1) * CHUNK + 1].abs().max() > 0) for c in range(chunk)]
    return [bool(first.abs().max() > 0), *found]


@pytest.mark.parametrize("impl", IMPLS)
def test_where_gradients_end(impl: str) -> None:
    """Through all writes, through none, or through at most m - 1."""
    given = draw(4, tokens=18)
    assert reach(given, True, 5, impl=impl) == [True] * 6
    for cut in (False, 1):
        assert reach(given, cut, 5, impl=impl) == [False] * 6
        assert reach(given, cut, 0, impl=impl) == [True]
    assert reach(given, 3, 5, impl=impl) == [False, False, False, False, True, True]
    assert reach(given, 3, 3, impl=impl) == [False] * 4
    assert reach(given, 3, 2, impl=impl) == [True, True, True]


@pytest.mark.parametrize("impl", IMPLS)
def test_without_gradients_through_writes_the_numbers_are_the_same(impl: str) -> None:
    given = draw(5)
    whole, state = call(given, impl=impl)
    for meta_grad in (False, 2):
        read, after = call(given, impl=impl, meta_grad=meta_grad)
        assert (read - whole).abs().max() < 1e-12
        assert (after.values.dense() - state.values.dense()).abs().max() < 1e-12
        query, values = torch.autograd.grad(read.square().sum(), [given[0], given[4]])
        assert query.isfinite().all()
        assert values.isfinite().all()
        assert query[:, -1].abs().max() > 0


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("meta_grad", [False, 2, 3])
def test_rows_out_of_step_are_cut_one_by_one(meta_grad: bool | int, impl: str) -> None:
    """Gradients of a row do not hang on who is beside it, nor on how the stream is cut into calls."""
    given = draw(4, tokens=23, rows=2)
    mask = torch.ones(2, 23, dtype=torch.bool)
    mask[1, :2] = mask[1, 9] = False
    read, state = [], None
    for cut in (slice(0, 7), slice(7, 23)):
        part = [x[:, cut] for x in given[:3]] + given[3:]
        out, state = call(part, mask=mask[:, cut], state=state, meta_grad=meta_grad, impl=impl)
        read.append(out)
    both = torch.cat(read, 1)
    for row in range(2):
        some = {"allow_unused": True, "materialize_grads": True}  # by gates, where no gradient passes a write
        own = torch.autograd.grad(both[row].square().sum(), given, retain_graph=True, **some)
        alone, _ = call([x[row : row + 1, mask[row]] for x in given[:3]] + given[3:], meta_grad=meta_grad, impl=impl)
        expected = torch.autograd.grad(alone.square().sum(), given, **some)
        for a, b in zip(own, expected, strict=True):
            assert (a - b).abs().max() < 1e-11


def test_a_memory_that_only_reads_hands_gradients_to_what_it_is() -> None:
    given = draw(4)
    _, state = call(given)
    later = draw(4, tokens=5, seed=1)
    read, _ = call(later[:3] + given[3:], state=state, frozen=True)
    grads = torch.autograd.grad(read.square().sum(), given)
    assert all(x.abs().max() > 0 for x in grads)


@pytest.mark.parametrize("impl", IMPLS)
def test_autocast_changes_no_bit(impl: str) -> None:
    given = [x.detach().float().requires_grad_() for x in draw(5, rows=2)]
    plain, state = call(given, impl=impl)
    grads = torch.autograd.grad(plain.square().sum(), given)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast, after = call(given, impl=impl)
    assert torch.equal(cast, plain)
    assert torch.equal(after.keys, state.keys)
    for a, b in zip(grads, torch.autograd.grad(cast.square().sum(), given), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_inputs_are_computed_in_float32(dtype: torch.dtype) -> None:
    given = [x.detach().to(dtype) for x in draw(5, rows=2)]
    read, state = call(given, storage=torch.float32)
    wide, _ = call([x.float() for x in given])
    assert read.dtype == dtype
    assert state.keys.dtype == torch.float32
    assert torch.equal(read, wide.to(dtype))


@pytest.mark.parametrize("impl", IMPLS)
def test_bfloat16_storage_rounds_what_is_written(impl: str) -> None:
    given = [x.detach().float() for x in draw(5, tokens=40, rows=2)]
    exact, _ = call(given, impl=impl)
    read, state = call(given, impl=impl, storage=torch.bfloat16)
    written = state.values.dense()
    assert torch.equal(written, written.bfloat16().to(written.dtype))
    assert read.dtype == state.keys.dtype == torch.float32
    error = float((read - exact).norm() / exact.norm())
    assert 1e-5 < error < 0.02


@pytest.mark.parametrize("address", [1.0, 10.0])
def test_bfloat16_storage_forgets_no_more_than_float32(address: float) -> None:
    """The squared error of reading a clustered stream, after 250 of 300 writes, within 2 %."""
    make = torch.Generator().manual_seed(11)
    which = torch.randint(0, 64, (1, 64 * 300), generator=make)
    prototypes, targets = torch.randn(64, 32, generator=make), torch.randn(64, 16, generator=make)
    query = prototypes[which] + 0.1 * torch.randn(1, 64 * 300, 32, generator=make)
    value = targets[which] + 0.3 * torch.randn(1, 64 * 300, 16, generator=make)
    keys, values = torch.randn(1, 2, 32, 16, generator=make), torch.randn(1024, 16, generator=make) / 4
    rule, errors = regard.WriteRule(address_weight=address, look_ahead=False), []
    for storage in (torch.float32, torch.bfloat16):
        with torch.no_grad():
            read, _ = regard.fast_weight_memory(
                query[:, :, None], value, None, keys, values, rule=rule, chunk_size=64, storage=storage
            )
        errors.append(float((read - value)[:, 64 * 250 :].square().mean()))
    assert errors[0] < 0.3 * float(value.square().mean())  # it has learned
    assert abs(errors[1] / errors[0] - 1) < 0.02
