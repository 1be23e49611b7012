"""The table of docs/papers.md: what the paper says, what released programs do, and what is done here, a test a
row. Expected values are formulas in float64."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from regard.checks import ArgumentError
from regard.inspect import capture
from regard.models import MemoryMosaicConfig, MemoryMosaicForCausalLM
from regard.nn import ContextualMemory, PersistentMemory

C, H, T = 24, 3, 10
D = C // H
PAGE = Path(__file__).resolve().parents[2] / "docs" / "papers.md"


def config(**fields):
    sizes = {"vocab_size": 17, "hidden_size": C, "num_hidden_layers": 2, "num_attention_heads": H}
    return MemoryMosaicConfig(**{**sizes, **fields})


def model(**fields):
    torch.manual_seed(0)
    return MemoryMosaicForCausalLM(config(**fields)).double().eval()


def memory(**options):
    torch.manual_seed(0)
    return ContextualMemory(C, H, **options).double()


def tokens(length=T):
    return torch.randn(1, length, C, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def cosines(layer, x):
    """s [H, T, T] of the layer's keys, from its weights."""
    raw = (x[0] @ layer.keys.proj.weight.T).view(-1, H, D).transpose(0, 1)
    at = torch.arange(raw.shape[1], dtype=torch.float64)
    decay = (-(10 * layer.keys.rate).abs()[:, None, None] * (at[:, None] - at).clamp(min=0)).exp().tril()
    keys = F.normalize(decay @ raw, dim=-1)
    return keys @ keys.transpose(-1, -2)


def shown(layer, x):
    """The weights [H, T, T]."""
    return layer(x, output_attentions=True)[2][0]


STRICT = torch.ones(T, T, dtype=torch.bool).tril(-1)


def normal(w):
    w = torch.where(STRICT, w, 0.0)
    return w / torch.where(w.sum(-1, keepdim=True) > 0, w.sum(-1, keepdim=True), 1.0)


def test_wiring():
    x = tokens()
    for wiring in ("sequential", "parallel"):
        block = model(wiring=wiring).model.layers[0]
        first = block.contextual(block.contextual_norm(x))[0]
        read = x + first if wiring == "sequential" else x
        want = x + first + block.persistent(block.persistent_norm(read))[0]
        torch.testing.assert_close(block(x)[0], want)
    assert config().wiring == "sequential"


def test_leaky_sums_and_averages():
    plain, mean = memory(), memory(average=True)
    torch.testing.assert_close(plain(tokens())[0], mean(tokens())[0])
    plain, mean = memory(key_eps=0.1), memory(key_eps=0.1, average=True)
    keys, averaged = plain.keys(tokens())[0], mean.keys(tokens())[0]
    sums = 0.1 / (1 / keys.norm(dim=-1) - 1)  # lengths before the division
    share = -torch.expm1(-(10 * plain.keys.rate).abs())[:, None]
    torch.testing.assert_close(averaged.norm(dim=-1), sums * share / (sums * share + 0.1))
    assert config().leaky == "sum"


def test_the_rates():
    rates = memory().keys.rate
    torch.testing.assert_close(rates * 10, torch.linspace(0.5, 5, H).double())
    turned = memory()
    with torch.no_grad():
        turned.keys.rate.neg_()
    torch.testing.assert_close(turned(tokens())[0], memory()(tokens())[0])


def test_look_ahead():
    now, following = torch.randn(2, 1, H, 4, D, dtype=torch.float64)
    for kind in ("sum", "convex"):
        values = memory(look_ahead=kind).values
        c = values.mix[:, None, None]
        mixed = now + c * following if kind == "sum" else c * now + (1 - c) * following
        want = F.normalize(mixed, dim=-1) * math.exp(-0.5)
        torch.testing.assert_close(values.combine(now, following), want, rtol=1e-6, atol=1e-7)
    assert config().look_ahead == "sum"


@pytest.mark.parametrize("eps", [0.0, 1e-10, 1e-6])
def test_zero_keys(eps):
    layer = memory(key_eps=eps)
    x = torch.zeros(1, T, C, dtype=torch.float64, requires_grad=True)
    out, _, _ = layer(x)
    out.sum().backward()
    assert torch.equal(out, torch.zeros_like(out))
    assert torch.isfinite(x.grad).all()


