"""What every registered language model keeps, whatever it computes: causality, caches, padding, generated texts.
`any_model` holds every registered model, mixer and memory, in float64 and away from the initial weights, so that no
part is silent."""

import copy
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from any_model import (
    CASES,
    PARTS,
    SIZES,
    T,
    cases,
    counts_padding,
    every_case,
    every_model,
    gradients,
    in_chunks,
    loss_of,
    make,
    moved,
    padded,
    parts_first,
    plain_case,
    refused,
    same_by_path,
    takes_embeddings,
    text,
    tolerance,
)
from mistakes import refuses
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from regard import presets
from regard.checks import ArgumentError
from regard.models import language_models
from regard.models.base.arguments import CACHE_NAMES

every_case_with_embeddings = cases([case for case in CASES if takes_embeddings(case)])
WITHIN_CHUNKS = ("mixer-gated-deltanet", "mixer-lact", "memory-of-two-kinds")
"""Mixers that multiply later tokens of a chunk by zero: what is not a number there reaches earlier tokens."""
ABSOLUTE = {"transformer-elu", "transformer-window", "transformer-local-linear", *PARTS}
"""Features of rotated queries and keys, such as elu's, and a ridge for each of their channels depend on more than the
distance; so may token mixers."""


@torch.no_grad()
@every_case
def test_later_tokens_change_no_bit_and_the_present_one_does(case):
    model, tokens = make(case), text(2)
    with_cache = {False: model(tokens, use_cache=False).logits, True: model(tokens, use_cache=True).logits}
    for at in (1, 2, 5, T - 1):
        other = tokens.clone()
        other[:, at:] = text(2, T - at, seed=at + 50)
        other[:, at] = tokens[:, at] % 28 + 1
        for cached, before in with_cache.items():
            after = model(other, use_cache=cached).logits
            assert torch.equal(after[:, :at], before[:, :at])
            assert (after[:, at] - before[:, at]).abs().amax() > 1e-6


@torch.no_grad()
@cases([case for case in CASES if takes_embeddings(case) and case not in WITHIN_CHUNKS])
def test_later_embeddings_that_are_not_numbers_change_no_bit(case):
    model = make(case)
    embedded = model.get_input_embeddings()(text(2)).clone()
    before = model(inputs_embeds=embedded).logits
    for poison in (torch.nan, torch.inf):
        embedded[:, 6:] = poison
        rounding = 1e-12 if case == "mixer-mesa" else 0.0  # which solves the systems of a chunk together
        torch.testing.assert_close(model(inputs_embeds=embedded).logits[:, :6], before[:, :6], rtol=0.0, atol=rounding)


@torch.no_grad()
@plain_case
def test_prefill_chunks_and_steps_agree(case):
    model, order = make(case), torch.Generator().manual_seed(2)
    for length in (1, 2, 3, 21):
        tokens = text(2, length, seed=length)
        whole = model(tokens, use_cache=False).logits
        for _ in range(3):
            cuts = sorted(set(torch.randint(1, length + 1, (4,), generator=order).tolist()) | {length})
            sizes = [b - a for a, b in pairwise([0, *cuts])]
            torch.testing.assert_close(in_chunks(model, tokens, sizes)[0], whole, atol=tolerance(case), rtol=0)
        torch.testing.assert_close(in_chunks(model, tokens, [1] * length)[0], whole, atol=tolerance(case), rtol=0)


@torch.no_grad()
@every_model
@pytest.mark.parametrize("mixers", presets())
def test_every_preset_goes_step_by_step(name, mixers):
    model, (tokens, mask) = make(name, mixers, num_hidden_layers=2), padded()
    whole = model(tokens, attention_mask=mask, use_cache=False).logits[mask.bool()]
    found = in_chunks(model, tokens, [1] * T, mask)[0][mask.bool()]
    torch.testing.assert_close(found, whole, atol=1e-9, rtol=0)


@torch.no_grad()
@every_case
def test_chunks_of_a_padded_batch(case):
    model, (tokens, mask) = make(case), padded()
    real = mask.bool()
    whole = model(tokens, attention_mask=mask, use_cache=False).logits
    for sizes in ([T], [1] * T, [3, 1, 5, 4], [8, 5], [2, 2, 9]):
        parts, cache = in_chunks(model, tokens, sizes, mask)
        torch.testing.assert_close(parts[real], whole[real], atol=tolerance(case), rtol=0)
        assert cache.get_seq_length() == T


