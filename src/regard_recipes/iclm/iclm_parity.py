"""Compare ICLM with a Transformer of equal size: perplexity, time and memory, with and without feed-forward layers.

The ICLM paper (section 7, tables 1 and 2) reports perplexities close to those of a Transformer "with the same number of
parameters". The models of table 2 are equal (`wv`, a value head in place of W_v). Those of table 1 are not: without
W_v f attention alone has (2 + H) C^2 parameters to the Transformer's 4 C^2. So `full` is trained as it is, matched by
narrower feed-forward layers of f, and (at the paper's size) with two heads in f, which makes it equal.
"""

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from regard.checks import ArgumentError

from ..lib.claims import Claim, Estimate, claims_of, exact, paired
from ..lib.display import Show, dots, gap, interval, pivot, spread, stat
from ..lib.recipe import Cell, Frame, Results, frame_of, select
from ..lib.text_recipe import VOCABULARIES, TextRecipe

PAPER = "ICLM"
TRANSFORMER, WV, MATCHED = "transformer", "iclm-wv", "iclm-full-matched"
EQUAL = 0.005  # share by which two numbers of parameters may differ and count as equal
CLOSE = 0.05  # share of perplexity that counts as close, and up to which a rise counts as slight
REPORTED = 0.059  # largest share by which the paper's ICLM is above its Transformer (tables 1 and 2: 1.0 % to 5.9 %)
SIMILAR = 0.25  # share within which times and memory count as very similar
PAPER_SHAPES = ((8, 512, 8), (12, 512, 8), (24, 1024, 16))  # layers, width and heads
COSTS = {"processor time": "step_cpu_seconds", "memory": "training_bytes", "parameters": "parameters"}
GPT2: dict[str, Any] = {"norm": "layer", "feed_forward": "gelu"}
"""A Transformer with GPT-2's blocks and rotary positions."""
MODELS: dict[str, dict[str, Any]] = {
    TRANSFORMER: GPT2,
    WV: {"model": "iclm", "variant": "wv"},
    MATCHED: {"model": "iclm", "variant": "full"},  # brought to its rival's size
    "iclm-full": {"model": "iclm", "variant": "full"},
    "iclm-full-two-heads": {"model": "iclm", "variant": "full", "f_attention_heads": 2},
    "transformer-no-mlp": {**GPT2, "feed_forward": "none"},
    "iclm-wv-no-f-mlp": {"model": "iclm", "variant": "wv", "f_mlp": "none"},
    "iclm-wv-no-phi-mlp": {"model": "iclm", "variant": "wv", "phi_mlp": "none"},
    "iclm-wv-no-mlp": {"model": "iclm", "variant": "wv", "phi_mlp": "none", "f_mlp": "none"},
}
MAIN = tuple(MODELS)[:5]  # with all feed-forward layers
RIVALS = {name: TRANSFORMER for name in MODELS if "iclm" in name} | {"iclm-wv-no-mlp": "transformer-no-mlp"}
"""The Transformer that each ICLM is compared to."""
WHOLE = {name: name.partition("-no-")[0] for name in MODELS if name not in MAIN}
"""The same model with all feed-forward layers."""


