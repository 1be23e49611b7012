"""The text of the ICLM recipes: split in three, in tokens of any of the trainer's tokenizers."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from ..checks import ArgumentError
from .language_runs import Corpus

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

HELD_OUT = 0.1
"""Share of the text that is held out, at its end; less of a long text."""


@dataclass(frozen=True, kw_only=True)
class Reading:
    """A text, prepared.

    Attributes:
        tokenizer: made from, or chosen for, the part to learn.
        learn: tokens to learn from, int32 [n].
        start, rest: the held-out tokens; settings are chosen on the start, results measured on the rest.
        described: for people.
    """

    tokenizer: PreTrainedTokenizerBase
    learn: Tensor
    start: Tensor
    rest: Tensor
    described: dict[str, str]

    @property
    def vocabulary(self) -> int:
        """How many tokens there are."""
        return len(self.tokenizer)

    @property
    def choosing(self) -> Corpus:
        """What settings are chosen on."""
        return Corpus(self.learn, self.start)

    @property
    def final(self) -> Corpus:
        """What results are measured on."""
        return Corpus(self.learn, self.rest)

    def words(self, tokens: Tensor) -> list[str]:
        """Every token [n] as text."""
        return [self.tokenizer.decode([token]) for token in tokens.tolist()]


def read(data: Path | None, tokenizer: str, *, context: int, measured: int, call: str) -> Reading:
    """Read, split and encode.

    Args:
        data: a UTF-8 file or a folder; None for the manual inside the interpreter.
        tokenizer: a name of the trainer's tokenizers.
        context: least length of each part, in tokens.
        measured: held-out tokens that are wanted for the results; half as many again are wanted to choose on.

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
    share = min(HELD_OUT, 12 * measured / len(content))  # no token of text is much longer than eight characters
    learn, held_out = split_text(content, share)
    made = TOKENIZERS.get(tokenizer)(learn)
    tokens, unseen = encode(made, learn), encode(made, held_out)
    cut = min(measured // 2, len(unseen) // 3)
    start, rest = unseen[:cut], unseen[cut:]
    if min(len(tokens), len(start), len(rest)) < context:
        raise ArgumentError(
            f"{call}: the text has {len(content):,} characters, {len(tokens):,} tokens to learn and {len(unseen):,} "
            f"held out; every part must have at least a context of {context} and the start a third of what is held "
            f"out, so give about {round(3.3 * context / HELD_OUT):,} tokens or more, or a smaller --context."
        )
    described = {
        "source": source,
        "characters": f"{len(content):,}",
        "tokens": f"{len(tokens):,} to learn from, {len(start):,} to choose on, {len(rest):,} to measure on",
        "tokenizer": f"{tokenizer}, {len(made):,} tokens",
        "SHA-256": hashlib.sha256(content.encode()).hexdigest(),
    }
    return Reading(tokenizer=made, learn=tokens, start=start, rest=rest, described=described)
