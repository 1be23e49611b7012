"""Options of recipes that train language models, and how a model is trained on a text."""

import math
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from regard.checks import ArgumentError, within

from .recipe import Cell, Limits, Recipe
from .trained import Sizes, language_config

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Corpus:
    """A text as tokens, int [n] each."""

    train_tokens: Tensor
    held_out_tokens: Tensor


class LanguageOptions(Recipe):
    """Options of recipes that train language models. Warm-up, cosine, weight decay and clipping are those of
    `regard.training.task.TaskBudget` by default."""

    context: int = 64  # Tokens of a training window.
    batch: int = 16  # Windows of a step.
    parts: int = 1  # Forward passes of a step, more where memory is short.
    steps: int = 800  # Optimiser steps of each model.
    looks: int = 4  # How often the losses are noted.
    dtype: str = "float32"  # Of matrix products: float32 or bfloat16 (autocast; weights and updates are float32).
    compile: bool = False  # Train through torch.compile.
    limits: ClassVar[Limits] = {"context": (2, math.inf)}
    choices: ClassVar = {"dtype": tuple(DTYPES)}

    def check(self) -> None:
        super().check()
        if self.batch % self.parts:
            raise ArgumentError(f"--parts {self.parts} does not divide --batch {self.batch}.")

    def look_steps(self) -> tuple[int, ...]:
        """Return the steps after which the losses are noted, at equal intervals, the last one at the end."""
        return tuple(sorted({max(1, round(self.steps * (i + 1) / self.looks)) for i in range(self.looks)}))


class TextOptions(LanguageOptions, Sizes):
    """Options of recipes that train on one text, and the models that follow from them."""

    tokenizer: str = "char"  # char, byte, bpe or gpt2.
    measured: int = 8192  # Held-out tokens that the results are measured on.
    data: Path | None = None
    """UTF-8 text to learn from, a file or a folder. None: the Python manual inside the interpreter."""
    limits: ClassVar[Limits] = {"measured": ("context", math.inf)}

    @abstractmethod
    def fields(self, cell: Cell) -> Mapping[str, Any]:
        """Return the fields of a model's configuration beside the sizes, and "model", its kind."""

    def model_config(self, cell: Cell, vocabulary: int) -> Any:
        """Return the configuration of the model of a cell."""
        fields = {
            "vocab_size": vocabulary, "hidden_size": self.width, "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads, "max_position_embeddings": self.context, **self.fields(cell),
        }  # fmt: skip
        return language_config(fields, initial_range(fields["hidden_size"]))

    def check(self) -> None:
        from regard.training import TOKENIZERS

        super().check()
        TOKENIZERS.get(self.tokenizer)
        configs = lambda: [self.model_config(cell, 256) for cell in self.cells()]  # noqa: E731
        within(self.call(), "--width, --layers or --heads", configs)


def initial_range(width: int) -> float:
    """Return the standard deviation of a model's first weights: 0.05 up to a width of 256, above it the usual 0.02."""
    return 0.05 if width <= 256 else 0.02
