"""HybridConfig: what it keeps, what it refuses."""

from __future__ import annotations

import json

import pytest

from regard import Spec
from regard.checks import ArgumentError
from regard.models import HybridConfig, HybridForCausalLM


def test_mixers_become_one_normal_text_per_layer():
    assert HybridConfig(mixers="biweight", num_hidden_layers=2).mixers == ["biweight", "biweight"]
    mixed = HybridConfig(mixers=[Spec.parse("relumax"), " softmax "], num_hidden_layers=2)
    assert mixed.mixers == ["relumax", "softmax"]
    assert mixed.layer_specs() == [Spec.parse("relumax"), Spec.parse("softmax")]


def test_json_round_trip(tmp_path):
    config = HybridConfig(
        vocab_size=77,
        mixers=["softmax", "biweight", "shift-cosine"],
        num_hidden_layers=3,
        window=5,
        temperatures=["log", "fixed(value=2)", "fixed"],
        exclude_self=True,
        eos_token_id=[3, 4],
    )
    config.save_pretrained(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["config.json"]
    assert json.loads((tmp_path / "config.json").read_text())["mixers"] == [
        "softmax",
        "biweight",
        "shift-cosine",
    ]
    again = HybridConfig.from_pretrained(tmp_path)
    for name in HybridConfig.__annotations__:
        assert getattr(again, name) == getattr(config, name), name


def test_defaults_that_follow_from_others():
    config = HybridConfig(hidden_size=100, num_attention_heads=5)
    assert (config.head_dim, config.num_key_value_heads, config.intermediate_size) == (20, 5, 272)


@pytest.mark.parametrize(("former", "now"), [(True, "learned"), (False, "fixed")])
def test_files_from_before_there_were_temperatures(tmp_path, former, now):
    HybridConfig(num_hidden_layers=2).save_pretrained(tmp_path)
    fields = json.loads((tmp_path / "config.json").read_text())
    del fields["temperatures"], fields["share_query_key"], fields["exclude_self"]
    (tmp_path / "config.json").write_text(json.dumps({**fields, "learn_temperature": former}))
    config = HybridConfig.from_pretrained(tmp_path)
    assert config.temperatures == [now, now]
    assert (config.share_query_key, config.exclude_self) == (False, False)


def test_the_temperature_of_attention_is_not_that_of_sampling():
    config = HybridConfig(num_hidden_layers=1, hidden_size=8, temperatures="log")
    assert config.temperatures == ["log"]
    assert HybridForCausalLM(config).generation_config.temperature is None


def test_fields_changed_while_loading_are_checked_too(tmp_path):
    HybridConfig(hidden_size=32).save_pretrained(tmp_path)
    config = HybridConfig.from_pretrained(tmp_path, mixers="relumax")
    assert HybridForCausalLM(config).config.mixers == ["relumax"] * 4
    with pytest.raises(ArgumentError, match="mixers names 4 layers and num_hidden_layers is 3"):
        HybridForCausalLM(HybridConfig.from_pretrained(tmp_path, num_hidden_layers=3))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"mixers": "biwieght"}, "Did you mean 'biweight'"),
        ({"mixers": ["softmax"]}, "mixers names 1 layers and num_hidden_layers is 4"),
        ({"mixers": 3}, "mixers is 3, expected a spec such as 'biweight'"),
        ({"mixers": ["softmax", None, "softmax", "softmax"]}, "expected a spec such as 'biweight'"),
        ({"hidden_size": 30}, "hidden_size 30 is not a multiple of 4 heads"),
        ({"num_key_value_heads": 3}, r"4 query heads \(num_attention_heads\) do not divide among 3"),
        ({"head_dim": 7}, "head_dim is 7, expected an even number"),
        ({"hidden_size": 0}, "hidden_size is 0, expected a positive integer"),
        ({"vocab_size": "64"}, "vocab_size is '64', expected a positive integer"),
        ({"num_hidden_layers": True}, "num_hidden_layers is True, expected a positive integer"),
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
        ({"pad_token_id": 256}, "pad_token_id is 256, expected None or a token from 0 to 255"),
        ({"eos_token_id": [1, -1]}, "expected None or a token from 0 to 255"),
        ({"mixer": "biweight"}, "unknown field 'mixer'. Did you mean 'mixers'"),
        ({"dropout": 0.1}, "unknown field 'dropout'. Choose from: .*vocab_size"),
        (
            {"rope_scaling": {"factor": 2}},
            "'rope_scaling' is not used; rotary positions have rope_theta only",
        ),
        ({"layer_types": ["linear_attention"] * 4}, "'layer_types' is not used; mixers sets"),
    ],
)
def test_bad_fields(fields, message):
    with pytest.raises(ArgumentError, match=message):
        HybridConfig(**fields)
