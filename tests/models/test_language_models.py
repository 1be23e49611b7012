"""What every registered language model keeps: fields, counts, and one clear error for each bad input."""

import copy
import pickle
from functools import partial

import any_model
import pytest
import torch
from any_model import CASES, SIZES, T, every_case, every_model, parts_first, plain_case, text
from mistakes import refuses
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, GenerationConfig, PreTrainedConfig
from transformers.cache_utils import Cache, QuantizedLayer

from regard.models import HybridConfig, count_parameters, language_models, match_parameters

NAMES = language_models.names()
make = partial(any_model.make, dtype=torch.float32)


@every_model
@pytest.mark.parametrize("target", [60_000, 120_000])
def test_matched_to_a_number_and_to_a_model(name, target):
    config = language_models.get(name).config(**SIZES)
    before = getattr(config, config.size_field)
    found = match_parameters(config, target)
    assert getattr(config, config.size_field) == before
    assert found.parameters == sum(p.numel() for p in language_models.get(name).model(found.config).parameters())
    assert abs(found.gap) < 0.005
    again = match_parameters(config, found.config)
    assert getattr(again.config, config.size_field) == getattr(found.config, config.size_field)


def test_a_size_that_cannot_be_matched():
    config, fixed = HybridConfig(**SIZES), HybridConfig(**SIZES, feed_forward="none")
    refuses("target is a float, expected a number or a RegardConfig", match_parameters, config, 1e5)
    refuses("unknown field 'intermedate_size'", match_parameters, config, 100_000, field="intermedate_size")
    refuses("at intermediate_size=1 already, more than the target of 10", match_parameters, config, 10)
    refuses("does not depend on intermediate_size", match_parameters, fixed, 100_000)


def test_gpt2_with_rotary_positions_has_its_parameters():
    """V C + L (12 C^2 + 9 C) + 2 C: attention without biases, LayerNorm and MLP with them."""
    config = HybridConfig(**SIZES, feed_forward="gelu", norm="layer")
    assert count_parameters(config) == 29 * 16 + 4 * (12 * 16**2 + 9 * 16) + 2 * 16
    bare = HybridConfig(**SIZES, feed_forward="none", norm="layer")
    assert count_parameters(bare) == 29 * 16 + 4 * (4 * 16**2 + 2 * 16) + 2 * 16


@torch.no_grad()
@every_case
def test_saved_and_loaded_by_path_alone(case, tmp_path):
    model, tokens = make(case), text(2)
    model.save_pretrained(tmp_path)
    assert {path.suffix for path in tmp_path.iterdir()} == {".safetensors", ".json", ".py"}
    config = AutoConfig.from_pretrained(tmp_path)
    assert {**config.to_dict(), "_name_or_path": ""} == {**model.config.to_dict(), "_name_or_path": ""}
    expected = model(tokens)
    for loader in (type(model), AutoModelForCausalLM):
        again = loader.from_pretrained(tmp_path)
        assert type(again) is type(model)
        assert (again.lm_head.weight is again.model.embed_tokens.weight) == config.tie_word_embeddings
        assert torch.equal(again(tokens).logits, expected.logits)
    base = AutoModel.from_pretrained(tmp_path)
    assert type(base) is type(model.model)
    hidden = base(tokens).last_hidden_state
    assert torch.equal(hidden, model.model(tokens).last_hidden_state)
    torch.testing.assert_close(again.lm_head(hidden), expected.logits, atol=1e-5, rtol=0)


@every_model
@pytest.mark.parametrize(
    ("prompt", "mask", "message"),
    [
        (torch.zeros(1, 0, dtype=torch.long), None, "nothing to continue"),
        (torch.zeros(1, 17, dtype=torch.long), None, "has 17 tokens, more than the model's context of 16"),
        (torch.tensor([[3, 29]]), None, "holds 3 to 29, expected integers from 0 to 28"),
        (torch.tensor([[3, -1]]), None, "holds -1 to 3, expected"),
        (torch.tensor([[3, 4], [1, 2]]), torch.tensor([[1, 1], [0, 0]]), "row 1 of the prompt is all padding"),
    ],
)
def test_prompts_that_cannot_be_continued(name, prompt, mask, message):
    model = make(name, max_position_embeddings=16, pad_token_id=None)
    refuses(message, model.generate, prompt, attention_mask=mask, max_new_tokens=2)


