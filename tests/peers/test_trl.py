"""TRL packs documents into rows, lays a batch side by side without padding, or pads it. Every document has the loss
that it has alone, step after step, in all models of ours and in stock models with regard attention. TRL computes
`lm_head(base_model(...))` in a loss of its own. Then SFTTrainer with gradient checkpointing, and DPOTrainer."""

import math
from pathlib import Path

import pytest
import torch
from any_model import SIZES, make, text
from packed import descended
from small_words import tokenizer
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from regard.integrations.transformers import register
from regard.models import language_models

trl = pytest.importorskip("trl", reason="the extra `peers` brings it")
datasets = pytest.importorskip("datasets", reason="trl brings it")
pytestmark = pytest.mark.peers
LENGTHS = (11, 7, 5, 11, 1, 2)
RATE = 0.1
WAYS = {
    "packing": {"packing": True, "max_length": 16},
    "packing-recomputed": {"packing": True, "max_length": 16, "gradient_checkpointing": True},
    "padding-free": {"padding_free": True, "max_length": None, "pad_to_multiple_of": 8},
    "padded": {},
}
NAMES = [*language_models.names(), "llama", "gpt2"]
CASES = [(name, way) for name in NAMES for way in WAYS if (name, way) != ("gpt2", "padded")]
"""For a padded stock GPT-2 the trainer divides by the number of all tokens, first ones included."""


def model_of(name):
    if name in language_models.names():
        return make(name, "biweight", torch.float32).train()
    torch.manual_seed(0)
    register()
    kinds = {
        "llama": (LlamaForCausalLM, LlamaConfig(**SIZES, intermediate_size=24, initializer_range=0.3)),
        "gpt2": (GPT2LMHeadModel, GPT2Config(**SIZES, attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0)),
    }
    kind, config = kinds[name]
    return kind._from_config(config, attn_implementation="regard_biweight").train()


@pytest.mark.parametrize(("name", "way"), CASES)
def test_losses_are_those_of_the_documents(name, way, tmp_path):
    model, rows = model_of(name), [text(1, n, seed=n + i) for i, n in enumerate(LENGTHS)]
    plain, wanted = descended(model, rows, 3, RATE)
    arguments = {
        "output_dir": str(tmp_path), "per_device_train_batch_size": len(rows), "max_steps": 3, "learning_rate": RATE,
        "optim": "sgd", "max_grad_norm": 0.0, "lr_scheduler_type": "constant", "logging_steps": 1, "report_to": [],
        "use_cpu": True, "bf16": False, "gradient_checkpointing": False, "save_strategy": "no", "disable_tqdm": True,
        "per_device_eval_batch_size": len(rows),
    }  # fmt: skip
    data = datasets.Dataset.from_dict({"input_ids": [ids[0].tolist() for ids in rows]})
    given = {"args": trl.SFTConfig(**{**arguments, **WAYS[way]}), "processing_class": tokenizer()}
    trainer = trl.SFTTrainer(model=model, train_dataset=data, eval_dataset=data, **given)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(wanted[0], abs=1e-4)
    trainer.train()
    logged = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    assert logged == pytest.approx(wanted, abs=2e-4)
    for (path, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.detach(), q.detach(), atol=2e-5, rtol=1e-4, msg=path)


@pytest.mark.parametrize("name", language_models.names())
def test_ten_steps(name: str, tmp_path: Path) -> None:
    model = make(name, "biweight", torch.float32)
    rows = [" ".join(f"w{i}" for i in ids.tolist()) for ids in text(8, 12).clamp(min=2)]
    arguments = trl.SFTConfig(
        output_dir=str(tmp_path), max_steps=10, per_device_train_batch_size=8, learning_rate=1e-2, logging_steps=1,
        gradient_checkpointing=True, use_cpu=True, bf16=False, report_to=[], disable_tqdm=True, save_steps=10,
        max_length=16,
    )  # fmt: skip
    data = datasets.Dataset.from_dict({"text": rows})
    trainer = trl.SFTTrainer(model=model, args=arguments, train_dataset=data, processing_class=tokenizer())
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(losses) == 10
    assert losses[-1] < losses[0]
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint-10").eval()
    tokens = text(2, 9)
    torch.testing.assert_close(again(tokens).logits, trainer.model.eval()(tokens).logits)


@pytest.mark.parametrize("name", language_models.names())
def test_a_preference_is_learned_from_a_reference_in_a_folder(name: str, tmp_path: Path) -> None:
    make(name, "biweight", torch.float32).save_pretrained(tmp_path / "start")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "start")
    rows = [" ".join(f"w{i}" for i in ids.tolist()) for ids in text(24, 4).clamp(min=2)]
    arguments = trl.DPOConfig(
        output_dir=str(tmp_path), max_steps=3, per_device_train_batch_size=8, learning_rate=1e-2, logging_steps=1,
        use_cpu=True, bf16=False, report_to=[], disable_tqdm=True, save_strategy="no",
    )  # fmt: skip
    data = datasets.Dataset.from_dict({"prompt": rows[:8], "chosen": rows[8:16], "rejected": rows[16:]})
    trainer = trl.DPOTrainer(model=model, args=arguments, train_dataset=data, processing_class=tokenizer())
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[0] == pytest.approx(math.log(2), abs=1e-4)
    assert losses[-1] < losses[0]
