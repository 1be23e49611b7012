"""Language models on one budget: what every recipe that compares models on text trains them by.

Equal budgets see equal windows: what step s of seed n reads is a function of (seed, step) alone.
"""

from __future__ import annotations

import contextlib
import math
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from regard.checks import ArgumentError

BETAS = (0.9, 0.95)
"""Of AdamW."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class Tokens(Protocol):
    """What a run needs of a text; `demo_text.Material` has it. Both parts are int [n]."""

    @property
    def train_tokens(self) -> Tensor: ...

    @property
    def held_out_tokens(self) -> Tensor: ...


@dataclass(frozen=True)
class Corpus:
    """A text as tokens, int [n] each."""

    train_tokens: Tensor
    held_out_tokens: Tensor


@dataclass(frozen=True, kw_only=True)
class Budget:
    """How a model is trained and looked at.

    Attributes:
        context, batch: tokens of a window, windows of a step; parts: in how many forward passes a step is made.
        steps: optimiser steps.
        learning_rate: the highest, reached after the share `warmup` of the steps; from there a cosine leads to the
            share `final_share` of it.
        weight_decay: of matrices; vectors and single numbers are left alone.
        clip: largest norm of the gradient.
        looks: how often the losses are noted, at even distances, the last time at the end.
        measured: held-out tokens that the loss is measured on, from the start of the held-out part.
        dtype: of the products, "float32" or "bfloat16" (autocast; weights and updates are float32 either way).
        device: where the model is; compile: train through torch.compile.
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

    def check(self, call: str) -> None:
        """Every number is in range and the device is there.

        Raises:
            ArgumentError: one is not; `call` names the command and the flags are those of the fields.
        """
        from regard.training.device import resolve_device

        least = {"context": 2, "batch": 1, "steps": 1, "looks": 1, "measured": 2, "parts": 1}
        for name, low in least.items():
            if getattr(self, name) < low:
                raise ArgumentError(f"{call}: --{name} is {getattr(self, name)}, expected at least {low}.")
        for name in ("learning_rate", "clip"):
            if not 0 < getattr(self, name) < math.inf:
                flag = name.replace("_", "-")
                raise ArgumentError(f"{call}: --{flag} is {getattr(self, name)}, expected a number above 0.")
        for name in ("final_share", "warmup"):
            if not 0 <= getattr(self, name) <= 1:
                flag = name.replace("_", "-")
                raise ArgumentError(f"{call}: --{flag} is {getattr(self, name)}, expected a share from 0 to 1.")
        if not 0 <= self.weight_decay < math.inf:
            raise ArgumentError(f"{call}: --weight-decay is {self.weight_decay}, expected at least 0.")
        if self.batch % self.parts:
            raise ArgumentError(f"{call}: --parts {self.parts} does not divide --batch {self.batch}.")
        if self.dtype not in DTYPES:
            raise ArgumentError(f"{call}: --dtype is {self.dtype!r}, expected one of {', '.join(DTYPES)}.")
        resolve_device(self.device, call=call)

    def rate(self, step: int) -> float:
        """The learning rate of a step, counted from 0."""
        warm = round(self.warmup * self.steps)
        if step < warm:
            return self.learning_rate * (step + 1) / warm
        done = (step - warm) / max(1, self.steps - 1 - warm)
        fall = (1 + math.cos(math.pi * done)) / 2
        return self.learning_rate * (self.final_share + (1 - self.final_share) * fall)

    def look_steps(self) -> tuple[int, ...]:
        """After how many steps the losses are noted."""
        return tuple(sorted({max(1, round(self.steps * (i + 1) / self.looks)) for i in range(self.looks)}))


