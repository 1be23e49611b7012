"""One small run, and copies of it to spoil."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from commands import Result, regard
from hostile import COMMANDS, answer

__all__ = ["regard"]


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four steps with two checkpoints; nobody writes to it."""
    from rich.console import Console

    from regard.training import TrainConfig, train

    folder = tmp_path_factory.mktemp("trained")
    text = folder / "text.txt"
    text.write_text("".join(f"line {i} says {i * i % 97} and no more\n" for i in range(120)))
    sizes = {"context": 16, "layers": 1, "width": 16, "heads": 2, "batch": 2}
    config = TrainConfig(data=text, out=folder / "run", steps=4, save_every=2, device="cpu", **sizes)
    train(config, console=Console(quiet=True))
    return folder / "run"


@pytest.fixture
def run_folder(trained: Path, tmp_path: Path) -> Iterator[Path]:
    """A copy of the run, to be spoilt."""
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
