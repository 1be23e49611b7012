"""Training of a language model on a task (`regard.tasks`) until its metric is reached or the steps are over.

Example i of step s is example `s * batch + i` of the training split: the same on every machine and after every
interruption. Examples are drawn while training goes on and never stored.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar

from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import Dataset
from transformers import PreTrainedModel, TrainerCallback
from transformers.trainer_callback import ExportableState, TrainerControl, TrainerState

from ...checks import ArgumentError, in_range, instance, one_of, whole
from ...tasks import TokenTask, collate
from ..errors import one_error
from ..storage.checkpoints import go_back
from ..storage.resuming import check_checkpoint, put_weights
from ..trainer import SealedTrainer, quiet_arguments
from .scores import TaskScore, check_metric, check_stop, check_vocabulary, embedded, score_task

CALL = "train_on_task"
Report = Callable[[int, dict[str, TaskScore]], None]


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
        in_range("TaskBudget", "weight_decay", self.weight_decay, low=0.0, strict=False)
        if self.stop_at is not None:
            in_range("TaskBudget", "stop_at", self.stop_at, strict=False)
        one_of("TaskBudget", "optimizer", self.optimizer, ("adamw", "muon"))

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
        finished: whether all steps were made or `stop_at` was reached; False if a callback stopped training before.
    """

    step: int
    loss: tuple[float, ...]
    scored: tuple[tuple[int, dict[str, TaskScore]], ...]
    finished: bool = True

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


class LossNotFinite(ArgumentError):
    """The loss of a step is NaN or infinite."""


@dataclass(frozen=True, kw_only=True)
class Checkpoints:
    """Where training saves checkpoints, and from which it continues.

    Attributes:
        run: the run folder.
        every: steps between checkpoints, with one also after the last step; 0 for no checkpoints.
        keep: checkpoints to keep.
        last: the checkpoint to continue from.
    """

    run: Path
    every: int
    keep: int
    last: Path | None = None


class _TaskTrainer(SealedTrainer):
    regroups: ClassVar[bool] = True

    def __init__(self, budget: TaskBudget, **kwargs: Any) -> None:
        self.budget = budget
        self.losses: list[float] = []
        """Since the model was scored last."""
        super().__init__(muon=budget.optimizer == "muon", **kwargs)

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        if self.lr_scheduler is None:
            assert self.optimizer is not None
            self.lr_scheduler = LambdaLR(self.optimizer, self.budget.rate)
        return super().create_scheduler(num_training_steps, optimizer)

    def compute_loss(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        return super().compute_loss(model, embedded(self.model, inputs), *args, **kwargs)

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        loss = super().training_step(*args, **kwargs)
        self.losses.append(float(loss))
        if not math.isfinite(self.losses[-1]):
            where = f"the loss is {self.losses[-1]} at step {self.state.global_step + 1}"
            raise LossNotFinite(f"{CALL}: {where}; give a smaller learning_rate.")
        return loss


class TaskScoring(TrainerCallback, ExportableState):
    """Score the model now and then, and end training once it is good enough. Checkpoints hold what was scored."""

    def __init__(self, trainer: _TaskTrainer, task: TokenTask, report: Report | None) -> None:
        self.trainer, self.task, self.budget, self.report = trainer, task, trainer.budget, report
        self.loss_by_score: list[float] = []
        self.scored: list[tuple[int, dict[str, TaskScore]]] = []

    @property
    def good_enough(self) -> bool:
        metric, stop_at = self.budget.metric, self.budget.stop_at
        return stop_at is not None and bool(self.scored) and self.scored[-1][1][metric].mean >= stop_at

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **_: Any) -> TrainerControl:
        budget, losses = self.budget, self.trainer.losses
        if state.global_step % budget.eval_every == 0 or state.global_step == budget.steps:
            scores = score_task(self.trainer.model, self.task, split="validation", examples=budget.eval_examples)
            self.scored.append((state.global_step, scores))
            self.loss_by_score.append(sum(losses) / max(len(losses), 1))
            losses.clear()
            if self.report is not None:
                self.report(state.global_step, scores)
            if self.good_enough:
                control.should_training_stop = True
                control.should_save = self.trainer.args.save_strategy == "steps"
        return control

    def state(self) -> dict[str, Any]:
        scored = [[step, {name: score.values for name, score in scores.items()}] for step, scores in self.scored]
        record = {"losses": self.trainer.losses, "loss_by_score": self.loss_by_score, "scored": scored}
        return {"args": {}, "attributes": record}

    def restore(self, state: TrainerState, checkpoint: Path) -> None:
        """Take over what a checkpoint holds; raise `ArgumentError` if it cannot be read."""
        with one_error(f"train: cannot continue from {checkpoint}: trainer_state.json: what was scored"):
            record = state.stateful_callbacks["TaskScoring"]["attributes"]
            self.trainer.losses = [float(loss) for loss in record["losses"]]
            self.loss_by_score = [float(loss) for loss in record["loss_by_score"]]
            self.scored = [
                (int(step), {str(name): TaskScore(tuple(map(float, values))) for name, values in scores.items()})
                for step, scores in record["scored"]
            ]