@dataclass(frozen=True, kw_only=True)
class LanguageRun:
    """One model, trained with one seed.

    Attributes:
        parameters: how many numbers are learned; shared ones once.
        steps: after how many steps it was looked at. There:
        train: mean loss on the windows since the last look, in nats per token.
        held_out: loss on the held-out text, in nats per token. After a loss that is not finite the training ends, and
            the rest of both is NaN.
        step_seconds, step_cpu_seconds: median of a training step, by the clock and of the processor (on an accelerator
            both by the clock).
        peak_bytes: the most that the process held while it trained (on an accelerator: the most that was allocated
            there), None where the system does not say; before_bytes: what it held when the model was yet to be made.
        extra: what `measure` found.
    """

    name: str
    seed: int
    parameters: int
    steps: tuple[int, ...]
    train: tuple[float, ...]
    held_out: tuple[float, ...]
    step_seconds: float
    step_cpu_seconds: float
    peak_bytes: int | None
    before_bytes: int | None
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def perplexity(self) -> float:
        """On the held-out text at the end."""
        return math.exp(self.held_out[-1])

    @property
    def diverged(self) -> bool:
        """Whether a loss was not finite."""
        return not all(map(math.isfinite, (*self.train, *self.held_out)))

    def record(self) -> dict[str, Any]:
        """Plain data for JSON; None for numbers that are not finite."""
        plain: dict[str, Any] = _plain(asdict(self))
        return plain


def run_rows(run: LanguageRun) -> Iterator[dict[str, Any]]:
    """Return the rows of a run, for `Recipe.measure`: one of kind "run" with the losses at the end and what `measure`
    found, and one of kind "look" for each time that the losses were noted."""
    yield {
        "kind": "run",
        "parameters": run.parameters,
        "train": run.train[-1],
        "held_out": run.held_out[-1],
        "step_seconds": run.step_seconds,
        "step_cpu_seconds": run.step_cpu_seconds,
        "peak_bytes": run.peak_bytes,
        "before_bytes": run.before_bytes,
        **run.extra,
    }
    for step, train, held_out in zip(run.steps, run.train, run.held_out, strict=True):
        yield {"kind": "look", "step": step, "train": train, "held_out": held_out}


def _plain(found: Any) -> Any:
    """Data with None in place of numbers that JSON has no word for."""
    if isinstance(found, dict):
        return {name: _plain(value) for name, value in found.items()}
    if isinstance(found, (list, tuple)):
        return [_plain(value) for value in found]
    return None if isinstance(found, float) and not math.isfinite(found) else found


