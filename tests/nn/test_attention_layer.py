"""regard.nn.Attention and rotary positions, against the dense formulas of `layers_by_hand`.

Caches, padding and packed documents are tested in `tests/models`, and wrong arguments in `tests/fuzz`."""

from __future__ import annotations

import math

import layers_by_hand as by
import pytest
import torch
from layers_by_hand import RIDGES, TEMPERATURES, WEIGHINGS, angles_of, by_hand, visible
from transformers import DynamicCache

from regard import Spec
from regard.checks import ArgumentError
from regard.nn import Attention, rotary_angles, rotate

B, T, C, H = 2, 9, 32, 4


@pytest.fixture
def x():
    return torch.randn(B, T, C, generator=torch.Generator().manual_seed(0))


def layer(**options):
    torch.manual_seed(1)
    return Attention(C, H, **options)


LOCAL = ("local-linear", "local-linear[relumax]")
OPTIONS = [
    *({"spec": s, "window": w, "num_kv_heads": n} for s in WEIGHINGS for w in (None, 3) for n in (4, 2, 1)),
    *({"spec": s, "share_query_key": True, "exclude_self": strict} for s in WEIGHINGS for strict in (False, True)),
    *(
        {"temperature": t, "window": w, "exclude_self": e}
        for t in TEMPERATURES
        for w in (None, 3)
        for e in (False, True)
    ),
    *(
        {"qk_norm": norm, "temperature": t, "num_kv_heads": n}
        for norm in ("rms", "l2")
        for t in ("fixed", "fixed(value=2)", "learned")
        for n in (4, 2)
    ),
    {"qk_norm": "rms", "share_query_key": True},
    *({"spec": s, "ridge": r, "num_kv_heads": 2} for s in LOCAL for r in ("fixed", *RIDGES)),
    *({"spec": "local-linear", "ridge": "learned", "window": window} for window in (1, 4)),
    {"spec": "gaussian*linear(ridge=0.7)"},
]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(map(str, options.values())))
def test_layer_equals_the_formula(options):
    """With left padding, with rotary positions and without."""
    module, x = by.layer(**options), 2 * by.draw(B, T, C)
    mask = torch.ones(B, T, dtype=torch.bool)
    mask[1, :3] = False
    out, weights = module(x, attention_mask=mask)
    assert weights is None
    assert torch.count_nonzero(out[1, :3]) == 0
    torch.testing.assert_close(out, by.by_options(module, x, mask, **options), atol=5e-6, rtol=0)
    positions = torch.arange(T)[None]
    out, _ = module(x, rotary_angles(positions, 8, dtype=torch.float64), mask)
    expected = by.by_options(module, x, mask, angles_of(positions), **options)
    torch.testing.assert_close(out, expected, atol=2e-5, rtol=0)  # rotary angles are made in float32


HALF = [
    {"qk_norm": "rms"},
    {"qk_norm": "l2"},
    {"temperature": "log"},
    {"temperature": "power"},
    {"spec": "local-linear[biweight]", "ridge": "learned", "qk_norm": "rms"},
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("options", HALF, ids=lambda options: "-".join(options.values()))
def test_half_precision(options, dtype):
    """As good as the inputs: scales and systems are computed in float32. Every parameter learns."""
    module, x = by.layer(**options), by.draw(B, T, C)
    if module.ridge_proj is not None:
        torch.nn.init.constant_(module.ridge_proj.weight, 0.01)
    expected = module(x)[0]
    half = module.to(dtype)
    out, _ = half(x.to(dtype))
    assert out.dtype == dtype
    assert (out.double() - expected).norm() < (0.05 if dtype == torch.bfloat16 else 0.01) * expected.norm()
    out.float().square().sum().backward()
    for name, parameter in half.named_parameters():
        assert bool(parameter.grad.isfinite().all()), name
        assert parameter.grad.abs().max() > 0, name
    numbers = {name: getattr(half, name) for name in half.temperature.start()}
    if numbers:
        assert half.temperature.scale(torch.tensor([[[1, 2, 300]]]), 1.0, numbers).dtype == torch.float32


def test_rotary_positions(x):
    module = layer()
    positions = torch.tensor([list(range(T)), list(range(5, 5 + T))])
    out, _ = module(x, rotary_angles(positions, module.head_dim, theta=100.0))
    angles = angles_of(positions, 100.0, torch.float32)
    torch.testing.assert_close(out, by_hand(module, x, visible(T), angles=angles), atol=1e-5, rtol=0)
    shifted, _ = module(x, rotary_angles(positions + 1000, module.head_dim, theta=100.0))
    torch.testing.assert_close(shifted, out, atol=1e-4, rtol=0)  # distances alone count
    unturned, _ = module(x)
    assert (unturned - out).abs().max() > 1e-3


def test_rotary_angles_are_formed_in_float32():
    positions = torch.tensor([[1000, 1001]])
    cos, sin = rotary_angles(positions, 2, dtype=torch.bfloat16)
    assert cos.dtype == torch.bfloat16
    expected = [math.cos(1000), math.cos(1001)]
    torch.testing.assert_close(cos[0, :, 0].double(), torch.tensor(expected).double(), atol=4e-3, rtol=0)
    assert sin.shape == (1, 2, 1)
    with pytest.raises(ArgumentError, match="head_dim is 7, expected a positive even number"):
        rotary_angles(positions, 7)


def test_rotate_keeps_lengths_and_dtype():
    x = torch.randn(1, 2, 3, 8, dtype=torch.float64)
    turned = rotate(x, *rotary_angles(torch.arange(3)[None], 8, dtype=torch.float64))
    assert turned.dtype == torch.float64
    torch.testing.assert_close(turned.norm(dim=-1), x.norm(dim=-1), atol=1e-6, rtol=0)
    assert torch.equal(turned[:, :, 0], x[:, :, 0])


@pytest.mark.parametrize("spec", ["softmax", "relumax"])
def test_learned_temperature(x, spec):
    module = layer(spec=spec, temperature="learned")
    torch.testing.assert_close(module(x)[0], layer(spec=spec)(x)[0], atol=1e-6, rtol=0)
    with torch.no_grad():
        module.log_temperature.fill_(math.log(0.25))
    expected = by_hand(module, x, visible(T), WEIGHINGS[spec], scale=4 / math.sqrt(8))
    torch.testing.assert_close(module(x)[0], expected, atol=1e-5, rtol=0)
    module(x)[0].square().sum().backward()
    assert module.log_temperature.grad.shape == (H,)
    assert torch.count_nonzero(module.log_temperature.grad) == H


def test_a_mask_per_query(x):
    mask = torch.rand(B, 1, T, T, generator=torch.Generator().manual_seed(2)) > 0.3
    out, _ = layer()(x, attention_mask=mask)
    expected = by_hand(layer(), x, visible(T) & mask[:, 0])
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=0)


