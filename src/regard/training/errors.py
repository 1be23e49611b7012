"""What can stop a run, apart from mistakes in the arguments (those are `regard.checks.ArgumentError`)."""

from collections.abc import Iterator
from contextlib import contextmanager

from ..errors import ArgumentError


class TrainingStopped(RuntimeError):
    """The run cannot continue: a non-finite loss, a full disk. The message is one line that says what happened, where,
    and which checkpoint is the last good one. The command line exits with 1."""


class TrainingInterrupted(TrainingStopped):
    """The user (Ctrl-C) or the system (SIGTERM) ended the run. The command line exits with 130."""


def expect(condition: bool, message: str) -> None:
    """Raise ValueError unless `condition` holds."""
    if not condition:
        raise ValueError(message)


def one_line(error: BaseException) -> str:
    """Return the message of an error as one line without its full stop, or the error's type if it has no message."""
    return " ".join(str(error).split()).rstrip(".") or type(error).__name__


@contextmanager
def one_error(where: str) -> Iterator[None]:
    """Turn any error raised inside, panics of a library's Rust code included, into one ArgumentError that begins with
    `where`; an ArgumentError that does already passes unchanged."""
    try:
        yield
    except BaseException as error:
        if isinstance(error, ArgumentError) and str(error).startswith(f"{where}: "):
            raise
        # pyo3's PanicException cannot be imported and is not an Exception
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise ArgumentError(f"{where}: {one_line(error)}.") from None
