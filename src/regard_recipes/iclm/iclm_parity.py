"""Compare ICLM with a Transformer of equal size: perplexity, time and memory, with and without feed-forward layers.

The ICLM paper (section 7, tables 1 and 2) reports perplexities close to those of a Transformer "with the same number of
parameters". The models of table 2 are equal (`wv`, a value head in place of W_v). Those of table 1 are not: without
W_v f attention alone has (2 + H) C^2 parameters to the Transformer's 4 C^2. So `full` is trained as it is, matched by
narrower feed-forward layers of f, and (at the paper's size) with two heads in f, which makes it equal.

All models see the same windows. The learning rate is chosen for each family, from one grid, on the start of the
held-out text; the results are measured on the rest.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any, ClassVar

from regard.checks import ArgumentError

from ..lib.claims import Claim, Estimate, exact, paired
from ..lib.display import Show, dots, first, lines, median, pivot, spread
from ..lib.language_training import Budget, Corpus, TextConfig, initial_range, run_rows, train_language_model
from ..lib.recipe import Cell, Frame, Recipe, Results, check_names, recipe, select
from ..lib.running import run_calls

if TYPE_CHECKING:
    from ..lib.language_text import LanguageText

PAPER = "ICLM"
TRANSFORMER, WV = "transformer", "iclm-wv"
EQUAL = 0.005  # share by which two numbers of parameters may differ and count as equal
CLOSE = 0.05  # share of perplexity that counts as close, and up to which a rise counts as slight
REPORTED = 0.059  # largest share by which the paper's ICLM is above its Transformer (tables 1 and 2: 1.0 % to 5.9 %)
SIMILAR = 0.25  # share within which times and memory count as very similar
PAPER_SHAPES = ("8x512x8", "12x512x8", "24x1024x16")  # layers, width and heads of the paper's models
GPT2_VOCABULARY = 50257
COSTS = {"processor time": "step_cpu_seconds", "memory": "training_bytes", "parameters": "parameters"}


@dataclass(frozen=True)
class Kind:
    """One of the models: the family whose learning rate it takes, fields of its configuration, the Transformer that it
    is compared to and whether it is brought to its size, and the same model with all feed-forward layers."""

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
class ParityConfig(TextConfig):
    """Train ICLM and Transformers of equal size on the same text, and compare them."""

    seeds: int = 3
    """Models of each kind; they differ in first weights and windows. Trials have a seed of their own, the next one."""
    shapes: tuple[str, ...] = ("4x128x4",)
    """Layers x width x heads, such as 4x128x4; the paper's are 8x512x8, 12x512x8 and 24x1024x16."""
    models: tuple[str, ...] = tuple(name for name in KINDS if name not in ("iclm-full-two-heads", "iclm-wv-no-phi-mlp"))
    """Which of transformer, iclm-wv, iclm-full-matched, iclm-full, iclm-full-two-heads, transformer-no-mlp,
    iclm-wv-no-f-mlp, iclm-wv-no-phi-mlp and iclm-wv-no-mlp; a model comes with the Transformer it is compared to."""
    rates: tuple[float, ...] = (1e-3, 2e-3, 4e-3, 8e-3)
    """Learning rates to choose from, the same for both families; a single one is taken without a trial."""
    trial_steps: int = 120  # Optimiser steps of a trial.
    measured: int = 8192
    """Held-out tokens that the results are measured on; half as many before them serve the choice."""


