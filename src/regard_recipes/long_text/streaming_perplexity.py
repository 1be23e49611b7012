"""Measure which memory helps on which text: figures 2 and 3 and findings 1 to 3 of the fast-weight paper.

Fast-weight Product Key Memory paper, section 4.2. All models are trained on the same windows of short and long
documents, and then read held-out documents of both kinds segment by segment. The paper carries the fast memory on
through everything and starts all else anew at every segment. Here the models are also read by rules that favour
nobody: the memory new at every document, and the recurrent states of all models carried through a document as well.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from regard.inspect.gates import BINS

from ..fwpkm.memory_layouts import FULL, LACT, RESTRICTED, Row
from ..lib.claims import Claim, paired
from ..lib.display import MISSING, Show, dots, first, heat, lines, median, only, panels, pivot, spread
from ..lib.language_training import Budget, Corpus, run_rows, train_language_model
from ..lib.recipe import Cell, Frame, Results, recipe, select
from .layout_recipe import PAPER, PAPER_SIZE, QUICK, LayoutConfig, LayoutRecipe, named, rows_of_model
from .streaming import Carry, streamed

if TYPE_CHECKING:
    from torch import Tensor

TEXTS = ("short", "long")
ENOUGH_STEPS = 1000  # fewer train no model far enough for finding 1
RULES: dict[str, tuple[Carry, str]] = {
    "new": (Carry("segment", "segment"), "all new at every segment"),
    "frozen": (Carry("segment", "segment"), "memory never written"),
    "document": (Carry("document", "segment"), "memory through a document"),
    "paper": (Carry("stream", "segment"), "memory through everything (the paper)"),
    "carried": (Carry("document", "document"), "all states through a document"),
}
"""How a text is read. Pairs of attention are new at every segment by every rule."""
RULE_NAMES = {name: meaning for name, (_, meaning) in RULES.items()}


@dataclass(frozen=True, kw_only=True)
class StreamingPerplexityConfig(LayoutConfig):
    """Train the fast-weight paper's layouts with each of its memories, and read short and long documents in order."""

    width: int = 96
    heads: int = 4
    batch: int = 4
    steps: int = 130
    learning_rate: float = 6e-3
    short: Path | None = None
    """UTF-8 text of short documents with empty lines between them. None: docstrings of the standard library."""
    long: Path | None = None  # A folder of long UTF-8 files. None: modules of the standard library.
    tokenizer: str = "byte"  # char, byte, bpe or gpt2.
    documents: int = 8  # Held-out documents of each kind that are read.
    segments: int = 12  # Segments of each.


