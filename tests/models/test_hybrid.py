"""HybridForCausalLM: its values against an independent model, saving, masks, gradients, compilation.

The independent models are transformers' Llama and Mistral: with softmax in every layer the same weights, by
the same names, must give the same logits.
"""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
)

from regard.checks import ArgumentError
from regard.models import HybridConfig, HybridForCausalLM, HybridModel

MIXERS = ("softmax", "biweight", "relumax", "shift-cosine")
SENTENCE = "the fox moves into the old boat"


def perturb(model, seed=5):
    """Move every weight off its initial value, the ones of the norms included."""
    noise = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.1 * torch.randn(weight.shape, generator=noise)
    return model


def twin(model, window=None):
    """A transformers model with the same weights."""
    config = model.config
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    names += ("num_key_value_heads", "head_dim", "rms_norm_eps", "tie_word_embeddings")
    sizes = {name: getattr(config, name) for name in names}
    sizes["rope_parameters"] = {"rope_type": "default", "rope_theta": config.rope_theta}
    sizes["attn_implementation"] = "eager"
    if window is None:
        other = LlamaForCausalLM(LlamaConfig(**sizes))
    else:
        other = MistralForCausalLM(MistralConfig(sliding_window=window, **sizes))
    other.load_state_dict(model.state_dict())
    return other.eval()


@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("padding", [0, 5])
def test_softmax_equals_an_independent_model(make_model, encode, window, padding):
    model = perturb(make_model("softmax", window=window, rope_theta=500.0))
    tokens = encode(SENTENCE)[None].repeat(2, 1)
    mask = torch.ones_like(tokens)
    mask[1, :padding] = 0
    positions = (mask.cumsum(-1) - 1).clamp_min(0)
    theirs = twin(model, window)(tokens, attention_mask=mask, position_ids=positions).logits
    ours = model(tokens, attention_mask=mask).logits
    torch.testing.assert_close(ours[mask.bool()], theirs[mask.bool()], atol=2e-5, rtol=0)
    assert ours.std() > 0.5  # logits that are all alike would agree too


def test_loss_is_the_shifted_cross_entropy(make_model, encode):
    model = perturb(make_model("biweight"))
    tokens = encode(SENTENCE)[None]
    out = model(tokens, labels=tokens)
    log_p = out.logits[0, :-1].double().log_softmax(-1)
    expected = -log_p[torch.arange(len(SENTENCE) - 1), tokens[0, 1:]].mean()
    torch.testing.assert_close(out.loss.double(), expected, atol=1e-6, rtol=0)
    summed = model(tokens, labels=tokens, num_items_in_batch=10).loss
    torch.testing.assert_close(summed, out.loss * (len(SENTENCE) - 1) / 10)


