"""Tasks of token sequences: an example, a batch for a language model, and the metrics they share; lists of words.

Labels follow transformers: `labels[t]` is the token that a model should predict from `tokens[:t]`, and -100 where
nothing is asked. It is `tokens[t]` where the answer continues the sequence, and not where it is no input (MQAR).
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from random import Random
from statistics import mean
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ..checks import ArgumentError, one_of
from .base import Named, check_place, hashed, on_cpu, tasks

IGNORED = -100
"""The label where nothing is asked."""
SPLITS = ("train", "validation", "test")
"""The splits of every task of tokens."""
TRIES = 10_000
"""Draws before a split is taken to be empty."""
T = TypeVar("T")


@dataclass(frozen=True)
class TokenExample:
    """One sequence.

    Attributes:
        tokens: int64 [T].
        labels: int64 [T], `IGNORED` where nothing is asked.
        beside: int64 [T], a second token at every position, or None: a model takes the sum of both embeddings.
        prompt: how many tokens come before the answer, where all labels are one continuation; None elsewhere.
        parts: named boolean masks [T] of labels that are also scored apart.
        probabilities: float32 [T, vocabulary], the true distribution of the token at t, where there is one.
    """

    tokens: Tensor
    labels: Tensor
    prompt: int | None = None
    beside: Tensor | None = None
    parts: Mapping[str, Tensor] = field(default_factory=dict)
    probabilities: Tensor | None = None

    @property
    def asked(self) -> Tensor:
        """Return where a label stands, boolean [T]."""
        return self.labels != IGNORED

    @property
    def answer(self) -> Tensor:
        """Return the labels after the prompt, int64 [T - prompt]."""
        return self.labels[self.prompt :]


def example_of(
    tokens: list[int], labels: dict[int, int], places: Mapping[str, Sequence[int]] | None = None, **more: Any
) -> TokenExample:
    """Return an example from a list of tokens, the labels by position, and the positions of each part."""
    at = torch.full((len(tokens),), IGNORED, dtype=torch.long)
    if labels:
        at[list(labels)] = torch.tensor(list(labels.values()))
    parts = {part: torch.zeros(len(tokens), dtype=torch.bool) for part in places or {}}
    for part, positions in (places or {}).items():
        parts[part][list(positions)] = True
    return TokenExample(torch.tensor(tokens, dtype=torch.long), at, parts=parts, **more)


def continued(prompt: list[int], answer: list[int], **more: Any) -> TokenExample:
    """Return an example whose labels are the tokens of `answer`, which follows `prompt`."""
    return example_of(prompt + answer, dict(enumerate(answer, len(prompt))), prompt=len(prompt), **more)


def stream(name: str, *path: Any) -> Random:
    """Return a source of random numbers that depends on its arguments alone."""
    return Random(hashed(":".join([name, *map(str, path)]), size=16))


def split_of(text: str) -> str:
    """Return the split that what a text describes belongs to, by a hash: 80 % train, 10 % validation, 10 % test."""
    at = hashed(text) / 2**64
    return "train" if at < 0.8 else "validation" if at < 0.9 else "test"


def drawn(draw: Callable[[], T], fits: Callable[[T], bool], task: Any, split: str) -> T:
    """Return the first draw that fits a split; raise `ArgumentError` after `TRIES` draws without one: the task has too
    few different examples to fill its splits."""
    for _ in range(TRIES):
        if fits(example := draw()):
            return example
    raise ArgumentError(f"{type(task).__name__}: {task} has no example in the split {split!r}; give larger sizes.")


class TokenTask(Named, ABC):
    """A task of token sequences; its subclasses are frozen dataclasses of settings."""

    name: ClassVar[str]
    """Under which the task is registered."""
    errors: ClassVar[tuple[str, ...]] = ()
    """Metrics that are smaller for better answers."""

    def __init_subclass__(cls) -> None:
        for name in ("oracle", "trivial"):
            if name in vars(cls):
                setattr(cls, name, on_cpu()(vars(cls)[name]))

    @property
    @abstractmethod
    def vocabulary(self) -> int:
        """Return how many tokens there are."""

    @abstractmethod
    def draw(self, random: Random, split: str) -> TokenExample:
        """Return an example from a source of random numbers."""

    @abstractmethod
    def oracle(self, example: TokenExample) -> Tensor:
        """Return the answer of a solver that reads the tokens before each label: int64 [T], or logits [T, V]."""

    @abstractmethod
    def trivial(self, example: TokenExample) -> Tensor:
        """Return an answer that needs no solution, in the form of `oracle`."""

    @on_cpu()
    def example(self, seed: int, index: int, split: str = "train") -> TokenExample:
        """Return example `index` of the stream `seed` of a split; it depends on nothing else.

        Raises:
            ArgumentError: a seed or an index that is not a whole number, or an unknown split.
        """
        check_place(f"{type(self).__name__}.example", seed, index)
        one_of(f"{type(self).__name__}.example", "split", split, SPLITS)
        return self.draw(stream(self.name, seed, split, index), split)

    def examples(self, seed: int, indices: Iterable[int], split: str = "train") -> list[TokenExample]:
        """Return several examples of a split, in the order of `indices`."""
        return [self.example(seed, index, split) for index in indices]

    def is_error(self, metric: str) -> bool:
        """Return whether a metric is smaller for better answers."""
        return metric in self.errors or metric.split(" on ")[0] == "loss"

    def floor(self, seed: int = 0, count: int = 256, split: str = "test") -> dict[str, float]:
        """Return the mean metrics of the trivial answer over some examples."""
        scores = [self.scores(self.trivial(e), e) for e in self.examples(seed, range(count), split)]
        return {name: mean([f[name] for f in scores if name in f]) for name in sorted({n for f in scores for n in f})}

    def scores(self, predicted: Tensor, example: TokenExample) -> dict[str, float]:
        """Return the metrics of one example.

        Args:
            predicted: tokens, int64 [T], or logits [T, vocabulary]; row t predicts `labels[t]` (a language model's
                output moved one place to the right).

        Returns:
            "accuracy", the share of labels that are right; "exact", 1 where all are; "accuracy on PART" for each of the
            example's parts that holds a label. No metrics without a label.
        """
        predicted = predicted.argmax(-1) if predicted.is_floating_point() else predicted
        asked = example.asked
        if not asked.any():
            return {}
        right = (predicted == example.labels) & asked
        metrics = {"accuracy": float(right.sum() / asked.sum()), "exact": float(right.sum() == asked.sum())}
        for part, where in example.parts.items():
            if (where & asked).any():
                metrics[f"accuracy on {part}"] = float(right[where].sum() / (where & asked).sum())
        return metrics


def collate(examples: list[TokenExample]) -> dict[str, Tensor]:
    """Return a batch for a language model: `input_ids` and `labels` [B, T], padded on the right with token 0 and
    `IGNORED`, `attention_mask` [B, T] where lengths differ, and `beside` where examples have it."""
    rows = [e.tokens for e in examples]
    batch = {
        "input_ids": pad_sequence(rows, batch_first=True),
        "labels": pad_sequence([e.labels for e in examples], batch_first=True, padding_value=IGNORED),
    }
    second = [e.beside for e in examples if e.beside is not None]
    if second:
        batch["beside"] = pad_sequence(second, batch_first=True)
    if len({len(row) for row in rows}) > 1:
        batch["attention_mask"] = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
    return batch


def token_task(call: str, argument: str, name: Any) -> type[TokenTask]:
    """Return the class of a task of tokens by its name; errors name the call and its argument."""
    kind = tasks.given(call, argument, name)
    known = {name: each for name, each in tasks.items() if isinstance(each, type) and issubclass(each, TokenTask)}
    if kind not in known.values():
        raise ArgumentError(f"{call}: {argument}: {name} is not a token task; choose from {', '.join(known)}.")
    return kind


def settable(kind: Any) -> list[str]:
    """Return the names of the fields of a class of tasks that a caller sets."""
    return [each.name for each in fields(kind) if each.init]


SLOT = re.compile(r"{(\w+)}")
"""A place in a template that is filled with a word."""
WORD = re.compile(r"\n|\w+|[^\w\s]")
"""A line's end, a word or number, or a sign."""
TIGHT = set(".,:;?!\n")
"""Words without a blank before them."""


