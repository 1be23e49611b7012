"""`regard train --task`: the folder, the scores, and mistakes that are found before anything is written."""

import json
from pathlib import Path

import pytest
from mistakes import refuses
from steps import logged

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
    assert main(["eval", str(out), "--context", "9"]) == 2
    assert "omit --data, --context and --stride" in capsys.readouterr().err


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
        (["--task", "needle"], "no task of tokens"),
        (["--task", "mqar", "--data", "x"], "give one of them"),
        (["--task", "mqar", "--accumulate", "2"], "none of --accumulate, --dtype, --report-to and --shard"),
    ],
)
def test_mistakes_are_found_before_anything_is_written(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*words, out=tmp_path / "run") == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_folder_with_a_run_is_not_overwritten_unasked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--task", "sort", out=tmp_path / "run") == 0
    assert run("--task", "sort", out=tmp_path / "run") == 2
    assert "already holds a run" in capsys.readouterr().err
    assert run("--task", "sort", "--resume", out=tmp_path / "run") == 2
    assert "--steps" in capsys.readouterr().err  # all steps were made
    assert run("--task", "sort", "--overwrite", out=tmp_path / "run") == 0
