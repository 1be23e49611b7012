"""`regard.attention(..., impl="triton")` at degree 0 from outside: every rule and every way to say who sees whom,
against dense float64 formulas; and what a call promises whatever it computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attention_calls import BATCH, HEADS, IDS, T, draw, pairs, some, triton, weight_of
from dense_oracles import RULES, Rule, attend, near, scores, seen_pairs
from torch import Tensor

import regard
from regard.triton.runtime import tiles

pytestmark = pytest.mark.usefixtures("in_bounds")

KEEP = torch.rand(BATCH, 1, 1, T, generator=torch.Generator().manual_seed(5)) > 0.4


CALLS: dict[str, tuple[int, int, dict[str, Any]]] = {
    "all": (T, T, {}),
    "causal": (T, T, {"is_causal": True}),
    "strict": (T, T, {"exclude_self": True}),
    "window": (T, T, {"is_causal": True, "window": 6}),
    "strict window": (T, T, {"exclude_self": True, "window": 12}),
    "both sides": (T, T, {"window": 5}),
    "segments": (T, T, {"segment_ids": IDS, "is_causal": True}),
    "segments, both sides": (T, T, {"segment_ids": IDS[:1]}),
    "mask": (T, T, {"attn_mask": KEEP, "is_causal": True}),
    "mask of heads": (T, T, {"attn_mask": KEEP.expand(BATCH, HEADS, 1, T) ^ torch.tensor([[[[True]], [[False]]]])}),
    "fewer queries": (11, T, {"is_causal": True}),
    "more queries": (T, 17, {"is_causal": True}),
    "an offset": (17, T, {"is_causal": True, "query_offset": 7, "window": 9}),
    "offsets": (17, T, {"is_causal": True, "query_offset": torch.tensor([15, -6])}),
    "offsets, both sides": (17, T, {"window": 8, "query_offset": torch.tensor([-20, 12]), "attn_mask": KEEP}),
}


def checked(leaves: list[Tensor], rule: Rule, seen: Tensor, most: tuple[float, float], **call: Any) -> None:
    """Output and gradients against the dense form of the same numbers."""
    out = triton(leaves, rule.text, **call)
    assert out.dtype == leaves[0].dtype
    exact = [x.detach().double().requires_grad_() for x in leaves]
    expected = attend(*exact, seen, rule)
    weight = weight_of(out)
    found = torch.autograd.grad((out * weight).sum(), leaves)
    wanted = torch.autograd.grad((expected * weight.double()).sum(), exact, allow_unused=True)
    wanted = [torch.zeros_like(x) if g is None else g for g, x in zip(wanted, exact, strict=True)]
    assert [x.dtype for x in found] == [x.dtype for x in leaves]
    near([out, *found], [expected, *wanted], (most[0], *[most[1]] * 3), (rule.text, call.keys()))


ORDERS = [(rule, call) for rule in RULES for call in CALLS]


QUICK = [ORDERS[call + len(CALLS) * (3 * call % len(RULES))] for call in range(0, len(CALLS), 2)]
"""Every other call, each with another rule."""


WIDTHS = [(1, 1), (16, 40), (40, 16), (64, 64), (100, 3), (128, 100), (256, 128), (64, 256)]


WIDE = [(rule, *w) for rule in RULES for w in (WIDTHS if rule in ("softmax", "adaptive 2") else WIDTHS[::3])]


TEXTS = ("biweight*adaptive*cosine", "epanechnikov*anchored*euclidean", "rbf")


WAYS: dict[str, dict[str, Any]] = {
    "all": {},
    "window": {"window": 30, "is_causal": True},
    "offsets": {"query_offset": torch.tensor([50, -1]), "is_causal": True},
}


ONE = [(rule, way) for rule in RULES for way in WAYS]


@pytest.mark.parametrize(("rule", "call"), pairs(ORDERS, QUICK))
def test_every_rule_in_every_order(rule: str, call: str, poisoned: None) -> None:
    queries, keys, how = CALLS[call]
    with tiles.forced(rows=16, keys=16):
        seen = seen_pairs(BATCH, HEADS, queries, keys, **how)
        checked(draw(queries, keys, 5, 3), RULES[rule], seen, (2e-6, 2e-5), **how)


@pytest.mark.slow
@pytest.mark.parametrize(("rule", "call"), ORDERS[::4])
def test_every_rule_in_every_order_in_bfloat16(rule: str, call: str, poisoned: None) -> None:
    queries, keys, how = CALLS[call]
    with tiles.forced(rows=16, keys=16):
        seen = seen_pairs(BATCH, HEADS, queries, keys, **how)
        checked(draw(queries, keys, 24, 20, dtype=torch.bfloat16), RULES[rule], seen, (6e-3, 1.5e-2), **how)


@pytest.mark.parametrize(("rule", "dim", "value_dim"), pairs(WIDE, [("adaptive 2", 100, 3)]))
def test_every_width(rule: str, dim: int, value_dim: int, poisoned: None) -> None:
    """Of one feature the queries' gradients cancel: those of normrelu are 0, whatever the length of a query."""
    cancel = 4 if dim == 1 else 1
    for dtype, (out, grad) in ((torch.bfloat16, (6e-3, 1.5e-2)), (torch.float32, (4e-6, 4e-5))):
        leaves = draw(20, 33, dim, value_dim, batch=1, dtype=dtype, seed=dim)
        most = (out, cancel * grad)
        checked(leaves, RULES[rule], seen_pairs(1, HEADS, 20, 33, is_causal=True), most, is_causal=True)


