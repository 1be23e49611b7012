"""The text of a recipe, in tokens of any of the trainer's tokenizers."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from regard.checks import ArgumentError

from .language_training import Corpus

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

HELD_OUT = 0.1
"""Share of the text that is held out, at its end; less of a long text."""
LEAST = 40_000
"""Least number of characters that are held out of a long text, so that they are on several topics."""
LONGEST_TOKEN = 8
"""Upper bound of the characters of a token."""
PADDED = 64
"""Vocabularies of more than a thousand tokens are rounded up to a multiple of this: such matrices are faster."""


@dataclass(frozen=True, kw_only=True)
class LanguageText:
    """A text as tokens, int32 [n] each part: to learn, to measure results on, and between the two those to choose
    settings on (none where nothing is chosen). `described` is for people."""

    tokenizer: PreTrainedTokenizerBase
    train_tokens: Tensor
    held_out_tokens: Tensor
    choice_tokens: Tensor
    described: dict[str, str]

    @property
    def vocabulary(self) -> int:
        """Return the number of tokens of a model."""
        count = len(self.tokenizer)
        return count if count <= 1000 else -(-count // PADDED) * PADDED

    @property
    def corpus(self) -> Corpus:
        """Return the text to train on and to measure results on."""
        return Corpus(self.train_tokens, self.held_out_tokens)

    def words(self, tokens: Tensor) -> list[str]:
        """Return the text of every token [n]."""
        return [self.tokenizer.decode([token]) for token in tokens.tolist()]


def windows(tokens: Tensor, context: int) -> Tensor:
    """Return the windows of a text without overlap, [W, T]."""
    return tokens[: len(tokens) // context * context].view(-1, context)


def read_text(
    data: Path | None, tokenizer: str, *, context: int, measured: int, call: str, choice: int = 0
) -> LanguageText:
    """Read (`source_text`), split and encode a text.

    Args:
        context: least length of each part, in tokens.
        measured, choice: held-out tokens that are wanted for the results, and before them to choose settings on.
    """
    from regard.training import TOKENIZERS, encode, split_text

    from ..demo.demo_text import source_text

    source, content = source_text(data, call)
    share = min(HELD_OUT, max(LEAST, LONGEST_TOKEN * (measured + choice)) / len(content))
    learn, held_out = split_text(content, share)
    made = TOKENIZERS.get(tokenizer)(learn)
    train_tokens, unseen = encode(made, learn), encode(made, held_out)
    cut = min(choice, len(unseen) // 3)
    choice_tokens, held_out_tokens = unseen[:cut], unseen[cut:]
    if min(len(train_tokens), len(held_out_tokens), len(choice_tokens) if choice else context) < context:
        raise ArgumentError(
            f"{call}: the text has {len(content):,} characters, {len(train_tokens):,} tokens to learn and "
            f"{len(unseen):,} held out; each part must have at least a context of {context}, so give about "
            f"{round((3 if choice else 1) * context / HELD_OUT):,} tokens or more, or a smaller --context."
        )
    chosen_on = f", {cut:,} more to choose on" if choice else ""
    described = {
        "source": source, "characters": f"{len(content):,}",
        "tokens": f"{len(train_tokens):,} to learn from, {len(held_out_tokens):,} held out{chosen_on}",
        "tokenizer": f"{tokenizer}, {len(made):,} tokens",
        "SHA-256": hashlib.sha256(content.encode()).hexdigest(),
    }  # fmt: skip
    return LanguageText(
        tokenizer=made, train_tokens=train_tokens, held_out_tokens=held_out_tokens, choice_tokens=choice_tokens,
        described=described,
    )  # fmt: skip