@torch.no_grad()
@every_model
@pytest.mark.parametrize("mixers", ["softmax", pytest.param("biweight", marks=pytest.mark.slow)])
def test_float32_steps_over_256_tokens(name, mixers):
    model, tokens = make(name, mixers, torch.float32), text(1, 256)
    whole = model(tokens, use_cache=False).logits
    parts, _ = in_chunks(model, tokens, [3] + [1] * 253)
    torch.testing.assert_close(parts, whole, atol=1e-5 * float(whole.abs().amax().clamp(min=1)), rtol=0)


@torch.no_grad()
@parts_first
def test_rows_of_a_cache_are_reordered_repeated_and_selected(case):
    model, (tokens, mask) = make(case), padded()
    tokens, mask = torch.cat([tokens, text(5, 3, seed=9)], 1), F.pad(mask, (0, 3), value=1)
    whole = model(tokens, attention_mask=mask, use_cache=False).logits[:, T:]
    chosen = torch.tensor([False, True, False, True, False])
    for move, rows in (
        (lambda cache: cache.reorder_cache(torch.tensor([4, 1, 1, 0, 2])), [4, 1, 1, 0, 2]),
        (lambda cache: cache.batch_select_indices(torch.tensor([3, 1])), [3, 1]),
        (lambda cache: cache.batch_select_indices(chosen), [1, 3]),
        (lambda cache: cache.batch_repeat_interleave(2), [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]),
        (lambda cache: [layer.offload() or layer.prefetch() for layer in cache.layers], [0, 1, 2, 3, 4]),
    ):
        _, cache = in_chunks(model, tokens[:, :T], [9, 4], mask[:, :T])
        move(cache)
        after = model(tokens[rows, T:], attention_mask=mask[rows], past_key_values=cache).logits
        torch.testing.assert_close(after, whole[rows], atol=tolerance(case), rtol=0)


@torch.no_grad()
@parts_first
def test_a_copy_of_a_cache_goes_its_own_way(case):
    """For several continuations of a prompt; a layer replaces what it holds. `reset` forgets everything."""
    model, tokens = make(case), text(2, T + 4)
    whole = model(tokens, use_cache=False).logits
    _, cache = in_chunks(model, tokens[:, :T], [T])
    twin = copy.copy(cache)
    twin.layers = [copy.copy(layer) for layer in cache.layers]
    model(text(2, 6, seed=8), past_key_values=cache)
    after = model(tokens[:, T:], past_key_values=twin).logits
    torch.testing.assert_close(after, whole[:, T:], atol=tolerance(case), rtol=0)
    theirs = [layer for layer in twin.layers if type(layer).__module__ == DynamicLayer.__module__]
    if theirs and "reset" not in vars(DynamicLayer):
        return  # older releases of transformers set keys and values to zero and keep their number
    twin.reset()
    assert twin.get_seq_length() == 0
    torch.testing.assert_close(in_chunks(model, tokens, [5, 12], cache=twin)[0], whole, atol=tolerance(case), rtol=0)


@torch.no_grad()
@parts_first
def test_a_cache_of_pairs_works_or_says_why_not(case):
    model, tokens = make(case), text(2)
    whole = model(tokens, use_cache=False).logits
    for cache in (DynamicCache(), DynamicCache(config=model.config)):
        try:
            parts, _ = in_chunks(model, tokens, [4, 1, 8], cache=cache)
        except ArgumentError as error:
            refused(error, "" if case == "mixer-lact" else "DynamicCache")
            assert not case.startswith("transformer"), "which takes transformers' own cache"
        else:
            torch.testing.assert_close(parts, whole, atol=tolerance(case), rtol=0)


@torch.no_grad()
@every_model
def test_a_cache_has_the_names_of_all_versions_of_transformers(name):
    """`cache` since transformers 5.24, `past_key_values` before: each works with any of them, in `generate` too."""
    model, tokens = make(name), text(2)
    expected = model(tokens, use_cache=False).logits[:, 6:]
    whole = model.generate(tokens, max_new_tokens=4, do_sample=False, use_cache=False)
    for given in CACHE_NAMES:
        cache = model.model.new_cache()
        model(tokens[:, :6], **{given: cache})
        twin = copy.deepcopy(cache)
        found = model(tokens[:, 6:], **{given: cache}).logits
        torch.testing.assert_close(found, expected, atol=tolerance(name), rtol=0)
        assert torch.equal(model.generate(tokens, **{given: twin}, max_new_tokens=4, do_sample=False), whole)
    both = {"cache": cache, "past_key_values": model.model.new_cache()}
    refuses("cache and past_key_values are two names of one argument", model, tokens[:, :1], **both)


