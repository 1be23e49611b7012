"""Decoding with sums: what the model's own cache holds, and that nothing else changes.

`weigh` writes the six kernels with finite features out as functions of a query and the keys (kernel-selection paper,
Table 1), so that a layer's steps are checked against all pairs in float64.
"""

from __future__ import annotations

import math

import pytest
import torch
from transformers import DynamicCache
from transformers.cache_utils import Cache, DynamicLayer, DynamicSlidingWindowLayer

from regard.checks import ArgumentError
from regard.inspect import capture
from regard.models import HybridForCausalLM, RegardCacheLayer, hybrid_cache
from regard.nn import Attention

LINEAR = ("linear", "cosine", "shift-cosine", "relu", "relu2", "elu")
MIXED = ["shift-cosine", "softmax"]
TEXT = "a kind of honey that tastes of smoke"


def perturb(model, seed=5):
    noise = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.1 * torch.randn(weight.shape, generator=noise)
    return model


def cosine(q, k):
    return (k @ q) / ((q @ q + 1e-3) * ((k * k).sum(-1) + 1e-3)).sqrt()


def elu(x):
    return torch.where(x > 0, x + 1, x.exp())


KERNELS = {
    "linear": lambda q, k: (k @ q) / math.sqrt(len(q)),
    "cosine": cosine,
    "shift-cosine": lambda q, k: 1 + cosine(q, k),
    "relu": lambda q, k: k.clamp(min=0) @ q.clamp(min=0) + 1e-4,
    "relu2": lambda q, k: k.clamp(min=0) ** 2 @ q.clamp(min=0) ** 2 + 1e-4,
    "elu": lambda q, k: elu(k) @ elu(q),
}
UNNORMALISED = ("linear", "cosine")


@pytest.fixture
def padded(encode):
    """(tokens, mask) [3, 36]: one full row, two padded on the left, one of them to a single token."""
    tokens = encode(TEXT)[None].repeat(3, 1)
    mask = torch.ones_like(tokens)
    mask[1, :7], mask[2, :35] = 0, 0
    return tokens, mask


