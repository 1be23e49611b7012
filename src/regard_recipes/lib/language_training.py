"""Train a language model of a recipe with the Trainer of `regard.training`, without a run folder.

With equal options all models see the same windows: those of a step are a function of seed and step alone.
"""

import contextlib
import math
import random
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import TrainerCallback

from regard.checks import require
from regard.models.base.catalogue import model_of
from regard.training.data.windows import SampledWindows
from regard.training.device import float32_by_default
from regard.training.errors import TrainingStopped
from regard.training.evaluation import Units, evaluate
from regard.training.quiet import quiet_transformers
from regard.training.task import TaskBudget
from regard.training.trainer import RegardTrainer, quiet_arguments

from .language_text import Corpus
from .trained import LanguageOptions


def train_language_model(
    config: Any, material: Corpus, options: LanguageOptions, rate: float, seed: int, *,
    measure: Callable[[Any], dict[str, Any]] | None = None, prepare: Callable[[Any], None] | None = None,
) -> list[dict[str, Any]]:  # fmt: skip
    """Train a model with the Trainer of `regard.training` on the windows that `seed` draws.

    AdamW with a linear warm-up and a cosine, one learning rate for all weights, memories included. A loss that is not
    finite ends the training; it is NaN from there on. The state of the global generators is restored.

    Args:
        config: of any model in `regard.models.base.catalogue`.
        rate: the highest learning rate.
        seed: of first weights, windows and dropout.
        measure: called with the trained model in evaluation mode; returns columns of the row "run", plain data, and
            further rows as "rows".
        prepare: called with the model before its training.

    Returns:
        Rows for `Recipe.measure`. The first is of kind "run": `parameters`, the losses at the end, `step_seconds` and
        `step_cpu_seconds` (medians; on an accelerator both elapsed), `peak_bytes` and `before_bytes` (most memory in
        training, and memory before the model was made; None where the system does not report it), and what `measure`
        found. Then one of kind "look" for each time that the losses were noted: `step`, `train` (nats per token, the
        mean over the windows since the last look) and `held_out`; then those of `measure`.

    Raises:
        ArgumentError: a text shorter than a window, a config that no model is made from.
    """
    tokens = material.train_tokens
    sizes = f"{len(tokens)} tokens to train on and {len(material.held_out_tokens)} held out"
    least = f"at least a context of {options.context} and 2; give more text or a smaller context"
    enough = len(tokens) >= options.context and len(material.held_out_tokens) >= 2
    require(enough, options.call(), f"the text has {sizes}, expected {least}.")
    kind, device = model_of(config), torch.device(options.torch_device)
    before = held_bytes("VmRSS", device, restart=True)
    with global_generators(device, seed):
        model = kind(config).to(device).train()
        if prepare is not None:
            prepare(model)
        losses, seconds = train_with_trainer(model, material, options, rate, seed)
    memory = {"peak_bytes": held_bytes("VmHWM", device), "before_bytes": before}
    measures = {} if measure is None else measure(model.eval())
    rows = measures.pop("rows", ())
    noted = zip_longest(options.look_steps(), losses, fillvalue=(math.nan, math.nan))
    looks = [{"kind": "look", "step": step, "train": train, "held_out": held_out} for step, (train, held_out) in noted]
    last = {loss: looks[-1][loss] for loss in ("train", "held_out")}
    parameters = sum(weight.numel() for weight in model.parameters())
    return [{"kind": "run", "parameters": parameters, **last, **seconds, **memory, **measures}, *looks, *rows]


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