@recipe("streaming-perplexity")
class StreamingPerplexity(LayoutRecipe):
    """Perplexity on short and long documents read in order, with fast and slow memories in the FwPKM layouts."""

    Config = StreamingPerplexityConfig
    limits: ClassVar = {"documents": (1, math.inf), "segments": (1, math.inf)}
    sizes: ClassVar = {
        "quick": {**QUICK, "memories": ("none", "PKM", "FwPKM"), "context": 64, "chunk": 16, "steps": 12,
                  "learning_rate": 1e-2, "documents": 2, "segments": 4},
        "paper": {**PAPER_SIZE, "tokenizer": "bpe", "documents": 128, "segments": 16},
    }  # fmt: skip

    def budget(self) -> Budget:
        return Budget.of(self.config, measured=max(2, 4 * self.config.context))

    def prepare(self) -> Mapping[str, Any]:
        from .document_text import read_documents

        own = self.config
        length = own.context * own.segments + 1
        text = read_documents(own.short, own.long, own.tokenizer, length=length, count=own.documents, call=self.call())
        self.corpus, self.vocabulary = Corpus(text.train_tokens, text.held_out_tokens), len(text.tokenizer)
        self.texts = text.kinds
        return {"text": text.described}

    def measure(self, cell: Cell, seed: int) -> Iterator[dict[str, Any]]:
        row = Row(cell["layout"], cell["memory"])
        read = partial(read_all, row=row, texts=self.texts, segment=self.config.context)
        config = self.model(row, self.vocabulary)
        return run_rows(train_language_model(config, self.corpus, self.budget(), seed, name=row.name, measure=read))

    def claims(self, results: Results) -> list[Claim]:
        seen = Seen(results)
        few = f"{self.config.steps} steps train no model far enough" if self.config.steps < ENOUGH_STEPS else ""
        unit = "paired by seed" if self.config.seeds > 1 else "one training of each, the interval is over documents"
        made: list[Claim] = []
        for claim in (*memory_claims(seen), *self.attention_claims(seen), *self.writing_claims(seen)):
            known = {name: found for name, found in claim.estimates.items() if found is not None}
            note = claim.note or f"Nats per token; {unit}."
            claim = replace(claim, estimates=known, note=note)
            if claim.where == "finding 1" and few:
                claim = replace(claim, untestable=few, note=f"{note} Measured: {claim.measured(8)}.")
            made += [claim] if known else []
        return made

    def attention_claims(self, seen: Seen) -> list[Claim]:
        """Return the claims about FwPKM beside full attention."""
        layouts = self.config.layouts
        full = [layout for layout in FULL if layout in layouts]
        windows = [(layout, base) for layout, base in RESTRICTED.items() if layout in layouts]
        base = seen.gain("GDN")
        missing = "" if base is None or base.high < 0 else f"no gain beside GDN to compare ({base.text(3, True)})"
        rows = {layout: seen.gate(Row(layout, "FwPKM")) for layout in layouts}
        gates = ", ".join(f"{layout} {own['mean'].mean():.2f}" for layout, own in rows.items() if len(own))
        shown = f"Mean gate on long documents: {gates}."
        above = {layout: seen.gain(layout) for pair in windows for layout in pair}
        gains = "; ".join(f"{layout} {gain.text(3, True)}" for layout, gain in above.items() if gain)
        return [
            Claim(PAPER, "finding 2", "FwPKM gains less beside full attention",
                  {layout: seen.less_gain(layout, "GDN") for layout in full if base and seen.gain(layout)}, "above",
                  untestable=missing, note="Gain on long documents less that beside GDN, nats per token."),
            Claim(PAPER, "finding 2", "Its gates close beside full attention",
                  {f"{layout} less GDN": seen.gate_gap(layout, "GDN") for layout in full}, "below", note=shown),
            Claim(PAPER, "finding 3", "Windows in training open the gates",
                  {f"{one} less {other}": seen.gate_gap(one, other) for one, other in windows}, "above",
                  note=f"{shown} FwPKM above none: {gains}."),
        ]  # fmt: skip

    def writing_claims(self, seen: Seen) -> Iterator[Claim]:
        """Yield the claims that a memory that is written predicts better than one that is not."""
        layouts = self.config.layouts
        groups = {"beside GDN": [each for each in layouts if each.startswith("GDN")],
                  "beside attention alone": [each for each in layouts if not each.startswith("GDN")]}  # fmt: skip
        note = "Nats per token on long documents, the same model with writing less without."
        for memory, (where, names) in product(("FwPKM", "PKM+FwPKM", "FwMLP"), groups.items()):
            rows = {name: Row(name, memory) for name in names}
            gaps = {name: seen.gap("long", row, row, "paper", "frozen") for name, row in rows.items()}
            yield Claim(PAPER, "check", f"Writing lowers the loss: {memory} {where}", gaps, "below", note=note)

    def tables(self, results: Results) -> dict[str, Any]:
        import pandas as pd

        seen, models = Seen(results), ["layout", "memory"]
        values: dict[str, Show] = {"learned": only(first("parameters", "{:,.0f}"), kind="run")}
        for (name, rule), text in product({"paper": paper_rule, "fair": fair_rule}.items(), TEXTS):
            values[f"{text}, {name}"] = of_model(partial(seen.perplexity, text, rule))
            values[f"above none, {text}, {name}"] = of_model(partial(seen.above_none, text, rule))
        values["CPU, a step"] = only(median("step_cpu_seconds", "{:.0f} ms", 1e3), kind="run")
        over = "seeds" if self.config.seeds > 1 else "documents, of one training each"
        made = {"Perplexity": pivot(results.select(kind=["run", "document"]), models, values, note=(
            f"Perplexity per token; above none: nats per token, ± half the 95 % interval over {over}. paper: the fast "
            "memory is carried through all documents, all else is new at every segment. fair: memory and recurrent "
            "states are carried through a document and no further; attention sees its segment."))}  # fmt: skip
        losses = seen.documents.groupby([*models, "seed", "text", "rule"], sort=False)["loss"].mean().reset_index()
        read = losses["text"] + ", " + losses["rule"]
        losses = losses.assign(read=pd.Categorical(read, [f"{text}, {rule}" for text, rule in product(TEXTS, RULES)]))
        made["Nats per token by what is carried"] = pivot(
            losses, models, {"nats": spread("loss")}, "read",
            note="; ".join(f"{name}: {meaning}" for name, meaning in RULE_NAMES.items()) + ".")  # fmt: skip
        made["Fast weights compared on long documents"] = pivot(
            select(seen.documents, memory=["FwPKM", "PKM+FwPKM", "FwMLP"]), models,
            {"written less never written": of_model(lambda row: seen.text("long", row, row, "paper", "frozen")),
             "less FwMLP": of_model(lambda row: seen.text("long", row, Row(row.layout, "FwMLP"), "paper", "paper")),
             "less LaCT": of_model(lambda row: seen.text("long", row, Row(LACT), "carried", "carried"))},
            note="Nats per token. LaCT is compared with all states carried through a document.")  # fmt: skip
        gates = results.select(kind="gate")
        if len(gates):
            made["Gates and slots"] = pivot(gates, [*models, "text", "hook"], {
                "mean gate": spread("mean", 2),
                "below 0.2": share_of(slice(0, 2)), "above 0.8": share_of(slice(-2, None)),
                "slots read": first("coverage", "{:.1f}%", 100),
                "reads of shared slots": first("collisions", "{:.1f}%", 100),
                "KL to uniform, nats": first("kl_uniform", "{:.2f}"),
            }, note="By the paper's protocol. Slots: over all that one stream reads, of the first seed.")  # fmt: skip
        return made

    def figures(self, results: Results) -> dict[str, bytes]:
        seen, per = Seen(results), ["model", "seed", "rule", "text"]
        means = named(seen.documents).groupby(per, sort=False)["loss"].mean().reset_index().dropna()
        means = means.assign(rule=means["rule"].map(RULE_NAMES))
        made = {text: dots(select(means, text=text), "loss", "model", "rule", x_label="nats per token",
                           title=f"{text} documents") for text in TEXTS}  # fmt: skip
        along = results.select(kind="segment", text="long")
        fair = [rule == fair_rule(Row(*row)) for rule, *row in zip(along["rule"], along["layout"], along["memory"],
                                                                    strict=True)]  # fmt: skip
        made["segments"] = lines(panels(along[fair], "{layout}"), "segment", {"loss": "nats per token, fair"}, "memory",
                                 x_label="segment of a long document")  # fmt: skip
        gates = results.select(kind="gate")
        if len(gates):
            gates = named(gates).explode("counts").astype({"counts": float})
            counts = gates.groupby(level=0)["counts"]
            gates = gates.assign(bin=(counts.cumcount() + 0.5) / BINS, share=gates["counts"] / counts.transform("sum"),
                                 gate=gates["model"] + ", " + gates["hook"])  # fmt: skip
            made["gates"] = heat(panels(gates, "{text}"), "gate", "bin", "share", lambda share: f"{100 * share:.0f}",
                                 label="share of the gates in percent, by value")  # fmt: skip
        return made


