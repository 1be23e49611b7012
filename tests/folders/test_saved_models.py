"""Models of transformers itself, read by `load_model`: what AutoModelForCausalLM reads, without the folder's say."""

from pathlib import Path

import pytest
import torch
from any_model import make
from hostile import change_json
from mistakes import refuses
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    MambaConfig,
    MixtralConfig,
    PreTrainedConfig,
    Qwen3Config,
)

from regard.cli import main
from regard.models import language_models
from regard.training import char_tokenizer, load_model

TOKENIZER = char_tokenizer("abcdefgh ")
SIZES = {"vocab_size": 12, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
CONFIGS = {
    "llama": LlamaConfig(**SIZES, intermediate_size=32),
    "half": LlamaConfig(**SIZES, intermediate_size=32, dtype="bfloat16", tie_word_embeddings=True),
    "qwen3": Qwen3Config(**SIZES, intermediate_size=32, num_key_value_heads=1, head_dim=8),
    "gpt2": GPT2Config(vocab_size=12, n_embd=16, n_layer=2, n_head=2, n_positions=64),
    "experts": MixtralConfig(**SIZES, intermediate_size=32, num_local_experts=4, num_key_value_heads=1),
}


def save(config: PreTrainedConfig, folder: Path, **options: object) -> None:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=config.dtype).save_pretrained(folder, **options)
    TOKENIZER.save_pretrained(folder)


@pytest.mark.parametrize("options", [{}, {"max_shard_size": 2000}], ids=["one file", "shards"])
@pytest.mark.parametrize("name", CONFIGS)
def test_models_of_transformers(name: str, options: dict, tmp_path: Path) -> None:
    save(CONFIGS[name], tmp_path, **options)
    assert (tmp_path / "model.safetensors.index.json").exists() == bool(options)
    ours, _ = load_model(tmp_path, call="test")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, trust_remote_code=False)
    assert type(ours) is type(theirs)
    assert ours.dtype == theirs.dtype
    assert not ours.training
    expected = theirs.state_dict()
    assert ours.state_dict().keys() == expected.keys()
    assert all(torch.equal(tensor, expected[key]) for key, tensor in ours.state_dict().items())
    tokens = torch.tensor([[3, 4, 5, 6]])
    torch.testing.assert_close(ours(tokens).logits, theirs(tokens).logits)


def test_a_model_without_a_longest_context_needs_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(MambaConfig(vocab_size=12, hidden_size=16, num_hidden_layers=1, state_size=4), tmp_path)
    text = tmp_path / "text.txt"
    text.write_text("abc " * 20)
    assert main(["eval", str(tmp_path), "--data", str(text)]) == 2
    assert "set one with --context" in capsys.readouterr().err
    assert main(["eval", str(tmp_path), "--data", str(text), "--context", "8"]) == 0


ANY = [
    ({"vocab_size": 10**9}, "its config describes a model of"),
    ({"vocab_size": 10**18}, "cannot load the model in"),
    ({"vocab_size": 10**30}, "vocab_size is a number of 100 bits"),
    ({"vocab_size": 5}, "mismatched keys"),
    ({"hidden_size": 2**20}, "its config describes a model of"),
    ({"intermediate_size": 10**9}, "its config describes a model of"),
    ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000, more layers than its weights hold"),
    ({"num_attention_heads": 10**9}, "cannot load the model in"),
    ({"dtype": "load"}, "dtype is 'load', expected one of float64, float32, float16, bfloat16"),
    ({"quantization_config": {"quant_method": "gptq"}}, "quantised weights are not supported"),
    ({"to_dict": 3}, "'to_dict' is not a field of a configuration"),
    ({"model_type": "frobnicator"}, "has type 'frobnicator', which is unknown; expected a type of"),
    ({"model_type": "t5"}, "has type 't5', which is not a causal language model"),
    ({"model_type": None}, "has type None"),
]
LLAMA = [
    ({"num_hidden_layers": "2"}, "cannot load the model in"),
    ({"rope_parameters": {"rope_type": "wild"}}, "cannot load the model in"),
    ({"rope_parameters": {"num_hidden_layers": 10**9}}, "more layers than its weights hold"),
]
OURS = [
    ({"hidden_size": "wide"}, "hidden_size is 'wide', expected a positive integer"),
    ({"max_position_embeddings": "long"}, "max_position_embeddings is 'long', expected a positive integer"),
    ({"mixers": "biwait"}, "'biwait'"),
]
WRONG = {"llama": ANY + LLAMA, **dict.fromkeys(language_models.names(), OURS), "transformer": ANY + OURS}


@pytest.mark.parametrize(("name", "fields", "reason"), [(name, *row) for name, rows in WRONG.items() for row in rows])
def test_configs_that_do_not_fit(name: str, fields: dict, reason: str, tmp_path: Path) -> None:
    """Sizes beyond the weights allocate nothing."""
    save(CONFIGS["llama"], tmp_path) if name == "llama" else make(name).save_pretrained(tmp_path)
    change_json(tmp_path / "config.json", fields)
    refuses(reason, load_model, tmp_path, call="test")


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn])
def test_weights_that_would_be_cast(dtype: torch.dtype, tmp_path: Path) -> None:
    save(CONFIGS["llama"], tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    save_file({**tensors, "lm_head.weight": tensors["lm_head.weight"].to(dtype)}, file, {"format": "pt"})
    refuses(r"lm_head.weight is saved as .*, expected one of F64, F32, F16, BF16", load_model, tmp_path, call="test")
