"""regard.nn.Attention and rotary positions, against dense formulas written out here."""

from __future__ import annotations

import math

import pytest
import torch

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


def dense(module, x, allowed, weigh, scale=None, angles=None):
    """Weights of `weigh(scores)` over the allowed keys, times values, projected: the layer by hand, row by
    row and head by head."""
    groups = H // module.num_kv_heads
    depth = module.head_dim
    scale = 1 / math.sqrt(depth) if scale is None else scale

    def split(projection, head):
        return projection(x)[..., head * depth : (head + 1) * depth]

    heads = []
    for head in range(H):
        q, k, v = (
            split(module.q_proj, head),
            split(module.k_proj, head // groups),
            split(module.v_proj, head // groups),
        )
        if angles is not None:
            q, k = turn(q, angles), turn(k, angles)
        out = torch.zeros(B, T, depth)
        for b in range(B):
            for i in range(T):
                keys = allowed[b, i].nonzero()[:, 0]
                if len(keys):
                    weights = weigh(k[b, keys] @ q[b, i] * scale)
                    out[b, i] = (weights / weights.sum()) @ v[b, keys]
        heads.append(out)
    return module.o_proj(torch.cat(heads, -1))


def turn(x, angles):
    """Rotation as multiplication of complex numbers."""
    first, second = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
    turned = torch.complex(first, second) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat((turned.real, turned.imag), -1)


def causal(mask=None, window=T):
    allowed = torch.tensor([[i - window < j <= i for j in range(T)] for i in range(T)]).expand(B, T, T)
    return allowed if mask is None else allowed & mask[:, None, :]


WEIGHINGS = {
    "softmax": torch.exp,
    "relumax": lambda z: (z - z.max() + 1).clamp_min(0),
}


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("spec", WEIGHINGS)
def test_layer_equals_the_formula(x, spec, window, kv_heads):
    module = layer(spec=spec, window=window, num_kv_heads=kv_heads)
    mask = torch.ones(B, T, dtype=torch.bool)
    mask[1, :3] = False
    out, weights = module(x * 3, attention_mask=mask)
    assert weights is None
    expected = dense(module, x * 3, causal(mask, window or T), WEIGHINGS[spec])
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=0)
    assert torch.count_nonzero(out[1, :3]) == 0


def test_rotary_positions(x):
    module = layer()
    positions = torch.tensor([list(range(T)), list(range(5, 5 + T))])
    out, _ = module(x, rotary_angles(positions, module.head_dim, theta=100.0))
    angles = positions[..., None] * 100.0 ** (-torch.arange(0, 8, 2) / 8)
    torch.testing.assert_close(out, dense(module, x, causal(), torch.exp, angles=angles), atol=1e-5, rtol=0)
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
    expected = dense(module, x, causal(), WEIGHINGS[spec], scale=4 / math.sqrt(8))
    torch.testing.assert_close(module(x)[0], expected, atol=1e-5, rtol=0)
    module(x)[0].square().sum().backward()
    assert module.log_temperature.grad.shape == (H,)
    assert torch.count_nonzero(module.log_temperature.grad) == H


def test_a_mask_per_query(x):
    mask = torch.rand(B, 1, T, T, generator=torch.Generator().manual_seed(2)) > 0.3
    out, _ = layer()(x, attention_mask=mask)
    expected = dense(layer(), x, causal() & mask[:, 0], torch.exp)
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=0)


def test_weights_on_request(x):
    module = layer(spec="relumax")
    out, weights = module(x, output_attentions=True)
    torch.testing.assert_close(out, module(x)[0], atol=1e-5, rtol=0)
    q, k = (p(x).view(B, T, H, 8).transpose(1, 2) for p in (module.q_proj, module.k_proj))
    z = (q @ k.transpose(-1, -2) / math.sqrt(8)).masked_fill(~causal()[:, None], -math.inf)
    expected = (z - z.amax(-1, keepdim=True) + 1).clamp_min(0)
    torch.testing.assert_close(weights, expected / expected.sum(-1, keepdim=True), atol=1e-5, rtol=0)


@pytest.mark.parametrize("spec", ["softmax", "biweight", "shift-cosine"])
def test_observing_changes_nothing(x, spec):
    module = layer(spec=spec, layer_idx=3)
    plain = module(x)[0]
    seen = []
    module.observer = lambda index, diagnostics: seen.append((index, diagnostics))
    for with_weights in (False, True):
        module.observe_weights = with_weights
        out, weights = module(x)
        torch.testing.assert_close(out, plain, atol=1e-5, rtol=0)
        assert weights is None
    assert [index for index, _ in seen] == [3, 3]
    assert seen[0][1].support.shape == (B, H, T)
    assert seen[1][1].weights.shape == (B, H, T, T)
    module.observer = None
    module(x)
    assert len(seen) == 2


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


@pytest.mark.parametrize("window", [None, 4])
def test_a_cache_continues_where_it_stopped(x, window):
    module = layer(spec="biweight", layer_idx=1, window=window)
    mask = torch.ones(B, T, dtype=torch.bool)
    mask[0, :2] = False
    memory, parts = Memory(), []
    for start, stop in ((0, 4), (4, 5), (5, T)):
        parts.append(module(x[:, start:stop], attention_mask=mask[:, :stop], past_key_values=memory)[0])
    torch.testing.assert_close(torch.cat(parts, 1), module(x, attention_mask=mask)[0], atol=1e-5, rtol=0)