def test_state_dict_names_are_frozen(make_model):
    """Saved models must load in later versions: change these names only with a migration."""
    expected = {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"}
    for layer in ("model.layers.0", "model.layers.1"):
        expected |= {f"{layer}.self_attn.{name}_proj.weight" for name in "qkvo"}
        expected |= {f"{layer}.mlp.{name}_proj.weight" for name in ("gate", "up", "down")}
        expected |= {f"{layer}.{name}.weight" for name in ("input_layernorm", "post_attention_layernorm")}
        expected |= {f"{layer}.self_attn.log_temperature"}
    assert set(make_model(temperatures="learned").state_dict()) == expected
    assert set(make_model().state_dict()) == {name for name in expected if "temperature" not in name}


def test_embeddings_are_tied_unless_asked_otherwise(make_model):
    tied, untied = make_model(), make_model(tie_word_embeddings=False)
    assert tied.lm_head.weight is tied.model.embed_tokens.weight
    assert untied.lm_head.weight is not untied.model.embed_tokens.weight


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("mixers", [*MIXERS, ["relumax", "biweight"]])
def test_save_and_load(make_model, encode, tmp_path, mixers, tied):
    model = perturb(make_model(mixers, tie_word_embeddings=tied))
    model.save_pretrained(tmp_path)
    assert {path.suffix for path in tmp_path.iterdir()} == {".safetensors", ".json"}
    tokens = encode(SENTENCE)[None]
    for loader in (HybridForCausalLM, AutoModelForCausalLM):
        again = loader.from_pretrained(tmp_path)
        assert type(again) is HybridForCausalLM
        assert again.config.mixers == model.config.mixers
        assert torch.equal(again(tokens).logits, model(tokens).logits)
    bare = AutoModel.from_pretrained(tmp_path)
    assert type(bare) is HybridModel
    assert torch.equal(bare(tokens).last_hidden_state, model.model(tokens).last_hidden_state)
    assert type(AutoConfig.from_pretrained(tmp_path)) is HybridConfig


def test_learned_temperature_is_saved_and_starts_at_one(make_model, encode, tmp_path):
    model = make_model("softmax", temperatures="learned")
    tokens = encode(SENTENCE)[None]
    assert all(bool((layer.self_attn.log_temperature == 0).all()) for layer in model.model.layers)
    torch.testing.assert_close(model(tokens).logits, make_model("softmax")(tokens).logits, atol=1e-6, rtol=0)
    perturb(model).save_pretrained(tmp_path)
    again = HybridForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(again(tokens).logits, model(tokens).logits)
    again(tokens, labels=tokens).loss.backward()
    assert all(bool((layer.self_attn.log_temperature.grad != 0).all()) for layer in again.model.layers)


def test_a_temperature_can_be_added_to_a_saved_model(make_model, encode, tmp_path):
    model = perturb(make_model("softmax"))
    model.save_pretrained(tmp_path)
    again = HybridForCausalLM.from_pretrained(tmp_path, temperatures="learned")
    assert all(torch.count_nonzero(layer.self_attn.log_temperature) == 0 for layer in again.model.layers)
    tokens = encode(SENTENCE)[None]
    torch.testing.assert_close(again(tokens).logits, model(tokens).logits, atol=1e-5, rtol=0)


def test_registration_happens_on_import_and_can_be_repeated():
    code = (
        "import regard, sys; assert 'transformers' not in sys.modules; import regard.models, transformers;"
        "assert transformers.AutoConfig.for_model('regard_hybrid').mixers == ['softmax'] * 4"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
    importlib.reload(sys.modules["regard.models"])
    assert type(AutoModelForCausalLM.from_config(HybridConfig(hidden_size=32))) is HybridForCausalLM


def test_every_layer_has_its_own_mixer(make_model, encode):
    tokens = encode(SENTENCE)[None]
    outputs = [make_model(m)(tokens).logits for m in (["softmax", "biweight"], ["biweight", "softmax"], "softmax")]
    assert all((a - b).abs().max() > 1e-5 for a in outputs for b in outputs if a is not b)
    model = make_model(["softmax", "biweight"])
    assert [str(layer.self_attn.spec) for layer in model.model.layers] == ["softmax", "biweight"]


@pytest.mark.parametrize("mixer", MIXERS)
def test_content_of_padding_does_not_matter(make_model, encode, mixer):
    """Left, right and interior padding: other tokens there change nothing at the real positions, and no
    gradient reaches them."""
    model = perturb(make_model(mixer))
    tokens = encode(SENTENCE)[None].repeat(3, 1)
    mask = torch.ones_like(tokens)
    mask[0, :6], mask[1, -6:], mask[2, 9:14] = 0, 0, 0
    real = mask.bool()
    losses, outputs = [], []
    for filler in (0, 3):
        filled = tokens.masked_fill(~real, filler)
        embeds = model.model.embed_tokens(filled).detach().requires_grad_()
        out = model(inputs_embeds=embeds, attention_mask=mask, labels=filled)
        (gradient,) = torch.autograd.grad(out.loss, embeds)
        assert torch.count_nonzero(gradient[~real]) == 0
        assert torch.isfinite(gradient).all()
        assert gradient[real].abs().max() > 0
        losses.append(out.loss)
        outputs.append(out.logits[real])
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(losses[0], losses[1])


@pytest.mark.parametrize("mixer", MIXERS)
def test_hiding_tokens_equals_leaving_them_out(make_model, encode, mixer):
    """Inside a sequence too: positions count real tokens."""
    model = perturb(make_model(mixer))
    tokens = encode(SENTENCE)[None]
    mask = torch.ones_like(tokens)
    mask[0, 9:14] = 0
    real = mask.bool()
    hidden = model(tokens, attention_mask=mask).logits[real]
    torch.testing.assert_close(hidden, model(tokens[real][None]).logits[0], atol=2e-5, rtol=0)


@pytest.mark.parametrize("mixer", MIXERS)
def test_padding_that_is_not_a_number(make_model, encode, mixer):
    model = make_model(mixer)
    embeds = model.model.embed_tokens(encode(SENTENCE)[None]).detach()
    real = torch.arange(len(SENTENCE))[None] >= 5
    expected = model(inputs_embeds=embeds, attention_mask=real).logits
    broken = embeds.masked_fill(~real[..., None], float("nan"))
    assert torch.equal(model(inputs_embeds=broken, attention_mask=real).logits[real], expected[real])


@pytest.mark.parametrize("mixer", MIXERS)
def test_later_tokens_change_nothing_before_them(make_model, encode, mixer):
    model = make_model(mixer)
    tokens = encode(SENTENCE)[None]
    changed = tokens.clone()
    changed[:, 20:] = tokens[:, 20:].flip(1)
    assert torch.equal(model(changed).logits[:, :20], model(tokens).logits[:, :20])
    assert not torch.equal(model(changed).logits[:, 20:], model(tokens).logits[:, 20:])


def test_hidden_tokens_are_neither_predicted_nor_predicted_from(make_model, encode):
    model = make_model("softmax")
    tokens = encode("pond")[None]
    padded = torch.nn.functional.pad(tokens, (3, 2))
    mask = torch.tensor([[False] * 3 + [True] * 4 + [False] * 2])
    loss = model(padded, attention_mask=mask, labels=padded).loss
    torch.testing.assert_close(loss, model(tokens, labels=tokens).loss)


@pytest.mark.parametrize("mixer", MIXERS)
def test_a_row_without_any_key_is_finite(make_model, encode, mixer):
    model = make_model(mixer)
    tokens = encode("pond")[None].repeat(2, 1)
    mask = torch.tensor([[0, 0, 0, 0], [1, 1, 1, 1]])
    out = model(tokens, attention_mask=mask, labels=tokens)
    out.loss.backward()
    assert torch.isfinite(out.logits).all()
    assert all(torch.isfinite(weight.grad).all() for weight in model.parameters())
    torch.testing.assert_close(out.logits[1], model(tokens[1:]).logits[0], atol=1e-5, rtol=0)


def test_mask_forms_agree(make_model, encode):
    model = make_model("biweight")
    tokens = encode(SENTENCE)[None]
    mask = torch.arange(tokens.shape[1])[None] >= 4
    as_boolean = model(tokens, attention_mask=mask).logits
    assert torch.equal(model(tokens, attention_mask=mask.long()).logits, as_boolean)
    assert torch.equal(model(tokens, attention_mask=mask.to(torch.uint8)).logits, as_boolean)
    everything = model(tokens, attention_mask=torch.ones_like(tokens)).logits
    torch.testing.assert_close(everything, model(tokens).logits, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (torch.ones(1, 4), r"attention_mask is a torch.float32 tensor \[1, 4\], expected booleans or integers"),
        (torch.ones(1, 3, dtype=torch.long), r"attention_mask has shape \[1, 3\], expected \[1, 4\]"),
        (torch.ones(4, dtype=torch.long), r"attention_mask has shape \[4\], expected \[1, 4\]"),
        (torch.ones(1, 1, 4, 4, dtype=torch.bool), r"expected \[1, 4\]"),
        (torch.ones(2, 4, dtype=torch.bool), r"expected \[1, 4\]"),
        ([[1, 1, 1, 1]], r"attention_mask is \[\[1, 1, 1, 1\]\], expected booleans or integers"),
    ],
)
def test_bad_masks(make_model, encode, mask, message):
    with pytest.raises(ArgumentError, match=message):
        make_model()(encode("pond")[None], attention_mask=mask)


def test_a_mask_must_count_the_tokens_in_the_cache(make_model, encode):
    model = make_model()
    cache = model(encode("pond")[None], use_cache=True).past_key_values
    with pytest.raises(ArgumentError, match=r"has shape \[1, 2\], expected \[1, 6\]"):
        model(encode("of")[None], past_key_values=cache, attention_mask=torch.ones(1, 2, dtype=torch.long))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "give either input_ids or inputs_embeds"),
        (
            {"input_ids": torch.ones(4, dtype=torch.long)},
            r"input_ids is a torch.int64 tensor \[4\], expected torch.int64 tokens \[B, T\]",
        ),
        (
            {"input_ids": torch.ones(1, 0, dtype=torch.long)},
            r"input_ids is a torch.int64 tensor \[1, 0\], expected .* T >= 1",
        ),
        ({"input_ids": torch.ones(1, 4)}, r"input_ids is a torch.float32 tensor \[1, 4\], expected torch.int64 tokens"),
        (
            {"inputs_embeds": torch.ones(1, 4, 9)},
            r"inputs_embeds is a torch.float32 tensor \[1, 4, 9\], expected .* \[B, T, 64\]",
        ),
        ({"inputs_embeds": torch.ones(1, 0, 64)}, r"inputs_embeds is a torch.float32 tensor \[1, 0, 64\]"),
        (
            {"input_ids": torch.ones(1, 4, dtype=torch.long), "position_ids": torch.arange(3)[None]},
            r"position_ids has shape \[1, 3\], expected \[B or 1, 4\]",
        ),
        (
            {"input_ids": torch.ones(1, 4, dtype=torch.long), "labels": torch.ones(1, 3, dtype=torch.long)},
            r"labels has shape \[1, 3\], expected \[1, 4\]",
        ),
        (
            {"input_ids": torch.ones(2, 1, dtype=torch.long), "labels": torch.ones(2, 1, dtype=torch.long)},
            "labels of one position leave nothing to predict",
        ),
    ],
)
def test_bad_inputs(make_model, arguments, message):
    with pytest.raises(ArgumentError, match=message):
        make_model()(**arguments)


