"""Command lines, run in this process."""

from pathlib import Path

import pytest
from commands import regard

__all__ = ["regard"]


@pytest.fixture(scope="session")
def text_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("".join(f"line {i} says {i * i % 97} and no more, é\n" for i in range(120)))
    return path


@pytest.fixture(scope="session")
def run_folder(text_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four steps."""
    from rich.console import Console

    from regard.training import TrainConfig, train

    out = tmp_path_factory.mktemp("runs") / "run"
    sizes = {"context": 16, "layers": 1, "width": 16, "heads": 2, "batch": 2, "device": "cpu"}
    train(TrainConfig(data=text_file, out=out, steps=4, save_every=2, **sizes), console=Console(quiet=True))
    return out
