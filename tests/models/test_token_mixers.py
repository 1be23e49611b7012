"""What token mixers keep beside the contracts of models, which run over every registered mixer."""

from __future__ import annotations

import pytest
import torch
from any_model import make, text

from regard.checks import ArgumentError
from regard.models import HybridConfig, flush_memory, frozen_memory, keep_memory, token_mixers
from regard.models.base.cache_layers import StateCacheLayer

mixers = pytest.mark.parametrize("name", token_mixers.names())
RECURRENT = [name for name, mixer in token_mixers.items() if issubclass(mixer.cache_layer, StateCacheLayer)]
"""Mixers that keep a state and no pairs."""


def model(name):
    return make(f"mixer-{name}", dtype=torch.float32)


@mixers
def test_tokens_are_taken_back_from_pairs_alone(name):
    net, prompt = model(name), text(1, 9)
    settings = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    if name in RECURRENT:
        with pytest.raises(ArgumentError, match="tokens cannot be removed"):
            net.generate(prompt, **settings, prompt_lookup_num_tokens=2)
    else:
        found = net.generate(prompt, **settings, prompt_lookup_num_tokens=2)
        assert torch.equal(found, net.generate(prompt, **settings))


@pytest.mark.parametrize("name", RECURRENT)
def test_what_is_recurrent_can_go_on_in_a_new_text(name):
    net, tokens = model(name), text(2, 29)
    cache = net(tokens, use_cache=True).past_key_values
    fresh = net(tokens).logits
    carried = keep_memory(net, cache, recurrent=True)
    assert carried.get_seq_length() == 0
    assert (net(tokens, past_key_values=carried).logits - fresh).abs().amax(-1).min() > 1e-6
    torch.testing.assert_close(net(tokens, past_key_values=keep_memory(net, cache)).logits, fresh)


def test_fast_weights_of_mixers_are_flushed_too():
    """A chunk of three tokens and a flush give the weights of four tokens, of which the last one only waits."""
    net, tokens = model("lact"), text(2, 4)
    cache = net(tokens[:, :3], use_cache=True).past_key_values
    before = cache.layers[0].fast_state
    flush_memory(net, cache)
    flushed, wanted = cache.layers[0].fast_state, net(tokens, use_cache=True).past_key_values.layers[0].fast_state
    for name in ("gate", "up", "down", "gate_step", "up_step", "down_step"):
        torch.testing.assert_close(getattr(flushed, name), getattr(wanted, name), rtol=1e-5, atol=1e-6)
    assert not torch.equal(flushed.up, before.up)


def test_fast_weights_of_mixers_are_frozen_too():
    net, tokens = model("lact"), text(2, 29)
    with frozen_memory(net):
        frozen = net(tokens).logits
    assert (frozen[:, 5:] - net(tokens).logits[:, 5:]).abs().max() > 1e-5


@mixers
def test_options_are_checked(name):
    with pytest.raises(ArgumentError, match=f"{name} has no option 'nothing'"):
        HybridConfig(mixers=name, mixer_options={name: {"nothing": 1}})
