"""The persistent memory against its definition, dense in float64."""

from __future__ import annotations

import math

import pytest
import torch
from dense import weights as dense_weights
from mosaic_by_hand import C, D, H, beta2, tokens, unit_keys

from regard import presets
from regard.checks import ArgumentError
from regard.nn import PersistentMemory

S, T = 17, 9


def memory(spec="softmax", seed=0, **options):
    torch.manual_seed(seed)
    return PersistentMemory(C, H, S, spec=spec, **options).double()


def expected(layer, x, weigh):
    """For `weigh(unit keys . slots) -> weights`; copies are averaged."""
    keys = unit_keys(layer, x)
    read = sum(weigh(keys @ k.transpose(-1, -2)) @ v for k, v in zip(layer.slot_keys, layer.slot_values, strict=True))
    read = read / len(layer.slot_keys) * (10 * layer.scale).exp()[:, None, None]
    return read.transpose(1, 2).flatten(2) @ layer.out_proj.weight.T


@pytest.mark.parametrize("copies", [1, 3])
def test_equals_its_definition(copies):
    x = tokens(length=T)
    layer = memory(copies=copies)
    want = expected(layer, x, lambda s: torch.softmax(beta2(layer) * s, -1))
    torch.testing.assert_close(layer(x)[0], want, rtol=0, atol=1e-9)
    layer = memory("biweight", copies=copies)
    want = expected(layer, x, lambda s: dense_weights(beta2(layer) * s, "adaptive", r=2.0))
    torch.testing.assert_close(layer(x)[0], want, rtol=0, atol=1e-9)


def test_specs_without_a_scale_are_asked_with_beta_squared():
    layer, x = memory("relu"), tokens(length=T)
    query = unit_keys(layer, x) * beta2(layer)
    w = query.clamp(min=0) @ layer.slot_keys[0].clamp(min=0).transpose(-1, -2) + 1e-4
    want = expected(layer, x, lambda s: w / w.sum(-1, keepdim=True))
    torch.testing.assert_close(layer(x)[0], want, rtol=0, atol=1e-9)


@pytest.mark.parametrize("spec", presets())
def test_every_preset_runs_or_says_why(spec):
    if spec in ("linear", "cosine"):
        with pytest.raises(ArgumentError, match="normalised"):
            memory(spec)
        return
    layer = memory(spec).float()
    out, _ = layer(tokens(length=T).float())
    out.square().sum().backward()
    assert torch.isfinite(out).all()
    assert all(torch.isfinite(p.grad).all() for p in layer.parameters() if p.grad is not None)
    zeros, _ = layer(torch.zeros(1, 3, C))
    assert torch.isfinite(zeros).all()


def test_starting_values():
    torch.manual_seed(0)
    layer = PersistentMemory(64, 2, 300)
    assert layer.slot_keys.shape == layer.slot_values.shape == (1, 2, 300, 32)
    assert abs(layer.slot_keys.std().item() - 32**-0.5) < 0.003
    torch.testing.assert_close((10 * layer.scale).exp(), torch.full((2,), math.exp(-0.5)))
    torch.testing.assert_close(layer.sharpness(), torch.full((2,), math.e**2))


def test_keys_of_another():
    layer, x = memory(own_keys=False), tokens(length=T)
    with pytest.raises(ArgumentError, match="own_keys"):
        layer(x)
    keys = torch.nn.functional.normalize(torch.randn(2, H, 9, D, dtype=torch.float64), dim=-1)
    w = torch.softmax(beta2(layer) * keys @ layer.slot_keys[0].transpose(-1, -2), -1)
    read = w @ layer.slot_values[0] * (10 * layer.scale).exp()[:, None, None]
    want = read.transpose(1, 2).flatten(2) @ layer.out_proj.weight.T
    torch.testing.assert_close(layer.read(keys), want, rtol=0, atol=1e-9)
