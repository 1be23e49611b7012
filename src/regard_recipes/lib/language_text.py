"""The text of a recipe, in tokens of any of the trainer's tokenizers."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from regard.checks import ArgumentError, require

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

HELD_OUT = 0.1  # share of the text that is held out, at its end; less of a long text
LEAST = 40_000  # least number of characters that are held out of a long text, so that they are on several topics
LONGEST_TOKEN = 8  # upper bound of the characters of a token
PADDED = 64
"""Vocabularies of more than a thousand tokens are rounded up to a multiple of this: such matrices are faster."""


@dataclass(frozen=True)
class Corpus:
    """A text as tokens, int [n] each."""

    train_tokens: Tensor
    held_out_tokens: Tensor


@dataclass(frozen=True, kw_only=True)
class LanguageText(Corpus):
    """A text, of which the last `share` is held out, and its tokens, int32 [n] each: to learn, then to choose settings
    on (none where nothing is chosen), then to measure results on. `described` is for people."""

    content: str
    share: float
    tokenizer: PreTrainedTokenizerBase
    choice_tokens: Tensor
    described: dict[str, str]

    @property
    def vocabulary(self) -> int:
        """Return the number of tokens of a model."""
        count = len(self.tokenizer)
        return count if count <= 1000 else -(-count // PADDED) * PADDED

    @property
    def held_out(self) -> str:
        """Return the characters that are held out, all after those to learn from."""
        from regard.training import split_text

        return split_text(self.content, self.share)[1]

    def words(self, tokens: Tensor) -> list[str]:
        """Return the text of every token [n]."""
        return [self.tokenizer.decode([token]) for token in tokens.tolist()]


def windows(tokens: Tensor, context: int) -> Tensor:
    """Return the windows of a text without overlap, [W, T]."""
    return tokens[: len(tokens) // context * context].view(-1, context)


def read_text(
    data: Path | None, tokenizer: str, *, context: int, call: str, measured: int = 0, choice: int = 0,
    longest: int | None = None,
) -> LanguageText:  # fmt: skip
    """Read (`source_text`), split and encode a text.

    Args:
        context: least length of each part, in tokens.
        measured, choice: held-out tokens that are wanted for the results, and before them to choose settings on.
        longest: characters that are used at most.
    """
    from regard.training import TOKENIZERS, encode, split_text

    source, whole = source_text(data, call)
    content = whole[:longest]
    if len(content) < len(whole):
        source += f", the first {longest:,} of {len(whole):,} characters"
    share = min(HELD_OUT, max(LEAST, LONGEST_TOKEN * (measured + choice)) / len(content))
    learn, held_out = split_text(content, share)
    encoder = TOKENIZERS.get(tokenizer)(learn)
    train_tokens, unseen = encode(encoder, learn), encode(encoder, held_out)
    cut = min(choice, len(unseen) // 3)
    choice_tokens, held_out_tokens = unseen[:cut], unseen[cut:]
    shortest = min(len(train_tokens), len(held_out_tokens), len(choice_tokens) if choice else context)
    has = f"{len(content):,} characters, {len(train_tokens):,} tokens to learn and {len(unseen):,} held out"
    least = f"each part must have at least a context of {context}"
    more = f"about {round((3 if choice else 1) * context / HELD_OUT):,} tokens or more"
    hint = f"give {more}, or a smaller --context if the command has this option"
    require(shortest >= context, call, f"{source} has {has}; {least}, so {hint}.")
    chosen_on = f", {cut:,} more to choose on" if choice else ""
    described = {
        "source": source, "characters": f"{len(content):,}",
        "tokens": f"{len(train_tokens):,} to learn from, {len(held_out_tokens):,} held out{chosen_on}",
        "tokenizer": f"{tokenizer}, {len(encoder):,} tokens",
        "SHA-256": hashlib.sha256(content.encode()).hexdigest(),
    }  # fmt: skip
    return LanguageText(
        train_tokens, held_out_tokens, content=content, share=share, tokenizer=encoder, choice_tokens=choice_tokens,
        described=described,
    )  # fmt: skip


def source_text(data: Path | None, call: str) -> tuple[str, str]:
    """Return the user's text, or the interpreter's manual, after a description of where it came from."""
    if data is None:
        return "the Python manual inside this interpreter (pydoc_data.topics)", python_manual(call)
    from regard.training import load_text

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
    """Join topics in sorted order, every paragraph once (compared without blanks and line breaks): topics overlap, so
    that part of the held-out text would also be in the training text."""
    kept: dict[str, tuple[str, str]] = {}  # words of a paragraph to its topic and text
    for name in sorted(topics):
        for paragraph in topics[name].split("\n\n"):
            kept.setdefault(" ".join(paragraph.split()), (name, paragraph.strip("\n")))
    kept.pop("", None)
    by_topic = groupby(kept.values(), key=itemgetter(0))
    return "\n\n\n".join("\n\n".join(text for _, text in group) for _, group in by_topic) + "\n"
