"""Temperatures: their numbers against the formulas in float64, what n counts, and what they do to every spec."""

from __future__ import annotations

import math

import pytest
import torch
from layers_by_hand import TEMPERATURES, B, C, H, draw, layer, multiplier

import regard
from regard.checks import ArgumentError
from regard.nn import as_temperature
from regard.pairwise.visibility import Visibility

T = 9
N = torch.tensor([[[1, 2, 7, 300]]])


@pytest.mark.parametrize("text", TEMPERATURES)
def test_scales_at_the_start(text):
    scale = torch.as_tensor(as_temperature(text).scale(N, default=0.25)).expand(1, 1, 4)
    expected = torch.tensor([0.25 * multiplier(text, n) for n in (1, 2, 7, 300)])
    torch.testing.assert_close(scale[0, 0], expected, atol=0, rtol=1e-6)


def test_learned_numbers_have_their_meaning():
    """Each head its own: temperature 3; s = 0.7; 0.2 + 0.1 n^0.9."""
    n = N.expand(1, H, 4).double()[0, 0]
    one = lambda value: torch.full((H,), math.log(value), dtype=torch.float64)  # noqa: E731
    odds = torch.full((H,), math.log(0.9 / 0.1), dtype=torch.float64)
    cases = {
        "learned": ({"log_temperature": one(3.0)}, torch.full((4,), 1 / 3, dtype=torch.float64)),
        "log": ({"log_slope": one(0.7)}, 0.7 * n.clamp(min=2).log()),
        "power": ({"log_base": one(0.2), "log_gain": one(0.1), "logit_exponent": odds}, 0.2 + 0.1 * n**0.9),
    }
    for text, (learned, expected) in cases.items():
        scale = as_temperature(text).scale(N, 1.0, learned).expand(1, H, 4)
        assert scale.dtype == torch.float64
        torch.testing.assert_close(scale, expected.expand(1, H, 4), atol=0, rtol=1e-12)


@pytest.mark.parametrize("text", TEMPERATURES[1:])
def test_gradients_of_the_learned_numbers(text):
    rule = as_temperature(text)
    names = list(rule.start())
    start = [torch.full((H,), rule.start()[name], dtype=torch.float64, requires_grad=True) for name in names]
    n = torch.tensor([[[0, 1, 5]]])  # an empty row too

    def scale(*numbers):
        return rule.scale(n, 0.3, dict(zip(names, numbers, strict=True)))

    assert torch.autograd.gradcheck(scale, start)


def test_bad_calls():
    with pytest.raises(ArgumentError, match="temperature log: n is missing"):
        as_temperature("log").scale()
    with pytest.raises(ArgumentError, match="learned has none, expected log_temperature"):
        as_temperature("learned").scale(learned={})
    with pytest.raises(ArgumentError, match=r"learned\['log_temperature'\] has shape \[1, 4\], expected \[H\]"):
        as_temperature("learned").scale(learned={"log_temperature": torch.zeros(1, 4)})


SPECS = {**regard.presets(), "h-gaussian": regard.Spec.parse("gaussian*fixed(h=0.6)*cosine"),
         "h-compact": regard.Spec.parse("epanechnikov*fixed(h=1.2)*euclidean")}  # fmt: skip


@pytest.mark.parametrize("name", SPECS)
def test_every_spec_with_a_scale_takes_every_temperature(name):
    """Row by row, the layer is `regard.attention` with that row's number as scale (or 1/h^2)."""
    spec = SPECS[name]
    q, k, v = draw(B, H, T, 8, seed=1), draw(B, H, T, 8, seed=2), draw(B, H, T, 8, seed=3)
    has = spec.takes_scale or (spec.bandwidth.name == "fixed" and spec.bandwidth.h is not None)
    for text in TEMPERATURES:
        rule = as_temperature(text)
        if not has:
            with pytest.raises(ArgumentError, match=r"has none; leave it out or choose one of: softmax, sparsemax"):
                rule.arguments(spec, 8, torch.ones(1, 1, T))
            continue
        counts = Visibility(T, T, causal=True).counts()
        whole = regard.attention(q, k, v, spec, is_causal=True, **rule.arguments(spec, 8, counts))
        for i in (0, 4, T - 1):
            factor = multiplier(text, i + 1)
            if spec.takes_scale:
                usual = {"cosine": 1.0}.get(spec.similarity.name, 8**-0.5)
                given = {"scale": usual * factor}
            else:
                given = {"params": {"h": spec.bandwidth.h / math.sqrt(factor)}}
            row = regard.attention(q[:, :, i : i + 1], k[:, :, : i + 1], v[:, :, : i + 1], spec, **given)
            torch.testing.assert_close(whole[:, :, i : i + 1], row, atol=2e-5, rtol=0)


def test_the_usual_scale_is_for_every_spec():
    x = draw(B, T, C)
    for name, spec in regard.presets().items():
        plain = layer(spec=spec)(x)[0]
        assert torch.equal(layer(spec=spec, temperature="fixed")(x)[0], plain), name
        if spec.takes_scale:  # learned starts at the usual scale, whatever the similarity
            torch.testing.assert_close(layer(spec=spec, temperature="learned")(x)[0], plain, atol=1e-6, rtol=0)


def test_a_single_key_is_never_lost():
    """log 1 = 0: the first row of an unnormalised sum is what n = 2 makes of it."""
    module, x = layer(spec="linear", temperature="log"), draw(B, T, C)
    q, k, v = (p(x[:, 0]).view(B, H, 8) for p in (module.q_proj, module.k_proj, module.v_proj))
    weight = (q * k).sum(-1, keepdim=True) * 0.43 * math.log(2) / math.sqrt(8)
    expected = module.o_proj((weight * v).flatten(1))
    torch.testing.assert_close(module(x)[0][:, 0], expected, atol=1e-6, rtol=0)
    assert expected.abs().max() > 1e-3
