"""Compare ICLM with a Transformer of equal size: perplexity, time and memory, with and without feed-forward layers.

The ICLM paper (section 7, tables 1 and 2) reports perplexities close to those of a Transformer "with the same number of
parameters". The models of table 2 are equal (`wv`, a value head in place of W_v). Those of table 1 are not: without
W_v f attention alone has (2 + H) C^2 parameters to the Transformer's 4 C^2. So `full` is trained as it is, matched by
narrower feed-forward layers of f, and (at the paper's size) with two heads in f, which makes it equal.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from regard.checks import ArgumentError

from ..lib.budget import initial_range
from ..lib.claims import Claim, Estimate, claims_of, exact, paired
from ..lib.display import Show, dots, interval, median, pivot, spread
from ..lib.recipe import Cell, Frame, Results, frame_of, recipe, select
from ..lib.text_recipe import TextRecipe

PAPER = "ICLM"
TRANSFORMER, WV = "transformer", "iclm-wv"
EQUAL = 0.005  # share by which two numbers of parameters may differ and count as equal
CLOSE = 0.05  # share of perplexity that counts as close, and up to which a rise counts as slight
REPORTED = 0.059  # largest share by which the paper's ICLM is above its Transformer (tables 1 and 2: 1.0 % to 5.9 %)
SIMILAR = 0.25  # share within which times and memory count as very similar
Shape = tuple[int, int, int]
"""Layers, width and heads."""
PAPER_SHAPES: Sequence[Shape] = ((8, 512, 8), (12, 512, 8), (24, 1024, 16))
GPT2_VOCABULARY = 50257
COSTS = {"processor time": "step_cpu_seconds", "memory": "training_bytes", "parameters": "parameters"}


@dataclass(frozen=True)
class Kind:
    """One of the models: fields of its configuration, the Transformer that it is compared to and whether it is brought
    to its size, and the same model with all feed-forward layers."""

    options: Mapping[str, Any] = field(default_factory=dict)
    rival: str = TRANSFORMER
    matched: bool = False
    whole: str = ""


KINDS: dict[str, Kind] = {
    TRANSFORMER: Kind({"feed_forward": "gelu"}),
    WV: Kind({"variant": "wv"}),
    "iclm-full-matched": Kind({"variant": "full"}, matched=True),
    "iclm-full": Kind({"variant": "full"}),
    "iclm-full-two-heads": Kind({"variant": "full", "f_attention_heads": 2}),
    "transformer-no-mlp": Kind({"feed_forward": "none"}, "transformer-no-mlp", whole=TRANSFORMER),
    "iclm-wv-no-f-mlp": Kind({"variant": "wv", "f_mlp": "none"}, whole=WV),
    "iclm-wv-no-phi-mlp": Kind({"variant": "wv", "phi_mlp": "none"}, whole=WV),
    "iclm-wv-no-mlp": Kind({"variant": "wv", "phi_mlp": "none", "f_mlp": "none"}, "transformer-no-mlp", whole=WV),
}  # fmt: skip
MAIN = tuple(KINDS)[:5]  # with all feed-forward layers


@recipe("iclm-parity")
class Parity(TextRecipe):
    """ICLM beside Transformers of equal size: perplexity, time and memory, with and without feed-forward layers."""

    models: tuple[str, ...] = tuple(name for name in KINDS if name not in ("iclm-full-two-heads", "iclm-wv-no-phi-mlp"))
    """Names of the models; a model comes with the Transformer it is compared to. Also known: iclm-full-two-heads and
    iclm-wv-no-phi-mlp."""
    rates: tuple[float, ...] = (1e-3, 2e-3, 4e-3)
    """Learning rates, of which each model takes the one with the least mean loss on the validation text."""
    width = 128
    layers: int = 4
    """Layers, an even number; the paper's models have 8 or 12 of width 512 with 8 heads, or 24 of 1024 with 16."""
    known: ClassVar[Any] = KINDS
    by_size: ClassVar = {
        "quick": {"layers": 2, "width": 32, "context": 32, "batch": 8, "steps": 150, "rates": (3e-3,),
                  "measured": 2048, "looks": 3, "seeds": 2},
        "paper": {"layers": 24, "width": 1024, "heads": 16, "models": MAIN, "tokenizer": "gpt2", "context": 512,
                  "batch": 32, "steps": 20_000, "rates": (1e-4, 3e-4, 1e-3), "measured": 262_144, "looks": 10,
                  "dtype": "bfloat16", "compile": True, "device": "auto"},
    }  # fmt: skip

    def check(self) -> None:
        super().check()
        for name in (TRANSFORMER, *(KINDS[name].rival for name in self.trained)):
            if name not in self.trained:
                raise ArgumentError(f"{self.call()}: --models lacks {name}, to which others are compared; add it.")

    def prepare(self) -> Mapping[str, Any]:
        return {**super().prepare(), "paper_sizes": paper_sizes()}

    def cells(self) -> list[Cell]:
        return [cell for cell in super().cells() if self.model_config(cell, 100) is not None]

    def model_config(self, cell: Cell, vocabulary: int) -> Any:
        """Return the configuration; None for a model that cannot have the size of its rival."""
        return entry(cell["model"], (self.layers, self.width, self.heads), vocabulary, self.context)

    def measure_model(self, model: Any) -> dict[str, Any]:
        return super().measure_model(model) | {"inner": getattr(model.config, model.config.size_field)}

    def claims(self, results: Results) -> list[Claim]:
        counted = {shape: exact(own["iclm-full"] / own[TRANSFORMER] - 1)
                   for shape, own in results.facts["paper_sizes"].items()}  # fmt: skip
        told = ("section 7, table 1", "Without W_v the number of parameters is the same", counted, "within", EQUAL,
                "Share that the full model has more, counted at the paper's sizes.")  # fmt: skip
        return [*loss_and_cost_claims(self.runs(results), self.unlearned(results)), *claims_of(PAPER, [told])]

    def runs(self, results: Results) -> Frame:
        """Return a row for each run at the chosen rates, with "perplexity" and "training_bytes"."""
        runs = self.chosen(results)
        test, peak, before = (runs[name].astype(float) for name in ("test", "peak_bytes", "before_bytes"))
        return runs.assign(perplexity=test.map(math.exp), training_bytes=peak - before)

    def tables(self, results: Results) -> dict[str, Any]:
        runs = self.runs(results)

        def beside(which: str, value: str) -> Show:
            def show(rows: Frame) -> str:
                kind = rows["model"].iloc[0]
                other = getattr(KINDS[kind], which)
                base = select(runs, model=other)
                if other == kind or not len(base):
                    return ""
                found = share_above(rows, base, value)
                return f"{found.mean:+.2%}" if value == "parameters" else percent(found)

            return show

        values: dict[str, Show] = {
            "parameters": "{parameters:,.0f}", "to rival": beside("rival", "parameters"), "rate": "{rate:g}",
            "perplexity": spread("perplexity"), "nats/token": spread("test"),
            "perplexity to rival": beside("rival", "perplexity"),
            "to the same with feed-forward layers": beside("whole", "perplexity"),
            "step": lambda rows: f"{1e3 * rows['step_seconds'].min():.0f} ms",
            "CPU, a step": median("step_cpu_seconds", "{:.0f} ms", 1e3),
            "training": median("training_bytes", "{:.0f} MiB", 2**-20),
        }  # fmt: skip
        counts = [{"size": shape, "model": kind, "count": count_text(count, own[TRANSFORMER])}
                  for shape, own in results.facts["paper_sizes"].items() for kind, count in own.items()]  # fmt: skip
        return {
            "ICLM and Transformer": pivot(runs, ["model"], values, note=(
                f"{self.seeds} seeds: mean ± standard deviation; shares are paired by seed, ± half the 95 % "
                f"interval. Rival: the Transformer; of models without any feed-forward layer, the one without. "
                f"Training: peak memory less what was held before the model was made.")),
            "Validation loss by learning rate": pivot(
                results.select(kind="run"), ["model"], {"nats/token": interval("held_out")}, "rate",
                note="± half the 95 % interval over seeds."),
            "Parameters at the paper's sizes": pivot(
                frame_of(counts), ["size"], {"": lambda rows: rows["count"].iloc[0]}, "model",
                note="Layers x width x heads, GPT-2's vocabulary, tied; in brackets: less the Transformer's."),
        }  # fmt: skip

    def figures(self, results: Results) -> dict[str, bytes]:
        runs = self.runs(results).assign(text="test")
        return {
            "perplexity": dots(runs, "perplexity", "model", "text", x_label="test perplexity"),
            "curves": self.curves(results),
        }

    def notes(self, results: Results) -> list[str]:
        kept = {cell["model"] for cell in self.cells()}
        said = [f"{kind} is left out: even without f's feed-forward layers it is larger than its rival."
                for kind in self.trained if kind not in kept]  # fmt: skip
        rates = self.rates
        edge = select(self.chosen(results), rate=[min(rates), max(rates)])["model"].unique()
        if len(rates) > 1 and len(edge):
            said.append(f"Learning rates at the edge of the grid, where one beyond may be better: {', '.join(edge)}.")
        return said


