"""Options of recipes that train language models, and how a model is trained on a text."""

import math
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from regard.checks import ArgumentError
from regard.training.device import resolve_device

from .recipe import Recipe, check_number

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Corpus:
    """A text as tokens, int [n] each."""

    train_tokens: Tensor
    held_out_tokens: Tensor


class LanguageOptions(Recipe):
    """Options of recipes that train language models; `Budget.of` reads them."""

    context: int = 64
    """Tokens of a training window."""
    batch: int = 16
    """Windows of a step."""
    parts: int = 1
    """Forward passes of a step, more where memory is short."""
    steps: int = 800
    """Optimiser steps of each model."""
    looks: int = 4
    """How often the losses are noted."""
    dtype: str = "float32"
    """Of the products: float32 or bfloat16."""


class TextOptions(LanguageOptions):
    """Options of recipes that train on one text."""

    tokenizer: str = "char"
    """char, byte, bpe or gpt2."""
    measured: int = 8192
    """Held-out tokens that the results are measured on."""
    compile: bool = False
    """Train through torch.compile."""
    data: Path | None = None
    """UTF-8 text to learn from, a file or a folder. None: the Python manual inside the interpreter."""


@dataclass(frozen=True, kw_only=True)
class Budget:
    """How a model is trained and measured: the options of `TextOptions`, and what no option sets.

    Attributes:
        learning_rate: the highest, reached after the share `warmup` of the steps; then a cosine falls to the share
            `final_share` of it.
        weight_decay: of matrices; vectors and scalars have none.
        clip: largest norm of the gradient.
        looks: number of times that the losses are noted, at equal intervals, the last one at the end.
        dtype: precision of matrix products, "float32" or "bfloat16" (autocast; weights and updates are float32).
    """

    context: int
    batch: int
    steps: int
    learning_rate: float
    final_share: float = 0.1
    warmup: float = 0.05
    weight_decay: float = 0.1
    clip: float = 1.0
    looks: int = 8
    measured: int = 16_384
    parts: int = 1
    dtype: str = "float32"
    device: str = "cpu"
    compile: bool = False

    @classmethod
    def of(cls, recipe: Recipe, **changes: Any) -> "Budget":
        """Return the budget that the options of a recipe give, with some fields changed."""
        given = {f.name: getattr(recipe, f.name) for f in fields(cls) if hasattr(recipe, f.name)}
        return cls(**{**given, **changes})

    def check(self, call: str) -> None:
        """Raise an ArgumentError, which starts with `call` and names a flag, where a number is out of range or the
        device does not exist."""
        ranges: dict[str, tuple[float, float]] = {
            **dict.fromkeys(("batch", "steps", "looks", "parts"), (1, math.inf)),
            **dict.fromkeys(("context", "measured"), (2, math.inf)), "final_share": (0, 1), "warmup": (0, 1),
            "weight_decay": (0, 1e6), **dict.fromkeys(("learning_rate", "clip"), (1e-12, 1e6)),
        }  # fmt: skip
        for name, limits in ranges.items():
            check_number(f"{call}: --{name.replace('_', '-')}", getattr(self, name), *limits)
        if self.batch % self.parts:
            raise ArgumentError(f"{call}: --parts {self.parts} does not divide --batch {self.batch}.")
        if self.dtype not in DTYPES:
            raise ArgumentError(f"{call}: --dtype is {self.dtype!r}, expected one of {', '.join(DTYPES)}.")
        resolve_device(self.device, call=call)

    def look_steps(self) -> tuple[int, ...]:
        """Return the steps after which the losses are noted."""
        return tuple(sorted({max(1, round(self.steps * (i + 1) / self.looks)) for i in range(self.looks)}))


def initial_range(width: int) -> float:
    """Return the standard deviation of a model's first weights: 0.05 up to a width of 256, above it the usual 0.02."""
    return 0.05 if width <= 256 else 0.02
