"""ICLM beside a Transformer of equal size: perplexity, time and memory, with and without feed-forward layers.

The ICLM paper (section 7, tables 1 and 2) reports perplexities close to those of a Transformer "with the same number of
parameters". Counted, the models of table 2 are equal (`wv`, a value head in place of W_v); those of table 1, where
W_v is left out, are not: f attention alone has (2 + H) C^2 parameters to the Transformer's 4 C^2. Here `wv` is trained
beside `full` as it is, `full` brought to the Transformer's number by narrower feed-forward layers of f, and (at the
paper's size) `full` with two heads in f, which is equal by itself.

All models see the same windows for equally many steps. The learning rate is chosen for each family, from one grid, on
the start of the held-out text; the results are measured on the rest of it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from regard.checks import ArgumentError, suggestion

from ..lib.claims import Claim
from ..lib.intervals import Estimate, exact, paired
from ..lib.language_runs import initial_range
from ..lib.language_training import Budget, Corpus, run_rows, train_language_model
from ..lib.pivots import Show, first, median, pivot, spread
from ..lib.plots import dots, lines
from ..lib.processes import run_each
from ..lib.recipe import Cell, Recipe, RecipeConfig, recipe
from ..lib.results import Results, select

if TYPE_CHECKING:
    import pandas as pd

    from ..lib.language_text import LanguageText

PAPER = "ICLM"
TRANSFORMER = "transformer"
EQUAL = 0.005  # share by which two numbers of parameters may differ and count as equal
CLOSE = 0.05  # share of perplexity that counts as close, and up to which a rise counts as slight
REPORTED = 0.059  # largest share by which the paper's ICLM is above its Transformer (tables 1 and 2: 1.0 % to 5.9 %)
SIMILAR = 0.25  # share within which times and memory count as very similar
PAPER_SHAPES = ("8x512x8", "12x512x8", "24x1024x16")  # layers, width and heads of the paper's models
GPT2_VOCABULARY = 50257


@dataclass(frozen=True)
class Kind:
    """One of the models.

    Attributes:
        family: whose learning rate it takes: "transformer" or "iclm".
        options: fields of its configuration.
        rival: the Transformer that it is compared to.
        matched: brought to the rival's number of parameters.
        whole: the same model with all feed-forward layers.
    """

    family: str
    options: Mapping[str, Any] = field(default_factory=dict)
    rival: str = TRANSFORMER
    matched: bool = False
    whole: str = ""


KINDS: dict[str, Kind] = {
    TRANSFORMER: Kind("transformer", {"feed_forward": "gelu"}),
    "iclm-wv": Kind("iclm", {"variant": "wv"}),
    "iclm-full-matched": Kind("iclm", {"variant": "full"}, matched=True),
    "iclm-full": Kind("iclm", {"variant": "full"}),
    "iclm-full-two-heads": Kind("iclm", {"variant": "full", "f_attention_heads": 2}),
    "transformer-no-mlp": Kind("transformer", {"feed_forward": "none"}, "transformer-no-mlp", whole=TRANSFORMER),
    "iclm-wv-no-f-mlp": Kind("iclm", {"variant": "wv", "f_mlp": "none"}, whole="iclm-wv"),
    "iclm-wv-no-phi-mlp": Kind("iclm", {"variant": "wv", "phi_mlp": "none"}, whole="iclm-wv"),
    "iclm-wv-no-mlp": Kind(
        "iclm", {"variant": "wv", "phi_mlp": "none", "f_mlp": "none"}, "transformer-no-mlp", whole="iclm-wv"
    ),
}  # fmt: skip
MAIN = tuple(KINDS)[:5]  # with all feed-forward layers


@dataclass(frozen=True, kw_only=True)
class ParityConfig(RecipeConfig):
    """Train ICLM and Transformers of equal size on the same text, and compare them."""

    seeds: int = 3
    """Models of each kind; they differ in first weights and windows. Trials have a seed of their own, the next one."""
    shapes: tuple[str, ...] = ("4x128x4",)
    """Layers x width x heads, such as 4x128x4; the paper's are 8x512x8, 12x512x8 and 24x1024x16."""
    models: tuple[str, ...] = tuple(name for name in KINDS if name not in ("iclm-full-two-heads", "iclm-wv-no-phi-mlp"))
    """Which of transformer, iclm-wv, iclm-full-matched, iclm-full, iclm-full-two-heads, transformer-no-mlp,
    iclm-wv-no-f-mlp, iclm-wv-no-phi-mlp and iclm-wv-no-mlp; a model comes with the Transformer it is compared to."""
    tokenizer: str = "char"
    """char, byte or gpt2."""
    context: int = 64
    """Tokens that a model sees at once."""
    batch: int = 16
    """Windows of a step."""
    parts: int = 1
    """Passes in which a step is made, to save memory."""
    steps: int = 800
    """Optimiser steps of each model."""
    rates: tuple[float, ...] = (1e-3, 2e-3, 4e-3, 8e-3)
    """Learning rates to choose from, the same for both families; a single one is taken without a trial."""
    trial_steps: int = 120
    """Optimiser steps of a trial."""
    measured: int = 8192
    """Held-out tokens that the results are measured on; half as many before them serve the choice."""
    looks: int = 4
    """How often the losses are noted."""
    dtype: str = "float32"
    """float32, or bfloat16 by autocast."""
    compile: bool = False
    """Train through torch.compile."""
    data: Path | None = None
    """UTF-8 text to learn from, a file or a folder. None: the Python manual inside the interpreter."""


