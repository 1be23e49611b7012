"""Answer word problems: ICLM and Transformer, with and without feed-forward layers.

ICLM paper, section 7, table 3 and figure 3: at equal perplexity, models without feed-forward layers copy the operands
but compute the answer less often.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

from regard.tasks import TokenTask
from regard.tasks.tiny_math import TinyMath

from ..lib.claims import Claim, claims_of
from ..lib.display import interval, pivot
from ..lib.recipe import Results, recipe
from ..lib.task_recipe import TaskRecipe
from ..lib.trained import Sizes

PAPER, ANSWER, EQUATION = "ICLM", "accuracy on answer", "accuracy on equation"
CLOSE = 0.05  # nats per word; the paper's gaps in perplexity are 0.6 % (ICLM) and 4.0 % (Transformer)
SEEN, HELD_OUT = "new stories", "new operands"
TRANSFORMER, BARE, ICLM, ICLM_BARE = "Transformer", "Transformer, no MLP", "ICLM", "ICLM, no MLP on f"
MODELS: dict[str, dict[str, Any]] = {
    TRANSFORMER: {"mixers": "softmax", "feed_forward": "gelu"},
    BARE: {"mixers": "softmax", "feed_forward": "none"},
    ICLM: {"model": "iclm", "variant": "full"},
    ICLM_BARE: {"model": "iclm", "variant": "full", "f_mlp": "none"},
    "ICLM, no MLP": {"model": "iclm", "variant": "full", "f_mlp": "none", "phi_mlp": "none"},
}


@recipe("tinymath")
class TinyMathRecipe(TaskRecipe, Sizes):
    """Equation and answer accuracy on word problems: ICLM and Transformer, with and without feed-forward layers."""

    setting: str = "small"  # Setting of the task: 'quick' (numbers up to 20), 'small' (up to 81) or 'paper'.
    layers: int = 4
    """Layers; of ICLM, half as many pairs of blocks."""
    batch: int = 32
    steps: int = 1200
    stop_at: float = 1.1
    limits: ClassVar = {"layers": (2, 256)}
    known = MODELS
    metric = ANSWER
    by_size: ClassVar = {
        "quick": {"setting": "quick", "seeds": 2, "steps": 40, "rates": (3e-3,), "examples": 32, "width": 32,
                  "models": (TRANSFORMER, ICLM)},
        "paper": {"setting": "paper", "width": 512, "layers": 8, "heads": 8,
                  "steps": 30_000, "rates": (1e-4, 3e-4, 1e-3)},
    }  # fmt: skip

    def training_tasks(self) -> Mapping[str, TokenTask]:
        return {SEEN: TinyMath(**TinyMath.settings[self.setting], operands="seen")}

    def test_tasks(self, name: str) -> Mapping[str, TokenTask]:
        return {**self.training_tasks(), HELD_OUT: TinyMath(**TinyMath.settings[self.setting])}

    def claims(self, results: Results) -> list[Claim]:
        told: list[Any] = []
        for whole, bare in ((TRANSFORMER, BARE), (ICLM, ICLM_BARE)):
            drop, copy, loss = (self.gap(results, bare, whole, metric=metric, test=SEEN)
                                for metric in (ANSWER, EQUATION, "loss"))  # fmt: skip
            note = f"{bare} less {whole}."
            told += [
                ("table 3", f"{whole}: without MLP fewer answers are right", drop, "below", 0.0,
                 f"Share of right answers. {note}", {"effect": 0.1}),
                ("table 3", f"{whole}: without MLP equations are copied as well", copy, "at least", -0.02,
                 f"Share of right words of equations; 0.02 counts as equal. {note}", {"effect": 0.05}),
                ("table 3", f"{whole}: without MLP perplexity is close", loss, "at most", CLOSE,
                 f"Nats per word of what follows the story; {CLOSE} counts as close. {note}", {"effect": CLOSE}),
            ]  # fmt: skip
        return claims_of(PAPER, told, untestable=self.unlearned(results, SEEN))

    def tables(self, results: Results) -> dict[str, Any]:
        note = (
            f"Shares of right words, and the loss in nats per word of what follows the story; ± half the 95 % interval "
            f"over seeds. Operations with their operands are those of training ({SEEN}) or others ({HELD_OUT})."
        )
        scores = pivot(self.chosen(results), ["test", "model"], {"": interval("score")}, "metric", note=note)
        return {"Accuracy": scores, "Training": self.training_table(results)}