def test_bias_and_head_dim():
    module = layer(bias=True, head_dim=6, num_kv_heads=2)
    assert module.q_proj.weight.shape == (24, C)
    assert module.k_proj.bias.shape == (12,)
    assert module.o_proj.weight.shape == (C, 24)
    assert layer(spec=Spec.parse("biweight")).spec == layer(spec="biweight").spec
    assert "spec='biweight', window=4" in repr(layer(spec="biweight", window=4))


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("spec", WEIGHINGS)
def test_shared_queries_and_keys(x, spec, strict):
    """q = k: one projection, turned once; with the token itself left out, the first row is empty."""
    module = layer(spec=spec, share_query_key=True, exclude_self=strict)
    assert set(module.state_dict()) == {"k_proj.weight", "v_proj.weight", "o_proj.weight"}
    positions = torch.arange(T)[None]
    angles = positions[..., None] * 10000.0 ** (-torch.arange(0, 8, 2) / 8)
    allowed = causal() & ~(torch.eye(T, dtype=torch.bool) & strict)
    module.q_proj = module.k_proj
    expected = dense(module, x, allowed, WEIGHINGS[spec], angles=angles)
    del module.q_proj
    out, _ = module(x, rotary_angles(positions, 8))
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=0)
    assert strict == (torch.count_nonzero(out[:, 0]) == 0)
    out.square().sum().backward()
    assert all(torch.isfinite(weight.grad).all() for weight in module.parameters())


def test_a_shared_token_is_most_alike_to_itself(x):
    """On equal lengths the own pair has the largest cosine, so that every row weighs itself most."""
    module = layer(spec="gaussian*fixed*cosine(eps=0)", share_query_key=True)
    weights = module(x, output_attentions=True)[1]
    assert torch.equal(weights.argmax(-1), torch.arange(T).expand(B, H, T))
    module.exclude_self = True
    assert torch.count_nonzero(module(x, output_attentions=True)[1].diagonal(dim1=-2, dim2=-1)) == 0


@pytest.mark.parametrize("window", [None, 3])
def test_without_itself_a_cache_continues_where_it_stopped(x, window):
    module = layer(spec="biweight", layer_idx=0, window=window, exclude_self=True, share_query_key=True)
    memory = Memory()
    parts = [module(part, past_key_values=memory)[0] for part in x.split([1, 4, 1, 3], dim=1)]
    torch.testing.assert_close(torch.cat(parts, 1), module(x)[0], atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"hidden_size": 30}, "hidden_size 30 is not a multiple of 4 heads"),
        ({"num_kv_heads": 3}, "4 query heads \\(num_heads\\) do not divide among 3 key/value heads"),
        ({"num_heads": 0}, "num_heads is 0, expected a positive integer"),
        ({"head_dim": 2.0}, "head_dim is 2.0, expected a positive integer"),
        ({"num_kv_heads": 2, "share_query_key": True}, "4 query heads need 4 key/value heads, not 2; leave num_kv"),
        ({"window": -1}, "window is -1, expected a positive integer"),
        ({"spec": "sofmax"}, "Did you mean 'softmax'"),
        (
            {"spec": "shift-cosine", "temperature": "learned"},
            "temperature learned needs .* shift-cosine has none; .* one of: softmax, sparsemax, .*",
        ),
    ],
)
def test_bad_arguments(options, message):
    with pytest.raises(ArgumentError, match=message):
        Attention(**{"hidden_size": C, "num_heads": H, **options})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"hidden_states": torch.ones(T, C)}, r"hidden_states has shape \[9, 32\], expected \[B, T, 32\]"),
        ({"hidden_states": torch.ones(B, 0, C)}, "T >= 1"),
        ({"hidden_states": torch.ones(B, T, C, dtype=torch.long)}, "expected a floating-point dtype"),
        ({"attention_mask": torch.ones(B, T)}, "expected torch.bool"),
        ({"attention_mask": torch.ones(B, T - 1, dtype=torch.bool)}, r"attention_mask has shape \[2, 8\]"),
        ({"attention_mask": torch.ones(B, T, T, dtype=torch.bool)}, r"expected \[2, Tk\] or \[2, 1, 9, Tk\]"),
        ({"attention_mask": torch.ones(3, T, dtype=torch.bool)}, "does not broadcast"),
        ({"past_key_values": Memory()}, "a cache was given to a layer without layer_idx"),
    ],
)
def test_bad_calls(x, arguments, message):
    with pytest.raises(ArgumentError, match=message):
        layer()(**{"hidden_states": x, **arguments})


# ----------------------------------------------------------------------------- packed documents


@pytest.mark.parametrize("spec", ["softmax", "biweight", "elu", "local-linear"])
def test_segments_are_sequences_of_their_own(spec, x):
    module = layer(spec=spec, temperature="fixed" if spec == "elu" or spec == "local-linear" else "log")
    ids = torch.tensor([[4, 4, 4, 1, 1, 1, 1, 4, 4]])
    found = module(x, segment_ids=ids)[0]
    for part in (slice(0, 3), slice(3, 7), slice(7, 9)):
        torch.testing.assert_close(found[:, part], module(x[:, part])[0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (torch.zeros(1, 4, dtype=torch.long), r"nn.Attention: segment_ids has shape \[1, 4\]"),
        (torch.zeros(1, T), "nn.Attention: segment_ids is torch.float32"),
    ],
)
def test_segments_that_do_not_fit(ids, message, x):
    with pytest.raises(ArgumentError, match=message):
        layer()(x, segment_ids=ids)


def test_segments_and_a_cache_are_refused(x):
    from transformers import DynamicCache

    with pytest.raises(ArgumentError, match="segment_ids were given with a cache"):
        layer(layer_idx=0)(x, past_key_values=DynamicCache(), segment_ids=torch.zeros(1, T, dtype=torch.long))
