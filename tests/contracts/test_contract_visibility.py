"""Who may influence whom: exactly what causal order, window, offset and mask say. What a row cannot see never matters,
what it can see always does, and a row that sees nothing is zero."""

from functools import cache
from typing import Any

import pytest
import torch
from mistakes import refuses
from torch import Tensor

import regard

from . import oracle
from .cases import (
    PAIRS,
    PRESETS,
    REPRESENTATIVES,
    SPECS,
    Data,
    attend,
    close,
    draw,
    every_pair,
    few_pairs_first,
    gradients,
    impls_of,
    learned,
    masks,
    named,
    outputs,
    run,
    same,
)

ORDERS = ("causal", "strict", "pairs, strict", "window, strict", "offsets, window, causal", "window", "behind")
POISON = (None, 1e4, torch.finfo(torch.float32).max, float("nan"), float("inf"))


@every_pair
def test_values_influence_exactly_the_rows_that_weigh_them(label: str, impl: str) -> None:
    """With one-hot values the output is the Jacobian by the values: zero to the last bit outside what the
    arguments permit, and not zero wherever the oracle's kernel has weight."""
    data = draw(6, 8)
    data = data.with_(v=torch.eye(8, dtype=torch.float64).expand(2, 2, 8, 8))
    for how, call, found in outputs(label, impl, data, ORDERS):
        seen = oracle.visible(*data.sizes, **call)
        assert (found[~seen] == 0).all(), how
        if oracle.knows(oracle.read(SPECS[label])):
            _, p = oracle.attention(oracle.read(SPECS[label]), *data.tensors, seen)
            same(found != 0, p != 0, how)


@few_pairs_first
def test_jacobian_by_keys_and_queries_stays_inside(label: str, impl: str) -> None:
    """d out_i / d k_j is zero to the last bit for hidden pairs, d out_i / d q_j for i != j."""
    data = draw(6, 8, batch=1, heads=1).leaves()
    for how, call, out in outputs(label, impl, data, ("strict", "offsets, window, causal", "pairs")):
        seen = oracle.visible(*data.sizes, **call)[0, 0]
        for i in range(6):
            dq, dk, dv = gradients(out[0, 0, i], named(data), retain_graph=True).values()
            assert (dq[0, 0, torch.arange(6) != i] == 0).all(), how
            assert (dk[0, 0, ~seen[i]] == 0).all(), how
            assert (dv[0, 0, ~seen[i]] == 0).all(), how


@few_pairs_first
@pytest.mark.parametrize("order", ["is_causal", "exclude_self"])
def test_later_tokens_leave_earlier_rows_alone(label: str, impl: str, order: str) -> None:
    """To the last bit, in the output and in every gradient, whatever the later tokens become."""
    length, t = 24, 17
    data = draw(length, dtype=torch.float32).leaves()
    for how, _, out in outputs(label, impl, data, {order: {order: True}}):
        before = gradients(out[:, :, :t], named(data))
        for poison in POISON:
            later = data.map(lambda x: _changed(x, t, poison))  # noqa: B023
            again = attend(SPECS[label], impl, later, **{how: True})
            same(again[:, :, :t], out[:, :, :t], f"{poison}")
            if poison == POISON[2]:  # the scores of later rows overflow: gradients are asked of large values alone
                later = data.leaves().with_(v=_changed(data.v, t, poison))
                again = attend(SPECS[label], impl, later, **{how: True})
            after = gradients(again[:, :, :t], named(later))
            for name in before:
                same(after[name][:, :, :t], before[name][:, :, :t], f"gradient of {name}, {poison}")
                assert (after[name][:, :, t:] == 0).all(), f"gradient of later {name}, {poison}"


def _changed(x: Tensor, t: int, poison: float | None) -> Tensor:
    x = x.detach().clone()
    x[:, :, t:] = -3 * x[:, :, t:] if poison is None else poison
    return x.requires_grad_()


@pytest.mark.usefixtures("tiny_blocks")
@pytest.mark.parametrize("label", REPRESENTATIVES)
def test_every_way_to_limit_a_row_equals_the_oracle(label: str) -> None:
    """Offsets as an int and as a tensor, windows, masks, order, alone and together, over block borders; also
    with more queries than keys, whose leading rows see nothing."""
    for queries, keys in ((7, 11), (37, 40), (9, 4), (1, 23)):
        data = draw(queries, keys, dim=4)
        for impl in ("auto", *impls_of(label)):
            for how, _, out in outputs(label, impl, data, masks(*data.sizes)):
                expected, _ = oracle.attention(oracle.read(SPECS[label]), *data.tensors, _seen(queries, keys, how))
                close(out, expected, 1e-9, f"{impl} {queries}x{keys} {how}")


