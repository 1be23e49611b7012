"""The config and the record of a run: checked by every command that reads them."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from hostile import answer, change_json, reseal

pytestmark = pytest.mark.timeout(60)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"context": 1}, "--context is 1, expected at least 2"),
        ({"context": -7}, "--context is -7, expected at least 2"),
        ({"validation": 0.0}, "--validation is 0.0, expected a fraction between 0 and 1"),
        ({"validation": float("nan")}, "--validation is nan"),
        ({"layers": 10**9}, "--layers is 1000000000, expected at most 1024"),
        ({"width": 10**9, "heads": 7}, "--heads is 7, which does not divide"),
        ({"steps": 10**400}, "steps in "),
        ({"learning_rate": 10**400}, "learning_rate in "),
        ({"spec": ["biwait"]}, "unknown spec 'biwait'"),
        ({"model": "wild"}, "wild"),
        ({"tokenizer": "wild"}, "wild"),
        ({"kv-heads": 1}, "duplicate key"),
    ],
)
def test_eval_and_resume_check_the_saved_config(run_folder: Path, regard: Callable, fields: dict, reason: str) -> None:
    change_json(run_folder / "config.json", lambda table: {**table, **fields})
    reseal(run_folder)
    for words in (("eval", run_folder), ("train", "--resume", "--out", run_folder, "--steps", 6)):
        assert reason in regard(*words).error


def test_a_text_that_is_a_pipe_or_a_device(run_folder: Path, tmp_path: Path, regard: Callable) -> None:
    os.mkfifo(tmp_path / "pipe.txt")
    for path in (tmp_path / "pipe.txt", "/dev/zero"):
        change_json(run_folder / "config.json", lambda table, path=path: {**table, "data": str(path)})
        reseal(run_folder)
        assert "is not a regular file" in regard("eval", run_folder).error


def test_a_run_lies_where_it_was_read(run_folder: Path, tmp_path: Path, regard: Callable) -> None:
    change_json(run_folder / "config.json", lambda table: {**table, "out": str(tmp_path / "elsewhere")})
    reseal(run_folder)
    assert regard("train", "--resume", "--out", run_folder, "--steps", 6).code == 0
    assert (run_folder / "checkpoint-6").is_dir()
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"format": 2}, "has run format 2"),
        ({"format": True}, "has run format True"),
        ({"text": []}, "lacks the digest of the text"),
        ({"text": {"sha256": 7}}, "lacks the digest of the text"),
        ({"text": {"sha256": "0"}}, "is not the one the run in"),
        ({"files": 7}, "expected a table"),
        ({"files": {"config.json": 7}}, "differs from what was written"),
    ],
)
def test_what_a_run_says_of_itself(run_folder: Path, regard: Callable, fields: dict, reason: str) -> None:
    change_json(run_folder / "run.json", lambda table: {**table, **fields})
    for words in (("eval", run_folder), ("train", "--resume", "--out", run_folder, "--steps", 6)):
        assert reason in regard(*words).error


def test_the_device_of_another_machine(run_folder: Path, regard: Callable, right_answer: Callable) -> None:
    change_json(run_folder / "config.json", lambda table: {**table, "device": "cuda:7"})
    reseal(run_folder)
    command = lambda run: ("eval", run, "--device", "cpu")  # noqa: E731
    assert answer(regard(*command(run_folder))) == right_answer(command)
