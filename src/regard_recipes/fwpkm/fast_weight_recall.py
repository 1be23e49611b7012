"""How well a fast-weight memory recalls what it read once, and what it read before it was given other values.

The model is embedding, `nn.FastWeightProductKeyMemory`, output. It reads documents of random pairs of tokens
(`tasks.CrossDocumentRecall`), each several times, the whole document being one chunk. What it knows on the second
reading it wrote in one step, which "Fast-weight Product Key Memory" calls one-step rewriting (section 3.2). The paper's
equation 35 leaves most of the error where several slots are read; the released program multiplies the step by their
number, and the normalised rule divides by the sum of the squared weights, which makes one write exact.

Also measured: fewer slots than pairs need; one reading with smaller chunks, so that writes come before questions; who
wrote the slots that are read; and whether the entropy of section 3.3 spreads clustered queries over more slots.
"""

import math
from collections.abc import Iterator
from functools import partial
from typing import Any, ClassVar

import torch

from regard.tasks import CrossDocumentRecall

from ..lib.claims import Claim, Estimate, claims_of, mean_interval, ratio_interval
from ..lib.display import MISSING, Show, lines, pivot, stat
from ..lib.recipe import Cell, Frame, Recipe, Results, recipe, select

REFERENCE, PAPER, NORMALIZED, DETACHED = "reference", "paper", "normalized", "normalized, no meta-gradient"
RULES: dict[str, dict[str, Any]] = {
    **{rule: {"step_rule": rule} for rule in (REFERENCE, PAPER, NORMALIZED)},
    DETACHED: {"step_rule": "normalized", "meta_grad": False},
}
ROOM, SMALL, CLUSTERED = "room enough", "too few slots", "clustered queries"
EXACT = (NORMALIZED, REFERENCE)  # rules that should rewrite in one step
CHANCE = 0.03  # share of right values that counts as chance
ONCE, REMAPPED = 0.99, 0.95  # least share on the second reading of the first document, and of the second
HITS = (0.75, 0.95)  # least share of retrieved slots that hold the right value, by the last write and by the last four
WIDER = 2.0  # times the slots that queries must use with the entropy


def task_of(own: "FastWeightRecall", **changes: Any) -> CrossDocumentRecall:
    """Return the task of the measurement, or one with other documents and reads."""
    numbers: dict[str, Any] = {"documents": own.documents, "reads": own.reads, **changes}
    return CrossDocumentRecall(own.keys, own.keys, own.pairs, **numbers)


