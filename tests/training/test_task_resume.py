"""A run on a task that was killed continues from its last checkpoint, with the numbers of a run that was not."""

import io
import json
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from mistakes import refuses
from rich.console import Console
from steps import At, crash, logged, same_model
from transformers import TrainerCallback

from regard.training.config import TrainConfig
from regard.training.errors import TrainingInterrupted
from regard.training.storage.checkpoints import fault
from regard.training.task.run import train_task

SIZES: dict[str, Any] = {
    "task": "sort", "task_option": ("symbols=3", "least=2", "most=3"), "width": 16, "layers": 1, "heads": 2,
    "steps": 8, "batch": 4, "eval_every": 4, "eval_examples": 8, "save_every": 2, "device": "cpu",
}  # fmt: skip


def run(out: Path, *callbacks: TrainerCallback, **changes: Any) -> Any:
    config = TrainConfig(out=out, **{**SIZES, **changes})
    return train_task(config, console=Console(file=io.StringIO()), callbacks=callbacks)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_run_that_was_killed_gives_the_same_numbers(tmp_path: Path, optimizer: str) -> None:
    whole, out = tmp_path / "whole", tmp_path / "out"
    expected = run(whole, optimizer=optimizer)
    with pytest.raises(SystemError):
        run(out, At(5, crash), optimizer=optimizer)
    torch.manual_seed(99)
    assert run(out, optimizer=optimizer, resume=True).scores == expected.scores
    assert logged(out) == logged(whole)
    same_model(whole, out)
    for folder in ("model", "checkpoint-8"):
        assert json.loads((out / folder / "config.json").read_text())["use_cache"] is True  # Trainer sets it to False


def test_what_cannot_be_continued_is_refused(tmp_path: Path) -> None:
    refuses("train: ", run, tmp_path / "nothing", resume=True)
    out = tmp_path / "out"
    run(out)
    refuses(r"--batch is 2 but the run in .* began with 4", run, out, resume=True, batch=2)
    refuses("--task", run, out, resume=True, task="reverse")
    refuses("step", run, out, resume=True)  # nothing is left to do
    record = json.loads((out / "run.json").read_text())
    record["text"]["sha256"] = "0" * 64
    (out / "run.json").write_text(json.dumps(record))
    refuses("has other settings than when the run", run, out, resume=True, steps=12)


def test_a_run_that_an_earlier_version_began_with_an_option_of_texts_goes_on(tmp_path, monkeypatch):
    with monkeypatch.context() as earlier:
        earlier.setattr("regard.training.validation._OF_TEXTS", ())
        run(tmp_path, log_every=7)
    refuses("--log-every is for runs on a text", run, tmp_path, log_every=7, overwrite=True)
    run(tmp_path, log_every=7, resume=True, steps=12)


def test_an_interrupted_run_has_a_checkpoint(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(TrainingInterrupted, match="interrupted after step"):
        run(out, At(3, lambda _: signal.raise_signal(signal.SIGTERM)))
    saved = sorted(out.glob("checkpoint-*"))
    assert saved
    assert fault(saved[-1], tokenizer=False) is None
    assert run(out, resume=True).scores == run(tmp_path / "whole").scores