@recipe("iclm-parity")
class Parity(Recipe):
    """ICLM beside Transformers of equal size: perplexity, time and memory, with and without feed-forward layers."""

    Config = ParityConfig
    sizes: ClassVar = {
        "quick": {"shapes": ("2x32x4",), "context": 32, "batch": 8, "steps": 150, "rates": (3e-3,), "trial_steps": 20,
                  "measured": 2048, "looks": 3, "seeds": 2},
        "paper": {"shapes": PAPER_SHAPES, "models": MAIN, "tokenizer": "gpt2", "context": 512, "batch": 32,
                  "steps": 20_000, "rates": (1e-4, 3e-4, 1e-3), "trial_steps": 1000, "measured": 262_144, "looks": 10,
                  "dtype": "bfloat16", "compile": True, "device": "auto", "seeds": 1},
    }  # fmt: skip

    def check(self) -> None:
        from regard.training import TOKENIZERS

        own, call = self.config, self.call()
        for name in ("shapes", "models", "rates"):
            given = getattr(own, name)
            if not given:
                raise ArgumentError(f"{call}: --{name} names nothing; give at least one.")
            for each in given:
                if given.count(each) > 1:
                    raise ArgumentError(f"{call}: --{name} names {each} twice.")
        for kind in own.models:
            if kind not in KINDS:
                raise ArgumentError(f"{call}: --models names {kind!r}.{suggestion(kind, KINDS)}")
        lacking = sorted(({KINDS[kind].rival for kind in own.models} | {TRANSFORMER}) - set(own.models))
        if lacking:
            raise ArgumentError(f"{call}: --models lacks {lacking[0]}, to which others are compared; add it.")
        if own.trial_steps < 1:
            raise ArgumentError(f"{call}: --trial-steps is {own.trial_steps}, expected at least 1.")
        TOKENIZERS.get(own.tokenizer)
        for rate in own.rates:
            self.budget(rate).check(call)
        for shape in own.shapes:
            try:
                self.kinds_of(shape)
            except ArgumentError as error:
                raise ArgumentError(f"{call}: --shapes {shape}: {error}") from None

    def prepare(self) -> Mapping[str, Any]:
        from ..lib.language_text import read_text

        own = self.config
        text = read_text(own.data, own.tokenizer, context=own.context, measured=own.measured, choice=own.measured // 2,
                         call=self.call())  # fmt: skip
        self.corpus, self.vocabulary = Corpus(text.train_tokens, text.held_out_tokens), text.vocabulary
        trials = self.trials(text)
        self.rates = {(shape, family): best_rate(select_trials(trials, shape, family), own.rates)
                      for shape in own.shapes for family in ("transformer", "iclm")}  # fmt: skip
        return {"text": text.described, "trials": trials, "paper_sizes": paper_sizes()}

    def trials(self, text: LanguageText) -> list[dict[str, Any]]:
        """Return the loss of each family and learning rate on the start of the held-out text, measured with the first
        model of the family; nothing where there is one rate only."""
        own = self.config
        if len(own.rates) < 2:
            return []
        found, calls = [], []
        for shape in own.shapes:
            for family in dict.fromkeys(KINDS[kind].family for kind in own.models):
                kind = next(kind for kind in self.kinds_of(shape) if KINDS[kind].family == family)
                for rate in own.rates:
                    budget = self.budget(rate, own.trial_steps)
                    config = entry(kind, shape, text.vocabulary, own.context)
                    name = f"trial of {rate:g}, {shape} {kind}"
                    calls.append((name, partial(trial, config, text.choosing, budget, own.seed + own.seeds, name)))
                    found.append({"shape": shape, "family": family, "model": kind, "rate": rate})
        losses = run_each(self.call(), calls, max(1, own.workers), lambda _: None)
        return [{**each, "held_out": loss} for each, loss in zip(found, losses, strict=True)]

    def cells(self) -> list[Cell]:
        return [{"shape": shape, "model": kind} for shape in self.config.shapes for kind in self.kinds_of(shape)]

    def measure(self, cell: Cell, seed: int) -> Iterator[dict[str, Any]]:
        shape, kind = cell["shape"], KINDS[cell["model"]]
        config = entry(cell["model"], shape, self.vocabulary, self.config.context)
        rate = self.rates[shape, kind.family]
        run = train_language_model(config, self.corpus, self.budget(rate), seed, name=f"{shape} {cell['model']}")
        run.extra.update(rate=rate, inner=getattr(config, config.size_field))
        return run_rows(run)

    def kinds_of(self, shape: str) -> list[str]:
        """Return the models that can be made; which ones does not depend on the vocabulary."""
        return [kind for kind in self.config.models if entry(kind, shape, 100, self.config.context) is not None]

    def budget(self, rate: float, steps: int | None = None) -> Budget:
        """Return how a model is trained; with `steps`, a trial."""
        given = {f.name: getattr(self.config, f.name) for f in fields(Budget) if hasattr(self.config, f.name)}
        return Budget(**{**given, "learning_rate": rate, **({} if steps is None else {"steps": steps, "looks": 1})})

    def claims(self, results: Results) -> list[Claim]:
        runs = runs_of(results)
        made = []
        for shape in self.config.shapes:
            of = lambda kind: select(runs, shape=shape, model=kind)  # noqa: B023, E731
            more = lambda kind, other, value="perplexity": share_above(of(kind), of(other), value)  # noqa: B023, E731
            trained = [kind for kind in KINDS if len(of(kind))]
            size = {kind: size_above(of(kind), of(KINDS[kind].rival)) for kind in trained}
            iclms = [kind for kind in MAIN[1:] if kind in trained]
            equal = {kind: more(kind, KINDS[kind].rival) for kind in iclms if abs(size[kind]) <= EQUAL}
            unlike = {f"{kind} ({size[kind]:+.1%} parameters)": more(kind, KINDS[kind].rival)
                      for kind in iclms if kind not in equal}  # fmt: skip
            without = {kind: more(kind, KINDS[kind].whole) for kind in trained if KINDS[kind].whole in trained}
            cost = {}
            if "iclm-wv" in trained:
                named = {"processor time": "step_cpu_seconds", "memory": "training_bytes", "parameters": "parameters"}
                cost = {name: more("iclm-wv", TRANSFORMER, column) for name, column in named.items()
                        if runs[column].notna().all()}  # fmt: skip
            base = "Share of perplexity above the Transformer's"
            for where, wording, estimates, effect, note in (
                ("tables 1 and 2", "Perplexity close to a Transformer's of equal size", equal, REPORTED, base),
                ("table 1", "Perplexity of the full model, of another size, close to a Transformer's", unlike,
                 REPORTED, base),
                ("table 3", "Only a slight increase in perplexity without feed-forward layers", without, CLOSE,
                 "Share of perplexity above the same model with all. The paper: +0.6 % for f's, +4.0 % for the "
                 "Transformer's"),
            ):  # fmt: skip
                where = f"section 7, {where}"
                made.append(Claim(PAPER, where, wording, estimates, "at most", CLOSE, effect, note=f"{note}; {shape}."))
            note = f"Share that iclm-wv needs more than the Transformer; {shape}."
            made.append(Claim(PAPER, "section 7", "Size, memory and training time are very similar", cost, "within",
                              SIMILAR, note=note))  # fmt: skip
        sizes = results.facts["paper_sizes"]
        counted = {shape: exact(own["iclm-full"] / own[TRANSFORMER] - 1) for shape, own in sizes.items()}
        note = "Share that the full model has more, counted at the paper's sizes."
        made.append(Claim(PAPER, "section 7, table 1", "Without W_v the number of parameters is the same", counted,
                          "within", EQUAL, note=note))  # fmt: skip
        return [claim for claim in made if claim.estimates]

    def tables(self, results: Results) -> dict[str, Any]:
        runs = runs_of(results)

        def beside(whom: Callable[[str], str], value: str) -> Show:
            def show(rows: pd.DataFrame) -> str:
                shape, kind = rows[["shape", "model"]].iloc[0]
                base = select(runs, shape=shape, model=whom(kind))
                if whom(kind) == kind or not len(base):
                    return ""
                if value == "parameters":
                    return f"{size_above(rows, base):+.2%}"
                return percent(share_above(rows, base, value))

            return show

        rival = lambda kind: KINDS[kind].rival  # noqa: E731
        trials = results.facts["trials"]
        values: dict[str, Show] = {
            "parameters": first("parameters", "{:,.0f}"), "to rival": beside(rival, "parameters"),
            "rate": first("rate", "{:g}"), "perplexity": spread("perplexity"), "nats/token": spread("held_out"),
            "perplexity to rival": beside(rival, "perplexity"),
            "to the same with feed-forward layers": beside(lambda kind: KINDS[kind].whole, "perplexity"),
            "step": lambda rows: f"{1e3 * rows['step_seconds'].min():.0f} ms",
            "CPU, a step": median("step_cpu_seconds", "{:.0f} ms", 1e3),
            "training": median("training_bytes", "{:.0f} MiB", 2**-20),
        }  # fmt: skip
        made = {"ICLM and Transformer": pivot(
            runs, ["shape", "model"], values,
            note=f"{self.config.seeds} seeds: mean ± standard deviation; shares are paired by seed, ± half the 95 % "
                 f"interval. Rival: the Transformer; of models without any feed-forward layer, the one without. Rate: "
                 f"{'chosen for each family' if trials else 'given, tuned for none'}. Training: peak memory less what "
                 f"was held before the model was made.",
        )}  # fmt: skip
        if trials:
            import pandas as pd

            made["Learning rates tried"] = pivot(
                pd.DataFrame(trials), ["shape", "family", "model"], {"nats/token": spread("held_out")}, "rate",
                note="On the start of the held-out text, which the results leave out; the family takes the least.",
            )  # fmt: skip
        made["Parameters at the paper's sizes"] = sizes_table(results.facts["paper_sizes"])
        return made

    def figures(self, results: Results) -> dict[str, bytes]:
        looks, runs = results.select(kind="look"), runs_of(results)
        panels = {shape: select(looks, shape=shape) for shape in self.config.shapes}
        y = {"train": "training loss, nats/token", "held_out": "held-out loss, nats/token"}
        return {
            "perplexity": dots(runs, "perplexity", "model", "shape", x_label="held-out perplexity"),
            "curves": lines(panels, "step", y, "model", x_label="optimiser step"),
        }

    def notes(self, results: Results) -> list[str]:
        left_out = [
            f"{kind} is left out at {shape}: even without f's feed-forward layers it is larger."
            for shape in self.config.shapes for kind in self.config.models if kind not in self.kinds_of(shape)
        ]  # fmt: skip
        edge = select(runs_of(results), rate=[min(self.config.rates), max(self.config.rates)])
        if results.facts["trials"] and len(edge):
            named = ", ".join(dict.fromkeys(edge["shape"] + " " + edge["model"]))
            left_out.append(f"Learning rates at the edge of the grid, where one beyond may be better: {named}.")
        return left_out


