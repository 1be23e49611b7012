"""The config and the record of a run: checked by every command that reads them."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from hostile import COMMANDS, answer, change_json, reseal

pytestmark = pytest.mark.timeout(60)


@pytest.mark.parametrize(
    ("file", "fields", "reason"),
    [
        ("config.json", {"context": 1}, "--context is 1, expected at least 2"),
        ("config.json", {"context": -7}, "--context is -7, expected at least 2"),
        ("config.json", {"validation": 0.0}, "--validation is 0.0, expected a fraction between 0 and 1"),
        ("config.json", {"validation": float("nan")}, "--validation is nan"),
        ("config.json", {"layers": 10**9}, "--layers is 1000000000, expected at most 1024"),
        ("config.json", {"width": 10**9, "heads": 7}, "--heads is 7, which does not divide"),
        ("config.json", {"steps": 10**400}, "steps in "),
        ("config.json", {"learning_rate": 10**400}, "learning_rate in "),
        ("config.json", {"spec": ["biwait"]}, "'biwait' is neither a spec nor a token mixer"),
        ("config.json", {"model": "wild"}, "wild"),
        ("config.json", {"kv-heads": 1}, "duplicate key"),
        ("run.json", {"format": 2}, "has run format 2"),
        ("run.json", {"format": True}, "has run format True"),
        ("run.json", {"text": []}, "lacks the digest of the text"),
        ("run.json", {"text": {"sha256": 7}}, "lacks the digest of the text"),
        ("run.json", {"text": {"sha256": "0"}}, "is not the one the run in"),
        ("run.json", {"files": 7}, "expected a table"),
        ("run.json", {"files": {"config.json": 7}}, "differs from what was written"),
    ],
)
def test_eval_and_resume_check_what_is_saved(
    run_folder: Path, regard: Callable, file: str, fields: dict, reason: str
) -> None:
    change_json(run_folder / file, fields)
    if file == "config.json":
        reseal(run_folder)
    for command in ("eval", "resume"):
        assert reason in regard(*COMMANDS[command](run_folder)).error


def test_a_text_that_is_a_pipe_or_a_device(run_folder: Path, tmp_path: Path, regard: Callable) -> None:
    os.mkfifo(tmp_path / "pipe.txt")
    for path in (tmp_path / "pipe.txt", "/dev/zero"):
        change_json(run_folder / "config.json", {"data": str(path)})
        reseal(run_folder)
        assert "is not a regular file" in regard("eval", run_folder).error


def test_a_run_lies_where_it_was_read(run_folder: Path, tmp_path: Path, regard: Callable) -> None:
    change_json(run_folder / "config.json", {"out": str(tmp_path / "elsewhere")})
    reseal(run_folder)
    assert regard("train", "--resume", "--out", run_folder, "--steps", 6).code == 0
    assert (run_folder / "checkpoint-6").is_dir()
    assert not (tmp_path / "elsewhere").exists()


def test_a_run_without_a_model_and_a_checkpoint(run_folder: Path, regard: Callable) -> None:
    for folder in (run_folder / "model", *run_folder.glob("checkpoint-*")):
        shutil.rmtree(folder)
    assert "has saved no model and no checkpoint yet" in regard("eval", run_folder).error


BEAMS = {"num_beams": 3, "repetition_penalty": 9.0, "max_length": 3, "min_length": 90}


@pytest.mark.parametrize(
    ("command", "file", "change"),
    [
        ("eval", "config.json", {"device": "cuda:7"}),  # of another machine
        ("eval", "model/config.json", {"num_labels": 10**9}),  # what no language model needs
        ("eval", "model/config.json", {"label2id": {"a": 10**12}, "id2label": {"1000000000000": "a"}}),
        ("eval", "model/config.json", {"attn_implementation": "x/kernel", "transformers_weights": "../../etc/passwd"}),
        ("generate", "model/config.json", BEAMS),
        *(("generate", "model/generation_config.json", text) for text in ("", "{", "7", "[" * 10**5, "\0")),
    ],
)
def test_what_has_no_say_changes_no_answer(run_folder, regard, right_answer, command, file, change) -> None:
    (run_folder / file).write_text(change) if isinstance(change, str) else change_json(run_folder / file, change)
    reseal(run_folder)
    assert answer(regard(*COMMANDS[command](run_folder))) == right_answer(COMMANDS[command])
