"""Reading files from untrusted folders: the type of a file is checked before it is opened."""

import errno
import os
import stat
from pathlib import Path

MOST_JSON = 1 << 28
"""The largest JSON file that is read, in bytes. Tokenizers of large models have about ten million."""
_MOST_HOLES = 1 << 30


def regular_size(path: Path, *, links: bool = True) -> int:
    """Return the size in bytes of a regular file or, with `links`, of one that a symbolic link leads to; raise OSError
    if there is none, or almost nothing of it is on the disk."""
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
