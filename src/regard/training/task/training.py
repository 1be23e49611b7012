"""Training of a language model on a task (`regard.tasks`) until its metric is reached or the steps are over.

Example i of step s is example `s * batch + i` of the training split: the same on every machine and after every
interruption. Examples are drawn while training goes on and never stored.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, Sampler, SequentialSampler
from transformers import PreTrainedModel, PrinterCallback, ProgressCallback, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_callback import TrainerControl, TrainerState

from ...checks import ArgumentError, in_range, instance, refuse, whole
from ...nn.optimizer_groups import optimizer_groups
from ...tasks import TokenTask, collate
from ..muon import MuonAdamW
from .scores import TaskScore, check_vocabulary, embedded, score_task

CALL = "train_on_task"
OPTIMIZERS = ("adamw", "muon")


@dataclass(frozen=True, kw_only=True)
class TaskBudget:
    """How a model is trained on a task.

    Attributes:
        steps: the most optimiser steps.
        batch: examples of a step.
        learning_rate: the highest, reached after the share `warmup` of the steps; a cosine leads from there to the
            share `final_share` of it.
        weight_decay: of matrices.
        clip: largest norm of the gradient.
        optimizer: "adamw", or "muon" for the matrices of hidden layers (`MuonAdamW`).
        seed: of the stream of examples, and of dropout.
        eval_every: steps between scores on the split "validation"; `eval_examples` examples of it.
        metric, stop_at: training ends once the metric is at least `stop_at`; None to make all steps.
    """

    steps: int = 1000
    batch: int = 64
    learning_rate: float = 1e-3
    warmup: float = 0.05
    final_share: float = 0.1
    weight_decay: float = 0.1
    clip: float = 1.0
    optimizer: str = "adamw"
    seed: int = 0
    eval_every: int = 200
    eval_examples: int = 256
    metric: str = "accuracy"
    stop_at: float | None = None

    def __post_init__(self) -> None:
        for name in ("steps", "batch", "eval_every", "eval_examples"):
            whole("TaskBudget", name, getattr(self, name), 1, 2**31)
        whole("TaskBudget", "seed", self.seed, 0, 2**32 - 1)
        for name in ("learning_rate", "clip"):
            in_range("TaskBudget", name, getattr(self, name), low=0.0, strict=True)
        for name in ("warmup", "final_share"):
            in_range("TaskBudget", name, getattr(self, name), low=0.0, high=1.0, strict=False)
        if self.optimizer not in OPTIMIZERS:
            raise refuse("TaskBudget", "optimizer", self.optimizer, f"one of {', '.join(OPTIMIZERS)}")

    def rate(self, step: int) -> float:
        """Return the share of the highest learning rate at a step, counted from 0."""
        warm = round(self.warmup * self.steps)
        if step < warm:
            return (step + 1) / warm
        done = min((step - warm) / max(self.steps - 1 - warm, 1), 1.0)
        return self.final_share + (1 - self.final_share) * (1 + math.cos(math.pi * done)) / 2


@dataclass(frozen=True)
class TaskProgress:
    """Result of `train_on_task`.

    Attributes:
        step: how many steps were made.
        loss: mean loss of the steps since the last scores, at each of `scored`.
        scored: the steps after which the validation split was scored, and its scores there.
    """

    step: int
    loss: tuple[float, ...]
    scored: tuple[tuple[int, dict[str, TaskScore]], ...]

    def best(self, metric: str) -> float:
        """Return the largest mean of a metric."""
        return max(scores[metric].mean for _, scores in self.scored)


class TaskExamples(Dataset[dict[str, Tensor]]):
    """Batches of a task's training split, drawn when they are asked for; item s is the batch of step s."""

    def __init__(self, task: TokenTask, budget: TaskBudget) -> None:
        self.task, self.budget = task, budget

    def __len__(self) -> int:
        return self.budget.steps

    def __getitem__(self, step: int) -> dict[str, Tensor]:
        first = step * self.budget.batch
        return collate(self.task.examples(self.budget.seed, range(first, first + self.budget.batch), "train"))


