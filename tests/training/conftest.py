"""A small English text and the smallest run that exercises everything."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from commands import regard

__all__ = ["regard"]
WORDS = "the quick brown fox jumps over a lazy dog while seven wizards box, quietly; é and ü ask: why?\n"


@pytest.fixture
def text_file(tmp_path: Path) -> Path:
    """About 3000 characters that do not simply repeat."""
    words = WORDS.split(" ")
    path = tmp_path / "text.txt"
    path.write_text(" ".join(words[(i * i + 3 * i) % len(words)] for i in range(600)), encoding="utf-8")
    return path


@pytest.fixture
def tiny(tmp_path: Path, text_file: Path) -> Callable:
    """`tiny(**changes)`: a TrainConfig of one small layer and six steps on the small text."""
    from regard.training import TrainConfig

    base = TrainConfig(
        data=text_file, out=tmp_path / "run", context=16, spec=("biweight",), layers=1, width=16, heads=2, steps=6,
        batch=2, log_every=1, eval_every=3, save_every=3, eval_tokens=64, device="cpu",
    )  # fmt: skip
    return lambda **changes: replace(base, **changes)


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """Where `tiny` trains by default."""
    return tmp_path / "run"


@pytest.fixture
def run(tiny: Callable) -> Callable:
    """`run(*callbacks, **changes)`: train `tiny(**changes)` in silence."""
    from rich.console import Console

    from regard.training import train

    quiet = Console(quiet=True)
    return lambda *callbacks, **changes: train(tiny(**changes), console=quiet, callbacks=list(callbacks))


@pytest.fixture
def refused(run: Callable) -> Callable:
    """`refused(message, *callbacks, **changes)`: such a run ends with an error that holds `message`; its text."""
    from regard.checks import ArgumentError

    def check(message: str, *callbacks: object, error: type[Exception] = ArgumentError, **changes: object) -> str:
        with pytest.raises(error, match=message) as caught:
            run(*callbacks, **changes)
        return str(caught.value)

    return check
