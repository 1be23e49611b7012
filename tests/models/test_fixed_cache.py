"""Caches of fixed length: transformers' `StaticCache` and those that the model makes for `generate`."""

import pytest
import torch
from any_model import in_chunks, make, padded, text
from mistakes import refuses
from torch._dynamo.utils import counters
from transformers import CompileConfig, StaticCache
from transformers.cache_utils import Cache, StaticLayer, StaticSlidingWindowLayer

from regard.checks import ArgumentError
from regard.models import RegardCacheLayer
from regard.nn import Attention

CASES = [
    (["softmax", "biweight"], {}),
    (["softmax", "biweight"], {"window": 4}),
    (["sparsemax", "relumax"], {"window": [4, None]}),
    (["softmax", "biweight"], {"window": 3, "exclude_self": True}),
    (["softmax", "topk-softmax"], {"temperatures": "log"}),
    (["local-linear[biweight]", "softmax"], {}),
    (["elu", "biweight"], {}),
    (["biweight", "elu"], {}),
    ("elu", {}),
    (["gated-deltanet", "biweight"], {}),
]


def made(mixers, fields):
    return make("transformer", mixers, torch.float32, num_hidden_layers=2, num_key_value_heads=1, **fields)


def prompts():
    tokens, mask = text(2, 7, seed=4), torch.ones(2, 7, dtype=torch.long)
    mask[1, :3] = 0
    return tokens * mask, mask


@torch.no_grad()
@pytest.mark.parametrize(("mixers", "fields"), CASES)
def test_steps_with_a_fixed_cache_equal_the_whole(mixers, fields):
    model, (tokens, mask) = made(mixers, fields), padded()
    whole = model(tokens, attention_mask=mask, use_cache=False).logits
    length = tokens.shape[1] + 2
    for size in (1, 5, tokens.shape[1]):
        caches = [model.model.new_cache(length=length)]
        caches += [] if "gated-deltanet" in mixers else [StaticCache(model.config, max_cache_len=length)]
        for cache in caches:
            parts, _ = in_chunks(model, tokens, size, mask, cache)
            torch.testing.assert_close(parts[mask.bool()], whole[mask.bool()], atol=1e-5, rtol=0)


@pytest.mark.parametrize("how", [{}, {"num_beams": 3}], ids=["greedy", "beams"])
@pytest.mark.parametrize(("mixers", "fields"), CASES)
def test_generated_with_a_fixed_cache_and_without_a_cache(mixers, fields, how):
    model, (tokens, mask) = made(mixers, fields), prompts()
    how = {"attention_mask": mask, "max_new_tokens": 7, "do_sample": False, **how}
    fixed = model.generate(tokens, cache_implementation="static", **how)
    assert torch.equal(fixed, model.generate(tokens, use_cache=False, **how))


@torch.no_grad()
@pytest.mark.parametrize("mixers", ["softmax", "biweight", "local-linear[biweight]"])
def test_places_that_are_not_filled_never_matter(mixers):
    model, (tokens, mask) = made(mixers, {}), padded()
    caches = [StaticCache(model.config, max_cache_len=32) for _ in range(2)]
    for cache in caches:
        model(tokens, attention_mask=mask, past_key_values=cache)
    for layer in caches[1].layers:
        layer.keys[:, :, tokens.shape[1] + 1 :] = float("nan")
        layer.values[:, :, tokens.shape[1] + 1 :] = float("inf")
    more = torch.cat([mask, torch.ones_like(mask[:, :1])], 1)
    steps = [model(tokens[:, :1], attention_mask=more, past_key_values=cache).logits for cache in caches]
    assert torch.equal(*steps)
    assert steps[0].isfinite().all()


