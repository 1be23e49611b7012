"""Short and long documents, as texts on which short and long memory help.

By default, short documents are docstrings of the interpreter's standard library, a few hundred characters each, in an
order unrelated to their place. Long documents are whole modules of at least 40,000 characters, in which names recur;
their docstrings are left out of the short ones. Each kind can be replaced by the user's files. Whole documents are held
out.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import sysconfig
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from regard.checks import ArgumentError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

LONG, SHORTEST, LONGEST = 40_000, 120, 2000
"""Least length of a long document, and least and largest length of a short one, in characters."""
HELD_OUT = 8
"""One of this many documents is held out."""
_LEFT_OUT = {"test", "tests", "idle_test", "site-packages", "dist-packages", "lib2to3", "pydoc_data", "__pycache__"}
_TABLES = {"entities.py", "locale.py", "_pydecimal.py"}
"""Modules that are long, but do not use the same names again and again."""


@dataclass(frozen=True, kw_only=True)
class DocumentText:
    """Two kinds of documents as tokens: those to learn, int32 [n], both kinds in equal parts with an end-of-text token
    after each document, and those held out, "short" (packed) and "long" (the beginnings of documents), int32 [D, L]."""

    tokenizer: PreTrainedTokenizerBase
    train_tokens: Tensor
    kinds: dict[str, Tensor]
    described: dict[str, str]

    @property
    def held_out_tokens(self) -> Tensor:
        """Return the first document of each kind, int32 [m], for learning curves."""
        return torch.cat([documents[0] for documents in self.kinds.values()])


def read_documents(
    short: Path | None, long: Path | None, tokenizer: str, *, length: int, count: int, call: str
) -> DocumentText:
    """Read documents, hold `count` of `length` tokens of each kind out, and encode them.

    Args:
        short: a UTF-8 file of documents with empty lines between them; None for docstrings.
        long: a folder of UTF-8 files, a document each; None for modules.

    Raises:
        ArgumentError: a text is missing, not UTF-8, or too short.
    """
    from regard.training import TOKENIZERS, encode

    modules = {} if short is not None and long is not None else standard_library()
    texts = {
        "short": docstrings(modules) if short is None else paragraphs(short, call),
        "long": long_modules(modules) if long is None else files(long, call),
    }
    parts = {kind: split(documents) for kind, documents in texts.items()}
    made = TOKENIZERS.get(tokenizer)("\n".join(text for learn, _ in parts.values() for text in learn))
    end = torch.tensor([made.eos_token_id], dtype=torch.int32)

    def encoded(documents: Iterable[str]) -> list[Tensor]:
        return [torch.cat([encode(made, text), end]) for text in documents]

    learned = [encoded(learn) for learn, _ in parts.values()]
    most = min(sum(map(len, documents)) for documents in learned)
    packed = _joined(encoded(parts["short"][1]))
    kinds = {
        "short": [packed[i * length : (i + 1) * length] for i in range(len(packed) // length)],
        "long": [document[:length] for document in encoded(parts["long"][1]) if len(document) > length],
    }
    for kind, documents in kinds.items():
        if len(documents) < count:
            raise ArgumentError(
                f"{call}: there are {len(documents)} held-out {kind} documents of {length} tokens, expected {count}; "
                f"give more --{kind} text, or fewer or shorter --documents."
            )
    described = {
        "short": _source(short, "docstrings of the standard library", texts["short"]),
        "long": _source(long, "modules of the standard library", texts["long"]),
        "held out": f"one document of {HELD_OUT}; {count} x {length:,} tokens of each kind are read",
        "tokens": f"{2 * most:,} to learn from, half of each kind, from the beginnings of all documents",
        "tokenizer": f"{tokenizer}, {len(made):,} tokens",
    }
    pieces = (document[: round(most / sum(map(len, documents)) * len(document))]
              for documents in learned for document in documents)  # fmt: skip
    stacked = {kind: torch.stack(documents[:count]) for kind, documents in kinds.items()}
    return DocumentText(tokenizer=made, train_tokens=_joined(pieces), kinds=stacked, described=described)


def split(documents: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the documents to learn and those held out: every `HELD_OUT`-th in the order of their digests."""
    order = sorted(documents, key=lambda text: hashlib.sha256(text.encode()).digest())
    return [text for i, text in enumerate(order) if i % HELD_OUT], order[::HELD_OUT]


def _joined(parts: Iterable[Tensor]) -> Tensor:
    return torch.cat([torch.empty(0, dtype=torch.int32), *parts])


def _source(path: Path | None, default: str, documents: Sequence[str]) -> str:
    digest, total = hashlib.sha256("\0".join(sorted(documents)).encode()).hexdigest(), sum(map(len, documents))
    return f"{default if path is None else path}: {len(documents):,} of {total:,} characters, SHA-256 {digest}"


def standard_library() -> dict[str, str]:
    """Return the modules of this interpreter by path, without tests."""
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
    """Return whole modules of at least `LONG` characters."""
    return [text for path, text in modules.items() if _is_long(path, text)]


def docstrings(modules: dict[str, str]) -> list[str]:
    """Return the docstrings of the other modules, each once."""
    found: dict[str, None] = {}
    for path, text in modules.items():
        try:
            nodes = [] if _is_long(path, text) else list(ast.walk(ast.parse(text)))
        except (SyntaxError, ValueError):
            continue
        for node in nodes:
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                doc = inspect.cleandoc(ast.get_docstring(node) or "")
                if SHORTEST <= len(doc) <= LONGEST:
                    found[doc] = None
    return list(found)


def paragraphs(path: Path, call: str) -> list[str]:
    """Return the documents of a file, which are separated by empty lines."""
    from regard.training import load_text

    parts = (part.strip() for part in load_text(path, call=call).content.split("\n\n"))
    return list(dict.fromkeys(part for part in parts if part))


def files(path: Path, call: str) -> list[str]:
    """Return the files of a folder, each a document; an ArgumentError says that there is no such folder."""
    from regard.training import load_text

    if not path.is_dir():
        raise ArgumentError(f"{call}: --long {path} is not a folder; give one with a file for each document.")
    names = sorted(name for name in path.iterdir() if name.is_file() and not name.name.startswith("."))
    return [load_text(name, call=call).content for name in names]
