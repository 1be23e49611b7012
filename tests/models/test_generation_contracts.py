"""What every registered language model keeps while it writes: cached or not, in batches, by beams, with help."""

import copy

import pytest
import torch
from any_model import PARTS, every_case, every_model, make, moved, plain_case, refused, text

from regard.checks import ArgumentError
from regard.models import language_models

PIECES = ("interpolated", "lact", "memory-")
"""Parts whose calls with a cache of any length are several graphs."""
IN_ONE_GRAPH = [name for name in PARTS if not any(part in name for part in PIECES)]


def prompts():
    tokens, mask = text(3, 7, seed=4), torch.ones(3, 7, dtype=torch.long)
    mask[1, :3], mask[2, :6] = 0, 0
    return tokens * mask, mask


GREEDY = {"do_sample": False}
BEAMS = {"num_beams": 3, "num_return_sequences": 2, "do_sample": True}


def same_with_and_without_a_cache(case, how):
    model, (tokens, mask) = make(case), prompts()
    found = []
    for cached in (True, False):
        torch.manual_seed(11)
        found.append(model.generate(tokens, attention_mask=mask, max_new_tokens=12, use_cache=cached, **how))
    assert torch.equal(*found)
    assert found[0].shape[1] == 19


@every_case
@pytest.mark.parametrize("how", [GREEDY, BEAMS], ids=["greedy", "beams"])
def test_generated_with_and_without_a_cache(case, how):
    same_with_and_without_a_cache(case, how)


@plain_case
@pytest.mark.parametrize("how", [{"do_sample": True, "top_k": 5, "temperature": 0.8}, {**BEAMS, "do_sample": False}])
def test_drawn_or_searched_for_with_and_without_a_cache(case, how):
    same_with_and_without_a_cache(case, how)


@plain_case
def test_generated_batch_equals_its_rows(case):
    model, (tokens, mask) = make(case), prompts()
    together = model.generate(tokens, attention_mask=mask, max_new_tokens=12, do_sample=False)
    for row in range(3):
        alone = model.generate(tokens[row, mask[row].bool()][None], max_new_tokens=12, do_sample=False)
        assert torch.equal(together[row, 7:], alone[0, -12:])


@torch.no_grad()
@every_model
@pytest.mark.parametrize("cached", [True, False])
def test_what_follows_padding_on_the_right_sees_the_prompt(name, cached):
    model, (tokens, mask) = make(name), prompts()
    tokens, mask = tokens.flip(1), mask.flip(1)
    found = model.generate(tokens, attention_mask=mask, max_new_tokens=5, do_sample=False, use_cache=cached)
    for _ in range(5):
        new = model(tokens, attention_mask=mask, use_cache=False).logits[:, -1:].argmax(-1)
        tokens, mask = torch.cat([tokens, new], 1), torch.cat([mask, torch.ones_like(new)], 1)
    assert torch.equal(found, tokens)


@torch.no_grad()
@every_model
@pytest.mark.parametrize("mixers", ["softmax", "shift-cosine"])
def test_what_generate_tells(name, mixers):
    model, tokens = make(name, mixers), text(2, 5)
    told = model.generate(
        tokens, max_new_tokens=4, do_sample=False, return_dict_in_generate=True, output_logits=True,
        output_attentions=True, output_hidden_states=True,
    )  # fmt: skip
    whole = model(told.sequences[:, :-1], use_cache=False, output_attentions=True)
    torch.testing.assert_close(torch.stack(told.logits, 1).double(), whole.logits[:, 4:], atol=1e-5, rtol=0)
    assert len(told.attentions) == len(told.hidden_states) == 4
    for new, all_at_once in zip(told.attentions[-1], whole.attentions, strict=True):
        torch.testing.assert_close(new[:, :, -1, : all_at_once.shape[-1]], all_at_once[:, :, -1], atol=1e-5, rtol=0)
    # the cache goes on where generation ended
    more = text(2, 3, seed=6)
    again = model(torch.cat([told.sequences[:, -1:], more], 1), past_key_values=told.past_key_values).logits
    fresh = model(torch.cat([told.sequences, more], 1), use_cache=False).logits
    torch.testing.assert_close(again, fresh[:, -4:], atol=1e-5, rtol=0)


@every_model
@pytest.mark.parametrize("mixers", ["softmax", "shift-cosine"])
@pytest.mark.parametrize("aid", ["prompt lookup", "assistant"])
def test_decoding_that_takes_tokens_back_works_or_says_why_not(name, mixers, aid):
    model = make(name, mixers)
    tokens = torch.cat([text(1, 6, seed=3)] * 3, 1)
    expected = model.generate(tokens, max_new_tokens=10, do_sample=False)
    helper = moved(copy.deepcopy(model), seed=8, size=0.05)
    how = {"prompt_lookup_num_tokens": 3} if aid == "prompt lookup" else {"assistant_model": helper}
    try:
        found = model.generate(tokens, max_new_tokens=10, do_sample=False, **how)
    except ArgumentError as error:
        refused(error)
        assert name not in ("transformer", "iclm"), "whose caches can be cropped"
    else:
        assert torch.equal(found, expected)


@pytest.mark.slow
@pytest.mark.parametrize("case", [*language_models.names(), *IN_ONE_GRAPH])
def test_a_compiled_model_writes_the_same_in_one_graph(case):
    model, tokens = make(case, dtype=torch.float32), text(2, 5)
    expected = model.generate(tokens, max_new_tokens=8, do_sample=False)
    torch._dynamo.reset()
    model.forward = torch.compile(model.forward, backend="eager", dynamic=True, fullgraph=True)
    assert torch.equal(model.generate(tokens, max_new_tokens=8, do_sample=False), expected)
