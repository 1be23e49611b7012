"""Who may write in a run folder: one process at a time, and after a kill at any moment somebody."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import pytest
from steps import At
from transformers import PreTrainedTokenizerBase

from regard.training import TrainingStopped
from regard.training.run import _prepare_text
from regard.training.storage.files import LOCK, only_run

HOLD = (
    "import sys, time; from pathlib import Path; from regard.training.storage.files import only_run\n"
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


def test_one_run_at_a_time(run: Callable, refused: Callable, holder: Callable, out: Path) -> None:
    process = holder(out)
    assert f"--out {out} is in use: process {process.pid} on " in refused("is in use")
    assert [path.name for path in out.iterdir()] == [LOCK]
    os.kill(process.pid, signal.SIGKILL)  # the system gives the lock back
    process.wait()
    run()
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*") if path.is_file()}
    holder(out)
    for again in ({"resume": True, "steps": 8}, {"overwrite": True}):
        refused("is in use: process", **again)
    after = {path: path.stat().st_mtime_ns for path in out.rglob("*") if path.is_file()}
    assert {path for path in before if before[path] != after[path]} == {out / LOCK}  # whose holder is new
    assert before.keys() == after.keys()


def test_the_lock_is_free_after_a_run(run: Callable, refused: Callable, out: Path) -> None:
    run(steps=2)
    with only_run(out, call="train"):
        refused(f"process {os.getpid()} on ", steps=3, resume=True)
    assert run(steps=3, resume=True).step == 3


def test_a_file_system_without_locks_is_noted(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("regard.training.storage.files._lock", Mock(side_effect=OSError("locks are not supported")))
    with only_run(tmp_path, call="train"):
        assert "cannot be locked (locks are not supported); start no second run there" in capsys.readouterr().err


def test_a_folder_that_cannot_be_read(refused: Callable, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out.mkdir()
    monkeypatch.setattr(Path, "iterdir", Mock(side_effect=PermissionError(13, "Permission denied")))
    refused(r"cannot read --out .*: Permission denied")


@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_a_lock_from_elsewhere_writes_nowhere(run, refused, out, tmp_path, kind):
    """A folder from elsewhere may name any file of the user as its lock."""
    run(steps=1)
    lock, precious = out / LOCK, tmp_path / "precious"
    precious.write_text("years of work")
    lock.unlink()
    if kind == "link":
        lock.symlink_to(precious)
    else:
        os.mkfifo(lock)
    refused("cannot write to --out", steps=2, resume=True)
    assert precious.read_text() == "years of work"


def test_a_run_that_began_meanwhile_is_seen(run: Callable, refused: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processes look at the empty folder; one trains to the end before the other begins to write."""

    def other_first(*args: object) -> object:
        monkeypatch.undo()
        run(steps=1)
        return _prepare_text(*args)

    monkeypatch.setattr("regard.training.run._prepare_text", other_first)
    refused("already holds a run", steps=1)


@pytest.mark.parametrize("where", ["tokenizer", "config.json", "run.json"])
def test_killed_while_a_run_begins(run, refused, out, monkeypatch, where):
    kill = Mock(side_effect=Killed)
    if where == "tokenizer":
        monkeypatch.setattr(PreTrainedTokenizerBase, "save_pretrained", kill)
    else:
        replace = os.replace
        monkeypatch.setattr(os, "replace", lambda a, b: kill() if Path(b).name == where else replace(a, b))
    with pytest.raises(Killed):
        run(steps=1)
    monkeypatch.undo()
    if where != "tokenizer":  # in which case nothing was written
        refused("holds the beginning of a run, replace it with --overwrite", steps=1)
    refused("stopped while it began or was deleted; start again with --overwrite", steps=1, resume=True)
    (out / "notes.md").write_text("mine")
    assert run(steps=1, overwrite=True).step == 1
    assert (out / "notes.md").read_text() == "mine"
    assert not list(out.glob("*.tmp"))


def test_killed_while_a_run_is_deleted(run: Callable, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(steps=3)
    remove = shutil.rmtree

    def kill(path: Path, *args: object, **options: object) -> None:
        if Path(path).name == "tokenizer":
            raise Killed
        remove(path, *args, **options)

    monkeypatch.setattr(shutil, "rmtree", kill)
    with pytest.raises(Killed):
        run(steps=1, overwrite=True)
    monkeypatch.undo()
    assert not (out / "run.json").exists()
    assert run(steps=1, overwrite=True).step == 1


@pytest.mark.skipif(sys.platform == "win32", reason="needs limits on the size of a file")
def test_torch_save_says_why_the_system_refuses(run: Callable, refused: Callable, out: Path) -> None:
    """Whatever file of a checkpoint grows beyond what the system allows, the message is the system's."""
    import resource

    def set_limit(_: object) -> None:  # the optimiser's file is the largest
        size = (out / "checkpoint-3" / "optimizer.pt").stat().st_size
        resource.setrlimit(resource.RLIMIT_FSIZE, (size - 4096, limit[1]))

    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        error = refused("cannot write", At(4, set_limit), error=TrainingStopped)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert f"cannot write {out / 'checkpoint-6'}: File too large; the last good" in error
    assert not (out / "checkpoint-6").exists()
    assert run(resume=True).step == 6


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
    # the last: the other had made its first file and not yet run.json
    assert any(text in refused for text in ("is in use: process", "already holds a run", "the beginning of a run"))
    steps = [line.split(",")[0] for line in (config.out / "metrics.jsonl").read_text().splitlines() if '"loss"' in line]
    assert steps == [f'{{"step": {i}' for i in range(1, 301)]