@cache
def _seen(queries: int, keys: int, how: str) -> Tensor:
    sizes = (2, 2, queries, keys)
    return oracle.visible(*sizes, **masks(*sizes)[how])


def _hide(data: Data, seen: Tensor, fill: float) -> Data:
    """`fill` in every key and value that no row sees, and in every query that sees nothing."""
    q, k, v = (x.detach().clone() for x in data.tensors)
    q[~seen.any(-1)] = fill
    hidden = ~seen.any(-2)
    k[hidden], v[hidden] = fill, fill
    return Data(q, k, v).leaves()


def _without_rows(x: Tensor, seen: Tensor) -> Tensor:
    """Put NaN into the numbers of the rows that see nothing."""
    x = x.detach().clone()
    x[~seen.any(-1)] = torch.nan
    return x.requires_grad_()


def _limits(data: Data) -> dict[str, dict[str, Any]]:
    """Calls that hide some keys from everyone and leave some queries without keys."""
    batch, heads, queries, keys = data.sizes
    padding = torch.ones(batch, heads, 1, keys, dtype=torch.bool)
    padding[0, :, :, :2] = False
    padding[-1, :, :, 4] = False
    pairs = padding.repeat(1, 1, queries, 1)
    pairs[0, 0, 3] = False
    return {
        "padding, causal": {"attn_mask": padding, "is_causal": True},
        "pairs, strict": {"attn_mask": pairs, "exclude_self": True},
        "behind": {"is_causal": True, "query_offset": -2},
        "offsets": {"exclude_self": True, "query_offset": torch.arange(batch)},
        "far": {"window": 2, "query_offset": 5},
    }


@every_pair
def test_hidden_content_cannot_matter(label: str, impl: str) -> None:
    """Hidden keys, values and queries full of large numbers, NaN or inf: outputs and gradients at visible
    places are equal to the last bit, gradients at hidden places exactly 0."""
    clean = draw(6, 9, dtype=torch.float32)
    data = clean.leaves()
    params, scale = learned(SPECS[label], data)
    for how, call, out in outputs(label, impl, data, _limits(clean), scale=scale, params=params):
        seen = oracle.visible(*clean.sizes, **_limits(clean)[how])
        before = gradients(out, named(data, params, scale))
        for fill in POISON[1:]:
            other = _hide(clean, seen, fill)
            given = {n: _without_rows(x, seen) if n in ("ridge", "probe") else x for n, x in params.items()}
            again = attend(SPECS[label], impl, other, **{**call, "params": given})
            what = f"{how}, {fill}"
            same(again, out, what)
            after = gradients(again, named(other, given, scale))
            same(after, before, f"gradients, {what}")
            assert (after["query"][~seen.any(-1)] == 0).all(), what
            assert (after["key"][~seen.any(-2)] == 0).all(), what
            assert (after["value"][~seen.any(-2)] == 0).all(), what


def _without_keys(data: Data) -> dict[str, dict[str, Any]]:
    batch, heads, queries, keys = data.sizes
    some = torch.ones(batch, heads, queries, keys, dtype=torch.bool)
    some[:, 0, 1] = False
    some[0, :, -1] = False
    return {
        "nothing": {"attn_mask": torch.zeros(batch, 1, 1, keys, dtype=torch.bool)},
        "some rows": {"attn_mask": some},
        "first row": {"exclude_self": True, "query_offset": 0},
        "more queries than keys": {"is_causal": True},
        "far behind": {"is_causal": True, "query_offset": -100},
        "window far ahead": {"is_causal": True, "window": 2, "query_offset": 100},
    }


@few_pairs_first
def test_rows_without_keys_are_zero(label: str, impl: str) -> None:
    """Output and every gradient of such a row are exactly 0; the other rows are alive and finite."""
    data = draw(7, 4).leaves()
    params, scale = learned(SPECS[label], data)
    inputs = named(data, params, scale)
    for how, _, out in outputs(label, impl, data, _without_keys(data), scale=scale, params=params):
        empty = ~oracle.visible(*data.sizes, **_without_keys(data)[how]).any(-1)
        assert empty.any()
        assert (out[empty] == 0).all(), how
        alone = gradients(out[empty], inputs, retain_graph=True)
        assert all((grad == 0).all() for grad in alone.values()), how
        found = gradients(out, inputs)
        assert all(grad.isfinite().all() for grad in found.values()), how
        for name in {*inputs} - {"key", "value"}:
            assert (found[name][empty] == 0).all(), f"{how}: gradient of {name}"
        assert bool((found["value"] != 0).any()) == bool((~empty).any()), how


