"""Decoding an ICLM with its cache: the same logits as without, whatever comes in pieces, in beams, or is taken back."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import DynamicCache

import regard
from regard.checks import ArgumentError
from regard.models import ICLMCache, ICLMConfig, ICLMForCausalLM

KINDS = [
    {},
    {"start": "bos"},
    {"variant": "wv"},
    {"variant": "wv", "start": "bos"},
    {"variant": "slice", "f_reads": "pre"},
    {"num_hidden_layers": 2, "f_reads": "pre", "start": "bos"},
    {"mixers": "linear", "phi_mixers": "biweight", "f_mlp": "side"},
    {"expectation": "mean", "f_rope": False},
    {"expectation": "exact", "gd_steps": 2},
    {"expectation": "exact", "gd_steps": 2, "variant": "wv", "start": "bos"},
]


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def make(seed=0, **changes):
    fields = {"vocab_size": 23, "hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 2, "pad_token_id": 0}
    torch.manual_seed(seed)
    model = ICLMForCausalLM(ICLMConfig(**{**fields, **changes})).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.3 * torch.randn_like(weight)
    return model


def prompt(tokens=11):
    """(tokens, mask) [3, tokens]: a full row, one padded on the left, one with a hole and padded to a few tokens."""
    ids = torch.randint(1, 23, (3, tokens), generator=torch.Generator().manual_seed(5))
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    mask[2, : tokens - 5], mask[2, tokens - 3] = 0, 0
    return ids, mask


@torch.no_grad()
def in_pieces(model, ids, mask, sizes, cache=None):
    """(logits, cache) of tokens given a few at a time."""
    parts, at = [], 0 if cache is None else cache.get_seq_length()
    for size in sizes:
        stop = at + size
        seen = None if mask is None else mask[:, :stop]
        out = model(ids[:, at:stop], attention_mask=seen, past_key_values=cache, use_cache=True)
        cache, at = out.past_key_values, stop
        parts.append(out.logits)
    return torch.cat(parts, 1), cache


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("changes", KINDS, ids=str)
def test_pieces_are_the_whole(changes, padded):
    model = make(**changes).double()
    ids, mask = prompt()
    shown = mask if padded else None
    with torch.no_grad():
        whole = model(ids, attention_mask=shown, use_cache=False).logits
    for sizes in ((1,) * 11, (4, 1, 3, 3), (11,)):
        parts, cache = in_pieces(model, ids, shown, sizes)
        torch.testing.assert_close(parts[mask > 0], whole[mask > 0], atol=1e-10, rtol=0)
        assert cache.get_seq_length() == 11
        assert {layer.get_seq_length() for layer in cache.layers} == {11}


@pytest.mark.parametrize("changes", KINDS, ids=str)
def test_greedy_decoding_is_that_without_a_cache(changes):
    """64 tokens, three rows, logits to 1e-4 in float32."""
    model = make(**changes)
    ids, mask = prompt()
    options = {"attention_mask": mask, "max_new_tokens": 64, "min_new_tokens": 64, "do_sample": False}
    options |= {"output_logits": True, "return_dict_in_generate": True}
    fast = model.generate(ids, **options)
    slow = model.generate(ids, use_cache=False, **options)
    assert isinstance(fast.past_key_values, ICLMCache)
    assert torch.equal(fast.sequences, slow.sequences)
    assert fast.sequences.shape == (3, 75)
    torch.testing.assert_close(torch.stack(fast.logits), torch.stack(slow.logits), atol=1e-4, rtol=0)
    beams = {
        "attention_mask": mask,
        "max_new_tokens": 12,
        "num_beams": 3,
        "num_return_sequences": 2,
        "do_sample": False,
    }
    assert torch.equal(model.generate(ids, **beams), model.generate(ids, use_cache=False, **beams))


@pytest.mark.parametrize("mixers", [*regard.presets(), "local-linear[biweight]"])
def test_every_kernel_decodes_and_adds_up(mixers):
    model = make(mixers=mixers)
    ids, mask = prompt()
    with torch.no_grad():
        whole = model(ids, attention_mask=mask, use_cache=False).logits
    steps, _ = in_pieces(model, ids, mask, (1,) * 11)
    parts = model.contributions(ids, attention_mask=mask)
    torch.testing.assert_close(steps[mask > 0], whole[mask > 0], atol=1e-4, rtol=0)
    torch.testing.assert_close(parts.logits()[mask > 0], whole[mask > 0], atol=1e-5, rtol=1e-6)


def test_tokens_can_be_taken_back():
    for changes in KINDS:
        model = make(**changes).double()
        ids, mask = prompt()
        whole, _ = in_pieces(model, ids, mask, (11,))
        for kept in (1, 3, 8):
            # other tokens at the end, forgotten again
            _, cache = in_pieces(model, ids, mask, (kept,))
            other = torch.cat((ids[:, :kept], ids[:, kept:].flip(1)), 1)
            _, cache = in_pieces(model, other, mask, (2, 1), cache)
            cache.crop(-3)
            assert cache.get_seq_length() == kept
            rest, _ = in_pieces(model, ids, mask, (11 - kept,), cache)
            shown = mask[:, kept:] > 0
            torch.testing.assert_close(rest[shown], whole[:, kept:][shown], atol=1e-10, rtol=0)
        cache.crop(-11)
        assert cache.get_seq_length() == 0
        again, _ = in_pieces(model, ids, mask, (11,), cache)
        torch.testing.assert_close(again[mask > 0], whole[mask > 0], atol=1e-10, rtol=0)
        with pytest.raises(ArgumentError, match=r"ICLMCache\.crop: got 2, expected a number <= 0"):
            cache.crop(2)


def test_assisted_decoding_takes_tokens_back():
    model = make(variant="wv")
    ids = prompt()[0][:1]
    options = {"max_new_tokens": 24, "min_new_tokens": 24, "do_sample": False}
    plain = model.generate(ids, **options)
    assert torch.equal(model.generate(ids, prompt_lookup_num_tokens=3, **options), plain)
    helper = make(seed=7)
    assert torch.equal(model.generate(ids, assistant_model=helper, **options), plain)


@pytest.mark.parametrize("changes", [KINDS[0], KINDS[-1]], ids=str)
def test_rows_are_chosen_and_repeated(changes):
    model = make(**changes).double()
    ids, mask = prompt()
    whole, _ = in_pieces(model, ids, mask, (11,))
    _, begun = in_pieces(model, ids, mask, (6,))
    for act, rows in (
        (lambda c: c.reorder_cache(torch.tensor([2, 0, 0])), [2, 0, 0]),
        (lambda c: c.batch_select_indices(torch.tensor([2, 1])), [2, 1]),
        (lambda c: c.batch_repeat_interleave(2), [0, 0, 1, 1, 2, 2]),
    ):
        cache = copy.deepcopy(begun)
        act(cache)
        rest, _ = in_pieces(model, ids[rows], mask[rows], (5,), cache)
        shown = mask[rows][:, 6:] > 0
        torch.testing.assert_close(rest[shown], whole[rows][:, 6:][shown], atol=1e-10, rtol=0)
    cache = copy.deepcopy(begun)
    for layer in cache.layers:
        layer.offload()
        layer.prefetch()
    rest, cache = in_pieces(model, ids, mask, (5,), cache)
    torch.testing.assert_close(rest[mask[:, 6:] > 0], whole[:, 6:][mask[:, 6:] > 0], atol=1e-10, rtol=0)
    cache.reset()
    assert cache.get_seq_length() == 0
    again, _ = in_pieces(model, ids, mask, (11,), cache)
    torch.testing.assert_close(again[mask > 0], whole[mask > 0], atol=1e-10, rtol=0)


def test_what_is_kept():
    """Values once for all f blocks, but for wv; a key a pair and the one that waits."""
    ids = prompt()[0]
    number = 3 * 4  # rows of the batch, bytes of a float32
    for changes, blocks, shared in (
        ({}, [(11 + 1) * 16] * 2, 11 * 16),
        ({"variant": "wv"}, [(11 + 1) * 16 + 11 * 16] * 2, 11 * 16),
        ({"start": "bos"}, [(10 + 1) * 16] * 2, 10 * 16),
        ({"expectation": "exact", "gd_steps": 2}, [(11 + 1) * 16] * 2, 11 * 16 + (11 + 1) * 16),
    ):
        cache = in_pieces(make(**changes), ids, None, (4, 7))[1]
        assert [cache.function_layer(i).bytes for i in range(2)] == [n * number for n in blocks]
        assert cache.shared.bytes == shared * number
        slots = 11 if changes == {"start": "bos"} else 12
        assert [layer.keys.shape[2] for layer in cache.layers[:2]] == [slots] * 2


def test_caches_that_do_not_fit():
    model, ids = make(), prompt()[0]
    with pytest.raises(ArgumentError, match="past_key_values is a DynamicCache, which cannot hold keys that wait"):
        model(ids, past_key_values=DynamicCache())
    with pytest.raises(ArgumentError, match="is for 1 covariate and 1 f blocks, the model has 2 and 2"):
        model(ids, past_key_values=make(num_hidden_layers=2).model.new_cache())
    with pytest.raises(ArgumentError, match="keys wait for their values here; use extend"):
        model.model.new_cache().update(torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 3, 4), 2)


def test_a_value_is_projected_once():
    model, (ids, mask) = make(variant="wv"), prompt()
    seen = []
    handle = model.model.f[0].attn.v_proj.register_forward_hook(lambda module, inputs, out: seen.append(out.shape[1]))
    model.generate(ids, attention_mask=mask, max_new_tokens=5, min_new_tokens=5, do_sample=False)
    handle.remove()
    assert seen == [11, 1, 1, 1, 1]


def test_a_cache_of_another_batch_is_refused():
    model, (ids, _) = make(), prompt()
    cache = model(ids).past_key_values
    with pytest.raises(ArgumentError, match="past_key_values is of 3 sequences and the tokens of 1"):
        model(ids[:1], past_key_values=cache)
