"""Regress in context on data whose map changes between segments: local linear attention, softmax and Mesa.

Local Linear Attention paper, section 4, figure 4a: two layers without feed-forward layers see pairs (x, y) of several
segments, each with a linear map of its own, and predict y at queries. Models are trained with noise, tested without.
"""

import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from regard.nn.attention.ridge import RidgeProjection
from regard.tasks import InContextRegression

from ..lib.claims import Claim, claims_of
from ..lib.display import interval, lines, pivot
from ..lib.recipe import Cell, Results
from ..lib.task_recipe import TaskRecipe

if TYPE_CHECKING:
    from ._regressor import Regressor

PAPER, LLA, SOFTMAX, MESA, MSE = "Local Linear Attention", "local linear, learned ridge", "softmax", "Mesa", "mse"
TESTED = 10_000  # first index of test examples; validation examples come before


class InContextRegressionRecipe(TaskRecipe, name="in-context-regression"):
    """Error of in-context regression against the length of a segment: local linear attention, softmax and Mesa."""

    dim: int = 8  # Channels of inputs and targets; the paper has 32.
    length: int = 64  # Pairs of a prompt.
    segments: tuple[int, ...] = (8, 16, 64)  # Pairs of a segment.
    width: int = 32  # Channels of the model; the paper has 128.
    stop_at: float = 2.0
    """Has no effect here: every model is trained for all steps, since its score is minus the error."""
    limits: ClassVar = {"stop_at": (0, math.inf), "dim": (1, 1024), "length": (2, 2**20), "segments": (1, 2**20),
                        "width": (4, 8192)}  # fmt: skip
    known: ClassVar = {
        SOFTMAX: {"spec": "softmax", "qk_norm": "rms"},
        LLA: {"spec": "local-linear", "ridge": "learned", "qk_norm": "rms"},
        "local linear, ridge 0.1": {"spec": "local-linear", "qk_norm": "rms"},
        MESA: {},
    }
    metric = MSE
    learned = -0.8
    by_size: ClassVar = {
        "quick": {"seeds": 2, "dim": 4, "length": 32, "segments": (8,), "steps": 40, "rates": (1e-2,), "examples": 64},
        "paper": {"dim": 32, "length": 256, "segments": (32, 64, 128, 256), "width": 128, "batch": 256, "steps": 40_000,
                  "rates": (5e-5, 1e-4, 5e-4, 1e-3), "examples": 1000},
    }  # fmt: skip

    def training_tasks(self) -> Mapping[str, Any]:
        return {str(n): InContextRegression(dim=self.dim, length=self.length, segment=n) for n in self.segments}

    def make_model(self, name: str, task: InContextRegression) -> "Regressor":  # type: ignore[override]
        from ._regressor import Regressor

        return Regressor(task.dim, self.width, task.queries, None if name == MESA else self.known[name])

    def example_length(self, task: InContextRegression) -> int:
        return int(task.examples(0, [0]).inputs.shape[-2])

    def prepare(self) -> Mapping[str, Any]:
        floors: dict[str, dict[str, float]] = {}
        for name, noisy in self.training_tasks().items():
            task = replace(noisy, noise=0.0)
            prompts = task.examples(0, range(64))
            answers = {"zero": task.trivial(prompts), "least squares by segment": task.ridge(prompts, by_segment=True),
                       "least squares on all pairs": task.ridge(prompts, by_segment=False)}  # fmt: skip
            floors[name] = {answer: float(task.error(value, prompts).mean()) for answer, value in answers.items()}
        return {"floors": floors}

    def measure(self, cell: Cell, seed: int) -> Iterator[dict[str, Any]]:
        from ._regressor import train

        task = self.training_tasks()[cell["task"]]
        torch.manual_seed(seed)
        model = self.make_model(cell["model"], task).to(self.torch_device)
        exact, start = replace(task, noise=0.0), time.perf_counter()
        yield from self.ridges(model, exact, "before")
        loss = train(model, task, steps=self.steps, batch=self.batch, rate=cell["rate"], seed=seed)
        yield from self.ridges(model, exact, "after")
        scores = [self.error(model, exact, first) for first in (0, TESTED)]
        yield {
            "kind": "run", "validation": -scores[0], "diverged": not math.isfinite(loss), "steps": self.steps,
            "loss": loss, "seconds": time.perf_counter() - start, "parameters": model.num_parameters(),
        }  # fmt: skip
        yield {"kind": "test", "test": cell["task"], "metric": MSE, "score": scores[1]}

    def ridges(self, model: "Regressor", task: InContextRegression, when: str) -> Iterator[dict[str, Any]]:
        """Yield the ridges that tokens of validation prompts get in each layer that learns them."""
        seen: list[Tensor] = []
        learners = [each for each in model.modules() if isinstance(each, RidgeProjection)]
        handles = [each.register_forward_hook(lambda learner, given, out: seen.append(out)) for each in learners]
        self.error(model, task, 0)
        for handle in handles:
            handle.remove()
        for layer, ridges in enumerate(seen):
            low, median, high = ridges.double().quantile(torch.tensor([0.05, 0.5, 0.95]).double()).tolist()
            yield {"kind": "ridge", "when": when, "layer": layer + 1, "low": low, "median": median, "high": high}

    def error(self, model: "Regressor", task: InContextRegression, first: int) -> float:
        """Return the mean squared error on examples from `first` on, of a stream that training does not use."""
        prompts = task.examples(2**40, range(first, first + self.examples))
        with torch.no_grad():
            output = model(prompts.inputs.to(self.torch_device), prompts.targets.to(self.torch_device))
        return float(task.error(output["prediction"].cpu(), prompts).mean())

    def claims(self, results: Results) -> list[Claim]:
        tasks = [str(n) for n in self.segments]
        return claims_of(PAPER, [
            ("figure 4a", f"Local linear attention has smaller errors than {rival}",
             {f"S = {n}": self.gap(results, LLA, rival, task=n) for n in tasks}, "below", 0.0,
             f"Mean squared error on noiseless prompts, less that of {rival}.",
             {"untestable": self.unlearned(results, tasks, (LLA, rival))})
            for rival in (SOFTMAX, MESA)
        ], effect=0.05)  # fmt: skip

    def tables(self, results: Results) -> dict[str, Any]:
        known = [f"S = {n}: " + ", ".join(f"{name} {value:.3f}" for name, value in values.items())
                 for n, values in results.facts["floors"].items()]  # fmt: skip
        note = f"Mean squared error by segment length S, ± half the 95 % interval over seeds. {'; '.join(known)}."
        shows = {name: f"{{{name}:.3g}}" for name in ("low", "median", "high")}
        shares = "Ridges of tokens before and after training: 5 %, 50 % and 95 % of them are lower, means over seeds."
        return {
            "Errors": pivot(self.scores(results), ["model"], {"": interval("score")}, "task", note=note),
            "Training": self.training_table(results),
            "Learned ridges": pivot(self.chosen(results, "ridge"), ["task", "layer"], shows, "when", note=shares),
        }

    def figures(self, results: Results) -> dict[str, bytes]:
        rows = self.scores(results).assign(segment=lambda f: f["task"].astype(int))
        y = {"score": "mean squared error"}
        return {"errors": lines({"": rows}, "segment", y, "model", log_x=True, log_y=True)}
