"""Follow items through swaps: local linear attention beside softmax attention and the delta rule.

Local Linear Attention paper, section 4, figure 5: accuracy of permutation state tracking against the number of places.
What counts is the accuracy on moved places: the others, about 60 %, are right where all swaps are ignored.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

from regard.tasks import TokenTask
from regard.tasks.permutation_tracking import PermutationTracking

from ..lib.claims import Claim, claims_of
from ..lib.recipe import Results
from ..lib.task_recipe import TaskRecipe, mamba
from ..lib.trained import Sizes

PAPER, LLA, SOFTMAX, MAMBA = "Local Linear Attention", "local linear, learned ridge", "softmax", "Mamba"
MOVED = "accuracy on moved places"


class StateTracking(TaskRecipe, Sizes, name="state-tracking"):
    """Accuracy on the moved places of permutations: local linear attention, softmax and the delta rule."""

    places: tuple[int, ...] = (6,)  # Numbers of places N; the paper has 16, 24, 48 and 96.
    items: int = 32  # Items to choose from; the paper has 8192.
    questions: int = 4  # Questions of a sequence; the paper has 8.
    steps = 3000
    limits: ClassVar = {"places": (2, 4096), "items": (2, 2**24), "questions": (1, 4096)}
    known: ClassVar = {
        SOFTMAX: {"mixers": "softmax", "qk_norm": "rms"},
        LLA: {"mixers": "local-linear", "ridges": "learned", "qk_norm": "rms"},
        "delta rule": {"mixers": "deltanet"},
        "gated delta rule": {"mixers": "gated-deltanet"},
        MAMBA: {},
    }
    """Names of models to fields of `HybridConfig`; Mamba is that of transformers, which is slow without a GPU."""
    slow = (MAMBA,)
    metric = MOVED
    by_size: ClassVar = {
        "quick": {"seeds": 2, "steps": 40, "rates": (3e-3,), "models": (SOFTMAX, LLA), "examples": 64, "width": 32},
        "paper": {"places": (16, 24, 48, 96), "items": 8192, "questions": 8, "width": 256, "layers": 4, "batch": 256,
                  "steps": 25_000, "rates": (1e-4, 5e-4, 1e-3), "examples": 1000, "models": tuple(known)},
    }  # fmt: skip

    def training_tasks(self) -> Mapping[str, TokenTask]:
        return {str(n): PermutationTracking(places=n, items=self.items, questions=self.questions) for n in self.places}

    def make_model(self, name: str, task: TokenTask) -> Any:
        if name == MAMBA:
            return mamba(task.vocabulary, self.width, self.layers, self.width**2 // 4)
        return super().make_model(name, task)

    def claims(self, results: Results) -> list[Claim]:
        tasks = [str(n) for n in self.places]
        gap = {f"N = {n}": self.gap(results, LLA, SOFTMAX, task=n) for n in tasks}
        scores = self.scores(results, model=SOFTMAX).groupby("task", sort=False)["score"].mean()
        softmax = ", ".join(f"{score:.2f} at N = {n}" for n, score in scores.items())
        return claims_of(PAPER, [
            ("figure 5", "Local linear attention tracks states at least as well as softmax", gap, "at least", -0.02,
             f"Accuracy on moved places, less softmax's ({softmax}); 0.02 counts as equal."),
        ], effect=0.05, untestable=self.unlearned(results, tasks, (LLA, SOFTMAX)))  # fmt: skip

    def tables(self, results: Results) -> dict[str, Any]:
        floors = [f"{n} places {values['accuracy']:.2f}" for n, values in results.facts["floors"].items()]
        note = f"± half the 95 % interval over seeds. Accuracy where all swaps are ignored: {'; '.join(floors)}."
        scores = self.score_table(results, {"task": "places", "model": "model"}, note)
        return {"Accuracy": scores, "Training": self.training_table(results)}