def loss_and_cost_claims(runs: Frame, untestable: str) -> list[Claim]:
    """Return the claims about perplexity, time and memory."""
    rows = {kind: select(runs, model=kind) for kind in KINDS if kind in set(runs["model"])}

    def more(kind: str, other: str, value: str = "perplexity") -> Estimate:
        return share_above(rows[kind], rows[other], value)

    size = {kind: more(kind, KINDS[kind].rival, "parameters").mean for kind in MAIN[1:] if kind in rows}
    equal = {kind: more(kind, KINDS[kind].rival) for kind in size if abs(size[kind]) <= EQUAL}
    unlike = {f"{kind} ({size[kind]:+.1%} parameters)": more(kind, KINDS[kind].rival)
              for kind in size if kind not in equal}  # fmt: skip
    without = {kind: more(kind, KINDS[kind].whole) for kind in rows if KINDS[kind].whole in rows}
    cost = {name: more(WV, TRANSFORMER, column) for name, column in COSTS.items()
            if WV in rows and runs[column].notna().all()}  # fmt: skip
    base = "Share of test perplexity above the Transformer's."
    return claims_of(PAPER, [
        ("section 7, tables 1 and 2", "Perplexity close to a Transformer's of equal size", equal, "at most", CLOSE,
         base, {"effect": REPORTED}),
        ("section 7, table 1", "Perplexity of the full model, of another size, close to a Transformer's", unlike,
         "at most", CLOSE, base, {"effect": REPORTED}),
        ("section 7, table 3", "Only a slight increase in perplexity without feed-forward layers", without, "at most",
         CLOSE, "Share of test perplexity above the same model with all. The paper: +0.6 % for f's, +4.0 % for the "
         "Transformer's.", {"effect": CLOSE}),
        ("section 7", "Size, memory and training time are very similar", cost, "within", SIMILAR,
         f"Share that {WV} needs more than the Transformer.", {"untestable": ""}),
    ], untestable=untestable)  # fmt: skip