@torch.no_grad()
@every_case
def test_hiding_tokens_equals_leaving_them_out(case):
    model, (tokens, mask) = make(case), padded()
    whole = model(tokens, attention_mask=mask).logits
    for row in (0, 1, 2, 4) if counts_padding(case) else range(5):
        real = mask[row].bool()
        alone = model(tokens[row, real][None]).logits[0]
        torch.testing.assert_close(whole[row, real], alone, atol=tolerance(case), rtol=0, msg=f"row {row}")


@every_case_with_embeddings
def test_hidden_content_never_matters_not_even_nan(case):
    model, (tokens, mask) = make(case), padded()
    real, embedded = mask.bool(), model.get_input_embeddings()(tokens).detach()
    found = {}
    for filling in (None, 0.0, torch.nan, torch.inf):
        given = embedded if filling is None else torch.where(real[..., None], embedded, filling)
        given = given.clone().requires_grad_()
        model.zero_grad()
        loss, logits = loss_of(model, tokens, inputs_embeds=given, attention_mask=mask)
        loss.backward()
        found[filling] = logits[real], given.grad, gradients(model)
    logits, inner, weights = found[None]
    assert (inner[~real] == 0).all()
    assert inner.isfinite().all()
    for filling in (0.0, torch.nan, torch.inf):
        assert torch.equal(found[filling][0], logits)
        torch.testing.assert_close(found[filling][1], inner, atol=tolerance(case) / 1000, rtol=0)
        same_by_path(found[filling][2], weights, tolerance(case) / 10)


@torch.no_grad()
@every_case_with_embeddings
def test_hidden_content_never_matters_in_a_cache(case):
    model, (tokens, mask) = make(case), padded()
    real = mask.bool()
    embedded = model.get_input_embeddings()(tokens)
    whole = model(inputs_embeds=embedded, attention_mask=mask, use_cache=False).logits
    parts, _ = in_chunks(model, torch.where(real[..., None], embedded, torch.nan), [1, 4, 3, 5], mask)
    torch.testing.assert_close(parts[real], whole[real], atol=tolerance(case), rtol=0)


