"""Caches of hybrid models: sums, keys and values, and those of fixed length (transformers' `StaticCache`, and those
made for `generate`). What is computed with sums is tested in `test_model_contracts.py`."""

import pytest
import torch
from any_model import in_chunks, make, padded, text
from mistakes import refuses
from torch._dynamo.utils import counters
from transformers import CompileConfig, DynamicCache, StaticCache
from transformers.cache_utils import Cache, DynamicLayer, StaticLayer, StaticSlidingWindowLayer
from transformers.cache_utils import DynamicSlidingWindowLayer as SlidingLayer

from regard.inspect import capture
from regard.models import RegardCacheLayer, hybrid_cache
from regard.nn import Attention

LINEAR = ("linear", "cosine", "shift-cosine", "relu", "relu2", "elu")


def made(mixers, **fields):
    """Two layers, two query heads and one key head of 8 channels."""
    return make("transformer", mixers, torch.float32, **{"num_hidden_layers": 2, "num_key_value_heads": 1, **fields})


def test_a_cache_that_drops_tokens_that_are_needed_is_refused():
    tokens = padded()[0]
    model = made("softmax", window=4, exclude_self=True)
    cache = Cache(layers=[SlidingLayer(4) for _ in range(2)])
    refuses("the cache gave 4 tokens of the 5 that window=4 needs", in_chunks, model, tokens, 1, None, cache)
    mixers = ["softmax", "interpolated"]  # only the first has the window, and the configuration's cache cuts both
    model = made(mixers, window=4)
    cache = DynamicCache(config=model.config)
    refuses("the cache gave 4 tokens of the 5 that no window needs", in_chunks, model, tokens, 1, None, cache)
    layer, x = Attention(32, 4, layer_idx=0), torch.randn(1, 6, 32)
    cache = Cache(layers=[SlidingLayer(4)])
    layer(x[:, :4], past_key_values=cache)
    refuses("the cache gave 5 tokens of the 6 that no window needs", layer, x[:, 4:], past_key_values=cache)


def test_which_layer_keeps_what():
    def kinds(mixers, pairs=False, length=None, **fields):
        return [type(layer) for layer in hybrid_cache(made(mixers, **fields).config, pairs=pairs, length=length).layers]

    for mixer in LINEAR:
        assert kinds([mixer, "biweight"]) == [RegardCacheLayer, DynamicLayer]
    for mixer in ("geometric", "clipped-geometric", "rbf", "softmax", "topk-softmax"):
        assert kinds(mixer) == [DynamicLayer] * 2
    assert kinds("elu", window=3) == [SlidingLayer] * 2
    assert kinds("elu", pairs=True) == [DynamicLayer] * 2
    assert kinds(["softmax", "elu"], length=9) == [StaticLayer, RegardCacheLayer]
    assert kinds("biweight", length=9, window=[4, None]) == [StaticSlidingWindowLayer, StaticLayer]
    assert type(made("biweight").model.new_cache(length=9)) is StaticCache
    refuses("hybrid_cache: length is 0, expected a positive integer", made("biweight").model.new_cache, length=0)


@pytest.mark.parametrize("mixer", LINEAR)
def test_the_sums_do_not_grow(mixer):
    model = made(mixer)
    tokens, sizes = text(1, 288), []
    for length in (1, 36, 288):
        layer = model(tokens[:, :length], use_cache=True).past_key_values.layers[0]
        assert layer.get_seq_length() == length
        assert layer.get_mask_sizes(3) == (length + 3, 0)
        sizes.append(layer.bytes)
    # one key head of 9 features (8 and the bias): values of 8 channels, a sum of keys, one flag
    assert sizes == [(9 * 8 + 9) * 4 + 1] * 3


def test_an_empty_layer_can_be_asked_everything():
    layer = RegardCacheLayer()
    assert (layer.get_seq_length(), layer.bytes, layer.get_mask_sizes(4), layer.get_max_length()) == (0, 0, (4, 0), -1)
    for change in (layer.reset, layer.offload, layer.prefetch, lambda: layer.crop(-2)):
        change()
    layer.reorder_cache(torch.tensor([0]))
    layer.batch_repeat_interleave(2)
    assert layer.linear_state is None