def runs_of(results: Results) -> pd.DataFrame:
    """Return a row for each run, with "perplexity" and "training_bytes"."""
    runs = results.select(kind="run")
    held_out, peak, before = (runs[name].astype(float) for name in ("held_out", "peak_bytes", "before_bytes"))
    return runs.assign(perplexity=held_out.map(math.exp), training_bytes=peak - before)


def share_above(rows: pd.DataFrame, base: pd.DataFrame, value: str) -> Estimate:
    """Return the share by which a column is above that of `base`, paired by seed."""
    found = paired(rows, base, value, ratio=True)
    return Estimate(found.mean - 1, found.low - 1, found.high - 1, 0 if found.low == found.high else found.count)


def size_above(rows: pd.DataFrame, base: pd.DataFrame) -> float:
    """Return the share of parameters above those of `base`."""
    return float(rows["parameters"].iloc[0] / base["parameters"].iloc[0] - 1)


def percent(found: Estimate) -> str:
    """Return a share as text."""
    if not found.finite:
        return "diverged"
    return f"{found.mean:+.1%}" + (f" ± {found.half:.1%}" if math.isfinite(found.half) else "")


def build(kind: str, shape: str, vocabulary: int, context: int) -> Any:
    """Return the configuration of a model, not yet matched."""
    from regard.models import HybridConfig, ICLMConfig

    own = fields_of(shape)
    common = {"vocab_size": vocabulary, "max_position_embeddings": context,
              "initializer_range": initial_range(own["hidden_size"]), **own, **KINDS[kind].options}  # fmt: skip
    return HybridConfig(norm="layer", **common) if KINDS[kind].family == "transformer" else ICLMConfig(**common)


