"""HybridForCausalLM: its values, names of its weights, masks, compilation, configurations. With softmax in every layer
the same weights, by the same names, must give the logits of transformers' Llama and Mistral."""

import importlib
import json
import sys

import pytest
import torch
from any_model import make, text
from mistakes import refuses
from programs import python
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

from regard import Spec
from regard.models import HybridConfig, HybridForCausalLM


def made(mixers="softmax", **fields):
    """Two layers, two query heads and one key head."""
    return make("transformer", mixers, torch.float32, **{"num_hidden_layers": 2, "num_key_value_heads": 1, **fields})


def twin(model, window=None):
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


def test_registration_happens_on_import_and_can_be_repeated():
    code = (
        "import regard, sys; assert 'transformers' not in sys.modules; import regard.models, transformers;"
        "assert transformers.AutoConfig.for_model('regard_hybrid').mixers == ['softmax'] * 4"
    )
    python("-c", code)
    importlib.reload(sys.modules["regard.models"])
    assert type(AutoModelForCausalLM.from_config(HybridConfig(hidden_size=32))) is HybridForCausalLM


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
    mask = torch.ones(1, 2, dtype=torch.long)
    refuses(r"has shape \[1, 2\], expected \[1, 6\]", model, mask, past_key_values=cache, attention_mask=mask)


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


def test_mixers_become_one_normal_text_per_layer():
    assert HybridConfig(mixers="biweight", num_hidden_layers=2).mixers == ["biweight", "biweight"]
    mixed = HybridConfig(mixers=[Spec.parse("relumax"), " softmax "], num_hidden_layers=2)
    assert mixed.mixers == ["relumax", "softmax"]
    assert mixed.layer_specs() == [Spec.parse("relumax"), Spec.parse("softmax")]


def test_defaults_that_follow_from_others():
    config = HybridConfig(hidden_size=100, num_attention_heads=5)
    assert (config.head_dim, config.num_key_value_heads, config.intermediate_size) == (20, 5, 272)


@pytest.mark.parametrize(("former", "now"), [(True, "learned"), (False, "fixed")])
def test_files_from_before_there_were_temperatures(tmp_path, former, now):
    HybridConfig(num_hidden_layers=2).save_pretrained(tmp_path)
    fields = json.loads((tmp_path / "config.json").read_text())
    for name in ("regard_version", "temperatures", "share_query_key", "exclude_self", "ridges", "qk_norm"):
        del fields[name]
    (tmp_path / "config.json").write_text(json.dumps({**fields, "learn_temperature": former}))
    config = HybridConfig.from_pretrained(tmp_path)
    assert config.temperatures == [now, now]
    assert (config.share_query_key, config.exclude_self) == (False, False)
    assert (config.ridges, config.qk_norm) == (["fixed", "fixed"], None)


def test_the_temperature_of_attention_is_not_that_of_sampling():
    config = HybridConfig(num_hidden_layers=1, hidden_size=8, temperatures="log")
    assert config.temperatures == ["log"]
    assert HybridForCausalLM(config).generation_config.temperature is None


def test_fields_changed_while_loading_are_checked_too(tmp_path):
    HybridConfig(hidden_size=32).save_pretrained(tmp_path)
    assert HybridForCausalLM(HybridConfig.from_pretrained(tmp_path, mixers="relumax")).config.mixers == ["relumax"] * 4
    refuses("mixers names 4 layers and num_.* is 3", HybridConfig.from_pretrained, tmp_path, num_hidden_layers=3)


LOCAL = {"mixers": ["local-linear[biweight]", "softmax", "local-linear"], "num_hidden_layers": 3}


def attentions(**fields):
    torch.manual_seed(0)
    model = HybridForCausalLM(HybridConfig(**LOCAL, hidden_size=32, initializer_range=0.2, **fields))
    return [layer.self_attn for layer in model.model.layers]


def test_one_rule_is_for_the_layers_that_have_a_ridge():
    config = HybridConfig(**LOCAL, ridges="learned(start=0.3)")
    assert config.ridges == ["learned(start=0.3)", "fixed", "learned(start=0.3)"]
    assert HybridConfig(**LOCAL, ridges=config.ridges).to_dict() == config.to_dict()
    layers = attentions(ridges=["fixed", "fixed", "learned-per-dimension"])
    assert [layer.ridge_proj and tuple(layer.ridge_proj.weight.shape) for layer in layers] == [None, None, (32, 32)]


