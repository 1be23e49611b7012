"""The cache of an ICLM: what it holds, tokens taken back, and caches that do not fit."""

from __future__ import annotations

import pytest
import torch
from any_model import CASES, T, in_chunks, make, padded, text
from transformers import DynamicCache

from regard.checks import ArgumentError


@torch.no_grad()
@pytest.mark.parametrize("case", [case for case in CASES if case.startswith("iclm")])
def test_tokens_can_be_taken_back(case):
    model, (tokens, mask) = make(case), padded()
    whole = model(tokens, attention_mask=mask, use_cache=False).logits
    for kept in (1, 3, 8):
        # other tokens at the end, forgotten again
        other = torch.cat((tokens[:, :kept], tokens[:, kept:].flip(1)), 1)[:, : kept + 3]
        _, cache = in_chunks(model, other, [kept, 2, 1], mask[:, : kept + 3])
        cache.crop(-3)
        assert cache.get_seq_length() == kept
        rest = model(tokens[:, kept:], attention_mask=mask, past_key_values=cache).logits
        real = mask[:, kept:].bool()
        torch.testing.assert_close(rest[real], whole[:, kept:][real], atol=1e-9, rtol=0)
    cache.crop(-T)
    assert cache.get_seq_length() == 0
    again, _ = in_chunks(model, tokens, [T], mask, cache)
    torch.testing.assert_close(again[mask.bool()], whole[mask.bool()], atol=1e-9, rtol=0)
    with pytest.raises(ArgumentError, match=r"ICLMCache\.crop: got 2, expected a number <= 0"):
        cache.crop(2)


def test_what_is_kept():
    """Values once for all f blocks, but for wv; a key a pair and the one that waits."""
    number = 3 * 4  # rows of the batch, bytes of a float32
    for changes, blocks, shared in (
        ({}, [(11 + 1) * 16] * 2, 11 * 16),
        ({"variant": "wv"}, [(11 + 1) * 16 + 11 * 16] * 2, 11 * 16),
        ({"start": "bos"}, [(10 + 1) * 16] * 2, 10 * 16),
        ({"expectation": "exact", "gd_steps": 2}, [(11 + 1) * 16] * 2, 11 * 16 + (11 + 1) * 16),
    ):
        _, cache = in_chunks(make("iclm", dtype=torch.float32, **changes), text(3, 11), [4, 7])
        assert [cache.function_layer(i).bytes for i in range(2)] == [n * number for n in blocks]
        assert cache.shared.bytes == shared * number
        slots = 11 if changes == {"start": "bos"} else 12
        assert [layer.keys.shape[2] for layer in cache.layers[:2]] == [slots] * 2


def test_caches_that_do_not_fit():
    model, tokens = make("iclm"), text(3)
    with pytest.raises(ArgumentError, match="past_key_values is a DynamicCache, which cannot hold keys that wait"):
        model(tokens, past_key_values=DynamicCache())
    with pytest.raises(ArgumentError, match="is for 1 covariate and 1 f blocks, the model has 2 and 2"):
        model(tokens, past_key_values=make("iclm", num_hidden_layers=2).model.new_cache())
    with pytest.raises(ArgumentError, match="keys wait for their values here; use extend"):
        model.model.new_cache().update(torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 3, 4), 2)
    with pytest.raises(ArgumentError, match="past_key_values is of 3 sequences and the tokens of 1"):
        model(tokens[:1], past_key_values=model(tokens).past_key_values)


def test_a_value_is_projected_once():
    model, seen = make("iclm", variant="wv"), []
    handle = model.model.f[0].attn.v_proj.register_forward_hook(lambda module, inputs, out: seen.append(out.shape[1]))
    model.generate(text(3, 11), max_new_tokens=5, min_new_tokens=5, do_sample=False)
    handle.remove()
    assert seen == [11, 1, 1, 1, 1]