def share_above(rows: Frame, base: Frame, value: str) -> Estimate:
    """Return the share by which a column is above that of `base`, paired by seed."""
    found = paired(rows, base, value, ratio=True)
    return replace(found.plus(-1), count=0 if found.low == found.high else found.count)


def percent(found: Estimate) -> str:
    """Return a share as text."""
    if not found.finite:
        return "diverged"
    return f"{found.mean:+.1%}" + (f" ± {found.half:.1%}" if math.isfinite(found.half) else "")


def build(options: Mapping[str, Any], shape: Shape, vocabulary: int, context: int) -> Any:
    """Return the configuration of an ICLM, or without a "variant" of a GPT-2 with rotary positions."""
    from regard.models import HybridConfig, ICLMConfig

    layers, width, heads = shape
    common = {"vocab_size": vocabulary, "max_position_embeddings": context, "initializer_range": initial_range(width),
              "num_hidden_layers": layers, "hidden_size": width, "num_attention_heads": heads,
              **options}  # fmt: skip
    return ICLMConfig(**common) if "variant" in options else HybridConfig(norm="layer", **common)


def entry(kind: str, shape: Shape, vocabulary: int, context: int) -> Any:
    """Return the configuration of a model; None where it cannot be brought to the size of its rival."""
    from regard.models.base.catalogue import match_parameters

    made, rival = (build(KINDS[name].options, shape, vocabulary, context) for name in (kind, KINDS[kind].rival))
    if not KINDS[kind].matched:
        return made
    try:
        return match_parameters(made, rival).config
    except ArgumentError:  # larger than its rival even without feed-forward layers
        return None


def paper_sizes() -> dict[str, dict[str, int | None]]:
    """Return the parameters at the paper's sizes with GPT-2's vocabulary: shape to model to their number, None where a
    full model cannot be brought to the Transformer's."""
    from regard.models.base.catalogue import count_parameters

    found: dict[str, dict[str, int | None]] = {}
    for shape in PAPER_SHAPES:
        made = {kind: entry(kind, shape, GPT2_VOCABULARY, 1024) for kind in MAIN}
        counts = {kind: None if config is None else count_parameters(config) for kind, config in made.items()}
        found["x".join(map(str, shape))] = counts
    return found


def count_text(count: int | None, base: int) -> str:
    """Return a number of parameters and its difference to the Transformer's as text."""
    if count is None:
        return "cannot"
    return f"{count / 1e6:.2f}M" + ("" if count == base else f" ({count / base - 1:+.2%})")
