"""Reading text from a UTF-8 file or a folder of them, and splitting it by position.

Of a folder, every file whose suffix is in `TEXT_SUFFIXES` is read, in the order of its path relative to the folder
(compared part by part, as Unicode), with a newline between two files if the first lacks one. Hidden files and folders
are skipped, links to folders are not followed. A single file is read whatever its suffix. A byte-order mark is removed;
nothing else is changed, line ends included.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ...errors import ArgumentError
from ..storage.files import regular_size

TEXT_SUFFIXES = (
    *(".txt", ".text", ".md", ".markdown", ".rst", ".org", ".tex", ".csv", ".tsv", ".html", ".xml"),
    *(".json", ".jsonl", ".toml", ".yaml", ".yml", ".ini", ".py", ".pyi", ".c", ".h", ".cc", ".cpp", ".hpp"),
    *(".cu", ".rs", ".go", ".java", ".js", ".ts", ".sh", ".sql", ".jl", ".lua", ".r", ".rb", ".hs", ".ml"),
)


@dataclass(frozen=True)
class Text:
    """A text and its source.

    Attributes:
        content: the characters.
        path: absolute path of the file or folder.
        files: number of files.
    """

    content: str
    path: Path
    files: int

    @property
    def sha256(self) -> str:
        """Return the digest of the UTF-8 bytes."""
        return hashlib.sha256(self.content.encode()).hexdigest()


def load_text(path: Path | str, *, call: str = "load_text") -> Text:
    """Read a UTF-8 file, or all text files of a folder (see the module).

    Raises:
        ArgumentError: the path does not exist, cannot be read, is a pipe or a device, holds no text, or is not UTF-8.
    """
    path = Path(path).expanduser()
    if path.is_dir():
        files = sorted(_text_files(path), key=lambda file: file.relative_to(path).parts)
        if not files:
            read = f"files ending in {', '.join(TEXT_SUFFIXES[:4])}, ... are read; name one file to read another kind"
            raise ArgumentError(f"{call}: folder {path} holds no text files; {read}.")
    elif path.exists():
        files = [path]
    else:
        raise ArgumentError(f"{call}: {path} does not exist; give a UTF-8 text file or a folder of them.")
    parts = [part for part in (_read(file, call) for file in files) if part]
    joined = "".join(part if part.endswith("\n") else part + "\n" for part in parts)
    if parts and not parts[-1].endswith("\n"):
        joined = joined[:-1]
    if not joined.strip():
        raise ArgumentError(f"{call}: {path} is empty; give a file or folder that holds text.")
    return Text(joined, path.resolve(), len(files))


def split_text(content: str, validation: float) -> tuple[str, str]:
    """Return the first `1 - validation` of the characters, to train on, and the rest, which is held out."""
    cut = len(content) - round(len(content) * validation)
    return content[:cut], content[cut:]


def _text_files(folder: Path) -> Iterator[Path]:
    for root, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in files:
            if not name.startswith(".") and Path(name).suffix.lower() in TEXT_SUFFIXES:
                yield Path(root) / name


def _read(file: Path, call: str) -> str:
    try:
        regular_size(file)  # a pipe or a device could be read forever, and a resumed run reads its text again
        return file.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        byte = f"byte 0x{error.object[error.start]:02x} at offset {error.start}"
        mend = "convert it, for instance with `iconv -f latin1 -t utf-8`"
        raise ArgumentError(f"{call}: {file} is not UTF-8 ({byte}); {mend}.") from None
    except OSError as error:
        raise ArgumentError(f"{call}: cannot read {file}: {error.strerror or error}.") from None