def test_weights_on_request(x):
    module = layer(spec="relumax")
    out, weights = module(x, output_attentions=True)
    torch.testing.assert_close(out, module(x)[0], atol=1e-5, rtol=0)
    q, k = (p(x).view(B, T, H, 8).transpose(1, 2) for p in (module.q_proj, module.k_proj))
    z = (q @ k.transpose(-1, -2) / math.sqrt(8)).masked_fill(~visible(T)[:, None], -math.inf)
    expected = (z - z.amax(-1, keepdim=True) + 1).clamp_min(0)
    torch.testing.assert_close(weights, expected / expected.sum(-1, keepdim=True), atol=1e-5, rtol=0)


def test_parameters_and_text():
    module = layer(bias=True, head_dim=6, num_kv_heads=2)
    assert module.q_proj.weight.shape == (24, C)
    assert module.k_proj.bias.shape == (12,)
    assert module.o_proj.weight.shape == (C, 24)
    assert layer(spec=Spec.parse("biweight")).spec == layer(spec="biweight").spec
    assert "spec='biweight', window=4" in repr(layer(spec="biweight", window=4))
    assert "ridge=" not in repr(layer(spec="gaussian*linear(ridge=0.7)")).replace("ridge=0.7", "")
    assert "ridge='learned'" in repr(layer(spec="local-linear", ridge="learned"))
    assert layer(spec="softmax").ridge_proj is None
    assert set(layer(share_query_key=True).state_dict()) == {"k_proj.weight", "v_proj.weight", "o_proj.weight"}
    assert not hasattr(layer(share_query_key=True, qk_norm="rms"), "q_norm")


def test_a_shared_token_is_most_alike_to_itself(x):
    """On equal lengths the own pair has the largest cosine, so that every row weighs itself most."""
    module = layer(spec="gaussian*fixed*cosine(eps=0)", share_query_key=True)
    weights = module(x, output_attentions=True)[1]
    assert torch.equal(weights.argmax(-1), torch.arange(T).expand(B, H, T))
    module.exclude_self = True
    assert torch.count_nonzero(module(x, output_attentions=True)[1].diagonal(dim1=-2, dim2=-1)) == 0


class Memory:
    """A cache in five lines: what the layer asks of one."""

    def __init__(self):
        self.pairs = {}

    def get_seq_length(self, layer_idx):
        return self.pairs[layer_idx][0].shape[2] if layer_idx in self.pairs else 0

    def update(self, key, value, layer_idx):
        old = self.pairs.get(layer_idx, (key[:, :, :0], value[:, :, :0]))
        self.pairs[layer_idx] = tuple(torch.cat(pair, 2) for pair in zip(old, (key, value), strict=True))
        return self.pairs[layer_idx]


def test_any_object_with_two_methods_is_a_cache(x):
    module, memory = layer(spec="biweight", layer_idx=1, window=4, exclude_self=True, share_query_key=True), Memory()
    parts = [module(part, past_key_values=memory)[0] for part in x.split([1, 4, 1, 3], dim=1)]
    torch.testing.assert_close(torch.cat(parts, 1), module(x)[0], atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"hidden_size": 30}, "hidden_size 30 is not a multiple of 4 heads"),
        ({"num_kv_heads": 3}, "4 query heads \\(num_heads\\) do not divide among 3 key/value heads"),
        ({"num_kv_heads": 2, "share_query_key": True}, "4 query heads need 4 key/value heads, not 2; leave num_kv"),
        ({"qk_norm": "l1"}, r"nn\.Attention: qk_norm is 'l1', expected None, 'rms' or 'l2'"),
        ({"ridge": "learned"}, r"nn\.Attention: ridge learned needs a local linear model"),
        ({"spec": "gaussian*linear(solver=learned)", "ridge": "learned"}, "ridge learned needs a local linear model"),
        (
            {"spec": "shift-cosine", "temperature": "learned"},
            "temperature learned needs .* shift-cosine has none; .* one of: softmax, sparsemax, .*",
        ),
    ],
)
def test_bad_arguments(options, message):
    with pytest.raises(ArgumentError, match=message):
        Attention(**{"hidden_size": C, "num_heads": H, **options})


def test_bad_calls(x):
    with pytest.raises(ArgumentError, match="a cache was given to a layer without layer_idx"):
        layer()(x, past_key_values=Memory())
    with pytest.raises(ArgumentError, match="segment_ids were given with a cache"):
        layer(layer_idx=0)(x, past_key_values=DynamicCache(), segment_ids=torch.zeros(1, T, dtype=torch.long))