def test_tokens_outside_the_vocabulary_are_an_error(make_model):
    with pytest.raises(ArgumentError, match="holds 10000 to 10000, expected integers from 0 to"):
        make_model()(torch.tensor([[10_000]]))


def test_logits_to_keep(make_model, encode):
    model = make_model()
    tokens = encode(SENTENCE)[None]
    whole = model(tokens).logits
    torch.testing.assert_close(model(tokens, logits_to_keep=1).logits, whole[:, -1:], atol=1e-6, rtol=0)
    places = torch.tensor([0, 5])
    torch.testing.assert_close(model(tokens, logits_to_keep=places).logits, whole[:, places], atol=1e-6, rtol=0)


@pytest.mark.parametrize("mixer", MIXERS)
def test_weights_and_hidden_states(make_model, encode, mixer):
    model = make_model(mixer, window=6)
    tokens = encode("the fox moves")[None].repeat(2, 1)
    mask = torch.ones_like(tokens)
    mask[1, :3] = 0
    plain = model(tokens, attention_mask=mask).logits
    out = model(tokens, attention_mask=mask, output_attentions=True, output_hidden_states=True)
    torch.testing.assert_close(out.logits, plain, atol=1e-5, rtol=0)
    assert [h.shape for h in out.hidden_states] == [(2, 13, 64)] * 3
    torch.testing.assert_close(model.lm_head(out.hidden_states[-1]), out.logits)
    i, j = torch.arange(13)[:, None], torch.arange(13)
    allowed = ((j <= i) & (j > i - 6)) & mask.bool()[:, None, None, :]
    for weights in out.attentions:
        assert weights.shape == (2, 4, 13, 13)
        assert torch.count_nonzero(weights[~allowed.expand_as(weights)]) == 0
        totals = allowed.any(-1).float().expand(2, 4, 13)  # a row without a key has no weight
        torch.testing.assert_close(weights.sum(-1), totals, atol=1e-5, rtol=0)
    assert model(tokens).attentions is None
    assert isinstance(model(tokens, return_dict=False), tuple)


