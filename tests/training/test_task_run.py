"""`regard train --task`: the folder, the scores, and mistakes that are found before anything is written."""

import json
import re
from hashlib import sha256
from pathlib import Path

import pytest
import torch
from mistakes import refuses
from steps import logged, weights

from regard.cli import main
from regard.training.storage.folder import load_model

SMALL = ["--layers", "1", "--heads", "1", "--width", "8", "--steps", "2", "--batch", "2", "--eval-every", "1"]


def run(*words: str, out: Path) -> int:
    return main(["train", *words, *SMALL, "--eval-examples", "3", "--out", str(out)])


def test_a_run_on_a_task_is_trained_scored_and_read_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run"
    assert run("--task", "sort", "--task-option", "most=5", "--spec", "biweight", "--optimizer", "muon", out=out) == 0
    shown = capsys.readouterr().out
    names = {"accuracy", "exact", "loss", "free-running accuracy", "free-running exact"}
    assert all(name in shown for name in names)
    assert "floor" in shown
    summary = json.loads((out / "summary.json").read_text())
    assert set(summary["scores"]) == names
    assert summary["step"] == 2
    assert [line["step"] for line in logged(out)] == [1, 2]
    assert json.loads((out / "run.json").read_text())["text"]["path"] == "task sort"
    assert main(["eval", str(out)]) == 0
    again = capsys.readouterr().out
    assert f"{summary['scores']['accuracy'][0]:.4f} ± " in again
    refuses("is on a task, which has no text", load_model, out, call="generate")
    for words in (["--context", "9"], ["--lm-eval", "piqa"]):
        assert main(["eval", str(out), *words]) == 2
        assert "omit --data, --context, --stride and --lm-eval" in capsys.readouterr().err
    assert main(["eval", str(out), "--limit", "9"]) == 2
    assert "--limit and --tasks are for the tasks of --lm-eval" in capsys.readouterr().err


def test_a_run_is_in_float32_whatever_torchs_default(tmp_path: Path) -> None:
    torch.set_default_dtype(torch.float64)
    try:
        assert run("--task", "sort", out=tmp_path / "run") == 0
    finally:
        torch.set_default_dtype(torch.float32)
    assert {weight.dtype for weight in weights(tmp_path / "run/model").values()} == {torch.float32}


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
        (["--task", "needle"], "no task of tokens"),
        (["--task", "mqar", "--data", "x"], "give one of them"),
        (["--task", "mqar", "--accumulate", "2"], "none of --accumulate, --dtype, --report-to and --shard"),
    ],
)
def test_mistakes_are_found_before_anything_is_written(words, message, tmp_path, capsys):
    assert run(*words, out=tmp_path / "run") == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_run_on_a_file_knows_its_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, out = tmp_path / "text", tmp_path / "run"
    text.write_text("abcd " * 100)
    option = ["--task-option", "source=file", f"path={text}", "length=8"]
    assert run("--task", "text", *option, out=out) == 0
    found = json.loads((out / "run.json").read_text())
    early = re.sub(", sha256='.*'", "", found["text"]["settings"])
    assert early != found["text"]["settings"]
    text.write_text("dcba " * 100)
    for again in (["eval", str(out)], ["train", "--resume", "--steps", "3", "--out", str(out)]):
        assert main(again) == 2
        assert "has other settings than when the run" in capsys.readouterr().err
    found["text"]["sha256"] = sha256(early.encode()).hexdigest()  # as in earlier versions
    (out / "run.json").write_text(json.dumps(found))
    for again in (["eval", str(out)], ["train", "--resume", "--steps", "3", "--out", str(out)]):
        assert main(again) == 0


def test_a_loss_that_is_not_finite_ends_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--task", "sort", "--steps", "5", "--learning-rate", "1e30", "--warmup", "0"]
    assert main(["train", *SMALL, *words, "--eval-examples", "3", "--out", str(tmp_path)]) == 1
    assert re.search("at step .*; give a smaller learning_rate; there is no checkpoint yet", capsys.readouterr().err)


def test_a_folder_with_a_run_is_not_overwritten_unasked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--task", "sort", out=tmp_path / "run") == 0
    assert run("--task", "sort", out=tmp_path / "run") == 2
    assert "already holds a run" in capsys.readouterr().err
    assert run("--task", "sort", "--resume", out=tmp_path / "run") == 2
    assert "--steps" in capsys.readouterr().err  # all steps were made
    assert run("--task", "sort", "--overwrite", out=tmp_path / "run") == 0
