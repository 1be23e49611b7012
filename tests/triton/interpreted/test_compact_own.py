"""A kernel that brings one device function, its value and derivative: diagnostics, and what it needs. `test_compact.py`
runs it in every kernel of compact attention."""

from typing import Any

import pytest
import torch
from attention_calls import compared, draw, triton, wide
from dense_oracles import attend, seen_by
from own_kernel import OWN

import regard
from regard.checks import ArgumentError
from regard.triton.compact import rules

pytestmark = pytest.mark.usefixtures("in_bounds", "poisoned")

ANCHORED = OWN["own anchored"]


@pytest.mark.parametrize("text", OWN.values())
def test_output_and_gradients(text: str, small: None) -> None:
    leaves = draw()
    exact = wide(leaves)
    expected = attend(*exact, seen_by(*exact[:2], is_causal=True), text)
    compared(triton(leaves, text, is_causal=True), expected, leaves, exact, (2e-6, 2e-5), text)


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
