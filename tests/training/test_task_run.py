"""`regard train --task`: the folder, the scores, and mistakes that are found before anything is written."""

import json
import re
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

import pytest
import torch
from mistakes import refuses
from steps import logged, weights

from regard.training.storage.folder import load_model

SMALL = ["--layers", "1", "--heads", "1", "--width", "8", "--steps", "2", "--batch", "2", "--eval-every", "1"]


@pytest.fixture
def run(regard: Callable, out: Path) -> Callable:
    """`run(*words)`: `regard train` with these words and small sizes."""
    return lambda *words: regard("train", *SMALL, "--eval-examples", 3, "--out", out, *words)


def test_a_run_on_a_task_is_trained_scored_and_read_again(run: Callable, regard: Callable, out: Path) -> None:
    shown = run("--task", "sort", "--task-option", "most=5", "--spec", "biweight", "--optimizer", "muon").out
    names = {"accuracy", "exact", "loss", "free-running accuracy", "free-running exact"}
    assert all(name in shown for name in names)
    assert "floor" in shown
    summary = json.loads((out / "summary.json").read_text())
    assert set(summary["scores"]) == names
    assert summary["step"] == 2
    assert [line["step"] for line in logged(out)] == [1, 2]
    assert json.loads((out / "run.json").read_text())["text"]["path"] == "task sort"
    assert f"{summary['scores']['accuracy'][0]:.4f} ± " in regard("eval", out).out
    refuses("is on a task, which has no text", load_model, out, call="generate")
    for words in (["--context", "9"], ["--lm-eval", "piqa"]):
        assert "omit --data, --context, --stride and --lm-eval" in regard("eval", out, *words).error
    assert "--limit and --tasks are for the tasks of --lm-eval" in regard("eval", out, "--limit", 9).error


def test_a_run_is_in_float32_whatever_torchs_default(run: Callable, out: Path, default_dtype: Callable) -> None:
    default_dtype(torch.float64)
    assert run("--task", "sort").code == 0
    assert {weight.dtype for weight in weights(out / "model").values()} == {torch.float32}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--task", "mqr"], "Did you mean 'mqar'"),
        (["--task", "mqar", "--setting", "pape"], "Did you mean 'paper'"),
        (["--task", "mqar", "--task-option", "par=3"], "Did you mean 'pairs'"),
        (["--task", "mqar", "--task-option", "pairs=99"], "too short for 99 pairs"),
        (["--task", "mqar", "--task-option", "pairs=x"], "pairs"),
        (["--task", "mqar", "--task-option", "pairs=2", "--task-option", "pairs=3"], "given twice"),
        (["--task", "mqar", "--metric", "acuracy"], "the task has no metric 'acuracy'; it has accuracy, exact, loss."),
        (["--task", "mqar", "--metric", "loss", "--stop-at", "0.5"], "metric 'loss' is smaller for better answers"),
        (["--task", "regbench", "--metric", "L1", "--stop-at", "0.5"], "metric 'L1' is smaller"),
        (["--task", "mqar", "--stop-at", "nan"], "--stop-at is nan, expected a finite number"),
        (["--task", "mqar", "--tokenizer", "byte"], "--tokenizer is for runs on a text"),
        (["--data", "x", "--stop-at", "1"], "--stop-at is for runs on a task"),
        (["--task", "tiny-math", "--task-option", "distractors=1"], "--task-option: TinyMath: distractors is (1,)"),
        (["--task", "needle"], "not a token task"),
        (["--task", "mqar", "--data", "x"], "give one of them"),
        (["--task", "mqar", "--accumulate", "2"], "none of --accumulate, --dtype, --report-to and --shard"),
    ],
)
def test_mistakes_are_found_before_anything_is_written(
    words: list[str], message: str, run: Callable, out: Path
) -> None:
    assert message in run(*words).error
    assert not out.exists()


def test_a_run_on_a_file_knows_its_text(run: Callable, regard: Callable, tmp_path: Path, out: Path) -> None:
    text = tmp_path / "text"
    text.write_text("abcd " * 100)
    assert run("--task", "text", "--task-option", "source=file", f"path={text}", "length=8").code == 0
    record = json.loads((out / "run.json").read_text())
    early = re.sub(", sha256='.*'", "", record["text"]["settings"])
    assert early != record["text"]["settings"]
    text.write_text("dcba " * 100)
    commands = (["eval", out], ["train", "--resume", "--steps", 3, "--out", out])
    for words in commands:
        assert "has other settings than when the run" in regard(*words).error
    record["text"]["sha256"] = sha256(early.encode()).hexdigest()  # as in earlier versions
    (out / "run.json").write_text(json.dumps(record))
    assert [regard(*words).code for words in commands] == [0, 0]


def test_a_loss_that_is_not_finite_ends_the_run(run: Callable) -> None:
    result = run("--task", "sort", "--steps", 5, "--learning-rate", "1e30", "--warmup", 0)
    assert result.code == 1
    assert re.search("at step .*; give a smaller learning_rate; there is no checkpoint yet", result.err)


def test_a_folder_with_a_run_is_not_overwritten_unasked(run: Callable) -> None:
    assert run("--task", "sort").code == 0
    assert "already holds a run" in run("--task", "sort").error
    assert "--steps" in run("--task", "sort", "--resume").error  # all steps were made
    assert run("--task", "sort", "--overwrite").code == 0
