"""The table of docs/papers.md: what the paper says, what released programs do, and what is done here. Every row names
its test. What differs in a formula is tested in `test_memory_mosaic_oracle.py`, and the rest here."""

import re
from pathlib import Path

import pytest
import torch
from mistakes import refuses

from regard.inspect import capture
from regard.models import MemoryMosaicConfig, MemoryMosaicForCausalLM
from regard.nn import ContextualMemory

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


def shown(layer, x):
    return layer(x, output_attentions=True)[2][0]


STRICT = torch.ones(T, T, dtype=torch.bool).tril(-1)


def normal(w):
    w = torch.where(STRICT, w, 0.0)
    return w / torch.where(w.sum(-1, keepdim=True) > 0, w.sum(-1, keepdim=True), 1.0)


def test_defaults():
    """Of the options that the rows of the table name; a scale limit of 10 is beta = e^5."""
    wanted = {"wiring": "sequential", "leaky": "sum", "look_ahead": "sum", "uniform_gradient": "straight-through"}
    wanted |= {"scale_limit": 10.0, "persistent_scale_limit": 10.0, "persistent_copies": 1, "scale_logits": True}
    assert {name: getattr(config(), name) for name in wanted} == wanted


def test_leaky_sums_and_averages():
    plain, mean = memory(), memory(average=True)
    torch.testing.assert_close(plain(tokens())[0], mean(tokens())[0])
    plain, mean = memory(key_eps=0.1), memory(key_eps=0.1, average=True)
    keys, averaged = plain.keys(tokens())[0], mean.keys(tokens())[0]
    sums = 0.1 / (1 / keys.norm(dim=-1) - 1)  # lengths before the division
    share = -torch.expm1(-(10 * plain.keys.rate).abs())[:, None]
    torch.testing.assert_close(averaged.norm(dim=-1), sums * share / (sums * share + 0.1))


def test_the_rates():
    torch.testing.assert_close(memory().keys.rate * 10, torch.linspace(0.5, 5, H).double())
    turned = memory()
    with torch.no_grad():
        turned.keys.rate.neg_()
    torch.testing.assert_close(turned(tokens())[0], memory()(tokens())[0])


@pytest.mark.parametrize("eps", [0.0, 1e-10, 1e-6])
def test_zero_keys(eps):
    layer = memory(key_eps=eps)
    x = torch.zeros(1, T, C, dtype=torch.float64, requires_grad=True)
    out, _, _ = layer(x)
    out.sum().backward()
    assert torch.equal(out, torch.zeros_like(out))
    assert torch.isfinite(x.grad).all()


def test_rows_without_support():
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
    refuses("wiring='parallel'", config, persistent_keys="shared")


SHARED = {"wiring": "parallel", "persistent_keys": "shared"}


def test_biases():
    assert not [name for name, _ in model().named_parameters() if name.endswith("bias")]
    names = {name for name, _ in model(bias=True).named_parameters() if name.endswith("bias")}
    assert len(names) == 2 * (5 + 2) + 1


def test_initial_weights():
    wide = {"hidden_size": 192, "num_attention_heads": 4, "num_hidden_layers": 4}
    for kind, inner, outer in (("fan-in", 192**-0.5, 192**-0.5 / 4**0.5), ("gpt2", 0.02, 0.02 / 8**0.5)):
        layer = model(initializer=kind, **wide).model.layers[0]
        assert abs(layer.contextual.keys.proj.weight.std().item() / inner - 1) < 0.03
        assert abs(layer.contextual.out_proj.weight.std().item() / outer - 1) < 0.03
        assert abs(layer.persistent.out_proj.weight.std().item() / outer - 1) < 0.03
        for slots in (layer.persistent.slot_keys, layer.persistent.slot_values):
            assert abs(slots.std().item() / 48**-0.5 - 1) < 0.03
        mix = layer.contextual.values.mix
        assert ((mix >= 0) & (mix <= 1)).all()
        torch.testing.assert_close(layer.persistent.keys.rate * 10, torch.linspace(0.5, 5, 4).double())
    assert abs(model(vocab_size=400, **wide).model.embed_tokens.weight.std().item() / 192**-0.5 - 1) < 0.03


def test_dropout_is_refused():
    for name in ("dropout", "attention_dropout"):
        refuses("do not form the attention weights", config, **{name: 0.05})


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


NAMED = "test_every_row_of_the_table_has_its_test"


def test_every_row_of_the_table_has_its_test():
    """The last column of the page's table names tests of this file and of the oracle's, and all of this file."""
    named = set(re.findall(r"`(test_\w+)` \|\n", PAGE.read_text(encoding="utf-8")))
    oracle = Path(__file__).with_name("test_memory_mosaic_oracle.py").read_text(encoding="utf-8")
    here = {name for name in globals() if name.startswith("test_") and name not in ("test_defaults", NAMED)}
    assert here <= named <= here | set(re.findall(r"^def (test_\w+)", oracle, re.M))