@torch.no_grad()
@parts_first
def test_positions_are_relative_and_those_of_hidden_tokens_do_not_matter(case):
    """Some generation loops give hidden tokens the position 1."""
    model, (tokens, mask) = make(case), padded()
    places = (mask.cumsum(-1) - 1).masked_fill(mask == 0, 1)
    expected = model(tokens, attention_mask=mask).logits[mask.bool()]
    torch.testing.assert_close(model(tokens, attention_mask=mask, position_ids=places).logits[mask.bool()], expected)
    if case not in ABSOLUTE:
        later = model(tokens, attention_mask=mask, position_ids=places + 5).logits[mask.bool()]
        torch.testing.assert_close(later, expected, atol=1e-5, rtol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize(("ridge", "relative"), [("learned", True), ("learned-per-dimension", False)])
def test_positions_are_relative_unless_rotated_channels_have_ridges_of_their_own(ridge, relative):
    model, tokens, places = make("transformer-local-linear", ridges=ridge), text(), torch.arange(T)[None]
    logits, later = (model(tokens, position_ids=places + by).logits for by in (0, 5))
    assert ((later - logits).abs().max() < 1e-5) == relative


@plain_case
def test_the_gradient_of_a_batch_is_that_of_its_rows(case):
    model, (tokens, mask) = make(case), padded()
    loss_of(model, tokens, attention_mask=mask)[0].backward()
    together = gradients(model)
    model.zero_grad()
    total, count = 0.0, 0
    for row in range(len(tokens)):
        ids = tokens[row, mask[row].bool()]
        if len(ids) > 1:
            logits = model(ids[None]).logits[0]
            total, count = total + F.cross_entropy(logits[:-1], ids[1:], reduction="sum"), count + len(ids) - 1
    real = mask[3].bool()
    logits = model(tokens[3, real][None]).logits[0]
    for before, after in ((1, 3), (4, 7)):  # what is hidden has its neighbours neither predicted nor predicted from
        total = total - F.cross_entropy(logits[int(real[:before].sum())], tokens[3, after])
    (total / (count - 2)).backward()
    same_by_path(gradients(model), together, 1e-9)


@torch.no_grad()
@plain_case
def test_weights_and_hidden_states_are_shown(case):
    model, (tokens, mask) = make(case), padded()
    plain = model(tokens, attention_mask=mask, use_cache=False)
    shown = model(tokens, attention_mask=mask, use_cache=False, output_attentions=True, output_hidden_states=True)
    torch.testing.assert_close(shown.logits[mask.bool()], plain.logits[mask.bool()], atol=1e-10, rtol=0)
    layers, heads = SIZES["num_hidden_layers"], SIZES["num_attention_heads"]
    assert [x.shape for x in shown.hidden_states] == [(5, T, SIZES["hidden_size"])] * (layers + 1)
    base = model.base_model(tokens, attention_mask=mask)
    torch.testing.assert_close(shown.hidden_states[-1], base.last_hidden_state, atol=1e-10, rtol=0)
    assert [weights.shape for weights in shown.attentions] == [(5, heads, T, T)] * layers
    for weights in shown.attentions:
        assert weights.isfinite().all()
        assert weights.abs().amax() > 0.01
        assert (weights.triu(1) == 0).all()
        assert (weights[1, ..., :4] == 0).all()
        assert (weights[2, :, :8, 8:] == 0).all()
    cached = model(tokens, attention_mask=mask, use_cache=True, output_attentions=True)
    torch.testing.assert_close(cached.attentions, shown.attentions, atol=1e-10, rtol=0)


@torch.no_grad()
@every_model
def test_logits_to_keep_and_loss(name):
    model, (tokens, mask) = make(name), padded()
    whole = model(tokens, attention_mask=mask).logits
    close = lambda found, expected: torch.testing.assert_close(found, expected, atol=1e-12, rtol=0)  # noqa: E731
    close(model(tokens, attention_mask=mask, logits_to_keep=3).logits, whole[:, -3:])
    places = torch.tensor([0, 4, 5])
    close(model(tokens, attention_mask=mask, logits_to_keep=places).logits, whole[:, places])
    labels = tokens.clone()
    labels[0, 5:8] = -100
    predicted = mask[:, 1:].bool() & mask[:, :-1].bool() & (labels[:, 1:] != -100)
    expected = F.cross_entropy(whole[:, :-1][predicted], tokens[:, 1:][predicted])
    rounded = lambda found, expected: torch.testing.assert_close(found.double(), expected, atol=1e-6, rtol=0)  # noqa: E731
    rounded(model(tokens, attention_mask=mask, labels=labels).loss, expected)
    kept = predicted[:, -5:]
    expected = F.cross_entropy(whole[:, -6:-1][kept], tokens[:, -5:][kept])
    rounded(model(tokens, attention_mask=mask, labels=labels[:, -6:], logits_to_keep=6).loss, expected)
    given = {"labels": labels[:, :3], "logits_to_keep": places}
    refuses("logits_to_keep is a tensor of positions and labels are given", model, tokens, **given)


@torch.no_grad()
@parts_first
def test_the_output_matrix_reads_the_base_model(case):
    """Fused losses compute `lm_head(base_model(...).last_hidden_state)`, and have no place for a factor."""
    model, (tokens, mask) = make(case), padded()
    base = model.base_model(tokens, attention_mask=mask, output_hidden_states=True)
    assert torch.equal(model.get_output_embeddings()(base.last_hidden_state), model(tokens, attention_mask=mask).logits)
    assert torch.equal(base.hidden_states[-1], base.last_hidden_state)


@torch.no_grad()
@plain_case
def test_embeddings_in_the_place_of_tokens(case):
    model, (tokens, mask) = make(case), padded()
    embedded = model.get_input_embeddings()(tokens)
    expected = model(tokens, attention_mask=mask).logits
    assert torch.equal(model(inputs_embeds=embedded, attention_mask=mask).logits, expected)
    prompt = model.generate(inputs_embeds=embedded[:1, :5], max_new_tokens=5, do_sample=False)
    whole = model.generate(tokens[:1, :5], max_new_tokens=5, do_sample=False)
    assert torch.equal(prompt, whole[:, 5:])


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


@pytest.mark.parametrize("window", [4, ["none", 4]])
def test_a_model_with_windows_assists_another(window):
    model, tokens = make("transformer", num_hidden_layers=2), torch.cat([text(1, 6, seed=3)] * 3, 1)
    helper = moved(make("transformer", num_hidden_layers=2, window=window), seed=8, size=0.05)
    expected = model.generate(tokens, max_new_tokens=10, do_sample=False)
    assert torch.equal(model.generate(tokens, max_new_tokens=10, do_sample=False, assistant_model=helper), expected)


@pytest.mark.slow
@pytest.mark.parametrize("case", [*language_models.names(), *IN_ONE_GRAPH])
def test_a_compiled_model_writes_the_same_in_one_graph(case):
    model, tokens = make(case, dtype=torch.float32), text(2, 5)
    expected = model.generate(tokens, max_new_tokens=8, do_sample=False)
    torch._dynamo.reset()
    model.forward = torch.compile(model.forward, backend="eager", dynamic=True, fullgraph=True)
    assert torch.equal(model.generate(tokens, max_new_tokens=8, do_sample=False), expected)
