"""What ends a run early: non-finite numbers, signals, a full disk. The last good checkpoint always stays."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from rich.console import Console
from transformers import PreTrainedTokenizerBase, TrainerCallback

from regard.training import TrainingInterrupted, TrainingStopped, train
from regard.training.storage.checkpoints import last_complete


class At(TrainerCallback):
    """Calls a function with the model at the beginning of a step."""

    def __init__(self, step: int, action: Callable) -> None:
        self.step, self.action = step, action

    def on_step_begin(self, args, state, control, model=None, **_):
        if state.global_step == self.step:
            self.action(model)


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
        (
            poison_gradient,
            r"gradient is not finite at step 5; first non-finite tensor: the gradient of .*layers",
        ),
    ],
)
def test_non_finite_numbers_stop_the_run(tiny: Callable, silent: Console, poison: Callable, what: str) -> None:
    config = tiny(save_every=2)
    with pytest.raises(TrainingStopped, match=what) as caught:
        train(config, console=silent, callbacks=[At(4, poison)])
    good = config.out / "checkpoint-4"
    assert f"last good checkpoint is {good}" in str(caught.value)
    assert last_complete(config.out)[0] == good
    assert json.loads((config.out / "metrics.jsonl").read_text().splitlines()[-1])["step"] == 4
    summary = train(tiny(save_every=2, resume=True), console=silent)  # the weights saved there are sound
    assert summary.step == 6
    assert summary.loss == summary.loss


def test_before_the_first_checkpoint_there_is_none_to_name(tiny: Callable, silent: Console) -> None:
    with pytest.raises(TrainingStopped, match="there is no checkpoint yet"):
        train(tiny(), console=silent, callbacks=[At(0, poison_weight)])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_and_says_how_to_go_on(tiny: Callable, silent: Console, number: int) -> None:
    config = tiny(save_every=100)
    before = signal.getsignal(number)
    with pytest.raises(TrainingInterrupted) as caught:
        train(config, console=silent, callbacks=[At(1, lambda _: signal.raise_signal(number))])
    assert "interrupted after step 2 of 6" in str(caught.value)
    assert f"continue with: regard train --resume --out {config.out}" in str(caught.value)
    assert last_complete(config.out)[0] == config.out / "checkpoint-2"
    assert signal.getsignal(number) is before
    assert train(tiny(save_every=100, resume=True), console=silent).step == 6


def test_a_second_signal_stops_at_once(tiny: Callable, silent: Console) -> None:
    def twice(_: object) -> None:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    config = tiny()
    with pytest.raises(TrainingInterrupted, match=r"interrupted twice.*checkpoint-3"):
        train(config, console=silent, callbacks=[At(4, twice)])
    assert last_complete(config.out)[0] == config.out / "checkpoint-3"


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full, a device that is always full")
def test_a_full_disk_under_the_metrics(tiny: Callable, silent: Console) -> None:
    config = tiny()

    def fill(_: object) -> None:
        (config.out / "metrics.jsonl").unlink()
        (config.out / "metrics.jsonl").symlink_to("/dev/full")

    with pytest.raises(TrainingStopped) as caught:
        train(config, console=silent, callbacks=[At(4, fill)])
    message = str(caught.value)
    assert f"cannot write {config.out / 'metrics.jsonl'}: No space left on device" in message
    assert f"last good checkpoint is {config.out / 'checkpoint-3'}" in message


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full, a device that is always full")
def test_a_full_disk_under_a_checkpoint(tiny: Callable, silent: Console) -> None:
    config = tiny()

    def fill(_: object) -> None:
        (config.out / "checkpoint-6").mkdir()
        (config.out / "checkpoint-6" / "optimizer.pt").symlink_to("/dev/full")

    with pytest.raises(TrainingStopped) as caught:
        train(config, console=silent, callbacks=[At(4, fill)])
    message = str(caught.value)
    assert f"cannot write {config.out / 'checkpoint-6'}: No space left on device" in message  # torch.save hides it
    assert f"last good checkpoint is {config.out / 'checkpoint-3'}" in message
    assert not (config.out / "checkpoint-6").exists()
    assert train(tiny(resume=True), console=silent).step == 6


@pytest.mark.parametrize("where", ["transformers.modeling_utils.safe_save_file", "regard.training.trainer.seal"])
def test_any_write_may_find_the_disk_full(
    tiny: Callable, silent: Console, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    config = tiny()
    monkeypatch.setattr(where, refuse)
    with pytest.raises(TrainingStopped, match=r"cannot write .*No space left.*no checkpoint yet"):
        train(config, console=silent)
    assert last_complete(config.out) == (None, [])


def test_a_full_disk_under_the_final_model(tiny: Callable, silent: Console, monkeypatch: pytest.MonkeyPatch) -> None:
    save = PreTrainedTokenizerBase.save_pretrained

    def refuse(self: PreTrainedTokenizerBase, folder: Path, **options: object) -> None:
        if Path(folder).name.startswith("model"):
            raise OSError(errno.ENOSPC, "No space left on device")
        save(self, folder, **options)

    config = tiny()
    monkeypatch.setattr(PreTrainedTokenizerBase, "save_pretrained", refuse)
    with pytest.raises(TrainingStopped, match=r"cannot write .*model: .*No space left.*checkpoint-6"):
        train(config, console=silent)
    assert not list(config.out.glob("model*"))
    monkeypatch.undo()
    assert train(tiny(resume=True), console=silent).step == 6  # nothing to train, the model is written


@pytest.mark.slow
def test_killed_at_any_moment_the_last_complete_checkpoint_loads(tiny: Callable, silent: Console) -> None:
    """A process that saves after every step is killed a few times; each time the run goes on from there."""
    config = tiny(steps=4000, save_every=1, log_every=1, eval_every=4000)
    program = (
        "import sys; from rich.console import Console\n"
        "from pathlib import Path; from regard.training import TrainConfig, train\n"
        f"config = TrainConfig(data=Path({str(config.data)!r}), out=Path({str(config.out)!r}), context=16,"
        " spec=('biweight',), layers=1, width=16, heads=2, steps=4000, batch=2, log_every=1, eval_every=4000,"
        " save_every=1, eval_tokens=64, device='cpu', resume=sys.argv[1] == 'resume')\n"
        "train(config, console=Console(quiet=True))\n"
    )
    reached = 0
    for attempt in range(5):
        mode = "resume" if attempt else "begin"
        process = subprocess.Popen([sys.executable, "-c", program, mode], env={**os.environ, "OMP_NUM_THREADS": "1"})
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline and process.poll() is None:
            steps = [int(p.name.rpartition("-")[2]) for p in config.out.glob("checkpoint-*")]
            if max(steps, default=0) >= reached + 5:
                break
            time.sleep(0.01 + 0.003 * attempt)
        assert process.poll() is None
        process.kill()
        process.wait()
        folder, _ = last_complete(config.out)
        assert folder is not None
        step = int(folder.name.rpartition("-")[2])
        assert step >= reached + 3
        reached = step
