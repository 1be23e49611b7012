"""Texts with needles for small models: whole words of real text; a key and every two digits are one token.

Small models do not learn in minutes to copy six digits from bytes. So the commonest words are tokens (the rest share
one), and a needle is "number K3f 42 .". Training documents hold needles and then, in another order, the questions for
all of them with the answers: a model must have seen keys that come back to learn to answer.

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
"""Largest number of needles of a training document; the least is 4, if they fit."""
HELD_OUT = 0.2
"""Share of the text, at its end, from which haystacks of the evaluation are made."""
TRAINING, FINAL = 1_000, 2_000_000
"""First seed of the task for training documents, and its seed for the evaluation."""


@dataclass(frozen=True)
class NeedleWorld:
    """Tokens of the text to learn and held out, the word of each token, needles of a haystack, and their digits."""

    learn: tuple[int, ...] = field(repr=False)
    held_out: tuple[int, ...] = field(repr=False)
    words: tuple[str, ...] = field(repr=False)
    needles: int = 5
    digits: int = 2

    @cached_property
    def numbers(self) -> dict[str, int]:
        """Return a mapping of words to tokens."""
        return {word: i for i, word in enumerate(self.words)}

    @property
    def values(self) -> tuple[int, int]:
        """Return the first and the last token of numbers."""
        return self.numbers["00"], self.numbers[f"{VALUES - 1}"]

    @property
    def keys(self) -> tuple[int, int]:
        """Return the first and the last token of keys."""
        return self.numbers["K00"], self.numbers[f"K{KEYS - 1:02x}"]

    def encode(self, sentence: str) -> list[int]:
        """Return the tokens of words separated by spaces; a number is split into pairs of digits."""
        pieces = (re.findall("..", word) if word.isdigit() else [word] for word in sentence.split())
        return [self.numbers[piece] for word in pieces for piece in word]

    def decode(self, tokens: Sequence[int]) -> str:
        """Return words separated by spaces, and pairs of digits joined."""
        words = [self.words[token] for token in tokens]
        joined = (" " * (not (one.isdigit() and other.isdigit())) + other for one, other in pairwise(words))
        return "".join([*words[:1], *joined])

    def task(self, length: int, *, training: bool = False, needles: int | None = None) -> NeedleInHaystack:
        """Return a task with haystacks of `length` tokens."""
        return NeedleInHaystack(
            self.learn if training else self.held_out, length, needles=needles or self.needles, encode=self.encode,
            decode=self.decode, digits=self.digits, reserved=TRAINED if training else None, id_digits=2,
            template=f"{NUMBER} {{key}} {{value}} {STOP}", key="K{id}",
        )  # fmt: skip

    def training_tokens(self, count: int, length: int, seed: int) -> Tensor:
        """Return training documents of T = `length` tokens one after another, int32 [about count]: a haystack, then
        all its needles again in another order."""
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
    """Count only answers in the training loss of a model: numbers after a key that came before. `values` and `keys` are
    the first and the last token of each kind.

    One token in sixteen is an answer; small models do not find them in minutes among text and unpredictable numbers.
    """

    def mask(module: Any, args: Any, given: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        labels = given.get("labels")
        if module.training and labels is not None:
            given = {**given, "labels": labels.masked_fill(~answers(labels, values, keys), -100)}
        return args, given

    model.register_forward_pre_hook(mask, with_kwargs=True)


def answers(tokens: Tensor, values: tuple[int, int], keys: tuple[int, int]) -> Tensor:
    """Return which tokens [B, T] are part of a number after a key that came earlier in the row, boolean [B, T]."""
    is_key, is_value = ((tokens >= low) & (tokens <= high) for low, high in (keys, values))
    ordered, place = tokens.sort(dim=1, stable=True)
    again = torch.nn.functional.pad(ordered[:, 1:] == ordered[:, :-1], (1, 0))
    after, found = is_key & torch.zeros_like(is_key).scatter(1, place, again), torch.zeros_like(is_key)
    while after.any():
        after = torch.nn.functional.pad(after[:, :-1], (1, 0)) & is_value
        found |= after
    return found


def needle_world(data: Path | None, *, common: int, needles: int, digits: int, call: str) -> NeedleWorld:
    """Return the user's text, or the interpreter's manual, with a vocabulary of `common` words of its own.

    Raises:
        ArgumentError: the text is missing or too short, or the number of digits is odd.
    """
    from ..demo.demo_text import source_text

    _, content = source_text(data, call)
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
