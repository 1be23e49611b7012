"""Normalised queries and keys: the layer against formulas written out here, for every spec."""

from __future__ import annotations

import math
import warnings

import pytest
import torch

import regard
from regard.checks import ArgumentError
from regard.nn import Attention, rotary_angles

B, T, C, H = 2, 9, 32, 4
D = C // H


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def layer(**options):
    torch.manual_seed(1)
    module = Attention(C, H, **options).double()
    for name in ("q_norm", "k_norm"):
        if getattr(getattr(module, name, None), "weight", None) is not None:  # gains that are no ones
            with torch.no_grad():
                getattr(module, name).weight.copy_(1 + 0.3 * draw(D, seed=len(name)))
    return module


def normalised(x, kind, gain, eps=1e-6):
    """Equation of RMSNorm, or the unit vector, number by number."""
    size = (x.square().sum(-1, keepdim=True) / D + eps).sqrt()
    return x / size * gain if kind == "rms" else x / (size * math.sqrt(D))


def turn(x, angles):
    first, second = x[..., : D // 2], x[..., D // 2 :]
    turned = torch.complex(first, second) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat((turned.real, turned.imag), -1)


@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("temperature", ["fixed", "fixed(value=2)", "learned"])
@pytest.mark.parametrize("kind", ["rms", "l2"])
def test_layer_equals_the_formula(kind, temperature, kv_heads):
    """Softmax; gain before positions; the usual scale is 1/sqrt(D) for "rms", sqrt(D) for "l2"."""
    module, x = layer(qk_norm=kind, temperature=temperature, num_kv_heads=kv_heads), draw(B, T, C)
    angles = torch.arange(T)[:, None] * 10000.0 ** (-torch.arange(0, D, 2, dtype=torch.float64) / D)
    scale = (D**-0.5 if kind == "rms" else D**0.5) * (0.5 if "2" in temperature else 1)
    gains = [getattr(module, f"{part}_norm").weight if kind == "rms" else None for part in "qk"]
    q, k, v = (p(x).view(B, T, -1, D).transpose(1, 2) for p in (module.q_proj, module.k_proj, module.v_proj))
    q, k = turn(normalised(q, kind, gains[0]), angles), turn(normalised(k, kind, gains[1]), angles)
    k, v = (y.repeat_interleave(H // kv_heads, 1) for y in (k, v))
    z = (q @ k.mT * scale).masked_fill(torch.ones(T, T).triu(1).bool(), -math.inf)
    expected = module.o_proj((z.softmax(-1) @ v).transpose(1, 2).flatten(2))
    found, _ = module(x, rotary_angles(torch.arange(T)[None], D, dtype=torch.float64))
    torch.testing.assert_close(found, expected, atol=5e-6, rtol=0)
    found.square().sum().backward()
    if kind == "rms":
        assert all(getattr(module, f"{part}_norm").weight.grad.abs().max() > 1e-4 for part in "qk")


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


def test_shared_queries_and_keys_have_one_gain():
    module = layer(qk_norm="rms", share_query_key=True)
    assert not hasattr(module, "q_norm")
    x = draw(B, T, C)
    k = normalised(module.k_proj(x).view(B, T, H, D).transpose(1, 2), "rms", module.k_norm.weight)
    z = (k @ k.mT / math.sqrt(D)).masked_fill(torch.ones(T, T).triu(1).bool(), -math.inf)
    v = module.v_proj(x).view(B, T, H, D).transpose(1, 2)
    expected = module.o_proj((z.softmax(-1) @ v).transpose(1, 2).flatten(2))
    torch.testing.assert_close(module(x)[0], expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize("kind", ["rms", "l2"])
def test_zero_vectors_stay_zero_with_finite_gradients(kind):
    module = layer(qk_norm=kind, bias=False).float()
    x = draw(B, T, C).float()
    x[:, 2] = 0
    x.requires_grad_()
    out, _ = module(x)
    out.square().sum().backward()
    assert bool(out.isfinite().all() and x.grad.isfinite().all())
    assert x.grad.abs().max() < 1e5


@pytest.mark.parametrize("kind", ["rms", "l2"])
def test_bfloat16(kind):
    module, x = layer(qk_norm=kind), draw(B, T, C)
    expected = module(x)[0]
    out, _ = module.bfloat16()(x.bfloat16())
    assert out.dtype == torch.bfloat16
    assert (out.double() - expected).norm() < 0.03 * expected.norm()


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


def test_bad_names():
    with pytest.raises(ArgumentError, match=r"nn\.Attention: qk_norm is 'l1', expected None, 'rms' or 'l2'"):
        Attention(C, H, qk_norm="l1")
    with pytest.raises(ArgumentError, match="norm_eps"):
        Attention(C, H, qk_norm="rms", norm_eps=0)
