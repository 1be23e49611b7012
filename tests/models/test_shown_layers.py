"""What a model shows of its layers: `attentions` with the gradients of the weights, layers without weights left out,
and a hidden state before every layer.
"""

import pytest
import torch
from any_model import SIZES, SMALL, T, central_difference, make, padded, text
from packed import documents, packed_rows, runs

from regard.models import token_mixers

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
        found = shown(model, tokens).attentions
        return sum((w * c).sum() for w, c in zip(found, counted, strict=True))

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
    alone = make("transformer", "gated-deltanet")
    assert shown(alone, tokens).attentions == ()
    made = mixed.generate(
        tokens[:, :4], max_new_tokens=3, do_sample=False, output_attentions=True, return_dict_in_generate=True
    )
    assert [len(step) for step in made.attentions] == [3, 3, 3]


@torch.no_grad()
@pytest.mark.parametrize("mixer", token_mixers.names())
def test_no_mixer_shows_nothing_in_the_place_of_a_tensor(mixer):
    out = shown(make("transformer", mixer), text(2))
    assert all(isinstance(x, torch.Tensor) for x in (*out.attentions, *out.hidden_states))


@torch.no_grad()
@pytest.mark.parametrize("fields", [{}, {"start": "bos"}, {"f_reads": "pre"}, {"f_attention_heads": 1}], ids=str)
def test_the_maps_of_iclm(fields):
    """Over tokens; with the start slot they are under the names of their hook points, `phi.0.attn.hook_pattern`."""
    from regard.inspect import run_with_cache

    model, (tokens, mask) = make("iclm", "biweight", **fields), padded()
    out = shown(model, tokens, attention_mask=mask)
    _, own = run_with_cache(model, tokens, lambda name: name.endswith("hook_pattern"), attention_mask=mask)
    covariates = [own[f"phi.{i}.attn.hook_pattern"] for i in range(len(model.model.phi))]
    functions = [own[f"f.{i}.attn.hook_pattern"] for i in range(2)]
    late = 0 if fields.get("start") == "bos" else 1
    pairs = functions[0].shape[-1]
    assert len(out.attentions) == len(covariates) + 2
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
    for weights in packed.attentions:
        assert (weights[apart.expand_as(weights)] == 0).all()
    for row, span in runs(ids):
        alone = shown(model, tokens[row, span][None])
        for whole, own in zip(packed.attentions, alone.attentions, strict=True):
            torch.testing.assert_close(whole[row, :, span, span], own[0], atol=1e-10, rtol=0)
        for whole, own in zip(packed.hidden_states, alone.hidden_states, strict=True):
            torch.testing.assert_close(whole[row, span], own[0], atol=1e-10, rtol=0)
