"""What the recipes share that train a model with fast-weight memories on text, and another one on needles.

The paper's models learn both at once; at this size a model whose loss counts all of the text learns nothing of needles.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from regard.checks import ArgumentError

from ..lib.language_training import Budget, Corpus, initial_range, run_rows, train_language_model
from ..lib.recipe import Cell, Recipe
from ..long_text.needle_text import FINAL, NeedleWorld, learn_answers, needle_world
from .memory_layouts import PAPER_MODEL, MemoryConfig, Row, Sizes, row_config

PAPER = "FwPKM"
TEXT, NEEDLES = "text", "needles"
UNSEEN = 500_000  # added to the seed for needle documents that no model learns from
QUICK: dict[str, Any] = {
    "words": 200, "width": 32, "context": 128, "chunk": 32, "sub_keys": 16, "memory_dim": 32, "top_k": 4,
    "learning_rate": 3e-3, "examples": 200, "haystack": 64, "questions": 8, "looks": 2, "seeds": 1,
}  # fmt: skip
PAPER_SIZE: dict[str, Any] = {  # tables 1 and 3 and section 4
    **PAPER_MODEL, "words": 30_000, "parts": 4, "seeds": 1, "batch": 128, "steps": 20_000, "learning_rate": 1e-3,
    "examples": 100_000, "haystack": 4000, "digits": 6, "looks": 20, "address_weight": 10.0,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class MemoryStudyConfig(MemoryConfig):
    """Train models with fast-weight memories on text and on needles."""

    data: Path | None = None
    """UTF-8 text, a file or a folder. None: the Python manual inside the interpreter."""
    words: int = 1000
    """Words that are tokens of their own."""
    layers: int = 2
    batch: int = 8
    steps: int = 160
    top_k: int = 8
    """Slots that a token reads."""
    address_weight: float = 1.0
    """Weight of the entropy that moves the keys. The paper's 10 suits its 512 sub-keys."""
    learning_rate: float = 4e-3
    """The highest, for all models."""
    examples: int = 4000
    """Needle documents that are made, half a window long; a model sees windows of them."""
    haystack: int = 512
    """Tokens of a haystack."""
    needles: int = 5
    """Needles in a haystack."""
    digits: int = 2
    """Digits of a needle's number, an even count."""
    questions: int = 96
    """Haystacks with a question that each model is asked."""
    reads: int = 4
    """Readings of each haystack."""


class MemoryStudy(Recipe):
    """A recipe with cells {..., "task": TEXT or NEEDLES}.

    Attributes:
        flag: option that decides how much held-out text is read.
        held_out_windows: windows of the text that the losses in training are measured on.
    """

    flag: ClassVar[str]
    held_out_windows: ClassVar[int]

    limits: ClassVar = dict.fromkeys(
        ("words", "examples", "haystack", "needles", "digits", "questions", "reads"), (1, math.inf)
    )

    def check(self) -> None:
        self.budget().check(self.call())

    def budget(self) -> Budget:
        """Return what every model is given."""
        return Budget.of(self.config, measured=self.held_out_windows * self.config.context)

    @abstractmethod
    def text_length(self) -> int:
        """Return how many held-out tokens are read."""

    def prepare(self) -> Mapping[str, Any]:
        own, call = self.config, self.call()
        world = needle_world(own.data, common=own.words, needles=own.needles, digits=own.digits, call=call)
        held_out = torch.tensor(world.held_out[: self.text_length()], dtype=torch.int32)
        if len(held_out) < self.text_length():
            raise ArgumentError(
                f"{call}: {len(held_out):,} words of the text are held out, expected {self.text_length():,}; give a "
                f"smaller {self.flag}, or more --data."
            )
        document = own.context // 2
        needle_text = Corpus(
            world.training_tokens(own.examples * document, document, own.seed),
            world.training_tokens(self.budget().measured, document, UNSEEN + own.seed),
        )
        self.corpora = {TEXT: Corpus(torch.tensor(world.learn, dtype=torch.int32), held_out), NEEDLES: needle_text}
        self.asked = needles(world, own.haystack, own.questions, own.seed)
        self.words, self.mask = world.words, partial(learn_answers, values=world.values, keys=world.keys)
        sizes = {"words": len(world.words), "learned": len(world.learn), "held out": len(world.held_out)}
        return {"text": sizes}

    def model(self, row: Row, vocabulary: int, slow: tuple[int, ...], fast: tuple[int, ...], **memory: Any) -> Any:
        """Return the configuration of a model with memories at the depths `slow` and `fast`.

        Raises:
            ArgumentError: sizes that do not fit.
        """
        own = self.config
        sizes = Sizes.of(own, vocabulary, slow_depths=slow, fast_depths=fast, mixed_slow=slow, mixed_fast=fast,
                         fast_top_k=own.top_k)  # fmt: skip
        memory = {"address_weight": own.address_weight, **memory}
        return row_config(row, sizes, memory, initializer_range=initial_range(own.width))

    def train(self, cell: Cell, seed: int, config: Any, measure: Callable[[Any], dict[str, Any]]) -> Iterator[Any]:
        """Train a model and yield its rows; `measure` returns columns of the row "run", and further rows as "rows"."""
        task = cell["task"]
        run = train_language_model(
            config, self.corpora[task], self.budget(), seed, name=f"{config.memories} on {task}", measure=measure,
            prepare=self.mask if task == NEEDLES else None,
        )  # fmt: skip
        rows = run.extra.pop("rows")
        yield from run_rows(run)
        yield from rows


def needles(world: NeedleWorld, length: int, count: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return haystacks [E, L], questions [E, Q] and answers [E, A] of held-out text, int64."""
    task = world.task(length)
    examples = task.examples(FINAL + seed, range(count))
    answers = [world.encode(example.answer) for example in examples]
    haystacks, questions = ([getattr(example, name) for example in examples] for name in ("haystack", "question"))
    return torch.tensor(haystacks), torch.tensor(questions), torch.tensor(answers)
