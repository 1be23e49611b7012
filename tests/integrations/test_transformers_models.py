"""Stock models of transformers with regard's attention: against torch's, against the oracle's dense attention, and
against themselves by another way (cache, padding, chunks, compiled, checkpointed)."""

from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch
import transformers
from contracts import oracle
from tiny_models import (
    ALL,
    CAUSAL,
    DECODERS,
    END,
    MORE,
    PAD,
    PADDING,
    SIZES,
    VOCAB,
    gap,
    left_padding,
    positions,
    real_tokens,
    right_padding,
    same_gradients,
    step_logits,
    tiny,
    tokens,
    without_dropout,
)
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache, PreTrainedModel, StaticCache
from transformers.masking_utils import sdpa_mask

import regard
from regard.integrations.transformers import convert, register

NAMES = register()
register("gaussian*linear(ridge=0.5,solver=cholesky)")


@pytest.mark.parametrize("family", [*ALL, *MORE])
@pytest.mark.parametrize("padding", PADDING)
def test_softmax_gives_the_logits_of_sdpa(family: str, padding: str) -> None:
    ours, theirs = tiny(family, "regard_softmax"), tiny(family, "sdpa")
    assert ours.config._attn_implementation == "regard_softmax"
    assert theirs.config._attn_implementation == "sdpa"
    mask = PADDING[padding]
    got, want = (m(tokens(), attention_mask=mask).logits[real_tokens(mask)] for m in (ours, theirs))
    assert gap(got, want) < 1e-5
    assert want.abs().max() > 0.1


@pytest.mark.parametrize("family", ALL)
def test_a_converted_model_keeps_its_weights_and_logits(family: str) -> None:
    model = tiny(family, "sdpa")
    before = model(tokens()).logits
    weights = deepcopy(model.state_dict())
    assert convert(model, "softmax") is model
    assert model.config._attn_implementation == "regard_softmax"
    assert (model(tokens()).logits - before).abs().max() < 1e-5
    convert(model, "biweight")
    assert (model(tokens()).logits - before).abs().max() > 1e-3
    assert all(torch.equal(a, weights[n]) for n, a in model.state_dict().items())
    model.set_attn_implementation("sdpa")
    assert torch.equal(model(tokens()).logits, before)