@pytest.mark.parametrize(
    ("rule", "length"),
    [
        pytest.param(r, n, marks=[] if (r, n) == ("anchored 1", 129) else [pytest.mark.slow])
        for r in RULES
        for n in (1, 5, 63, 100, 129)
    ],
)
def test_every_length_with_the_tiles_that_are_shipped(rule: str, length: int, poisoned: None) -> None:
    leaves = draw(length, length, 16, batch=1)
    checked(leaves, RULES[rule], seen_pairs(1, HEADS, length, length, is_causal=True), (3e-6, 3e-5), is_causal=True)


@pytest.mark.slow
@pytest.mark.parametrize("heads", some([(4, 4), (4, 2), (6, 1), (8, 1)], [(4, 2)]))
def test_heads_share_keys(heads: tuple[int, int]) -> None:
    with tiles.forced(rows=16, keys=16):
        leaves = draw(19, 19, 4, batch=1, heads=heads[0], kv=heads[1])
        checked(leaves, RULES["anchored 2"], seen_pairs(1, heads[0], 19, 19, window=7), (2e-6, 2e-5), window=7)


@pytest.mark.parametrize("name", some(RULES, ["anchored 1"]))
def test_numbers_of_rows(name: str, poisoned: None) -> None:
    """Scales, margins and biases as tensors, with their gradients."""
    rule = RULES[name]
    leaves, make = draw(), torch.Generator().manual_seed(3)
    scale = (torch.rand(BATCH, HEADS, T, generator=make) + 0.2).requires_grad_()
    number = (torch.rand(BATCH, HEADS, T, generator=make) + 0.3).requires_grad_()
    named = {"anchored": "margin", "fixed": "bias"}.get(rule.kind)
    numbers = [scale] if named is None else [scale, number]
    with tiles.forced(rows=16, keys=16):
        out = triton(leaves, rule.text, is_causal=True, scale=scale, params={} if named is None else {named: number})
        weight = weight_of(out)
        found = torch.autograd.grad((out * weight).sum(), [*leaves, *numbers])
    exact = [x.detach().double().requires_grad_() for x in [*leaves, *numbers]]
    seen = seen_pairs(BATCH, HEADS, T, T, is_causal=True)
    expected = attend(*exact[:3], seen, rule, exact[3], None if named is None else exact[4])
    wanted = torch.autograd.grad((expected * weight.double()).sum(), exact)
    near([out, *found], [expected, *wanted], (3e-6, *[4e-5] * len(found)), name)


@pytest.mark.slow
@pytest.mark.parametrize("spec", ["softmax", "sparsemax", "biweight", "triweight", "relumax", "normrelu"])
def test_scales_of_any_sign(spec: str) -> None:
    """A tensor of scales is not looked at: 0 makes all scores equal, less turns them over."""
    leaves = draw(batch=1)
    scale = torch.tensor([0.5, 0.0, -0.7, 1e-30, 1.5, -2.0, 0.0])[torch.arange(T) % 7].expand(1, HEADS, T)
    rule = next(rule for rule in RULES.values() if rule.text == spec)
    exact = [x.detach().double().requires_grad_() for x in leaves]
    expected = attend(*exact, seen_pairs(1, HEADS, T, T, is_causal=True), rule, scale.double())
    with tiles.forced(rows=16, keys=16):
        out = triton(leaves, spec, is_causal=True, scale=scale)
    weight = weight_of(out)
    found = torch.autograd.grad((out * weight).sum(), leaves)
    wanted = torch.autograd.grad((expected * weight.double()).sum(), exact)
    near([out, *found], [expected, *wanted], (3e-6, *[4e-5] * 3), spec)


@pytest.mark.slow
def test_one_number_for_all_rows() -> None:
    leaves = draw()
    margin = torch.tensor(0.4, requires_grad=True)
    out = triton(leaves, "relumax", params={"margin": margin}, scale=0.7)
    exact = [x.detach().double().requires_grad_() for x in [*leaves, margin]]
    seen = seen_pairs(BATCH, HEADS, T, T)
    expected = attend(*exact[:3], seen, RULES["anchored 1"], 0.7, exact[3].expand(BATCH, HEADS, T))
    weight = weight_of(out)
    found = torch.autograd.grad((out * weight).sum(), [*leaves, margin])
    wanted = torch.autograd.grad((expected * weight.double()).sum(), exact)
    near([out, *found], [expected, *wanted], (3e-6, *[4e-5] * 3, 2e-4))


