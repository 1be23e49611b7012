"""Normalised queries and keys: the layer against formulas written out here, for every spec."""

from __future__ import annotations

import warnings

import pytest
import torch
from layers_by_hand import B, C, D, H, draw, layer, normalised

import regard
from regard.nn import rotary_angles

T = 9


def test_both_give_the_same_scores_without_a_gain():
    x = draw(B, T, C)
    for spec in ("softmax", "biweight", "rbf"):
        one, two = layer(spec=spec, qk_norm="rms"), layer(spec=spec, qk_norm="l2")
        for part in "qk":
            torch.nn.init.ones_(getattr(one, f"{part}_norm").weight)
        torch.testing.assert_close(one(x)[0], two(x)[0], atol=1e-6, rtol=0)


@pytest.mark.parametrize("kind", ["rms", "l2"])
@pytest.mark.parametrize("name", regard.presets())
def test_every_preset(name, kind):
    """The layer is `regard.attention` of the normalised queries and keys, whose lengths do not matter any more."""
    module, x = layer(spec=name, qk_norm=kind), draw(B, T, C)
    gains = [getattr(module, f"{part}_norm").weight.detach() if kind == "rms" else None for part in "qk"]
    q, k, v = (p(x).view(B, T, H, D).transpose(1, 2) for p in (module.q_proj, module.k_proj, module.v_proj))
    q, k = normalised(q, kind, gains[0]), normalised(k, kind, gains[1])
    spec = regard.Spec.parse(name)
    given = {}
    if kind == "l2" and spec.takes_scale:
        given["scale"] = 1.0 if spec.similarity.name == "cosine" else D**0.5
    expected = regard.attention(q, k, v, spec, is_causal=True, impl="reference", **given)
    expected = module.o_proj(expected.transpose(1, 2).flatten(2))
    torch.testing.assert_close(module(x)[0], expected, atol=2e-6, rtol=0)
    with torch.no_grad():
        module.q_proj.weight.mul_(300)
        module.k_proj.weight.mul_(0.1)
    torch.testing.assert_close(module(x)[0], expected, atol=2e-3, rtol=1e-3)


@pytest.mark.parametrize("kind", ["rms", "l2"])
def test_autocast(kind):
    """Products in bfloat16, lengths in float32, and no warning."""
    module, x = layer(qk_norm=kind, spec="local-linear[biweight]").float(), draw(B, T, C).float()
    expected = module(x)[0]
    with warnings.catch_warnings(), torch.autocast("cpu", dtype=torch.bfloat16):
        warnings.simplefilter("error")
        found, _ = module(x, rotary_angles(torch.zeros(1, T, dtype=torch.long), D))
    assert (found.float() - expected).norm() < 0.05 * expected.norm()
    found.float().sum().backward()
    assert all(p.grad.isfinite().all() for p in module.parameters())
