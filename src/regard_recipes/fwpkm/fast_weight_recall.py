"""How well a fast-weight memory recalls what it read once, and what it read before it was given other values.

docs/memory-results.md describes the texts. What a model knows on the second reading it wrote in one step, which
"Fast-weight Product Key Memory" calls one-step rewriting (section 3.2).
"""

import math
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import product
from typing import Any, ClassVar

import torch

from regard.tasks import CrossDocumentRecall

from ..lib.claims import Claim, Estimate, claims_of, mean_intervals, ratio_interval
from ..lib.display import Show, lines, panels, pivot, stat
from ..lib.recipe import Cell, Frame, Recipe, Results, select

REFERENCE, PAPER, NORMALIZED, DETACHED = "reference", "paper", "normalized", "normalized, no meta-gradient"
RULES: dict[str, dict[str, Any]] = {
    **{rule: {"step_rule": rule} for rule in (REFERENCE, PAPER, NORMALIZED)},
    DETACHED: {"step_rule": "normalized", "meta_grad": False},
}
ROOM, SMALL, CLUSTERED = "room enough", "too few slots", "clustered queries"
EXACT = (NORMALIZED, REFERENCE)  # rules that should rewrite in one step
CHANCE = 0.03  # share of right values that counts as chance
REMAPPED = 0.95  # least share of right values where keys had other values before


