"""ICLM by itself: configurations, sizes and initial weights, what can be seen inside it, and its cache.
`test_iclm_oracle.py` compares it with its equations."""

import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from any_model import CASES, SIZES, T, in_chunks, make, padded, text
from mistakes import refuses
from transformers import DynamicCache

from regard.inspect import capture, run_with_hooks
from regard.models import ICLMConfig, ICLMForCausalLM, count_parameters, match_parameters, parity_report
from regard.models.iclm.parity import transformer_like
from regard.nn import FunctionalGradient, rotary_angles
from regard.nn.functional_gradient import Pairs

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "iclm.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("size", "millions"),
    [
        ("small", {"full": 57.23, "wv": 50.94, "slice": 49.89, "transformer": 50.94}),
        ("medium", {"full": 72.97, "wv": 63.54, "slice": 61.96, "transformer": 63.54}),
        ("large", {"full": 529.84, "wv": 353.68, "slice": 341.09, "transformer": 353.68}),
    ],
)
def test_parameters_at_the_sizes_of_the_paper(size, millions):
    counted = {v: count_parameters(ICLMConfig.preset(size, variant=v)) for v in ("full", "wv", "slice")}
    config = ICLMConfig.preset(size)
    counted["transformer"] = count_parameters(transformer_like(config))
    assert {name: round(count / 1e6, 2) for name, count in counted.items()} == millions
    assert counted["wv"] - counted["transformer"] == config.hidden_size, "the start vector alone"
    assert config.variant == ("wv" if size == "large" else "full")
    assert config.vocab_size == 50257
    assert ICLMConfig.preset(size, variant="full", vocab_size=99).vocab_size == 99


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
    assert " ".join(str(parity_report()).split()) in " ".join(PAGE.split())  # the page wraps its lines
    refuses("unknown size 'huge', expected one of 'small', 'medium', 'large'", parity_report, "huge")


@torch.no_grad()
def test_a_block_takes_its_arguments_by_name():
    block, phi = make("iclm").model.phi[0], torch.randn(2, T, SIZES["hidden_size"]).double()
    head_dim = SIZES["hidden_size"] // SIZES["num_attention_heads"]
    angles = rotary_angles(torch.arange(T)[None], head_dim, dtype=torch.float64)
    out, weights = block(phi, angles=angles, mask=None, output_attentions=True)
    assert out.shape == phi.shape
    assert weights.shape[-2:] == (T, T)


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
        ({"d_phi": 10}, r"d_phi \(hidden_size\) is 10, expected a multiple of num_attention_heads = 2, with an even"),
        ({"f_attention_heads": 3}, r"d_phi \(hidden_size\) is 16, expected a multiple of f_attention_heads = 3"),
        ({"hidden_size": 18, "d_phi": 16, "f_attention_heads": 4, "variant": "wv"}, "d_f is 18, expected .* of 4 he"),
        ({"mixers": ["softmax"] * 4}, "mixers names 4 layers and the model mixes in 2"),
        ({"phi_mixers": ["softmax"] * 3}, "phi_mixers is .* one for each of 2 layers"),
        ({"f_rope": 1}, "f_rope is 1, expected True or False"),
        ({"layer_norm_eps": 0}, "layer_norm_eps is 0, expected layer_norm_eps > 0"),
        ({"f_attention_heads": 0}, "f_attention_heads is 0"),
        ({"sliding_window": 4}, "'sliding_window' is not used; every covariate attends to all earlier tokens"),
    ],
)
def test_configurations_without_a_meaning(fields, message):
    refuses(message, ICLMConfig, **{**SIZES, **fields})


def test_d_f_is_the_hidden_size():
    config = ICLMConfig(hidden_size=32, num_attention_heads=4, d_f=48)
    assert (config.hidden_size, config.d_f, config.d_phi) == (48, 48, 32)
    model = ICLMForCausalLM(config)
    assert model.lm_head.weight.shape == (256, 48)
    assert model(torch.zeros(2, 9, dtype=torch.long)).logits.shape == (2, 9, 256)


def test_a_width_that_is_changed_later_must_be_changed_whole(tmp_path):
    ICLMConfig(hidden_size=32, num_attention_heads=2).save_pretrained(tmp_path)
    refuses("hidden_size is 64 and d_f 32, .*; change both", ICLMConfig.from_pretrained, tmp_path, hidden_size=64)
    changed = ICLMConfig.from_pretrained(tmp_path, hidden_size=64, d_f=64)
    assert (changed.hidden_size, changed.d_f, changed.d_phi) == (64, 64, 32)


def test_the_variant_is_changed_in_the_configuration(tmp_path):
    make("iclm", variant="full").save_pretrained(tmp_path)
    refuses("the name of a file; set the model's by config=", ICLMForCausalLM.from_pretrained, tmp_path, variant="wv")
    assert ICLMConfig.from_pretrained(tmp_path, variant="wv").variant == "wv"


def test_two_tables():
    model = make("iclm", tie_phi=False)
    refuses("give input_ids; with tie_phi=False .* own table", model, inputs_embeds=torch.zeros(1, 3, 16).double())
    refuses("with tie_phi=False there is a second table", model.resize_token_embeddings, 40)
    assert make("iclm").resize_token_embeddings(40).weight.shape[0] == 40


def test_initial_weights():
    model = ICLMForCausalLM(ICLMConfig(vocab_size=400, hidden_size=256, initializer_range=0.05))
    for weight in (model.model.start.weight, model.model.embed_tokens.weight, model.model.f[0].attn.o_proj.weight):
        assert weight.std().item() == pytest.approx(0.05, rel=0.15)
    fresh = ICLMForCausalLM(ICLMConfig(vocab_size=400))
    ids = torch.randint(400, (4, 32), generator=torch.Generator().manual_seed(0))
    assert fresh(ids, labels=ids).loss.item() == pytest.approx(math.log(400), rel=0.02)


