"""Configurations of ICLM: the paper's sizes, models of equal size, and fields without a meaning."""

from __future__ import annotations

import pytest
import torch

from regard.checks import ArgumentError
from regard.models import ICLMConfig, ICLMForCausalLM, count_parameters, match_parameters, parity_report
from regard.models.iclm.parity import transformer_like

VARIANTS = ("full", "wv", "slice")


def make(**changes):
    fields = {"vocab_size": 13, "hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 2}
    return ICLMForCausalLM(ICLMConfig(**{**fields, **changes}))


@pytest.mark.parametrize(
    ("size", "millions"),
    [
        ("small", {"full": 57.23, "wv": 50.94, "slice": 49.89, "transformer": 50.94}),
        ("medium", {"full": 72.97, "wv": 63.54, "slice": 61.96, "transformer": 63.54}),
        ("large", {"full": 529.84, "wv": 353.68, "slice": 341.09, "transformer": 353.68}),
    ],
)
def test_parameters_at_the_sizes_of_the_paper(size, millions):
    counted = {v: count_parameters(ICLMConfig.preset(size, variant=v)) for v in VARIANTS}
    config = ICLMConfig.preset(size)
    counted["transformer"] = count_parameters(transformer_like(config))
    assert {name: round(count / 1e6, 2) for name, count in counted.items()} == millions
    assert counted["wv"] - counted["transformer"] == config.hidden_size, "the start vector alone"
    assert config.variant == ("wv" if size == "large" else "full")
    assert config.vocab_size == 50257


def test_the_parity_report_says_what_can_be_equal():
    report = parity_report("small", "large")
    cells = {(row[0], row[1]): row for row in report.rows}
    assert cells["small", "full, 8 heads"][2:] == ("57.23M", "+6,291,968 (+12.35%)", "no")
    assert cells["small", "full, 2 heads of f"][4] == "yes"
    # 4 - (8 - 2) / 2 = 1 times 512, and a unit of width is 1025 parameters, a fraction of what biases make up
    narrow = next(row for (size, name), row in cells.items() if size == "small" and "feed-forward of f" in name)
    assert narrow[1] == "full, 8 heads, feed-forward of f 513 of 2048 wide"
    assert narrow[4] == "yes"
    assert not any("feed-forward of f" in name for size, name in cells if size == "large"), "no width is small enough"
    assert str(report).count("\n") == len(report.rows) + 3
    with pytest.raises(ArgumentError, match="unknown size 'huge', expected one of 'small', 'medium', 'large'"):
        parity_report("huge")


def test_matching_narrows_the_feed_forward_layer_on_f():
    config = ICLMConfig(vocab_size=64, hidden_size=32, num_hidden_layers=4, num_attention_heads=4)
    matched = match_parameters(config, transformer_like(config))
    assert matched.config.f_intermediate_size < 4 * 32
    assert matched.config.intermediate_size == 4 * 32
    assert abs(matched.gap) < 0.002


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_hidden_layers": 3}, "num_hidden_layers is 3, expected an even number"),
        ({"variant": "half"}, "variant is 'half', expected one of 'full', 'wv', 'slice'"),
        ({"start": "eos"}, "start is 'eos', expected one of 'param', 'bos'"),
        ({"f_reads": "both"}, "f_reads is 'both'"),
        ({"f_mlp": "on"}, "f_mlp is 'on', expected one of 'inline', 'side', 'none'"),
        ({"phi_mlp": "gelo"}, "unknown feed-forward 'gelo'. Did you mean 'gelu'"),
        ({"f_feed_forward": "none"}, "f_feed_forward is 'none' and f_mlp 'inline'; set f_mlp='none'"),
        ({"gd_steps": 2}, "gd_steps is 2 with expectation='none'"),
        ({"gd_steps": 3, "expectation": "exact"}, "gd_steps is 3, expected a divisor of the 2 pairs"),
        ({"norm_values": True, "expectation": "mean"}, "norm_values averages normalised embeddings"),
        ({"d_phi": 24}, "d_phi is 24 and d_f 16: .*set tie_phi=False"),
        (
            {"d_phi": 10},
            r"d_phi \(hidden_size\) is 10, expected a multiple of num_attention_heads = 2, with an even quotient",
        ),
        ({"f_attention_heads": 3}, r"d_phi \(hidden_size\) is 16, expected a multiple of f_attention_heads = 3"),
        (
            {"hidden_size": 18, "d_phi": 16, "f_attention_heads": 4, "variant": "wv"},
            "d_f is 18, expected a multiple of 4 heads",
        ),
        ({"mixers": ["softmax"] * 4}, "mixers names 4 layers and the model mixes in 2"),
        ({"phi_mixers": ["softmax"] * 3}, "phi_mixers is .* one for each of 2 layers"),
        ({"f_rope": 1}, "f_rope is 1, expected True or False"),
        ({"layer_norm_eps": 0}, "layer_norm_eps is 0, expected layer_norm_eps > 0"),
        ({"variants": "wv"}, "unknown field 'variants'. Did you mean 'variant'"),
        ({"sliding_window": 4}, "'sliding_window' is not used; every covariate attends to all earlier tokens"),
    ],
)
def test_configurations_without_a_meaning(fields, message):
    sizes = {"vocab_size": 13, "hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 2}
    with pytest.raises(ArgumentError, match=message):
        ICLMConfig(**{**sizes, **fields})


def test_d_f_is_the_hidden_size():
    config = ICLMConfig(hidden_size=32, num_attention_heads=4, d_f=48)
    assert (config.hidden_size, config.d_f, config.d_phi) == (48, 48, 32)
    model = ICLMForCausalLM(config)
    assert model.lm_head.weight.shape == (256, 48)
    assert model(torch.zeros(2, 9, dtype=torch.long)).logits.shape == (2, 9, 256)


def test_a_width_that_is_changed_later_must_be_changed_whole(tmp_path):
    ICLMConfig(hidden_size=32, num_attention_heads=2).save_pretrained(tmp_path)
    with pytest.raises(ArgumentError, match="hidden_size is 64 and d_f 32, which are one width; change both"):
        ICLMConfig.from_pretrained(tmp_path, hidden_size=64)
    changed = ICLMConfig.from_pretrained(tmp_path, hidden_size=64, d_f=64)
    assert (changed.hidden_size, changed.d_f, changed.d_phi) == (64, 64, 32)
    with pytest.raises(ArgumentError, match="f_attention_heads is 0"):
        ICLMConfig(f_attention_heads=0)


def test_the_variant_is_changed_in_the_configuration(tmp_path):
    make(variant="full").save_pretrained(tmp_path)
    with pytest.raises(
        ArgumentError, match="transformers reads variant as the name of a file; set the model's by config="
    ):
        ICLMForCausalLM.from_pretrained(tmp_path, variant="wv")
    assert ICLMConfig.from_pretrained(tmp_path, variant="wv").variant == "wv"


def test_presets_by_name():
    with pytest.raises(ArgumentError, match="unknown size 'tiny'"):
        ICLMConfig.preset("tiny")
    assert ICLMConfig.preset("large", variant="full", vocab_size=99).vocab_size == 99


def test_embeddings_cannot_stand_for_two_tables():
    model = make(tie_phi=False)
    with pytest.raises(ArgumentError, match="give input_ids; with tie_phi=False the covariates have their own table"):
        model(inputs_embeds=torch.zeros(1, 3, 16))


def test_a_second_table_cannot_be_resized_with_the_first():
    with pytest.raises(ArgumentError, match="with tie_phi=False there is a second table"):
        make(tie_phi=False).resize_token_embeddings(40)
    assert make().resize_token_embeddings(40).weight.shape[0] == 40