def in_chunks(model, tokens, mask, size, cache=None):
    """(logits, cache) of tokens given `size` at a time."""
    parts, seen = [], 0
    for chunk in tokens.split(size, dim=1):
        seen += chunk.shape[1]
        out = model(chunk, attention_mask=mask[:, :seen], past_key_values=cache, use_cache=True)
        cache, parts = out.past_key_values, [*parts, out.logits]
    return torch.cat(parts, 1), cache


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("spec", LINEAR)
def test_steps_of_a_layer_equal_all_pairs(spec, strict):
    """Left padding, grouped heads, and for `linear` a temperature that counts keys."""
    torch.manual_seed(0)
    log = spec == "linear"
    layer = Attention(32, 4, num_kv_heads=2, spec=spec, layer_idx=0, exclude_self=strict,
                      temperature="log" if log else "fixed").double()  # fmt: skip
    x = torch.randn(2, 9, 32, dtype=torch.float64)
    mask = torch.ones(2, 9, dtype=torch.bool)
    mask[1, :4] = False
    q, k, v = (p(x).unflatten(-1, (-1, 8)).transpose(1, 2) for p in (layer.q_proj, layer.k_proj, layer.v_proj))
    heads = torch.zeros(2, 4, 9, 8, dtype=torch.float64)
    for b in range(2):
        for h in range(4):
            for i in range(9):
                seen = [j for j in range(i if strict else i + 1) if mask[b, j]]
                if seen:
                    w = KERNELS[spec](q[b, h, i], k[b, h // 2, seen])
                    w = w * (0.43 * math.log(max(len(seen), 2)) if log else 1)
                    w = w if spec in UNNORMALISED else w / w.sum()
                    heads[b, h, i] = w @ v[b, h // 2, seen]
    expected = layer.o_proj(heads.transpose(1, 2).flatten(2))
    for sizes in ((9,), (1,) * 9, (4, 1, 3, 1)):
        cache, parts, at = Cache(layers=[RegardCacheLayer()]), [], 0
        for size in sizes:
            part = slice(at, at + size)
            parts.append(layer(x[:, part], attention_mask=mask[:, : at + size], past_key_values=cache)[0])
            at += size
        torch.testing.assert_close(torch.cat(parts, 1)[mask], expected[mask], atol=1e-6, rtol=0)
        assert cache.get_seq_length() == 9


@pytest.mark.parametrize("changes", [{}, {"exclude_self": True}, {"num_key_value_heads": 4, "share_query_key": True}])
@pytest.mark.parametrize("mixers", [*LINEAR, MIXED, ["softmax", "elu"]])
def test_prefill_chunks_and_steps_agree(make_model, padded, mixers, changes):
    model = perturb(make_model(mixers, **changes))
    tokens, mask = padded
    with torch.no_grad():
        whole = model(tokens, attention_mask=mask, use_cache=False).logits
        for size in (1, 5, 36):
            parts, cache = in_chunks(model, tokens, mask, size)
            torch.testing.assert_close(parts[mask.bool()], whole[mask.bool()], atol=1e-5, rtol=0)
            assert cache.get_seq_length() == 36
            assert any(isinstance(layer, RegardCacheLayer) for layer in cache.layers)


@pytest.mark.parametrize("window", [None, 5, 1])
@pytest.mark.parametrize("temperatures", ["learned", "log", "power"])
@pytest.mark.parametrize("mixers", ["softmax", "biweight", "linear"])
def test_temperatures_agree_between_the_views(make_model, padded, mixers, temperatures, window):
    model = perturb(make_model(mixers, temperatures=temperatures, window=window))
    tokens, mask = padded
    with torch.no_grad():
        whole = model(tokens, attention_mask=mask, use_cache=False).logits
        for size in (1, 7):
            parts, _ = in_chunks(model, tokens, mask, size)
            torch.testing.assert_close(parts[mask.bool()], whole[mask.bool()], atol=1e-5, rtol=0)
        alone = model(tokens[1:2, 7:], use_cache=False).logits  # padding is not counted
    torch.testing.assert_close(whole[1, 7:], alone[0], atol=1e-5, rtol=0)


@pytest.mark.parametrize("mixers", ["softmax", "shift-cosine", "biweight"])
def test_a_window_that_leaves_out_the_token_itself(make_model, padded, mixers):
    model = perturb(make_model(mixers, window=4, exclude_self=True))
    tokens, mask = padded
    with torch.no_grad():
        whole = model(tokens, attention_mask=mask, use_cache=False).logits
        for cache in (None, DynamicCache(config=model.config), DynamicCache()):
            parts, cache = in_chunks(model, tokens, mask, 1, cache)
            torch.testing.assert_close(parts[mask.bool()], whole[mask.bool()], atol=1e-5, rtol=0)
        short = Cache(layers=[DynamicSlidingWindowLayer(4) for _ in range(2)])
        with pytest.raises(ArgumentError, match="the cache gave 4 tokens of the 5 that window=4 needs"):
            in_chunks(model, tokens, mask, 1, short)


def test_which_layer_keeps_what(make_config):
    kinds = lambda cache: [type(layer) for layer in cache.layers]  # noqa: E731
    for mixer in LINEAR:
        assert kinds(hybrid_cache(make_config([mixer, "biweight"]))) == [RegardCacheLayer, DynamicLayer]
    for mixer in ("geometric", "clipped-geometric", "rbf", "softmax", "topk-softmax"):
        assert kinds(hybrid_cache(make_config(mixer))) == [DynamicLayer] * 2
    assert kinds(hybrid_cache(make_config("elu", window=3))) == [DynamicSlidingWindowLayer] * 2
    assert kinds(hybrid_cache(make_config("elu"), pairs=True)) == [DynamicLayer] * 2


@pytest.mark.parametrize("mixer", LINEAR)
def test_the_sums_do_not_grow(make_model, encode, mixer):
    model = make_model(mixer)
    tokens = encode(TEXT * 8)[None]
    sizes = []
    for length in (1, 36, 288):
        layer = model(tokens[:, :length], use_cache=True).past_key_values.layers[0]
        assert layer.get_seq_length() == length
        assert layer.get_mask_sizes(3) == (length + 3, 0)
        sizes.append(layer.bytes)
    # two key heads of 17 features (16 and the bias): values of 16 channels, a sum of keys, one flag
    assert sizes == [2 * (17 * 16 + 17) * 4 + 2] * 3


@pytest.mark.parametrize("mixers", ["elu", MIXED])
def test_a_plain_cache_of_pairs_works_too(make_model, padded, mixers):
    model = perturb(make_model(mixers))
    tokens, mask = padded
    with torch.no_grad():
        sums, _ = in_chunks(model, tokens, mask, 4)
        for cache in (DynamicCache(), DynamicCache(config=model.config)):
            pairs, cache = in_chunks(model, tokens, mask, 4, cache)
            assert [layer.keys.shape[2] for layer in cache.layers] == [36, 36]
            torch.testing.assert_close(pairs[mask.bool()], sums[mask.bool()], atol=1e-5, rtol=0)
    given = DynamicCache(config=model.config)
    model.generate(tokens, attention_mask=mask, past_key_values=given, max_new_tokens=3, do_sample=False)
    assert given.layers[0].keys.shape[2] == 38


def test_a_step_leaves_the_state_before_it_alone(make_model, padded):
    model = make_model("elu")
    tokens, mask = padded
    with torch.no_grad():
        _, cache = in_chunks(model, tokens, mask, 36)
        before = [layer.linear_state for layer in cache.layers]
        numbers = [state.values.clone() for state in before]
        model(tokens[:, :1], attention_mask=torch.ones(3, 37, dtype=torch.long), past_key_values=cache)
    for layer, state, values in zip(cache.layers, before, numbers, strict=True):
        assert torch.equal(state.values, values)
        assert not torch.equal(layer.linear_state.values, values)


@pytest.mark.parametrize("mixers", ["shift-cosine", MIXED])
def test_rows_can_be_chosen_repeated_and_forgotten(make_model, encode, padded, mixers):
    """Each way of changing the batch against the same rows read anew."""
    model = perturb(make_model(mixers))
    tokens, mask = padded
    new = encode("plum")[None]

    def go_on(change, rows):
        with torch.no_grad():
            _, cache = in_chunks(model, tokens, mask, 36)
            change(cache)
            joined = torch.cat([mask[rows], torch.ones(len(rows), 4, dtype=torch.long)], 1)
            found = model(new.expand(len(rows), 4), attention_mask=joined, past_key_values=cache).logits
            whole = torch.cat([tokens[rows], new.expand(len(rows), 4)], 1)
            expected = model(whole, attention_mask=joined, use_cache=False).logits[:, 36:]
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)

    go_on(lambda cache: cache.reorder_cache(torch.tensor([2, 0, 0])), [2, 0, 0])
    go_on(lambda cache: cache.batch_select_indices(torch.tensor([1])), [1])
    go_on(lambda cache: cache.batch_select_indices(torch.tensor([True, False, True])), [0, 2])
    go_on(lambda cache: cache.batch_repeat_interleave(2), [0, 0, 1, 1, 2, 2])
    go_on(lambda cache: cache.crop(0), [0, 1, 2])
    go_on(lambda cache: [layer.offload() or layer.prefetch() for layer in cache.layers], [0, 1, 2])
    with torch.no_grad():
        _, cache = in_chunks(model, tokens, mask, 36)
        cache.reset()
        assert cache.get_seq_length() == 0
        again, _ = in_chunks(model, tokens, mask, 36, cache)
        torch.testing.assert_close(again, model(tokens, attention_mask=mask, use_cache=False).logits, atol=1e-5, rtol=0)


def test_an_empty_layer_can_be_asked_everything():
    layer = RegardCacheLayer()
    assert (layer.get_seq_length(), layer.bytes, layer.get_mask_sizes(4), layer.get_max_length()) == (0, 0, (4, 0), -1)
    for change in (layer.reset, layer.offload, layer.prefetch, lambda: layer.crop(-2)):
        change()
    layer.reorder_cache(torch.tensor([0]))
    layer.batch_repeat_interleave(2)
    assert layer.linear_state is None


@pytest.mark.parametrize(
    "mode", [{"num_beams": 3}, {"do_sample": True}, {"do_sample": True, "num_return_sequences": 2}]
)
@pytest.mark.parametrize("mixers", ["shift-cosine", MIXED])
def test_generation_with_and_without_a_cache(make_model, padded, mixers, mode):
    model = perturb(make_model(mixers))
    tokens, mask = padded
    found = []
    for use_cache in (True, False):
        torch.manual_seed(3)
        options = {"do_sample": False, "max_new_tokens": 16, "use_cache": use_cache, **mode}
        found.append(model.generate(tokens, attention_mask=mask, **options))
    assert torch.equal(*found)


def test_generation_uses_the_sums(make_model, encode, monkeypatch):
    """No pair is kept: what `generate` hands back holds no keys."""
    model = make_model("elu")
    tokens = encode(TEXT)[None]
    out = model.generate(tokens, max_new_tokens=5, do_sample=False, return_dict_in_generate=True)
    assert [type(layer) for layer in out.past_key_values.layers] == [RegardCacheLayer] * 2
    assert out.past_key_values.layers[0].keys is None
    more = model.generate(out.sequences, past_key_values=out.past_key_values, max_new_tokens=5, do_sample=False)
    assert torch.equal(more, model.generate(tokens, max_new_tokens=10, do_sample=False, use_cache=False))


def test_decoding_that_takes_tokens_back(make_model, encode):
    """The model's own cache then keeps pairs; sums that are handed in are refused before anything is lost."""
    model = perturb(make_model("elu"))
    tokens = encode(TEXT + TEXT[:12])[None]
    options = {"max_new_tokens": 12, "do_sample": False, "prompt_lookup_num_tokens": 3}
    plain = model.generate(tokens, max_new_tokens=12, do_sample=False)
    assert torch.equal(model.generate(tokens, **options), plain)
    with pytest.raises(ArgumentError, match=r"cannot be taken back from sums, .* give a transformers.DynamicCache"):
        model.generate(tokens, past_key_values=hybrid_cache(model.config), **options)
    helper = perturb(make_model("relu", num_hidden_layers=1), seed=6)
    assert torch.equal(model.generate(tokens, max_new_tokens=12, do_sample=False, assistant_model=helper), plain)
    cache = model(tokens, use_cache=True).past_key_values
    assert not cache.is_croppable
    with pytest.raises(ArgumentError, match="tokens cannot be taken back from sums"):
        cache.crop(-2)
    assert cache.get_seq_length() == 48


def test_weights_need_pairs(make_model, encode):
    model = make_model("elu")
    tokens = encode(TEXT)[None]
    out = model(tokens, output_attentions=True)  # the cache made here keeps pairs, so that it can go on
    assert out.attentions[0].shape == (1, 4, 36, 36)
    step = model(tokens[:, :1], past_key_values=out.past_key_values, output_attentions=True)
    assert step.attentions[0].shape == (1, 4, 1, 37)
    shown = model.generate(tokens, max_new_tokens=3, output_attentions=True, return_dict_in_generate=True)
    assert shown.attentions[2][0].shape == (1, 4, 1, 38)
    sums = hybrid_cache(model.config)
    first = model(tokens, past_key_values=sums, output_attentions=True)
    torch.testing.assert_close(first.attentions[0], out.attentions[0])
    with pytest.raises(
        ArgumentError, match=r"weights of earlier tokens were asked for.* use a transformers.DynamicCache"
    ):
        model(tokens[:, :1], past_key_values=sums, output_attentions=True)


def test_observers_see_the_first_call(make_model, encode):
    model = make_model("elu")
    tokens = encode(TEXT)[None]
    with capture(model) as seen, torch.no_grad():
        out = model(tokens)
        assert type(out.past_key_values.layers[0]) is RegardCacheLayer
    assert seen.layers[1].support.shape == (1, 4, 36)
    torch.testing.assert_close(out.logits, model(tokens, use_cache=False).logits, atol=1e-5, rtol=0)


def test_hidden_content_that_is_not_a_number(make_model, encode):
    """Padding with NaN, token by token: it enters no sum."""
    model = make_model("elu")
    embeds = model.model.embed_tokens(encode(TEXT)[None]).detach()
    real = torch.arange(36)[None] >= 5
    broken = embeds.masked_fill(~real[..., None], math.nan)
    with torch.no_grad():
        expected = model(inputs_embeds=embeds, attention_mask=real, use_cache=False).logits[real]
        cache, parts = hybrid_cache(model.config), []
        for t in range(36):
            given = {"inputs_embeds": broken[:, t : t + 1], "attention_mask": real[:, : t + 1]}
            parts.append(model(past_key_values=cache, **given).logits)
    torch.testing.assert_close(torch.cat(parts, 1)[real], expected, atol=1e-5, rtol=0)


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
    with pytest.raises(ArgumentError, match=r"holds sums, which regard.nn.Attention adds to"):
        cache().update(x, x, 0)


def test_gradients_flow_through_the_state(make_model, encode):
    """A loss on the second half reaches weights by way of the first half's sums."""
    model = perturb(make_model("elu").double())
    tokens = encode(TEXT)[None]
    whole = model(tokens, use_cache=False).logits[:, 18:].square().mean()
    cache = model(tokens[:, :18], use_cache=True).past_key_values
    parts = model(tokens[:, 18:], past_key_values=cache).logits.square().mean()
    names, weights = zip(*model.named_parameters(), strict=True)
    pairs = zip(torch.autograd.grad(parts, weights), torch.autograd.grad(whole, weights), strict=True)
    for name, (a, b) in zip(names, pairs, strict=True):
        torch.testing.assert_close(a, b, atol=1e-8, rtol=1e-6, msg=name)


def test_saved_with_its_new_fields(make_model, padded, tmp_path):
    changes = {"temperatures": ["power(exponent=0.5)", "log"], "share_query_key": True, "exclude_self": True}
    model = perturb(make_model(["linear", "softmax"], num_key_value_heads=4, **changes))
    tokens, mask = padded
    model.save_pretrained(tmp_path)
    again = HybridForCausalLM.from_pretrained(tmp_path)
    for name, value in changes.items():
        assert getattr(again.config, name) == value
    names = {name.removeprefix("model.layers.") for name in again.state_dict() if "self_attn" in name}
    power = {f"0.self_attn.{name}" for name in ("log_base", "log_gain", "logit_exponent")}
    projections = {f"{i}.self_attn.{name}_proj.weight" for i in range(2) for name in "kvo"}
    assert names == power | projections | {"1.self_attn.log_slope"}
    assert torch.equal(again(tokens, attention_mask=mask).logits, model(tokens, attention_mask=mask).logits)


def test_forward_mode_sees_through_the_sums(make_model, encode):
    """The directional derivative of the logits, by forward mode with and without a cache, and by differences."""
    model = perturb(make_model("elu").double())
    embeds = model.model.embed_tokens(encode("plum")[None]).detach()
    along = torch.randn(embeds.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def logits(x, use_cache=False):
        return model(inputs_embeds=x, use_cache=use_cache).logits

    expected = (logits(embeds + 1e-6 * along) - logits(embeds - 1e-6 * along)) / 2e-6
    for use_cache in (False, True):
        found = torch.func.jvp(lambda x, cached=use_cache: logits(x, cached), (embeds,), (along,))[1]
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-6)
