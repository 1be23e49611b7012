"""What ends a run early: non-finite numbers, signals, a full disk. The last good checkpoint always stays."""

import errno
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from mistakes import refuses
from steps import At, logged, same_model
from transformers import PreTrainedTokenizerBase

from regard.training import TrainingInterrupted, TrainingStopped, rerun
from regard.training.fields import to_mapping
from regard.training.storage.checkpoints import last_complete


def poison_weight(model: torch.nn.Module) -> None:
    with torch.no_grad():
        list(model.parameters())[2].view(-1)[0] = float("nan")


def poison_output(model: torch.nn.Module) -> None:
    modules = dict(model.named_modules())
    name = next(name for name in modules if name.endswith("mlp"))
    modules[name].register_forward_hook(lambda module, args, output: output * float("inf"))


def poison_gradient(model: torch.nn.Module) -> None:
    list(model.parameters())[2].register_hook(lambda grad: grad * float("nan"))


@pytest.mark.parametrize(
    ("poison", "what"),
    [
        (poison_weight, r"the loss is nan at step 5; first non-finite tensor: parameter .*layers\.0"),
        (poison_output, r"the loss is nan at step 5; first non-finite tensor: output of .*layers\.0\.mlp"),
        (poison_gradient, r"gradient is not finite at step 5; first non-finite tensor: the gradient of .*layers"),
    ],
)
def test_non_finite_numbers_stop_the_run(run, refused, out, poison, what):
    error = refused(what, At(4, poison), error=TrainingStopped, save_every=2)
    assert f"last good checkpoint is {out / 'checkpoint-4'}" in error
    assert last_complete(out)[0] == out / "checkpoint-4"
    assert logged(out)[-1]["step"] == 4
    kept = out / "non-finite"
    assert f"regard.training.rerun({str(kept)!r})" in error
    if poison is poison_weight:
        refuses(r"rerun: .*not finite: model\.layers\.0", rerun, kept)
    else:  # what a hook did is not in the weights
        assert rerun(kept) is None
    summary = run(save_every=2, resume=True)  # the weights saved there are sound
    assert summary.step == 6
    assert summary.loss == summary.loss


def test_a_step_that_overflows_again(refused: Callable, out: Path) -> None:
    def enlarge(model: torch.nn.Module) -> None:
        with torch.no_grad():
            model.get_output_embeddings().weight.mul_(1e38)

    error = refused("step 5", At(4, enlarge), error=TrainingStopped)
    assert f"first non-finite tensor: {rerun(out / 'non-finite')};" in error


def test_a_batch_that_is_missing_or_damaged(refused: Callable, out: Path) -> None:
    refused("step 5", At(4, poison_gradient), error=TrainingStopped)
    for content in (b"no numbers", None):
        path = out / "non-finite" / "batch.safetensors"
        path.write_bytes(content) if content else path.unlink()
        refuses(r"rerun: .*batch\.safetensors cannot be read", rerun, out / "non-finite")


def test_before_the_first_checkpoint_there_is_none_to_name(refused: Callable) -> None:
    refused("there is no checkpoint yet", At(0, poison_weight), error=TrainingStopped)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_and_says_how_to_go_on(run: Callable, refused: Callable, out: Path, number: int) -> None:
    before = signal.getsignal(number)
    press = At(1, lambda _: signal.raise_signal(number))
    error = refused("interrupted after step 2 of 6", press, error=TrainingInterrupted, save_every=100)
    assert f"continue with: regard train --resume --out {out}" in error
    assert last_complete(out)[0] == out / "checkpoint-2"
    assert signal.getsignal(number) is before
    assert run(save_every=100, resume=True).step == 6


def test_a_second_signal_stops_at_once(refused: Callable, out: Path) -> None:
    def twice(_: object) -> None:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    refused(r"interrupted twice.*checkpoint-3", At(4, twice), error=TrainingInterrupted)
    assert last_complete(out)[0] == out / "checkpoint-3"


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full, a device that is always full")
def test_a_full_disk_under_the_metrics(refused: Callable, out: Path) -> None:
    metrics = out / "metrics.jsonl"

    def fill(_: object) -> None:
        metrics.unlink()
        metrics.symlink_to("/dev/full")

    error = refused("No space left", At(4, fill), error=TrainingStopped)
    good = f"the last good checkpoint is {out / 'checkpoint-3'}"
    assert f"cannot write {metrics}: No space left on device; {good}" in error


def no_space(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize(
    "where", ["transformers.modeling_utils.safe_save_file", "regard.training.storage.checkpoints.seal"]
)
def test_any_write_may_find_the_disk_full(refused, out, monkeypatch, where):
    monkeypatch.setattr(where, no_space)
    refused(r"cannot write .*No space left.*no checkpoint yet", error=TrainingStopped)
    assert last_complete(out) == (None, [])


def test_a_full_disk_under_the_final_model(run, refused, out, monkeypatch):
    save = PreTrainedTokenizerBase.save_pretrained

    def refuse(self: PreTrainedTokenizerBase, folder: Path, **options: object) -> None:
        no_space() if Path(folder).name.startswith("model") else save(self, folder, **options)

    monkeypatch.setattr(PreTrainedTokenizerBase, "save_pretrained", refuse)
    refused(r"cannot write .*model: .*No space left.*checkpoint-6", error=TrainingStopped)
    assert not list(out.glob("model*"))
    monkeypatch.undo()
    assert run(resume=True).step == 6  # nothing to train, the model is written


@pytest.mark.slow
def test_killed_twenty_times_the_run_is_as_if_it_had_not_been(tiny: Callable, run: Callable, out: Path) -> None:
    """A process that saves after every step is killed at random moments, writes of checkpoints among them."""
    sizes = {"steps": 300, "save_every": 1, "log_every": 1, "eval_every": 100}
    straight = out.parent / "straight"
    run(out=straight, **sizes)
    config = out.parent / "config.json"
    config.write_text(json.dumps(to_mapping(tiny(**sizes))))
    command = [sys.executable, "-m", "regard", "train", "--config", str(config)]
    source, reached = random.Random(0), 0
    for kill in range(20):
        words = [*command, *(["--resume"] if kill else [])]
        process = subprocess.Popen(words, stderr=subprocess.DEVNULL, env={**os.environ, "OMP_NUM_THREADS": "1"})
        deadline, wanted = time.monotonic() + 120, reached + source.randint(1, 4)
        while time.monotonic() < deadline and process.poll() is None:
            if max((int(p.name.rpartition("-")[2]) for p in out.glob("checkpoint-*")), default=0) >= wanted:
                break
            time.sleep(0.001)
        time.sleep(0.05 * source.random())
        assert process.poll() is None
        process.kill()
        process.wait()
        folder, _ = last_complete(out)
        assert folder is not None
        reached = int(folder.name.rpartition("-")[2])
    assert run(out=out, resume=True, **sizes).step == 300
    same_model(straight, out)
    assert [line.get("loss") for line in logged(straight)] == [line.get("loss") for line in logged(out)]