@every_model
@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"vocab_size": 0}, "vocab_size is 0, expected a positive integer"),
        ({"num_attention_heads": 5}, "heads"),
        ({"mixers": "sofmax"}, "Did you mean 'softmax'"),
        ({"mixers": ["softmax"] * 7}, "mixers names 7 layers"),
        ({"initializer_range": 0.0}, "initializer_range"),
        ({"pad_token_id": 29}, "pad_token_id is 29, expected None or a token from 0 to 28"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings is 1"),
    ],
)
def test_fields_out_of_range(name, fields, message):
    refuses(message, language_models.get(name).config, **{**SIZES, **fields})


@plain_case
def test_a_row_of_padding_in_a_batch_changes_nothing(case):
    model = make(case)
    tokens = torch.stack([torch.arange(9), torch.arange(9) + 9])
    mask = torch.ones(2, 9, dtype=torch.bool)
    mask[1] = False
    both = model(tokens, attention_mask=mask).logits
    assert both.isfinite().all()
    torch.testing.assert_close(both[:1], model(tokens[:1]).logits, atol=1e-5, rtol=0)
    out = model.train()(tokens, attention_mask=mask, labels=tokens)
    out.loss.backward()
    alone = make(case).train()
    loss = alone(tokens[:1], labels=tokens[:1]).loss
    loss.backward()
    torch.testing.assert_close(out.loss, loss, atol=1e-5, rtol=0)
    # relative too: the gradient of a number of a head is a sum over all tokens, of about one half here
    torch.testing.assert_close(any_model.gradients(model), any_model.gradients(alone), atol=1e-5, rtol=1e-4)


def damage_file(folder, kind):
    path = folder / "model.safetensors"
    tensors = load_file(path)
    damage(tensors, kind)
    save_file(tensors, path, metadata={"format": "pt"})


def damage(tensors, kind):
    name = next(key for key in tensors if key.endswith("weight") and tensors[key].dim() == 2)
    if kind == "missing":
        del tensors[name]
    elif kind == "unexpected":
        tensors["more.weight"] = torch.zeros(2)
    elif kind == "mismatched":
        tensors[name] = torch.zeros(3, 5)
    else:
        tensors[name][0, 0] = float("nan")


@every_model
@pytest.mark.parametrize("kind", ["missing", "unexpected", "mismatched", "not finite"])
def test_damaged_checkpoints_are_one_clear_error(name, kind, tmp_path):
    make(name).save_pretrained(tmp_path)
    damage_file(tmp_path, kind)
    for load in (language_models.get(name).model, AutoModelForCausalLM):
        refuses(rf"do not fit their config \({kind}", load.from_pretrained, tmp_path)
    if kind != "not finite":
        how = {"output_loading_info": True, "ignore_mismatched_sizes": True}
        assert language_models.get(name).model.from_pretrained(tmp_path, **how)[1][f"{kind}_keys"]


@torch.no_grad()
@pytest.mark.parametrize("tied", [True, False])
@every_model
def test_a_model_from_a_configuration_and_tensors(name, tied):
    """As programs do that hold the tensors already: `from_pretrained(None, config=, state_dict=)`."""
    model, tokens = make(name, tie_word_embeddings=tied), torch.arange(5)[None]
    given = {"config": model.config, "state_dict": model.state_dict()}
    assert torch.equal(type(model).from_pretrained(None, **given)(tokens).logits, model(tokens).logits)
    base = type(model.model).from_pretrained(None, **given)
    assert torch.equal(base(tokens).last_hidden_state, model.model(tokens).last_hidden_state)
    for kind in ("missing", "unexpected", "mismatched", "not finite"):
        tensors = {path: tensor.clone() for path, tensor in model.state_dict().items()}
        if tied:
            del tensors["lm_head.weight"]
        damage(tensors, kind)
        wrong, load = {**given, "state_dict": tensors}, type(model).from_pretrained
        refuses(rf"the tensors of state_dict do not fit their config \({kind}", load, None, **wrong)
    for name, value in given.items():
        refuses("without a path give both config and state_dict", load, None, **{name: value})
    for wrong in ({"config": {"vocab_size": 29}}, {"config": PreTrainedConfig()}, {"state_dict": [1]},
                  {"state_dict": {"lm_head.weight": 1}}):  # fmt: skip
        refuses(rf"from_pretrained: {next(iter(wrong))} is .* expected a ", load, None, **{**given, **wrong})