@torch.no_grad()
def test_what_hooks_return_is_used():
    model, ids = make("iclm", f_mlp="none"), text(2, 9)
    bias = model.model.ln_final.bias @ model.lm_head.weight.T
    silent = run_with_hooks(model, ids, [(f"f.{i}.attn.hook_pattern", lambda w, hook: w * 0) for i in (0, 1)]).logits
    torch.testing.assert_close(silent, bias.expand_as(silent), atol=1e-12, rtol=0)
    halved = run_with_hooks(model, ids, [("ln_final.hook_scale", lambda s, hook: s * 2)]).logits
    torch.testing.assert_close(halved - bias, (model(ids).logits - bias) / 2, atol=1e-12, rtol=0)


def test_capture_sees_covariate_layers_then_f_layers():
    model, ids = make("iclm"), text(2, 9)
    weights = model(ids, output_attentions=True).attentions
    with capture(model, weights=True) as seen, torch.no_grad():
        model(ids)
    assert sorted(seen.layers) == [0, 1, 2, 3]
    assert [tuple(seen.layers[layer].weights.shape[1:]) for layer in range(4)] == [(2, 10, 10)] * 2 + [(2, 9, 9)] * 2
    for layer, w in enumerate(weights):  # the start slot is no token
        torch.testing.assert_close(seen.layers[layer].weights[..., -9:, -9:], w.detach(), atol=1e-12, rtol=0)


def test_a_cache_holds_one_document():
    layer, ids = FunctionalGradient(16, 8, 2), torch.tensor([[0] * 5 + [1] + [2] * 6])
    pairs, cache = Pairs.of(ids >= 0, 12, ids), SimpleNamespace(pending=print, extend=print)
    covariates, values = torch.randn(1, 12, 16), torch.randn(1, 11, 8)
    refuses("a cache was given", layer, covariates, values, pairs=pairs, cache=cache)
    refuses("a cache holds one document", Pairs.of, torch.ones(1, 14, dtype=torch.bool), 12, ids)


@torch.no_grad()
@pytest.mark.parametrize("case", [case for case in CASES if case.startswith("iclm")])
def test_tokens_can_be_taken_back(case):
    model, (tokens, mask) = make(case), padded()
    whole = model(tokens, attention_mask=mask, use_cache=False).logits
    for kept in (1, 3, 8):
        # other tokens at the end, forgotten again
        other = torch.cat((tokens[:, :kept], tokens[:, kept:].flip(1)), 1)[:, : kept + 3]
        _, cache = in_chunks(model, other, [kept, 2, 1], mask[:, : kept + 3])
        cache.crop(-3)
        assert cache.get_seq_length() == kept
        rest = model(tokens[:, kept:], attention_mask=mask, past_key_values=cache).logits
        real = mask[:, kept:].bool()
        torch.testing.assert_close(rest[real], whole[:, kept:][real], atol=1e-9, rtol=0)
    cache.crop(-T)
    assert cache.get_seq_length() == 0
    again, _ = in_chunks(model, tokens, [T], mask, cache)
    torch.testing.assert_close(again[mask.bool()], whole[mask.bool()], atol=1e-9, rtol=0)
    refuses(r"ICLMCache\.crop: got 2, expected a number <= 0", cache.crop, 2)


def test_what_is_kept():
    """Values once for all f blocks, but for wv; a key a pair and the one that waits."""
    number = 3 * 4  # rows of the batch, bytes of a float32
    for changes, blocks, shared in (
        ({}, [(11 + 1) * 16] * 2, 11 * 16),
        ({"variant": "wv"}, [(11 + 1) * 16 + 11 * 16] * 2, 11 * 16),
        ({"start": "bos"}, [(10 + 1) * 16] * 2, 10 * 16),
        ({"expectation": "exact", "gd_steps": 2}, [(11 + 1) * 16] * 2, 11 * 16 + (11 + 1) * 16),
    ):
        _, cache = in_chunks(make("iclm", dtype=torch.float32, **changes), text(3, 11), [4, 7])
        assert [cache.function_layer(i).bytes for i in range(2)] == [n * number for n in blocks]
        assert cache.shared.bytes == shared * number
        slots = 11 if changes == {"start": "bos"} else 12
        assert [layer.keys.shape[2] for layer in cache.layers[:2]] == [slots] * 2


def test_caches_that_do_not_fit():
    model, tokens = make("iclm"), text(3)
    refuses("cache is a DynamicCache, which cannot hold keys that wait", model, tokens, past_key_values=DynamicCache())
    cache, filled = make("iclm", num_hidden_layers=2).model.new_cache(), model(tokens).past_key_values
    refuses("is for 1 covariate and 1 f blocks, the model has 2 and 2", model, tokens, past_key_values=cache)
    refuses("cache has 3 sequences, but the input has 1", model, tokens[:1], past_key_values=filled)
    refuses("keys wait for their values here; use extend", filled.update, *torch.zeros(2, 1, 2, 3, 4), 2)


def test_a_value_is_projected_once():
    model, seen = make("iclm", variant="wv"), []
    handle = model.model.f[0].attn.v_proj.register_forward_hook(lambda module, inputs, out: seen.append(out.shape[1]))
    model.generate(text(3, 11), max_new_tokens=5, min_new_tokens=5, do_sample=False)
    handle.remove()
    assert seen == [11, 1, 1, 1, 1]