def train_on_task(
    model: PreTrainedModel,
    task: TokenTask,
    budget: TaskBudget,
    *,
    report: Report | None = None,
    checkpoints: Checkpoints | None = None,
    callbacks: Sequence[TrainerCallback] = (),
) -> TaskProgress:
    """Train a language model on a task, in place.

    Args:
        model: a causal language model with at least as many tokens as the task.
        task: the task.
        budget: steps, rates and when to stop.
        report: called with the step and the scores whenever the model is scored.
        checkpoints: where checkpoints are saved, and from which one training continues; default none. Continued
            training gives the same numbers as training without interruption.
        callbacks: additional callbacks of transformers' Trainer.

    Raises:
        ArgumentError: a model with too few tokens, an unknown metric, a loss that is not finite, or a wrong checkpoint.
        TrainingStopped: a checkpoint cannot be written.

    Cost: a forward and a backward pass over `batch` examples a step; `eval_examples` forward passes a score.
    """
    instance(CALL, "task", task, TokenTask, "a task of tokens")
    check_vocabulary(CALL, model, task)
    check_metric(CALL, task, budget.metric, "validation", budget.eval_examples)
    check_stop(CALL, task, budget.metric, budget.stop_at)
    with TemporaryDirectory() as folder:
        saved = checkpoints or Checkpoints(run=Path(folder), every=0, keep=1)
        trainer, last = _trainer(model, task, budget, saved), saved.last
        scoring = TaskScoring(trainer, task, report)
        for callback in (scoring, *callbacks):
            trainer.add_callback(callback)
        if last is not None:
            check_checkpoint(last, trainer, call="train")
            trainer.state = TrainerState.load_from_json(str(last / "trainer_state.json"))
            scoring.restore(trainer.state, last)
            put_weights(trainer.model, last, call="train")
            go_back(last)
        if trainer.state.global_step < budget.steps and not scoring.good_enough:
            trainer.train(resume_from_checkpoint=None if last is None else str(last))
    step = trainer.state.global_step
    finished = step >= budget.steps or scoring.good_enough
    return TaskProgress(step, tuple(scoring.loss_by_score), tuple(scoring.scored), finished)


def _trainer(model: PreTrainedModel, task: TokenTask, budget: TaskBudget, saved: Checkpoints) -> _TaskTrainer:
    saves: dict[str, Any] = {"save_strategy": "steps", "save_steps": saved.every} if saved.every else {}
    arguments = quiet_arguments(
        saved.run, model.device, max_steps=budget.steps, seed=budget.seed, per_device_train_batch_size=1,
        max_grad_norm=budget.clip, optim="adamw_torch", learning_rate=budget.learning_rate,
        weight_decay=budget.weight_decay, **saves,
    )  # fmt: skip
    examples: dict[str, Any] = {"train_dataset": TaskExamples(task, budget), "data_collator": lambda one: one[0]}
    return _TaskTrainer(budget, keep=saved.keep, model=model, args=arguments, **examples)
