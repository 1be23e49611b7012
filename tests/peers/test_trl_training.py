"""TRL's SFTTrainer, ten steps on texts with gradient checkpointing, and the model that it saves; its DPOTrainer."""

import math
from pathlib import Path

import pytest
import torch
from any_model import make, text
from small_words import tokenizer
from transformers import AutoModelForCausalLM

from regard.models import language_models

trl = pytest.importorskip("trl", reason="the extra `peers` brings it")
datasets = pytest.importorskip("datasets", reason="trl brings it")
pytestmark = pytest.mark.peers


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
