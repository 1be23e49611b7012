"""Files of untrusted folders, whose type is checked before they are opened; the lock of a run folder."""

import errno
import os
import socket
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

from ...errors import ArgumentError

MOST_JSON = 1 << 28
"""The largest JSON file that is read, in bytes. Tokenizers of large models have about ten million."""
_MOST_HOLES = 1 << 30
LOCK = "run.lock"
"""The locked file. It is never deleted, and so also shows that a run has begun in the folder."""


def regular_size(path: Path, *, links: bool = True) -> int:
    """Return the size of a regular file (with `links`, behind a link); raise OSError if it is none, or mostly holes."""
    status = os.stat(path, follow_symlinks=links)
    size = status.st_size
    if not stat.S_ISREG(status.st_mode):
        raise OSError(f"{path.name} is not a regular file")
    if size > _MOST_HOLES and (holes := _holes(path, size)) > max(_MOST_HOLES, size // 16 * 15):
        raise OSError(f"{path.name} has {size} bytes, of which {holes} were never written")
    return size


def _holes(path: Path, size: int) -> int:
    """Return how many bytes of a file were never written. A small archive can hold a file that takes days to read."""
    if not hasattr(os, "SEEK_DATA"):  # Windows
        return 0
    position = holes = 0
    with open(path, "rb") as file:
        while position < size:
            try:
                data = os.lseek(file.fileno(), position, os.SEEK_DATA)
            except OSError as error:
                if error.errno != errno.ENXIO:  # not supported by the file system
                    return 0
                data = size  # the rest is a hole
            holes += data - position
            position = os.lseek(file.fileno(), data, os.SEEK_HOLE) if data < size else size
    return holes


def read_text(path: Path) -> str:
    """Return the UTF-8 text of a regular file; raise OSError if there is none, or it is larger than `MOST_JSON`."""
    if (size := regular_size(path)) > MOST_JSON:
        raise OSError(f"{path.name} has {size} bytes, at most {MOST_JSON} are read")
    return path.read_text(encoding="utf-8")


def is_plain_name(name: object) -> bool:
    """Return whether `name` is a file name without any path."""
    return isinstance(name, str) and name not in ("", ".", "..") and not set(name) & set("/\\\0")


@contextmanager
def only_run(folder: Path, *, call: str) -> Iterator[None]:
    """Hold the lock of a run folder inside the block; raise `ArgumentError` if it is held, or cannot be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = _open(folder / LOCK)
    except OSError as error:
        raise ArgumentError(f"{call}: cannot write to --out {folder}: {error.strerror or error}.") from None
    with file:  # closing it releases the lock
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
            note = f"{folder} cannot be locked ({error}); start no second run there"
            print(f"regard {call}: note: {note}", file=sys.stderr)
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


def _lock(file: int) -> None:
    """Lock an open file; raise BlockingIOError or PermissionError if it is locked, OSError if locks are unsupported."""
    try:
        import fcntl
    except ImportError:  # Windows
        import msvcrt

        msvcrt.locking(file, msvcrt.LK_NBLCK, 1)  # type: ignore[attr-defined, unused-ignore]
    else:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
