"""Stock models of transformers with regard's attention: against torch's, against the entmax package, and against
themselves by another way (cache, padding, chunks, compiled, checkpointed)."""

from __future__ import annotations

import copy
from typing import Any

import entmax
import pytest
import torch
from tiny_models import ALL, CAUSAL, left_padding, positions, right_padding, step_logits, tiny, tokens
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel, StaticCache

import regard
from regard.integrations.transformers import convert, register

NAMES = register()


# Against torch's own attention ------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ALL)
@pytest.mark.parametrize("padding", ["none", "left", "right"])
def test_softmax_gives_the_logits_of_sdpa(family: str, padding: str) -> None:
    mask = {"none": None, "left": left_padding(), "right": right_padding()}[padding]
    ours, theirs = tiny(family, "regard_softmax"), tiny(family, "sdpa")
    assert ours.config._attn_implementation == "regard_softmax"
    assert theirs.config._attn_implementation == "sdpa"
    real = torch.ones(2, 12, dtype=torch.bool) if mask is None else mask.bool()
    got = ours(tokens(), attention_mask=mask).logits[real]
    want = theirs(tokens(), attention_mask=mask).logits[real]
    assert (got - want).abs().max() < 1e-5
    assert want.abs().max() > 0.1


@pytest.mark.parametrize("family", ALL)
def test_a_converted_model_keeps_its_weights_and_logits(family: str) -> None:
    model = tiny(family, "sdpa")
    before = model(tokens()).logits
    weights = copy.deepcopy(model.state_dict())
    assert convert(model, "softmax") is model
    assert model.config._attn_implementation == "regard_softmax"
    assert (model(tokens()).logits - before).abs().max() < 1e-5
    convert(model, "biweight")
    assert (model(tokens()).logits - before).abs().max() > 1e-3
    assert all(torch.equal(a, weights[n]) for n, a in model.state_dict().items())
    model.set_attn_implementation("sdpa")
    assert torch.equal(model(tokens()).logits, before)


# Against other programs' weights in the model's own eager attention ------------------------------------------


def relumax(z: Tensor) -> Tensor:
    w = (z - z.amax(-1, keepdim=True) + 1).clamp(min=0)
    return w / w.sum(-1, keepdim=True)


ORACLES = {
    "biweight": lambda z: entmax.entmax15(z, dim=-1),
    "sparsemax": lambda z: entmax.sparsemax(z, dim=-1),
    "triweight": lambda z: entmax.entmax_bisect(z, alpha=4 / 3, dim=-1, n_iter=60),
    "relumax": relumax,
}


def eager_with(monkeypatch: pytest.MonkeyPatch, weights: Any) -> None:
    """`weights` in place of softmax in transformers' eager attention; rows without a key are zero."""

    def normalise(scores: Tensor, dim: int = -1, dtype: Any = None) -> Tensor:
        hidden = scores < -1e30
        empty = hidden.all(-1, keepdim=True)
        top = torch.where(hidden, -torch.inf, scores).amax(-1, keepdim=True)
        z = torch.where(hidden, torch.where(empty, 0, top) - 50, scores)
        return torch.where(empty, 0, weights(z))

    monkeypatch.setattr(torch.nn.functional, "softmax", normalise)


@pytest.mark.parametrize(
    ("family", "preset"), [*((f, "biweight") for f in ALL), *(("llama", p) for p in ORACLES if p != "biweight")]
)
def test_logits_and_gradients_of_compact_kernels(family: str, preset: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mask = left_padding()
    ours, theirs = tiny(family, f"regard_{preset}").double(), tiny(family, "eager").double()
    loss = lambda logits: (logits * mask[..., None]).square().mean()  # noqa: E731
    got = ours(tokens(), attention_mask=mask).logits
    loss(got).backward()
    eager_with(monkeypatch, ORACLES[preset])
    want = theirs(tokens(), attention_mask=mask).logits
    loss(want).backward()
    assert (got - want)[mask.bool()].abs().max() < 1e-7  # rotary angles are float32 in either
    for (name, a), b in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        if b.grad is not None:
            assert torch.allclose(a.grad, b.grad, rtol=1e-5, atol=1e-8), name
    # the weights do differ from softmax's
    monkeypatch.undo()
    assert (tiny(family, "sdpa").double()(tokens(), attention_mask=mask).logits - got)[mask.bool()].abs().max() > 1e-3


# Gradients ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ALL)
def test_every_parameter_gets_a_finite_gradient(family: str) -> None:
    model = tiny(family, "regard_biweight").train()  # with the attention dropout that GPT-2 and BERT have by default
    mask = left_padding()
    labels = tokens().masked_fill(mask == 0, -100)
    model(tokens(), attention_mask=mask, labels=labels).loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
    assert sum(float(p.grad.abs().sum()) > 0 for p in model.parameters()) > 20


@pytest.mark.parametrize("family", ALL)
def test_gradient_checkpointing_changes_nothing(family: str) -> None:
    grads = []
    for checkpoint in (False, True):
        model = tiny(family, "regard_biweight").train()
        if checkpoint:
            model.gradient_checkpointing_enable()
            assert model.is_gradient_checkpointing
        torch.manual_seed(3)  # the same dropout, kept by the recomputation
        model(tokens(), attention_mask=right_padding(), labels=tokens()).loss.backward()
        grads.append([p.grad for p in model.parameters()])
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(*grads, strict=True))