@recipe("iclm-parity")
class Parity(Recipe):
    """ICLM beside Transformers of equal size: perplexity, time and memory, with and without feed-forward layers."""

    Config = ParityConfig
    limits: ClassVar = {"trial_steps": (1, math.inf), "rates": (1e-12, 1e6)}
    choices: ClassVar = {"models": tuple(KINDS)}
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
        for name in (TRANSFORMER, *(KINDS[name].rival for name in own.models)):
            if name not in own.models:
                raise ArgumentError(f"{call}: --models lacks {name}, to which others are compared; add it.")
        TOKENIZERS.get(own.tokenizer)
        self.budget(own.rates[0]).check(call)
        check_names(call, "--shapes", own.shapes, own.shapes or PAPER_SHAPES)
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
        self.corpus, self.vocabulary = text.corpus, text.vocabulary
        trials = self.trials(text)
        losses: dict[tuple[str, str], dict[float, float]] = {}
        for each in trials:
            losses.setdefault((each["shape"], each["family"]), {})[each["rate"]] = each["held_out"]
        self.rates = {(shape, kind.family): best_rate(losses.get((shape, kind.family), {}), own.rates)
                      for shape in own.shapes for kind in KINDS.values()}  # fmt: skip
        return {"text": text.described, "trials": trials, "paper_sizes": paper_sizes()}

    def trials(self, text: LanguageText) -> list[dict[str, Any]]:
        """Return the loss of each family and learning rate on the start of the held-out text, measured with the first
        model of the family; nothing where there is one rate only."""
        own, found, calls = self.config, [], {}
        choosing = Corpus(text.train_tokens, text.choice_tokens)
        for shape in own.shapes if len(own.rates) > 1 else ():
            first = {KINDS[kind].family: kind for kind in reversed(self.kinds_of(shape))}
            for (family, kind), rate in product(sorted(first.items(), reverse=True), own.rates):
                found.append({"shape": shape, "family": family, "model": kind, "rate": rate})
                config, budget = entry(kind, shape, text.vocabulary, own.context), self.budget(rate, trial=True)
                name, seed = f"trial of {rate:g}, {shape} {kind}", own.seed + own.seeds
                calls[name] = partial(train_language_model, config, choosing, budget, seed, name=name)
        runs = dict(run_calls(calls, own.workers))
        return [{**each, "held_out": runs[name].held_out[-1]} for each, name in zip(found, calls, strict=True)]

    def cells(self) -> list[Cell]:
        return [{"shape": shape, "model": kind} for shape in self.config.shapes for kind in self.kinds_of(shape)]

    def measure(self, cell: Cell, seed: int) -> Iterator[dict[str, Any]]:
        shape, kind = cell["shape"], cell["model"]
        config, rate = entry(kind, shape, self.vocabulary, self.config.context), self.rates[shape, KINDS[kind].family]
        found = {"rate": rate, "inner": getattr(config, config.size_field)}
        budget, name = self.budget(rate), f"{shape} {kind}"
        run = train_language_model(config, self.corpus, budget, seed, name=name, measure=lambda model: found)
        return run_rows(run)

    def kinds_of(self, shape: str) -> list[str]:
        """Return the models that can be made; which ones does not depend on the vocabulary."""
        return [kind for kind in self.config.models if entry(kind, shape, 100, self.config.context) is not None]

    def budget(self, rate: float, trial: bool = False) -> Budget:
        """Return how a model is trained."""
        changes = {"steps": self.config.trial_steps, "looks": 1} if trial else {}
        return Budget.of(self.config, learning_rate=rate, **changes)

    def claims(self, results: Results) -> list[Claim]:
        runs, sizes = runs_of(results), results.facts["paper_sizes"]
        made = [claim for shape in self.config.shapes for claim in shape_claims(shape, select(runs, shape=shape))]
        counted = {shape: exact(own["iclm-full"] / own[TRANSFORMER] - 1) for shape, own in sizes.items()}
        note = "Share that the full model has more, counted at the paper's sizes."
        made.append(Claim(PAPER, "section 7, table 1", "Without W_v the number of parameters is the same", counted,
                          "within", EQUAL, note=note))  # fmt: skip
        return [claim for claim in made if claim.estimates]

    def tables(self, results: Results) -> dict[str, Any]:
        import pandas as pd

        runs, trials = runs_of(results), results.facts["trials"]

        def beside(which: str, value: str) -> Show:
            def show(rows: Frame) -> str:
                shape, kind = rows[["shape", "model"]].iloc[0]
                other = getattr(KINDS[kind], which)
                base = select(runs, shape=shape, model=other)
                if other == kind or not len(base):
                    return ""
                found = share_above(rows, base, value)
                return f"{found.mean:+.2%}" if value == "parameters" else percent(found)

            return show

        values: dict[str, Show] = {
            "parameters": first("parameters", "{:,.0f}"), "to rival": beside("rival", "parameters"),
            "rate": first("rate", "{:g}"), "perplexity": spread("perplexity"), "nats/token": spread("held_out"),
            "perplexity to rival": beside("rival", "perplexity"),
            "to the same with feed-forward layers": beside("whole", "perplexity"),
            "step": lambda rows: f"{1e3 * rows['step_seconds'].min():.0f} ms",
            "CPU, a step": median("step_cpu_seconds", "{:.0f} ms", 1e3),
            "training": median("training_bytes", "{:.0f} MiB", 2**-20),
        }  # fmt: skip
        made = {"ICLM and Transformer": pivot(runs, ["shape", "model"], values, note=(
            f"{self.config.seeds} seeds: mean ± standard deviation; shares are paired by seed, ± half the 95 % "
            f"interval. Rival: the Transformer; of models without any feed-forward layer, the one without. Rate: "
            f"{'chosen for each family' if trials else 'given, tuned for none'}. Training: peak memory less what was "
            f"held before the model was made."))}  # fmt: skip
        if trials:
            made["Learning rates tried"] = pivot(
                pd.DataFrame(trials), ["shape", "family", "model"], {"nats/token": spread("held_out")}, "rate",
                note="On the start of the held-out text, which the results leave out; the family takes the least.",
            )  # fmt: skip
        sizes = [{"size": shape, "model": kind, "count": count_text(count, own[TRANSFORMER])}
                 for shape, own in results.facts["paper_sizes"].items() for kind, count in own.items()]  # fmt: skip
        made["Parameters at the paper's sizes"] = pivot(
            pd.DataFrame(sizes), ["size"], {"": first("count")}, "model",
            note="Layers x width x heads, GPT-2's vocabulary, tied; in brackets the difference to the Transformer.",
        )  # fmt: skip
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