def read_all(model: Any, row: Row, texts: Mapping[str, Tensor], segment: int) -> dict[str, Any]:
    """Return rows: the loss of each document and of each segment by every rule, and the gates."""
    rows: list[dict[str, Any]] = []
    for text, documents in texts.items():
        for rule in reading_rules(row):
            read = streamed(model, list(documents), segment, RULES[rule][0], rows=max(1, len(documents) // 2),
                            frozen=rule == "frozen", statistics=rule == "paper")  # fmt: skip
            common = {"text": text, "rule": rule}
            rows += [{"kind": "document", **common, "document": place, "loss": nats / count}
                     for place, (nats, count) in enumerate(zip(read.nats, read.tokens, strict=True))]  # fmt: skip
            rows += [{"kind": "segment", **common, "segment": place + 1, "loss": loss}
                     for place, loss in enumerate(read.by_segment)]  # fmt: skip
            slots = [*read.slots.values(), *({} for _ in read.gates)]
            rows += [{"kind": "gate", "text": text, "hook": hook.removesuffix(".hook_gate"), "mean": read.means[hook],
                      "counts": list(counts), **slots[place]}
                     for place, (hook, counts) in enumerate(read.gates.items())]  # fmt: skip
    return {"rows": rows}


def reading_rules(row: Row) -> list[str]:
    """Return the rules that differ for a model: without a memory, or without a recurrent state, some are the same."""
    remembers = ["frozen", "document", "paper"] if row.remembers else []
    return ["new", *remembers, *(["carried"] if row.recurrent else [])]


def paper_rule(row: Row) -> str:
    """Return how the paper reads a model."""
    return "paper" if row.remembers else "new"


def fair_rule(row: Row) -> str:
    """Return the rule that carries every state of fixed size through a document, and none further."""
    return "carried" if row.recurrent else "document" if row.remembers else "new"


def memory_claims(seen: Seen) -> Iterator[Claim]:
    """Yield the claims about fast and slow memories and both together."""
    claims = {
        "Fast memories gain on long documents, slow ones on short ones": [("long", "FwPKM", "PKM"),
                                                                          ("short", "PKM", "FwPKM")],
        "Both together are best": list(product(TEXTS, ["PKM+FwPKM"], ["PKM", "FwPKM"])),
    }  # fmt: skip
    for wording, cases in claims.items():
        gaps = {f"{layout}: {one} less {other} on {text}": seen.gap(text, Row(layout, one), Row(layout, other))
                for layout, (text, one, other) in product(("GDN", "GDN+SWA"), cases)}  # fmt: skip
        yield Claim(PAPER, "finding 1", wording, gaps, "below")


def of_model(text: Callable[[Row], str]) -> Show:
    """Return a function that shows `text` of the model of the rows."""
    return lambda rows: text(Row(*rows[["layout", "memory"]].iloc[0]))


def share_of(bins: slice) -> Show:
    """Return a function that shows the share of gates in some of the bins, over seeds."""

    def show(rows: Frame) -> str:
        counts = [sum(column) for column in zip(*rows["counts"], strict=True)]
        return f"{sum(counts[bins]) / max(1, sum(counts)):.0%}"

    return show


class Seen:
    """The rows of a run, and differences between models."""

    def __init__(self, results: Results) -> None:
        self.documents = results.select(kind="document")
        self.gates = results.select(kind="gate")

    def losses(self, text: str, row: Row, rule: str) -> Frame:
        """Return a row for each seed, or for each document where there is one seed, in a column "seed" either way."""
        found = select(rows_of_model(self.documents, row), text=text, rule=rule)
        unit = "seed" if found["seed"].nunique() > 1 else "document"
        return found.groupby(unit)["loss"].mean().rename_axis("seed").reset_index()

    def gap(self, text: str, one: Row, other: Row, rule: str = "", other_rule: str = "") -> Any:
        """Return the nats per token of one model less another; None where one was not read. The rules are the paper's
        if none are given."""
        parts = [self.losses(text, row, which or paper_rule(row)) for row, which in ((one, rule), (other, other_rule))]
        return paired(parts[0], parts[1], "loss") if all(map(len, parts)) else None

    def gain(self, layout: str) -> Any:
        """Return the nats per token of FwPKM in a layout less those without a memory, on long documents."""
        return self.gap("long", Row(layout, "FwPKM"), Row(layout))

    def less_gain(self, layout: str, base: str) -> Any:
        """Return the gain of FwPKM in one layout less that in another."""
        own, other = ([self.losses("long", row, paper_rule(row)).set_index("seed")["loss"]
                       for row in (Row(each, "FwPKM"), Row(each))] for each in (layout, base))  # fmt: skip
        gains = [(fast - none).reset_index() for fast, none in (own, other)]
        return paired(gains[0], gains[1], "loss")

    def gate(self, row: Row) -> Frame:
        """Return the gates of a model on long documents."""
        return select(rows_of_model(self.gates, row), text="long")

    def gate_gap(self, one: str, other: str) -> Any:
        """Return the mean gate of FwPKM in one layout less another, paired by seed; None where either has none."""
        parts = [self.gate(Row(layout, "FwPKM")) for layout in (one, other)]
        return paired(parts[0], parts[1], "mean") if all(map(len, parts)) else None

    def perplexity(self, text: str, rule: Callable[[Row], str], row: Row) -> str:
        """Return the perplexity of a model as text."""
        found = select(rows_of_model(self.documents, row), text=text, rule=rule(row))
        losses = found.groupby("seed")["loss"].mean()
        return spread("loss")(losses.map(lambda loss: math.exp(min(loss, 700))).reset_index())

    def above_none(self, text: str, rule: Callable[[Row], str], row: Row) -> str:
        """Return the gap of a model to its layout without a memory as text."""
        base = Row(row.layout)
        return "" if row == base else self.text(text, row, base, rule(row), rule(base)).replace(MISSING, "")

    def text(self, text: str, one: Row, other: Row, rule: str, other_rule: str) -> str:
        """Return `gap` as text; nothing for a model beside itself."""
        same = one == other and rule == other_rule
        found = None if same else self.gap(text, one, other, rule, other_rule)
        return MISSING if found is None else found.text(3, True)
