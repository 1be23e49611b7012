"""What every registered token mixer keeps: a new one is tested with no other edit."""

from __future__ import annotations

import pytest
import torch
from any_model import moved

from regard.checks import ArgumentError
from regard.models import HybridConfig, HybridForCausalLM, flush_memory, frozen_memory, keep_memory, token_mixers
from regard.models.base.cache_layers import StateCacheLayer

SMALL = {
    "gated-deltanet": {"num_heads": 2, "head_dim": 8},
    "lact": {"fast_heads": 2, "window": 9, "chunk_size": 4},
}
"""Options that make a mixer small; those that are not named here are tested with what they have."""
mixers = pytest.mark.parametrize("name", token_mixers.names())
RECURRENT = [name for name, mixer in token_mixers.items() if issubclass(mixer.cache_layer, StateCacheLayer)]
"""Mixers that keep a state and no pairs."""


def model(name, others=("biweight",), **fields):
    torch.manual_seed(0)
    config = HybridConfig(
        vocab_size=31, hidden_size=16, num_hidden_layers=1 + len(others), num_attention_heads=2, pad_token_id=0,
        mixers=[name, *others], mixer_options={name: SMALL.get(name, {})}, **fields,
    )  # fmt: skip
    return moved(HybridForCausalLM(config)).eval()


def tokens(rows=2, length=29, seed=0):
    return torch.randint(1, 31, (rows, length), generator=torch.Generator().manual_seed(seed))


@mixers
@pytest.mark.parametrize("cuts", [[1] * 29, [3, 1, 5, 20], [28, 1]])
def test_any_partition_gives_the_same(name, cuts):
    net, text = model(name), tokens()
    whole, cache, parts = net(text).logits, None, []
    for piece in text.split(cuts, dim=1):
        out = net(piece, past_key_values=cache, use_cache=True)
        cache, parts = out.past_key_values, [*parts, out.logits]
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-4, atol=1e-5)
    assert cache.get_seq_length() == 29


@mixers
def test_a_token_depends_on_earlier_ones_only(name):
    net, text = model(name), tokens()
    before = net(text).logits
    text[:, 11] = (text[:, 11] % 30) + 1
    after = net(text).logits
    torch.testing.assert_close(after[:, :11], before[:, :11], rtol=0, atol=1e-6)
    assert (after[:, 11:] - before[:, 11:]).abs().amax(-1).min() > 0


@mixers
def test_left_padding_is_as_if_it_were_not_there(name):
    net, text = model(name), tokens()
    mask = torch.ones_like(text)
    mask[0, :8] = 0
    padded = net(text, attention_mask=mask).logits
    torch.testing.assert_close(padded[0, 8:], net(text[:1, 8:]).logits[0], rtol=1e-4, atol=1e-5)
    text[0, :8] = 3
    torch.testing.assert_close(net(text, attention_mask=mask).logits[mask != 0], padded[mask != 0], rtol=0, atol=1e-6)


@mixers
def test_generation_is_that_of_the_uncached_model(name):
    net, prompt = model(name), tokens(length=9)
    mask = torch.ones_like(prompt)
    mask[0, :3] = 0
    settings = {"max_new_tokens": 10, "do_sample": False, "pad_token_id": 0, "attention_mask": mask}
    for beams in (1, 3):
        cached = net.generate(prompt, **settings, num_beams=beams)
        assert torch.equal(cached, net.generate(prompt, **settings, num_beams=beams, use_cache=False))


@mixers
def test_tokens_are_taken_back_from_pairs_alone(name):
    net, prompt = model(name), tokens(rows=1, length=9)
    settings = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    if name in RECURRENT:
        with pytest.raises(ArgumentError, match="cannot be taken"):
            net.generate(prompt, **settings, prompt_lookup_num_tokens=2)
    else:
        found = net.generate(prompt, **settings, prompt_lookup_num_tokens=2)
        assert torch.equal(found, net.generate(prompt, **settings))


@mixers
def test_every_weight_learns_and_recomputation_changes_nothing(name):
    found = []
    for checkpointing in (False, True):
        net, text = model(name).train(), tokens()
        if checkpointing:
            net.gradient_checkpointing_enable()
        net(text, labels=text).loss.backward()
        found.append({key: p.grad for key, p in net.named_parameters()})
        assert all(gradient is not None and gradient.abs().sum() > 0 for gradient in found[-1].values())
    for key, gradient in found[0].items():
        torch.testing.assert_close(found[1][key], gradient, msg=key)


@mixers
def test_a_model_is_saved_and_read(name, tmp_path):
    net, text = model(name), tokens()
    net.save_pretrained(tmp_path)
    assert torch.equal(HybridForCausalLM.from_pretrained(tmp_path).eval()(text).logits, net(text).logits)


@pytest.mark.parametrize("name", RECURRENT)
def test_what_is_recurrent_can_go_on_in_a_new_text(name):
    net, text = model(name), tokens()
    cache = net(text, use_cache=True).past_key_values
    fresh = net(text).logits
    carried = keep_memory(net, cache, recurrent=True)
    assert carried.get_seq_length() == 0
    assert (net(text, past_key_values=carried).logits - fresh).abs().amax(-1).min() > 1e-6
    torch.testing.assert_close(net(text, past_key_values=keep_memory(net, cache)).logits, fresh)


def test_fast_weights_of_mixers_are_flushed_too():
    """A chunk of four and a flush are what five tokens are, of which the last one only waits."""
    net, text = model("lact"), tokens(length=5)
    cache = net(text[:, :4], use_cache=True).past_key_values
    before = cache.layers[0].fast_state
    flush_memory(net, cache)
    flushed, wanted = cache.layers[0].fast_state, net(text, use_cache=True).past_key_values.layers[0].fast_state
    for name in ("gate", "up", "down", "gate_step", "up_step", "down_step"):
        torch.testing.assert_close(getattr(flushed, name), getattr(wanted, name), rtol=1e-5, atol=1e-6)
    assert not torch.equal(flushed.up, before.up)


def test_fast_weights_of_mixers_are_frozen_too():
    net, text = model("lact"), tokens()
    with frozen_memory(net):
        frozen = net(text).logits
    assert (frozen[:, 5:] - net(text).logits[:, 5:]).abs().max() > 1e-5


@mixers
def test_options_are_checked(name):
    with pytest.raises(ArgumentError, match=f"{name} has no option 'nothing'"):
        HybridConfig(mixers=name, mixer_options={name: {"nothing": 1}})