def train_with_trainer(
    model: nn.Module, material: Corpus, options: LanguageOptions, rate: float, seed: int
) -> tuple[list[tuple[float, float]], dict[str, float]]:
    """Train a model; return the losses of each look, none after one that is not finite, and medians of step times."""
    device = next(model.parameters()).device
    schedule = TaskBudget(steps=options.steps)
    # the trainer's own optimiser would keep the rate of memories fixed; recipes choose one for all weights
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    matrices, others = ([w for w in weights if (w.dim() >= 2) == matrix] for matrix in (True, False))
    groups = [{"params": matrices, "weight_decay": schedule.weight_decay}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95))
    rates = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule.rate)
    windows = SampledWindows(
        material.train_tokens, context=options.context, steps=options.steps, per_step=options.batch, seed=seed
    )
    one = Units(1, 1, 1)  # bits are not asked for
    looks = Looks(partial(held_out_loss, model, material.held_out_tokens, options), set(options.look_steps()), device)
    with tempfile.TemporaryDirectory() as folder:
        arguments = quiet_arguments(
            Path(folder), device, max_steps=options.steps, per_device_train_batch_size=options.batch // options.parts,
            gradient_accumulation_steps=options.parts, max_grad_norm=schedule.clip, seed=seed,
            bf16=options.dtype == "bfloat16", torch_compile=options.compile,
            dataloader_pin_memory=device.type == "cuda",
        )  # fmt: skip
        trainer = LookingTrainer(
            callbacks=[looks], model=model, args=arguments, train_dataset=windows, optimizers=(optimizer, rates),
            held_out=material.held_out_tokens, train_units=one, held_out_units=one, context=options.context,
            eval_batch=options.batch, keep=1,
        )  # fmt: skip
        trainer.looks = looks
        trainer.model_accepts_loss_kwargs = False  # the mean over the labels that the model counts
        with contextlib.suppress(TrainingStopped):
            trainer.train()
        trainer.accelerator.unwrap_model(trainer.model_wrapped, keep_fp32_wrapper=False)
    elapsed, of_cpu = np.median(looks.seconds or [(math.nan, math.nan)], axis=0).tolist()
    return looks.losses, {"step_seconds": elapsed, "step_cpu_seconds": of_cpu}


class Looks(TrainerCallback):
    """Note the training loss and `held_out()` after some steps, and the time of every step."""

    def __init__(self, held_out: Callable[[], float], steps: set[int], device: torch.device) -> None:
        self.evaluate, self.steps, self.device = held_out, steps, device
        self.losses: list[tuple[float, float]] = []
        self.seconds: list[tuple[float, float]] = []  # of each step: elapsed, and of the CPU
        self.since: list[Tensor] = []  # training losses since the last look
        self.begun = (0.0, 0.0)

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.begun = time.perf_counter(), time.process_time()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        elapsed, of_cpu = time.perf_counter() - self.begun[0], time.process_time() - self.begun[1]
        self.seconds.append((elapsed, of_cpu if self.device.type == "cpu" else elapsed))
        if state.global_step in self.steps:
            count = state.global_step - max((step for step in self.steps if step < state.global_step), default=0)
            held_out = self.evaluate()
            self.losses.append((torch.stack(self.since).sum().item() / count, held_out))
            self.since.clear()
            control.should_training_stop = not math.isfinite(held_out)


class LookingTrainer(RegardTrainer):
    """A trainer that gives `looks` the loss of each forward pass, divided by their number in a step."""

    looks: Looks

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        self.looks.since.append(super().training_step(*args, **kwargs).detach())
        return self.looks.since[-1]


@contextlib.contextmanager
def global_generators(device: torch.device, seed: int) -> Iterator[None]:
    """Seed torch inside the block, with float32 as its default dtype, and leave all generators as they were."""
    states = random.getstate(), np.random.get_state()  # noqa: NPY002
    with (
        quiet_transformers(),
        float32_by_default(),
        torch.random.fork_rng(devices=range(torch.cuda.device_count()) if device.type == "cuda" else []),
    ):
        torch.manual_seed(seed)
        try:
            yield
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])  # noqa: NPY002


def held_out_loss(model: nn.Module, tokens: Tensor, options: LanguageOptions) -> float:
    """Return the nats per token of a text. Every token but the first is predicted once, from at least half a context
    where the text before it is that long."""
    device = next(model.parameters()).device
    with torch.autocast(device.type, torch.bfloat16, enabled=options.dtype == "bfloat16"):
        units = Units(len(tokens), len(tokens), len(tokens))  # its bits are not asked for
        batch = max(1, options.batch // options.parts)
        return evaluate(model, tokens, units, context=options.context, batch=batch, support=False).loss
