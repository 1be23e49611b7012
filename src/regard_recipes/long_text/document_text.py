"""Short documents and long ones: two texts that differ in how far back it pays to remember.

Short: docstrings of the interpreter's standard library, a few hundred characters each, in an order that has nothing to
do with where they stand. Long: whole modules of 40,000 characters or more, in which names recur. Modules that are read
as long documents give no docstrings. Both are on every machine, and each may be replaced by files of one's own. Whole
documents are held out.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import sysconfig
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from regard.checks import ArgumentError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

LONG, SHORTEST, LONGEST = 40_000, 120, 2000
"""Characters of a long document at least, and of a short one at least and at most."""
HELD_OUT = 8
"""One document of so many is held out."""
_LEFT_OUT = {"test", "tests", "idle_test", "site-packages", "dist-packages", "lib2to3", "pydoc_data", "__pycache__"}
_TABLES = {"entities.py", "locale.py", "_pydecimal.py"}
"""Modules that are long for other reasons than that much is told about few names."""


@dataclass(frozen=True, kw_only=True)
class DocumentText:
    """Two kinds of documents, prepared.

    Attributes:
        tokenizer: chosen for, or made from, the part to learn.
        train_tokens: int32 [n], both kinds in equal parts, documents with an end-of-text token after each.
        held_out_tokens: int32 [m], the first of `short` and of `long`, for learning curves.
        short: held-out short documents, packed, int32 [D, L]; long: the beginnings of D long ones, int32 [D, L].
        described: for people.
    """

    tokenizer: PreTrainedTokenizerBase
    train_tokens: Tensor
    held_out_tokens: Tensor
    short: Tensor
    long: Tensor
    described: dict[str, str]

    @property
    def vocabulary(self) -> int:
        """How many tokens a model has."""
        return len(self.tokenizer)

    @property
    def kinds(self) -> dict[str, Tensor]:
        """Name to held-out documents [D, L]."""
        return {"short": self.short, "long": self.long}


def read_documents(
    short: Path | None, long: Path | None, tokenizer: str, *, length: int, count: int, call: str
) -> DocumentText:
    """Read, split by documents, and encode.

    Args:
        short: a UTF-8 file of documents with empty lines between them; None for docstrings.
        long: a folder of UTF-8 files, a document each; None for modules.
        tokenizer: a name of the trainer's tokenizers.
        length: L, tokens of a held-out document; count: D, how many of each kind.

    Raises:
        ArgumentError: text that is missing, not UTF-8 or too little for what is asked.
    """
    from regard.training import TOKENIZERS, encode

    modules = None if short is not None and long is not None else standard_library()
    texts = {
        "short": docstrings(modules or {}) if short is None else paragraphs(short, call),
        "long": long_modules(modules or {}) if long is None else files(long, call),
    }
    learn, held_out = {}, {}
    for kind, documents in texts.items():
        learn[kind], held_out[kind] = split(documents)
    made = TOKENIZERS.get(tokenizer)("\n".join(text for documents in learn.values() for text in documents))
    end = torch.tensor([made.eos_token_id], dtype=torch.int32)
    encoded = lambda documents: [torch.cat([encode(made, text), end]) for text in documents]  # noqa: E731
    parts = [encoded(documents) for documents in learn.values()]
    most = min(sum(map(len, documents)) for documents in parts)
    packed = _joined(encoded(held_out["short"]))
    begun = [document[:length] for document in encoded(held_out["long"]) if len(document) > length]
    for kind, have, want in (("short", len(packed) // length, count), ("long", len(begun), count)):
        if have < want:
            raise ArgumentError(
                f"{call}: there are {have} held-out {kind} documents of {length} tokens, expected {want}; give more "
                f"--{kind} text, or fewer or shorter --documents."
            )
    found = {"short": packed[: count * length].view(count, length), "long": torch.stack(begun[:count])}
    return DocumentText(
        tokenizer=made,
        train_tokens=_joined(piece for documents in parts for piece in beginnings(documents, most)),
        held_out_tokens=torch.cat([documents[0] for documents in found.values()]),
        **found,
        described={
            "short": _told(short, "docstrings of the standard library", texts["short"]),
            "long": _told(long, "modules of the standard library", texts["long"]),
            "held out": f"one document of {HELD_OUT}; {count} x {length:,} tokens of each kind are read",
            "tokens": f"{2 * most:,} to learn from, half of each kind, from the beginnings of all documents",
            "tokenizer": f"{tokenizer}, {len(made):,} tokens",
        },
    )


def split(documents: Sequence[str]) -> tuple[list[str], list[str]]:
    """(to learn, held out): every `HELD_OUT`-th in the order of their digests, which has nothing to do with theirs."""
    order = sorted(documents, key=lambda text: hashlib.sha256(text.encode()).digest())
    return [text for i, text in enumerate(order) if i % HELD_OUT], order[::HELD_OUT]


def beginnings(documents: Sequence[Tensor], count: int) -> list[Tensor]:
    """The same share of every document, from its beginning: about `count` tokens in all."""
    share = count / max(1, sum(map(len, documents)))
    return [document[: round(share * len(document))] for document in documents]


def _joined(parts: Iterable[Tensor]) -> Tensor:
    return torch.cat([torch.empty(0, dtype=torch.int32), *parts])


def _told(path: Path | None, default: str, documents: Sequence[str]) -> str:
    digest = hashlib.sha256("\0".join(sorted(documents)).encode()).hexdigest()
    total = sum(map(len, documents))
    return f"{default if path is None else path}: {len(documents):,} of {total:,} characters, SHA-256 {digest}"


# What is on every machine ----------------------------------------------------------------------------------------


def standard_library() -> dict[str, str]:
    """Modules of this interpreter by their paths, without tests."""
    root = Path(sysconfig.get_paths()["stdlib"])
    found = {}
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).parts
        if _LEFT_OUT.isdisjoint(parts):
            try:
                found["/".join(parts)] = path.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError):
                continue
    return found


def _is_long(path: str, text: str) -> bool:
    return len(text) >= LONG and path.rpartition("/")[2] not in _TABLES


def long_modules(modules: dict[str, str]) -> list[str]:
    """Whole modules of `LONG` characters or more."""
    return [text for path, text in modules.items() if _is_long(path, text)]


def docstrings(modules: dict[str, str]) -> list[str]:
    """Docstrings of the other modules, each once."""
    found: dict[str, None] = {}
    for path, text in modules.items():
        if _is_long(path, text):
            continue
        try:
            tree = ast.parse(text)
        except (SyntaxError, ValueError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                doc = inspect.cleandoc(ast.get_docstring(node) or "")
                if SHORTEST <= len(doc) <= LONGEST:
                    found[doc] = None
    return list(found)


# What the user gives ---------------------------------------------------------------------------------------------


def paragraphs(path: Path, call: str) -> list[str]:
    """Documents of a file, empty lines between them."""
    from regard.training import load_text

    parts = (part.strip() for part in load_text(path, call=call).content.split("\n\n"))
    return list(dict.fromkeys(part for part in parts if part))


def files(path: Path, call: str) -> list[str]:
    """The files of a folder, each a document.

    Raises:
        ArgumentError: no folder, or a file that is not UTF-8.
    """
    from regard.training import load_text

    if not path.is_dir():
        raise ArgumentError(f"{call}: --long {path} is not a folder; give one with a file for each document.")
    names: list[Any] = sorted(name for name in path.iterdir() if name.is_file() and not name.name.startswith("."))
    return [load_text(name, call=call).content for name in names]
