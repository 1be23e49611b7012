"""What a Memory Mosaic remembers: tokens given one by one, caches handled as transformers handles them."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache

from regard.checks import ArgumentError
from regard.models import MemoryMosaicConfig, MemoryMosaicForCausalLM

V = 29
SPECS = ("softmax", "biweight", "relumax", "epanechnikov*fixed(h=1)*cosine", "topk-uniform", "linear", "local-linear")


def make(spec="biweight", **fields):
    torch.manual_seed(0)
    sizes = {"vocab_size": V, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3}
    model = MemoryMosaicForCausalLM(MemoryMosaicConfig(mixers=spec, **{**sizes, **fields})).eval()
    noise = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in model.parameters():
            p += 0.05 * torch.randn(p.shape, generator=noise)
    return model


def text(*shape, seed=0):
    return torch.randint(V, shape, generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def in_chunks(model, ids, size, mask=None, cache=None):
    parts, at = [], 0
    for chunk in ids.split(size, 1):
        at += chunk.shape[1]
        seen = None if mask is None else mask[:, :at]
        out = model(chunk, attention_mask=seen, past_key_values=cache, use_cache=True)
        cache, parts = out.past_key_values, [*parts, out.logits]
    return torch.cat(parts, 1), cache


@pytest.mark.parametrize("spec", SPECS)
def test_single_steps_equal_the_whole_over_256_tokens(spec):
    model, ids = make(spec), text(1, 256)
    whole = model(ids).logits
    assert whole.abs().max() > 0.5
    steps, cache = in_chunks(model, ids, 1)
    torch.testing.assert_close(steps, whole.detach(), rtol=0, atol=1e-5)
    assert cache.get_seq_length() == 256


@pytest.mark.parametrize("options", [{}, {"wiring": "parallel"}, {"wiring": "parallel", "persistent_keys": "shared"}])
@pytest.mark.parametrize("size", [1, 5, 17])
def test_chunks_with_padding(options, size):
    """Left, right and inner padding, and a row that is padding for long."""
    model, ids = make(**options), text(4, 20)
    mask = torch.ones(4, 20, dtype=torch.bool)
    mask[1, :6], mask[2, 12:], mask[3, :18] = False, False, False
    mask[0, 9:11] = False
    whole = model(ids, attention_mask=mask).logits
    got, _ = in_chunks(model, ids, size, mask)
    torch.testing.assert_close(got[mask], whole[mask].detach(), rtol=0, atol=1e-5)
    alone = model(ids[1:2, 6:]).logits
    torch.testing.assert_close(got[1:2, 6:], alone.detach(), rtol=0, atol=1e-5)


def test_rows_are_reordered_repeated_and_chosen():
    model, ids = make(), text(3, 12)
    with torch.no_grad():
        for change, rows in (
            (lambda c: c.reorder_cache(torch.tensor([2, 0, 0])), [2, 0, 0]),
            (lambda c: c.batch_select_indices(torch.tensor([1])), [1]),
            (lambda c: c.batch_select_indices(torch.tensor([True, False, True])), [0, 2]),
            (lambda c: c.batch_repeat_interleave(2), [0, 0, 1, 1, 2, 2]),
        ):
            _, cache = in_chunks(model, ids[:, :7], 7)
            change(cache)
            later = text(len(rows), 5, seed=4)
            got, _ = in_chunks(model, later, 2, cache=cache)
            whole = model(torch.cat([ids[rows, :7], later], 1)).logits[:, 7:]
            torch.testing.assert_close(got, whole, rtol=0, atol=1e-5)


def test_reset_and_offload():
    model, ids = make(), text(2, 9)
    whole = model(ids).logits.detach()
    _, cache = in_chunks(model, ids[:, :4], 4)
    for layer in cache.layers:
        layer.offload()
        layer.prefetch()
    got, _ = in_chunks(model, ids[:, 4:], 5, cache=cache)
    torch.testing.assert_close(got, whole[:, 4:], rtol=0, atol=1e-5)
    cache.reset()
    assert cache.get_seq_length() == 0
    got, _ = in_chunks(model, ids, 3, cache=cache)
    torch.testing.assert_close(got, whole, rtol=0, atol=1e-5)


def test_a_call_does_not_change_the_states_of_another_cache():
    """States are replaced, never written into: two continuations of one beginning."""
    model, ids = make(), text(1, 6)
    _, cache = in_chunks(model, ids, 6)
    held = [layer.contextual for layer in cache.layers]
    before = [state.keys.clone() for state in held]
    in_chunks(model, text(1, 3, seed=2), 1, cache=cache)
    assert all(torch.equal(state.keys, kept) for state, kept in zip(held, before, strict=True))


def test_what_is_remembered():
    """Pairs of all tokens but the last, which waits; everything else does not grow."""
    model, ids = make(), text(2, 10)
    sizes = []
    for length in (3, 10):
        _, cache = in_chunks(model, ids[:, :length], 1)
        layer = cache.layers[1]
        assert layer.contextual.keys.shape == layer.contextual.values.shape == (2, 3, length - 1, 8)
        pairs = 2 * layer.contextual.keys.numel() * 4
        sizes.append(layer.bytes - pairs)
    assert sizes[0] == sizes[1]


def test_tokens_are_not_taken_back():
    model, ids = make(), text(1, 6)
    with pytest.raises(ArgumentError, match="cannot be removed"):
        model.generate(ids, max_new_tokens=4, prompt_lookup_num_tokens=2)
    _, cache = in_chunks(model, ids, 6)
    with pytest.raises(ArgumentError, match="cannot be removed"):
        cache.crop(3)


def test_caches_of_other_models_are_refused():
    model = make()
    with pytest.raises(ArgumentError, match="without the states"):
        model(text(1, 4), past_key_values=DynamicCache())
    with pytest.raises(ArgumentError, match="fill themselves"):
        model.model.new_cache().update(torch.zeros(1, 3, 1, 8), torch.zeros(1, 3, 1, 8), 0)


def test_weights_with_a_cache():
    model, ids = make(), text(1, 6)
    whole = model(ids, output_attentions=True).attentions
    _, cache = in_chunks(model, ids[:, :4], 4)
    out = model(ids[:, 4:], past_key_values=cache, output_attentions=True)
    for part, all_rows in zip(out.attentions, whole, strict=True):
        torch.testing.assert_close(part, all_rows[:, :, 4:], rtol=0, atol=1e-5)
