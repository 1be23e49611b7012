"""Every hook point of every registered model: who listens changes nothing, what is put in place of what passes is
used wherever the model runs, and nothing stays behind. Models without hook points have nothing to keep here.
"""

import pytest
import torch
from any_model import SIZES, in_chunks, make, text

from regard.checks import ArgumentError
from regard.inspect.hooks import hooked, named_hook_points
from regard.models import language_models

T = 9

NAMES = [name for name in language_models.names() if named_hook_points(make(name))]
every_model = pytest.mark.parametrize("name", NAMES)
every_mixer = pytest.mark.parametrize("mixers", ["softmax", "biweight", "local-linear[biweight]"])


def words(seed=0):
    return text(2, T, seed)


def close(found, expected, atol, point, rtol=0.0):
    torch.testing.assert_close(found, expected, atol=atol, rtol=rtol, msg=lambda words: f"{point}: {words}")


def flat(pattern, hook):
    """The same weight for all keys that have any: not what the model would do."""
    some = (pattern != 0).to(pattern.dtype)
    return some / some.sum(-1, keepdim=True).clamp(min=1)


def reweighted(x, hook):
    """Channels weighted differently: a norm that follows would take out a common factor."""
    return x * torch.linspace(0.5, 1.5, x.shape[-1], dtype=x.dtype) * 0.9


def test_some_models_have_points():
    assert {"transformer", "memory-mosaic", "iclm"} <= set(NAMES)


@torch.no_grad()
@every_model
@every_mixer
def test_listening_changes_nothing_and_leaves_nothing(name, mixers):
    model, tokens = make(name, mixers), words()
    before = model(tokens).logits
    for point in named_hook_points(model):
        heard = []
        with hooked(model, [(point, lambda x, hook, heard=heard: heard.append(x.shape))]):
            during = model(tokens).logits
            torch.testing.assert_close(in_chunks(model, tokens, [4, 1, 4])[0], before, atol=1e-10, rtol=0)
        torch.testing.assert_close(during, before, atol=1e-10, rtol=0)
        assert len(heard) == 4
    for point in named_hook_points(model).values():
        assert not point.active
        assert not point._forward_hooks
    assert torch.equal(model(tokens).logits, before)


@torch.no_grad()
@every_model
@every_mixer
def test_what_is_put_in_place_is_used_in_every_view(name, mixers):
    model, tokens = make(name, mixers), words()
    plain = model(tokens, use_cache=False).logits
    for point in named_hook_points(model):
        change = flat if point.endswith("pattern") else reweighted
        with hooked(model, [(point, change)]):
            whole = model(tokens, use_cache=False).logits
            prefill = model(tokens, use_cache=True).logits
            parts = in_chunks(model, tokens, [4, 1, 1, 3])[0]
        assert (whole - plain).abs().amax() > 1e-4, point
        close(prefill, whole, 1e-9, point)
        close(parts, whole, 1e-9, point)


@torch.no_grad()
@every_model
@every_mixer
def test_hooks_reveal_no_later_token_and_no_hidden_one(name, mixers):
    model, tokens = make(name, mixers), words()
    mask = torch.ones(2, T, dtype=torch.long)
    mask[0, :3], mask[1, 7:] = 0, 0
    real, embedded = mask.bool(), model.get_input_embeddings()(tokens)
    poisoned = torch.where(real[..., None], embedded, torch.nan)
    later = words(1)
    later[:, :5] = tokens[:, :5]
    for point in named_hook_points(model):
        with hooked(model, [(point, lambda x, hook: x.clone())]):
            whole = model(inputs_embeds=embedded, attention_mask=mask).logits
            again = model(inputs_embeds=poisoned, attention_mask=mask).logits
            assert torch.equal(model(later).logits[:, :5], model(tokens).logits[:, :5]), point
        close(again[real], whole[real], 1e-10, point)


@every_model
@pytest.mark.parametrize("checkpointing", [False, True])
def test_gradients_flow_through_what_is_put_in_place(name, checkpointing):
    model, tokens = make(name, num_hidden_layers=2).train(), words()
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    weigh = torch.randn(2, T, SIZES["vocab_size"], generator=torch.Generator().manual_seed(5)).double()
    for point in named_hook_points(model):
        factor, step = torch.tensor(0.9, dtype=torch.float64, requires_grad=True), 1e-6
        with hooked(model, [(point, lambda x, hook, factor=factor: factor * x)]):
            (model(tokens).logits * weigh).sum().backward()
        sides = []
        for value in (0.9 + step, 0.9 - step):
            with torch.no_grad(), hooked(model, [(point, lambda x, hook, value=value: value * x)]):
                sides.append((model(tokens).logits * weigh).sum())
        close(factor.grad, (sides[0] - sides[1]) / (2 * step), 1e-5, point, rtol=1e-5)


@every_model
@pytest.mark.parametrize("mixers", ["softmax", "shift-cosine"])
def test_generation_under_hooks_with_and_without_a_cache(name, mixers):
    """A cache of sums has no weights to show; a model takes pairs then, or says why it cannot."""
    model, tokens = make(name, mixers), text(2, 5)
    patterns = [point for point in named_hook_points(model) if point.endswith("pattern")]
    with hooked(model, [(point, flat) for point in patterns], required=False):
        fresh = model.generate(tokens, max_new_tokens=8, do_sample=False, use_cache=False)
        try:
            cached = model.generate(tokens, max_new_tokens=8, do_sample=False)
        except ArgumentError as error:
            assert mixers == "shift-cosine", error  # noqa: PT017
            return
    assert torch.equal(cached, fresh)


@torch.no_grad()
@every_model
def test_a_flat_pattern_is_a_plain_mean(name):
    """Two mixers whose weights are both put aside for the same ones cannot differ."""
    soft, sharp = make(name), make(name, "biweight")
    sharp.load_state_dict(soft.state_dict())
    tokens = words()

    def even(pattern, hook):
        rows, keys = pattern.shape[-2:]
        seen = torch.ones(rows, keys, dtype=pattern.dtype).tril(keys - rows)
        return (seen / seen.sum(-1, keepdim=True)).expand_as(pattern)

    found = []
    for model in (soft, sharp):
        points = [point for point in named_hook_points(model) if point.endswith("pattern")]
        with hooked(model, [(point, even) for point in points]):
            found.append(model(tokens).logits)
    torch.testing.assert_close(*found, atol=1e-12, rtol=0)
    assert (found[0] - soft(tokens).logits).abs().amax() > 1e-3
