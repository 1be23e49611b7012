"""Command lines, run in this process."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

os.environ.setdefault("OMP_NUM_THREADS", "1")
torch.set_num_threads(1)


@dataclass
class Result:
    code: int
    out: str
    err: str

    @property
    def error(self) -> str:
        """The last line of standard error, if the whole of it is one line."""
        assert self.err.count("\n") == 1, self.err
        return self.err.strip()


@pytest.fixture
def regard(capsys: pytest.CaptureFixture[str]) -> Callable[..., Result]:
    """`regard("train", "--steps", 3)`: the exit code and what was printed."""
    from regard.cli import main

    def run(*words: object) -> Result:
        capsys.readouterr()
        code = main([str(word) for word in words])
        return Result(code, *capsys.readouterr())

    return run


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
    train(
        TrainConfig(
            data=text_file,
            out=out,
            context=16,
            layers=1,
            width=16,
            heads=2,
            steps=4,
            batch=2,
            save_every=2,
            device="cpu",
        ),
        console=Console(quiet=True),
    )
    return out
