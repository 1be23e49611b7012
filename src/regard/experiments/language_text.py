"""The text of a recipe, in tokens of any of the trainer's tokenizers."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from ..checks import ArgumentError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

HELD_OUT = 0.1
"""Share of the text that is held out, at its end; less of a long text."""
LEAST = 40_000
"""Characters that are held out of a long text at least: fewer would hang on a single topic."""
LONGEST_TOKEN = 8
"""Characters of a token, on the safe side."""
PADDED = 64
"""Vocabularies of more than a thousand tokens are rounded up to a multiple of this, as the sparse-attention paper does:
matrices of such sizes are faster."""


@dataclass(frozen=True, kw_only=True)
class LanguageText:
    """A text, prepared.

    Attributes:
        tokenizer: made from, or chosen for, the part to learn.
        train_tokens, held_out_tokens: int32 [n].
        described: for people.
    """

    tokenizer: PreTrainedTokenizerBase
    train_tokens: Tensor
    held_out_tokens: Tensor
    described: dict[str, str]

    @property
    def vocabulary(self) -> int:
        """How many tokens a model has."""
        count = len(self.tokenizer)
        return count if count <= 1000 else -(-count // PADDED) * PADDED

    def windows(self, count: int, context: int) -> list[list[int]]:
        """The first held-out windows, `count` at most and one at least, without overlap."""
        tokens = self.held_out_tokens
        many = max(1, min(count, len(tokens) // context))
        return [tokens[i * context : (i + 1) * context].tolist() for i in range(many)]


def read_text(data: Path | None, tokenizer: str, *, context: int, measured: int, call: str) -> LanguageText:
    """Read, split and encode.

    Args:
        data: a UTF-8 file or a folder; None for the manual inside the interpreter.
        tokenizer: a name of the trainer's tokenizers.
        context: least length of each part, in tokens.
        measured: held-out tokens that are wanted.

    Raises:
        ArgumentError: the text is missing, empty, not UTF-8 or too short, or the tokenizer cannot be made.
    """
    from ..training import TOKENIZERS, encode, load_text, split_text
    from .demo_text import python_manual

    if data is None:
        source, content = "the Python manual inside this interpreter (pydoc_data.topics)", python_manual(call)
    else:
        text = load_text(data, call=call)
        source, content = str(text.path), text.content
    learn, held_out = split_text(content, min(HELD_OUT, max(LEAST, LONGEST_TOKEN * measured) / len(content)))
    made = TOKENIZERS.get(tokenizer)(learn)
    train_tokens, held_out_tokens = encode(made, learn), encode(made, held_out)
    if min(len(train_tokens), len(held_out_tokens)) < context:
        raise ArgumentError(
            f"{call}: the text has {len(content):,} characters, {len(train_tokens):,} tokens to learn and "
            f"{len(held_out_tokens):,} held out; each part must have at least a context of {context}, so give about "
            f"{round(context / HELD_OUT):,} tokens or more, or a smaller --context."
        )
    described = {
        "source": source,
        "characters": f"{len(content):,}",
        "tokens": f"{len(train_tokens):,} to learn from, {len(held_out_tokens):,} held out",
        "tokenizer": f"{tokenizer}, {len(made):,} tokens",
        "SHA-256": hashlib.sha256(content.encode()).hexdigest(),
    }
    return LanguageText(tokenizer=made, train_tokens=train_tokens, held_out_tokens=held_out_tokens, described=described)
