"""A run folder from elsewhere may hold links: training never writes where they point."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from hostile import COMMANDS

PLACES = ("checkpoint-4", "checkpoint-6", "model", "model.tmp", "tensorboard", "tokenizer")
FILES = ("metrics.jsonl", "metrics.jsonl.tmp", "summary.json", "summary.json.tmp", "config.json.tmp", "run.json.tmp")


@pytest.fixture
def precious(tmp_path: Path) -> Path:
    """A folder of the user's, with files of the names that a run writes."""
    folder = tmp_path / "precious"
    folder.mkdir()
    for name in ("model.safetensors", "config.json", "COMPLETE.json", "notes"):
        (folder / name).write_text("precious")
    return folder


def untouched(precious: Path) -> bool:
    return len(list(precious.iterdir())) == 4 and all(p.read_text() == "precious" for p in precious.iterdir())


@pytest.mark.parametrize("how", ["--resume", "--overwrite"])
@pytest.mark.parametrize("name", [*PLACES, *FILES])
def test_nothing_is_written_through_a_link(
    run_folder: Path, precious: Path, regard: Callable, name: str, how: str
) -> None:
    place = run_folder / name
    if place.is_dir():
        shutil.rmtree(place)
    place.unlink(missing_ok=True)
    place.symlink_to(precious if name in PLACES else precious / "notes")
    text = run_folder.parent / "text.txt"
    text.write_text("nothing of this is read\n" * 100)
    words = ("--steps", 6) if how == "--resume" else ("--steps", 6, "--data", text)
    assert f"{name} is a link" in regard("train", how, "--out", run_folder, "--device", "cpu", *words).error
    assert untouched(precious)


def test_nothing_is_written_through_a_hard_link(run_folder: Path, precious: Path, regard: Callable) -> None:
    for name in FILES:
        (run_folder / name).unlink(missing_ok=True)
        os.link(precious / "notes", run_folder / name)
    assert regard(*COMMANDS["resume"](run_folder)).code == 0
    assert untouched(precious)