@every_model
def test_a_checkpoint_of_another_model(name, tmp_path):
    make(next(other for other in NAMES if other != name)).save_pretrained(tmp_path)
    refuses("is of model type 'regard_", language_models.get(name).model.from_pretrained, tmp_path)


@every_model
def test_what_counts_as_padding_in_a_prompt_is_what_transformers_infers(name):
    plain = make(name)
    rows = torch.tensor([[5, 6], [3, 3]])
    for settings in ({"pad_token_id": 3}, {"generation_config": GenerationConfig(pad_token_id=3)}):
        refuses("row 1 of the prompt is all padding", plain.generate, rows, max_new_tokens=2, **settings)
    # a pad that also ends texts, as in GPT-2, may begin one
    ended = make(name, pad_token_id=3, eos_token_id=3, bos_token_id=3)
    assert ended.generate(torch.tensor([[3]]), max_new_tokens=2, min_new_tokens=2).shape == (1, 3)
    assert plain.generate(generation_config=GenerationConfig(bos_token_id=1, max_new_tokens=2))[0, 0] == 1
    refuses("there is nothing to continue", plain.generate, max_new_tokens=2)


@every_model
def test_a_cache_that_another_model_filled(name):
    deep, tokens = make(name, num_hidden_layers=6), torch.arange(5)[None]
    refuses("cache", make(name), tokens, past_key_values=deep(tokens).past_key_values)


@parts_first
def test_a_cache_of_another_batch(case):
    model, tokens = make(case), text(3, 6)
    cache = model(tokens[:2, :5]).past_key_values
    refuses(r"2 (sequences|rows)|holds .*\[2, ", model, tokens[:, 5:], past_key_values=cache)


def test_a_quantised_cache_may_hold_no_keys_as_they_are():
    class Layer(QuantizedLayer):
        def _quantize(self, tensor, axis):
            return tensor.clone()

        def _dequantize(self, q_tensor):
            return q_tensor

    model, tokens = make("transformer"), text(2, 6)
    cache = Cache(layers=[Layer(residual_length=2) for _ in model.model.layers])
    found = [model(part, past_key_values=cache).logits for part in tokens.split([2, 1, 1, 1, 1], 1)]
    torch.testing.assert_close(torch.cat(found, 1), model(tokens).logits)


@every_model
def test_leaving_layers_out_is_refused_and_changes_no_configuration(name):
    model = make(name)
    refuses("assistant_early_exit is not supported", model.generate, text(), assistant_early_exit=1)
    assert model.config.num_hidden_layers == SIZES["num_hidden_layers"]


@every_model
def test_a_changed_field_excuses_no_tensor_that_the_file_should_hold(name, tmp_path):
    make(name).save_pretrained(tmp_path)
    model = language_models.get(name).model
    assert model.from_pretrained(tmp_path, max_position_embeddings=77).config.max_position_embeddings == 77
    refuses(r"missing keys: lm_head\.weight", model.from_pretrained, tmp_path, tie_word_embeddings=False)
    damage_file(tmp_path, "missing")
    for change in ({"use_cache": False}, {"max_position_embeddings": 77}):
        refuses(r"do not fit their config \(missing keys", model.from_pretrained, tmp_path, **change)


