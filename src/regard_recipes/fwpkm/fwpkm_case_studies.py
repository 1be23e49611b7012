"""Two looks into a fast-weight memory: the slots that answer a question about a needle, and the gates over a text.

Section 5 of "Fast-weight Product Key Memory". A model that learned needles reads a haystack several times, with one
write after each reading; every slot that is retrieved for the answer's tokens is shown with what its last write stored.
A model that learned text reads with smaller chunks than in training; the gate of every memory layer is shown by token.
What the paper says of both is counted over many questions and a longer text.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from ..lib.claims import Claim, mean_interval, share_interval
from ..lib.display import mean, pivot
from ..lib.recipe import Cell, Frame, Results, recipe, select
from ..long_text.needle_text import UNKNOWN
from ._fwpkm_looks import RARE, WRITERS, case_of, look_at_gates, look_at_slots
from .memory_layouts import Row
from .memory_study import NEEDLES, PAPER, PAPER_SIZE, QUICK, TEXT, MemoryStudy, MemoryStudyConfig

if TYPE_CHECKING:
    from regard.inspect.gates import GateTrace

ROW = Row("GDN", "PKM+FwPKM")  # the paper's model: gated delta nets, a slow memory between two fast ones
MAJORITY = 0.5
MARGIN = 0.05  # by which two means, two deviations or a rank correlation and 0 must differ to count
REACH = 4  # words on each side of a writer that tables and pages show
NOTHING = "the memory lowers no loss on this text, so that gates have nothing to follow (numbers: table Gates)"


@dataclass(frozen=True, kw_only=True)
class FwPKMCaseStudiesConfig(MemoryStudyConfig):
    """Train a model with two fast-weight memories, and look at its slots and its gates."""

    seeds: int = 2
    """Models that are trained; the first one's case is drawn."""
    words: int = 4000
    layers: int = 4
    steps: int = 250
    haystack: int = 192
    digits: int = 4
    questions: int = 64
    """Haystacks with a question; the first that is answered correctly is drawn."""
    gate_chunk: int = 16
    """Tokens between two writes where gates are looked at; the paper takes a sixteenth of the training's."""
    gate_tokens: int = 8000  # Tokens of held-out text whose gates are counted.
    drawn: int = 240  # Of these, how many are drawn.


