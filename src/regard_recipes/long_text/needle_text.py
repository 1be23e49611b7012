"""Text with needles for small models: whole words of real text; a key and every two digits are one token.

Small models do not learn in minutes to copy six digits from bytes. So the commonest words are tokens (the rest share
one), and a needle is "number K3f 42 .". An example to learn from is a haystack and then needles of it again, drawn
with replacement: only their numbers are asked. If each were asked once, a model could answer without the keys, by
leaving out numbers that were asked before. One token in sixteen is an answer; with a loss on all tokens small models do
not find them in minutes among text and unpredictable numbers.

Where all examples are haystacks, attention without a memory stays for thousands of steps at choosing among the numbers
that it has seen. It learns in hundreds of steps where some examples are pairs: keys with their numbers alone, and then
the same again. So a share of the training examples can be pairs; examples of other splits never are.
"""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import ClassVar

import torch
from torch import Tensor

from regard.checks import ArgumentError
from regard.tasks import NeedleInHaystack, TokenExample, TokenTask
from regard.tasks.tokens import example_of

from ..lib.language_text import source_text

UNKNOWN, NUMBER, STOP = "<unk>", "number", "."
SENTENCE, PAIR = f"{NUMBER} {{key}} {{value}} {STOP}", "{key} {value}"
VALUES = 100
SHARES = {"train": (0.0, 0.8), "validation": (0.8, 0.9), "test": (0.9, 1.0)}
"""Parts of the text that the haystacks of each split are made of."""
LEAST = 1000
"""Least number of words of a text."""


@dataclass(frozen=True)
class NeedleText(TokenTask):
    """Haystacks of a text, each followed by its needles again as questions with answers.

    Attributes:
        text: the words of a text as tokens; words: the word of each token.
        length: tokens of an example; most: its largest number of needles; the least is 1.
        digits: of a needle's number, even.
        key_digits: hexadecimal digits of a key.
        pairs: share of the training examples that are pairs, as many as needles at most.
    """

    name: ClassVar[str] = "needle-text"

    text: tuple[int, ...] = field(repr=False)
    words: tuple[str, ...] = field(repr=False)
    length: int = 128
    most: int = 8
    digits: int = 2
    key_digits: int = 1
    pairs: float = 0.0

    @property
    def vocabulary(self) -> int:
        return len(self.words)

    @cached_property
    def numbers(self) -> dict[str, int]:
        """Return a mapping of words to tokens."""
        return {word: i for i, word in enumerate(self.words)}

    def encode(self, sentence: str) -> list[int]:
        """Return the tokens of words separated by spaces; a number is split into pairs of digits."""
        pieces = (re.findall("..", word) if word.isdigit() else [word] for word in sentence.split())
        return [self.numbers[piece] for word in pieces for piece in word]

    def decode(self, tokens: Sequence[int]) -> str:
        """Return words separated by spaces, and pairs of digits joined."""
        words = [self.words[token] for token in tokens]
        joined = (" " * (not (one.isdigit() and other.isdigit())) + other for one, other in pairwise(words))
        return "".join([*words[:1], *joined])

    def haystacks(self, length: int, needles: int, split: str = "test", sentence: str = SENTENCE) -> NeedleInHaystack:
        """Return the task of finding a needle in a haystack of `length` tokens."""
        first, end = (round(share * len(self.text)) for share in SHARES[split])
        return NeedleInHaystack(
            self.text[first:end], length, needles=needles, encode=self.encode, decode=self.decode, digits=self.digits,
            id_digits=self.key_digits, template=sentence, key="K{id}",
        )  # fmt: skip

    def draw(self, random: Random, split: str) -> TokenExample:
        answer = self.digits // 2
        if self.pairs and split == "train" and random.random() < self.pairs:
            needles = self.most
            task = self.haystacks(needles * (1 + answer), needles, split, PAIR)
        else:
            needles = random.randint(1, self.most)
            task = self.haystacks(self.length - needles * (3 + answer), needles, split)
        found = task.example(random.randrange(2**32), 0)
        tokens, labels = list(found.haystack), dict[int, int]()
        for key, value in random.choices(list(found.numbers.items()), k=needles):
            question = len(tokens) + len(self.encode(task.question(key)))
            tokens += self.encode(task.sentence(key, value))
            labels |= {place: tokens[place] for place in range(question, question + answer)}
        return example_of(tokens, labels)

    def oracle(self, example: TokenExample) -> Tensor:
        """Return what followed each key where it came first, int64 [T]; elsewhere the token itself."""
        tokens, found = example.tokens.tolist(), example.tokens.clone()
        first: dict[int, int] = {}
        for place, token in enumerate(tokens):
            if self.words[token].startswith("K"):
                before = first.setdefault(token, place)
                for after in range(1, self.digits // 2 + 1):
                    found[place + after] = tokens[before + after]
        return found

    def trivial(self, example: TokenExample) -> Tensor:
        """Return one number for all, int64 [T]."""
        return torch.full_like(example.tokens, self.numbers["00"])


@cache
def needle_text(data: Path | None, common: int, digits: int, key_digits: int, length: int, most: int) -> NeedleText:
    """Return the user's text, or the interpreter's manual, with a vocabulary of `common` words of its own."""
    _, content = source_text(data, "needles")
    if digits < 2 or digits % 2:
        raise ArgumentError(f"--digits is {digits}, expected an even number above 0: two of them are a token.")
    found = re.findall(r"[^\W\d_]+|[.,;:()]", content)
    if len(found) < LEAST:
        raise ArgumentError(f"the text has {len(found)} words, expected at least {LEAST:,}; give more --data.")
    numbers, keys = (f"{i:02d}" for i in range(VALUES)), (f"K{i:0{key_digits}x}" for i in range(16**key_digits))
    own = [UNKNOWN, NUMBER, STOP, *numbers, *keys]
    known = [word for word, _ in Counter(word.lower() for word in found).most_common(common) if word not in own]
    words = (*own, *known)
    place = {word: i for i, word in enumerate(words)}
    text = NeedleText(tuple(place.get(word.lower(), 0) for word in found), words, length, most, digits, key_digits)
    text.haystacks(length - most * (3 + digits // 2), most).example(0, 0)
    return text