def runs_of(results: Results) -> Frame:
    """Return a row for each run, with "perplexity" and "training_bytes"."""
    runs = results.select(kind="run")
    held_out, peak, before = (runs[name].astype(float) for name in ("held_out", "peak_bytes", "before_bytes"))
    return runs.assign(perplexity=held_out.map(math.exp), training_bytes=peak - before)


def shape_claims(shape: str, runs: Frame) -> Iterator[Claim]:
    """Yield the claims about models of one shape."""
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
    base = "Share of perplexity above the Transformer's"
    cases: list[Any] = [
        (", tables 1 and 2", "Perplexity close to a Transformer's of equal size", equal, "at most", CLOSE, REPORTED,
         base),
        (", table 1", "Perplexity of the full model, of another size, close to a Transformer's", unlike, "at most",
         CLOSE, REPORTED, base),
        (", table 3", "Only a slight increase in perplexity without feed-forward layers", without, "at most", CLOSE,
         CLOSE, "Share of perplexity above the same model with all. The paper: +0.6 % for f's, +4.0 % for the "
         "Transformer's"),
        ("", "Size, memory and training time are very similar", cost, "within", SIMILAR, None,
         f"Share that {WV} needs more than the Transformer"),
    ]  # fmt: skip
    for where, wording, estimates, says, margin, effect, note in cases:
        note = f"{note}; {shape}."
        yield Claim(PAPER, f"section 7{where}", wording, estimates, says, margin, effect, note=note)


def share_above(rows: Frame, base: Frame, value: str) -> Estimate:
    """Return the share by which a column is above that of `base`, paired by seed."""
    found = paired(rows, base, value, ratio=True)
    return replace(found.plus(-1), count=0 if found.low == found.high else found.count)


def percent(found: Estimate) -> str:
    """Return a share as text."""
    if not found.finite:
        return "diverged"
    return f"{found.mean:+.1%}" + (f" ± {found.half:.1%}" if math.isfinite(found.half) else "")


def build(kind: str, shape: str, vocabulary: int, context: int) -> Any:
    """Return the configuration of a model of a shape such as "4x128x4", not yet matched."""
    from regard.models import HybridConfig, ICLMConfig

    numbers = shape.split("x")
    if len(numbers) != 3 or not all(number.isdecimal() for number in numbers):
        raise ArgumentError("expected layers x width x heads, such as 4x128x4.")
    layers, width, heads = map(int, numbers)
    common = {"vocab_size": vocabulary, "max_position_embeddings": context, "initializer_range": initial_range(width),
              "num_hidden_layers": layers, "hidden_size": width, "num_attention_heads": heads,
              **KINDS[kind].options}  # fmt: skip
    return HybridConfig(norm="layer", **common) if KINDS[kind].family == TRANSFORMER else ICLMConfig(**common)


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


def best_rate(losses: Mapping[float, float], rates: tuple[float, ...]) -> float:
    """Return the rate with the least loss; of equals the first, and never one that diverged."""
    return min((rate for rate in losses if math.isfinite(losses[rate])), key=losses.__getitem__, default=rates[0])


def paper_sizes() -> dict[str, dict[str, int | None]]:
    """Return the parameters at the paper's sizes with GPT-2's vocabulary: shape to model to their number, None where a
    full model cannot be brought to the Transformer's."""
    from regard.models.base.matching import count_parameters

    made = {shape: {kind: entry(kind, shape, GPT2_VOCABULARY, 1024) for kind in MAIN} for shape in PAPER_SHAPES}
    return {shape: {kind: None if config is None else count_parameters(config) for kind, config in own.items()}
            for shape, own in made.items()}  # fmt: skip


def count_text(count: int | None, base: int) -> str:
    """Return a number of parameters and its difference to the Transformer's as text."""
    if count is None:
        return "cannot"
    return f"{count / 1e6:.2f}M" + ("" if count == base else f" ({count / base - 1:+.2%})")
