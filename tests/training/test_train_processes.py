"""Runs in two processes, started by torchrun: they give the numbers of one process with batches twice as large."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from regard.checks import ArgumentError
from regard.training import TrainConfig, train

pytestmark = pytest.mark.slow
LAUNCH = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
TINY = "--context 16 --spec biweight --layers 1 --width 16 --heads 2 --log-every 1 --eval-every 3 --save-every 3"


def two(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a command in two processes."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    return subprocess.run([*LAUNCH, *arguments], capture_output=True, text=True, env=environment, timeout=300)


def losses(out: Path) -> list[float]:
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] if "loss" in line else line["eval_loss"] for line in lines]


def command(text_file: Path, out: Path, **changes: int) -> list[str]:
    sizes = {"steps": 6, "batch": 2, "eval-tokens": 64, **changes}
    flags = [word for name, value in sizes.items() for word in (f"--{name}", str(value))]
    return ["-m", "regard", "train", "--data", str(text_file), "--out", str(out), "--device", "cpu",
            *TINY.split(), *flags]  # fmt: skip


@pytest.mark.skipif(find_spec("datasets") is None, reason="needs the extra data")
def test_two_processes_read_a_stream_as_one_does(
    run: Callable, text_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    lines = tmp_path / "lines.txt"
    lines.write_text(text_file.read_text().replace(" ", "\n"))
    run(out=tmp_path / "one", batch=4, data=Path(f"datasets:{lines}"), stream=True, tokenizer="byte")
    words = [word.replace(str(lines), f"datasets:{lines}") for word in command(lines, tmp_path / "two")]
    found = two(*words, "--stream", "--tokenizer", "byte")
    assert found.returncode == 0, found.stderr[-2000:]
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), abs=1e-5)
    places = [(tmp_path / name / "checkpoint-3" / "stream.json").read_text() for name in ("one", "two")]
    assert places[0] == places[1]


def test_two_processes_are_one_with_twice_the_batch(run: Callable, text_file: Path, tmp_path: Path) -> None:
    run(out=tmp_path / "one", batch=4)
    found = two(*command(text_file, tmp_path / "two"))
    assert found.returncode == 0, found.stderr[-2000:]
    assert found.stdout.count("run folder") == 1
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), abs=1e-5)
    one, both = (load_file(tmp_path / name / "model" / "model.safetensors") for name in ("one", "two"))
    torch.testing.assert_close(both, one, rtol=0, atol=1e-5)
    run(out=tmp_path / "accumulated", batch=2, accumulate=2)
    assert losses(tmp_path / "accumulated") == pytest.approx(losses(tmp_path / "one"), abs=1e-5)


def test_two_processes_resume(text_file: Path, tmp_path: Path) -> None:
    straight, broken = tmp_path / "straight", tmp_path / "broken"
    assert two(*command(text_file, straight)).returncode == 0
    killed = two(*command(text_file, broken))
    assert killed.returncode == 0
    for part in ("checkpoint-6", "model", "summary.json"):  # as if it had been killed after step 3
        path = broken / part
        subprocess.run(["rm", "-r", str(path)], check=True)
    again = two("-m", "regard", "train", "--resume", "--out", str(broken))
    assert again.returncode == 0, again.stderr[-2000:]
    assert losses(broken) == losses(straight)
    first, second = (load_file(each / "model" / "model.safetensors") for each in (straight, broken))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_processes_that_disagree(text_file: Path, tmp_path: Path) -> None:
    script = tmp_path / "disagree.py"
    words = command(text_file, tmp_path / "run")[3:]
    script.write_text(
        f"import os, sys\nfrom regard.cli import main\n"
        f"sys.exit(main(['train', *{words!r}, '--seed', os.environ['RANK']]))\n"
    )
    found = two(str(script))
    assert found.returncode != 0
    assert found.stderr.count("--seed is 1 in process 1, but 0 in process 0") == 2
    assert not (tmp_path / "run").exists()


def test_what_several_processes_cannot_do(tiny: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(ArgumentError, match="accelerate shards models on accelerators only"):
        train(tiny())
    monkeypatch.delenv("ACCELERATE_USE_FSDP")
    from regard.training.task.run import train_task

    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ArgumentError, match="a run on a task takes one process, got 2"):
        train_task(TrainConfig(task="mqar", out=tmp_path / "task"))


@pytest.mark.parametrize("name", ["context_parallel", "fsdp"])
def test_examples_of_several_processes(name: str, tmp_path: Path) -> None:
    """Each compares its numbers with those of one process."""
    script = Path(__file__).parents[2] / "examples" / f"{name}.py"
    found = two(str(script), str(tmp_path / "checkpoint"))
    assert found.returncode == 0, found.stderr[-2000:]
    assert found.stdout.count("equal those of one process") == 2
