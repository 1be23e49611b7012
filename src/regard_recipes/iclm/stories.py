"""Write stories: ICLM, Transformer and Memory Mosaics, graded by a program instead of a language model.

ICLM paper, table 1 (TinyStories, graded by GPT-4o: both models 6.81) and sparse-attention paper, table 4 and figures 2
and 3 (BabiStories). The data of both are out of reach here. The stories are those of a grammar, and the grader scores
grammar, consistency, plot and creativity from 0 to 10 (`regard.tasks.Stories.grade`).
"""

from collections.abc import Iterator, Mapping
from statistics import fmean
from typing import Any, ClassVar

import torch

from regard.tasks import TokenTask
from regard.tasks.stories import Stories

from ..lib.claims import Claim, claims_of
from ..lib.recipe import Results
from ..lib.task_recipe import TaskRecipe
from ..lib.trained import Sizes

TRANSFORMER, ICLM, MEAN = "Transformer", "ICLM", "mean grade"
MOSAICS = {f"Memory Mosaic, {name}": {"model": "memory-mosaic", "mixers": name} for name in ("softmax", "biweight")}


class StoriesRecipe(TaskRecipe, Sizes, name="stories"):
    """Accuracy and grades of continued stories: ICLM, Transformer and Memory Mosaics."""

    setting: str = "quick"  # Setting of the task: 'quick' or 'long'.
    layers: int = 4  # Layers; of ICLM, half as many pairs of blocks.
    graded: int = 64  # Stories that each model continues.
    batch = 32
    stop_at = 1.1
    limits: ClassVar = {"layers": (2, 256), "graded": (2, 2**20)}
    known: ClassVar = {
        TRANSFORMER: {"mixers": "softmax", "feed_forward": "gelu"},
        ICLM: {"model": "iclm", "variant": "full"},
        **MOSAICS,
    }
    learned = 0.3
    by_size: ClassVar = {
        "quick": {"seeds": 2, "steps": 30, "rates": (3e-3,), "examples": 16, "graded": 4, "width": 32, "layers": 2},
        "paper": {"setting": "long", "width": 512, "layers": 8, "heads": 8, "steps": 80_000, "batch": 128,
                  "rates": (3e-4, 1e-3), "graded": 500},
    }  # fmt: skip

    def training_tasks(self) -> Mapping[str, TokenTask]:
        return {"stories": Stories.named(self.setting)}

    def scored(self, model: Any, name: str, test: TokenTask) -> Iterator[dict[str, Any]]:
        yield from super().scored(model, name, test)
        for metric, values in self.grades(model).items():
            yield {"kind": "test", "test": name, "metric": metric, "score": fmean(values)}

    def grades(self, model: Any) -> dict[str, list[float]]:
        """Return the grades of continued stories, and their means."""
        task: Any = self.training_tasks()["stories"]
        by_metric: dict[str, list[float]] = {}
        model.eval()
        for example in task.examples(0, range(self.graded), "test"):
            prompt = example.tokens[: example.prompt][None].to(model.device)
            wanted = len(example.answer)
            how = {"max_new_tokens": wanted, "min_new_tokens": wanted, "do_sample": False, "pad_token_id": 0}
            out = model.generate(prompt, attention_mask=torch.ones_like(prompt), eos_token_id=None, **how)
            texts = [task.words.decode(row.tolist()) for row in (prompt[0], out[0, prompt.shape[1] :])]
            grades = task.grade(*texts)
            for metric, grade in {**grades, MEAN: fmean(grades.values())}.items():
                by_metric.setdefault(metric, []).append(grade)
        return by_metric

    def claims(self, results: Results) -> list[Claim]:
        wording = "Stories of ICLM have the grades of a Transformer's"
        note = "Mean of four grades from 0 to 10 by a program, less the Transformer's; 0.3 counts as equal."
        grades = "section 7, table 1", wording, self.gap(results, ICLM, TRANSFORMER, metric=MEAN), "within", 0.3, note
        words = ("figures 2 and 3, stories", "Biweight is no worse than softmax on stories",
                 self.gap(results, *reversed(MOSAICS)), "at least", -0.005,
                 "Share of right words, less softmax's; 0.005 counts as equal.")  # fmt: skip
        missing = self.unlearned(results, "stories")
        return [*claims_of("ICLM", [grades], effect=0.5, untestable=missing),
                *claims_of("Sparse attention", [words], effect=0.01, untestable=missing)]  # fmt: skip

    def tables(self, results: Results) -> dict[str, Any]:
        note = "Test split, ± half the 95 % interval over seeds. Grades from 0 to 10, of greedy continuations."
        return {"Scores": self.score_table(results, ["model"], note), "Training": self.training_table(results)}
