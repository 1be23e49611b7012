"""regard.nn.Attention and rotary positions, against the dense formulas of `layers_by_hand`. Caches, padding and packed
documents are tested in `tests/models`, and wrong arguments in `tests/fuzz`."""

import itertools
import math
import warnings

import layers_by_hand as by
import pytest
import torch
from layers_by_hand import RIDGES, TEMPERATURES, D, angles_of, by_hand, visible
from mistakes import error_of, refuses
from transformers import DynamicCache

import regard
from regard import Spec, nn
from regard.nn import Attention, rotary_angles, rotate

B, T, C, H = 2, 9, 32, 4


@pytest.fixture
def x():
    return torch.randn(B, T, C, generator=torch.Generator().manual_seed(0))


def layer(**options):
    torch.manual_seed(1)
    return Attention(C, H, **options)


def product(**choices):
    return [dict(zip(choices, values, strict=True)) for values in itertools.product(*choices.values())]


LOCAL = ("local-linear", "local-linear[relumax]")
PLAIN = ("softmax", "relumax")
OPTIONS = [
    *product(spec=PLAIN, window=(None, 3), num_kv_heads=(4, 2, 1)),
    *product(spec=PLAIN, share_query_key=(True,), exclude_self=(False, True)),
    *product(temperature=TEMPERATURES, window=(None, 3), exclude_self=(False, True)),
    *product(qk_norm=("rms", "l2"), temperature=("fixed", "fixed(value=2)", "learned"), num_kv_heads=(4, 2)),
    {"qk_norm": "rms", "share_query_key": True},
    *product(spec=LOCAL, ridge=("fixed", *RIDGES), num_kv_heads=(2,)),
    *product(spec=("local-linear",), ridge=("learned",), window=(1, 4)),
    {"spec": "gaussian*linear(ridge=0.7)"},
    {"spec": "linear", "temperature": "log"},  # log 1 = 0: the first row is what n = 2 makes of it
    {"spec": "linear", "output_norm": True, "output_gate": True},
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
    refuses("head_dim is 7, expected a positive even number", rotary_angles, positions, 7)


def test_rotate_keeps_lengths_and_dtype():
    x = torch.randn(1, 2, 3, 8, dtype=torch.float64)
    turned = rotate(x, *rotary_angles(torch.arange(3)[None], 8, dtype=torch.float64))
    assert turned.dtype == torch.float64
    torch.testing.assert_close(turned.norm(dim=-1), x.norm(dim=-1), atol=1e-6, rtol=0)
    assert torch.equal(turned[:, :, 0], x[:, :, 0])
    wide = torch.zeros(1, 3, 5)
    expected = "[1, 3, R/2] for both cos and sin, with R at most 8"
    assert f"cos has shape [1, 3, 5], expected {expected}" in error_of(rotate, x, wide, wide)


def test_a_mask_per_query(x):
    mask = torch.rand(B, 1, T, T, generator=torch.Generator().manual_seed(2)) > 0.3
    out, _ = layer()(x, attention_mask=mask)
    torch.testing.assert_close(out, by_hand(layer(), x, visible(T) & mask), atol=1e-5, rtol=0)


def test_weights_on_request(x):
    module = layer(spec="relumax")
    out, weights = module(x, output_attentions=True)
    torch.testing.assert_close(out, module(x)[0], atol=1e-5, rtol=0)
    q, k = (p(x).view(B, T, H, 8).transpose(1, 2) for p in (module.q_proj, module.k_proj))
    z = (q @ k.transpose(-1, -2) / math.sqrt(8)).masked_fill(~visible(T), -math.inf)
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
    assert "output_norm=True" in repr(layer(output_norm=True))
    for made, said in (
        (nn.FunctionalGradient(8, 8, 2), "num_heads=2, head_dim=4, spec='softmax', variant='full'"),
        (nn.ContextualMemory(8, 2), "num_heads=2, head_dim=4, spec='softmax'"),
        (nn.PersistentMemory(8, 2, 4), "slots=4, copies=1, spec='softmax'"),
        (nn.LargeChunkTTT(8, 2, window=16), "num_heads=2, fast_heads=4, window=16, chunk_size=512"),
        (nn.FastWeightMLP(8, in_dim=4, hidden_dim=6, value_dim=2), "in_dim=4, hidden_dim=6, value_dim=2, chunk_size"),
    ):
        assert said in repr(made)
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
        ({"qk_norm": "l1"}, r"nn\.Attention: unknown qk_norm='l1'\. Choose from: None, l2, rms"),
        ({"ridge": "learned"}, r"nn\.Attention: ridge learned needs a local linear model"),
        ({"spec": "gaussian*linear(solver=learned)", "ridge": "learned"}, "ridge learned needs a local linear model"),
        (
            {"spec": "shift-cosine", "temperature": "learned"},
            "learned needs .* shift-cosine has none; .* one of: softmax",
        ),
    ],
)
def test_bad_arguments(options, message):
    refuses(message, Attention, **{"hidden_size": C, "num_heads": H, **options})


