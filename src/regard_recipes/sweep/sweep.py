"""Train models on a task over a grid of models, learning rates, task settings and seeds, given in one TOML file.

docs/tasks.md has an example. [task] has the name, setting and fields of a task, of which a list is an axis of the grid;
[train] options of `TRAIN` and the metric that chooses the rate; [model] fields that all models share; and [models.NAME]
those of one model, with its "kind", one of `regard list models`.
"""

import json
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any, ClassVar

from regard.checks import ArgumentError, require, suggestion, within
from regard.tasks import TokenTask
from regard.tasks.tokens import settable, token_task
from regard.training.fields import from_mapping, read_mapping

from ..lib.recipe import Results
from ..lib.task_recipe import TaskRecipe

EXAMPLE: dict[str, Any] = {
    "task": {"name": "mqar", "setting": "quick"},
    "model": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 1, "feed_forward": "none"},
    "models": {"softmax": {"mixers": "softmax"}, "biweight": {"mixers": "biweight"}},
}
"""What is run without a file."""
TRAIN = ("seeds", "rates", "steps", "batch", "stop_at", "examples")  # options that [train] may set, besides the metric


class Sweep(TaskRecipe, name="sweep"):
    """Scores over a grid of models, learning rates, task settings and seeds from one TOML file."""

    file: Path | None = None
    """The TOML file; what it sets wins over other options. Without one, a small example is run."""
    content: str = ""  # What the file says, as JSON; set when the file is read.
    by_size: ClassVar = {"quick": {"seeds": 2, "rates": (3e-3,), "steps": 60, "examples": 64}, "paper": {}}

    @classmethod
    def configure(cls, size: str = "small", **changes: Any) -> Any:
        made = super().configure(size, **changes)
        table = made.table if made.file is None else read_mapping(made.file, call=cls.call())
        cls._known("", table, ("task", "train", "model", "models"))
        for part, given in table.items():
            require(isinstance(given, dict), cls.call(), f"[{part}] is {given!r}, expected a table.")
        train = {name: value for name, value in table.get("train", {}).items() if name != "metric"}
        cls._known("train", train, TRAIN)
        made = from_mapping(made, train, call=cls.call(), source=f"[train] of {made.file}")
        made = replace(made, content=json.dumps(table, sort_keys=True))
        made.table = table  # with the models in the order of the file
        return made

    @cached_property
    def table(self) -> dict[str, Any]:
        """Return what the file says."""
        return json.loads(self.content) if self.content else EXAMPLE

    @property
    def metric(self) -> str:  # type: ignore[override]
        return self.table.get("train", {}).get("metric", "accuracy")

    @property
    def known(self) -> dict[str, Any]:  # type: ignore[override]
        known = {}
        for name, options in self.table.get("models", {}).items():
            require(isinstance(options, dict), self.call(), f"[models.{name}] is {options!r}, expected a table.")
            known[name] = {**self.table.get("model", {}), **options}
        return known

    @classmethod
    def _known(cls, part: str, table: Mapping[str, Any], names: tuple[str, ...]) -> None:
        where = f"[{part}]" if part else "the file"
        for name in table:
            require(name in names, cls.call(), f"{where} has an unknown key {name!r}.{suggestion(name, names)}")

    def check(self) -> None:
        require(bool(self.known), self.call(), "the file names no model; add a table [models.NAME].")
        super().check()
        for task in self.training_tasks().values():
            metrics = list(task.floor(count=2))
            close = suggestion(str(self.metric), metrics)
            require(self.metric in metrics, self.call(), f"[train] metric: unknown metric {self.metric!r}.{close}")
            problem = f"[train] metric {self.metric!r} is smaller for better answers"
            hint = "the learning rate with the largest is taken, so choose another metric."
            require(not task.is_error(self.metric), self.call(), f"{problem}; {hint}")
            for name in self.known:
                within(self.call(), f"[models.{name}]", self._config, name, task)

    def training_tasks(self) -> Mapping[str, TokenTask]:
        return self._tasks

    @cached_property
    def _tasks(self) -> dict[str, TokenTask]:
        fields = {"name": "mqar", "setting": "quick", **self.table.get("task", {})}
        kind = token_task(self.call(), "[task] name", fields.pop("name"))
        self._known("task", fields, ("setting", *settable(kind)))
        axes = {name: values for name, values in fields.items() if isinstance(values, list)}
        fixed = {name: value for name, value in fields.items() if name not in axes}
        for name, given in axes.items():
            require(bool(given), self.call(), f"[task] {name} is an empty list; give at least one value.")
        tasks = {}
        for values in product(*axes.values()):
            chosen = dict(zip(axes, values, strict=True))
            label = ", ".join(f"{name} {value}" for name, value in chosen.items()) or kind.name
            tasks[label] = within(self.call(), "[task]", lambda chosen=chosen: kind.named(**fixed, **chosen))
        return tasks

    def _config(self, name: str, task: TokenTask) -> Any:
        from regard.models.base.catalogue import language_models

        fields = {**self.known[name]}
        kind = language_models.get(fields.pop("kind", "transformer"))
        if "vocab_size" in fields:
            raise ArgumentError("vocab_size is set by the task; omit it.")
        return kind, kind.config(vocab_size=task.vocabulary, **fields)

    def make_model(self, name: str, task: TokenTask) -> Any:
        kind, config = self._config(name, task)
        return kind.model(config)

    def tables(self, results: Results) -> dict[str, Any]:
        note = "Test split, at each model's best learning rate on the validation split; ± half the 95 % interval."
        return {"Scores": self.score_table(results, ["task", "model"], note), "Training": self.training_table(results)}