@pytest.mark.parametrize("mixers", [["softmax", "biweight"], ["relumax", "shift-cosine"]])
def test_gradient_checkpointing_gives_the_same_gradients(make_model, encode, mixers):
    tokens = encode(SENTENCE)[None]
    gradients = []
    for recompute in (False, True):
        model = make_model(mixers).train()
        if recompute:
            # transformers 5.23 gave the method a new name
            getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
            assert all(layer.gradient_checkpointing for layer in model.model.layers)
        model(tokens, labels=tokens).loss.backward()
        gradients.append({name: weight.grad for name, weight in model.named_parameters()})
    for name, expected in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], expected, atol=1e-7, rtol=1e-5)
    with pytest.raises(ArgumentError, match="use_cache=True cannot be used with gradient checkpointing"):
        model(tokens, use_cache=True)
    assert model.eval()(tokens, use_cache=True).past_key_values is not None


@pytest.mark.parametrize("mixers", [["softmax", "biweight"], ["relumax", "shift-cosine"]])
def test_compiled_equals_eager(make_model, encode, mixers):
    model = make_model(mixers)
    tokens = encode("the old boat")[None]
    mask = torch.arange(tokens.shape[1])[None] >= 2
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for given in (None, mask):
        expected = model(tokens, attention_mask=given, labels=tokens, use_cache=False)
        out = compiled(tokens, attention_mask=given, labels=tokens, use_cache=False)
        torch.testing.assert_close(out.logits, expected.logits, atol=1e-6, rtol=0)
        names, weights = zip(*model.named_parameters(), strict=True)
        pairs = zip(torch.autograd.grad(out.loss, weights), torch.autograd.grad(expected.loss, weights), strict=True)
        for name, (a, b) in zip(names, pairs, strict=True):
            torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-5, msg=name)


def test_one_compiled_graph_serves_every_length(make_model):
    """The first length is compiled as it is, the second for all lengths, forward and backward."""
    model = make_model(["softmax", "biweight"]).train()
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for length in (9, 13, 16, 31):
        tokens = torch.arange(2 * length).reshape(2, length) % 20
        compiled(tokens, labels=tokens).loss.backward()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 2


def test_forward_changes_no_state(make_model, encode):
    model = make_model("biweight")
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    attributes = {name: set(vars(module)) for name, module in model.named_modules()}
    model(encode(SENTENCE)[None], labels=encode(SENTENCE)[None])
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())
    assert {name: set(vars(module)) for name, module in model.named_modules()} == attributes


def test_bfloat16(make_model, encode):
    model = perturb(make_model("biweight"))
    tokens = encode(SENTENCE)[None]
    exact = model.double()(tokens).logits
    assert exact.dtype == torch.float64
    rounded = model.bfloat16()(tokens).logits
    assert rounded.dtype == torch.bfloat16
    assert (rounded - exact).square().mean().sqrt() < 0.05 * exact.square().mean().sqrt()
