"""The text of the demo: the Python manual, which every machine has, or the user's own."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from regard.checks import ArgumentError
from regard.training import char_tokenizer, encode, load_text, split_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

LONGEST = 4_000_000  # characters that are used at most, so that n-grams are counted in seconds
HELD_OUT, MOST_HELD_OUT = 0.1, 40_000  # share of the text that is held out, at its end, and its most characters


@dataclass(frozen=True, kw_only=True)
class Material:
    """The text of a demo, of which the last share `share` is `held_out`; its tokens, int32 [n], one for each character;
    and the beginning of the first held-out paragraph, for attention maps and (`prompt`) samples."""

    source: str
    content: str
    held_out: str
    share: float
    tokenizer: PreTrainedTokenizerBase
    train_tokens: Tensor
    held_out_tokens: Tensor
    excerpt: str

    @property
    def excerpt_tokens(self) -> Tensor:
        """Return the tokens of the excerpt, int32 [n]."""
        start = self.held_out.index(self.excerpt)
        return self.held_out_tokens[start : start + len(self.excerpt)]

    @property
    def prompt(self) -> str:
        """Return the excerpt without its last word, or all of it where that word is more than half."""
        words, _, rest = self.excerpt.rpartition(" ")
        return words if len(words) > len(rest) else self.excerpt

    def described(self) -> dict[str, str]:
        """Return source, sizes and the digest of the UTF-8 bytes as text."""
        return {
            "source": self.source, "characters": f"{len(self.content):,}",
            "held out": f"the last {len(self.held_out):,} characters",
            "vocabulary": f"{len(self.tokenizer)} (with three special tokens)",
            "SHA-256": hashlib.sha256(self.content.encode()).hexdigest(),
        }  # fmt: skip


def prepare(data: Path | None, *, context: int, excerpt: int, call: str) -> Material:
    """Read the text (`source_text`), split it into two parts of at least `context` characters, and encode it."""
    source, content = source_text(data, call)
    if len(content) > LONGEST:
        source += f", the first {LONGEST:,} of {len(content):,} characters"
        content = content[:LONGEST]
    share = min(HELD_OUT, MOST_HELD_OUT / len(content))
    learn, held_out = split_text(content, share)
    if min(len(learn), len(held_out)) < context:
        raise ArgumentError(
            f"{call}: the text in {data} has {len(content):,} characters; the tenth that is held out must "
            f"have at least {context}, so give a text of {round(context / HELD_OUT):,} or more."
        )
    tokenizer = char_tokenizer(learn)
    tokens = {"train_tokens": encode(tokenizer, learn), "held_out_tokens": encode(tokenizer, held_out)}
    return Material(source=source, content=content, held_out=held_out, share=share, tokenizer=tokenizer, **tokens,
                    excerpt=first_paragraph(held_out, excerpt))  # fmt: skip


def first_paragraph(text: str, length: int) -> str:
    """Return `length` characters from the first whole paragraph on, or from the start if there is none."""
    gap = text.find("\n\n")
    start = gap + len(text[gap:]) - len(text[gap:].lstrip()) if gap >= 0 else 0
    return text[start : start + length] if start + length <= len(text) else text[:length]


def source_text(data: Path | None, call: str) -> tuple[str, str]:
    """Return the user's text, or the interpreter's manual, after a description of where it came from."""
    if data is None:
        return "the Python manual inside this interpreter (pydoc_data.topics)", python_manual(call)
    text = load_text(data, call=call)
    return str(text.path), text.content


def python_manual(call: str) -> str:
    """Return the language reference that `help()` shows, as one text; see `join_topics`."""
    try:
        from pydoc_data.topics import topics
    except ImportError:
        raise ArgumentError(
            f"{call}: this Python was installed without its manual (the module pydoc_data.topics), the text "
            "that is used unless you name another; give one with --data FILE."
        ) from None
    return join_topics(topics)


def join_topics(topics: dict[str, str]) -> str:
    """Join topics in sorted order, every paragraph once (compared without blanks and line breaks).

    Topics overlap ("compound" contains "if", "for", "try" nearly word for word). A fifth of the text would be
    repetition, and part of the held-out text would also be in the training text.
    """
    seen: set[str] = set()
    parts = []
    for name in sorted(topics):
        kept = []
        for paragraph in topics[name].split("\n\n"):
            words = " ".join(paragraph.split())
            if words and words not in seen:
                seen.add(words)
                kept.append(paragraph.strip("\n"))
        if kept:
            parts.append("\n\n".join(kept))
    return "\n\n\n".join(parts) + "\n"