class FastWeightRecall(Recipe, name="fast-weight-recall"):
    """Recall after one reading, after remapping and beyond capacity, under each rule of writing fast weights."""

    seeds: int = 3  # Models of each kind.
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
    learning_rate: float = 3e-3  # Of AdamW at the start; a cosine leads from there to 0.
    examples: int = 64  # Examples that are measured.
    address_weight: float = 1.0  # Weight of the entropy that moves the keys. The paper's 10 suits its 512 sub-keys.
    choices: ClassVar = {"rules": tuple(RULES)}
    limits: ClassVar = {"reads": (2, math.inf), "learning_rate": (1e-9, 1e3)}
    by_size: ClassVar = {
        "quick": {"steps": 150, "stress_steps": 120, "examples": 16, "seeds": 1},
        "paper": {
            "sub_keys": 512, "stress_sub_keys": 64, "key_dim": 512, "top_k": 8, "width": 256, "keys": 2048,
            "pairs": 256, "batch": 16, "learning_rate": 1e-3, "address_weight": 10.0, "device": "auto", "steps": 1000,
            "stress_steps": 600,
        },
    }  # fmt: skip

    def check(self) -> None:
        with torch.device("meta"):
            for small in (False, True):
                self.make_model(self.rules[0], small)

    def task(self, **changes: Any) -> CrossDocumentRecall:
        """Return the task of the measurement, or one with other documents and reads."""
        return replace(CrossDocumentRecall(self.keys, self.keys, self.pairs, self.documents, self.reads), **changes)

    def make_model(self, rule: str, small: bool) -> Any:
        """Return a model whose memory has the size of the options, or is too small."""
        from ._recall_measures import RecallModel

        task, sub_keys = self.task(), self.stress_sub_keys if small else self.sub_keys
        return RecallModel(
            task.vocabulary, self.width, sub_keys=sub_keys, key_dim=self.key_dim, value_dim=self.key_dim,
            top_k=self.top_k, chunk_size=task.length, address_weight=self.address_weight, **RULES[rule],
        )  # fmt: skip

    def cells(self) -> list[Cell]:
        small = [rule for rule in self.rules if rule != DETACHED]
        cells = [*product([ROOM], self.rules), *product([SMALL], small), (CLUSTERED, NORMALIZED)]
        return [{"memory": memory, "rule": rule} for memory, rule in cells]

    def measure(self, cell: Cell, seed: int) -> Iterator[dict[str, Any]]:
        """Yield rows of the kinds "run" (the model, its seconds, and shares of retrieved slots that hold the right
        value), "loss" (nats, means of eighths of the training; none if it diverged), "recall" (share of right values),
        "once" (the same of a document read once), and of clustered queries "clustered" (share of slots in use)."""
        from regard.models.hybrid.memories import chunk_size
        from regard.training.task import TaskBudget, train_on_task
        from regard.training.task.training import LossNotFinite

        from ._recall_measures import RecallTokens, clustered_rows, hits

        if cell["memory"] == CLUSTERED:
            yield from clustered_rows(seed)
            return
        rule, small, start = cell["rule"], cell["memory"] == SMALL, time.perf_counter()
        torch.manual_seed(seed)
        model = self.make_model(rule, small).to(self.torch_device)
        steps = self.stress_steps if small else self.steps
        budget = TaskBudget(
            steps=steps, batch=self.batch, learning_rate=self.learning_rate, warmup=0.0, final_share=0.0,
            weight_decay=0.0, seed=seed, eval_every=-(-steps // 8), eval_examples=1,
        )  # fmt: skip
        losses: tuple[float, ...] = ()
        with suppress(LossNotFinite):  # a model that diverged is measured as it is
            losses = train_on_task(model, RecallTokens(self.task(reads=2)), budget).loss
        seconds = time.perf_counter() - start
        model.eval()
        once, exact = self.task(documents=1, reads=2), not small and rule in EXACT
        last, four = hits(model, once, seed, min(16, self.examples)) if exact else (None, None)
        yield {"kind": "run", "slots": model.memory.slots, "parameters": model.num_parameters(), "seconds": seconds,
               "fast_weights": model.memory.fast_numbers(), "hit_last": last, "hit_four": four}  # fmt: skip
        yield from ({"kind": "loss", "part": part, "loss": loss} for part, loss in enumerate(losses, 1))
        for index, share in enumerate(self.accuracy(model, self.task(), seed)):
            document, reading = divmod(index, self.reads)
            yield {"kind": "recall", "document": document + 1, "reading": reading + 1, "accuracy": share}
        # a document is read once and then comes again as questions; a chunk of both is written after the questions
        for chunk in (2 * once.length // parts for parts in (1, 2, 4, 8) if exact):
            if chunk >= 2:
                with chunk_size(model, chunk):
                    yield {"kind": "once", "chunk": chunk, "accuracy": self.accuracy(model, once, seed)[1]}

    def accuracy(self, model: Any, task: CrossDocumentRecall, seed: int) -> list[float]:
        """Return the share of right values in every reading of every document, in order."""
        from regard.training.task import score_task

        from ._recall_measures import RecallTokens

        scores = score_task(model, RecallTokens(task), seed=seed, examples=self.examples, batch=16)
        return [score.mean for metric, score in scores.items() if metric.startswith("accuracy on")]

    def claims(self, results: Results) -> list[Claim]:
        recall, runs = (results.select(kind=kind, memory=ROOM) for kind in ("recall", "run"))
        once = results.select(kind="once").reindex(columns=["rule", "chunk", "accuracy"])  # there may be none
        second, whole = select(recall, reading=2), 4 * self.pairs
        shares = lambda rows, **where: mean_intervals(select(rows, **where), ["rule"], "accuracy")  # noqa: E731
        hits = lambda column: mean_intervals(runs.dropna(subset=[column]), ["rule"], column)  # noqa: E731
        rewriting, on_second = "One-step rewriting", "Share of right values on the second reading of document"
        single = "Share of right answers about a document that is read once"
        stored = "Share of the slots that keys retrieve on the second reading: the right value was written"
        return claims_of("Fast-weight Product Key Memory", [
            ("protocol", "Nothing is known on a first reading",
             mean_intervals(select(recall, reading=1), ["rule", "document"], "accuracy"), "below", CHANCE,
             "Share of right values."),
            ("section 3.2", rewriting, shares(second, rule=EXACT, document=1), "at least", 0.99, f"{on_second} 1."),
            ("section 3.2", f"{rewriting} of other values", shares(second, rule=EXACT, document=2), "at least",
             REMAPPED, f"{on_second} 2, whose keys had other values before."),
            ("section 3.2", f"{rewriting} with equation 35", shares(second, rule=PAPER, document=2), "at least",
             REMAPPED, f"{on_second} 2; equation 35 moves a slot by its weight alone."),
            ("protocol", "One reading is enough where writes come before questions",
             mean_intervals(once[once["chunk"] < whole], ["rule", "chunk"], "accuracy"), "at least", REMAPPED,
             f"{single}, by tokens of a chunk."),
            ("protocol", "One reading is not enough where the whole text is one chunk", shares(once, chunk=whole),
             "below", CHANCE, f"{single}."),
            ("section 5.1", "Retrieved slots hold what was asked for", hits("hit_last"), "at least", 0.75,
             f"{stored} last."),
            ("section 5.1", "One of the last four writes is what was asked for", hits("hit_four"), "at least", 0.95,
             f"{stored} by one of the last four writes."),
            ("section 3.3", "The entropy of the addresses keeps clustered queries from few slots",
             widest(results.select(kind="clustered")), "at least", 2.0,
             "Slots in use, in units of those without the entropy; the largest of all spreads and weights."),
        ])  # fmt: skip

    def tables(self, results: Results) -> dict[str, Any]:
        recall, runs, clustered = (results.select(kind=kind) for kind in ("recall", "run", "clustered"))
        recall = recall.assign(document=recall["document"].map("document {:.0f}".format))
        without = select(clustered, weight=0.0).groupby("spread")["coverage"].mean()
        clustered = clustered.assign(times=clustered["coverage"] / clustered["spread"].map(without),
                                     entropy=clustered["weight"].map("entropy weight {:g}".format))  # fmt: skip
        readings: Show = lambda rows: " / ".join(map("{:.3f}".format, rows.groupby("reading")["accuracy"].mean()))  # noqa: E731
        return {
            "Recall by document and reading": pivot(recall, ["memory", "rule"], {"": readings}, "document", note=(
                f"Share of right values by reading; chance is {self.task().chance:.3f}. Means; seeds: {self.seeds}.")),
            "One reading, by tokens of a chunk": pivot(
                results.select(kind="once"), ["rule"], {"": "{accuracy:.3f}"}, "chunk",
                note="A document followed by the same document as questions, read once: share of right answers."),
            "Slots that hold the answer": pivot(runs.dropna(subset=["hit_last"]), ["rule"], {
                "last writer": "{hit_last:.3f}", "worst seed": stat("hit_last", "min", "{:.3f}"),
                "one of the last 4": "{hit_four:.3f}", "its worst seed": stat("hit_four", "min", "{:.3f}"),
            }, note="Share of retrieved slots that hold the right value on the second reading of document 1."),
            "Models": pivot(runs, ["memory", "rule"], {
                "slots": "{slots:.0f}", "learned": "{parameters:,.0f}", "written": "{fast_weights:,.0f}",
                "training": "{seconds:.0f} s",
            }),
            "Clustered queries: share of the slots in use": pivot(
                clustered, ["spread"], {"": "{coverage:.3f} ({times:.1f} times)"}, "entropy",
                note="All queries are one point, moved by noise of the spread. Times: of those without entropy."),
        }  # fmt: skip

    def figures(self, results: Results) -> dict[str, bytes]:
        recall = results.select(kind="recall").sort_values("document", kind="stable")
        clustered = results.select(kind="clustered")
        clustered = clustered.assign(entropy=clustered["weight"].map("weight {:g}".format))
        return {
            "recall": lines(panels(recall, "{memory}, document {document:.0f}"), "reading",
                            {"accuracy": "share of right values"}, "rule", wrap=2),
            "clustered": lines({"slots that clustered queries use": clustered}, "spread",
                               {"coverage": "share of the slots"}, "entropy"),
        }  # fmt: skip


def widest(rows: Frame) -> dict[str, Estimate]:
    """Return the largest ratio of slots in use with the entropy to those without it."""
    ratios = {
        f"spread {spread:g}, weight {weight:g}": ratio_interval(some["coverage"], select(each, weight=0.0)["coverage"])
        for spread, each in rows.groupby("spread") for weight, some in each.groupby("weight") if weight
    }  # fmt: skip
    return dict(sorted(ratios.items(), key=lambda item: -item[1].mean)[:1])
