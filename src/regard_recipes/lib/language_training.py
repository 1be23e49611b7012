"""Train language models on one budget, for the recipes that compare models on text.

With equal budgets all models see the same windows: those of a step are a function of seed and step alone.
"""

import contextlib
import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from itertools import zip_longest
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
    """How a model is trained and measured.

    Attributes:
        context, batch, parts: tokens of a window, windows of a step, forward passes of a step.
        steps: optimiser steps.
        learning_rate: the highest, reached after the share `warmup` of the steps; then a cosine falls to the share
            `final_share` of it.
        weight_decay: of matrices; vectors and scalars have none.
        clip: largest norm of the gradient.
        looks: number of times that the losses are recorded, at equal intervals, the last one at the end.
        measured: number of held-out tokens that the loss is measured on, the first ones.
        dtype: precision of matrix products, "float32" or "bfloat16" (autocast; weights and updates are float32).
        device, compile: of the model; train through torch.compile.
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


def train_language_model(
    config: Any, material: Corpus, budget: Budget, seed: int, *, name: str,
    measure: Callable[[Any], dict[str, Any]] | None = None, prepare: Callable[[Any], None] | None = None,
) -> list[dict[str, Any]]:  # fmt: skip
    """Train a model with the Trainer of `regard.training` on the windows that `seed` draws.

    AdamW with a linear warm-up and a cosine, one learning rate for all weights, memories included. A loss that is not
    finite ends the training; it is NaN from there on.

    Args:
        config: of any model in `regard.models.base.catalogue`.
        material: a text with at least one window to train on and two tokens held out.
        seed: of first weights, windows and dropout; the state of the global generators is restored.
        name: of the model, for errors.
        measure: called with the trained model in evaluation mode; returns columns of the row "run", plain data, and
            further rows as "rows".
        prepare: called with the model before its training.

    Returns:
        Rows for `Recipe.measure`. The first is of kind "run": `parameters` (shared ones count once), the losses at the
        end, `step_seconds` and `step_cpu_seconds` (median time of a training step, elapsed and of the processor; on an
        accelerator both elapsed), `peak_bytes` and `before_bytes` (largest memory of the process while it trained, and
        its memory before the model was made; on an accelerator, allocated there; None where the system does not report
        it), and what `measure` found. Then one of kind "look" for each time that the losses were noted: `step`,
        `train` (nats per token, the mean over the windows since the last look) and `held_out`; then those of `measure`.

    Raises:
        ArgumentError: a budget out of range, a text shorter than a window, a config that no model is made from.
    """
    call = f"train_language_model: {name}, seed {seed}"
    budget.check(call)
    tokens = material.train_tokens
    if len(tokens) < budget.context or len(material.held_out_tokens) < 2:
        raise ArgumentError(
            f"{call}: the text has {len(tokens)} tokens to train on and {len(material.held_out_tokens)} held out, "
            f"expected at least a context of {budget.context} and 2; give more text or a smaller context."
        )
    from regard.models.base.catalogue import model_of

    from .language_trainer import global_generators, train_with_trainer

    kind = model_of(config)
    device = torch.device(resolve_device(budget.device, call=call))
    before = held_bytes("VmRSS", device, restart=True)
    with global_generators(device, seed):
        model = kind(config).to(device).train()
        if prepare is not None:
            prepare(model)
        losses, seconds = train_with_trainer(model, material, budget, seed)
    memory = {"peak_bytes": held_bytes("VmHWM", device), "before_bytes": before}
    found = {} if measure is None else measure(model.eval())
    rows = found.pop("rows", ())
    noted = zip_longest(budget.look_steps(), losses, fillvalue=(math.nan, math.nan))
    looks = [{"kind": "look", "step": step, "train": train, "held_out": held_out} for step, (train, held_out) in noted]
    last = {loss: looks[-1][loss] for loss in ("train", "held_out")}
    parameters = sum(weight.numel() for weight in model.parameters())
    return [{"kind": "run", "parameters": parameters, **last, **seconds, **memory, **found}, *looks, *rows]


def held_bytes(which: str, device: torch.device, restart: bool = False) -> int | None:
    """Return the bytes that this process holds ("VmRSS") or held at most ("VmHWM", which `restart` resets); on CUDA,
    the bytes allocated. `getrusage` would also count the memory of the parent when it made this process."""
    if device.type == "cuda":
        if restart:
            torch.cuda.reset_peak_memory_stats(device)
        return torch.cuda.memory_allocated(device) if which == "VmRSS" else torch.cuda.max_memory_allocated(device)
    with contextlib.suppress(OSError):
        if restart:
            Path("/proc/self/clear_refs").write_text("5")
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(which + ":"):
                return int(line.split()[1]) * 1024
    return None


def initial_range(width: int) -> float:
    """Return the standard deviation of a model's first weights: 0.05 up to a width of 256, above it the usual 0.02."""
    return 0.05 if width <= 256 else 0.02