def fields_of(shape: str) -> dict[str, int]:
    """Return "4x128x4" as fields of a configuration."""
    found = re.fullmatch(r"(\d+)x(\d+)x(\d+)", shape)
    if found is None:
        raise ArgumentError("expected layers x width x heads, such as 4x128x4.")
    layers, width, heads = map(int, found.groups())
    return {"num_hidden_layers": layers, "hidden_size": width, "num_attention_heads": heads}


def entry(kind: str, shape: str, vocabulary: int, context: int) -> Any:
    """Return the configuration of a model; None where it cannot be brought to the size of its rival."""
    from regard.models.base.matching import count_parameters, match_parameters

    made = build(kind, shape, vocabulary, context)
    if not KINDS[kind].matched:
        return made
    rival = count_parameters(build(KINDS[kind].rival, shape, vocabulary, context))
    least = build(kind, shape, vocabulary, context)
    setattr(least, least.size_field, 1)
    least.normalise()
    return None if count_parameters(least) > rival else match_parameters(made, rival).config


def trial(config: Any, corpus: Corpus, budget: Budget, seed: int, name: str) -> float:
    """Return the held-out loss at the end."""
    return train_language_model(config, corpus, budget, seed, name=name).held_out[-1]


def select_trials(trials: list[dict[str, Any]], shape: str, family: str) -> dict[float, float]:
    """Return rate to loss."""
    return {t["rate"]: t["held_out"] for t in trials if (t["shape"], t["family"]) == (shape, family)}


