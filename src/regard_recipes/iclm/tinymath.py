"""Answer word problems: ICLM and Transformer, with and without feed-forward layers.

ICLM paper, section 7. Table 3: at equal perplexity, models without feed-forward layers copy the operands but compute
the answer less often. Figure 3: while the question is written, the f blocks of an ICLM give most weight to the token
that the model predicts, where the story has it.
"""

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import numpy as np

from regard.inspect.mechanisms import copying, patterns
from regard.tasks import TokenTask
from regard.tasks.tiny_math import TinyMath

from ..lib.claims import Claim, claims_of
from ..lib.display import dots, interval, pivot, stat
from ..lib.recipe import Cell, Frame, Results, select
from ..lib.task_recipe import TaskRecipe
from ..lib.trained import Sizes
from ._mechanisms_measures import measure_prompt
from .iclm_mechanisms import COPIES, DOMINATES, OTHERS, by_stream

PAPER, ANSWER, EQUATION = "ICLM", "accuracy on answer", "accuracy on equation"
CLOSE = 0.05  # nats per word; the paper's gaps in perplexity are 0.6 % (ICLM) and 4.0 % (Transformer)
SEEN, HELD_OUT = "new stories", "new operands"
STORIES = 64  # on which the weights of heads are measured
TRANSFORMER, BARE, ICLM, ICLM_BARE = "Transformer", "Transformer, no MLP", "ICLM", "ICLM, no MLP on f"


class TinyMathRecipe(TaskRecipe, Sizes, name="tinymath"):
    """Equation and answer accuracy on word problems: ICLM and Transformer, with and without feed-forward layers."""

    setting: str = "small"  # Setting of the task: 'quick' (numbers up to 20), 'small' (up to 81) or 'paper'.
    layers: int = 4  # Layers; of ICLM, half as many pairs of blocks.
    batch = 32
    steps = 1200
    stop_at = 1.1
    limits: ClassVar = {"layers": (2, 256)}
    known: ClassVar = {
        TRANSFORMER: {"mixers": "softmax", "feed_forward": "gelu"},
        BARE: {"mixers": "softmax", "feed_forward": "none"},
        ICLM: {"model": "iclm", "variant": "full"},
        ICLM_BARE: {"model": "iclm", "variant": "full", "f_mlp": "none"},
        "ICLM, no MLP": {"model": "iclm", "variant": "full", "f_mlp": "none", "phi_mlp": "none"},
    }
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

    def measure(self, cell: Cell, seed: int) -> Iterator[dict[str, Any]]:
        drawn = seed == self.seed and cell["model"] in (TRANSFORMER, ICLM)
        yield from (row for row in super().measure(cell, seed) if drawn or row["kind"] != "prompt")

    def scored(self, model: Any, name: str, test: TokenTask) -> Iterator[dict[str, Any]]:
        yield from super().scored(model, name, test)
        if name == SEEN:
            yield from operand_rows(model, test, min(STORIES, self.examples))

    def claims(self, results: Results) -> list[Claim]:
        heads = self.heads_of(results)
        weight, lift = (by_stream(heads, column) for column in ("predicted", "lift"))
        layers = ", ".join(f"{x:.2f}" for x in select(heads, stream="f").groupby("layer")["predicted"].mean())
        claim_rows: list[Any] = [
            ("figure 3", "f's weight on the operand that is written dominates", weight["f"].dropna(),
             "above", DOMINATES, f"Mean weight over heads and layers; by layer: {layers}."),
            ("figure 3", "f gives it more weight than others",
             {f"than {name}": (weight["f"] - weight[each]).dropna() for name, each in OTHERS.items()},
             "above", 0, "Mean weight of f's heads, less that of others."),
            *(("figure 3", f"{name} shows no such pattern", lift[stream].dropna(), "at most", COPIES,
               "Weight on the operand, times that of equal weights.") for name, stream in OTHERS.items()),
        ]  # fmt: skip
        for whole, bare in ((TRANSFORMER, BARE), (ICLM, ICLM_BARE)):
            drop, copy, loss = (self.gap(results, bare, whole, metric=metric, test=SEEN)
                                for metric in (ANSWER, EQUATION, "loss"))  # fmt: skip
            note = f"{bare} less {whole}."
            claim_rows += [
                ("table 3", f"{whole}: without MLP fewer answers are right", drop, "below", 0.0,
                 f"Share of right answers. {note}", {"effect": 0.1}),
                ("table 3", f"{whole}: without MLP equations are copied as well", copy, "at least", -0.02,
                 f"Share of right words of equations; 0.02 counts as equal. {note}", {"effect": 0.05}),
                ("table 3", f"{whole}: without MLP perplexity is close", loss, "at most", CLOSE,
                 f"Nats per word of what follows the story; {CLOSE} counts as close. {note}", {"effect": CLOSE}),
            ]  # fmt: skip
        return claims_of(PAPER, claim_rows, untestable=self.unlearned(results, SEEN))

    def tables(self, results: Results) -> dict[str, Any]:
        return {
            "Accuracy": pivot(self.chosen(results), ["test", "model"], {"": interval("score")}, "metric", note=(
                f"Shares of right words, and the loss in nats per word of what follows the story; ± half the 95 % "
                f"interval over seeds. Operations with their operands are those of training ({SEEN}) or others "
                f"({HELD_OUT}).")),
            "Weight on the operand that is written": pivot(self.heads_of(results), ["model", "stream", "layer"], {
                "on the operand": "{predicted:.3f}", "equal weights": "{uniform:.3f}", "lift": "{lift:.2f}",
                "best head": stat("predicted", "max", "{:.3f}"),
            }, note="While a model writes the operands of the question: mean weight on earlier occurrences of the "
                    "operand that it predicts, where there are any, over heads and seeds, and the lift: that weight "
                    "over the one that equal weights give."),
            "Training": self.training_table(results),
        }  # fmt: skip

    def heads_of(self, results: Results) -> Frame:
        """Return the rows of the heads of both whole models, at the chosen rates."""
        return self.chosen(results, "head", model=[TRANSFORMER, ICLM])

    def figures(self, results: Results) -> dict[str, bytes]:
        from ._mechanisms_figures import prompt_figure

        weights = {"predicted": "trained model", "uniform": "equal weights"}
        label = "mean weight of a head on the operand that is written"
        heads = dots(self.heads_of(results), weights, "{stream}, layer {layer:.0f}", x_label=label)
        made = {**super().figures(results), "heads": heads}
        rows = {row["model"]: row for row in self.chosen(results, "prompt", seed=self.seed).to_dict("records")}
        if {ICLM, TRANSFORMER} <= rows.keys():
            made["story"] = prompt_figure({ICLM: rows[ICLM], "transformer": rows[TRANSFORMER]}, [ICLM])
        return made