def test_dropout_acts_in_training_alone() -> None:
    model = tiny("gpt2", "regard_biweight", resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.5)
    still = model(tokens()).logits
    assert torch.equal(model(tokens()).logits, still)
    model.train()
    torch.manual_seed(0)
    first, second = model(tokens()).logits, model(tokens()).logits
    assert (first - second).abs().max() > 1e-3
    without = tiny("gpt2", "regard_biweight", resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0).train()
    assert torch.equal(without(tokens()).logits, still)


# Every preset --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("preset", list(regard.presets()))
def test_every_preset_runs_forward_backward_and_with_a_cache(preset: str) -> None:
    model = tiny("llama", f"regard_{preset}", initializer_range=0.1)
    ids = tokens(length=8)
    out = model(ids, labels=ids)
    assert out.logits.shape == (2, 8, 61)
    out.loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
    changed = ids.clone()
    changed[:, -1] = (changed[:, -1] + 1) % 59 + 1
    assert (model(changed).logits - out.logits)[:, :-1].abs().max() < 1e-5  # nobody sees the future
    sequences, logits = step_logits(model, ids)
    again, slow = step_logits(model, ids, use_cache=False)
    assert torch.equal(sequences, again)
    assert logits.isfinite().all()
    assert (logits - slow).abs().max() < 1e-5


@pytest.mark.parametrize("preset", ["softmax", "biweight", "topk-uniform", "rbf", "relu", "local-linear"])
def test_presets_in_a_bidirectional_model(preset: str) -> None:
    model = tiny("bert", f"regard_{preset}").double()
    mask = right_padding()
    logits = model(tokens(), attention_mask=mask).logits
    assert (logits[1, :9] - model(tokens()[1:, :9]).logits[0]).abs().max() < 1e-9
    changed = tokens()
    changed[0, -1] = changed[0, -1] % 59 + 1
    assert (model(changed, attention_mask=mask).logits - logits)[0, 0].abs().max() > 1e-6  # the first sees the last


# Caches --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", CAUSAL)
@pytest.mark.parametrize("more", [{}, {"cache_implementation": "static"}, {"num_beams": 3}])
@pytest.mark.parametrize("padded", [False, True])
def test_generate_with_a_cache_and_without(family: str, more: dict[str, Any], padded: bool) -> None:
    model = tiny(family, "regard_biweight")
    mask = left_padding() if padded else torch.ones(2, 12, dtype=torch.long)
    sequences, logits = step_logits(model, tokens(), attention_mask=mask, **more)
    slow = {k: v for k, v in more.items() if k == "num_beams"}
    again, want = step_logits(model, tokens(), attention_mask=mask, use_cache=False, **slow)
    assert torch.equal(sequences, again)
    assert (logits - want).abs().max() < 1e-5 * max(1.0, want.abs().max().item())


@pytest.mark.parametrize("family", CAUSAL)
def test_generate_from_a_padded_batch_is_generate_from_each_alone(family: str) -> None:
    model = tiny(family, "regard_biweight")
    both, logits = step_logits(model, tokens(), attention_mask=left_padding())
    for row, first in ((0, 4), (1, 0)):
        alone, want = step_logits(model, tokens()[row : row + 1, first:])
        assert torch.equal(both[row, 12:], alone[0, 12 - first :])
        assert (logits[row] - want[0]).abs().max() < 2e-5