class Parity(TextRecipe, name="iclm-parity"):
    """ICLM beside Transformers of equal size: perplexity, time and memory, with and without feed-forward layers."""

    rates = (1e-3, 2e-3, 4e-3)
    width = 128
    layers: int = 4
    """Layers, an even number; the paper's models have 8 or 12 of width 512 with 8 heads, or 24 of 1024 with 16."""
    models: tuple[str, ...] = ()
    """Names of the models, each with the Transformer that it is compared to; by default all but iclm-full-two-heads and
    iclm-wv-no-phi-mlp."""
    known = MODELS
    slow = ("iclm-full-two-heads", "iclm-wv-no-phi-mlp")
    base = TRANSFORMER
    by_size: ClassVar = {
        "quick": {"layers": 2, "width": 32, "context": 32, "batch": 8, "steps": 150, "rates": (3e-3,),
                  "measured": 2048, "looks": 3, "seeds": 2},
        "paper": {"layers": 24, "width": 1024, "heads": 16, "models": MAIN, "tokenizer": "gpt2", "context": 512,
                  "batch": 32, "steps": 20_000, "rates": (1e-4, 3e-4, 1e-3), "measured": 262_144, "looks": 10,
                  "dtype": "bfloat16", "compile": True, "device": "auto"},
    }  # fmt: skip

    def check(self) -> None:
        super().check()
        for rival in (RIVALS.get(name, name) for name in self.trained):
            if rival not in self.trained:
                raise ArgumentError(f"--models lacks {rival}, to which others are compared; add it.")

    def prepare(self) -> Mapping[str, Any]:
        return {**super().prepare(), "paper_sizes": paper_sizes()}

    def cells(self) -> list[Cell]:
        return [cell for cell in super().cells() if self.model_config(cell, 100) is not None]

    def model_config(self, cell: Cell, vocabulary: int) -> Any:
        """Return the configuration; None for a model that cannot have the size of its rival."""
        from regard.models.base.catalogue import match_parameters

        made = super().model_config(cell, vocabulary)
        if cell["model"] != MATCHED:
            return made
        try:
            return match_parameters(made, super().model_config({"model": RIVALS[MATCHED]}, vocabulary)).config
        except ArgumentError:  # larger than its rival even without feed-forward layers
            return None

    def measure_model(self, model: Any) -> dict[str, Any]:
        return super().measure_model(model) | {"inner": getattr(model.config, model.config.size_field)}

    def claims(self, results: Results) -> list[Claim]:
        runs = self.runs(results)

        def above(name: str, other: str, column: str = "perplexity") -> Estimate:
            return paired(select(runs, model=name), select(runs, model=other), column, ratio=True).plus(-1)

        sizes = select(runs, model=MAIN[1:]).groupby("model", sort=False)["more_parameters"].first()
        equal = {name: above(name, TRANSFORMER) for name, more in sizes.items() if abs(more) <= EQUAL}
        unequal = {f"{name} ({more:+.1%} parameters)": above(name, TRANSFORMER)
                   for name, more in sizes.items() if name not in equal}  # fmt: skip
        without = {name: above(name, WHOLE[name]) for name in self.trained if name in WHOLE}
        cost = {name: above(WV, TRANSFORMER, column) for name, column in COSTS.items() if runs[column].notna().all()}
        counted = {shape: exact(counts["iclm-full"] / counts[TRANSFORMER] - 1)
                   for shape, counts in results.facts["paper_sizes"].items()}  # fmt: skip
        note = "Share of test perplexity above the Transformer's."
        return claims_of(PAPER, [
            ("section 7, tables 1 and 2", "Perplexity close to a Transformer's of equal size", equal, "at most", CLOSE,
             note, {"effect": REPORTED}),
            ("section 7, table 1", "Perplexity of the full model, of another size, close to a Transformer's", unequal,
             "at most", CLOSE, note, {"effect": REPORTED}),
            ("section 7, table 3", "Only a slight increase in perplexity without feed-forward layers", without,
             "at most", CLOSE, "Share of test perplexity above the same model with all. The paper: +0.6 % for f's, "
             "+4.0 % for the Transformer's.", {"effect": CLOSE}),
            ("section 7", "Size, memory and training time are very similar", cost, "within", SIMILAR,
             f"Share that {WV} needs more than the Transformer.", {"untestable": ""}),
            ("section 7, table 1", "Without W_v the number of parameters is the same", counted, "within", EQUAL,
             "Share that the full model has more, counted at the paper's sizes.", {"untestable": ""}),
        ], untestable=self.unlearned(results))  # fmt: skip

    def runs(self, results: Results) -> Frame:
        """Return a row for each run at the chosen rates, with "perplexity", "training_bytes" and "more_parameters", the
        share that it has more than its rival."""
        runs = self.chosen(results)
        test, peak, before = (runs[name].astype(float) for name in ("test", "peak_bytes", "before_bytes"))
        rivals = runs["model"].map(RIVALS).map(runs.groupby("model")["parameters"].first())
        return runs.assign(perplexity=np.exp(test), training_bytes=peak - before,
                           more_parameters=runs["parameters"] / rivals - 1)  # fmt: skip

    def tables(self, results: Results) -> dict[str, Any]:
        runs = self.runs(results)

        def times(others: Mapping[str, str]) -> Show:
            base = lambda rows: select(runs, model=others.get(rows["model"].iloc[0]))  # noqa: E731
            return lambda rows: gap("perplexity", base(rows), ratio=True)(rows)

        values: dict[str, Show] = {
            "parameters": "{parameters:,.0f}", "over the rival": "{more_parameters:+.2%}", "rate": "{rate:g}",
            "perplexity": spread("perplexity"), "nats/token": spread("test"),
            "perplexity over the rival's": times(RIVALS), "over that with feed-forward layers": times(WHOLE),
            "step": stat("step_seconds", "min", "{:.0f} ms", 1e3),
            "CPU, a step": stat("step_cpu_seconds", "median", "{:.0f} ms", 1e3),
            "training": stat("training_bytes", "median", "{:.0f} MiB", 2**-20),
        }  # fmt: skip
        counts = [{"size": size, "model": name, "millions": (count or math.nan) / 1e6,
                   "more": (count or math.nan) / sizes[TRANSFORMER] - 1}
                  for size, sizes in results.facts["paper_sizes"].items() for name, count in sizes.items()]  # fmt: skip
        return {
            "ICLM and Transformer": pivot(runs, ["model"], values, note=(
                f"{self.seeds} seeds: mean ± standard deviation; ratios are paired by seed, ± half the 95 % "
                f"interval. Rival: the Transformer; of models without any feed-forward layer, the one without. "
                f"Training: peak memory less what was held before the model was made.")),
            "Validation loss by learning rate": pivot(
                results.select(kind="run"), ["model"], {"nats/token": interval("held_out")}, "rate",
                note="± half the 95 % interval over seeds."),
            "Parameters at the paper's sizes": pivot(
                frame_of(counts), ["size"], {"": "{millions:.2f}M ({more:+.2%})"}, "model",
                note="Layers x width x heads, GPT-2's vocabulary, tied; in brackets: less the Transformer's. "
                     "A dash: even without f's feed-forward layers the model is larger."),
        }  # fmt: skip

    def figures(self, results: Results) -> dict[str, bytes]:
        perplexity = dots(self.runs(results), "perplexity", "model", x_label="test perplexity")
        return {"perplexity": perplexity, "curves": self.curves(results)}

    def notes(self, results: Results) -> list[str]:
        kept = {cell["model"] for cell in self.cells()}
        notes = [f"{name} is left out: even without f's feed-forward layers it is larger than its rival."
                for name in self.trained if name not in kept]  # fmt: skip
        rates = self.rates
        edge = select(self.chosen(results), rate=[min(rates), max(rates)])["model"].unique()
        if len(rates) > 1 and len(edge):
            notes.append(f"Learning rates at the edge of the grid, where one beyond may be better: {', '.join(edge)}.")
        return notes


def paper_sizes() -> dict[str, dict[str, int | None]]:
    """Return the parameters at the paper's sizes with GPT-2's vocabulary: shape to model to their number, None where a
    full model cannot be brought to the Transformer's."""
    from regard.models.base.catalogue import count_parameters

    sizes: dict[str, dict[str, int | None]] = {}
    for layers, width, heads in PAPER_SHAPES:
        sized, counts = Parity.configure(layers=layers, width=width, heads=heads, context=1024), {}
        for name in MAIN:
            config = sized.model_config({"model": name}, VOCABULARIES["gpt2"])
            counts[name] = None if config is None else count_parameters(config)
        sizes[f"{layers}x{width}x{heads}"] = counts
    return sizes