def test_bad_calls(x):
    refuses("a cache was given to a layer without layer_idx", layer(), x, past_key_values=Memory())
    given = {"past_key_values": DynamicCache(), "segment_ids": torch.zeros(1, T, dtype=torch.long)}
    refuses("segment_ids were given with past_key_values", layer(layer_idx=0), x, **given)
    refuses(rf"hidden_states has shape \[{B}, 0, {C}\], expected \[B, T, {C}\] with T >= 1", layer(), x[:, :0])
    wide = torch.ones(1, T, D)
    refuses(rf"cos has shape \[1, {T}, {D}\], expected \[{B} or 1, {T}, R/2\]", layer(), x, (wide, wide))
    refuses(rf"expected \[1, {T}, R/2\] for both cos and sin, with R at most {D}", layer(), x[:1], (wide, wide))


@pytest.mark.parametrize("kind", ["rms", "l2"])
@pytest.mark.parametrize("name", regard.presets())
def test_every_preset(name, kind):
    """Lengths of queries and keys do not matter."""
    module, x = by.layer(spec=name, qk_norm=kind), by.draw(B, T, C)
    scale = D**0.5 if kind == "l2" and module.spec.similarity.name != "cosine" else None
    expected = by_hand(module, x, visible(T), scale if module.spec.takes_scale else None, norm=kind)
    torch.testing.assert_close(module(x)[0], expected, atol=2e-6, rtol=0)
    with torch.no_grad():
        module.q_proj.weight.mul_(300)
        module.k_proj.weight.mul_(0.1)
    torch.testing.assert_close(module(x)[0], expected, atol=2e-3, rtol=1e-3)


@pytest.mark.parametrize("kind", ["rms", "l2"])
def test_autocast(kind):
    """Products in bfloat16, lengths in float32, and no warning."""
    module, x = by.layer(qk_norm=kind, spec="local-linear[biweight]").float(), by.draw(B, T, C).float()
    expected = module(x)[0]
    with warnings.catch_warnings(), torch.autocast("cpu", dtype=torch.bfloat16):
        warnings.simplefilter("error")
        found, _ = module(x, rotary_angles(torch.zeros(1, T, dtype=torch.long), D))
    assert (found.float() - expected).norm() < 0.05 * expected.norm()
    found.float().sum().backward()
    assert all(p.grad.isfinite().all() for p in module.parameters())


SCALED = [
    (n, s) for n, spec in regard.presets().items() for s in ((None, 0.7, "rows") if spec.takes_scale else (None,))
]


@pytest.mark.parametrize(("name", "scale"), SCALED)
def test_one_tensor_for_both_equals_two(name, scale):
    """The same call with a copy as the key; gradients of the two copies add up."""
    spec = regard.presets()[name]
    options = {} if scale is None else {"scale": by.draw(T, seed=3).exp() if scale == "rows" else scale}
    x, v, g = by.draw(B, H, T, D), by.draw(B, H, T, D, seed=1), by.draw(B, H, T, D, seed=2)
    one, first, second = (x.clone().requires_grad_() for _ in range(3))
    found = regard.attention(one, one, v, spec, exclude_self=True, **options)
    expected = regard.attention(first, second, v, spec, exclude_self=True, **options)
    torch.testing.assert_close(found, expected, atol=1e-11, rtol=1e-11)
    (found * g).sum().backward()
    (expected * g).sum().backward()
    torch.testing.assert_close(one.grad, first.grad + second.grad, atol=1e-10, rtol=1e-10)


def bytes_kept(module, x):
    """Bytes that the backward pass of one call keeps, the module's weights apart."""
    weights = {weight.untyped_storage().data_ptr() for weight in module.parameters()}
    found = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            found[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = module(x)[0]
    del out
    return sum(found.values())


@pytest.mark.parametrize("spec", ["softmax", "biweight", "relumax", "shift-cosine", "elu"])
def test_the_backward_pass_keeps_one_tensor_less(spec):
    x = by.draw(B, 64, H * D).float()
    apart, shared = (bytes_kept(Attention(H * D, H, spec=spec, share_query_key=flag), x) for flag in (False, True))
    assert apart - shared >= B * H * 64 * D * 4


def test_a_query_that_is_not_a_number_spoils_its_own_row_and_later_ones():
    """As a key it is seen by later rows, as a query by its own."""
    x = by.draw(B, H, T, D)
    x[:, :, 3] = torch.nan
    for name in ("softmax", "elu"):
        out = regard.attention(x, x, by.draw(B, H, T, D, seed=1), name, is_causal=True)
        assert torch.isfinite(out[:, :, :3]).all()
        assert torch.isnan(out[:, :, 3:]).all()