def best_rate(losses: Mapping[float, float], rates: tuple[float, ...]) -> float:
    """Return the rate with the least loss; of equals the first, and never one that diverged."""
    finite = {rate: loss for rate, loss in losses.items() if math.isfinite(loss)}
    return min(finite, key=finite.__getitem__) if finite else rates[0]


def paper_sizes() -> dict[str, dict[str, int | None]]:
    """Return the parameters at the paper's sizes with GPT-2's vocabulary: shape to model to their number, None where a
    full model cannot be brought to the Transformer's."""
    from regard.models.base.matching import count_parameters

    made = {shape: {kind: entry(kind, shape, GPT2_VOCABULARY, 1024) for kind in MAIN} for shape in PAPER_SHAPES}
    return {shape: {kind: None if config is None else count_parameters(config) for kind, config in own.items()}
            for shape, own in made.items()}  # fmt: skip


def sizes_table(found: Mapping[str, Mapping[str, int | None]]) -> Any:
    """Return a table with a row for each of the paper's sizes."""
    from regard.inspect.tables import Table

    def text(number: int | None, base: int | None) -> str:
        if number is None or base is None:
            return "cannot"
        return f"{number / 1e6:.2f}M" + ("" if number == base else f" ({number / base - 1:+.2%})")

    rows = [(shape, *(text(own[kind], own[TRANSFORMER]) for kind in MAIN)) for shape, own in found.items()]
    note = "Layers x width x heads, GPT-2's vocabulary, tied, counted; in brackets the difference to the Transformer."
    return Table(("size", *MAIN), tuple(rows), note)
