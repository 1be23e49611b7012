"""Generation: the cache, left padding and chunks change nothing, on trained models."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache, StaticCache

MIXERS = ("softmax", "biweight", "relumax", "shift-cosine")
PROMPTS = ("a fox", "the miller keeps seven", "nobody in the village owns a clock, so ")
MODES = {"greedy": {"num_beams": 1}, "beam": {"num_beams": 4}}
NEW = 64


def generate(model, tokens, mask=None, **options):
    """The new tokens [B, NEW]; without a mask, that of a batch without padding."""
    mask = torch.ones_like(tokens) if mask is None else mask
    out = model.generate(tokens, attention_mask=mask, max_new_tokens=NEW, do_sample=False, **options)
    return out[:, tokens.shape[1] :]


def left_pad(rows):
    """Rows of different length -> (tokens, mask), [B, T], padded on the left with token 0."""
    width = max(len(row) for row in rows)
    tokens = torch.stack([torch.nn.functional.pad(row, (width - len(row), 0)) for row in rows])
    mask = torch.stack([torch.arange(width) >= width - len(row) for row in rows]).long()
    return tokens, mask


@pytest.fixture(scope="module")
def singles(trained, encode):
    """`singles(mixer, mode)`: what each prompt alone continues with, cached, three rows [1, NEW]."""
    made = {}

    def make(mixer, mode):
        if (mixer, mode) not in made:
            model = trained(mixer)
            made[mixer, mode] = [generate(model, encode(p)[None], **MODES[mode]) for p in PROMPTS]
        return made[mixer, mode]

    return make


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("mixer", MIXERS)
def test_cached_equals_uncached(trained, encode, singles, mixer, mode):
    model = trained(mixer)
    for prompt, cached in zip(PROMPTS, singles(mixer, mode), strict=True):
        uncached = generate(model, encode(prompt)[None], use_cache=False, **MODES[mode])
        assert cached.shape == (1, NEW)
        assert torch.equal(cached, uncached), f"{mixer} {mode} {prompt!r}"


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("mixer", MIXERS)
def test_left_padded_batch_equals_single(trained, encode, singles, mixer, mode):
    tokens, mask = left_pad([encode(prompt) for prompt in PROMPTS])
    batched = generate(trained(mixer), tokens, mask, **MODES[mode])
    assert torch.equal(batched, torch.cat(singles(mixer, mode)))


@pytest.mark.parametrize("mixer", MIXERS)
def test_greedy_choices_are_not_ties(trained, encode, mixer):
    """The two tests above mean something only if the best token leads by more than rounding."""
    for prompt in PROMPTS:
        out = trained(mixer).generate(
            encode(prompt)[None],
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=NEW,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
        )
        best = torch.stack(out.logits).topk(2).values
        assert (best[..., 0] - best[..., 1]).min() > 1e-4


@pytest.mark.parametrize("window", [None, 9, 1])
@pytest.mark.parametrize("mixer", [*MIXERS, ["biweight", "softmax"]])
def test_prefill_equals_chunks_equals_steps(make_model, encode, mixer, window):
    model = make_model(mixer, window=window)
    tokens = encode("when it rains the fox moves into the old boat")[None]
    with torch.no_grad():
        whole = model(tokens, use_cache=False).logits
        for size in (1, 2, 7, 16):
            cache, parts = DynamicCache(config=model.config), []
            for chunk in tokens.split(size, dim=1):
                out = model(chunk, past_key_values=cache)
                cache, parts = out.past_key_values, [*parts, out.logits]
            torch.testing.assert_close(torch.cat(parts, 1), whole, atol=1e-5, rtol=0)


@pytest.mark.parametrize("mixer", MIXERS)
def test_chunks_of_a_padded_batch(make_model, encode, mixer):
    """A mask over all tokens so far goes with every chunk; positions come from it."""
    model = make_model(mixer, window=12)
    tokens, mask = left_pad([encode("brass buttons and honey"), encode("plums")])
    with torch.no_grad():
        whole = model(tokens, attention_mask=mask, use_cache=False).logits
        cache, parts, seen = None, [], 0
        for chunk in tokens.split(4, dim=1):
            seen += chunk.shape[1]
            out = model(chunk, attention_mask=mask[:, :seen], past_key_values=cache, use_cache=True)
            cache, parts = out.past_key_values, [*parts, out.logits]
        alone = model(encode("plums")[None], use_cache=False).logits
    real = mask.bool()
    torch.testing.assert_close(torch.cat(parts, 1)[real], whole[real], atol=1e-5, rtol=0)
    torch.testing.assert_close(whole[1, real[1]], alone[0], atol=1e-5, rtol=0)


def test_window_bounds_the_cache(make_model, encode):
    model = make_model("softmax", window=6)
    out = model(encode("the tall woman sells blue thread")[None], use_cache=True)
    assert out.past_key_values.get_seq_length() == 32
    assert out.past_key_values.layers[0].keys.shape == (1, 2, 5, 16)  # the next token is the sixth


def test_a_cache_can_be_cropped_and_taken_up_again(make_model, encode):
    model = make_model("biweight")
    tokens = encode("dreams of plums")[None]
    with torch.no_grad():
        cache = model(tokens, use_cache=True).past_key_values
        cache.crop(-5)
        again = model(tokens[:, -5:], past_key_values=cache).logits
        torch.testing.assert_close(again, model(tokens).logits[:, -5:], atol=1e-5, rtol=0)


def test_training_makes_no_cache_unasked(make_model, encode):
    model = make_model().train()
    assert model(encode("oven")[None]).past_key_values is None
    assert model(encode("oven")[None], use_cache=True).past_key_values is not None
    assert model.eval()(encode("oven")[None]).past_key_values is not None


def test_static_cache_is_refused(make_model, encode):
    model = make_model()
    tokens = encode("geese")[None]
    with pytest.raises(ValueError, match="StaticCache, which is padded to a fixed length; use a cache that grows"):
        model(tokens, past_key_values=StaticCache(config=model.config, max_cache_len=16))
    with pytest.raises(ValueError, match="use a cache that grows"):
        model.generate(tokens, max_new_tokens=2, cache_implementation="static")
    with pytest.raises(ValueError, match=r"past_key_values is \(\) \(tuple\), expected a transformers Cache"):
        model(tokens, past_key_values=())