@pytest.mark.parametrize("label", SPECS)
def test_diagnostics_of_rows_without_keys(label: str) -> None:
    """Weights, support and bandwidth are 0, and `empty` says so, in exactly those rows."""
    data = draw(6, 5)
    for call in _without_keys(data).values():
        empty = ~oracle.visible(*data.sizes, **call).any(-1)
        for impl in ("reference", "auto"):
            _, rows = run(SPECS[label], impl, data, return_diagnostics=True, **call)
            same(rows.empty.expand(empty.shape), empty)
            for name in ("tau", "bandwidth", "support", "effective_sample_size", "fallback", "status"):
                assert (getattr(rows, name).expand(empty.shape)[empty] == 0).all(), f"{impl} {name}"
            if rows.weights is not None:
                assert (rows.weights[empty] == 0).all()


@few_pairs_first
@pytest.mark.parametrize(("queries", "keys"), [(0, 4), (3, 0), (0, 0)])
def test_empty_sequences(label: str, impl: str, queries: int, keys: int) -> None:
    """No queries: an empty output. No keys: zeros. Both with zero gradients; no error of torch's own."""
    data = draw(queries, keys).leaves()
    padding = torch.ones(2, 1, 1, keys, dtype=torch.bool)
    ways = ({}, {"is_causal": True}, {"exclude_self": True, "window": 2}, {"attn_mask": padding})
    for _, _, out in outputs(label, impl, data, dict(enumerate(ways))):
        assert out.shape == (2, 2, queries, 2)
        assert (out == 0).all()
        assert all((grad == 0).all() for grad in gradients(out, named(data)).values())


def test_no_features_is_an_argument_error() -> None:
    refuses("no features", regard.attention, *draw(3, dim=0).tensors, "biweight")


@every_pair
def test_what_is_not_finite_shows_in_exactly_the_rows_that_see_it(label: str, impl: str) -> None:
    """Those rows are NaN in every component, even where the kernel gives the key no weight; all other rows
    are equal to the last bit, and so are gradients that flow through them."""
    clean = draw(6, 8, heads=4, kv_heads=2, dtype=torch.float32)
    data, ways = clean.leaves(), ("causal", "pairs", "offsets, strict", "segments")
    for how, call, out in outputs(label, impl, data, ways, enable_gqa=True):
        for which, bad in (("query", float("nan")), ("key", float("inf")), ("value", float("nan"))):
            what = f"{which}, {how}"
            other, hit = _spoil(clean, which, bad, how)
            again = attend(SPECS[label], impl, other, **call)
            assert again[hit].isnan().all(), what
            same(again[~hit], out[~hit], what)
            before = gradients(out[~hit], named(data), retain_graph=True)
            same(gradients(again[~hit], named(other)), before, f"{what}: gradients")


NUMBERS = [
    (label, name, impl)
    for label, impl in PAIRS
    if label in PRESETS
    for name in (*SPECS[label].params, *(["scale"] if SPECS[label].takes_scale else []))
]


@pytest.mark.parametrize(("label", "name", "impl"), NUMBERS)
def test_a_parameter_that_is_not_finite_makes_its_rows_nan(label: str, name: str, impl: str) -> None:
    """A row without keys stays 0. Other rows, and gradients through them, are as without it."""
    data, mask, hit = draw(6, batch=1, dim=4, dtype=torch.float32).leaves(), torch.ones(6, 6) > 0, torch.zeros(1, 2, 6)
    mask[5], hit[0, 0, 2], hit[0, 0, 4] = False, 1, 1
    good = torch.full((1, 2, 6), 2.0)
    bad = good.clone()
    # an infinite ridge is a local constant
    bad[0, 0, 2], bad[0, 0, 4], bad[0, 1, 5] = torch.nan, torch.nan if name == "ridge" else torch.inf, torch.nan
    results = []
    for number in (good.requires_grad_(), bad.requires_grad_()):
        given = {"scale": number} if name == "scale" else {"params": {name: number}}
        for _, _, out in outputs(label, impl, data, {"": {"attn_mask": mask}}, **given):
            results.append((out, gradients(out[hit == 0], {**named(data), name: number})))
    if not results:
        return
    (out, before), (again, after) = results
    same(again.isnan().all(-1), hit == 1)
    assert not again[0, 1, 5].any()
    same(again[hit == 0], out[hit == 0])
    torch.testing.assert_close(after, before)


def _spoil(clean: Data, which: str, bad: float, how: str) -> tuple[Data, Tensor]:
    """One corrupted number at position 3 of head group 1 of batch 0, and the rows [B, H, Tq] that see it."""
    corrupted = named(clean)[which].clone()
    corrupted[0, 1, 3, 1] = bad
    seen = oracle.visible(*clean.sizes, **masks(*clean.sizes)[how])
    hit = torch.zeros(clean.sizes[:3], dtype=torch.bool)
    if which == "query":
        hit[0, 1, 3] = seen[0, 1, 3].any()
    else:
        hit[0, 2:4] = seen[0, 2:4, :, 3]
    return clean.with_(**{which[0]: corrupted}).leaves(), hit