@recipe("fast-weight-recall")
class FastWeightRecall(Recipe):
    """Recall after one reading, after remapping and beyond capacity, under each rule of writing fast weights."""

    seeds: int = 3
    """Models of each kind."""
    rules: tuple[str, ...] = tuple(RULES)  # Rules of writing to train with.
    sub_keys: int = 32  # Sub-keys of a half; the memory has as many slots as its square.
    stress_sub_keys: int = 12  # The same of the memory that is too small.
    key_dim: int = 64  # Channels of a query, and of a value.
    top_k: int = 4  # Slots that a token reads.
    width: int = 64  # Width of the model.
    keys: int = 128  # Tokens that may be keys; as many may be values.
    pairs: int = 64  # Pairs of a document; a chunk is twice as many tokens.
    documents: int = 3  # Documents, one after the other, of the same keys.
    reads: int = 4  # Readings of each that are measured; in training there are two.
    steps: int = 300  # Optimiser steps.
    stress_steps: int = 300  # The same of the memory that is too small.
    batch: int = 8  # Examples of a step.
    learning_rate: float = 3e-3  # Of AdamW at the start; from there it falls evenly to 0.
    examples: int = 64  # Examples that are measured.
    address_weight: float = 1.0  # Weight of the entropy that moves the keys. The paper's 10 suits its 512 sub-keys.
    choices: ClassVar = {"rules": tuple(RULES)}
    limits: ClassVar = {
        **dict.fromkeys(("steps", "stress_steps", "batch", "examples", "width", "top_k"), (1, math.inf)),
        "reads": (2, math.inf), "learning_rate": (1e-9, 1e3),
    }  # fmt: skip
    by_size: ClassVar = {
        "quick": {"steps": 150, "stress_steps": 120, "examples": 16, "seeds": 1},
        "paper": {
            "sub_keys": 512, "stress_sub_keys": 64, "key_dim": 512, "top_k": 8, "width": 256, "keys": 2048,
            "pairs": 256, "batch": 16, "learning_rate": 1e-3, "address_weight": 10.0, "device": "auto", "steps": 1000,
            "stress_steps": 600,
        },
    }  # fmt: skip

    def check(self) -> None:
        from ._fast_weight_recall_model import make_model

        with torch.device("meta"):
            for stress in (False, True):
                make_model(self, self.rules[0], stress=stress)

    def cells(self) -> list[Cell]:
        rules = self.rules
        small = [rule for rule in rules if rule != DETACHED]
        return [
            *({"memory": ROOM, "rule": rule} for rule in rules),
            *({"memory": SMALL, "rule": rule} for rule in small),
            {"memory": CLUSTERED, "rule": NORMALIZED},
        ]

    def measure(self, cell: Cell, seed: int) -> Iterator[dict[str, Any]]:
        from ._fast_weight_recall_model import measure_collapse, train_and_measure

        if cell["memory"] == CLUSTERED:
            return measure_collapse(seed)
        return train_and_measure(self, cell["rule"], seed, stress=cell["memory"] == SMALL)

    def claims(self, results: Results) -> list[Claim]:
        recall = results.select(kind="recall", memory=ROOM)
        once, runs = once_of(results), results.select(kind="run", memory=ROOM).dropna(subset=["hit_last"])
        rules, whole = self.rules, 4 * self.pairs
        exact = [rule for rule in EXACT if rule in rules]

        def means(rows: Frame, by: list[str], value: str = "accuracy") -> dict[str, Estimate]:
            return {", ".join(map(str, key)): mean_interval(own[value]) for key, own in rows.groupby(by, sort=False)}

        def second(named: list[str], document: int) -> dict[str, Estimate]:
            return means(select(recall, rule=named, document=document, reading=2), ["rule"])

        rewriting, second_reading = "One-step rewriting", "Share of right values on the second reading of document"
        single = "Share of right answers about a document that is read once"
        stored = "Share of the slots that keys retrieve on the second reading: the right value was written"
        return claims_of("FwPKM", [
            ("protocol", "Nothing is known on a first reading", means(select(recall, reading=1), ["rule", "document"]),
             "below", CHANCE, "Share of right values."),
            ("section 3.2", rewriting, second(exact, 1), "at least", ONCE, f"{second_reading} 1."),
            ("section 3.2", f"{rewriting} of other values", second(exact, 2), "at least", REMAPPED,
             f"{second_reading} 2, whose keys had other values before."),
            ("section 3.2", f"{rewriting} with equation 35", second([PAPER], 2), "at least", REMAPPED,
             f"{second_reading} 2; equation 35 moves a slot by its weight alone."),
            ("protocol", "One reading is enough where writes come before questions",
             means(once[once["chunk"] < whole], ["rule", "chunk"]), "at least", REMAPPED,
             f"{single}, by tokens of a chunk."),
            ("protocol", "One reading is not enough where the whole text is one chunk",
             means(select(once, chunk=whole), ["rule"]), "below", CHANCE, f"{single}."),
            ("section 5.1", "Retrieved slots hold what was asked for", means(runs, ["rule"], "hit_last"), "at least",
             HITS[0], f"{stored} last."),
            ("section 5.1", "One of the last four writes is what was asked for", means(runs, ["rule"], "hit_four"),
             "at least", HITS[1], f"{stored} by one of the last four writes."),
            ("section 3.3", "The entropy of the addresses keeps clustered queries from few slots",
             widest(results.select(kind="clustered")), "at least", WIDER,
             "Slots in use, in units of those without the entropy; the largest of all spreads and weights."),
        ])  # fmt: skip

    def tables(self, results: Results) -> dict[str, Any]:
        task = task_of(self)
        recall, runs, clustered = (results.select(kind=kind) for kind in ("recall", "run", "clustered"))
        named = recall.assign(document="document " + recall["document"].astype(int).astype(str))
        once = once_of(results)
        worst = partial(stat, how="min", form="{:.3f}")
        written: dict[str, Show] = {
            "last writer": "{hit_last:.3f}", "worst seed": worst("hit_last"),
            "one of the last 4": "{hit_four:.3f}", "its worst seed": worst("hit_four"),
        }  # fmt: skip
        models: dict[str, Show] = {
            "slots": "{slots:.0f}", "learned": "{parameters:,.0f}", "written": "{fast_weights:,.0f}",
            "training": "{seconds:.0f} s",
        }  # fmt: skip
        without = select(clustered, weight=0.0).groupby("spread")["coverage"].mean()

        def times(rows: Frame) -> str:
            mean, base = rows["coverage"].mean(), without[rows["spread"].iloc[0]]
            return f"{mean:.3f} ({mean / base:.1f} times)" if rows["weight"].iloc[0] else f"{mean:.3f}"

        note = f"Share of right values by reading; chance is {task.chance:.3f}. Means; seeds: {self.seeds}."
        shares: Show = lambda rows: " / ".join(  # noqa: E731
            f"{mean:.3f}" for mean in rows.groupby("reading")["accuracy"].mean()) or MISSING  # fmt: skip
        by_document = lambda kind: pivot(select(named, memory=kind), ["rule"], {"": shares}, "document", note=note)  # noqa: E731
        asked = "A document followed by the same document as questions, read once: share of right answers."
        held = "Share of retrieved slots that hold the right value on the second reading of document 1."
        moved = "All queries are one point, moved by noise of the spread. Times: of those without entropy."
        return {
            "Recall by document and reading": by_document(ROOM),
            "Recall with too few slots": by_document(SMALL),
            "One reading, by tokens of a chunk": pivot(once, ["rule"], {"": "{accuracy:.3f}"}, "chunk", note=asked),
            "Slots that hold the answer": pivot(runs.dropna(subset=["hit_last"]), ["rule"], written, note=held),
            "Models": pivot(runs, ["memory", "rule"], models),
            "Clustered queries: share of the slots in use": pivot(
                clustered.assign(entropy=clustered["weight"].map("entropy weight {:g}".format)), ["spread"],
                {"": times}, "entropy", note=moved),
        }  # fmt: skip

    def figures(self, results: Results) -> dict[str, bytes]:
        recall, clustered = results.select(kind="recall"), results.select(kind="clustered")
        panels = {
            f"{kind}, document {document}": select(recall, memory=kind, document=document)
            for document in range(1, self.documents + 1) for kind in (ROOM, SMALL)
        }  # fmt: skip
        clustered = clustered.assign(entropy=clustered["weight"].map("weight {:g}".format))
        return {
            "recall": lines(panels, "reading", {"accuracy": "share of right values"}, "rule", wrap=2),
            "clustered": lines({"slots that clustered queries use": clustered}, "spread",
                               {"coverage": "share of the slots"}, "entropy"),
        }  # fmt: skip


def once_of(results: Results) -> Frame:
    """Return the rows of a single reading, with tokens of a chunk; none if no rule of `EXACT` was trained."""
    rows = results.select(kind="once")
    return rows.astype({"chunk": int}) if len(rows) else rows.assign(chunk=0)


def widest(rows: Frame) -> dict[str, Estimate]:
    """Return the largest ratio of slots in use with the entropy to those without it."""
    found = {
        f"spread {spread:g}, weight {weight:g}": ratio_interval(own["coverage"], select(each, weight=0.0)["coverage"])
        for spread, each in rows.groupby("spread") for weight, own in each.groupby("weight") if weight
    }  # fmt: skip
    return dict(sorted(found.items(), key=lambda item: -item[1].mean)[:1])
