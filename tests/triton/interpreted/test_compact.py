"""`regard.attention(..., impl="triton")` with compact kernels and softmax: outputs and gradients against dense float64
formulas, and the thresholds and marks that the search for a row's threshold finds."""

from typing import Any

import pytest
import torch
import triton.language as tl
from attention_calls import (
    BATCH,
    CALLS,
    HEADS,
    WAYS,
    WIDTHS,
    T,
    both,
    checked,
    compared,
    draw,
    pairs,
    some,
    triton,
    uncopied,
    weight_of,
    wide,
)  # fmt: skip
from contracts import oracle
from dense_oracles import RULES, attend, choices, near, seen_by, seen_pairs
from mistakes import refuses
from own_kernel import EVERY, OWN
from torch import Tensor

import regard
from regard.triton.compact import implementation as compact
from regard.triton.compact import lists, rules, search
from regard.triton.runtime import tiles

pytestmark = pytest.mark.usefixtures("in_bounds")

ORDERS = [(rule, call) for rule in EVERY for call in CALLS]
QUICK = [ORDERS[call + len(CALLS) * (3 * call % len(RULES))] for call in range(len(CALLS))]
"""Every call, each with another rule."""
QUICK += [(rule, call) for rule in OWN for call in ("strict window", "mask of heads")]
WIDE = [(rule, *w) for rule in RULES for w in (WIDTHS if rule in ("softmax", "adaptive 2") else WIDTHS[::3])]
LENGTHS = [(rule, length) for rule in EVERY for length in (1, 5, 63, 100, 129)]
TEXTS = ("biweight*adaptive*cosine", "epanechnikov*anchored*euclidean", "rbf")
ONE = [(rule, way) for rule in EVERY for way in WAYS]


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["adaptive 2", "adaptive 1"])
def test_marks_that_take_several_turns_to_read(
    rule: str, small: None, poisoned: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As beyond 16,384 keys, where the blocks of a row are more than are read at once."""
    monkeypatch.setattr(search, "CHUNK", tl.constexpr(4))
    monkeypatch.setattr(lists, "CHUNK", 4)
    checked(draw(160, 160), RULES[rule], (2e-6, 2e-5), is_causal=True)


@pytest.mark.parametrize(("rule", "call"), pairs(ORDERS, QUICK))
def test_every_rule_in_every_order(rule: str, call: str, small: None, poisoned: None) -> None:
    queries, keys, how = CALLS[call]
    checked(draw(queries, keys, 5, 3), EVERY[rule], (2e-6, 2e-5), **how)


@pytest.mark.parametrize(("rule", "call"), pairs(ORDERS[::4], ORDERS[4::60]))
def test_every_rule_in_every_order_in_bfloat16(rule: str, call: str, small: None, poisoned: None) -> None:
    queries, keys, how = CALLS[call]
    checked(draw(queries, keys, 24, 20, dtype=torch.bfloat16), EVERY[rule], (6e-3, 1.5e-2), **how)


@pytest.mark.parametrize(("rule", "dim", "value_dim"), pairs(WIDE, [("adaptive 2", 100, 3)]))
def test_every_width(rule: str, dim: int, value_dim: int, poisoned: None) -> None:
    """Of one feature the queries' gradients cancel: those of normrelu are 0, whatever the length of a query."""
    cancel = 4 if dim == 1 else 1
    for dtype, (out, grad) in ((torch.bfloat16, (6e-3, 1.5e-2)), (torch.float32, (4e-6, 4e-5))):
        leaves = draw(20, 33, dim, value_dim, batch=1, dtype=dtype, seed=dim)
        checked(leaves, RULES[rule], (out, cancel * grad), is_causal=True)


@pytest.mark.parametrize(("rule", "length"), pairs(LENGTHS, [("anchored 1", 129), ("own anchored", 63)]))
def test_every_length_with_the_tiles_that_are_shipped(rule: str, length: int, poisoned: None) -> None:
    checked(draw(length, length, 16, batch=1), EVERY[rule], (3e-6, 3e-5), is_causal=True)


@pytest.mark.parametrize("text", ["polynomial(r=4)", "polynomial(r=4)*anchored(margin=2)"])
def test_another_power_is_one_number(text: str, monkeypatch: pytest.MonkeyPatch, small: None) -> None:
    """Also in decoding: the kernels depend on the power by `power`, `lower_power` and `root` alone."""
    monkeypatch.setattr(rules, "POWERS", (*rules.POWERS, 4.0))
    leaves = draw(21, 21, 5, 3)
    checked(leaves, text, (2e-5, 1e-4), is_causal=True)
    one = [leaves[0].detach()[:, :, -1:], *(x.detach() for x in leaves[1:])]
    near([triton(one, text)], [attend(*(x.double() for x in one), seen_by(*one[:2]), text)], 1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("heads", some([(4, 4), (4, 2), (6, 1), (8, 1)], [(4, 2)]))
def test_heads_share_keys(heads: tuple[int, int], small: None) -> None:
    leaves = draw(19, 19, 4, batch=1, heads=heads[0], kv=heads[1])
    checked(leaves, RULES["anchored 2"], (2e-6, 2e-5), window=7)


@pytest.mark.parametrize("name", some(EVERY, ["anchored 1", *list(OWN)[:2]]))
def test_numbers_of_rows(name: str, small: None, poisoned: None) -> None:
    """Scales, margins and biases as tensors, with their gradients."""
    make = torch.Generator().manual_seed(3)
    scale, number = torch.rand(BATCH, HEADS, T, generator=make) + 0.2, torch.rand(BATCH, HEADS, T, generator=make) + 0.3
    named = None if name == "softmax" else {"anchored": "margin", "fixed": "bias"}.get(choices(EVERY[name]).rule)
    if named == "bias":
        number[..., ::2] = 0  # where the factor of scores cancels for powers, and for no other function
    numbers = {"scale": scale, **({named: number} if named else {})}
    checked(draw(), EVERY[name], (3e-6, 4e-5), {n: x.requires_grad_() for n, x in numbers.items()}, is_causal=True)


@pytest.mark.slow
@pytest.mark.parametrize("spec", ["softmax", "sparsemax", "biweight", "triweight", "relumax", "normrelu"])
def test_scales_of_any_sign(spec: str, small: None) -> None:
    """A tensor of scales is not looked at: 0 makes all scores equal, less turns them over."""
    scale = torch.tensor([0.5, 0.0, -0.7, 1e-30, 1.5, -2.0, 0.0])[torch.arange(T) % 7].expand(1, HEADS, T)
    checked(draw(batch=1), spec, (3e-6, 4e-5), {"scale": scale}, is_causal=True)


@pytest.mark.slow
def test_one_number_for_all_rows() -> None:
    checked(draw(), "relumax", (3e-6, 2e-4), {"margin": torch.tensor(0.4, requires_grad=True), "scale": 0.7})


@pytest.mark.slow
@pytest.mark.parametrize("text", some(TEXTS, TEXTS[:1]))
def test_similarities(text: str) -> None:
    checked(draw(23, 23, 6, batch=1), text, (1e-5, 1e-4), is_causal=True)


@pytest.mark.slow
def test_queries_that_are_the_keys_and_the_values() -> None:
    x = draw(29, 29, 8, kv=HEADS, grad=True)[1]
    out = regard.attention(x, x, x, "biweight", is_causal=True, impl="triton")
    exact = x.detach().double().requires_grad_()
    expected = attend(exact, exact, exact, seen_pairs(BATCH, HEADS, 29, 29, is_causal=True), RULES["adaptive 2"])
    compared(out, expected, [x], [exact], (3e-6, 3e-5))


@pytest.mark.slow
@pytest.mark.parametrize("rule", some(RULES, ["adaptive 2"]))
def test_hard_scores(rule: str, small: None) -> None:
    """Ties, scores of 1e4, a row far above and one far below all others."""
    q, k, v = (x.detach() for x in draw(40, 40, 8, batch=1))
    k[:, :, 8:24] = k[:, :, 8:9]  # sixteen equal keys
    q[:, :, 5] *= 1e4
    q[:, :, 6] = 0
    k[:, :, 30] *= 8
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = triton(leaves, RULES[rule], scale=1.0)
    found = torch.autograd.grad((out * weight_of(out)).sum(), leaves)
    expected = attend(*(x.detach().double() for x in leaves), seen_pairs(1, HEADS, 40, 40), RULES[rule], 1.0)
    assert float((out - expected).detach().abs().max()) <= 2e-3  # an eps of scores near 1e4
    calm = [i for i in range(40) if i != 5]
    mild = (q[:, :, calm] @ k.mT).abs().amax(-1) < 40
    assert int(mild.sum()) > 10
    assert float((out - expected).detach()[:, :, calm][mild].abs().max()) <= 2e-5
    assert all(bool(x.isfinite().all()) for x in found)


@pytest.mark.parametrize(
    "rule", some([x for x in EVERY if "anchored" in x], ["anchored 1", "anchored 2", "own anchored"])
)
def test_keys_that_tie_for_the_maximum_share_its_gradient(rule: str, small: None) -> None:
    """One row has two such keys, another three, which lie in different blocks."""
    q, k, v = (x.detach() for x in draw(37, 37, 8, batch=1))
    k[:, :, 3] = k[:, :, 9] = k[:, :, 17] = 3 * q[:, :1, 4] / q[:, :1, 4].norm()
    k[:, :, 2] = k[:, :, 30] = 3 * q[:, 1:, 6] / q[:, 1:, 6].norm()
    leaves = [x.requires_grad_() for x in (q, k, v)]
    checked(leaves, EVERY[rule], (3e-6, 3e-5))


@pytest.mark.parametrize("size", [1e-30, 1e-5])
def test_scores_of_any_size_weigh_alike_above_a_threshold_of_zero(size: float, small: None) -> None:
    """Their factor [B, H, Tq] cancels and has no gradient, although each key's share of it is 1 / factor."""
    leaves, factor = draw(33, 33, 8), torch.full((2, 2, 33), size).requires_grad_()
    exact = wide(leaves)
    out = triton(leaves, "normrelu", scale=factor, is_causal=True)
    found = torch.autograd.grad((out * weight_of(out)).sum(), [*leaves, factor])
    right = attend(*exact, seen_pairs(2, 2, 33, 33, is_causal=True), RULES["fixed 1"], 1.0)
    wanted = torch.autograd.grad((right * weight_of(out).double()).sum(), exact)
    near([out, *found[:3]], [right, *wanted], (1e-5, 1e-4, 1e-4, 1e-4))
    assert (found[3] == 0).all()


def test_the_backward_pass_visits_marked_blocks_only(monkeypatch: pytest.MonkeyPatch) -> None:
    own, leaves = compact.backward, draw()
    monkeypatch.setattr(compact, "backward", lambda *x: own(*x[:15], torch.zeros_like(x[15]), *x[16:]))
    _, *grads = both(leaves, "biweight", weight_of(leaves[0]))
    assert not any(bool(g.any()) for g in grads)


@pytest.mark.parametrize(("rule", "way"), pairs(ONE, [("adaptive 2", "offsets"), *((rule, "all") for rule in OWN)]))
def test_gradients_of_one_query(rule: str, way: str, poisoned: None) -> None:
    mask = torch.rand(BATCH, 1, 1, 70, generator=torch.Generator().manual_seed(1)) > 0.2
    checked(draw(1, 70, 16, 24, heads=4, kv=2), EVERY[rule], (4e-6, 3e-5), attn_mask=mask, **WAYS[way])


# A kernel that brings one device function, its value and derivative ----------------------------------------------


def test_what_is_refused() -> None:
    """The adaptive rule knows powers alone, in every implementation; a rule without kernels goes elsewhere."""
    refuses("no power r", regard.Spec.parse, "test-bump*adaptive")
    found = rules.rule_of(regard.Spec.parse("test-bump*nearest(k=3)"))
    assert isinstance(found, str)
    assert "adaptive, anchored and fixed" in found


@pytest.mark.parametrize(("name", "value"), [("vanishes", False), ("params", ("r",)), ("compact", False)])
def test_what_a_function_of_its_own_needs(name: str, value: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = regard.Spec.parse(OWN["own anchored"])
    assert isinstance(rules.rule_of(spec), rules.Rule)
    monkeypatch.setattr(type(spec.kernel), name, value)
    assert "compact kernels that are continuous at the threshold and have no parameters" in rules.rule_of(spec)


# Thresholds and marks -------------------------------------------------------------------------------------------


ADAPTIVE = {"sparsemax": 1, "biweight": 2, "triweight": 3}


def kept(q: Tensor, k: Tensor, v: Tensor, spec: str, sizes: Any = None, **call: Any) -> dict[str, Tensor]:
    """Return the tensors that the forward operator returns, by name."""
    seen: list[tuple[Tensor, ...]] = []
    operator = compact.forward

    def spied(*arguments: Any) -> tuple[Tensor, ...]:
        seen.append(operator(*arguments))
        return seen[-1]

    with pytest.MonkeyPatch.context() as patch, tiles.forced(**(sizes or {"rows": 16, "keys": 16})):
        patch.setattr(compact, "forward", spied)
        uncopied(patch)  # so that scores may exceed 2^56
        triton([q, k, v.requires_grad_()], spec, return_diagnostics=True, **{"scale": 1.0, **call})
    return dict(zip(("out", "floats", "flags", "index", "slope_mean", "live"), seen[0], strict=True))


def entmax(z: Tensor, r: int) -> tuple[Tensor, Tensor]:
    """Return weights [z / r - tau]_+^r of sum one and r max(z / r - tau)."""
    p = oracle.of_scores(z, "adaptive", r=float(r))
    return p, r * p.amax(-1, keepdim=True) ** (1 / r)


def one_row(z: Tensor, r: int, sizes: Any = None) -> dict[str, Tensor]:
    """Return what is kept of one row with these scores; the values are the scores and ones."""
    q, k = torch.ones(1, 1, 1, 1), z.reshape(1, 1, -1, 1)
    spec = {r: name for name, r in ADAPTIVE.items()}[r]
    return kept(q, k, torch.cat([k, torch.ones_like(k)], -1), spec, sizes)


@pytest.mark.parametrize("r", [1, 2, 3])
def test_equal_keys_have_equal_weights(r: int) -> None:
    for count, level in ((1, 3.0), (50, -2.0), (200, 4096.0)):
        found = one_row(torch.full((count,), level), r)
        peak = count ** (-1 / r)
        torch.testing.assert_close(found["floats"][0, 0, 0, 2].item(), r * peak, rtol=1e-5, atol=abs(level) * 2**-20)
        torch.testing.assert_close(found["out"][0, 0, 0], torch.tensor([level, 1.0]), rtol=1e-6, atol=0)
        assert found["floats"][0, 0, 0, 4] == count
        assert found["flags"].sum() == 0


LONG = [(r, spread) for r in (1, 2, 3) for spread in (0.02, 0.3, 3.0)]


@pytest.mark.parametrize(("r", "spread"), pairs(LONG, LONG[::4]))
def test_thresholds_of_long_rows(r: int, spread: float) -> None:
    z = torch.randn(700, generator=torch.Generator().manual_seed(7)) * spread
    found = one_row(z, r, {"rows": 16, "keys": 64})
    p, reach = entmax(z.double()[None], r)
    torch.testing.assert_close(found["floats"][0, 0, 0, 2].double(), reach[0, 0], rtol=2e-5, atol=0)
    assert abs(found["floats"][0, 0, 0, 4] - (p > 0).sum()) <= 1
    torch.testing.assert_close(found["out"][0, 0, 0, 0].double(), p[0] @ z.double(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found["out"][0, 0, 0, 1].item(), 1.0, rtol=1e-6, atol=0)
    assert found["flags"].sum() == 0


def test_scores_far_from_zero_keep_their_best_key() -> None:
    """A margin below what float32 can tell apart at scores of that size is raised to it."""
    for best in (2e7, 1e8, 3e25):
        z = torch.full((40,), -best / 7)
        z[7] = best
        assert all(one_row(z, r)["out"][0, 0, 0, 0] == z[7] for r in (1, 2, 3))
        q, k = torch.ones(1, 1, 1, 1), z.reshape(1, 1, -1, 1)
        assert kept(q, k, k.clone(), "epanechnikov*anchored(margin=1e-4)")["out"].item() == z[7]


def test_blocks_without_weight_are_not_marked() -> None:
    """Runs of sixteen queries and keys are of one kind of four, and kinds are far apart: a quarter has weight."""
    x = torch.nn.functional.one_hot(torch.arange(64) // 16, 4).float().reshape(1, 1, 64, 4) * 3
    for spec in (*ADAPTIVE, "relumax", "epanechnikov*fixed(bias=-2,empty=zero)"):
        live = kept(x, x, torch.randn(1, 1, 64, 2), spec)["live"]
        assert torch.equal(live, torch.eye(4, dtype=torch.uint8)[None, None]), spec


@pytest.mark.parametrize("spec", ["sparsemax", "triweight", "relumax"])
def test_marks_and_weights_in_the_tiles_that_are_shipped(spec: str, poisoned: None) -> None:
    """In bfloat16 128 rows search together and 64 share a mark; weights sum to one as they are rounded."""
    q, k, v = draw(140, 140, 16, batch=1, heads=1, grad=False, dtype=torch.bfloat16)
    found = kept(q, k, torch.ones_like(v), spec, {"stages": 1}, is_causal=True, window=50, scale=0.25)
    seen = torch.ones(140, 140, dtype=torch.bool).tril().triu(-49)
    z = torch.where(seen, q[0, 0].double() @ k[0, 0].double().mT * 0.25, -torch.inf)
    p, reach = (z - z.amax(-1, keepdim=True) + 1).clamp(min=0), torch.ones(140, 1).double()
    if spec in ADAPTIVE:
        p, reach = entmax(z, ADAPTIVE[spec])
    blocks = torch.nn.functional.pad((p > 0).to(torch.uint8), (0, 52, 0, 52)).view(3, 64, 3, 64).amax((1, 3))
    assert (found["live"][0, 0] >= blocks).all()
    assert torch.equal(found["out"].float(), torch.ones(1, 1, 140, 16))
    torch.testing.assert_close(found["floats"][0, 0, :, 2].double(), reach[:, 0], rtol=2e-3, atol=0)