def test_a_changed_sentence_may_add_and_drop_what_it_learns(tmp_path):
    make("memory-mosaic", mixers="softmax").save_pretrained(tmp_path)
    model = language_models.get("memory-mosaic").model
    fixed = model.from_pretrained(tmp_path, mixers="epanechnikov*fixed(h=1.2)*cosine")
    assert any(path.endswith("log_h") for path, _ in fixed.named_parameters())
    assert torch.equal(fixed.model.embed_tokens.weight, model.from_pretrained(tmp_path).model.embed_tokens.weight)


@every_model
def test_a_misspelt_argument_is_not_lost(name):
    model, tokens = make(name), torch.arange(6)[None]
    refuses("'attention_masks'. Did you mean 'attention_mask'", model, tokens, attention_masks=tokens)
    model(tokens, labels=tokens, num_items_in_batch=torch.tensor(3))


@every_model
def test_configurations_are_copied_and_written(name, tmp_path):
    config = language_models.get(name).config(**{**SIZES, "mixers": "biweight", "vocab_size": 31})
    kind = type(config)
    expected = config.to_dict()
    config.save_pretrained(tmp_path)
    for again in (
        copy.deepcopy(config),
        pickle.loads(pickle.dumps(config)),
        kind.from_dict(config.to_dict()),
        kind.from_dict(config.to_diff_dict()),
        kind.from_pretrained(tmp_path),
    ):
        assert type(again) is kind
        found = again.to_dict()
        for told in (found, expected):
            told.pop("_name_or_path", None)
        assert found == expected
        again.normalise()
        assert {key: again.to_dict()[key] for key in expected} == expected, "normalise is not idempotent"
    assert kind.from_pretrained(tmp_path, mixers="relumax").layer_specs()[0] != config.layer_specs()[0]


@every_model
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "either input_ids or inputs_embeds"),
        ({"input_ids": torch.tensor([[1, 29]])}, "expected integers from 0 to 28"),
        ({"input_ids": torch.tensor([1, 2])}, r"expected torch.int64 tokens \[B, T\]"),
        ({"input_ids": torch.ones(1, 0, dtype=torch.long)}, "T >= 1"),
        ({"input_ids": torch.ones(1, 2)}, "expected torch.int64"),
        ({"input_ids": text(), "attention_mask": torch.ones(1, 3, dtype=torch.long)}, "attention_mask has shape"),
        ({"input_ids": text(), "attention_mask": torch.zeros(1, T)}, r"write mask == 0 for a mask that is added"),
        ({"input_ids": text(), "attention_mask": torch.ones(1, T) * 2}, r"expected 0 and 1, with a 1 in every row"),
        ({"input_ids": text(), "position_ids": torch.zeros(3, T, dtype=torch.long)}, "position_ids has shape"),
        ({"input_ids": text(), "past_key_values": [1]}, r"cache is \[1\] \(list\)"),
        ({"input_ids": text(), "attention_mask": torch.ones(T, dtype=torch.long)}, r"expected \[1, 13\]"),
        ({"input_ids": text(), "attention_mask": torch.ones(1, 1, T, T, dtype=torch.bool)}, r"expected \[1, 13\]"),
        ({"input_ids": text(), "attention_mask": torch.ones(2, T, dtype=torch.bool)}, r"expected \[1, 13\]"),
        ({"input_ids": text(), "attention_mask": [[1] * T]}, r"attention_mask is \[\[1, .*expected booleans or"),
        ({"input_ids": text(), "labels": text(1, 4)}, "labels has shape"),
        ({"input_ids": text(2, 1), "labels": text(2, 1)}, "labels of one position leave nothing to predict"),
        ({"inputs_embeds": torch.ones(1, 4, 3, dtype=torch.float64)}, "inputs_embeds is a torch.float64 tensor"),
    ],
)
def test_one_clear_line_for_bad_input(name, arguments, message):
    model = any_model.make(name)
    assert type(model).__name__ in refuses(message, model, **arguments)


