"""Train on short sequences and test on longer ones: which attention kernels keep the answer.

Sparse-attention paper, section 4.3, tables 2 and 7, figure 4: Memory Mosaics with several kernels, trained on MQMTAR,
Reverse and Sort at one range of lengths and tested at up to 64 times its end; an answer must be right in full.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from regard.tasks import TokenTask, tasks

from ..lib.claims import Claim
from ..lib.display import interval, lines, panels, pivot
from ..lib.recipe import Results
from ..lib.task_recipe import TaskRecipe
from ..lib.trained import Sizes

PAPER, SOFTMAX = "Sparse attention", "softmax"
LOG = "softmax with learned scale × log n"
TRANSFORMER_LOG = f"Transformer, {LOG}"
COMPACT = {"Adaptive kernels generalise": ("sparsemax", "biweight", "triweight"), "ReLUmax generalises": ("relumax",)}
METRICS = {"exact": "exact answers", "accuracy": "right tokens"}
SOME = 0.1  # share of exact answers from which on a length can show a difference


class LengthGeneralization(TaskRecipe, Sizes, name="length-generalization"):
    """Exact answers of Memory Mosaics at up to 64 times the training length, by kernel."""

    seeds = 5
    tasks: tuple[str, ...] = ("mqmtar", "sort")  # Of mqmtar, reverse and sort.
    setting: str = "quick"  # Setting of the tasks: 'quick' or 'paper'.
    factors: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)  # Test lengths, in multiples of the longest in training.
    steps = 3000
    examples: int = 128  # Examples of the test split at each length.
    limits: ClassVar = {"factors": (1, 1024)}
    choices: ClassVar = {"tasks": ("mqmtar", "reverse", "sort")}
    known: ClassVar = {
        **{name: {"model": "memory-mosaic", "mixers": name}
           for name in (SOFTMAX, "sparsemax", "biweight", "triweight", "relumax")},
        LOG: {"model": "memory-mosaic", "mixers": SOFTMAX, "temperatures": "log"},
        TRANSFORMER_LOG: {"mixers": SOFTMAX, "temperatures": "log", "feed_forward": "gelu"},
    }  # fmt: skip
    """Memory Mosaics by kernel or with a scale that grows with the length, and a Transformer with such a scale."""
    metric = "exact"
    by_size: ClassVar = {
        "quick": {"seeds": 2, "tasks": ("sort",), "factors": (1, 2), "steps": 60, "rates": (3e-3,), "examples": 32,
                  "models": (SOFTMAX, "biweight"), "width": 32},
        "paper": {"tasks": ("mqmtar", "reverse", "sort"), "setting": "paper", "width": 512, "layers": 4, "batch": 256,
                  "steps": 195_000, "rates": (1e-3,), "seeds": 3, "examples": 1000},
    }  # fmt: skip

    def training_tasks(self) -> Mapping[str, TokenTask]:
        return {name: tasks.get(name).named(self.setting) for name in self.tasks}

    def test_tasks(self, name: str) -> Mapping[str, TokenTask]:
        task: Any = self.training_tasks()[name]
        return {str(n): replace(task, least=n * task.most, most=n * task.most) for n in self.factors}

    def claims(self, results: Results) -> list[Claim]:
        tests, claims = [str(n) for n in self.factors], []
        for wording, kernels in COMPACT.items():
            names = [name for name in kernels if name in self.trained and SOFTMAX in self.trained]
            missing = self.unlearned(results, self.tasks, [*names, SOFTMAX])
            able = [(task, test) for task in self.tasks for test in tests[1:]
                    if any(self.scores(results, task=task, test=test, model=name)["score"].mean() >= SOME
                           for name in (*names, SOFTMAX))]  # fmt: skip
            none = "" if able else f"no model is right in {SOME:.0%} of the examples longer than those of training"
            comparisons = (
                ("exact", able, none, "Share of exact answers, less softmax's, at every length above those of training "
                 f"where some model reaches {SOME:.0%}."),
                ("accuracy", [(task, tests[-1]) for task in self.tasks], "",
                 f"Share of right tokens at {tests[-1]} times the training length, less softmax's."),
            )  # fmt: skip
            claims += [
                Claim(PAPER, "table 2", f"{wording} to longer sequences than softmax",
                      {f"{task}, {name}, {test}x": self.gap(results, name, SOFTMAX, metric=metric, task=task, test=test)
                       for task, test in tests_of for name in names},
                      "above", 0.0, 0.1, "; ".join(filter(None, (missing, without))), note)
                for metric, tests_of, without, note in comparisons if names
            ]  # fmt: skip
        return claims

    def tables(self, results: Results) -> dict[str, Any]:
        made = {}
        for metric, title in METRICS.items():
            how = "teacher-forced" if metric == "accuracy" else "teacher-forced or free-running, which is the same"
            note = (f"Share of {title}, {how}, ± half the 95 % interval over seeds. Columns: test length over the "
                    "longest in training.")  # fmt: skip
            for task, group in self.scores(results, metric).groupby("task", sort=False):
                made[f"{task}, {title}"] = pivot(group, ["model"], {"": interval("score")}, "test", note=note)
        return {**made, "Training": self.training_table(results)}

    def figures(self, results: Results) -> dict[str, bytes]:
        rows = self.chosen(results)
        rows = rows.assign(factor=rows["test"].astype(int), kind=rows["metric"].map(METRICS)).dropna(subset="kind")
        return {"lengths": lines(panels(rows, "{task}, {kind}"), "factor", {"score": "share"}, "model", log_x=True,
                                 x_label="test length over training length")}  # fmt: skip