def train_language_model(
    config: Any,
    material: Tokens,
    budget: Budget,
    seed: int,
    *,
    name: str,
    measure: Callable[[Any], dict[str, Any]] | None = None,
    prepare: Callable[[Any], None] | None = None,
) -> LanguageRun:
    """Train a model on the windows that `seed` draws: AdamW, linear warm-up, cosine.

    Args:
        config: of any model in `regard.models.base.catalogue`.
        material: a text with at least one window to train on and two tokens held out.
        seed: decides first weights, windows and dropout; the global generators are left as they were.
        measure: called with the trained model in evaluation mode; its plain data becomes `extra`.
        prepare: called with the model before its training.

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
    from regard.training.device import resolve_device

    kind = model_of(config)
    device = torch.device(resolve_device(budget.device, call=call))
    before = held_bytes("VmRSS", device, restart=True)
    with torch.random.fork_rng(devices=range(torch.cuda.device_count()) if device.type == "cuda" else []):
        torch.manual_seed(seed)
        model = kind(config).to(device).train()
        if prepare is not None:
            prepare(model)
        course = _train(model, material, budget, seed)
    peak = held_bytes("VmHWM", device)
    model.eval()
    return LanguageRun(
        name=name,
        seed=seed,
        parameters=sum(weight.numel() for weight in model.parameters()),
        steps=budget.look_steps(),
        peak_bytes=peak,
        before_bytes=before,
        extra={} if measure is None else measure(model),
        **course,
    )


def _train(model: nn.Module, material: Tokens, budget: Budget, seed: int) -> dict[str, Any]:
    """The loop; what it found by the names of `LanguageRun`."""
    device = next(model.parameters()).device
    tokens = material.train_tokens
    called = torch.compile(model) if budget.compile else model
    optimizer = make_optimizer(model, budget)
    looks, train, held_out = set(budget.look_steps()), [], []
    wall, cpu, total, since = [], [], torch.zeros((), device=device), 0
    for step in range(budget.steps):
        start = time.perf_counter(), time.process_time()
        windows = batch_of(tokens, budget, seed, step).to(device)
        total += _step(called, model, windows, optimizer, budget, step)
        since += 1
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        wall.append(time.perf_counter() - start[0])
        cpu.append(time.process_time() - start[1] if device.type == "cpu" else wall[-1])
        if step + 1 in looks:
            train.append(total.item() / since)
            total, since = torch.zeros((), device=device), 0
            held_out.append(held_out_loss(model, material, budget) if math.isfinite(train[-1]) else math.nan)
            if not math.isfinite(held_out[-1]):
                break
    rest = (math.nan,) * (len(looks) - len(train))
    return {
        "train": (*train, *rest),
        "held_out": (*held_out, *rest),
        "step_seconds": statistics.median(wall),
        "step_cpu_seconds": statistics.median(cpu),
    }


def _step(
    called: Any, model: nn.Module, windows: Tensor, optimizer: torch.optim.Optimizer, budget: Budget, step: int
) -> Tensor:
    """One optimiser step on windows [batch, context]; their mean loss, detached."""
    from regard.models.base.base import tell_step

    tell_step(model, step)
    for group in optimizer.param_groups:
        group["lr"] = budget.rate(step)
    optimizer.zero_grad()
    total = torch.zeros((), device=windows.device)
    for part in windows.chunk(budget.parts):
        with _precision(budget, windows.device):
            loss = called(input_ids=part, labels=part, use_cache=False).loss / budget.parts
        loss.backward()
        total += loss.detach()
    nn.utils.clip_grad_norm_(model.parameters(), budget.clip)
    optimizer.step()
    return total


def batch_of(tokens: Tensor, budget: Budget, seed: int, step: int) -> Tensor:
    """The windows of a step, int64 [batch, context]: a function of text, sizes, seed and step."""
    from regard.training.data.windows import window_starts

    starts = window_starts(seed, step, budget.batch, len(tokens) - budget.context + 1)
    return tokens[starts[:, None] + torch.arange(budget.context)].long()


def make_optimizer(model: nn.Module, budget: Budget) -> torch.optim.Optimizer:
    """AdamW that decays matrices only."""
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    groups = [
        {"params": [weight for weight in weights if weight.dim() >= 2], "weight_decay": budget.weight_decay},
        {"params": [weight for weight in weights if weight.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW([group for group in groups if group["params"]], lr=budget.learning_rate, betas=BETAS)


def held_out_loss(model: nn.Module, material: Tokens, budget: Budget) -> float:
    """Nats per token on the first `measured` held-out tokens; every token but the first is predicted once, from at
    least half a context where the text before it is that long."""
    from regard.training.evaluation import Units, evaluate

    tokens = material.held_out_tokens[: budget.measured]
    with _precision(budget, next(model.parameters()).device):
        found = evaluate(
            model,
            tokens,
            Units(len(tokens), len(tokens), len(tokens)),  # its bits are not asked for
            context=budget.context,
            batch=max(1, budget.batch // budget.parts),
            support=False,
        )
    return found.loss


def _precision(budget: Budget, device: torch.device) -> contextlib.AbstractContextManager[Any]:
    if budget.dtype == "float32":
        return contextlib.nullcontext()
    return torch.autocast(device.type, DTYPES[budget.dtype])


def held_bytes(which: str, device: torch.device, restart: bool = False) -> int | None:
    """Bytes that this process holds (`which` is "VmRSS") or held at most ("VmHWM"); on CUDA, those allocated there.

    Args:
        restart: let the peak begin anew.

    Linux's own counters: `getrusage` would also count what the parent held when it made this process.
    """
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
