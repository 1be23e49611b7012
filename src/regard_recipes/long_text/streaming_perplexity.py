"""Measure which memory helps on which text: figures 2 and 3 and findings 1 to 3 of the fast-weight paper (section 4.2).

docs/memory-results.md describes the text. The paper carries the fast memory on through everything and starts all else
anew at every segment. Here models are also read by fair rules: memory and recurrent states live through a document.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from itertools import product
from typing import Any, ClassVar

from regard.inspect.gates import BINS

from ..fwpkm.memory_recipe import LAYOUTS, NAMES, PAPER, PAPER_SIZE, QUICK, RESTRICTED, NamesRecipe, Row, known_rows
from ..lib.claims import Claim, claims_of, paired
from ..lib.display import dots, heat, interval, lines, only, panels, pivot, spread
from ..lib.recipe import Frame, Results, select, stacked
from .streaming import RULES, read_names, reading_rules

TEXTS = ("short", "long")
ROWS = known_rows()
SMALL = ("GDN", "GDN | PKM", "GDN | FwPKM", "GDN | PKM+FwPKM", "FA", "FA | PKM", "FA | FwPKM", "FA | PKM+FwPKM",
         "FA-pSWA", "FA-pSWA | FwPKM")  # fmt: skip
"""Models that are trained by default."""
CLEAR = 0.05  # nats per token, and difference of gates, that count as an effect


class StreamingPerplexity(NamesRecipe, name="streaming-perplexity"):
    """Perplexity on short and long documents read in order, with fast and slow memories in the FwPKM layouts."""

    batch = 16
    steps = 300
    stop_at = 0.97
    rates = (4e-3, 8e-3)
    examples: int = 32  # Documents of each kind that are read; a quarter of them side by side.
    segments: int = 16  # Segments of a long document, each as long as a training window.
    known = ROWS
    slow: ClassVar = [name for name in ROWS if name not in SMALL]
    metric = "accuracy on far"
    scorings = 20
    by_size: ClassVar = {
        "quick": {**QUICK, "seeds": 2, "rates": (4e-3,), "segments": 3,
                  "models": ("GDN", "GDN | PKM", "GDN | FwPKM", "FA", "FA | FwPKM", "FA-pSWA | FwPKM")},
        "paper": {**PAPER_SIZE, "models": tuple(ROWS), "examples": 128, "people": 24},
    }  # fmt: skip

    def training_tasks(self) -> Mapping[str, Any]:
        return {NAMES: self.names(self.context)}

    def scored(self, model: Any, name: str, test: Any) -> Iterator[dict[str, Any]]:
        rules = reading_rules(model)
        for text, segments in zip(TEXTS, (1, self.segments), strict=True):
            source = self.names(segments * self.context + 1)
            rows = read_names(model, source, self.context, rules, count=self.examples, seed=self.seed,
                              rows=max(1, self.examples // 4))  # fmt: skip
            yield from ({**row, "text": text} for row in rows)

    def claims(self, results: Results) -> list[Claim]:
        if not any(self.row(name).remembers for name in self.trained):
            return []
        read, by_rule = self.as_read(results, "document", "paper"), self.chosen(results, "document", text="long")
        seeds = lambda rows, column: rows.pivot_table(column, "seed", "model")  # noqa: E731
        nats = {text: seeds(select(read, text=text), "loss") for text in TEXTS}
        gates = seeds(self.chosen(results, "layer", text="long"), "mean")

        def less(one: str, other: str, text: str = "long") -> dict[str, Frame]:
            """Return by layout the nats per token with one memory less those with another, for each seed."""
            pairs = {layout: (Row(layout, one).name, Row(layout, other).name) for layout in LAYOUTS}
            return {layout: nats[text][one] - nats[text][other] for layout, (one, other) in pairs.items()
                    if {one, other} <= {*nats[text]}}  # fmt: skip

        def between(values: Mapping[str, Frame], pairs: Iterable[tuple[str, str]]) -> dict[str, Frame]:
            """Return the values of a layout less those of another."""
            return {f"{one} less {other}": values[one] - values[other]
                    for one, other in pairs if {one, other} <= values.keys()}  # fmt: skip

        gains, full = less("FwPKM", "none"), [("GDN+FA", "GDN"), ("FA", "GDN")]
        opened = {layout: gates[Row(layout, "FwPKM").name] for layout in gains}
        more = gains | {f"{layout}, less PKM": gap for layout, gap in less("FwPKM", "PKM").items()}
        both = {f"{layout}: less {other} on {text}": gap for other, text in product(("PKM", "FwPKM"), TEXTS)
                for layout, gap in less("PKM+FwPKM", other, text).items()}  # fmt: skip
        lower = {name: paired(select(by_rule, model=name, rule="paper"), select(by_rule, model=name, rule="frozen"),
                              "across") for name in self.trained}  # fmt: skip
        unit = "Nats per token, read by the paper's protocol"
        return claims_of(PAPER, [
            ("finding 1", "Fast memories gain on long documents", more, "below", 0,
             f"{unit}, on long documents: FwPKM less no memory, and less PKM."),
            ("finding 1", "Both together are best", both, "below", 0, f"{unit}: PKM+FwPKM less each alone."),
            ("finding 2", "FwPKM gains less beside full attention", between(gains, full), "above", 0,
             f"{unit}: the gain on long documents."),
            ("finding 2", "Its gates close beside full attention", between(opened, full), "below", 0,
             "Mean gate on long documents."),
            ("finding 3", "Windows in training open the gates", between(opened, RESTRICTED.items()), "above", 0,
             "Mean gate on long documents."),
            ("check", "Writing lowers the loss on names that recur beyond a segment", lower, "below", 0,
             "Loss (nats) on facts that recur in a later segment, with writes minus without."),
        ], effect=CLEAR, untestable=self.unlearned(results, NAMES))  # fmt: skip

    def notes(self, results: Results) -> list[str]:
        return ["Nothing is the same in all documents of this text, so that it cannot show what finding 1 says of slow "
                "memories on short documents."]  # fmt: skip

    def as_read(self, results: Results, kind: str, protocol: str) -> Frame:
        """Return the rows of a kind, each model read by what a protocol ("paper" or "fair") means for it."""
        rows = self.chosen(results, kind)
        return rows[rows["rule"] == rows["model"].map(lambda name: rule_of(self.row(name), protocol))]

    def tables(self, results: Results) -> dict[str, Any]:
        import pandas as pd

        read = stacked(self.as_read(results, "document", protocol).assign(read=protocol)
                       for protocol in ("paper", "fair"))  # fmt: skip
        read = read.assign(read=read["text"] + ", " + read["read"])
        losses = read.groupby(["model", "seed", "read"], sort=False)["loss"].mean()
        perplexity = losses.clip(upper=700).map(math.exp).rename("perplexity").reset_index()
        long = select(self.chosen(results, "document"), text="long")
        long = long.groupby(["model", "rule", "seed"], sort=False)[["within", "across"]].mean().reset_index()
        long = long.assign(rule=pd.Categorical(long["rule"], list(RULES)))
        told_of = "; ".join(f"{name}: {rule.meaning}" for name, rule in RULES.items())
        return {
            "Perplexity": pivot(perplexity, ["model"], {"": interval("perplexity", 2)}, "read", note=(
                "Perplexity per token, ± half the 95 % interval over seeds. paper: the fast memory is carried through "
                "all documents, all else is new at every segment. fair: memory and recurrent states are carried "
                "through a document and no further; attention sees its segment.")),
            "Names that recur in a later segment": pivot(
                long, ["model"], {"": interval("across")}, "rule",
                note=f"Loss (nats) on the items of these names, long documents. {told_of}."),
            "Names that recur within a segment": pivot(
                long, ["model"], {"": interval("within")}, "rule", note="The same for what attention can see."),
            "Gates and slots": pivot(self.chosen(results, "layer"), ["model", "text", "layer"], {
                "mean gate": spread("mean", 2),
                "on names from earlier segments": only(spread("across", 2), text="long"),
                "on other tokens": spread("other", 2),
                "slots read": "{coverage:.2f}", "reads of shared slots": "{collisions:.2f}",
                "KL to uniform, nats": "{kl_uniform:.2f}",
            }, note="By the paper's protocol; a gate on a name decides what is predicted for it."),
            "Training": self.training_table(results),
        }  # fmt: skip

    def figures(self, results: Results) -> dict[str, bytes]:
        rows = self.chosen(results, "document").assign(rule=lambda rows: [RULES[r].meaning for r in rows["rule"]])
        rows = rows.groupby(["model", "seed", "rule", "text"], sort=False)["loss"].mean().reset_index()
        made = {text: dots(select(rows, text=text), "loss", "model", "rule", x_label="nats per token",
                           title=f"{text} documents") for text in TEXTS}  # fmt: skip
        along = select(self.as_read(results, "segment", "fair"), text="long")
        made["segments"] = lines({"": along}, "segment", {"loss": "nats per token, fair"}, "model",
                                 x_label="segment of a long document")  # fmt: skip
        if len(gates := self.chosen(results, "layer")):
            gates = gates.explode("counts").astype({"counts": float})
            counts = gates.groupby(level=0)["counts"]
            gates = gates.assign(bin=(counts.cumcount() + 0.5) / BINS, share=gates["counts"] / counts.transform("sum"),
                                 gate=gates["model"] + ", " + gates["layer"])  # fmt: skip
            made["gates"] = heat(panels(gates, "{text}"), "gate", "bin", "share", lambda share: f"{100 * share:.0f}",
                                 label="share of the gates in percent, by value")  # fmt: skip
        return {**made, "curves": self.curves(results)}


def rule_of(row: Row, protocol: str) -> str:
    """Return the rule by which the paper reads a model, or by "fair" the one that carries states through a document."""
    if protocol == "fair" and row.layout.startswith(("GDN", "LaCT")):
        return "carried"
    if not row.remembers:
        return "new"
    return "document" if protocol == "fair" else "paper"
