"""Recipes that train models on a task (`regard.tasks`) and score them on others of its kind. The learning rate is
chosen by the score on the validation split; what is shown are scores on the test split."""

import time
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch

from regard.tasks import TokenTask

from .claims import Estimate
from .display import interval, lines, panels, pivot
from .recipe import Cell, Frame, Limits, Results, select
from .trained import TrainedRecipe, language_config


def first_range(width: int) -> float:
    """Return the standard deviation of first weights: 0.05, and 1/sqrt(width) of models wider than 400. With 0.02, the
    default of transformers, small models take much longer to learn a task."""
    return min(0.05, width**-0.5)


def mamba(vocabulary: int, width: int, layers: int, numbers: int) -> Any:
    """Return transformers' Mamba; each layer has a state of about so many numbers, and at least one per channel."""
    from transformers import MambaConfig, MambaForCausalLM

    return MambaForCausalLM(MambaConfig(
        vocab_size=vocabulary, hidden_size=width, num_hidden_layers=layers, state_size=max(1, numbers // (2 * width)),
        pad_token_id=None, bos_token_id=None, eos_token_id=None, initializer_range=first_range(width),
    ))  # fmt: skip


class TaskRecipe(TrainedRecipe):
    """A recipe of models trained on a task, scored on its test split.

    Attributes:
        known: names of models to fields of their configuration, as `language_config` takes them.
        metric: that chooses the learning rate and ends training.
        learned: validation score from which on a model counts as having learned a task.
        scorings: how often the validation split is scored, at even distances over all steps.
    """

    steps: int = 2000
    """Most optimiser steps of each model; training ends early once the validation score is at least `stop_at`."""
    batch: int = 64  # Examples of a step.
    stop_at: float = 0.995  # Validation score that ends training; above 1 for never.
    examples: int = 512  # Examples of the test split that each score is taken from.
    limits: ClassVar[Limits] = {"steps": (1, 2**31), "batch": (1, 2**20), "examples": (2, 2**31), "stop_at": (0.0, 2.0)}
    metric: ClassVar[str] = "accuracy"
    learned: ClassVar[float] = 0.5
    scorings: ClassVar[int] = 10
    per: ClassVar = ("task", "model")
    shown: ClassVar = "test"

    @abstractmethod
    def training_tasks(self) -> Mapping[str, TokenTask]:
        """Return the tasks to train on, by a name for tables."""

    def test_tasks(self, name: str) -> Mapping[str, TokenTask]:
        """Return the tasks that a model trained on a task is scored on, by a name for tables."""
        return {name: self.training_tasks()[name]}

    def make_model(self, name: str, task: TokenTask) -> Any:
        """Return a model with first weights from torch's generator."""
        from regard.models.base.catalogue import model_of

        config = self.model_config(name, task.vocabulary)
        return model_of(config)(config)

    def model_config(self, name: str, vocabulary: int) -> Any:
        """Return the configuration of a model, by its fields in `known` and those of `shared`."""
        sized: Any = self  # with the options `Sizes`
        fields = {"vocab_size": vocabulary, "hidden_size": sized.width, **self.shared(), **self.known[name]}
        return language_config(fields, first_range(sized.width))

    def untrained(self, cell: Cell) -> tuple[Any, int]:
        task = self.training_tasks()[cell["task"]]
        with torch.device("cpu"):
            length = self.example_length(task)
        return self.make_model(cell["model"], task), self.steps * self.batch * length

    def example_length(self, task: Any) -> int:
        """Return the number of tokens of a training example, the first one."""
        return len(task.examples(0, [0])[0].tokens)

    def shared(self) -> Mapping[str, Any]:
        """Return the fields of the configuration that all models have beside the width."""
        sized: Any = self
        return {"num_hidden_layers": sized.layers, "num_attention_heads": sized.heads}

    def check(self) -> None:
        super().check()
        self.training_tasks()

    def prepare(self) -> Mapping[str, Any]:
        return {"floors": {name: task.floor(count=64) for name, task in self.training_tasks().items()}}

    def cells(self) -> Sequence[Cell]:
        models = super().cells()
        return [{"task": task, **cell} for task in self.training_tasks() for cell in models]

    def measure(self, cell: Cell, seed: int) -> Iterator[dict[str, Any]]:
        from regard.training.task import TaskBudget, train_on_task
        from regard.training.task.training import LossNotFinite

        task = self.training_tasks()[cell["task"]]
        torch.manual_seed(seed)
        model = self.make_model(cell["model"], task).to(self.torch_device)
        budget = TaskBudget(
            steps=self.steps, batch=self.batch, learning_rate=cell["rate"], seed=seed, metric=self.metric,
            stop_at=self.stop_at, eval_every=max(self.steps // self.scorings, 1), eval_examples=self.examples,
        )  # fmt: skip
        start = time.perf_counter()
        try:
            progress = train_on_task(model, task, budget)
        except LossNotFinite:
            yield {"kind": "run", "validation": 0.0, "diverged": True}
            return
        curve = [(step, scores[self.metric].mean) for step, scores in progress.scored]
        yield {
            "kind": "run", "validation": curve[-1][1], "diverged": False, "steps": progress.step,
            "loss": progress.loss[-1], "seconds": time.perf_counter() - start, "parameters": model.num_parameters(),
        }  # fmt: skip
        for step, score in curve:
            yield {"kind": "curve", "step": step, "validation": score}
        for name, test in self.test_tasks(cell["task"]).items():
            yield from self.scored(model, name, test)

    def scored(self, model: Any, name: str, test: TokenTask) -> Iterator[dict[str, Any]]:
        """Yield a row for each metric of a trained model on a test task."""
        from regard.training.task import score_task

        for metric, score in score_task(model, test, examples=self.examples).items():
            yield {"kind": "test", "test": name, "metric": metric, "score": score.mean}

    def scores(self, results: Results, metric: str = "", **where: Any) -> Frame:
        """Return the test scores at the chosen rates, one row for each seed, of one metric (`metric` by default)."""
        return select(self.chosen(results), metric=metric or self.metric, **where)

    def gap(self, results: Results, model: str, base: str, value: str = "score", kind: str = "", metric: str = "",
            **where: Any) -> Estimate:  # fmt: skip
        """Return the test score of a model less that of another, paired by seed."""
        return super().gap(results, model, base, value, kind, metric=metric or self.metric, **where)

    def unlearned(self, results: Results, tasks: str | Sequence[str], models: Sequence[str] = ()) -> str:
        """Return why models (by default all) cannot be compared on tasks: none has learned one of them; else ""."""
        runs, reasons = select(self.chosen(results, "run"), model=list(models or self.trained)), []
        for task in [tasks] if isinstance(tasks, str) else tasks:
            best = float(select(runs, task=task).groupby("model")["validation"].mean().max())
            reasons += [f"no model learned {task}: the best validation score is {best:.2f}"] * (best < self.learned)
        return "; ".join(reasons)

    def score_table(self, results: Results, index: Any, note: str) -> Any:
        """Return a table of the scores at the chosen rates, a column for each metric."""
        return pivot(self.chosen(results), index, {"": interval("score")}, "metric", note=note)

    def training_table(self, results: Results) -> Any:
        """Return a table of the chosen rates, and of what training took."""
        return pivot(self.chosen(results, "run"), ["task", "model"], {
            "rate": "{rate:g}", "steps": "{steps:.0f}", "seconds": "{seconds:.0f}",
            "parameters": "{parameters:,.0f}", "validation": interval("validation"),
        }, note="Steps and seconds until the validation score ended training, means over seeds.")  # fmt: skip

    def figures(self, results: Results) -> dict[str, bytes]:
        return {"curves": self.curves(results)}

    def curves(self, results: Results) -> bytes:
        """Return a figure of the validation score against steps, a panel for each task."""
        return lines(panels(self.chosen(results, "curve"), "{task}"), "step", {"validation": self.metric}, "model")