@pytest.mark.parametrize("family", CAUSAL)
@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_a_prompt_in_pieces(family: str, kind: str) -> None:
    model = tiny(family, "regard_biweight")
    whole = model(tokens()).logits
    cache = (
        DynamicCache(config=model.config) if kind == "dynamic" else StaticCache(config=model.config, max_cache_len=20)
    )
    done = []
    for first, last in ((0, 5), (5, 6), (6, 11), (11, 12)):
        part = model(
            tokens()[:, first:last], past_key_values=cache, position_ids=torch.arange(first, last)[None], use_cache=True
        )
        done.append(part.logits)
    assert (torch.cat(done, 1) - whole).abs().max() < 1e-5 * max(1.0, whole.abs().max().item())


# Padding -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ALL)
@pytest.mark.parametrize("name", ["regard_biweight", "regard_local-linear"])
def test_a_padded_batch_is_each_sequence_alone(family: str, name: str) -> None:
    model = tiny(family, name).double()
    for mask in (left_padding(), right_padding()):
        together = model(tokens(), attention_mask=mask, position_ids=positions(mask)).logits
        assert together.isfinite().all()  # rows of padding see nothing: zeros, never NaN
        for row in range(2):
            real = mask[row].bool()
            alone = model(tokens()[row : row + 1, real]).logits[0]
            assert (together[row, real] - alone).abs().max() < 1e-8


@pytest.mark.parametrize("family", ["llama", "bert"])
def test_what_stands_in_the_padding_never_matters(family: str) -> None:
    model = tiny(family, "regard_biweight")
    mask = left_padding()
    embedded = model.get_input_embeddings()(tokens()).detach()
    clean = model(inputs_embeds=embedded, attention_mask=mask).logits
    embedded[0, :4] = torch.nan
    dirty = model(inputs_embeds=embedded, attention_mask=mask).logits
    assert (dirty - clean)[mask.bool()].abs().max() == 0


@pytest.mark.parametrize("family", ["llama", "qwen3-sliding"])
def test_packed_sequences_do_not_meet(family: str) -> None:
    model = tiny(family, "regard_biweight")
    ids = tokens(batch=1)
    packed = model(ids, position_ids=torch.tensor([[*range(7), *range(5)]]), use_cache=False).logits
    assert (packed[:, :7] - model(ids[:, :7]).logits).abs().max() < 1e-5
    assert (packed[:, 7:] - model(ids[:, 7:]).logits).abs().max() < 1e-5


# Weights -------------------------------------------------------------------------------------------------------


def watch(family: str, model: PreTrainedModel) -> dict[str, Tensor]:
    """What layer 0 takes for values [B, Hkv, T, D] and gives as output [B, T, H D], filled by the next pass."""
    found: dict[str, Tensor] = {}
    put = lambda name, x: found.__setitem__(name, x.detach())  # noqa: E731
    split = lambda x: x.unflatten(-1, (-1, 8)).transpose(1, 2)  # noqa: E731
    if family == "gpt2":
        layer = model.transformer.h[0].attn
        layer.c_attn.register_forward_hook(lambda m, a, o: put("value", split(o[..., 64:])))
        layer.c_proj.register_forward_pre_hook(lambda m, a: put("output", a[0]))
    elif family == "bert":
        layer = model.bert.encoder.layer[0].attention.self
        layer.value.register_forward_hook(lambda m, a, o: put("value", split(o)))
        layer.register_forward_hook(lambda m, a, o: put("output", o[0]))
    else:
        layer = model.model.layers[0].self_attn
        layer.v_proj.register_forward_hook(lambda m, a, o: put("value", split(o)))
        layer.o_proj.register_forward_pre_hook(lambda m, a: put("output", a[0]))
    return found


