"""Ridges of a layer, against the formula of equation 27 and against regressions fitted row by row in float64."""

from __future__ import annotations

import math

import pytest
import torch
from layers_by_hand import RIDGES, B, C, D, H, angles_of, draw, layer, ridge_values, turn
from transformers import DynamicCache

from regard.nn import Attention, as_ridge, rotary_angles

T = 11


@pytest.mark.parametrize("text", [*RIDGES, "learned(start=0.9)", "learned(start=30,link=softplus)"])
def test_every_ridge_starts_where_it_is_told(text):
    torch.manual_seed(1)
    module = Attention(C, H, spec="local-linear", ridge=text)
    found = module.ridge_proj(draw(B, T, C, dtype=torch.float32))
    assert found.shape == (B, H, T, D if "dimension" in text else 1)
    start = {"learned(start=0.9)": 0.9, RIDGES[1]: 0.5}.get(text, 30.0 if "30" in text else 0.1)
    torch.testing.assert_close(found, torch.full_like(found, start), atol=0, rtol=1e-5)


@pytest.mark.parametrize("text", RIDGES)
def test_values_are_the_formula_and_never_below_the_floor(text):
    x = torch.tensor([-1e4, -200.0, -3.0, 0.0, 2.0, 50.0], dtype=torch.float64)
    found = as_ridge(text).values(x)
    torch.testing.assert_close(found, ridge_values(text, x), atol=0, rtol=1e-12)
    assert bool((found >= (0.01 if "softplus" in text else 0.001)).all())
    assert as_ridge(text).values(x.bfloat16()).dtype == torch.float32
    y = torch.tensor([-3.0, 0.0, 2.0], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(as_ridge(text).values, [y])


def steps(module, x, sizes, mask, positions):
    """The layer piece by piece with a cache."""
    cache, outs, at = DynamicCache(), [], 0
    for size in sizes:
        part = slice(at, at + size)
        at += size
        turned = tuple(angles[:, part] for angles in positions)
        outs.append(module(x[:, part], turned, mask[:, :at], cache)[0])
    return torch.cat(outs, 1)


CACHED = [
    {},
    {"ridge": "learned"},
    {"ridge": RIDGES[1], "qk_norm": "l2"},
    {"ridge": "learned-per-dimension", "qk_norm": "rms"},
    {"ridge": "learned", "window": 6},
    {"ridge": "learned", "window": 6, "exclude_self": True},
]


@pytest.mark.parametrize("options", CACHED, ids=lambda options: "-".join(map(str, options.values())))
@pytest.mark.parametrize("spec", ["local-linear", "local-linear[biweight]", "local-linear[relumax]"])
def test_pieces_with_a_cache_equal_the_whole(spec, options):
    """Left padding, grouped heads; exactly in float64, to 1e-5 in float32. (The ridge starts near 0.1 or above it: a
    smaller one magnifies rounding as much as it is smaller than the keys' squares.)"""
    length, sizes = 40, [1] * 10 + [13, 1, 1, 7, 1, 1, 6]
    module = layer(spec=spec, num_kv_heads=2, layer_idx=0, **options)
    if module.ridge_proj is not None:
        torch.nn.init.constant_(module.ridge_proj.weight, 0.01)
    mask = torch.ones(B, length, dtype=torch.bool)
    mask[0, :5] = False
    for dtype, tolerance in ((torch.float64, 1e-10), (torch.float32, 1e-5)):
        module, x = module.to(dtype), draw(B, length, C, dtype=dtype)
        positions = rotary_angles(torch.arange(length)[None], D, dtype=dtype)
        whole = module(x, positions, mask)[0]
        gap = (steps(module, x, sizes, mask, positions) - whole)[mask].abs().max()
        assert gap < tolerance, (dtype, float(gap))


@pytest.mark.parametrize("norm", [None, "rms", "l2"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.02)])
def test_pieces_that_other_solvers_do_equal_the_whole(dtype, tolerance, norm):
    """32 channels: the whole is solved by conjugate gradients, single steps by a factor; root mean squares."""
    length, sizes = 150, [110] + [1] * 20 + [13] + [1] * 7
    torch.manual_seed(0)
    module = Attention(C, 2, head_dim=32, spec="local-linear", ridge="learned", qk_norm=norm, layer_idx=0).to(dtype)
    x, mask = draw(B, length, C, dtype=dtype), torch.ones(B, length, dtype=torch.bool)
    mask[0, :5] = False
    positions = rotary_angles(torch.arange(length)[None], 32, dtype=dtype)
    whole = module(x, positions, mask)[0]
    gap = (steps(module, x, sizes, mask, positions) - whole)[mask]
    assert gap.double().norm() < tolerance * whole[mask].double().norm()
    if dtype == torch.float32:
        assert gap.abs().max() < 1e-5


def test_the_weights_are_those_of_the_values():
    module, x = layer(spec="local-linear", ridge="learned"), draw(B, T, C)
    out, weights = module(x, output_attentions=True)
    v = module.v_proj(x).view(B, T, H, D).transpose(1, 2)
    torch.testing.assert_close(module.o_proj((weights @ v).transpose(1, 2).flatten(2)), out, atol=1e-10, rtol=0)
    torch.testing.assert_close(weights.sum(-1), torch.ones(B, H, T, dtype=torch.float64), atol=1e-10, rtol=0)
    assert weights.min() < -0.01


@pytest.mark.parametrize("norm", [None, "rms"])
def test_a_probe_of_the_layer_in_the_place_of_a_solution(norm):
    """Parallax: weights p (1 - (k - kbar) . r), r normalised and turned like a query."""
    module, x = layer(spec="gaussian*linear(solver=learned)", qk_norm=norm), draw(B, T, C)
    if norm:
        module.q_norm.reset_parameters()
        module.k_norm.reset_parameters()
    angles = angles_of(torch.arange(T))
    rms = lambda y: y / (y.square().mean(-1, keepdim=True) + 1e-6).sqrt()  # noqa: E731
    split = lambda projection: projection(x).view(B, T, H, D).transpose(1, 2)  # noqa: E731
    q, k, r = (turn(rms(y) if norm else y, angles) for y in map(split, (module.q_proj, module.k_proj, module.r_proj)))
    p = (q @ k.mT / D**0.5).masked_fill(torch.ones(T, T).triu(1).bool(), -math.inf).softmax(-1)
    slopes = r @ k.mT - ((p @ k) * r).sum(-1, keepdim=True)
    expected = module.o_proj(((p * (1 - slopes)) @ split(module.v_proj)).transpose(1, 2).flatten(2))
    positions = rotary_angles(torch.arange(T)[None], D, dtype=torch.float64)
    found, _ = module(x, positions)
    torch.testing.assert_close(found, expected, atol=2e-6, rtol=0)
    found.square().sum().backward()
    assert module.r_proj.weight.grad.abs().max() > 1e-3