@pytest.mark.slow
@pytest.mark.parametrize("text", some(TEXTS, TEXTS[:1]))
def test_similarities(text: str) -> None:
    leaves = draw(23, 23, 6, batch=1)
    out = triton(leaves, text, is_causal=True)
    q, k, v = exact = [x.detach().double().requires_grad_() for x in leaves]
    if text.endswith("cosine"):
        one, other = (x / (x.square().sum(-1, keepdim=True) + 1e-3).sqrt() for x in (q, k))
        z, rule = scores(one, other, 1.0), RULES["adaptive 2"]
    else:
        z = -(q[..., :, None, :] - k[..., None, :, :]).square().sum(-1) / 2 * 6**-0.5
        rule = RULES["softmax" if text == "rbf" else "anchored 1"]
    expected = rule.weights(z, seen_pairs(1, HEADS, 23, 23, is_causal=True)) @ v
    weight = weight_of(out)
    found = torch.autograd.grad((out * weight).sum(), leaves)
    wanted = torch.autograd.grad((expected * weight.double()).sum(), exact)
    near([out, *found], [expected, *wanted], (1e-5, *[1e-4] * 3), text)


@pytest.mark.slow
def test_queries_that_are_the_keys_and_the_values() -> None:
    x = draw(29, 29, 8, kv=HEADS, grad=True)[1]
    out = regard.attention(x, x, x, "biweight", is_causal=True, impl="triton")
    exact = x.detach().double().requires_grad_()
    expected = attend(exact, exact, exact, seen_pairs(BATCH, HEADS, 29, 29, is_causal=True), RULES["adaptive 2"])
    weight = weight_of(out)
    found = torch.autograd.grad((out * weight).sum(), x)
    near([out, *found], [expected, *torch.autograd.grad((expected * weight.double()).sum(), exact)], (3e-6, 3e-5))


@pytest.mark.slow
@pytest.mark.parametrize("rule", some(RULES, ["adaptive 2"]))
def test_hard_scores(rule: str) -> None:
    """Ties, scores of 1e4, a row far above and one far below all others."""
    q, k, v = (x.detach() for x in draw(40, 40, 8, batch=1))
    k[:, :, 8:24] = k[:, :, 8:9]  # sixteen equal keys
    q[:, :, 5] *= 1e4
    q[:, :, 6] = 0
    k[:, :, 30] *= 8
    leaves = [x.requires_grad_() for x in (q, k, v)]
    with tiles.forced(rows=16, keys=16):
        out = triton(leaves, RULES[rule].text, scale=1.0)
        found = torch.autograd.grad((out * weight_of(out)).sum(), leaves)
    expected = attend(*(x.detach().double() for x in leaves), seen_pairs(1, HEADS, 40, 40), RULES[rule], 1.0)
    assert float((out - expected).detach().abs().max()) <= 2e-3  # an eps of scores near 1e4
    calm = [i for i in range(40) if i != 5]
    mild = (q[:, :, calm] @ k.mT).abs().amax(-1) < 40
    assert int(mild.sum()) > 10
    assert float((out - expected).detach()[:, :, calm][mild].abs().max()) <= 2e-5
    assert all(bool(x.isfinite().all()) for x in found)


def test_ties_for_the_maximum_share_its_gradient() -> None:
    """ReLUmax of rows whose best score three keys have."""
    q, k, v = (x.detach() for x in draw(18, 18, 8, batch=1))
    k[:, :, 3] = k[:, :, 9] = k[:, :, 17] = 3 * q[:, :1, 4] / q[:, :1, 4].norm()
    leaves = [x.requires_grad_() for x in (q, k, v)]
    checked(leaves, RULES["anchored 1"], seen_pairs(1, HEADS, 18, 18), (3e-6, 3e-5))


@pytest.mark.parametrize(("rule", "way"), pairs(ONE, [("adaptive 2", "offsets")]))
def test_one_query(rule: str, way: str, poisoned: None) -> None:
    """Of which no gradient is asked, and of which one is."""
    how = WAYS[way]
    for dtype, most in ((torch.float32, 4e-6), (torch.bfloat16, 6e-3)):
        leaves = draw(1, 70, 16, 24, heads=4, kv=2, dtype=dtype)
        mask = torch.rand(BATCH, 1, 1, 70, generator=torch.Generator().manual_seed(1)) > 0.2
        seen = seen_pairs(BATCH, 4, 1, 70, attn_mask=mask, **how)
        expected = attend(*(x.detach().double() for x in leaves), seen, RULES[rule])
        with torch.no_grad(), tiles.forced(rows=16, keys=32):
            near([triton(leaves, RULES[rule].text, attn_mask=mask, **how)], [expected], most, dtype)
        if dtype == torch.float32:
            checked(leaves, RULES[rule], seen, (most, 3e-5), attn_mask=mask, **how)