@pytest.mark.parametrize("family", ALL)
@pytest.mark.parametrize("name", ["regard_softmax", "regard_biweight", "regard_local-linear"])
def test_output_attentions_are_the_weights_of_the_output(family: str, name: str) -> None:
    model = tiny(family, name).double()
    mask = left_padding()
    plain = model(tokens(), attention_mask=mask)
    found = watch(family, model)
    asked = model(tokens(), attention_mask=mask, output_attentions=True)
    assert plain.get("attentions") is None
    assert len(asked.attentions) == 2
    assert (asked.logits - plain.logits).abs().max() < 1e-9
    weights = asked.attentions[0]
    assert weights.shape == (2, 4, 12, 12)
    sums = weights.sum(-1)
    seeing = (mask.bool() | torch.tensor(family == "bert"))[:, None].expand(2, 4, 12)
    assert (sums[seeing] - 1).abs().max() < 1e-9
    assert (sums[~seeing] == 0).all()
    assert (weights[0, :, :, :4] == 0).all()
    if family != "bert":
        assert (weights.triu(1) == 0).all()
    value = found["value"].repeat_interleave(4 // found["value"].shape[1], dim=1)
    assert ((weights @ value).transpose(1, 2).flatten(2) - found["output"]).abs().max() < 1e-9


@pytest.mark.parametrize("family", ["llama", "gpt2", "bert"])
def test_output_attentions_of_softmax_are_those_of_eager(family: str) -> None:
    mask = right_padding()
    ours = tiny(family, "regard_softmax")(tokens(), attention_mask=mask, output_attentions=True).attentions
    theirs = tiny(family, "eager")(tokens(), attention_mask=mask, output_attentions=True).attentions
    for a, b in zip(ours, theirs, strict=True):
        assert (a - b).transpose(1, 2)[mask.bool()].abs().max() < 1e-5


def test_weights_while_generating() -> None:
    model = tiny("gpt2", "regard_biweight")
    made = model.generate(
        tokens(),
        do_sample=False,
        min_new_tokens=3,
        max_new_tokens=3,
        output_attentions=True,
        return_dict_in_generate=True,
    )
    assert [layers[0].shape[-2:] for layers in made.attentions] == [(12, 12), (1, 13), (1, 14)]
    assert all((w.sum(-1) - 1).abs().max() < 1e-5 for layers in made.attentions for w in layers)


# Other ways to run a model --------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "bert"])
def test_compiled_as_one_graph(family: str) -> None:
    model = tiny(family, "regard_biweight")
    torch._dynamo.reset()  # of what other tests had compiled: graphs are counted by the wrapper that all models share
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for mask in (None, left_padding()):
        with torch.no_grad():
            got, want = (m(tokens(), attention_mask=mask).logits for m in (compiled, model))
        assert (got - want).abs().max() < 1e-5


@torch.no_grad()
@pytest.mark.parametrize("family", ["llama", "qwen3-sliding"])
def test_a_compiled_step_over_a_cache_of_fixed_length(family: str) -> None:
    model = tiny(family, "regard_biweight")
    whole = model(tokens()).logits
    cache = StaticCache(config=model.config, max_cache_len=20)
    model(tokens()[:, :8], past_key_values=cache, use_cache=True)
    torch._dynamo.reset()  # of what other tests had compiled: graphs are counted by the wrapper that all models share
    compiled = torch.compile(model.forward, fullgraph=True, backend="aot_eager")
    for at in range(8, 12):
        more = {"position_ids": torch.tensor([[at]]), "past_key_values": cache, "use_cache": True}
        got = compiled(tokens()[:, at : at + 1], **more).logits[:, 0]
        assert (got - whole[:, at]).abs().max() < 1e-5 * max(1.0, whole.abs().max().item())


@pytest.mark.parametrize("family", ALL)
def test_bfloat16(family: str) -> None:
    model = tiny(family, "regard_biweight")
    want = model(tokens(), attention_mask=left_padding()).logits
    got = model.bfloat16()(tokens(), attention_mask=left_padding()).logits
    assert got.dtype == torch.bfloat16
    error = (got.float() - want)[left_padding().bool()].norm() / want[left_padding().bool()].norm()
    eager = tiny(family, "sdpa")
    exact = eager(tokens(), attention_mask=left_padding()).logits
    usual = eager.bfloat16()(tokens(), attention_mask=left_padding()).logits.float()
    usual_error = (usual - exact)[left_padding().bool()].norm() / exact[left_padding().bool()].norm()
    assert error < 2 * usual_error + 0.01


def test_autocast_with_normalised_queries() -> None:
    """Qwen3 normalises queries and keys in float32, so that under autocast values alone are bfloat16."""
    model = tiny("qwen3", "regard_biweight").train()
    want = model(tokens(), labels=tokens()).loss
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = model(tokens(), labels=tokens()).loss
    got.backward()
    assert abs(got - want) < 0.05 * want
    assert all(p.grad.isfinite().all() for p in model.parameters())


def test_saved_and_loaded(tmp_path: Any) -> None:
    model = tiny("llama", "regard_biweight")
    want = model(tokens()).logits
    model.save_pretrained(tmp_path)
    kind = type(model)
    loaded = kind.from_pretrained(tmp_path, attn_implementation="regard_biweight")
    assert torch.equal(loaded(tokens()).logits, want)
    # transformers does not write the implementation down
    assert kind.from_pretrained(tmp_path).config._attn_implementation == "sdpa"
    assert torch.equal(convert(kind.from_pretrained(tmp_path), "biweight")(tokens()).logits, want)
