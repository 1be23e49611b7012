"""Infer an automaton from its strings: Memory Mosaics with several kernels on RegBench.

Sparse-attention paper, section 4.2, tables 1 and 5: validity of the likeliest symbol, and total variation distance to
the automaton's distribution, for models trained on 1,000 to 40,000 automata.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

from regard.tasks import TokenTask
from regard.tasks.regbench import RegBench

from ..lib.claims import Claim, claims_of
from ..lib.recipe import Results
from ..lib.task_recipe import TaskRecipe
from ..lib.trained import Sizes
from .length_generalization import LOG, LengthGeneralization

PAPER, SOFTMAX, VALID, APART = "Sparse attention", "softmax", "valid", "total variation"
COMPACT = ("sparsemax", "biweight", "triweight", "relumax")


class InContextLanguage(TaskRecipe, Sizes, name="in-context-language"):
    """Valid symbols and total variation distance on RegBench, by kernel and number of automata in training."""

    automata: tuple[int, ...] = (1000, 0)  # Different automata in training; 0 for a new one in every example.
    setting: str = "quick"  # Sizes of automata and strings: 'quick' or 'paper'.
    heads = 2
    batch = 32
    stop_at = 1.1
    limits: ClassVar = {"automata": (0, 2**40)}
    known: ClassVar = {
        **{name: {"model": "memory-mosaic", "mixers": name} for name in (SOFTMAX, *COMPACT)},
        "Transformer, softmax": {"mixers": "softmax", "feed_forward": "gelu"},
        LOG: LengthGeneralization.known[LOG],
    }
    metric = VALID
    learned = 0.75
    by_size: ClassVar = {
        "quick": {"seeds": 2, "automata": (0,), "steps": 60, "rates": (3e-3,), "examples": 32,
                  "models": (SOFTMAX, "biweight"), "width": 32},
        "paper": {"automata": (1000, 2500, 5000, 10_000, 40_000), "setting": "paper", "width": 256, "layers": 8,
                  "heads": 8, "steps": 250_000, "rates": (1e-4, 2.5e-4, 5e-4), "examples": 500},
    }  # fmt: skip

    def training_tasks(self) -> Mapping[str, TokenTask]:
        sizes = {} if self.setting == "paper" else RegBench.settings[self.setting]
        return {f"{n:,}" if n else "endless": RegBench(**sizes, automata=n) for n in self.automata}

    def claims(self, results: Results) -> list[Claim]:
        tasks = list(self.training_tasks())
        gap = lambda metric: {f"{task}, {name}": self.gap(results, name, SOFTMAX, task=task, metric=metric)  # noqa: E731
                              for task in tasks for name in COMPACT}  # fmt: skip
        note = "Memory Mosaics by automata in training and kernel, less those with softmax."
        return claims_of(PAPER, [
            ("table 1", "Compact kernels are as accurate as the Gaussian kernel", gap(VALID), "at least", -0.005,
             f"{note} 0.005 counts as equal."),
            ("table 1", "Compact kernels are nearer to the true distribution", gap(APART), "below", 0.0, note),
        ], effect=0.01, untestable=self.unlearned(results, tasks))  # fmt: skip

    def tables(self, results: Results) -> dict[str, Any]:
        floors = [f"{name} {values[VALID]:.2f}" for name, values in results.facts["floors"].items()]
        note = f"± half the 95 % interval over seeds. Valid symbols of the trivial answer: {'; '.join(floors)}."
        scores = self.score_table(results, {"task": "automata", "model": "model"}, note)
        return {"Scores on new automata": scores, "Training": self.training_table(results)}