@pytest.mark.parametrize(
    ("family", "name"),
    [*((family, "biweight") for family in [*ALL, *MORE]), *((family, "local-linear") for family in ALL)],
)
def test_every_parameter_gets_a_finite_gradient(family: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the attention dropout that GPT-2 and BERT have by default, which needs all pairs; without it the plain form,
    whose size is limited, is not asked."""
    if name == "local-linear":
        monkeypatch.setattr("regard.pairwise.reference.LIMIT", 0)
    model = tiny(family, f"regard_{name}", **(without_dropout(family) if name == "local-linear" else {})).train()
    mask = left_padding()
    labels = tokens().masked_fill(mask == 0, -100)
    model(tokens(), attention_mask=mask, labels=labels).loss.backward()
    experts = family in ("Mixtral", "DeepseekV3")  # of which some see no token
    assert experts or all(p.grad is not None for p in model.parameters())
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    assert all(grad.isfinite().all() for grad in grads)
    assert sum(float(grad.abs().sum()) > 0 for grad in grads) > 10
    monkeypatch.undo()
    assert (model.eval()(tokens()).logits - tiny(family, "regard_softmax")(tokens()).logits).abs().max() > 1e-4


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


@pytest.mark.parametrize("preset", [name.removeprefix("regard_") for name in NAMES])
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


STATIC = {"cache_implementation": "static"}
SIGNED = ("regard_gaussian*linear(ridge=0.5,solver=cholesky)", "regard_local-linear[biweight]")


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(
    ("family", "name", "more"),
    [
        *((f, "regard_biweight", more) for f in CAUSAL for more in ({}, STATIC, {"num_beams": 3})),
        *((f, name, more) for f in CAUSAL for more in ({}, {"num_beams": 2}) for name in SIGNED),
        *((f, "regard_biweight", {}) for f in DECODERS),
    ],
)
def test_generate_with_a_cache_and_without(family: str, name: str, more: dict[str, Any], padded: bool) -> None:
    model = tiny(family, name)
    model = model.double() if name in SIGNED else model
    mask = left_padding() if padded else torch.ones(2, 12, dtype=torch.long)
    slow = {"use_cache": False, **{k: v for k, v in more.items() if k == "num_beams"}}
    both = [step_logits(model, tokens(), attention_mask=mask, **options) for options in (more, slow)]
    assert torch.equal(both[0][0], both[1][0])
    assert gap(both[0][1], both[1][1]) < 1e-5


@pytest.mark.parametrize("family", CAUSAL)
@pytest.mark.parametrize(
    ("kind", "name"), [("dynamic", "biweight"), ("static", "biweight"), ("dynamic", "local-linear[biweight]")]
)
def test_a_prompt_in_pieces(family: str, kind: str, name: str) -> None:
    """With weights of the usual size, for which a ridge of 0.1 is not small beside the keys."""
    model = tiny(family, f"regard_{name}", initializer_range=0.05)
    config = {"config": model.config}
    cache = DynamicCache(**config) if kind == "dynamic" else StaticCache(**config, max_cache_len=20)
    done = []
    for first, last in ((0, 5), (5, 6), (6, 11), (11, 12)):
        more = {"past_key_values": cache, "position_ids": torch.arange(first, last)[None], "use_cache": True}
        done.append(model(tokens()[:, first:last], **more).logits)
    assert gap(torch.cat(done, 1), model(tokens()).logits) < 1e-5


@pytest.mark.parametrize(
    ("family", "name"),
    [
        *((family, name) for family in ALL for name in ("biweight", "local-linear")),
        *(("bert", name) for name in ("softmax", "topk-uniform", "rbf", "relu")),
    ],
)
def test_a_padded_batch_is_each_sequence_alone(family: str, name: str) -> None:
    model = tiny(family, f"regard_{name}").double()
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


NAMED = ["regard_softmax", "regard_biweight", "regard_local-linear", "regard_local-linear[biweight]"]


@pytest.mark.parametrize("family", ALL)
@pytest.mark.parametrize("name", NAMED)
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
    assert bool(weights.min() < -1e-3) == ("local-linear" in name)
    sums = weights.sum(-1)
    seeing = (mask.bool() | torch.tensor(family == "bert"))[:, None].expand(2, 4, 12)
    assert (sums[seeing] - 1).abs().max() < 1e-9
    assert (sums[~seeing] == 0).all()
    assert (weights[0, :, :, :4] == 0).all()
    if family != "bert":
        assert (weights.triu(1) == 0).all()
    value = found["value"].repeat_interleave(4 // found["value"].shape[1], dim=1)
    assert ((weights @ value).transpose(1, 2).flatten(2) - found["output"]).abs().max() < 1e-9


def test_weights_while_generating() -> None:
    lengths = {"min_new_tokens": 3, "max_new_tokens": 3, "do_sample": False}
    asked = {"output_attentions": True, "return_dict_in_generate": True}
    made = tiny("gpt2", "regard_biweight").generate(tokens(), **lengths, **asked)
    assert [layers[0].shape[-2:] for layers in made.attentions] == [(12, 12), (1, 13), (1, 14)]
    assert all((w.sum(-1) - 1).abs().max() < 1e-5 for layers in made.attentions for w in layers)


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
    """The error is that of torch's own attention, or little more."""
    mask, errors = left_padding(), []
    for impl in ("regard_biweight", "sdpa"):
        model = tiny(family, impl)
        want = model(tokens(), attention_mask=mask).logits[mask.bool()]
        got = model.bfloat16()(tokens(), attention_mask=mask).logits[mask.bool()]
        assert got.dtype == torch.bfloat16
        errors.append((got.float() - want).norm() / want.norm())
    assert errors[0] < 2 * errors[1] + 0.01


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
    assert torch.equal(kind.from_pretrained(tmp_path, attn_implementation="regard_biweight")(tokens()).logits, want)
    # transformers does not write the implementation down
    assert kind.from_pretrained(tmp_path).config._attn_implementation == "sdpa"
    assert torch.equal(convert(kind.from_pretrained(tmp_path), "biweight")(tokens()).logits, want)


def both(kind: type[PreTrainedModel], config: transformers.PreTrainedConfig) -> list[PreTrainedModel]:
    """The same model with our attention and with torch's."""
    models = []
    for impl in ("regard_softmax", "sdpa"):
        torch.manual_seed(7)
        models.append(kind._from_config(type(config)(**config.to_dict()), attn_implementation=impl).eval())
    return models


def test_an_encoder_with_a_decoder() -> None:
    config = transformers.BartConfig(
        vocab_size=VOCAB, d_model=32, encoder_layers=1, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=32, decoder_ffn_dim=32, max_position_embeddings=64, init_std=0.2,
        bos_token_id=1, pad_token_id=PAD, eos_token_id=END, decoder_start_token_id=1, forced_eos_token_id=None,
    )  # fmt: skip
    models = both(transformers.BartForConditionalGeneration, config)
    for mask in (None, right_padding()):
        logits = [m(tokens(), attention_mask=mask, decoder_input_ids=tokens(length=7)).logits for m in models]
        assert gap(*logits) < 1e-5
        made = [m.generate(tokens(), attention_mask=mask, max_new_tokens=6, num_beams=2) for m in models]
        assert torch.equal(*made)


def test_a_causal_text_encoder_beside_a_bidirectional_one() -> None:
    """CLIP's layers say that they are not causal, and those of the text are told otherwise at every call."""
    sizes = {k: SIZES[k] for k in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")}
    config = transformers.CLIPTextConfig(**sizes, num_attention_heads=4, max_position_embeddings=64)
    models = both(transformers.CLIPTextModel, config)
    for mask in PADDING.values():
        states = [m(tokens(), attention_mask=mask).last_hidden_state[real_tokens(mask)] for m in models]
        assert (states[0] - states[1]).abs().max() < 1e-5


def test_pictures() -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.ViTConfig(**sizes, image_size=16, patch_size=4, initializer_range=0.2)
    picture = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    found = [model(picture).last_hidden_state for model in both(transformers.ViTModel, config)]
    assert (found[0] - found[1]).abs().max() < 1e-5


KERNELS = ("biweight", "local-linear", "local-linear[biweight]", "sparsemax", "triweight", "relumax")
EVERYWHERE = KERNELS[:3]


def dense(spec, module, query, key, value, attention_mask, scaling=None, **_):
    queries, keys = query.shape[2], key.shape[2]
    if attention_mask is None:
        causal = getattr(module, "is_causal", True)
        attention_mask = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries if causal else keys)
    seen = attention_mask.expand(*query.shape[:3], keys)
    return oracle.attention(oracle.read(spec), query, key, value, seen, scaling)[0].transpose(1, 2).contiguous(), None


for name in KERNELS:
    AttentionInterface.register(f"dense_{name}", partial(dense, regard.Spec.parse(name)))
    AttentionMaskInterface.register(f"dense_{name}", sdpa_mask)


@pytest.mark.parametrize(
    ("padding", "name", "family"),
    [
        *((padding, name, family) for padding in PADDING for name in EVERYWHERE for family in ALL),
        *(("left", name, "llama") for name in KERNELS if name not in EVERYWHERE),
    ],
)
def test_logits_and_gradients_are_those_of_dense_attention(family: str, name: str, padding: str) -> None:
    mask = PADDING[padding]
    real = real_tokens(mask)
    ours, theirs = (tiny(family, f"{impl}_{name}", **without_dropout(family)).double() for impl in ("regard", "dense"))
    found = []
    for model in (ours, theirs):
        logits = model(tokens(), attention_mask=mask).logits
        (logits * real[..., None]).square().mean().backward()
        found.append(logits[real])
    assert (found[0] - found[1]).abs().max() < 1e-7 * found[1].abs().max()  # rotary angles are float32 in either
    same_gradients(ours, theirs)
    if not name.startswith("local-linear"):  # the weights do differ from softmax's
        usual = tiny(family, "sdpa").double()(tokens(), attention_mask=mask).logits
        assert (usual[real] - found[0]).abs().max() > 1e-3
