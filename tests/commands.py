"""Command lines, run in this process."""

from collections.abc import Callable
from dataclasses import dataclass

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
        code = main([str(word) for word in words])
        return Result(code, *capsys.readouterr())

    return run
