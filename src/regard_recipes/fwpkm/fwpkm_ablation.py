"""What each part of a fast-weight product-key memory is worth: appendix B of its paper at a size for two cores.

One part of the memory is left out, or another number of slots is read. Beside these stand the three rules of writing,
dot-product scores (which the paper leaves out since they "often result in memory collapsing and loss divergence"), and
a model without a memory. Models are trained on text in which names come back, which they read in order with the memory
kept; and on needles, about which they are asked after one to four readings.
"""

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import torch

from ..lib.claims import Claim, claims_of, paired
from ..lib.display import gap, interval, lines, pivot
from ..lib.recipe import Frame, Results, select
from ..long_text.needle_reading import answer_rows
from ..long_text.streaming import read_names
from .memory_recipe import NAMES, NEEDLES, PAPER, PAPER_BOTH, QUICK, NamesAndNeedlesRecipe, Row

NONE, WHOLE, LOOK_AHEAD = "no memory", "FwPKM", "without look-ahead"
PARTS: dict[str, dict[str, Any]] = {
    "without value norm": {"value_norm": False}, "without address loss": {"key_update": "mse"},
    "without gating": {"gating": False}, "without loss weight": {"gate_loss": False},
    LOOK_AHEAD: {"look_ahead": False},
}  # fmt: skip
WIDER, HEADS, DOT = "1 head, 4 k slots", "4 heads, k slots each", "dot-product scores"
OPTIONS: dict[str, dict[str, Any]] = {
    NONE: {}, WHOLE: {}, "rule: paper": {"step_rule": "paper"}, "rule: reference": {"step_rule": "reference"},
    WIDER: {}, HEADS: {"heads": 4}, **PARTS, DOT: {"score": "dot"},
}  # fmt: skip
"""What a variant's memory has that the whole memory (all parts, the normalised rule) has not; WIDER reads 4 k slots."""
CLEAR = 0.1  # nats, and share of needles, that a part must be worth to matter
COLLAPSED = 0.5  # share of the whole memory's coverage below which a memory counts as collapsed


