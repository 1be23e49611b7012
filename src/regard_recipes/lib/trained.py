"""What recipes of trained models have in common: every model is trained with every learning rate and seed, and compared
at the rate that is best for it on validation data. `estimate` says how large a run would be, without training."""

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from regard.checks import ArgumentError
from regard.nn import FastWeightProductKeyMemory, ProductKeyMemory

from .claims import Estimate, paired
from .display import means, pivot
from .recipe import Cell, Frame, Limits, Recipe, Results, check_names, check_shared, frame_of, select, stacked

STATE_BYTES = 16  # bytes of a parameter in training: weight, gradient and the two averages of AdamW, float32
RATE = 1e14  # operations per second that hours are given for
ESTIMATED = (
    f"Operations are 6 for each parameter and token, without attention scores, embeddings that are only read and slots "
    f"of memories. Hours are those operations at {RATE / 1e12:.0f} TFLOP/s; nothing was measured. Memory is "
    f"{STATE_BYTES} bytes a parameter for weights, gradients and AdamW; activations come on top."
)


@dataclass(kw_only=True, eq=False)
class Sizes:
    """Options of recipes whose models have one width, and layers and heads of one kind."""

    width: int = 64  # Channels.
    layers: int = 2  # Layers.
    heads: int = 4  # Heads.
    limits: ClassVar[Limits] = {"width": (8, 8192), "layers": (1, 256), "heads": (1, 256)}


class LanguageOptions(Recipe):
    """Options of recipes that train language models, whose schedule, decay and clipping are `TaskBudget`'s defaults."""

    context: int = 64  # Tokens of a training window.
    batch: int = 16  # Windows of a step.
    parts: int = 1  # Forward passes of a step, more where memory is short.
    steps: int = 800  # Optimiser steps of each model.
    looks: int = 4  # How often the losses are noted.
    dtype: str = "float32"  # Of matrix products: float32 or bfloat16 (autocast; weights and updates are float32).
    compile: bool = False  # Train through torch.compile.
    limits: ClassVar[Limits] = {"context": (2, math.inf)}
    choices: ClassVar = {"dtype": ("float32", "bfloat16")}

    def check(self) -> None:
        super().check()
        if self.batch % self.parts:
            raise ArgumentError(f"--parts {self.parts} does not divide --batch {self.batch}.")

    def look_steps(self) -> tuple[int, ...]:
        """Return the steps after which the losses are noted, at equal intervals, the last one at the end."""
        return tuple(sorted({max(1, round(self.steps * (i + 1) / self.looks)) for i in range(self.looks)}))


def language_config(fields: Mapping[str, Any], spread: float) -> Any:
    """Return the configuration of the language model that "model" names in `fields`, by default "transformer", with
    the other fields; `spread` is the standard deviation of its first weights."""
    from regard.models import language_models

    settings = {**fields}
    kind = settings.pop("model", "transformer")
    if kind != "memory-mosaic":  # whose first weights have a scale of their own
        settings.setdefault("initializer_range", spread)
    return language_models.get(kind).config(**settings)


