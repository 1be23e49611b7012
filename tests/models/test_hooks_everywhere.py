"""What a model shows of its layers: hook points, attention weights and hidden states. A hook that listens changes
nothing, its replacement is used wherever the model runs, and nothing stays behind."""

import pytest
import torch
from any_model import SIZES, SMALL, T, central_difference, in_chunks, make, padded, text
from packed import documents, packed_rows, runs

from regard.checks import ArgumentError
from regard.inspect.hooks import hooked, named_hook_points, run_with_cache
from regard.models import language_models, token_mixers

TOKENS = 9
NAMES = [name for name in language_models.names() if named_hook_points(make(name))]
every_model = pytest.mark.parametrize("name", NAMES)
every_mixer = pytest.mark.parametrize("mixers", ["softmax", "biweight", "local-linear[biweight]"])


def words(seed=0):
    return text(2, TOKENS, seed)


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
        with hooked(model, [(point, (flat if point.endswith("pattern") else reweighted))]):
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
    mask = torch.ones(2, TOKENS, dtype=torch.long)
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
    weigh = torch.randn(2, TOKENS, SIZES["vocab_size"], generator=torch.Generator().manual_seed(5)).double()
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


MIXED = ["gated-deltanet", "softmax", "lact", "biweight"]
WEIGHED = [
    *[("transformer", m) for m in ("softmax", "biweight", "topk-softmax", "elu", "local-linear[biweight]", "lact")],
    ("transformer", "gaussian*linear(solver=learned)"),
    ("transformer", ["relumax", "softmax", "lact", "biweight"]),
    *[("memory-mosaic", m) for m in ("softmax", "biweight", "relu", "local-linear[biweight]")],
    *[("iclm", m) for m in ("softmax", "biweight", "local-linear[biweight]")],
]


def shown(model, tokens, **kwargs):
    return model(tokens, output_attentions=True, output_hidden_states=True, use_cache=False, **kwargs)


