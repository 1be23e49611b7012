"""Reading text from a UTF-8 file or a folder of them in chunks, and splitting it by position.

Of a folder, every file whose suffix is in `TEXT_SUFFIXES` is read, in the order of its path relative to the folder
(compared part by part, as Unicode), with a newline between two files if the first lacks one. Hidden files and folders
are skipped, and so are run folders; links to folders are not followed. A single file is read whatever its suffix. A
byte-order mark is removed; nothing else is changed, line ends included.
"""

import codecs
import hashlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...errors import ArgumentError, require
from ..storage.files import LOCK, regular_size

TEXT_SUFFIXES = (
    *(".txt", ".text", ".md", ".markdown", ".rst", ".org", ".tex", ".csv", ".tsv", ".html", ".xml"),
    *(".json", ".jsonl", ".toml", ".yaml", ".yml", ".ini", ".py", ".pyi", ".c", ".h", ".cc", ".cpp", ".hpp"),
    *(".cu", ".rs", ".go", ".java", ".js", ".ts", ".sh", ".sql", ".jl", ".lua", ".r", ".rb", ".hs", ".ml"),
)


CHUNK = 1 << 20
"""Bytes of a file that are read at once."""


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


@dataclass(frozen=True)
class Source:
    """A text that is read again whenever it is needed, and is never in memory as a whole.

    Attributes:
        path: absolute path of the file or folder, or `datasets:NAME`.
        files: number of files; 0 for a dataset on the Hub.
        chunks: returns an iterator over the text: consecutive parts of any size, or whole documents.
        documents: whether each chunk is a document, which ends with an end-of-text token.
        characters, bytes, sha256: of the text; of a stream, of its held-out part.
        stream: the `data.documents.Documents` to train on if they are read once; `chunks` then has those held out.
    """

    path: Path
    files: int
    chunks: Callable[[], Iterator[str]]
    documents: bool
    characters: int
    bytes: int
    sha256: str
    stream: Any = None

    @classmethod
    def of(cls, path: Path, files: int, chunks: Callable[[], Iterator[str]], *, documents: bool, call: str) -> "Source":
        """Read a text once to measure it; raise `ArgumentError` if it has nothing but white space."""
        digest, characters, size, blank = hashlib.sha256(), 0, 0, True
        for chunk in chunks():
            data = chunk.encode(errors="surrogatepass")
            digest.update(data + b"\xff" if documents else data)  # a byte that UTF-8 never has
            characters, size, blank = characters + len(chunk), size + len(data), blank and not chunk.strip()
        require(not blank, call, f"{path} is empty; give a file, a folder or a dataset that holds text.")
        return cls(path, files, chunks, documents, characters, size, digest.hexdigest())

    def split(self, validation: float) -> tuple[Iterator[str], Iterator[str]]:
        """Return iterators over the first `1 - validation` of the characters, to train on, and over the rest, which is
        held out. A document belongs to the part in which it begins. Of a stream, the first iterator is empty."""
        if self.stream is not None:
            return iter(()), self.chunks()
        cut = self.characters - round(self.characters * validation)
        return self._part(0, cut), self._part(cut, self.characters)

    def _part(self, begin: int, end: int) -> Iterator[str]:
        at = 0
        for chunk in self.chunks():
            if at >= end:
                return
            piece = chunk[max(begin - at, 0) : end - at]
            if self.documents:
                piece = chunk if at >= begin else ""
            if piece:
                yield piece
            at += len(chunk)


def open_text(path: Path | str, *, call: str) -> Source:
    """Measure a UTF-8 file, or all text files of a folder (see the module), to be read in chunks; raise `ArgumentError`
    if there is none, or one that cannot be read, is not a regular file, holds no text, or is not UTF-8."""
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
    return Source.of(path.resolve(), len(files), lambda: _joined(files, call), documents=False, call=call)


def load_text(path: Path | str, *, call: str = "load_text") -> Text:
    """Return the text of a UTF-8 file, or of all text files of a folder (see the module); raise as `open_text`."""
    source = open_text(path, call=call)
    return Text("".join(source.chunks()), source.path, source.files)


def split_text(content: str, validation: float) -> tuple[str, str]:
    """Return the first `1 - validation` of the characters, to train on, and the rest, which is held out.

    Raises:
        ArgumentError: `validation` is below 0 or above 1.
    """
    expected = "expected a share of the text, from 0 to 1"
    require(0 <= validation <= 1, "split_text", f"validation is {validation}, {expected}.")
    cut = len(content) - round(len(content) * validation)
    return content[:cut], content[cut:]


def _text_files(folder: Path) -> Iterator[Path]:
    for root, folders, files in os.walk(folder):
        # a run in the folder would change the text that it is trained on
        folders[:] = [name for name in folders if not (name.startswith(".") or (Path(root) / name / LOCK).exists())]
        for name in files:
            if not name.startswith(".") and Path(name).suffix.lower() in TEXT_SUFFIXES:
                yield Path(root) / name


def _joined(files: list[Path], call: str) -> Iterator[str]:
    """Yield the texts of some files, with a newline between two if the first lacks one."""
    end = "\n"
    for file in files:
        for number, chunk in enumerate(_read(file, call)):
            if number == 0 and end != "\n":
                yield "\n"
            yield chunk
            end = chunk[-1]


def _read(file: Path, call: str) -> Iterator[str]:
    """Yield the characters of a file, never an empty chunk."""
    decoder, read = codecs.getincrementaldecoder("utf-8-sig")(), 0
    try:
        regular_size(file)  # a pipe or a device could be read forever, and a resumed run reads its text again
        with open(file, "rb") as opened:
            while data := opened.read(CHUNK):
                read += len(data)
                if chunk := decoder.decode(data):
                    yield chunk
        decoder.decode(b"", final=True)  # an error if the last character is cut off
    except UnicodeDecodeError as error:
        offset = read - len(error.object) + error.start
        byte = f"byte 0x{error.object[error.start]:02x} at offset {offset}"
        hint = "convert it, for instance with `iconv -f latin1 -t utf-8`"
        raise ArgumentError(f"{call}: {file} is not UTF-8 ({byte}); {hint}.") from None
    except OSError as error:
        raise ArgumentError(f"{call}: cannot read {file}: {error.strerror or error}.") from None
