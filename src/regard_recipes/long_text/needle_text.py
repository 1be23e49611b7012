"""The text from which small models learn to find needles in haystacks.

Small models do not learn in minutes to copy six digits from bytes, so the commonest words are tokens (the rest share
one), and a needle is "number K3f 42 .", with a token for the key and for every two digits. If each needle of an example
were asked once, a model could answer without the keys, by leaving out numbers that were asked before; so needles are
drawn with replacement. On haystacks alone, attention without a memory stays for thousands of steps at choosing among
the numbers that it has seen; it learns in hundreds where some examples are pairs of keys and numbers alone.
"""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from random import Random
from typing import ClassVar

import torch
from torch import Tensor

from regard.checks import ArgumentError
from regard.tasks import NeedleInHaystack, TokenExample, TokenTask
from regard.tasks.tokens import Words, example_of

from ..lib.language_text import source_text

UNKNOWN, NUMBER, STOP = "<unk>", "number", "."
SENTENCE, PAIR = f"{NUMBER} {{key}} {{value}} {STOP}", "{key} {value}"
SHARES = {"train": (0.0, 0.8), "validation": (0.8, 0.9), "test": (0.9, 1.0)}
"""Parts of the text that the haystacks of each split are made of."""
LEAST = 1000  # number of words that a text must have


@dataclass(frozen=True)
class NeedleText(TokenTask):
    """Haystacks of a text, each followed by its needles again as questions with answers."""

    name: ClassVar[str] = "needle-text"

    text: tuple[int, ...] = field(repr=False)  # the words of a text as tokens
    words: Words = field(repr=False)  # the word of each token
    length: int = 128  # tokens of an example
    most: int = 8  # needles of an example; there is at least one
    digits: int = 2  # of a needle's number, even
    key_digits: int = 1  # hexadecimal digits of a key
    pairs: float = 0.0  # share of the training examples that are `most` keys with their numbers alone, then the same

    @property
    def vocabulary(self) -> int:
        return len(self.words)

    def encode(self, sentence: str) -> list[int]:
        """Return the tokens of words separated by spaces; a number is split into pairs of digits."""
        return [self.words.numbers[piece] for piece in re.findall(r"\d\d|[^\d\s]\S*", sentence)]

    def decode(self, tokens: Sequence[int]) -> str:
        """Return words separated by spaces, and pairs of digits joined."""
        sentence = " ".join(self.words.words[token] for token in tokens)
        return re.sub(r"\b(\d\d) (?=\d\d\b)", r"\1", sentence)

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
        haystack = task.example(random.randrange(2**32), 0)
        tokens, labels = list(haystack.haystack), dict[int, int]()
        for key, value in random.choices(list(haystack.numbers.items()), k=needles):
            start = len(tokens) + len(self.encode(task.question(key)))
            tokens += self.encode(task.sentence(key, value))
            labels |= {position: tokens[position] for position in range(start, start + answer)}
        return example_of(tokens, labels)

    def oracle(self, example: TokenExample) -> Tensor:
        """Return what followed each key where it came first, int64 [T]; elsewhere the token itself."""
        tokens, predicted = example.tokens.tolist(), example.tokens.clone()
        first: dict[int, int] = {}
        for position, token in enumerate(tokens):
            if self.words.words[token].startswith("K"):
                before = first.setdefault(token, position)
                for after in range(1, self.digits // 2 + 1):
                    predicted[position + after] = tokens[before + after]
        return predicted

    def trivial(self, example: TokenExample) -> Tensor:
        """Return one number for all, int64 [T]."""
        return torch.full_like(example.tokens, self.words.numbers["00"])


@cache
def needle_text(data: Path | None, common: int, digits: int, key_digits: int, length: int, most: int) -> NeedleText:
    """Return the user's text, or the interpreter's manual, with a vocabulary of `common` words of its own."""
    _, content = source_text(data, "needles")
    if digits < 2 or digits % 2:
        raise ArgumentError(f"--digits is {digits}, expected an even number above 0: two of them are a token.")
    learned = re.findall(r"[^\W\d_]+|[.,;:()]", content)
    if len(learned) < LEAST:
        raise ArgumentError(f"the text has {len(learned)} words, expected at least {LEAST:,}; give more --data.")
    numbers, keys = (f"{i:02d}" for i in range(100)), (f"K{i:0{key_digits}x}" for i in range(16**key_digits))
    commonest = Counter(word.lower() for word in learned).most_common(common)
    words = Words([UNKNOWN, NUMBER, STOP, *numbers, *keys, *(word for word, _ in commonest)])
    tokens = tuple(words.numbers.get(word.lower(), 0) for word in learned)
    text = NeedleText(tokens, words, length, most, digits, key_digits)
    text.haystacks(length - most * (3 + digits // 2), most).example(0, 0)
    return text