@recipe("fwpkm-case-studies")
class FwPKMCaseStudies(MemoryStudy):
    """Slots that answer a needle's question with their hits, and gates over a text: the two case studies of FwPKM."""

    Config = FwPKMCaseStudiesConfig
    sizes: ClassVar = {
        "quick": {**QUICK, "batch": 4, "steps": 30, "gate_chunk": 8, "gate_tokens": 400, "drawn": 200},
        "paper": {**PAPER_SIZE, "gate_chunk": 32, "questions": 100, "gate_tokens": 100_000, "drawn": 600},
    }
    limits: ClassVar = {
        **MemoryStudy.limits, "gate_chunk": (2, math.inf), "gate_tokens": (2, math.inf), "drawn": (1, math.inf),
    }  # fmt: skip
    flag, held_out_windows = "--gate-tokens", 4

    def check(self) -> None:
        super().check()
        self.model_config(258)

    def text_length(self) -> int:
        return int(self.config.gate_tokens)

    def prepare(self) -> Mapping[str, Any]:
        return {**super().prepare(), "words": list(self.words)}

    def cells(self) -> list[Cell]:
        return [{"task": NEEDLES}, {"task": TEXT}]

    def model_config(self, vocabulary: int) -> Any:
        """Return the configuration: fast memories low and high, a slow one between them."""
        layers = self.config.layers
        if layers >= 12:
            return self.model(ROW, vocabulary, (6,), (2, 10))
        return self.model(ROW, vocabulary, (layers // 2,), (min(1, layers - 1), layers - 1))

    def measure(self, cell: Cell, seed: int) -> Iterator[Any]:
        text, own = self.corpora[TEXT], self.config
        slots = partial(look_at_slots, asked=self.asked, reads=own.reads)
        gates = partial(look_at_gates, text=text.held_out_tokens, learned=text.train_tokens, chunk=own.gate_chunk,
                        unknown=self.words.index(UNKNOWN))  # fmt: skip
        return self.train(cell, seed, self.model_config(len(self.words)), slots if cell["task"] == NEEDLES else gates)

    def claims(self, results: Results) -> list[Claim]:
        slots, gates = (dict(list(layers_of(results, task).groupby("layer", sort=False))) for task in (NEEDLES, TEXT))
        hits, same = ({name: mean_interval(rows[column]) for name, rows in slots.items()}
                      for column in ("hits", "same_query"))  # fmt: skip
        count = {name: int(rows["answered"].sum()) for name, rows in slots.items()}
        mixed = {name: share_interval(round((rows["mixed"] * rows["answered"]).sum()), count[name])
                 for name, rows in slots.items() if count[name]}  # fmt: skip
        by_seed = [rows.set_index("seed") for rows in gates.values()]
        low, high = by_seed[0], by_seed[-1]
        selective = {"mean, lower less higher": mean_interval(low["mean"] - high["mean"]),
                     "deviation, higher less lower": mean_interval(high["deviation"] - low["deviation"])}  # fmt: skip
        spikes = {"rank correlation": mean_interval(high["correlation"]),
                  "gate on rare words less on others": mean_interval(high["rare"] - high["common"])}  # fmt: skip
        untestable = "" if self.config.size == "paper" else NOTHING
        shown = "Share of the slots that the tokens of all answers retrieve"
        return [
            Claim(PAPER, "section 5.1", "The majority of retrieved slots contain the correct target tokens", hits,
                  "above", MAJORITY, note=f"{shown}: the last write stored the true next token."),
            Claim(PAPER, "section 5.1", "Incorrect retrievals share the query token", same, "above", MAJORITY,
                  note=f"{shown} and that miss: their last writer is the same token as the one that asks."),
            Claim(PAPER, "section 5.1", "Answers are right in spite of slots that miss", mixed, "above", MAJORITY,
                  note="Share of the right answers with at least one miss; the interval is over questions."),
            Claim(PAPER, "section 5.2",
                  "The lower memory keeps its gate open on all tokens, the higher one is selective",
                  selective if len(by_seed) > 1 else {}, "above", MARGIN, untestable=untestable),
            Claim(PAPER, "section 5.2", "In the higher memory gates spike on rare names", spikes, "above", MARGIN,
                  untestable=untestable, note="Rare words instead of names."),
        ]  # fmt: skip

    def tables(self, results: Results) -> dict[str, Any]:
        from regard.inspect.slot_trace import slot_table

        own = self.config
        slots = {"hits, last writer": "hits", f"hits, one of the last {WRITERS}": "hits_of_four",
                 "weight on hits": "weight", "misses by the same token": "same_query",
                 "the same by chance": "same_by_chance", "never written": "never",
                 "right answers with a miss": "mixed"}  # fmt: skip
        gates = {"mean gate": "mean", "deviation": "deviation", "rank correlation with rarity": "correlation",
                 f"on the rarest {RARE:.0%}": "rare", "on the others": "common", "rare, first time": "rare_first",
                 "rare, again": "rare_again"}  # fmt: skip
        exact = results.select(kind="run", task=NEEDLES)["exact"].mean()
        note = f"After {own.reads} readings; {exact:.0%} of the answers are right. Means; seeds: {own.seeds}."
        read = (
            f"On {own.gate_tokens:,} held-out tokens, written after every {own.gate_chunk}. How rare a token is: -log2 "
            f"of its share of the text that was learned. Means; seeds: {own.seeds}."
        )
        return {
            "Retrieved slots": pivot(layers_of(results, NEEDLES), {"layer": "memory"},
                                     {head: mean(column, "{:.0%}") for head, column in slots.items()}, note=note),
            "Gates": pivot(layers_of(results, TEXT), {"layer": "memory"},
                           {head: mean(column) for head, column in gates.items()}, note=read),
            "One answer, slot by slot": slot_table(self.case(results)[0], reach=REACH),
        }  # fmt: skip

    def figures(self, results: Results) -> dict[str, bytes]:
        import numpy as np
        import torch

        from regard.inspect.memory_figures import gate_rarity, gate_text, slot_figure

        case, title = self.case(results)
        first = select(layers_of(results, TEXT), seed=self.config.seed)
        bits = np.array(results.select(kind="gates", seed=self.config.seed)["bits"].iloc[0], dtype=float)  # None is NaN
        return {
            "slots": slot_figure(case, title=title),
            "gates": gate_text(self.gates(results, self.config.drawn), title="Gates on held-out text"),
            "rarity": gate_rarity(self.gates(results), torch.from_numpy(bits), first["correlation"].tolist(),
                                  title="Gates and how rare a token is"),
        }  # fmt: skip

    def pages(self, results: Results) -> dict[str, str]:
        from regard.inspect.memory_page import MemoryPage, render_memory

        case, title = self.case(results)
        page = MemoryPage(
            title="What fast-weight memories did",
            introduction="Every slot that was retrieved for an answer, with what its last write stored; and the gates "
            "of the memory layers, token by token (the darker, the more is read from memory).",
            slots={"The slots of one answer": case},
            gates={"Gates on held-out text": self.gates(results, self.config.drawn)},
            notes={"The slots of one answer": (f"{title}.",)},
        )
        return {"look": render_memory(page, reach=REACH)}

    def case(self, results: Results) -> tuple[Any, str]:
        """Return the retrieved slots that are drawn, and what they are."""
        words, row = results.facts["words"], results.select(kind="case", seed=self.config.seed).iloc[0]
        asked = "".join(words[token] for _, token in row["answers"])
        said = "".join(words[row["tokens"][position + 1]] for position, _ in row["answers"])
        how = "correctly" if row["right"] else "wrongly"
        return case_of(row, words), f"The answer {asked}, given {how} as {said}, after {self.config.reads} readings"

    def gates(self, results: Results, drawn: int | None = None) -> GateTrace:
        """Return the first model's gates on the text, or on the part that is drawn."""
        import torch

        from regard.inspect.gates import GateTrace

        layers = select(layers_of(results, TEXT), seed=self.config.seed)
        tokens = results.select(kind="gates", seed=self.config.seed)["tokens"].iloc[0][:drawn]
        values = torch.tensor([gates[:drawn] for gates in layers["gates"]])
        return GateTrace(tuple(f" {results.facts['words'][token]}" for token in tokens), tuple(layers["layer"]), values)


def layers_of(results: Results, task: str) -> Frame:
    """Return a row for each memory layer and seed."""
    return results.select(kind="layer", task=task)
