"""Command lines, run in this process, a small run for them to read, and what a model writes."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest


@dataclass
class Result:
    """The exit code of a command and what it printed."""

    code: int
    out: str
    err: str

    @property
    def error(self) -> str:
        """Standard error, which must be one line of ours."""
        assert self.code == 2, self
        assert self.err.count("\n") == 1, self.err
        assert self.err.startswith("regard"), self.err
        return self.err.strip()


@pytest.fixture
def regard(capsys: pytest.CaptureFixture[str]) -> Callable[..., Result]:
    """`regard("eval", folder)`: the exit code and what was printed."""
    from regard.cli import main

    def run(*words: object) -> Result:
        capsys.readouterr()
        return Result(main([str(word) for word in words]), *capsys.readouterr())

    return run


@pytest.fixture(scope="session")
def text_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("".join(f"line {i} says {i * i % 97} and no more, é\n" for i in range(120)))
    return path


@pytest.fixture(scope="session")
def trained(text_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four steps with two checkpoints; nobody writes to it."""
    from rich.console import Console

    from regard.training import TrainConfig, train

    out = tmp_path_factory.mktemp("trained") / "run"
    sizes = {"context": 16, "layers": 1, "width": 16, "heads": 2, "batch": 2, "device": "cpu"}
    train(TrainConfig(data=text_file, out=out, steps=4, save_every=2, **sizes), console=Console(quiet=True))
    return out


def continued(model: Any, tokenizer: Any, prompt: str, count: int) -> str:
    """The likeliest tokens one after the other, special ones left out, each from the whole text before it."""
    import torch

    ids = tokenizer(prompt)["input_ids"]
    for _ in range(count):
        with torch.no_grad():
            logits = model(torch.tensor([ids]), use_cache=False).logits[0, -1]
        logits[tokenizer.all_special_ids] = -torch.inf
        ids.append(int(logits.argmax()))
    return tokenizer.decode(ids)
