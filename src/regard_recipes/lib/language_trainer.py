"""Train a language model of a recipe on windows of its text, and measure its loss on held-out text."""

import contextlib
import math
import statistics
import time
from typing import Any

import torch
from torch import Tensor, nn

from regard.models.base.base import tell_step
from regard.training.data.windows import SampledWindows
from regard.training.evaluation import Units, evaluate
from regard.training.task import TaskBudget

from .language_training import DTYPES, Budget, Corpus

BETAS = (0.9, 0.95)  # of AdamW


def train_on_windows(
    model: Any, material: Corpus, budget: Budget, seed: int
) -> tuple[list[tuple[float, float]], dict[str, float]]:
    """Train a model in place on the windows that `seed` draws; return the training and held-out loss of each look, none
    after a loss or gradient that is not finite, and the median time of a step, "step_seconds" and
    "step_cpu_seconds"."""
    device = next(model.parameters()).device
    optimizer = make_optimizer(model, budget)
    schedule = TaskBudget(steps=budget.steps, warmup=budget.warmup, final_share=budget.final_share)
    rates = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule.rate)
    windows = SampledWindows(
        material.train_tokens, context=budget.context, steps=budget.steps, per_step=budget.batch, seed=seed
    )
    network = torch.compile(model.train()) if budget.compile else model.train()
    looks: list[tuple[float, float]] = []
    since: list[Tensor] = []  # training losses since the last look
    wall, cpu = [], []
    for step in range(budget.steps):
        places = range(step * budget.batch, (step + 1) * budget.batch)
        batch = torch.stack([windows[place]["input_ids"] for place in places]).to(device)
        begun = time.perf_counter(), time.process_time()
        tell_step(model, step)
        for part in batch.chunk(budget.parts):
            with precision(budget, device):
                loss = network(input_ids=part, labels=part, use_cache=False).loss / budget.parts
            loss.backward()
            since.append(loss.detach())
        norm = nn.utils.clip_grad_norm_(model.parameters(), budget.clip)
        if not torch.stack([*since[-budget.parts :], norm]).isfinite().all():
            break
        optimizer.step()
        rates.step()
        optimizer.zero_grad()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        wall.append(time.perf_counter() - begun[0])
        cpu.append(time.process_time() - begun[1] if device.type == "cpu" else wall[-1])
        if step + 1 in budget.look_steps():
            steps = len(since) // budget.parts
            held_out = held_out_loss(model, material.held_out_tokens, budget)
            looks.append((torch.stack(since).sum().item() / steps, held_out))
            since.clear()
            if not math.isfinite(held_out):
                break
    times = {"step_seconds": wall, "step_cpu_seconds": cpu}
    return looks, {name: statistics.median(values or [math.nan]) for name, values in times.items()}


def make_optimizer(model: nn.Module, budget: Budget) -> torch.optim.Optimizer:
    """Return AdamW with weight decay of matrices only."""
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    groups = [
        {"params": [weight for weight in weights if weight.dim() >= 2], "weight_decay": budget.weight_decay},
        {"params": [weight for weight in weights if weight.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW([group for group in groups if group["params"]], lr=budget.learning_rate, betas=BETAS)


def held_out_loss(model: nn.Module, tokens: Tensor, budget: Budget) -> float:
    """Return the nats per token on the first `measured` of the tokens. Every token but the first is predicted once,
    from at least half a context where the text before it is that long."""
    tokens = tokens[: budget.measured]
    with precision(budget, next(model.parameters()).device):
        units = Units(len(tokens), len(tokens), len(tokens))  # its bits are not asked for
        batch = max(1, budget.batch // budget.parts)
        return evaluate(model, tokens, units, context=budget.context, batch=batch, support=False).loss


def precision(budget: Budget, device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Return a context in which products have the precision of the budget."""
    if budget.dtype == "float32":
        return contextlib.nullcontext()
    return torch.autocast(device.type, DTYPES[budget.dtype])
