"""A training run on a task: its folder holds config.json, run.json, metrics.jsonl, the model and summary.json."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from rich.console import Console
from transformers import PreTrainedModel, TrainerCallback

from ...checks import require
from ...models.base.catalogue import language_models
from ...tasks import TokenTask
from ..callbacks import MetricsFile, StopGently
from ..config import TrainConfig
from ..device import float32_by_default, resolve_device
from ..errors import TrainingStopped
from ..models import model_config
from ..quiet import quiet_transformers
from ..storage import folder
from ..storage.checkpoints import last_good, step_of, write_summary
from ..storage.files import only_run
from ..validation import check_task, validate
from .scores import TaskScore, check_metric, check_stop, score_task
from .training import Checkpoints, LossNotFinite, TaskBudget, TaskProgress, train_on_task

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
@float32_by_default()
def train_task(
    config: TrainConfig, *, console: Console | None = None, callbacks: Sequence[TrainerCallback] = ()
) -> TaskSummary:
    """Train a language model on the task that a config names.

    Args:
        config: the options of the run, with `task`.
        console: where scores are shown, default standard error.
        callbacks: additional callbacks.

    Raises:
        ArgumentError: a mistake in the config, a folder in use, or a run that cannot be continued; nothing is written.
        TrainingStopped: the disk is full, or a loss is not finite.
        TrainingInterrupted: Ctrl-C or SIGTERM; a checkpoint was saved.
    """
    validate(config)
    several = os.environ.get("WORLD_SIZE", "1")
    alone = f"a run on a task takes one process, got {several} of torchrun; start it without torchrun."
    require(several == "1", CALL, alone)
    task = check_task(config, CALL)
    check_metric(CALL, task, config.metric, "validation", config.eval_examples)
    check_stop(CALL, task, config.metric, config.stop_at)
    source = folder.task_source(config.task or "", repr(task))
    folder.check_out(config, call=CALL)
    if config.resume:
        folder.saved_config(config.out, call=CALL)  # before the folder is made for the lock
    console = console or Console(stderr=True)
    model = task_model(config, task, CALL)
    with only_run(config.out, call=CALL):
        checkpoint = None
        if config.resume:
            checkpoint, skipped = folder.check_resume(config, source, call=CALL)
            for line in skipped:
                console.print(line, highlight=False, markup=False)
        else:
            folder.check_out(config, call=CALL)  # again, since another run may have begun there
            folder.begin(config, source, None, call=CALL)
        saved = Checkpoints(run=config.out, every=config.save_every, keep=config.keep, last=checkpoint)
        progress = _train(config, task, model, saved, console, callbacks)
        folder.save_model(config.out, model, None)
        scores = scored(config, task, model)
        summary = TaskSummary(
            out=str(config.out),
            step=progress.step,
            parameters=sum(p.numel() for p in model.parameters()),
            scores={name: (score.mean, score.standard_error) for name, score in scores.items()},
            floor=task.floor(count=min(config.eval_examples, 256)),
        )
        write_summary(config.out, vars(summary))
        return summary


def task_model(config: TrainConfig, task: TokenTask, call: str) -> PreTrainedModel:
    """Return the model of a config for a task, with the random weights of the config's seed, on its device."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        longest = max(len(example.tokens) for example in task.examples(config.seed, range(8)))
        context = max(config.context, longest)
        made = model_config(replace(config, context=context), call=call, vocab_size=task.vocabulary, pad_token_id=None)
        return language_models.get(config.model).model(made).to(resolve_device(config.device, call=call))


def _train(
    config: TrainConfig, task: TokenTask, model: PreTrainedModel, saved: Checkpoints, console: Console,
    callbacks: Sequence[TrainerCallback],
) -> TaskProgress:  # fmt: skip
    """Train, or raise TrainingInterrupted after a signal, with a checkpoint saved."""
    metrics = MetricsFile(config.out / "metrics.jsonl", step=step_of(saved.last))

    def report(step: int, scores: dict[str, TaskScore]) -> None:
        metrics.append({"step": step, **{name: score.mean for name, score in scores.items()}})
        shown = "  ".join(f"{name} {score.mean:.4f}" for name, score in scores.items())
        line = f"step {step}/{config.steps}  validation: {shown}"
        console.print(line, highlight=False, markup=False, soft_wrap=True)

    same = {f.name: getattr(config, f.name) for f in fields(TaskBudget) if f.name != "final_share"}
    budget = TaskBudget(final_share=config.final_learning_rate, **same)
    with StopGently(config.out) as stop:
        try:
            made = train_on_task(model, task, budget, report=report, checkpoints=saved, callbacks=[*callbacks, stop])
        except LossNotFinite as error:
            raise TrainingStopped(f"{str(error).rstrip('.')}; {last_good(config.out)}") from None
    if not made.finished:
        stop.check(made.step, config.steps)
    return made


def scored(config: TrainConfig, task: TokenTask, model: Any, batch: int = 32) -> dict[str, TaskScore]:
    """Return the scores of a model on the test split, free-running where answers continue their prompts."""
    continues = task.example(0, 0, "test").prompt is not None
    return score_task(model, task, split="test", examples=config.eval_examples, batch=batch, generate=continues)