SHARED: dict[str, object] = {
    "max_position_embeddings": 77, "initializer_range": 0.03, "tie_word_embeddings": False, "use_cache": False,
    "pad_token_id": 1, "bos_token_id": 2, "eos_token_id": 3,
}  # fmt: skip
NO_DEFAULT: dict[str, dict[str, object]] = {
    "transformer": {
        "mixers": ["local-linear", "gated-deltanet"], "num_key_value_heads": 1, "head_dim": 12,
        "intermediate_size": 24, "feed_forward": "gelu", "norm": "layer", "window": [5, None], "training_window": 4,
        "mixer_options": {"gated-deltanet": {"num_heads": 2}}, "training_window_share": 0.5, "output_gate": True,
        "training_window_seed": 3, "rotary_share": 0.5, "memories": "pkm@1", "memory_place": "after-mixer",
        "memory_options": {"pkm": {"sub_keys": 6, "top_k": 4}}, "temperatures": ["log", "fixed"],
        "ridges": ["learned", "fixed"], "qk_norm": "rms", "exclude_self": True, "rope_theta": 500.0,
        "rms_norm_eps": 1e-4,
    },
    "memory-mosaic": {
        "mixers": ["epanechnikov*fixed(h=1.2)*cosine", "relumax"], "persistent": "biweight", "persistent_copies": 2,
        "persistent_keys": "shared", "wiring": "parallel", "leaky": "average", "look_ahead": "convex",
        "key_eps": 1e-3, "scale_limit": 3.0, "persistent_scale_limit": 2.0, "learned": ["margin"],
        "bandwidth_start": "spec", "uniform_gradient": "hard", "bias": True, "norm_eps": 1e-4,
        "scale_logits": False, "initializer": "gpt2", "persistent_slots": 7,
    },
    "iclm": {
        "mixers": ["biweight", "linear"], "phi_mixers": ["relumax", "biweight"], "variant": "wv",
        "f_attention_heads": 1, "start": "bos", "f_reads": "pre", "phi_mlp": "swiglu", "f_mlp": "side",
        "f_feed_forward": "swiglu", "intermediate_size": 9, "f_intermediate_size": 11, "f_rope": False,
        "f_average": False, "expectation": "exact", "gd_steps": 2, "d_phi": 16, "d_f": 10, "hidden_size": 10,
        "tie_phi": False, "rope_theta": 500.0, "layer_norm_eps": 1e-3,
    },
}  # fmt: skip


@torch.no_grad()
@pytest.mark.parametrize("name", NO_DEFAULT)
def test_saved_and_loaded_with_no_field_at_its_default(name, tmp_path):
    fields, plain = {**SHARED, **NO_DEFAULT[name]}, language_models.get(name).config()
    model = any_model.make(name, **{"num_hidden_layers": 4 if name == "iclm" else 2, **fields})
    assert all(getattr(plain, each) != getattr(model.config, each) for each in fields)
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path, dtype=torch.float64)
    assert all(getattr(again.config, each) == getattr(model.config, each) for each in fields)
    torch.testing.assert_close(again(text(2, 7)).logits, model(text(2, 7)).logits, atol=1e-6, rtol=0)


@pytest.fixture
def empty_memory_is_nan():
    torch.use_deterministic_algorithms(True)  # torch then fills new tensors with NaN
    yield
    torch.use_deterministic_algorithms(False)


@every_case
@pytest.mark.usefixtures("empty_memory_is_nan")
def test_missing_tensors_get_initial_values(case):
    kind, fields = CASES[case]
    entry = language_models.get(kind)
    config = entry.config(**{**SIZES, **fields})
    new, how = entry.model(config).state_dict(), {"state_dict": {}, "output_loading_info": True}
    loaded, report = entry.model.from_pretrained(None, config=config, **how)
    assert len(report["missing_keys"]) >= len(new) - 1  # the output matrix is the embedding
    for name, value in loaded.state_dict().items():
        assert value.isfinite().all(), name
        if new[name].unique().numel() == 1:
            assert torch.equal(value, new[name]), name
        elif value.numel() >= 64:
            assert 0.5 < value.double().square().mean() / new[name].double().square().mean() < 2, name