class FwPKMAblation(NamesAndNeedlesRecipe, name="fwpkm-ablation"):
    """A fast-weight product-key memory with one part left out at a time: losses, gates, slots in use, needles."""

    sub_keys = 32
    steps = 100
    examples: int = 32  # Haystacks with a question that each model is asked.
    segments: int = 16  # Training windows of each document.
    known: ClassVar = {name: {"row": Row("GDN", "none" if name == NONE else "FwPKM"), "fast": options}
                       for name, options in OPTIONS.items()}  # fmt: skip
    by_size: ClassVar = {
        "quick": {**QUICK, "seeds": 2, "segments": 2, "haystack": 80},
        "paper": {**PAPER_BOTH, "examples": 500},
    }

    def fast(self, name: str) -> dict[str, Any]:
        return {**super().fast(name), **({"top_k": 4 * self.top_k} if name == WIDER else {})}

    def training_tasks(self) -> Mapping[str, Any]:
        return {NAMES: self.names(self.context), NEEDLES: self.needle_task()}

    def scored(self, model: Any, name: str, test: Any) -> Iterator[dict[str, Any]]:
        if name == NEEDLES:
            return answer_rows(model, test, self.haystack, self.needles, self.examples, self.seed, reads=self.reads)
        text = self.names(self.segments * self.context + 1)
        return read_names(model, text, self.context, ("paper", "frozen"), count=self.documents, seed=self.seed)

    def claims(self, results: Results) -> list[Claim]:
        if WHOLE not in self.trained:
            return []
        seen = self.by_seed(results)
        less = lambda column, one, other: paired(select(seen, model=one), select(seen, model=other), column)  # noqa: E731
        most = lambda column: {part: less(column, LOOK_AHEAD, part) for part in PARTS if part != LOOK_AHEAD}  # noqa: E731
        harm = "Removing look-ahead values yields the most significant harm"
        nats = "Loss (nats) on the items of names from earlier segments"
        share = "Share of needles answered after all readings"
        dot, whole = (select(seen, model=name).set_index("seed") for name in (DOT, WHOLE))
        poor = dot["diverged"] | (dot["coverage"] < COLLAPSED * whole["coverage"].reindex(dot.index))
        names, needles = ({"effect": CLEAR, "untestable": self.unlearned(results, task)} for task in (NAMES, NEEDLES))
        return claims_of(PAPER, [
            ("section 4", "Writing lowers the loss on text", whole["across"] - whole["frozen"], "below", 0.0,
             f"{nats}: written memory minus the same memory without writes.", names),
            ("section 4", "A memory lowers the loss on text", less("across", WHOLE, NONE), "below", 0.0,
             f"{nats}: with minus without a memory.", names),
            ("appendix B", f"{harm}, to perplexity", most("across"), "above", 0.0,
             f"{nats}: without look-ahead minus without another part.", names),
            ("section 4.3", "The memory answers needles", less("share", WHOLE, NONE), "above", 0.0,
             f"{share}: with minus without a memory.", needles),
            ("appendix B", f"{harm}, to needles", most("share"), "below", 0.0,
             f"{share}: without look-ahead minus without another part.", needles),
            ("appendix B", "Dot-product scores often result in memory collapsing and loss divergence", poor, "above",
             0.0, f"Share of trainings that diverge or use less than {COLLAPSED:g} times the whole memory's slots."),
        ])  # fmt: skip

    def by_seed(self, results: Results) -> Frame:
        """Return a row for each model and seed: the losses of the text read in order, and "frozen" of what recurs with
        a memory that is never written; means of the layers' statistics; the share of answers after all readings."""
        key = ["model", "seed"]
        means = lambda rows, columns: rows.groupby(key, sort=False)[columns].mean()  # noqa: E731
        documents = self.chosen(results, "document")
        read = means(select(documents, rule="paper"), ["loss", "within", "across"])
        frozen = means(select(documents, rule="frozen"), ["across"]).rename(columns={"across": "frozen"})
        layers = means(self.chosen(results, "layer"), ["gate", "coverage", "collisions", "kl_uniform"])
        answers = means(select(self.chosen(results, "answers"), read=self.reads), ["share"])
        lost = self.chosen(results, "run").groupby(key, sort=False)["diverged"].max().astype(bool)
        return read.join([frozen, layers, answers, lost], how="outer").reset_index()

    def tables(self, results: Results) -> dict[str, Any]:
        seen, reads = self.by_seed(results), self.reads
        whole, order = select(seen, model=WHOLE), {name: position for position, name in enumerate(self.trained)}
        seen = seen.sort_values("model", key=lambda names: names.map(order), kind="stable")
        chance = f"{self.examples} questions a seed. Chance: {10.0**-self.digits:.2g}."
        return {
            "What a part is worth": pivot(seen, ["model"], {
                "nats": "{loss:.3f}", "earlier segments": interval("across"),
                f"above {WHOLE}": gap("across", whole), "never written": "{frozen:.3f}",
                "mean gate": "{gate:.2f}", "coverage": "{coverage:.3f}", "collisions": "{collisions:.2f}",
                "KL to even use": "{kl_uniform:.2f}", f"needles, {reads} readings": "{share:.0%}",
            }, note=f"Nats per token on documents read in order, the memory carried on, and of what names from earlier "
                    f"segments have; never written: the same with a memory that stays as it is made. Coverage: share "
                    f"of the slots that were read; collisions: share of the reads of slots that were read more than "
                    f"once. Means, ± half the 95 % interval; seeds: {self.seeds}."),
            "Needles by readings": pivot(
                self.chosen(results, "answers"), ["model"], {"": "{share:.0%}"}, "read", note=chance),
            "Training": self.training_table(results),
        }  # fmt: skip

    def figures(self, results: Results) -> dict[str, bytes]:
        from regard.inspect.figures import gate_histograms

        y = {"share": "share of right answers"}
        made = {"curves": self.curves(results),
                "needles": lines({"needles": self.chosen(results, "answers")}, "read", y, "model")}  # fmt: skip
        layers = select(self.chosen(results, "layer"), seed=self.seed).dropna(subset=["counts"])
        gates: dict[str, dict[str, Any]] = {}
        for model, layer, counts in layers[["model", "layer", "counts"]].itertuples(index=False):
            histogram = torch.tensor(counts, dtype=torch.float64)
            gates.setdefault(model, {})[layer] = histogram / histogram.sum()
        return {**made, "gates": gate_histograms(gates, title="Gates on held-out text")} if gates else made