def operand_rows(model: Any, task: Any, count: int) -> Iterator[dict[str, Any]]:
    """Yield a row for each head with its mean weight on earlier occurrences of the operands that the model predicts in
    so many stories, and a row with the maps of the first story, up to the first operand."""
    examples = task.examples(0, range(count), "test")
    sums: dict[tuple[str, int], Any] = {}  # by stream and layer: weights of the heads, equal weights, and rows
    for example in examples:
        tokens, operands = (x[None].long().to(model.device) for x in (example.tokens, example.parts["equation"]))
        logits, layers = patterns(model, tokens)
        for each in layers:
            written = each.roles.rows(operands, each.weights.shape[2]) == 1
            copied = copying(each.weights, each.roles, tokens, each.wanted(logits).masked_fill(~written, -1))
            key = each.stream, each.layer + 1
            sums[key] = sums.get(key, 0) + copied.rows * np.array([*copied.weight.tolist(), copied.uniform, 1.0])
    for (stream, layer), total in sums.items():
        *weights, uniform, _ = (total / max(total[-1], 1)).tolist()
        for head, predicted in enumerate(weights, 1):
            yield {"kind": "head", "stream": stream, "layer": layer, "head": head, "predicted": predicted,
                   "uniform": uniform, "lift": predicted / uniform if uniform else 0.0}  # fmt: skip
    before = int(examples[0].parts["equation"].nonzero()[0])
    yield measure_prompt(model, examples[0].tokens[:before].tolist(), task.words.words)
