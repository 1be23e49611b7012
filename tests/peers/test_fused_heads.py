"""TRL computes `lm_head(base_model(...))` in a loss of its own: it is the model's loss, and its gradient."""

import pytest
import torch
import torch.nn.functional as F
from any_model import make, text
from small_words import tokenizer

from regard.models import language_models

trl = pytest.importorskip("trl", reason="the extra `peers` brings it")
datasets = pytest.importorskip("datasets", reason="trl brings it")
pytestmark = pytest.mark.peers
LENGTHS = (11, 7, 5, 11)


def alone(model, rows):
    """The mean cross entropy over all rows, each row by itself and from the model's own logits."""
    losses = [F.cross_entropy(model(ids).logits[0, :-1], ids[0, 1:], reduction="none") for ids in rows]
    return torch.cat(losses).mean()


@pytest.mark.parametrize("name", language_models.names())
def test_a_step_of_sft_has_the_models_own_loss(name, tmp_path):
    model = make(name, "biweight", torch.float32).train()
    rows = [text(1, n, seed=n + i) for i, n in enumerate(LENGTHS)]
    start = {path: p.detach().clone() for path, p in model.named_parameters()}
    expected = alone(model, rows)
    expected.backward()
    slope = {path: p.grad.clone() for path, p in model.named_parameters()}
    model.zero_grad()
    arguments = trl.SFTConfig(
        output_dir=str(tmp_path), per_device_train_batch_size=len(rows), max_steps=1, learning_rate=0.5, optim="sgd",
        max_grad_norm=0.0, lr_scheduler_type="constant", logging_steps=1, report_to=[], use_cpu=True, bf16=False,
        gradient_checkpointing=False, save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    data = datasets.Dataset.from_dict({"input_ids": [ids[0].tolist() for ids in rows]})
    trainer = trl.SFTTrainer(model=model, args=arguments, train_dataset=data, processing_class=tokenizer())
    trainer.train()
    logged = next(line["loss"] for line in trainer.state.log_history if "loss" in line)
    assert logged == pytest.approx(expected.item(), abs=1e-4)
    for path, p in model.named_parameters():
        torch.testing.assert_close(p.detach(), start[path] - 0.5 * slope[path], atol=1e-5, rtol=1e-4, msg=path)