class TrainedRecipe(Recipe):
    """A recipe of trained models. Its rows of kind "run" have the end of each training.

    Attributes:
        known: names of models to what making them needs to know.
        slow: names of models that are trained only where `models` names them.
        base: name of the model to which all others are compared, if there is one: `models` must name it.
        per: columns of a cell that name a model; each such model has its own best rate.
        shown: kind of the rows that are compared.
    """

    seeds: int = 3  # Models of each kind and learning rate; they differ in first weights and data.
    models: tuple[str, ...] = ()  # Names of the models to train; by default all but those that are slow on a CPU.
    rates: tuple[float, ...] = (1e-3, 3e-3)
    """Learning rates, of which each model takes the one that is best on validation data, by the mean over seeds."""
    limits: ClassVar[Limits] = {"rates": (1e-8, 1.0)}
    known: ClassVar[Mapping[str, Mapping[str, Any]]]
    slow: ClassVar[Sequence[str]] = ()
    base: ClassVar[str] = ""
    per: ClassVar[Sequence[str]] = ("model",)
    shown: ClassVar[str] = "run"

    @property
    def trained(self) -> tuple[str, ...]:
        """Return the names of the models to train."""
        return self.models or tuple(name for name in self.known if name not in self.slow)

    def check_models(self) -> None:
        """Raise an ArgumentError where `models` names an unknown model, or one twice."""
        check_names(self.call(), "--models", self.trained, list(self.known))

    def check(self) -> None:
        self.check_models()
        if self.base and self.base not in self.trained:
            raise ArgumentError(f"--models lacks {self.base}, to which all others are compared; add it.")
        super().check()

    def cells(self) -> Sequence[Cell]:
        return [{"model": model, "rate": rate} for model in self.trained for rate in self.rates]

    @abstractmethod
    def untrained(self, cell: Cell) -> tuple[Any, int]:
        """Return the model of a cell before its training, and the most tokens that it is trained on."""

    def merit(self, runs: Frame) -> Frame:
        """Return the column of runs by which rates are chosen, the larger the better."""
        return runs["validation"]

    def chosen(self, results: Results, kind: str = "", **where: Any) -> Frame:
        """Return the rows of a kind at each model's best rate: that with the largest mean merit over seeds."""
        runs, rows = results.select(kind="run"), results.select(kind=kind or self.shown)
        key: list[str] = [*self.per, "rate"]
        how: Any = {"sort": False, "dropna": False}
        mean = runs.assign(merit=self.merit(runs)).groupby(key, **how)["merit"].mean().reset_index()
        best = mean.loc[mean.groupby(key[:-1], **how)["merit"].idxmax(), key]
        return select(rows[rows.set_index(key).index.isin(best.set_index(key).index)], **where)

    def gap(
        self, results: Results, model: str, base: str, value: str = "test", kind: str = "", **where: Any
    ) -> Estimate:
        """Return a column of a model less that of another, at the chosen rates, paired by seed."""
        rows = self.chosen(results, kind, **where)
        return paired(select(rows, model=model), select(rows, model=base), value)


def estimate(made: Recipe) -> Any:
    """Return a table with a row for each model, and one for the whole run."""
    if not isinstance(made, TrainedRecipe):
        raise ArgumentError(f"{made.call()}: --estimate: the recipe does not train models by steps, so run it.")
    check_shared(made)
    models: dict[str, dict[str, Any]] = {}
    for cell in made.cells():
        name = ", ".join("-" if cell[column] is None else str(cell[column]) for column in made.per)
        if name not in models:
            with torch.device("meta"):
                model, length = made.untrained(cell)
            numbers = {"size": model.num_parameters(), "tokens": length, "operations": 6.0 * used(model) * length}
            models[name] = {"name": name, "runs": 0, **numbers}
        models[name]["runs"] += made.seeds_of(cell)
    rows = frame_of(models.values())
    rows["all"] = rows["runs"] * rows["operations"]
    whole = {"name": "all runs; the largest model", "runs": rows["runs"].sum(), "size": rows["size"].max()}
    sums = {"tokens": rows["runs"] @ rows["tokens"], **dict.fromkeys(("operations", "all"), rows["all"].sum())}
    rows = stacked([rows, frame_of([{**whole, **sums}])])
    rows = rows.assign(hours=rows["all"] / RATE / 3600, memory=STATE_BYTES * rows["size"] / 2**30)
    return pivot(rows, {"name": ", ".join(made.per)}, {
        "runs": "{runs:.0f}", "parameters": "{size:,.0f}", "tokens of a run": "{tokens:.2e}",
        "operations of a run": "{operations:.2e}",
        "hours of all runs": lambda row: means("{hours:,.0f}" if row["hours"].item() >= 10 else "{hours:,.2f}")(row),
        "memory": "{memory:.2f} GiB",
    }, note=ESTIMATED)  # fmt: skip


def used(model: Any) -> int:
    """Return the number of parameters that multiply every token: without embeddings that are only read, and slots."""
    multiplied = {id(module.weight) for module in model.modules() if isinstance(module, nn.Linear)}
    read = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)} - multiplied
    memories = (ProductKeyMemory, FastWeightProductKeyMemory)
    read |= {id(module.values) for module in model.modules() if isinstance(module, memories)}
    return sum(weight.numel() for weight in model.parameters() if id(weight) not in read)