def test_limits_of_the_scales():
    blunt = model(scale_limit=1.0, persistent_scale_limit=0.5).model.layers[0]
    with torch.no_grad():
        blunt.contextual.sharpness.scale.fill_(1.0)
        blunt.persistent.sharpness.scale.fill_(1.0)
    torch.testing.assert_close(blunt.contextual.sharpness(), torch.full((H,), math.exp(1.0)).double())
    torch.testing.assert_close(blunt.persistent.sharpness(), torch.full((H,), math.exp(0.5)).double())
    assert config().scale_limit == config().persistent_scale_limit == 10.0  # beta = e^5


def test_persistent_scores_have_beta_squared_once():
    torch.manual_seed(0)
    layer = PersistentMemory(C, H, 7).double()
    keys = F.normalize(torch.randn(1, H, T, D, dtype=torch.float64), dim=-1)
    scores = keys[0] @ layer.slot_keys[0].transpose(-1, -2)
    read = (math.e**2 * scores).softmax(-1) @ layer.slot_values[0] * math.exp(-0.5)
    want = read.transpose(0, 1).flatten(1) @ layer.out_proj.weight.T
    torch.testing.assert_close(layer.read(keys)[0], want, rtol=1e-6, atol=1e-7)


def test_normalised_relu_as_defined():
    """Equations 11 and 12: [2 s / h^2 + 1 - 2 / h^2]_+, normalised, h learned."""
    layer = memory(spec="epanechnikov*fixed(h=1)*cosine(eps=0)")
    h = layer.numbers.log_h.exp()[:, None, None]
    want = normal((2 * cosines(layer, tokens()) / h**2 + 1 - 2 / h**2).clamp(min=0))
    torch.testing.assert_close(shown(layer, tokens()), want)
    layer(tokens())[0].square().sum().backward()
    assert (layer.numbers.log_h.grad != 0).all()


def test_normalised_relu_as_released():
    """relu(s) over its sum, with h = sqrt(2) for ever."""
    spec = f"epanechnikov*fixed(h={math.sqrt(2)!r})*cosine(eps=0)"
    layer = memory(spec=spec, learned=[], start="spec")
    assert not list(layer.numbers.parameters())
    want = normal(cosines(layer, tokens()).clamp(min=0))
    rows = want.sum(-1) > 0
    assert rows.sum() > 0.7 * rows.numel()
    torch.testing.assert_close(shown(layer, tokens())[rows], want[rows])


def test_relumax():
    """[b + (s - m) / h^2]_+, b learned or 1 for ever."""
    for learned in (["margin"], []):
        layer = memory(spec="relumax", learned=learned)
        s = math.e**2 * cosines(layer, tokens())
        top = torch.where(STRICT, s, -torch.inf).amax(-1, keepdim=True)
        want = normal((1 + s - torch.where(top.isinf(), 0, top)).clamp(min=0))
        torch.testing.assert_close(shown(layer, tokens()), want, rtol=1e-5, atol=1e-6)
        assert len(list(layer.numbers.parameters())) == len(learned)


def test_rows_without_support():
    """Weighed uniformly, and counted."""
    layer = memory(spec="epanechnikov*fixed(h=1e-3)*cosine", start="spec")
    torch.testing.assert_close(shown(layer, tokens()), normal(torch.ones(H, T, T, dtype=torch.float64)))
    with capture(layer) as seen:
        layer(tokens())
    assert seen.layers[0].fallback[:, :, 1:].all()
    assert not seen.layers[0].fallback[:, :, 0].any()


def test_fixed_bandwidths_start_wide():
    wide, narrow = memory(spec="normrelu"), memory(spec="epanechnikov*fixed(h=0.37)*cosine", start="spec")
    shares = []
    for layer in (wide, narrow):
        with capture(layer) as seen:
            layer(tokens())
        shares.append(seen.layers[0].fallback.double().mean().item())
    assert shares[0] == 0
    assert shares[1] > 0.5


def test_uniform_weights():
    for gradient in ("straight-through", "hard"):
        layer = memory(spec="uniform*nearest(k=3)", uniform_gradient=gradient)
        layer(tokens())[0].square().sum().backward()
        assert (layer.keys.proj.weight.grad.abs().sum() > 0) == (gradient == "straight-through")
    assert config().uniform_gradient == "straight-through"


