"""transformers' Trainer with the collator that lays a batch side by side: the losses that it reports are the means over
the documents alone, in every model of ours and in stock models with regard attention."""

from copy import deepcopy

import pytest
import torch
import torch.nn.functional as F
from any_model import make, text
from tiny_models import tiny
from transformers import DataCollatorWithFlattening, Trainer, TrainingArguments

from regard.integrations.transformers import register
from regard.models import language_models

pytest.importorskip("accelerate", reason="transformers' Trainer needs it")
LENGTHS = (11, 7, 5, 12, 1, 2)
RATE = 0.1
COLLATORS = {"positions": {}, "flash": {"return_flash_attn_kwargs": True, "return_seq_idx": True}}


def model_of(name):
    if name in language_models.names():
        return make(name, "biweight", torch.float32)
    register()
    return tiny(name, "regard_biweight", attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0)


def steps(model, rows, count):
    """Losses of plain gradient descent on the documents, each by itself."""
    model, losses = deepcopy(model).train(), []
    for _ in range(count):
        model.zero_grad()
        each = [F.cross_entropy(model(ids).logits[0, :-1], ids[0, 1:], reduction="none") for ids in rows]
        loss = torch.cat(each).mean()
        loss.backward()
        losses.append(loss.item())
        with torch.no_grad():
            for p in model.parameters():
                if p.grad is not None:
                    p -= RATE * p.grad
    return losses


@pytest.mark.parametrize("collator", COLLATORS)
@pytest.mark.parametrize("name", [*language_models.names(), "llama", "gpt2"])
def test_losses_are_those_of_the_documents(name, collator, tmp_path):
    model, rows = model_of(name), [text(1, n, seed=n + i) for i, n in enumerate(LENGTHS)]
    wanted = steps(model, rows, 2)
    data = [{"input_ids": ids[0].tolist()} for ids in rows]
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            output_dir=str(tmp_path), per_device_train_batch_size=len(rows), per_device_eval_batch_size=len(rows),
            max_steps=2, learning_rate=RATE, optim="sgd", max_grad_norm=0.0, lr_scheduler_type="constant",
            logging_steps=1, report_to=[], use_cpu=True, save_strategy="no", disable_tqdm=True,
            prediction_loss_only=True, remove_unused_columns=False,
        ),
        train_dataset=data,
        eval_dataset=data,
        data_collator=DataCollatorWithFlattening(**COLLATORS[collator]),
    )  # fmt: skip
    assert trainer.evaluate()["eval_loss"] == pytest.approx(wanted[0], abs=1e-5)  # with the cache that models make
    trainer.train()
    logged = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    assert logged == pytest.approx(wanted, abs=1e-4)
