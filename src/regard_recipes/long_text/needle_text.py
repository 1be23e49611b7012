"""A small world for needles in a haystack: real text in whole words, keys and digits that are one token each.

What a model of half a million numbers can learn in minutes is not to copy six digits out of bytes. So words are tokens
(the commonest; the rest are one token), a needle is "number K3f 42 ." with one token for the key and one for every two
digits, and training documents hold needles and, after them, the questions for all of these with their answers: without
such documents no model could learn what is asked of it, and the paper's models, too, must have read text in which keys
come back.

Shapes: L tokens of a haystack, T tokens of a training document.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from regard.checks import ArgumentError
from regard.tasks import NeedleInHaystack

UNKNOWN, NUMBER, STOP = "<unk>", "number", "."
KEYS, VALUES = 256, 100
TRAINED = 16
"""Needles of a training document, 4 to so many where they fit."""
HELD_OUT = 0.2
"""Share of the text, at its end, that haystacks of the evaluation are made of."""
TRAINING, FINAL = 1_000, 2_000_000
"""Seeds of the task: those of training documents begin here, and that of the evaluation."""


@dataclass(frozen=True)
class NeedleWorld:
    """Text and vocabulary.

    Attributes:
        learn, held_out: tokens of the text.
        words: token to word.
        needles: in a haystack; digits: of their numbers.
    """

    learn: tuple[int, ...] = field(repr=False)
    held_out: tuple[int, ...] = field(repr=False)
    words: tuple[str, ...] = field(repr=False)
    needles: int = 5
    digits: int = 2

    @cached_property
    def numbers(self) -> dict[str, int]:
        """Word to token."""
        return {word: i for i, word in enumerate(self.words)}

    @property
    def values(self) -> tuple[int, int]:
        """The first and the last token of numbers."""
        return self.numbers["00"], self.numbers[f"{VALUES - 1}"]

    @property
    def keys(self) -> tuple[int, int]:
        """The first and the last token of keys."""
        return self.numbers["K00"], self.numbers[f"K{KEYS - 1:02x}"]

    def encode(self, sentence: str) -> list[int]:
        """Words with blanks between them; a number is its pairs of digits."""
        pieces = (re.findall("..", word) if word.isdigit() else [word] for word in sentence.split())
        return [self.numbers[piece] for word in pieces for piece in word]

    def decode(self, tokens: Sequence[int]) -> str:
        """Words with blanks between them, pairs of digits without."""
        words = [self.words[token] for token in tokens]
        joined = (" " * (not (one.isdigit() and other.isdigit())) + other for one, other in pairwise(words))
        return "".join([*words[:1], *joined])

    def task(self, length: int, *, training: bool = False, needles: int | None = None) -> NeedleInHaystack:
        """Haystacks of `length` tokens."""
        return NeedleInHaystack(
            self.learn if training else self.held_out,
            length,
            needles=self.needles if needles is None else needles,
            encode=self.encode,
            decode=self.decode,
            digits=self.digits,
            reserved=TRAINED if training else None,
            id_digits=2,
            template=f"{NUMBER} {{key}} {{value}} {STOP}",
            key="K{id}",
        )

    def training_tokens(self, count: int, length: int, seed: int) -> Tensor:
        """Training documents of T = `length` tokens one after another, int32 [about count]: a haystack, and the
        sentences of all its needles once more in another order."""
        tokens: list[int] = []
        sentence = 3 + self.digits // 2
        most = max(1, min(TRAINED, length // (2 * sentence)))
        for index in range(-(-count // length)):
            draw = random.Random(f"{seed}:{index}")
            needles = draw.randint(min(4, most), most)
            task = self.task(length - needles * sentence, training=True, needles=needles)
            example = task.example(TRAINING + seed, index)
            tokens += example.haystack
            for key, value in draw.sample(list(example.numbers.items()), needles):
                tokens += self.encode(task.sentence(key, value))
        return torch.tensor(tokens, dtype=torch.int32)


def learn_answers(model: Any, values: tuple[int, int], keys: tuple[int, int]) -> None:
    """From now on the loss of training counts answers alone: numbers after a key that came before. A `prepare` of runs.

    One token in sixteen is an answer: among all others, which are real text and numbers that nobody can know, models of
    this size do not find out in minutes that there is something to be found.

    Args:
        values, keys: the first and the last token of each kind.
    """

    def mask(module: Any, args: Any, given: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        labels = given.get("labels")
        if module.training and labels is not None:
            given = {**given, "labels": labels.masked_fill(~answers(labels, values, keys), -100)}
        return args, given

    model.register_forward_pre_hook(mask, with_kwargs=True)


def answers(tokens: Tensor, values: tuple[int, int], keys: tuple[int, int]) -> Tensor:
    """Which tokens [B, T] are a number, or part of one, after a key that stood in the row before; boolean [B, T]."""
    is_key, is_value = ((tokens >= low) & (tokens <= high) for low, high in (keys, values))
    ordered, place = tokens.sort(dim=1, stable=True)
    again = torch.nn.functional.pad(ordered[:, 1:] == ordered[:, :-1], (1, 0))
    after, found = is_key & torch.zeros_like(is_key).scatter(1, place, again), torch.zeros_like(is_key)
    while after.any():
        after = torch.nn.functional.pad(after[:, :-1], (1, 0)) & is_value
        found |= after
    return found


def needle_world(data: Path | None, *, common: int, needles: int, digits: int, call: str) -> NeedleWorld:
    """The text of a user, or of the interpreter's manual, as a world.

    Args:
        common: how many words are tokens of their own.

    Raises:
        ArgumentError: text that is missing or too short, or needles that cannot be told apart.
    """
    from regard.training import load_text

    from ..demo.demo_text import python_manual

    content = python_manual(call) if data is None else load_text(data, call=call).content
    if digits < 2 or digits % 2:
        raise ArgumentError(f"{call}: --digits is {digits}, expected an even number above 0: two of them are a token.")
    found = re.findall(r"[^\W\d_]+|[.,;:()]", content)
    if len(found) < 1000:
        raise ArgumentError(f"{call}: the text has {len(found)} words, expected at least 1,000; give more --data.")
    own = [UNKNOWN, NUMBER, STOP, *(f"{i:02d}" for i in range(VALUES)), *(f"K{i:02x}" for i in range(KEYS))]
    known = [word for word, _ in Counter(word.lower() for word in found).most_common(common) if word not in own]
    words = (*own, *known)
    place = {word: i for i, word in enumerate(words)}
    tokens = tuple(place.get(word.lower(), 0) for word in found)
    cut = round(len(tokens) * (1 - HELD_OUT))
    return NeedleWorld(tokens[:cut], tokens[cut:], words, needles, digits)