@pytest.mark.parametrize(("name", "mixers"), WEIGHED, ids=str)
def test_attentions_carry_the_gradient_of_the_weights(name, mixers):
    model, tokens = make(name, mixers), text(2, 7)
    draw = torch.Generator().manual_seed(5)
    parameters = list(model.parameters())
    along = [torch.randn(p.shape, generator=draw, dtype=p.dtype) for p in parameters]
    counted = [torch.randn(w.shape, generator=draw, dtype=w.dtype) for w in shown(model, tokens).attentions]

    def total():
        return sum((w * c).sum() for w, c in zip(shown(model, tokens).attentions, counted, strict=True))

    for i in range(len(counted)):
        assert shown(model, tokens).attentions[i].requires_grad
    slopes = torch.autograd.grad(total(), parameters, allow_unused=True)
    slope = sum((s * a).sum() for s, a in zip(slopes, along, strict=True) if s is not None)
    torch.testing.assert_close(slope, central_difference(total, parameters, along), atol=1e-6, rtol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("mixers", ["softmax", "biweight", "relumax", "shift-cosine", "local-linear[biweight]"])
def test_the_weights_of_a_window_sum_to_one_inside_it(mixers):
    (tokens, mask), model = padded(), make("transformer", mixers, window=6)
    i, j = torch.arange(T)[:, None], torch.arange(T)
    allowed = ((j <= i) & (j > i - 6)) & mask.bool()[:, None, None, :]
    for weights in shown(model, tokens, attention_mask=mask).attentions:
        assert (weights[~allowed.expand_as(weights)] == 0).all()
        totals = allowed.any(-1).double().expand(5, 2, T)  # a row without a key has no weight
        torch.testing.assert_close(weights.sum(-1), totals, atol=1e-9, rtol=0)
        assert (weights.min() < -1e-3) == mixers.startswith("local-linear")
    assert model(tokens).attentions is None
    assert isinstance(model(tokens, return_dict=False), tuple)


@torch.no_grad()
def test_layers_without_weights_are_left_out():
    """As transformers does in hybrid models, such as Qwen3-Next."""
    tokens, mixed = text(2), make("transformer", MIXED)
    out = shown(mixed, tokens)
    assert [w.shape for w in out.attentions] == [(2, 2, T, T)] * 3
    assert all(x.shape == (2, T, SIZES["hidden_size"]) for x in out.hidden_states)
    assert len(out.hidden_states) == 5
    assert shown(make("transformer", "gated-deltanet"), tokens).attentions == ()
    how = {"do_sample": False, "output_attentions": True, "return_dict_in_generate": True}
    assert [len(step) for step in mixed.generate(tokens[:, :4], max_new_tokens=3, **how).attentions] == [3, 3, 3]


@torch.no_grad()
@pytest.mark.parametrize("mixer", token_mixers.names())
def test_no_mixer_shows_nothing_in_the_place_of_a_tensor(mixer):
    out = shown(make("transformer", mixer), text(2))
    assert all(isinstance(x, torch.Tensor) for x in (*out.attentions, *out.hidden_states))


@torch.no_grad()
@pytest.mark.parametrize("fields", [{}, {"start": "bos"}, {"f_reads": "pre"}, {"f_attention_heads": 1}], ids=str)
def test_the_maps_of_iclm(fields):
    """Over tokens; with the start slot they are under the names of their hook points, `phi.0.attn.hook_pattern`."""
    model, (tokens, mask) = make("iclm", "biweight", **fields), padded()
    out = shown(model, tokens, attention_mask=mask)
    _, own = run_with_cache(model, tokens, lambda name: name.endswith("hook_pattern"), attention_mask=mask)
    covariates = [own[f"phi.{i}.attn.hook_pattern"] for i in range(len(model.model.phi))]
    functions = [own[f"f.{i}.attn.hook_pattern"] for i in range(2)]
    late = 0 if fields.get("start") == "bos" else 1
    pairs = functions[0].shape[-1]
    assert len(out.hidden_states) == SIZES["num_hidden_layers"] + 1
    assert all(w.shape[-2:] == (T, T) for w in out.attentions)
    for found, whole in zip(out.attentions, covariates + functions, strict=True):
        if whole.shape[-1] == T + late:  # covariates, with the start slot
            torch.testing.assert_close(found, whole[..., late:, late:], atol=1e-10, rtol=0)
        else:  # a token has the weight of the pair that it completed; without a start slot the first completes none
            torch.testing.assert_close(found[..., T - pairs :, T - pairs :], whole[..., -pairs:, :], atol=1e-10, rtol=0)
            assert not found[..., : T - pairs].any()


PACKED = {
    "transformer": ("biweight", "softmax", "elu", "local-linear", "lact"),
    "memory-mosaic": ("biweight",),
    "iclm": ("biweight", "softmax", "linear", "local-linear"),
}


@torch.no_grad()
@pytest.mark.parametrize(("name", "mixers"), [(name, mixers) for name in PACKED for mixers in PACKED[name]])
def test_the_maps_of_packed_documents_are_those_of_the_documents(name, mixers):
    options = {"mixer_options": {"lact": SMALL["lact"]}} if mixers == "lact" else {}
    model, rows = make(name, mixers, **options), documents()
    tokens, ids = packed_rows(rows)
    packed = shown(model, tokens, segment_ids=ids)
    torch.testing.assert_close(packed.logits, model(tokens, segment_ids=ids).logits, atol=1e-5, rtol=1e-5)
    apart = ids[:, None, :, None] != ids[:, None, None, :]
    assert all((weights[apart.expand_as(weights)] == 0).all() for weights in packed.attentions)
    for row, span in runs(ids):
        alone = shown(model, tokens[row, span][None])
        for whole, own in zip(packed.attentions, alone.attentions, strict=True):
            torch.testing.assert_close(whole[row, :, span, span], own[0], atol=1e-10, rtol=0)
        for whole, own in zip(packed.hidden_states, alone.hidden_states, strict=True):
            torch.testing.assert_close(whole[row, span], own[0], atol=1e-10, rtol=0)
