"""A training run on a task: its folder holds config.json, run.json, metrics.jsonl, the model and summary.json."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from rich.console import Console

from ...models.base.catalogue import language_models
from ...tasks import TokenTask
from ..callbacks import MetricsFile
from ..config import TrainConfig
from ..device import resolve_device
from ..models import model_config
from ..quiet import quiet_transformers
from ..storage import folder
from ..storage.checkpoints import write_summary
from ..storage.lock import only_run
from ..validation import check_task, validate
from .scores import TaskScore, score_task
from .training import TaskBudget, train_on_task

CALL = "train"


@dataclass(frozen=True)
class TaskSummary:
    """Result of a run on a task, as in `summary.json`.

    Attributes:
        out: the run folder.
        step: number of optimiser steps.
        parameters: number of parameters of the model.
        scores: mean and standard error of each metric on the examples of the split "test".
        floor: what a trivial answer reaches there.
    """

    out: str
    step: int
    parameters: int
    scores: dict[str, tuple[float, float]]
    floor: dict[str, float]


@quiet_transformers()
def train_task(config: TrainConfig, *, console: Console | None = None) -> TaskSummary:
    """Train a language model on the task that a config names.

    Args:
        config: the options of the run, with `task`.
        console: where scores are shown, default standard error.

    Raises:
        ArgumentError: a mistake in the config, or another process trains in the folder; nothing has been written.
        TrainingStopped: the disk is full.
    """
    validate(config)
    task = check_task(config, CALL)
    folder.check_out(config, call=CALL)
    console = console or Console(stderr=True)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        longest = max(len(example.tokens) for example in task.examples(config.seed, range(8)))
        context = max(config.context, longest)
        made = model_config(replace(config, context=context), call=CALL, vocab_size=task.vocabulary, pad_token_id=None)
        model = language_models.get(config.model).model(made).to(resolve_device(config.device, call=CALL))
    with only_run(config.out, call=CALL):
        folder.check_out(config, call=CALL)
        folder.begin(config, folder.task_source(config.task or "", repr(task)), None, call=CALL)
        metrics = MetricsFile(config.out / "metrics.jsonl", step=0)

        def report(step: int, scores: dict[str, TaskScore]) -> None:
            metrics.append({"step": step, **{name: score.mean for name, score in scores.items()}})
            shown = "  ".join(f"{name} {score.mean:.4f}" for name, score in scores.items())
            console.print(f"step {step}/{config.steps}  validation: {shown}", highlight=False, markup=False)

        progress = train_on_task(model, task, _budget(config), report=report)
        folder.save_model(config.out, model, None)
        return _finish(config, task, model, progress.step)


def _budget(config: TrainConfig) -> TaskBudget:
    same = {f.name: getattr(config, f.name) for f in fields(TaskBudget) if f.name != "final_share"}
    return TaskBudget(final_share=config.final_learning_rate, **same)


def _finish(config: TrainConfig, task: TokenTask, model: Any, step: int) -> TaskSummary:
    """Score the test split, and write `summary.json`."""
    found = scored(config, task, model)
    summary = TaskSummary(
        out=str(config.out),
        step=step,
        parameters=sum(p.numel() for p in model.parameters()),
        scores={name: (score.mean, score.standard_error) for name, score in found.items()},
        floor=task.floor(count=min(config.eval_examples, 256)),
    )
    write_summary(config.out, vars(summary))
    return summary


def scored(config: TrainConfig, task: TokenTask, model: Any) -> dict[str, TaskScore]:
    """Return the scores of a model on the test split, free-running where answers continue their prompts."""
    continues = task.example(0, 0, "test").prompt is not None
    return score_task(model, task, split="test", examples=config.eval_examples, generate=continues)