def pattern_of(template: str, numbers: Sequence[str] = ()) -> str:
    """Return a regular expression for the texts of a template, with a group for every slot: a number where `numbers`
    holds the slot's name, else a word, and the same one wherever the slot comes again."""
    texts, slots = SLOT.split(template)[0::2], SLOT.findall(template)
    pattern = re.escape(texts[0])
    for at, (slot, text) in enumerate(zip(slots, texts[1:], strict=True)):
        word = r"\d+" if slot in numbers else r"\w+"
        pattern += (f"(?P={slot})" if slot in slots[:at] else f"(?P<{slot}>{word})") + re.escape(text)
    return pattern


class Words:
    """A list of words without repetitions, each with its number."""

    def __init__(self, words: Iterable[str]) -> None:
        self.words: Sequence[str] = tuple(dict.fromkeys(words))
        self.numbers = {word: number for number, word in enumerate(self.words)}

    def __len__(self) -> int:
        return len(self.words)

    def encode(self, text: str) -> list[int]:
        """Return the numbers of a text's words; raise `ArgumentError` for a word that is not in the list."""
        words = WORD.findall(text)
        try:
            return [self.numbers[word] for word in words]
        except KeyError as error:
            raise ArgumentError(f"Words.encode: {error.args[0]!r} is not among the {len(self)} words.") from None

    def decode(self, numbers: Iterable[int]) -> str:
        """Return the text of some words, with a blank before each that takes one."""
        text = ""
        for number in numbers:
            word = self.words[number]
            text += word if not text or word in TIGHT or text.endswith("\n") else f" {word}"
        return text


class WordTask(TokenTask):
    """A task whose tokens are words."""

    @cached_property
    @abstractmethod
    def words(self) -> Words:
        """Return the words of all examples."""

    @property
    def vocabulary(self) -> int:
        return len(self.words)
