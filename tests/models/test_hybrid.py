"""HybridForCausalLM: its values against an independent model, names of its weights, masks, compilation.

The independent models are transformers' Llama and Mistral: with softmax in every layer the same weights, by
the same names, must give the same logits.
"""

import importlib
import subprocess
import sys

import pytest
import torch
from any_model import make, text
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
)

from regard.checks import ArgumentError
from regard.models import HybridConfig, HybridForCausalLM


def made(mixers="softmax", **fields):
    """Two layers, two query heads and one key head."""
    return make("transformer", mixers, torch.float32, **{"num_hidden_layers": 2, "num_key_value_heads": 1, **fields})


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
def test_softmax_equals_an_independent_model(window, padding):
    model = made(window=window, rope_theta=500.0)
    tokens = text(2, 31)
    mask = torch.ones_like(tokens)
    mask[1, :padding] = 0
    positions = (mask.cumsum(-1) - 1).clamp_min(0)
    theirs = twin(model, window)(tokens, attention_mask=mask, position_ids=positions).logits
    ours = model(tokens, attention_mask=mask).logits
    torch.testing.assert_close(ours[mask.bool()], theirs[mask.bool()], atol=2e-5, rtol=0)
    assert ours.std() > 0.5  # logits that are all alike would agree too


def test_state_dict_names_are_frozen():
    """Saved models must load in later versions: change these names only with a migration."""
    expected = {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"}
    for layer in ("model.layers.0", "model.layers.1"):
        expected |= {f"{layer}.self_attn.{name}_proj.weight" for name in "qkvo"}
        expected |= {f"{layer}.mlp.{name}_proj.weight" for name in ("gate", "up", "down")}
        expected |= {f"{layer}.{name}.weight" for name in ("input_layernorm", "post_attention_layernorm")}
        expected |= {f"{layer}.self_attn.log_temperature"}
    assert set(made(temperatures="learned").state_dict()) == expected
    assert set(made().state_dict()) == {name for name in expected if "temperature" not in name}
    names = set(make("transformer-shared").state_dict())
    own = {f"0.self_attn.{name}" for name in ("log_base", "log_gain", "logit_exponent")} | {"1.self_attn.log_slope"}
    own |= {f"{i}.self_attn.{name}_proj.weight" for i in range(2) for name in ("k", "v", "o", "gate")}
    assert {name.removeprefix("model.layers.") for name in names if "self_attn" in name} == own


def test_a_temperature_can_be_added_to_a_saved_model(tmp_path):
    model = made()
    model.save_pretrained(tmp_path)
    again = HybridForCausalLM.from_pretrained(tmp_path, temperatures="learned")
    assert all(torch.count_nonzero(layer.self_attn.log_temperature) == 0 for layer in again.model.layers)
    tokens = text(1, 31)
    torch.testing.assert_close(again(tokens).logits, model(tokens).logits, atol=1e-5, rtol=0)


def test_registration_happens_on_import_and_can_be_repeated():
    code = (
        "import regard, sys; assert 'transformers' not in sys.modules; import regard.models, transformers;"
        "assert transformers.AutoConfig.for_model('regard_hybrid').mixers == ['softmax'] * 4"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
    importlib.reload(sys.modules["regard.models"])
    assert type(AutoModelForCausalLM.from_config(HybridConfig(hidden_size=32))) is HybridForCausalLM


def test_every_layer_has_its_own_mixer():
    tokens = text(1, 31)
    outputs = [made(m)(tokens).logits for m in (["softmax", "biweight"], ["biweight", "softmax"], "softmax")]
    assert all((a - b).abs().max() > 1e-5 for a in outputs for b in outputs if a is not b)
    model = made(["softmax", "biweight"])
    assert [str(layer.self_attn.spec) for layer in model.model.layers] == ["softmax", "biweight"]


def test_mask_forms_agree():
    model = made("biweight")
    tokens = text(1, 31)
    mask = torch.arange(tokens.shape[1])[None] >= 4
    as_boolean = model(tokens, attention_mask=mask).logits
    assert torch.equal(model(tokens, attention_mask=mask.long()).logits, as_boolean)
    assert torch.equal(model(tokens, attention_mask=mask.to(torch.uint8)).logits, as_boolean)
    everything = model(tokens, attention_mask=torch.ones_like(tokens)).logits
    torch.testing.assert_close(everything, model(tokens).logits, atol=1e-5, rtol=0)


def test_a_mask_must_count_the_tokens_in_the_cache():
    model = made()
    cache = model(text(1, 4), use_cache=True).past_key_values
    with pytest.raises(ArgumentError, match=r"has shape \[1, 2\], expected \[1, 6\]"):
        model(text(1, 2), past_key_values=cache, attention_mask=torch.ones(1, 2, dtype=torch.long))


def test_one_compiled_graph_serves_every_length():
    """The first length is compiled as it is, the second for all lengths, forward and backward."""
    model = made(["softmax", "biweight"]).train()
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for length in (9, 13, 16, 31):
        tokens = torch.arange(2 * length).reshape(2, length) % 20
        compiled(tokens, labels=tokens).loss.backward()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 2
