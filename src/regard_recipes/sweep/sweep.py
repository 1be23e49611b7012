"""Train models on a task over a grid of models, learning rates, task settings and seeds, given in one TOML file.

[task]
name = "mqar"               # a task, its setting and fields; a list is one axis of the grid
setting = "quick"
pairs = [2, 4]

[train]
seeds = 3
rates = [1e-3, 3e-3]        # the rate is chosen for each model on the validation split
steps = 1000
metric = "accuracy"

[model]                     # fields that all models share
hidden_size = 64

[models.softmax]            # one model: its own fields, and "kind", one of `regard list models`
mixers = "softmax"
[models.biweight]
mixers = "biweight"
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any, ClassVar

from regard.checks import ArgumentError, suggestion, within
from regard.tasks import TokenTask, tasks
from regard.training.fields import from_mapping, read_mapping

from ..lib.display import interval, pivot
from ..lib.recipe import Results, recipe
from ..lib.task_recipe import TaskRecipe, TaskRecipeConfig

EXAMPLE: dict[str, Any] = {
    "task": {"name": "mqar", "setting": "quick"},
    "model": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 1, "feed_forward": "none"},
    "models": {"softmax": {"mixers": "softmax"}, "biweight": {"mixers": "biweight"}},
}
"""What is run without a file."""
PARTS = ("task", "train", "model", "models")
TRAIN = ("seeds", "rates", "steps", "batch", "stop_at", "examples")
"""Options that [train] may set, besides the metric."""


@dataclass(frozen=True, kw_only=True)
class SweepConfig(TaskRecipeConfig):
    file: Path | None = None
    """The TOML file; what it sets wins over other options. Without one, a small example is run."""
    content: str = ""
    """What the file says, as JSON; set when the file is read."""


@recipe("sweep")
class Sweep(TaskRecipe):
    """Scores over a grid of models, learning rates, task settings and seeds from one TOML file."""

    Config = SweepConfig
    sizes: ClassVar = {"quick": {"seeds": 2, "rates": (3e-3,), "steps": 60, "examples": 64}, "paper": {}}

    def __init__(self, config: SweepConfig) -> None:
        if config.content:
            self.table = json.loads(config.content)
        else:
            self.table = EXAMPLE if config.file is None else read_mapping(config.file, call=self.call())
        self._known("", self.table, PARTS)
        for part in PARTS:
            if not isinstance(self.table.get(part, {}), dict):
                raise ArgumentError(f"{self.call()}: [{part}] is {self.table[part]!r}, expected a table.")
        train = {**self.table.get("train", {})}
        self.metric = train.pop("metric", "accuracy")  # type: ignore[misc]
        self._known("train", train, TRAIN)
        made: Any = from_mapping(config, train, call=self.call(), source=f"[train] of {config.file}")
        super().__init__(replace(made, content=json.dumps(self.table, sort_keys=True)))
        self.known = {name: self._fields(name) for name in self.table.get("models", {})}  # type: ignore[misc]

    def _known(self, part: str, table: Mapping[str, Any], names: tuple[str, ...]) -> None:
        for name in table:
            if name not in names:
                where = f"[{part}]" if part else "the file"
                raise ArgumentError(f"{self.call()}: {where} has an unknown key {name!r}.{suggestion(name, names)}")

    def _fields(self, name: str) -> dict[str, Any]:
        own = self.table["models"][name]
        if not isinstance(own, dict):
            raise ArgumentError(f"{self.call()}: [models.{name}] is {own!r}, expected a table.")
        return {**self.table.get("model", {}), **own}

    def check(self) -> None:
        if not self.known:
            raise ArgumentError(f"{self.call()}: the file names no model; add a table [models.NAME].")
        super().check()
        for task in self.training_tasks().values():
            metrics = list(task.floor(count=2))
            if self.metric not in metrics:
                close = suggestion(str(self.metric), metrics)
                raise ArgumentError(f"{self.call()}: [train] metric: unknown metric {self.metric!r}.{close}")
            for name in self.known:
                within(self.call(), f"[models.{name}]", self._config, name, task)

    def training_tasks(self) -> Mapping[str, TokenTask]:
        return self._tasks

    @cached_property
    def _tasks(self) -> dict[str, TokenTask]:
        fields = {**self.table.get("task", {})}
        kind = tasks.given(self.call(), "[task] name", fields.pop("name", "mqar"))
        setting = fields.pop("setting", "quick")
        axes = {name: values for name, values in fields.items() if isinstance(values, list)}
        fixed = {name: value for name, value in fields.items() if name not in axes}
        names = [field for field in getattr(kind, "__dataclass_fields__", ()) if not field.startswith("_")]
        self._known("task", fields, tuple(names))
        found = {}
        for values in product(*axes.values()):
            chosen = dict(zip(axes, values, strict=True))
            label = ", ".join(f"{name} {value}" for name, value in chosen.items()) or kind.name
            found[label] = within(self.call(), "[task]", lambda chosen=chosen: kind.named(setting, **fixed, **chosen))
        return found

    def _config(self, name: str, task: TokenTask) -> Any:
        from regard.models.base.catalogue import language_models

        fields = {**self.known[name]}
        kind = language_models.get(fields.pop("kind", "transformer"))
        return kind, kind.config(vocab_size=task.vocabulary, **fields)

    def make_model(self, name: str, task: TokenTask) -> Any:
        kind, config = self._config(name, task)
        return kind.model(config)

    def tables(self, results: Results) -> dict[str, Any]:
        note = "Test split, at each model's best learning rate on the validation split; ± half the 95 % interval."
        rows = self.chosen(results)
        scores = pivot(rows, ["task", "model"], {"": interval("score")}, "metric", note=note)
        return {"Scores": scores, "Training": self.training_table(results)}
