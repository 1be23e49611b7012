"""Reading files that may come from elsewhere: what a path is gets looked at before anything is opened."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

MOST_JSON = 1 << 28
"""The largest JSON file that is read, in bytes. The tokenizers of large models have some ten million."""
_MOST_HOLES = 1 << 30


def regular_size(path: Path, *, links: bool = True) -> int:
    """Return the size in bytes of a regular file.

    Args:
        links: also accept a symbolic link to a regular file.

    Raises:
        OSError: there is no such file, or it is a folder, a device, a pipe or, unless allowed, a link; or next to
            nothing of its size is on the disk.
    """
    found = os.stat(path, follow_symlinks=links)
    if not stat.S_ISREG(found.st_mode):
        raise OSError(f"{path.name} is no regular file")
    if found.st_size > _MOST_HOLES:
        holes = _holes(path, found.st_size)
        if holes > max(_MOST_HOLES, found.st_size // 16 * 15):
            raise OSError(f"{path.name} has {found.st_size} bytes, of which {holes} were never written")
    return found.st_size


def _holes(path: Path, size: int) -> int:
    """Return how many bytes of a file were never written: a small archive can hold a file that is read for days."""
    if not hasattr(os, "SEEK_DATA"):  # Windows
        return 0
    place = holes = 0
    with open(path, "rb") as file:
        while place < size:
            try:
                data = os.lseek(file.fileno(), place, os.SEEK_DATA)
            except OSError as error:
                if error.errno != errno.ENXIO:  # the file system does not know
                    return 0
                data = size  # nothing but a hole up to the end
            holes += data - place
            place = os.lseek(file.fileno(), data, os.SEEK_HOLE) if data < size else size
    return holes


def read_text(path: Path, *, most: int = MOST_JSON) -> str:
    """Return the UTF-8 text of a regular file.

    Raises:
        OSError: there is no such regular file, or it is larger than `most` bytes.
        UnicodeDecodeError: it is not UTF-8.
    """
    size = regular_size(path)
    if size > most:
        raise OSError(f"{path.name} has {size} bytes, at most {most} are read")
    return path.read_text(encoding="utf-8")


def is_plain_name(name: object) -> bool:
    """Return whether `name` is the name of a file in a folder: no path, no `..`, nothing hidden in it."""
    return isinstance(name, str) and name not in ("", ".", "..") and not set(name) & set("/\\\0")
