"""A lock that allows one run at a time in a folder; the system releases it when the process ends."""

import os
import socket
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

from ...errors import ArgumentError

LOCK = "run.lock"
"""The locked file. It is never deleted, and so also shows that a run has begun in the folder."""


@contextmanager
def only_run(folder: Path, *, call: str) -> Iterator[None]:
    """Hold the lock of a run folder, which is created if there is none, inside the block; raise `ArgumentError` if
    another process holds it, or the folder cannot be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = _open(folder / LOCK)
    except OSError as error:
        raise ArgumentError(f"{call}: cannot write to --out {folder}: {error.strerror or error}.") from None
    with file:  # closing it releases the lock
        _take(file, folder, call)
        with suppress(OSError):  # a full disk; the lock is held anyway
            file.truncate(0)
            file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
            file.flush()
        yield


def _open(path: Path) -> TextIO:
    """Open the lock file; raise OSError if a folder from elsewhere has a link, a device or a pipe in its place."""
    safe = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
    number = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | safe, 0o644)
    if not stat.S_ISREG(os.fstat(number).st_mode):
        os.close(number)
        raise OSError(f"{path.name} is not a regular file")
    return os.fdopen(number, "r+", encoding="utf-8")


def _take(file: TextIO, folder: Path, call: str) -> None:
    try:
        _lock(file.fileno())
    except (BlockingIOError, PermissionError):
        holder = ""
        with suppress(OSError, UnicodeError):
            file.seek(0)
            holder = file.read(200).strip()
        trains = f"{holder or 'another process'} trains there; wait for it, or choose another folder"
        raise ArgumentError(f"{call}: --out {folder} is in use: {trains}.") from None
    except OSError as error:
        print(f"regard {call}: note: {folder} cannot be locked ({error}); start no second run there", file=sys.stderr)


def _lock(file: int) -> None:
    """Lock an open file; raise BlockingIOError or PermissionError if it is locked, OSError if locks are unsupported."""
    try:
        import fcntl
    except ImportError:  # Windows
        import msvcrt

        msvcrt.locking(file, msvcrt.LK_NBLCK, 1)  # type: ignore[attr-defined, unused-ignore]
    else:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
