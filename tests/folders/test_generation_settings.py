"""The same arguments give the same text, whatever generation settings are saved with a model or set on it."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from commands import continued
from hostile import COMMANDS, reseal, some
from transformers import GenerationConfig

from regard.training import generate_text, load_model

pytestmark = pytest.mark.timeout(120)
SETTINGS = {
    "eos": {"eos_token_id": list(range(3, 20))},
    "stop": {"stop_strings": ["e", " "]},
    "penalty": {"repetition_penalty": 50.0, "no_repeat_ngram_size": 1, "encoder_repetition_penalty": 9.0},
    "beams": {"num_beams": 4, "length_penalty": -9.0, "num_return_sequences": 2},
    "many beams": {"num_beams": 10**6},
    "time": {"max_time": 1e-9},
    "lengths": {"min_length": 300, "max_length": 3, "min_new_tokens": 250},
    "bias": {"sequence_bias": [[[5], 100.0]], "suppress_tokens": [5, 6, 7], "begin_suppress_tokens": [8]},
    "forced": {"forced_bos_token_id": 5, "forced_eos_token_id": 6, "bad_words_ids": [[7]]},
    "sampling": {"do_sample": True, "temperature": 9.0, "top_k": 1, "top_p": 0.1, "typical_p": 0.2, "min_p": 0.9},
    "drawing on": {"prompt_lookup_num_tokens": 3, "assistant_early_exit": 1, "dola_layers": "high"},
    "shape": {"return_dict_in_generate": True, "output_scores": True, "output_attentions": True},
    "cache": {"use_cache": False, "cache_implementation": "offloaded_static", "compile_config": {"mode": "x"}},
    "guidance": {"guidance_scale": 3.0, "watermarking_config": {"bias": 9.0}, "renormalize_logits": True},
    "unknown": {"wild": True, "custom_generate": "x", "input_ids": [1, 2]},
}


@pytest.mark.parametrize("which", some(SETTINGS, "eos", "penalty", "time"))
def test_settings_beside_the_model(run_folder: Path, regard: Callable, which: str) -> None:
    model, tokenizer = load_model(run_folder, call="test")
    want = continued(model, tokenizer, "line ", 12)
    path = run_folder / "model" / "generation_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **SETTINGS[which]}))
    reseal(run_folder)
    result = regard(*COMMANDS["generate"](run_folder))
    assert (result.code, result.out) == (0, want + "\n")


@pytest.mark.parametrize("which", some(SETTINGS, "eos", "beams", "lengths", "shape"))
def test_settings_on_the_model(run_folder: Path, which: str) -> None:
    model, tokenizer = load_model(run_folder, call="test")
    draw = {"max_new_tokens": 12, "temperature": 0.9, "seed": 3}
    want = continued(model, tokenizer, "line ", 12), generate_text(model, tokenizer, "line ", **draw)
    settings = GenerationConfig()
    for name, value in SETTINGS[which].items():
        setattr(settings, name, value)
    model.generation_config = settings
    greedy = generate_text(model, tokenizer, "line ", max_new_tokens=12, temperature=0.0)
    assert (greedy, generate_text(model, tokenizer, "line ", **draw)) == want
    assert model.generation_config is settings  # what the caller set stays
