"""A kernel that brings one device function, its value and derivative, in every kernel of compact attention: forward,
backward and decoding, against its definition in float64."""

from typing import Any

import pytest
import torch
from attention_calls import BATCH, CALLS, HEADS, T, compared, draw, some, triton, wide
from dense_oracles import near, scores, seen_pairs
from own_kernel import bump
from torch import Tensor

import regard
from regard.checks import ArgumentError
from regard.triton.compact import rules
from regard.triton.runtime import tiles

pytestmark = pytest.mark.usefixtures("in_bounds", "poisoned")

ANCHORED = "test-bump*anchored(margin=2)"
FIXED = {empty: f"test-bump*fixed(bias=0.5,empty={empty})" for empty in ("uniform", "zero", "nearest")}


def attend(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, text: str, scale: Any = None, number: Any = None) -> Tensor:
    """Return sum_j p_ij v_j by the definition of the weights."""
    z = scores(q, k, scale).masked_fill(~seen, -torch.inf)
    v = v.repeat_interleave(q.shape[1] // v.shape[1], 1)
    best, some = z.amax(-1, keepdim=True), seen.any(-1, keepdim=True)
    number = None if number is None else number[..., None]
    if "anchored" in text:
        excess = z - torch.where(some, best, 0) + (2 if number is None else number)
    else:
        excess = z + (0.5 if number is None else number)
    w = torch.where(seen, bump(torch.where(seen, excess, 0)), 0)
    total = w.sum(-1, keepdim=True)
    instead = {"zero": 0 * w, "nearest": (z == best) & some}.get(text.split("empty=")[-1][:-1], seen)
    instead = instead / instead.sum(-1, keepdim=True).clamp(min=1)
    return torch.where(total > 0, w / torch.where(total > 0, total, 1), instead.to(w)) @ v


@pytest.mark.parametrize("text", [ANCHORED, *FIXED.values()])
@pytest.mark.parametrize("call", some(CALLS, ["strict window", "mask of heads"]))
def test_in_every_order(text: str, call: str, small: None) -> None:
    queries, keys, how = CALLS[call]
    leaves = draw(queries, keys, 5, 3)
    exact, seen = wide(leaves), seen_pairs(BATCH, HEADS, queries, keys, **how)
    compared(triton(leaves, text, **how), attend(*exact, seen, text), leaves, exact, (2e-6, 2e-5), (text, call))


@pytest.mark.parametrize("text", [ANCHORED, FIXED["uniform"]])
def test_in_bfloat16_and_with_the_tiles_that_are_shipped(text: str) -> None:
    leaves = draw(70, 70, 24, 20, batch=1, dtype=torch.bfloat16)
    exact, seen = wide(leaves), seen_pairs(1, HEADS, 70, 70, is_causal=True)
    compared(triton(leaves, text, is_causal=True), attend(*exact, seen, text), leaves, exact, (6e-3, 1.5e-2), text)


@pytest.mark.parametrize("text", [ANCHORED, FIXED["uniform"]])
def test_numbers_of_rows(text: str, small: None) -> None:
    """Scales, margins and biases as tensors. The factor of scores above a threshold of 0 does not cancel, as it does
    for powers."""
    leaves, make = draw(), torch.Generator().manual_seed(3)
    scale = (torch.rand(BATCH, HEADS, T, generator=make) + 0.2).requires_grad_()
    number = torch.rand(BATCH, HEADS, T, generator=make) + 0.3
    name = "margin" if "anchored" in text else "bias"
    if name == "bias":
        number[..., ::2] = 0
    number.requires_grad_()
    exact, seen = wide([*leaves, scale, number]), seen_pairs(BATCH, HEADS, T, T, is_causal=True)
    out = triton(leaves, text, is_causal=True, scale=scale, params={name: number})
    expected = attend(*exact[:3], seen, text, exact[3], exact[4])
    compared(out, expected, [*leaves, scale, number], exact, (3e-6, 4e-5), text)


def test_keys_that_tie_for_the_maximum_share_its_gradient(small: None) -> None:
    q, k, v = (x.detach() for x in draw(37, 37, 8, batch=1))
    k[:, :, 3] = k[:, :, 9] = k[:, :, 17] = 3 * q[:, :1, 4] / q[:, :1, 4].norm()
    leaves = [x.requires_grad_() for x in (q, k, v)]
    exact = wide(leaves)
    out = triton(leaves, ANCHORED)
    compared(out, attend(*exact, seen_pairs(1, HEADS, 37, 37), ANCHORED), leaves, exact, (3e-6, 3e-5))


@pytest.mark.parametrize("text", [ANCHORED, *FIXED.values()])
def test_one_query(text: str) -> None:
    q, k, v = draw(1, 70, 16, 24, heads=4, kv=2, grad=False)
    mask = torch.rand(BATCH, 1, 1, 70, generator=torch.Generator().manual_seed(1)) > 0.2
    seen = seen_pairs(BATCH, 4, 1, 70, attn_mask=mask)
    with tiles.forced(rows=16, keys=32):
        for x in (q, -3 * q):
            expected = attend(x.double(), k.double(), v.double(), seen, text)
            near([triton([x, k, v], text, attn_mask=mask)], [expected], 4e-6, text)


def test_diagnostics_are_those_of_the_reference() -> None:
    leaves = draw(grad=False)
    found, expected = (
        regard.attention(*leaves, ANCHORED, enable_gqa=True, impl=impl, return_diagnostics=True)[1]
        for impl in ("triton", "reference")
    )
    for name in ("support", "effective_sample_size"):
        torch.testing.assert_close(getattr(found, name), getattr(expected, name), rtol=1e-4, atol=1e-5)


def test_what_is_refused() -> None:
    """The adaptive rule knows powers alone, in every implementation; a rule without kernels goes elsewhere."""
    with pytest.raises(ArgumentError, match="no power r"):
        regard.Spec.parse("test-bump*adaptive")
    found = rules.rule_of(regard.Spec.parse("test-bump*nearest(k=3)"))
    assert isinstance(found, str)
    assert "adaptive, anchored and fixed" in found


@pytest.mark.parametrize(("name", "value"), [("vanishes", False), ("params", ("r",)), ("compact", False)])
def test_what_a_function_of_its_own_needs(name: str, value: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = regard.Spec.parse(ANCHORED)
    assert isinstance(rules.rule_of(spec), rules.Rule)
    monkeypatch.setattr(type(spec.kernel), name, value)
    assert "weight vanishes at the threshold and nothing is learned" in rules.rule_of(spec)