class _TaskTrainer(Trainer):
    """Trainer of a model on a task."""

    optimizer: torch.optim.Optimizer | None
    lr_scheduler: Any

    def __init__(self, task: TokenTask, budget: TaskBudget, **kwargs: Any) -> None:
        self.task, self.budget = task, budget
        self.losses: list[float] = []
        self.loss_by_score: list[float] = []
        self.scored: list[tuple[int, dict[str, TaskScore]]] = []
        super().__init__(**kwargs)

    def _get_train_sampler(self, train_dataset: Dataset[Any] | None = None) -> Sampler[Any]:
        return SequentialSampler(self.train_dataset if train_dataset is None else train_dataset)

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        """Create the optimiser, with memories in a group of their own (`regard.nn.optimizer_groups`)."""
        if self.optimizer is None:
            groups = optimizer_groups(self.model, weight_decay=self.budget.weight_decay).dense
            if self.budget.optimizer == "muon":
                self.optimizer = MuonAdamW.of(groups, self.budget.learning_rate, self.model)
            else:
                self.optimizer = torch.optim.AdamW(groups, lr=self.budget.learning_rate)
        return self.optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """Create the schedule of the learning rate; groups with a fixed rate keep it."""
        if self.lr_scheduler is None:
            assert self.optimizer is not None
            rates: list[Callable[[int], float]] = [
                (lambda step: 1.0) if group.get("fixed_rate") else self.budget.rate
                for group in self.optimizer.param_groups
            ]
            self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, rates)
        return self.lr_scheduler

    def compute_loss(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Return the loss; where there are two tokens at a position, of the sum of their embeddings."""
        return super().compute_loss(model, embedded(self.model, inputs), *args, **kwargs)

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        loss = super().training_step(*args, **kwargs)
        self.losses.append(float(loss))
        if not math.isfinite(self.losses[-1]):
            where = f"the loss is {self.losses[-1]} at step {self.state.global_step + 1}"
            raise ArgumentError(f"{CALL}: {where}; give a smaller learning_rate.")
        return loss

    def score(self) -> dict[str, TaskScore]:
        """Score the validation split and note it."""
        scores = score_task(self.model, self.task, split="validation", examples=self.budget.eval_examples)
        self.scored.append((self.state.global_step, scores))
        self.loss_by_score.append(sum(self.losses) / max(len(self.losses), 1))
        self.losses.clear()
        return scores


class _Scoring(TrainerCallback):
    """Score the model now and then, and end training once it is good enough."""

    def __init__(self, trainer: _TaskTrainer, report: Callable[[int, dict[str, TaskScore]], None] | None) -> None:
        self.trainer, self.report = trainer, report

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **_: Any) -> TrainerControl:
        budget = self.trainer.budget
        if state.global_step % budget.eval_every == 0 or state.global_step == budget.steps:
            scores = self.trainer.score()
            if self.report is not None:
                self.report(state.global_step, scores)
            if budget.metric not in scores:
                raise ArgumentError(f"{CALL}: the task has no metric {budget.metric!r}; it has {', '.join(scores)}.")
            if budget.stop_at is not None and scores[budget.metric].mean >= budget.stop_at:
                control.should_training_stop = True
        return control


def train_on_task(
    model: PreTrainedModel,
    task: TokenTask,
    budget: TaskBudget,
    *,
    report: Callable[[int, dict[str, TaskScore]], None] | None = None,
) -> TaskProgress:
    """Train a language model on a task, in place.

    Args:
        model: a causal language model with at least as many tokens as the task.
        task: the task.
        budget: steps, rates and when to stop.
        report: called with the step and the scores whenever the model is scored.

    Raises:
        ArgumentError: a model with too few tokens, a metric that the task does not have, or a loss that is not finite.

    Cost: a forward and a backward pass over `batch` examples a step; `eval_examples` forward passes a score.
    """
    instance(CALL, "task", task, TokenTask, "a task of tokens")
    check_vocabulary(CALL, model, task)
    with TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder, max_steps=budget.steps, per_device_train_batch_size=1, max_grad_norm=budget.clip,
            seed=budget.seed, save_strategy="no", logging_strategy="no", report_to=[],
            use_cpu=model.device.type == "cpu", disable_tqdm=True, remove_unused_columns=False,
            dataloader_pin_memory=False,
        )  # fmt: skip
        examples: dict[str, Any] = {"train_dataset": TaskExamples(task, budget), "data_collator": lambda one: one[0]}
        trainer = _TaskTrainer(task, budget, model=model, args=arguments, **examples)
        trainer.remove_callback(PrinterCallback)
        trainer.remove_callback(ProgressCallback)
        trainer.add_callback(_Scoring(trainer, report))
        trainer.train()
    return TaskProgress(trainer.state.global_step, tuple(trainer.loss_by_score), tuple(trainer.scored))
