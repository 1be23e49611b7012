"""Decoding with sums: what the model's own cache holds.

What is computed with it is tested in `test_model_contracts.py`.
"""

import pytest
import torch
from any_model import in_chunks, make, padded, text
from mistakes import refuses
from transformers import DynamicCache
from transformers.cache_utils import Cache, DynamicLayer, DynamicSlidingWindowLayer

from regard.checks import ArgumentError
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
    cache = Cache(layers=[DynamicSlidingWindowLayer(4) for _ in range(2)])
    refuses("the cache gave 4 tokens of the 5 that window=4 needs", in_chunks, model, tokens, 1, None, cache)
    mixers = ["softmax", "interpolated"]  # only the first has the window, and the configuration's cache cuts both
    model = made(mixers, window=4)
    cache = DynamicCache(config=model.config)
    refuses("the cache gave 4 tokens of the 5 that no window needs", in_chunks, model, tokens, 1, None, cache)
    layer, x = Attention(32, 4, layer_idx=0), torch.randn(1, 6, 32)
    cache = Cache(layers=[DynamicSlidingWindowLayer(4)])
    layer(x[:, :4], past_key_values=cache)
    refuses("the cache gave 5 tokens of the 6 that no window needs", layer, x[:, 4:], past_key_values=cache)


def test_which_layer_keeps_what():
    kinds = lambda cache: [type(layer) for layer in cache.layers]  # noqa: E731
    for mixer in LINEAR:
        assert kinds(hybrid_cache(made([mixer, "biweight"]).config)) == [RegardCacheLayer, DynamicLayer]
    for mixer in ("geometric", "clipped-geometric", "rbf", "softmax", "topk-softmax"):
        assert kinds(hybrid_cache(made(mixer).config)) == [DynamicLayer] * 2
    assert kinds(hybrid_cache(made("elu", window=3).config)) == [DynamicSlidingWindowLayer] * 2
    assert kinds(hybrid_cache(made("elu").config, pairs=True)) == [DynamicLayer] * 2


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
    """No pair is kept: what `generate` hands back holds no keys."""
    model = made("elu")
    tokens = text(1, 36)
    out = model.generate(tokens, max_new_tokens=5, do_sample=False, return_dict_in_generate=True)
    assert [type(layer) for layer in out.past_key_values.layers] == [RegardCacheLayer] * 2
    assert out.past_key_values.layers[0].keys is None
    more = model.generate(out.sequences, past_key_values=out.past_key_values, max_new_tokens=5, do_sample=False)
    assert torch.equal(more, model.generate(tokens, max_new_tokens=10, do_sample=False, use_cache=False))


def test_sums_do_not_take_tokens_back():
    """They are refused before anything is lost. `test_generation_contracts.py` has a cache that the model makes."""
    model, tokens = made("elu"), text(1, 48)
    with pytest.raises(ArgumentError, match=r"cannot be removed from sums, .* give a transformers.DynamicCache"):
        model.generate(tokens, past_key_values=hybrid_cache(model.config), prompt_lookup_num_tokens=3)
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
    with pytest.raises(ArgumentError, match=r"weights of earlier tokens were asked for.* use a transformers.Dynamic"):
        model(tokens[:, :1], past_key_values=sums, output_attentions=True)


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
    cache = lambda: Cache(layers=[RegardCacheLayer()])  # noqa: E731
    with pytest.raises(ArgumentError, match="holds sums at layer 0, but softmax needs keys and values"):
        Attention(32, 4, layer_idx=0)(x, past_key_values=cache())
    with pytest.raises(ArgumentError, match="but elu with a window needs keys and values"):
        Attention(32, 4, layer_idx=0, spec="elu", window=2)(x, past_key_values=cache())
    with pytest.raises(ArgumentError, match=r"attention_mask has shape \[2, 1, 3, 3\], but a cache of sums needs one"):
        Attention(32, 4, layer_idx=0, spec="elu")(x, past_key_values=cache(), attention_mask=mask)
    refuses(r"RegardCacheLayer.update: this layer holds sums, which regard.nn.Att", cache().update, x, x, 0)


def test_forward_mode_sees_through_the_sums():
    """The directional derivative of the logits, by forward mode with and without a cache, and by differences."""
    model = made("elu").double()
    embeds = model.model.embed_tokens(text(1, 4)).detach()
    along = torch.randn(embeds.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def logits(x, use_cache=False):
        return model(inputs_embeds=x, use_cache=use_cache).logits

    expected = (logits(embeds + 1e-6 * along) - logits(embeds - 1e-6 * along)) / 2e-6
    for use_cache in (False, True):
        found = torch.func.jvp(lambda x, cached=use_cache: logits(x, cached), (embeds,), (along,))[1]
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-6)
