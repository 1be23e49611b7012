"""What a row cannot see never matters, what it can see always does, and a row that sees nothing is zero."""

from typing import Any

import pytest
import torch
from mistakes import refuses
from torch import Tensor

import regard

from . import oracle
from .cases import (
    SPECS,
    Data,
    attend,
    draw,
    every_pair,
    few_pairs_first,
    gradients,
    learned,
    masks,
    named,
    outputs,
    run,
    same,
)

FILLS = (1e4, torch.finfo(torch.float32).max, float("nan"), float("inf"))


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
        for fill in FILLS:
            other = _hide(clean, seen, fill)
            given = {n: _without_rows(x, seen) if n in ("ridge", "probe") else x for n, x in params.items()}
            again = attend(SPECS[label], impl, other, **{**call, "params": given})
            what = f"{how}, {fill}"
            same(again, out, what)
            after = gradients(again, named(other, given, scale))
            for name, grad in after.items():
                same(grad, before[name], f"gradient of {name}: {what}")
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
                value = getattr(rows, name).expand(empty.shape)
                assert (value[empty] == 0).all(), f"{impl} {name}"
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
            for name, grad in gradients(again[~hit], named(other)).items():
                same(grad, before[name], f"{what}: gradient of {name}")


def _spoil(clean: Data, which: str, bad: float, how: str) -> tuple[Data, Tensor]:
    """One corrupted number at position 3 of head group 1 of batch 0, and the rows [B, H, Tq] that see it."""
    name = {"query": "q", "key": "k", "value": "v"}[which]
    corrupted = getattr(clean, name).clone()
    head = 1
    corrupted[0, head, 3, 1] = bad
    call = masks(*clean.sizes)[how]
    seen = oracle.visible(*clean.sizes, **call)
    hit = torch.zeros(clean.sizes[:3], dtype=torch.bool)
    if which == "query":
        hit[0, head, 3] = seen[0, head, 3].any()
    else:
        hit[0, 2 * head : 2 * head + 2] = seen[0, 2 * head : 2 * head + 2, :, 3]
    return clean.with_(**{name: corrupted}).leaves(), hit