@pytest.mark.parametrize("temperatures", ["fixed", "learned"])
def test_ridges_and_gains_start_where_they_should(temperatures):
    """transformers passes over modules without parameters of their own; temperatures are such parameters."""
    for layer in attentions(ridges="learned(start=0.3)", qk_norm="rms", temperatures=temperatures)[::2]:
        hidden = torch.randn(2, 5, 32)
        assert not layer.ridge_proj.weight.any()
        ridge = 0.001 + torch.sigmoid(hidden @ layer.ridge_proj.weight.T + layer.ridge_proj.bias)
        torch.testing.assert_close(ridge, torch.full_like(ridge, 0.3))
        assert (layer.q_norm.weight == 1).all()
        assert layer.q_proj.weight.std().item() == pytest.approx(0.2, rel=0.1)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"mixers": 3}, "mixers is 3, expected a spec such as 'biweight'"),
        ({"mixers": ["softmax", None, "softmax", "softmax"]}, "expected a spec such as 'biweight'"),
        ({"hidden_size": 30}, "hidden_size 30 is not a multiple of 4 heads"),
        ({"num_key_value_heads": 3}, r"4 query heads \(num_attention_heads\) do not divide among 3"),
        ({"head_dim": 7}, "head_dim is 7, expected an even number"),
        ({"hidden_size": 0}, "hidden_size is 0, expected a positive integer"),
        ({"vocab_size": "64"}, "vocab_size is '64', expected a positive integer"),
        ({"num_hidden_layers": True}, "num_hidden_layers is True, expected a positive integer"),
        ({"num_hidden_layers": 10**12}, "num_hidden_layers is 10{12}, expected a whole number from 1 to 16384"),
        ({"intermediate_size": -8}, "intermediate_size is -8, expected a positive integer"),
        ({"window": 0}, "window is 0, expected a positive integer"),
        ({"rope_theta": -1.0}, "rope_theta is -1, expected rope_theta > 0"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan, expected a finite number"),
        ({"exclude_self": "no"}, "exclude_self is 'no', expected True or False"),
        ({"temperatures": ["log"]}, r"temperatures is \['log'\], expected a rule such as 'log', or a list"),
        ({"temperatures": "lgo"}, "Did you mean 'log'"),
        ({"temperatures": "log", "mixers": "relu"}, "relu has none; leave it out or choose one of: softmax"),
        ({"share_query_key": True, "num_key_value_heads": 2}, "4 query heads need 4 key/value heads, not 2"),
        ({"temperature": "log"}, r"'temperature' is not used; temperatures says .* generate\(temperature=\)"),
        ({"sliding_window": 4}, "'sliding_window' is not used; window says"),
        ({"eos_token_id": [1, -1]}, "expected None or a token from 0 to 255"),
        ({"dropout": 0.1}, "unknown field 'dropout'. Choose from: .*vocab_size"),
        ({"rope_scaling": {"factor": 2}}, "'rope_scaling' is not used; rotary positions have rope_theta only"),
        ({"layer_types": ["linear_attention"] * 4}, "'layer_types' is not used; mixers sets"),
        ({"window": [1, 2]}, "expected a positive integer, None, or a list with one for each of 4 layers"),
        ({"window": [1, 2, 3, 0]}, "window is 0"),
        ({"rotary_share": 0.0}, "expected rotary_share > 0"),
        ({"rotary_share": 1.5}, "expected rotary_share <= 1"),
        ({"training_window": 0}, "expected a positive integer"),
        ({"training_window_share": 1.2}, "expected training_window_share <= 1"),
        ({"memory_place": "inside"}, "expected one of 'before-mixer', 'after-mixer'"),
        ({"mixers": "retentio"}, "mixers: 'retentio' is neither a spec nor a token mixer. Did you mean 'retention"),
        ({"mixers": "rwkv"}, "neither a spec nor a token mixer. Choose from: biweight, .*, gated-deltanet, .*, softm"),
        ({"mixers": "nearest"}, r"a spec begins with its kernel: gaussian\*nearest"),
        ({"memories": {1: 3}}, "memories is {1: 3}, expected a text such as .*, or depths mapped to names"),
        ({"memories": "PKM"}, "cannot read 'PKM'"),
        ({"memories": "PKM@9"}, "layers 0 to 3"),
        ({"memories": "nothing@1"}, "unknown memory 'nothing'"),
        ({"memories": 7}, "expected a text such as"),
        ({**LOCAL, "ridges": "learnt"}, "unknown ridge 'learnt'"),
        ({**LOCAL, "ridges": ["learned"] * 3}, "HybridConfig: ridges: ridge learned needs a local linear model"),
        ({**LOCAL, "ridges": ["learned"]}, "ridges is .*expected a rule such as 'learned', or a list with one"),
        ({"ridges": "learned"}, "HybridConfig: ridges: ridge learned needs a local linear model"),
        ({"qk_norm": "layer"}, "HybridConfig: unknown qk_norm='layer'. Choose from: None, l2, rms"),
    ],
)
def test_bad_fields(fields, message):
    refuses(message, HybridConfig, **fields)