@pytest.mark.parametrize("spec", ["softmax", "normrelu", "relumax", "uniform*nearest(k=32)"])
def test_the_latest_pair_is_seen(spec):
    """As released, the fast program hides it from the last two and from normalised ReLU, and leaves row 1 empty."""
    weights = shown(memory(spec=spec), tokens())
    assert (weights.diagonal(-1, 1, 2) > 0)[:, 0].all()
    if spec != "relumax":
        assert (weights.diagonal(-1, 1, 2) > 0).all()


def test_keys_of_both_memories():
    own, shared = (sum(p.numel() for p in model(**f).parameters()) for f in ({}, SHARED))
    assert own - shared == 2 * (C * C + H + C)  # projection, rates and a norm a block
    block, x = model(**SHARED).model.layers[0], tokens()
    keys = block.contextual.keys(block.contextual_norm(x))[0]
    recalled = block.contextual(block.contextual_norm(x))[0]
    torch.testing.assert_close(block(x)[0], x + recalled + block.persistent.read(keys))
    with pytest.raises(ArgumentError, match="wiring='parallel'"):
        config(persistent_keys="shared")


SHARED = {"wiring": "parallel", "persistent_keys": "shared"}


def test_copies_of_the_slots():
    torch.manual_seed(0)
    both = PersistentMemory(C, H, 7, copies=2).double()
    keys = F.normalize(torch.randn(1, H, T, D, dtype=torch.float64), dim=-1)
    alone = []
    for copy in range(2):
        one = PersistentMemory(C, H, 7).double()
        one.load_state_dict(
            {name: p[copy : copy + 1] if "slot" in name else p for name, p in both.state_dict().items()}
        )
        alone.append(one.read(keys))
    torch.testing.assert_close(both.read(keys), (alone[0] + alone[1]) / 2)


def test_scale_of_the_logits():
    ids = torch.arange(8)[None]
    with_scale, without = model(), model(scale_logits=False)
    torch.testing.assert_close(without(ids).logits / math.sqrt(C), with_scale(ids).logits)


def test_biases():
    assert not [name for name, _ in model().named_parameters() if name.endswith("bias")]
    names = {name for name, _ in model(bias=True).named_parameters() if name.endswith("bias")}
    assert len(names) == 2 * (5 + 2) + 1


def test_initial_weights():
    wide = {"hidden_size": 192, "num_attention_heads": 4, "num_hidden_layers": 4}
    for kind, inner, outer in (
        ("fan-in", 192**-0.5, 192**-0.5 / 4**0.5),
        ("gpt2", 0.02, 0.02 / 8**0.5),
    ):
        layer = model(initializer=kind, **wide).model.layers[0]
        assert abs(layer.contextual.keys.proj.weight.std().item() / inner - 1) < 0.03
        assert abs(layer.contextual.out_proj.weight.std().item() / outer - 1) < 0.03
        assert abs(layer.persistent.slot_keys.std().item() / 48**-0.5 - 1) < 0.03


def test_dropout_is_refused():
    for name in ("dropout", "attention_dropout"):
        with pytest.raises(ArgumentError, match="do not form the attention weights"):
            config(**{name: 0.05})


def test_weight_decay_leaves_numbers_of_heads_alone():
    """Decay by dimension: every number of a head is a vector, every matrix and all slots are more."""
    for name, p in model(mixers=["relumax", "epanechnikov*fixed(h=1)*cosine"]).named_parameters():
        numbers = re.search(r"(rate|scale|mix|log_margin|log_h|norm\.weight)$", name)
        assert (p.dim() == 1) == bool(numbers), name


def test_no_length_is_built_in():
    short = model(max_position_embeddings=4)
    ids = torch.randint(17, (1, 40), generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(short(ids).logits[:, :4], short(ids[:, :4]).logits)
    assert not list(short.buffers())


def test_every_row_of_the_table_has_its_test():
    """The last column of the page's table names the tests of this file, all of them but this one."""
    named = re.findall(r"`(test_\w+)` \|\n", PAGE.read_text(encoding="utf-8"))
    here = [name for name in globals() if name.startswith("test_") and "table" not in name]
    assert sorted(named) == sorted(here)
