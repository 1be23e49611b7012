"""Who may write in a run folder: one process at a time, and after a kill at any moment somebody."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console
from transformers import PreTrainedTokenizerBase

from regard.checks import ArgumentError
from regard.training import TrainingStopped, train
from regard.training.storage.lock import LOCK, only_run

HOLD = (
    "import sys, time; from pathlib import Path; from regard.training.storage.lock import only_run\n"
    "with only_run(Path(sys.argv[1]), call='train'):\n"
    "    print('held', flush=True); time.sleep(60)\n"
)


class Killed(BaseException):
    """Ends a call where a signal would end the process: nothing of ours catches it."""


@pytest.fixture
def holder(tmp_path: Path):
    """A process that holds the lock of a folder."""
    started = []

    def hold(folder: Path) -> subprocess.Popen:
        process = subprocess.Popen([sys.executable, "-c", HOLD, str(folder)], stdout=subprocess.PIPE, text=True)
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        return process

    yield hold
    for process in started:
        process.kill()
        process.wait()


def test_one_run_at_a_time(tiny: Callable, silent: Console, holder: Callable) -> None:
    config = tiny()
    process = holder(config.out)
    with pytest.raises(ArgumentError) as caught:
        train(config, console=silent)
    assert f"--out {config.out} is in use: process {process.pid} on " in str(caught.value)
    assert [path.name for path in config.out.iterdir()] == [LOCK]
    os.kill(process.pid, signal.SIGKILL)  # the system gives the lock back
    process.wait()
    train(config, console=silent)
    before = {path: path.stat().st_mtime_ns for path in config.out.rglob("*") if path.is_file()}
    holder(config.out)
    for again in (tiny(resume=True, steps=8), tiny(overwrite=True)):
        with pytest.raises(ArgumentError, match="is in use: process"):
            train(again, console=silent)
    after = {path: path.stat().st_mtime_ns for path in config.out.rglob("*") if path.is_file()}
    assert {path for path in before if before[path] != after[path]} == {config.out / LOCK}  # whose holder is new
    assert before.keys() == after.keys()


def test_the_lock_is_free_after_a_run(tiny: Callable, silent: Console) -> None:
    config = tiny(steps=2)
    train(config, console=silent)
    with only_run(config.out, call="train"), pytest.raises(ArgumentError, match=f"process {os.getpid()} on "):
        train(tiny(steps=3, resume=True), console=silent)
    assert train(tiny(steps=3, resume=True), console=silent).step == 3


@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_a_lock_from_elsewhere_writes_nowhere(tiny: Callable, silent: Console, tmp_path: Path, kind: str) -> None:
    """A folder from elsewhere may name any file of the user as its lock."""
    train(tiny(steps=1), console=silent)
    lock, precious = tiny().out / LOCK, tmp_path / "precious"
    precious.write_text("years of work")
    lock.unlink()
    if kind == "link":
        lock.symlink_to(precious)
    else:
        os.mkfifo(lock)
    with pytest.raises(ArgumentError, match="cannot write to --out"):
        train(tiny(steps=2, resume=True), console=silent)
    assert precious.read_text() == "years of work"


def test_a_run_that_began_meanwhile_is_seen(tiny: Callable, silent: Console, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processes look at the empty folder; one trains to the end before the other begins to write."""
    config = tiny(steps=1)
    prepare = train.__wrapped__.__globals__["_prepare_text"]

    def other_first(*args: object) -> object:
        monkeypatch.undo()
        train(config, console=silent)
        return prepare(*args)

    monkeypatch.setattr("regard.training.run._prepare_text", other_first)
    with pytest.raises(ArgumentError, match="already holds a run"):
        train(config, console=silent)


@pytest.mark.parametrize("where", ["tokenizer", "config.json", "run.json"])
def test_killed_while_a_run_begins(
    tiny: Callable, silent: Console, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    config = tiny(steps=1)

    def kill(*_: object, **__: object) -> None:
        raise Killed

    if where == "tokenizer":
        monkeypatch.setattr(PreTrainedTokenizerBase, "save_pretrained", kill)
    else:
        replace = os.replace
        monkeypatch.setattr(os, "replace", lambda a, b: kill() if Path(b).name == where else replace(a, b))
    with pytest.raises(Killed):
        train(config, console=silent)
    monkeypatch.undo()
    if where != "tokenizer":  # in which case nothing was written
        with pytest.raises(ArgumentError, match="holds the beginning of a run, replace it with --overwrite"):
            train(config, console=silent)
    with pytest.raises(ArgumentError, match="stopped while it began or was deleted; start again with --overwrite"):
        train(tiny(steps=1, resume=True), console=silent)
    (config.out / "notes.md").write_text("mine")
    assert train(tiny(steps=1, overwrite=True), console=silent).step == 1
    assert (config.out / "notes.md").read_text() == "mine"
    assert not list(config.out.glob("*.tmp"))


def test_killed_while_a_run_is_deleted(tiny: Callable, silent: Console, monkeypatch: pytest.MonkeyPatch) -> None:
    train(tiny(steps=3), console=silent)
    import shutil

    remove = shutil.rmtree

    def kill(path: Path, *args: object, **options: object) -> None:
        if Path(path).name == "tokenizer":
            raise Killed
        remove(path, *args, **options)

    monkeypatch.setattr(shutil, "rmtree", kill)
    with pytest.raises(Killed):
        train(tiny(steps=1, overwrite=True), console=silent)
    monkeypatch.undo()
    assert not (tiny().out / "run.json").exists()
    assert train(tiny(steps=1, overwrite=True), console=silent).step == 1


@pytest.mark.skipif(sys.platform == "win32", reason="needs limits on the size of a file")
def test_torch_save_says_why_the_system_refuses(tiny: Callable, silent: Console) -> None:
    """Whatever file of a checkpoint grows beyond what the system allows, the message is the system's."""
    import resource

    from transformers import TrainerCallback

    class Limit(TrainerCallback):
        def on_step_begin(self, args, state, control, **_):
            if state.global_step == 4:  # the optimiser's file is the largest
                size = (config.out / "checkpoint-3" / "optimizer.pt").stat().st_size
                resource.setrlimit(resource.RLIMIT_FSIZE, (size - 4096, limit[1]))

    config = tiny()
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        with pytest.raises(TrainingStopped) as caught:
            train(config, console=silent, callbacks=[Limit()])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert f"cannot write {config.out / 'checkpoint-6'}: File too large; the last good" in str(caught.value)
    assert not (config.out / "checkpoint-6").exists()
    assert train(tiny(resume=True), console=silent).step == 6


@pytest.mark.slow
def test_two_commands_at_once(tiny: Callable) -> None:
    """Of two commands that begin together one trains and one is refused; every line is written once."""
    config = tiny()
    words = [sys.executable, "-m", "regard", "train", "--data", str(config.data), "--out", str(config.out)]
    words += "--context 16 --layers 1 --width 16 --heads 2 --batch 2 --steps 300 --log-every 1 --device cpu".split()  # noqa: SIM905
    both = [subprocess.Popen(words, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    errors = [process.communicate(timeout=300)[1] for process in both]
    codes = [process.returncode for process in both]
    assert sorted(codes) == [0, 2], errors
    refused = errors[codes.index(2)]
    assert "is in use: process" in refused or "already holds a run" in refused
    steps = [line.split(",")[0] for line in (config.out / "metrics.jsonl").read_text().splitlines() if '"loss"' in line]
    assert steps == [f'{{"step": {i}' for i in range(1, 301)]