def test_generation_uses_the_sums():
    model = made("elu")
    tokens = text(1, 36)
    out = model.generate(tokens, max_new_tokens=5, do_sample=False, return_dict_in_generate=True)
    assert [type(layer) for layer in out.past_key_values.layers] == [RegardCacheLayer] * 2
    assert out.past_key_values.layers[0].keys is None
    more = model.generate(out.sequences, past_key_values=out.past_key_values, max_new_tokens=5, do_sample=False)
    assert torch.equal(more, model.generate(tokens, max_new_tokens=10, do_sample=False, use_cache=False))


def test_sums_do_not_take_tokens_back():
    model, tokens = made("elu"), text(1, 48)
    given = {"past_key_values": hybrid_cache(model.config), "prompt_lookup_num_tokens": 3}
    refuses(r"cannot be removed from sums, .* give a transformers.DynamicCache", model.generate, tokens, **given)
    cache = model(tokens, use_cache=True).past_key_values
    assert not cache.is_croppable
    refuses("tokens cannot be removed from sums", cache.crop, -2)
    assert cache.get_seq_length() == 48


def test_weights_need_pairs():
    model = made("elu")
    tokens = text(1, 36)
    out = model(tokens, output_attentions=True)  # the cache made here keeps pairs, so that it can go on
    assert out.attentions[0].shape == (1, 2, 36, 36)
    step = model(tokens[:, :1], past_key_values=out.past_key_values, output_attentions=True)
    assert step.attentions[0].shape == (1, 2, 1, 37)
    shown = model.generate(tokens, max_new_tokens=3, output_attentions=True, return_dict_in_generate=True)
    assert shown.attentions[2][0].shape == (1, 2, 1, 38)
    sums = hybrid_cache(model.config)
    first = model(tokens, past_key_values=sums, output_attentions=True)
    torch.testing.assert_close(first.attentions[0], out.attentions[0])
    given = {"past_key_values": sums, "output_attentions": True}
    refuses(r"weights of earlier tokens were asked .* use a transformers.DynamicCache", model, tokens[:, :1], **given)


def test_observers_see_the_first_call():
    model = made("elu")
    tokens = text(1, 36)
    with capture(model) as seen, torch.no_grad():
        out = model(tokens)
        assert type(out.past_key_values.layers[0]) is RegardCacheLayer
    assert seen.layers[1].support.shape == (1, 2, 36)
    torch.testing.assert_close(out.logits, model(tokens, use_cache=False).logits, atol=1e-5, rtol=0)


def test_what_sums_cannot_do():
    x = torch.randn(2, 3, 32, generator=torch.Generator().manual_seed(0))
    mask = torch.ones(2, 1, 3, 3, dtype=torch.bool)
    cache = Cache(layers=[RegardCacheLayer()])
    for message, options, given in (
        ("holds sums at layer 0, but softmax needs keys and values", {}, {}),
        ("but elu with a window needs keys and values", {"spec": "elu", "window": 2}, {}),
        (r"has shape \[2, 1, 3, 3\], but a cache of sums needs one", {"spec": "elu"}, {"attention_mask": mask}),
    ):
        refuses(message, Attention(32, 4, layer_idx=0, **options), x, past_key_values=cache, **given)
    refuses(r"RegardCacheLayer.update: this layer holds sums, which regard.nn.Att", cache.update, x, x, 0)


def test_forward_mode_sees_through_the_sums():
    model = made("elu").double()
    embeds = model.model.embed_tokens(text(1, 4)).detach()
    along = torch.randn(embeds.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def logits(x, use_cache=False):
        return model(inputs_embeds=x, use_cache=use_cache).logits

    expected = (logits(embeds + 1e-6 * along) - logits(embeds - 1e-6 * along)) / 2e-6
    for use_cache in (False, True):
        found = torch.func.jvp(lambda x, cached=use_cache: logits(x, cached), (embeds,), (along,))[1]
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-6)


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


def prompts():
    tokens, mask = text(2, 7, seed=4), torch.ones(2, 7, dtype=torch.long)
    mask[1, :3] = 0
    return tokens * mask, mask