@torch.no_grad()
def test_a_mask_may_have_columns_for_all_places():
    model, (tokens, mask) = made("biweight", {}), padded()
    labels = tokens.masked_fill(mask == 0, -100)
    want = model(tokens, attention_mask=mask, labels=labels)
    wide = torch.nn.functional.pad(mask, (0, 32 - mask.shape[1]), value=1)
    found = model(
        tokens, attention_mask=wide, labels=labels, past_key_values=StaticCache(model.config, max_cache_len=32)
    )
    torch.testing.assert_close(found.loss, want.loss)
    torch.testing.assert_close(found.logits[mask.bool()], want.logits[mask.bool()], atol=1e-5, rtol=0)
    wider, cache = torch.nn.functional.pad(wide, (0, 1), value=1), StaticCache(model.config, max_cache_len=32)
    refuses(r"attention_mask has shape \[\d+, 33\]", model, tokens, attention_mask=wider, past_key_values=cache)


def test_which_layer_keeps_what():
    def kinds(mixers, **fields):
        return [type(layer) for layer in made(mixers, fields).model.new_cache(length=9).layers]

    assert kinds(["softmax", "elu"]) == [StaticLayer, RegardCacheLayer]
    assert kinds("biweight", window=[4, None]) == [StaticSlidingWindowLayer, StaticLayer]
    assert type(made("biweight", {}).model.new_cache(length=9)) is StaticCache
    refuses("hybrid_cache: length is 0, expected a positive integer", made("biweight", {}).model.new_cache, length=0)


def test_weights_count_the_places():
    layer, cache = Attention(16, 2, layer_idx=0, spec="biweight"), Cache(layers=[StaticLayer(max_cache_len=6)])
    _, weights = layer(torch.randn(1, 4, 16), past_key_values=cache, output_attentions=True)
    assert weights.shape == (1, 2, 4, 6)
    assert weights.triu(1).abs().max() == 0


def test_more_tokens_than_places():
    model, tokens = made("biweight", {}), text(2, 6)
    cache = StaticCache(model.config, max_cache_len=8)
    model(tokens, past_key_values=cache)
    refuses("the cache has places for 8 tokens, and this call makes it 12", model, tokens, past_key_values=cache)
    model(tokens[:, :2], past_key_values=cache)  # the refused call left the cache alone


@pytest.mark.parametrize("window", [None, 5])
def test_fewer_places_than_the_window(window):
    layer, x = Attention(32, 4, layer_idx=0, window=window), torch.randn(1, 6, 32)
    cache = Cache(layers=[StaticSlidingWindowLayer(max_cache_len=16, sliding_window=4)])
    layer(x[:, :4], past_key_values=cache)
    with pytest.raises(ArgumentError, match="the cache has places for 4 tokens, and this call makes it 5"):
        layer(x[:, 4:5], past_key_values=cache)


@pytest.mark.parametrize("name", ["memory-mosaic", "iclm"])
def test_models_whose_caches_grow_say_so(name):
    model, tokens = make(name, "biweight", torch.float32), text(1, 5)
    with pytest.raises(ArgumentError, match="padded to a fixed length; use a cache that grows"):
        model.generate(tokens, max_new_tokens=3, cache_implementation="static")


def test_a_mixer_that_needs_the_order_of_keys():
    model, tokens = make("transformer", "interpolated", torch.float32), text(1, 5)
    with pytest.raises(ArgumentError, match="InterpolatedMixer: cache has a fixed length"):
        model(tokens, past_key_values=StaticCache(model.config, max_cache_len=8))


@pytest.mark.slow
@pytest.mark.parametrize("mixers", [["softmax", "biweight"], ["sparsemax", "relumax"], ["local-linear[biweight]"] * 2])
def test_all_steps_are_one_compiled_graph(mixers):
    model, (tokens, mask) = made(mixers, {}), prompts()
    how = {"attention_mask": mask, "max_new_tokens": 7, "do_sample": False}
    want = model.generate(tokens, use_cache=False, **how)
    compiled = CompileConfig(fullgraph=True, mode="default")
    compiled._compile_all_devices = True
    torch._dynamo.reset()
    counters.clear()
    found = model.generate(tokens, cache_implementation="static", compile_config=compiled, **how)
    assert torch.equal(found, want)
    assert counters["stats"]["unique_graphs"] == 1
