"""What every registered language model keeps, whatever it computes: causality, caches, padding, gradients, generation.

A model that is registered later is checked by these tests without another line. Weights are moved away from their
initial values, in float64, so that no part of a model is silent.
"""

from __future__ import annotations

import copy
import pickle
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from transformers import DynamicCache

from regard.checks import ArgumentError
from regard.models import language_models

NAMES = language_models.names()
MIXERS = ("softmax", "biweight", *(pytest.param(m, marks=pytest.mark.slow) for m in ("relumax", "shift-cosine")))
SIZES = {"vocab_size": 29, "hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 2, "pad_token_id": 0}
T = 13

every_model = pytest.mark.parametrize("name", NAMES)
every_mixer = pytest.mark.parametrize("mixers", MIXERS)


def moved(model, seed=3, size=0.2):
    """Numbers of heads are moved less: models may take exponentials of them."""
    noise = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            step = size if weight.dim() > 1 else size / 10
            weight += step * torch.randn(weight.shape, generator=noise, dtype=weight.dtype)
    return model


def make(name, mixers="softmax", dtype=torch.float64, **fields):
    entry = language_models.get(name)
    torch.manual_seed(0)
    return moved(entry.model(entry.config(**{**SIZES, "mixers": mixers, **fields})).to(dtype).eval())


def text(rows=1, length=T, seed=0):
    return torch.randint(1, SIZES["vocab_size"], (rows, length), generator=torch.Generator().manual_seed(seed))


def padded(seed=1):
    """(tokens, mask) [5, T]: full, padded on the left, on the right, in the middle, and down to one token."""
    tokens, mask = text(5, seed=seed), torch.ones(5, T, dtype=torch.long)
    mask[1, :4], mask[2, 8:], mask[3, [2, 5, 6]] = 0, 0, 0
    mask[4] = 0
    mask[4, 7] = 1
    return tokens, mask


def in_chunks(model, tokens, sizes, mask=None, cache=None):
    parts, seen = [], 0
    for chunk in tokens.split(sizes, dim=1):
        seen += chunk.shape[1]
        whole = None if mask is None else mask[:, :seen]
        out = model(chunk, attention_mask=whole, past_key_values=cache, use_cache=True)
        cache, parts = out.past_key_values, [*parts, out.logits]
    return torch.cat(parts, 1), cache


def loss_of(model, tokens, **kwargs):
    """The mean cross entropy of the visible pairs in float64 (a model's own loss is float32), and the logits."""
    logits, mask = (
        model(tokens if "inputs_embeds" not in kwargs else None, **kwargs).logits,
        kwargs.get("attention_mask"),
    )
    seen = torch.ones_like(tokens, dtype=torch.bool) if mask is None else mask.bool()
    pairs = seen[:, 1:] & seen[:, :-1]
    return F.cross_entropy(logits[:, :-1][pairs], tokens[:, 1:][pairs]), logits


def gradients(model):
    return {path: p.grad.clone() for path, p in model.named_parameters()}


def refused(error, word=""):
    """One line that names the thing refused."""
    assert word in str(error)
    assert "\n" not in str(error)


def same(found, expected, tolerance):
    for path in expected:
        torch.testing.assert_close(found[path], expected[path], atol=tolerance, rtol=tolerance,
                                   msg=lambda words, path=path: f"{path}: {words}")  # fmt: skip


# ---------------------------------------------------------------- causality


@torch.no_grad()
@every_model
@every_mixer
def test_later_tokens_change_no_bit_and_the_present_one_does(name, mixers):
    model, tokens = make(name, mixers), text(2)
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
@every_model
@every_mixer
def test_later_embeddings_that_are_not_numbers_change_no_bit(name, mixers):
    model = make(name, mixers)
    embedded = model.get_input_embeddings()(text(2)).clone()
    before = model(inputs_embeds=embedded).logits
    for poison in (torch.nan, torch.inf):
        embedded[:, 6:] = poison
        assert torch.equal(model(inputs_embeds=embedded).logits[:, :6], before[:, :6])


# ------------------------------------------------------------------- caches


@torch.no_grad()
@every_model
@every_mixer
def test_prefill_chunks_and_steps_agree(name, mixers):
    model, order = make(name, mixers), torch.Generator().manual_seed(2)
    for length in (1, 2, 3, 21):
        tokens = text(2, length, seed=length)
        whole = model(tokens, use_cache=False).logits
        for _ in range(3):
            cuts = sorted(set(torch.randint(1, length + 1, (4,), generator=order).tolist()) | {length})
            sizes = [b - a for a, b in pairwise([0, *cuts])]
            torch.testing.assert_close(in_chunks(model, tokens, sizes)[0], whole, atol=1e-9, rtol=0)
        torch.testing.assert_close(in_chunks(model, tokens, [1] * length)[0], whole, atol=1e-9, rtol=0)


@torch.no_grad()
@every_model
@every_mixer
def test_chunks_of_a_padded_batch(name, mixers):
    model, (tokens, mask) = make(name, mixers), padded()
    real = mask.bool()
    whole = model(tokens, attention_mask=mask, use_cache=False).logits
    for sizes in ([T], [1] * T, [3, 1, 5, 4], [8, 5], [2, 2, 9]):
        parts, cache = in_chunks(model, tokens, sizes, mask)
        torch.testing.assert_close(parts[real], whole[real], atol=1e-9, rtol=0)
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
@every_model
@every_mixer
def test_rows_of_a_cache_are_reordered_repeated_and_selected(name, mixers):
    model, (tokens, mask) = make(name, mixers), padded()
    tokens, mask = torch.cat([tokens, text(5, 3, seed=9)], 1), F.pad(mask, (0, 3), value=1)
    whole = model(tokens, attention_mask=mask, use_cache=False).logits[:, T:]
    for move, rows in (
        (lambda cache, rows: cache.reorder_cache(rows), [4, 1, 1, 0, 2]),
        (lambda cache, rows: cache.batch_select_indices(rows), [3, 1]),
        (lambda cache, rows: cache.batch_repeat_interleave(2), [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]),
    ):
        rows = torch.tensor(rows)
        _, cache = in_chunks(model, tokens[:, :T], [9, 4], mask[:, :T])
        move(cache, rows)
        after = model(tokens[rows, T:], attention_mask=mask[rows], past_key_values=cache).logits
        torch.testing.assert_close(after, whole[rows], atol=1e-9, rtol=0)


@torch.no_grad()
@every_model
@every_mixer
def test_a_copy_of_a_cache_goes_its_own_way(name, mixers):
    """As one prompt with several continuations needs it; `reset` forgets everything."""
    model, tokens = make(name, mixers), text(2, T + 4)
    whole = model(tokens, use_cache=False).logits
    _, cache = in_chunks(model, tokens[:, :T], [T])
    twin = copy.deepcopy(cache)
    model(text(2, 6, seed=8), past_key_values=cache)
    after = model(tokens[:, T:], past_key_values=twin).logits
    torch.testing.assert_close(after, whole[:, T:], atol=1e-9, rtol=0)
    twin.reset()
    assert twin.get_seq_length() == 0
    torch.testing.assert_close(in_chunks(model, tokens, [5, 12], cache=twin)[0], whole, atol=1e-9, rtol=0)


@torch.no_grad()
@every_model
@every_mixer
def test_a_cache_of_pairs_works_or_says_why_not(name, mixers):
    model, tokens = make(name, mixers), text(2)
    whole = model(tokens, use_cache=False).logits
    for cache in (DynamicCache(), DynamicCache(config=model.config)):
        try:
            parts, _ = in_chunks(model, tokens, [4, 1, 8], cache=cache)
        except ArgumentError as error:
            refused(error, "DynamicCache")
        else:
            torch.testing.assert_close(parts, whole, atol=1e-9, rtol=0)


# ------------------------------------------------------------------ padding


@torch.no_grad()
@every_model
@every_mixer
def test_hiding_tokens_equals_leaving_them_out(name, mixers):
    model, (tokens, mask) = make(name, mixers), padded()
    whole = model(tokens, attention_mask=mask).logits
    for row in range(len(tokens)):
        real = mask[row].bool()
        alone = model(tokens[row, real][None]).logits[0]
        torch.testing.assert_close(
            whole[row, real], alone, atol=1e-9, rtol=0, msg=lambda words, row=row: f"row {row}: {words}"
        )


@every_model
@every_mixer
def test_hidden_content_never_matters_not_even_nan(name, mixers):
    model, (tokens, mask) = make(name, mixers), padded()
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
        torch.testing.assert_close(found[filling][1], inner, atol=1e-12, rtol=0)
        same(found[filling][2], weights, 1e-10)


@torch.no_grad()
@every_model
@every_mixer
def test_hidden_content_never_matters_in_a_cache(name, mixers):
    model, (tokens, mask) = make(name, mixers), padded()
    real = mask.bool()
    embedded = model.get_input_embeddings()(tokens)
    whole = model(inputs_embeds=embedded, attention_mask=mask, use_cache=False).logits
    given, cache, parts, at = torch.where(real[..., None], embedded, torch.nan), None, [], 0
    for size in (1, 4, 3, 5):
        out = model(
            inputs_embeds=given[:, at : at + size],
            attention_mask=mask[:, : at + size],
            past_key_values=cache,
            use_cache=True,
        )
        cache, parts, at = out.past_key_values, [*parts, out.logits], at + size
    torch.testing.assert_close(torch.cat(parts, 1)[real], whole[real], atol=1e-9, rtol=0)


@every_model
@every_mixer
def test_the_gradient_of_a_batch_is_that_of_its_rows(name, mixers):
    model, (tokens, mask) = make(name, mixers), padded()
    loss_of(model, tokens, attention_mask=mask)[0].backward()
    together = gradients(model)
    model.zero_grad()
    total, count = 0.0, 0
    for row in range(len(tokens)):
        ids = tokens[row, mask[row].bool()]
        if len(ids) > 1:
            logits = model(ids[None]).logits[0]
            total, count = total + F.cross_entropy(logits[:-1], ids[1:], reduction="sum"), count + len(ids) - 1
    # what is hidden in the middle has its neighbours neither predicted nor predicted from
    gaps = [(3, 1, 3), (3, 4, 7)]
    for row, before, after in gaps:
        real = mask[row].bool()
        logits = model(tokens[row, real][None]).logits[0]
        total = total - F.cross_entropy(
            logits[int(real[:before].sum())][None], tokens[row, after][None], reduction="sum"
        )
        count -= 1
    (total / count).backward()
    same(gradients(model), together, 1e-9)


# ------------------------------------------------------- gradients, training


@every_model
@every_mixer
def test_every_parameter_has_its_derivative(name, mixers):
    """Along a random direction of each parameter, against a central difference; DDP needs a gradient for each."""
    model, tokens = make(name, mixers), text(2, 9)
    loss_of(model, tokens)[0].backward()
    draw, step = torch.Generator().manual_seed(7), 1e-6
    for path, p in model.named_parameters():
        assert p.grad is not None, path
        along = torch.randn(p.shape, generator=draw, dtype=p.dtype)
        with torch.no_grad():
            sides = []
            for sign in (1, -1):
                p += sign * step * along
                sides.append(loss_of(model, tokens)[0])
                p -= sign * step * along
        expected = (sides[0] - sides[1]) / (2 * step)
        torch.testing.assert_close(
            (p.grad * along).sum(), expected, atol=1e-8, rtol=1e-5, msg=lambda w, path=path: f"{path}: {w}"
        )


@every_model
def test_gradient_checkpointing_changes_nothing(name):
    model, (tokens, mask) = make(name, "biweight").train(), padded()
    model(tokens, attention_mask=mask, labels=tokens).loss.backward()
    expected = gradients(model)
    for reentrant in (False, True):
        model.zero_grad()
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model(tokens, attention_mask=mask, labels=tokens).loss.backward()
        same(gradients(model), expected, 1e-12)
        with pytest.raises(ArgumentError, match="gradient checkpointing"):
            model(tokens, use_cache=True)


def compiled_and_eager(name, mixers, **how):
    model, (tokens, mask) = make(name, mixers, num_hidden_layers=2).train(), padded()
    loss, expected = loss_of(model, tokens, attention_mask=mask)
    loss.backward()
    eager = gradients(model)
    model.zero_grad()
    torch._dynamo.reset()
    loss, found = loss_of(torch.compile(model, fullgraph=True, **how), tokens, attention_mask=mask)
    loss.backward()
    torch.testing.assert_close(found[mask.bool()], expected[mask.bool()], atol=1e-9, rtol=0)
    same(gradients(model), eager, 1e-8)


@every_model
@pytest.mark.parametrize("mixers", ["softmax", pytest.param("biweight", marks=pytest.mark.slow)])
def test_one_graph_without_breaks(name, mixers):
    compiled_and_eager(name, mixers, backend="aot_eager")


@pytest.mark.slow
@every_model
@pytest.mark.parametrize("mixers", ["softmax", "biweight", "relumax", "shift-cosine"])
def test_compiled_to_machine_code(name, mixers):
    compiled_and_eager(name, mixers)


@every_model
@every_mixer
def test_weights_and_inputs_of_zero_are_finite(name, mixers):
    model, (tokens, mask) = make(name, mixers), padded()
    embedded = torch.zeros(5, T, SIZES["hidden_size"], dtype=torch.float64, requires_grad=True)
    model(inputs_embeds=embedded, attention_mask=mask, labels=tokens).loss.backward()
    assert all(g.isfinite().all() for g in [embedded.grad, *gradients(model).values()])
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    model.zero_grad()
    out = model(tokens, attention_mask=mask, labels=tokens)
    out.loss.backward()
    assert (out.logits == 0).all()
    assert all(g.isfinite().all() for g in gradients(model).values())


@torch.no_grad()
@every_model
@every_mixer
def test_bfloat16_is_near_float32(name, mixers):
    tokens = text(2, 40)
    wide = make(name, mixers, torch.float32)
    narrow = copy.deepcopy(wide).to(torch.bfloat16)
    wide.load_state_dict(narrow.state_dict())  # the same rounded weights
    expected, found = wide(tokens).logits, narrow(tokens).logits
    assert found.dtype == torch.bfloat16
    assert found.isfinite().all()
    assert (found.float() - expected).square().mean().sqrt() < 0.05 * expected.square().mean().sqrt()
    stepwise, _ = in_chunks(narrow, tokens, [1] * 40)
    assert (stepwise.float() - expected).square().mean().sqrt() < 0.05 * expected.square().mean().sqrt()


@every_model
def test_a_pass_changes_nothing_in_the_model(name):
    model, tokens = make(name), text(2)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    for training in (True, False):
        model.train(training)
        first, second = model(tokens).logits, model(tokens).logits
        assert torch.equal(first, second)
        assert (model(tokens).past_key_values is None) is training
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


# --------------------------------------------------------- what is given back


@torch.no_grad()
@every_model
@every_mixer
def test_weights_and_hidden_states_are_shown(name, mixers):
    model, (tokens, mask) = make(name, mixers), padded()
    plain = model(tokens, attention_mask=mask, use_cache=False)
    shown = model(tokens, attention_mask=mask, use_cache=False, output_attentions=True, output_hidden_states=True)
    torch.testing.assert_close(shown.logits[mask.bool()], plain.logits[mask.bool()], atol=1e-10, rtol=0)
    assert len(shown.attentions) > 0
    assert all(state.shape[:2] == tokens.shape for state in shown.hidden_states)
    for weights in shown.attentions:
        assert weights.shape[0] == 5
        assert weights.isfinite().all()
        assert weights.abs().amax() > 0.01
        if weights.shape[-1] == T:
            assert (weights[1, ..., :4] == 0).all()
            assert (weights[2, :, :8, 8:] == 0).all()
    cached = model(tokens, attention_mask=mask, use_cache=True, output_attentions=True)
    for a, b in zip(cached.attentions, shown.attentions, strict=True):
        torch.testing.assert_close(a, b, atol=1e-10, rtol=0)


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
    found = model(tokens, attention_mask=mask, labels=labels[:, -6:], logits_to_keep=6).loss
    rounded(found, expected)
    with pytest.raises(ArgumentError, match="logits_to_keep is a tensor of positions and labels are given"):
        model(tokens, attention_mask=mask, labels=labels[:, :3], logits_to_keep=places)


@torch.no_grad()
@every_model
@every_mixer
def test_embeddings_in_the_place_of_tokens(name, mixers):
    model, (tokens, mask) = make(name, mixers), padded()
    embedded = model.get_input_embeddings()(tokens)
    assert torch.equal(
        model(inputs_embeds=embedded, attention_mask=mask).logits, model(tokens, attention_mask=mask).logits
    )
    prompt = model.generate(inputs_embeds=embedded[:1, :5], max_new_tokens=5, do_sample=False)
    whole = model.generate(tokens[:1, :5], max_new_tokens=5, do_sample=False)
    assert torch.equal(prompt, whole[:, 5:])


# --------------------------------------------------------------- generation


def prompts():
    tokens, mask = text(3, 7, seed=4), torch.ones(3, 7, dtype=torch.long)
    mask[1, :3], mask[2, :6] = 0, 0
    return tokens * mask, mask


@every_model
@pytest.mark.parametrize("mixers", ["softmax", "biweight", "shift-cosine"])
@pytest.mark.parametrize(
    "how",
    [
        {"do_sample": False},
        {"do_sample": True, "top_k": 5, "temperature": 0.8},
        {"num_beams": 3, "do_sample": False},
        {"num_beams": 3, "num_return_sequences": 2, "do_sample": True},
    ],
)
def test_generated_with_and_without_a_cache(name, mixers, how):
    model, (tokens, mask) = make(name, mixers), prompts()
    found = []
    for cached in (True, False):
        torch.manual_seed(11)
        found.append(model.generate(tokens, attention_mask=mask, max_new_tokens=12, use_cache=cached, **how))
    assert torch.equal(*found)
    assert found[0].shape[1] == 19


@every_model
@pytest.mark.parametrize("mixers", ["softmax", "shift-cosine"])
def test_generated_batch_equals_its_rows(name, mixers):
    model, (tokens, mask) = make(name, mixers), prompts()
    together = model.generate(tokens, attention_mask=mask, max_new_tokens=12, do_sample=False)
    for row in range(3):
        alone = model.generate(tokens[row, mask[row].bool()][None], max_new_tokens=12, do_sample=False)
        assert torch.equal(together[row, 7:], alone[0, -12:])


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
    else:
        assert torch.equal(found, expected)


@every_model
@pytest.mark.parametrize("mixers", ["softmax", "shift-cosine"])
def test_a_cache_given_to_generate(name, mixers):
    model, tokens = make(name, mixers), text(2, 9)
    expected = model.generate(tokens, max_new_tokens=6, do_sample=False)
    _, cache = in_chunks(model, tokens[:, :5], [5])
    assert torch.equal(model.generate(tokens, past_key_values=cache, max_new_tokens=6, do_sample=False), expected)
    try:
        found = model.generate(tokens, past_key_values=DynamicCache(), max_new_tokens=6, do_sample=False)
    except ArgumentError as error:
        refused(error, "DynamicCache")
    else:
        assert torch.equal(found, expected)


# ---------------------------------------------------------- configurations


@every_model
def test_configurations_are_copied_and_written(name, tmp_path):
    config = language_models.get(name).config(**{**SIZES, "mixers": "biweight", "vocab_size": 31})
    kind = type(config)
    expected = config.to_dict()
    config.save_pretrained(tmp_path)
    for again in (
        copy.deepcopy(config),
        pickle.loads(pickle.dumps(config)),
        kind.from_dict(config.to_dict()),
        kind.from_dict(config.to_diff_dict()),
        kind.from_pretrained(tmp_path),
    ):
        assert type(again) is kind
        found = again.to_dict()
        for told in (found, expected):
            told.pop("_name_or_path", None)
        assert found == expected
        again.normalise()
        assert {key: again.to_dict()[key] for key in expected} == expected, "normalise is not idempotent"
    assert kind.from_pretrained(tmp_path, mixers="relumax").layer_specs()[0] != config.layer_specs()[0]


@every_model
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "either input_ids or inputs_embeds"),
        ({"input_ids": torch.tensor([[1, 29]])}, "expected integers from 0 to 28"),
        ({"input_ids": torch.tensor([1, 2])}, r"expected \[B, T\]"),
        ({"input_ids": torch.ones(1, 0, dtype=torch.long)}, "T >= 1"),
        ({"input_ids": torch.ones(1, 2)}, "expected torch.int64"),
        ({"input_ids": text(), "attention_mask": torch.ones(1, 3, dtype=torch.long)}, "attention_mask has shape"),
        ({"input_ids": text(), "attention_mask": torch.ones(1, T)}, "attention_mask is torch.float32"),
        ({"input_ids": text(), "position_ids": torch.zeros(3, T, dtype=torch.long)}, "position_ids has shape"),
        ({"input_ids": text(), "past_key_values": [1]}, "past_key_values is a list"),
        ({"input_ids": text(), "labels": text(1, 4)}, "labels has shape"),
        ({"inputs_embeds": torch.ones(1, 4, 3, dtype=torch.float64)}, "inputs_embeds has shape"),
    ],
)
def test_one_clear_line_for_bad_input(name, arguments, message):
    model = make(name)
    with pytest.raises(ArgumentError, match=message) as caught:
        model(**arguments)
    assert "\n" not in str(caught.value)
    assert type(model).__name__ in str(caught.value)
