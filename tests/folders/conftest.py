"""Copies of a small run, to be corrupted."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from commands import Result, regard, text_file, trained
from hostile import COMMANDS, answer

__all__ = ["regard", "text_file", "trained"]


@pytest.fixture
def run_folder(trained: Path, tmp_path: Path) -> Iterator[Path]:
    """A copy of the run, to be corrupted."""
    copy = tmp_path / "run"
    shutil.copytree(trained, copy)
    yield copy
    shutil.rmtree(copy, ignore_errors=True)


@pytest.fixture(params=COMMANDS)
def command(request: pytest.FixtureRequest) -> Callable[[Path], tuple]:
    """Each command that reads a run folder: a function from the folder to the words of the command line."""
    return COMMANDS[request.param]


@pytest.fixture
def right_answer(trained: Path, tmp_path: Path, regard: Callable) -> Callable:
    """`right_answer(command)`: what a command says of the run as it was trained."""

    def find(command: Callable[[Path], tuple]) -> list[str]:
        sound = tmp_path / "sound"
        shutil.copytree(trained, sound)
        return answer(regard(*command(sound)))

    return find


@pytest.fixture
def resumed(regard: Callable, run_folder: Path) -> Callable[[], Result]:
    """`resumed()`: the command that continues the copy of the run."""
    return lambda: regard(*COMMANDS["resume"](run_folder))