@torch.no_grad()
@pytest.mark.parametrize(("mixers", "fields"), CASES)
def test_steps_with_a_fixed_cache_equal_the_whole(mixers, fields):
    model, (tokens, mask) = made(mixers, **fields), padded()
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
    model, (tokens, mask) = made(mixers, **fields), prompts()
    how = {"attention_mask": mask, "max_new_tokens": 7, "do_sample": False, **how}
    fixed = model.generate(tokens, cache_implementation="static", **how)
    assert torch.equal(fixed, model.generate(tokens, use_cache=False, **how))


@torch.no_grad()
@pytest.mark.parametrize("mixers", ["softmax", "biweight", "local-linear[biweight]"])
def test_places_that_are_not_filled_never_matter(mixers):
    model, (tokens, mask) = made(mixers), padded()
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
    model, (tokens, mask) = made("biweight"), padded()
    labels = tokens.masked_fill(mask == 0, -100)
    want = model(tokens, attention_mask=mask, labels=labels)
    wide = torch.nn.functional.pad(mask, (0, 32 - mask.shape[1]), value=1)
    fixed = StaticCache(model.config, max_cache_len=32)
    found = model(tokens, attention_mask=wide, labels=labels, past_key_values=fixed)
    torch.testing.assert_close(found.loss, want.loss)
    torch.testing.assert_close(found.logits[mask.bool()], want.logits[mask.bool()], atol=1e-5, rtol=0)
    wider, cache = torch.nn.functional.pad(wide, (0, 1), value=1), StaticCache(model.config, max_cache_len=32)
    refuses(r"attention_mask has shape \[\d+, 33\]", model, tokens, attention_mask=wider, past_key_values=cache)


def test_weights_count_the_places():
    layer, cache = Attention(16, 2, layer_idx=0, spec="biweight"), Cache(layers=[StaticLayer(max_cache_len=6)])
    _, weights = layer(torch.randn(1, 4, 16), past_key_values=cache, output_attentions=True)
    assert weights.shape == (1, 2, 4, 6)
    assert weights.triu(1).abs().max() == 0


def test_more_tokens_than_places():
    model, tokens = made("biweight"), text(2, 6)
    cache = StaticCache(model.config, max_cache_len=8)
    model(tokens, past_key_values=cache)
    refuses("the cache has places for 8 tokens, and this call makes it 12", model, tokens, past_key_values=cache)
    model(tokens[:, :2], past_key_values=cache)  # the refused call left the cache alone


@pytest.mark.parametrize("window", [None, 5])
def test_fewer_places_than_the_window(window):
    layer, x = Attention(32, 4, layer_idx=0, window=window), torch.randn(1, 6, 32)
    cache = Cache(layers=[StaticSlidingWindowLayer(max_cache_len=16, sliding_window=4)])
    layer(x[:, :4], past_key_values=cache)
    refuses("the cache has places for 4 tokens, and this call makes it 5", layer, x[:, 4:5], past_key_values=cache)


@pytest.mark.parametrize("name", ["memory-mosaic", "iclm"])
def test_models_whose_caches_grow_say_so(name):
    model, tokens = make(name, "biweight", torch.float32), text(1, 5)
    static = {"max_new_tokens": 3, "cache_implementation": "static"}
    refuses("fixed length; use a cache that grows", model.generate, tokens, **static)


def test_a_mixer_that_needs_the_order_of_keys():
    model, tokens = make("transformer", "interpolated", torch.float32), text(1, 5)
    cache = StaticCache(model.config, max_cache_len=8)
    refuses("InterpolatedMixer: cache has a fixed length", model, tokens, past_key_values=cache)


@pytest.mark.slow
@pytest.mark.parametrize("mixers", [["softmax", "biweight"], ["sparsemax", "relumax"], ["local-linear[biweight]"] * 2])
def test_all_steps_are_one_compiled_graph(mixers):
    model, (tokens, mask) = made(mixers), prompts()
    how = {"attention_mask": mask, "max_new_tokens": 7, "do_sample": False}
    want = model.generate(tokens, use_cache=False, **how)
    compiled = CompileConfig(fullgraph=True, mode="default")
    compiled._compile_all_devices = True
    torch._dynamo.reset()
    counters.clear()
    found = model.generate(tokens, cache_implementation="static", compile_config=compiled, **how)
    assert torch.equal(found, want)
    assert counters["stats"]["unique_graphs"] == 1
