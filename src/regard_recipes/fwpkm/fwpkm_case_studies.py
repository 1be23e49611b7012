"""Two looks into a fast-weight memory: the slots that answer a question about a needle, and the gates over a text.

Section 5 of "Fast-weight Product Key Memory"; what it says of both is counted over many questions and documents.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from regard.inspect.gates import GateTrace, gate_trace, layer_name
from regard.inspect.slot_trace import SlotReadings, slot_readings, slot_table
from regard.nn.memory_trace import WriterTrace, observed

from ..lib.claims import Claim, claims_of, mean_intervals, paired
from ..lib.display import dots, interval, pivot
from ..lib.recipe import Results, select
from ..long_text.needle_reading import asked, greedy
from ..long_text.needle_text import NeedleText
from ..long_text.streaming import read_names
from .memory_recipe import NAMES, NEEDLES, PAPER, PAPER_BOTH, QUICK, NamesAndNeedlesRecipe, Row

ROW = Row("GDN", "PKM+FwPKM")  # the paper's model: gated delta nets, a slow memory between two fast ones
WRITERS = 4  # kept of every slot
MAJORITY = 0.5
MARGIN = 0.05  # by which two means or two deviations must differ to count
REACH = 4  # words on each side of a writer that tables and pages show
PLACES = {"new": "new names", "within": "repeated names", "other": "other tokens"}
NOTHING = "writing does not lower the loss on names that come back, so that gates have nothing to follow"


class FwPKMCaseStudies(NamesAndNeedlesRecipe, name="fwpkm-case-studies"):
    """Slots that answer a needle's question with their hits, and gates over a text: the two case studies of FwPKM."""

    seeds: int = 5  # Models that are trained; the first one's case is drawn.
    layers = 4
    steps = 80
    digits = 4
    examples: int = 64  # Haystacks with a question; the first that is answered correctly is drawn.
    haystack = 192
    documents = 16
    gate_chunk: int = 4
    """Tokens between two writes where gates are looked at; the paper takes a sixteenth of the training's."""
    gate_tokens: int = 480  # Tokens of each document.
    drawn: int = 240  # Tokens of the first document that are drawn.
    limits: ClassVar = {"gate_chunk": (2, math.inf), "gate_tokens": (2, math.inf)}
    known: ClassVar = {ROW.name: {"row": ROW}}
    by_size: ClassVar = {
        "quick": {**QUICK, "seeds": 2, "haystack": 80, "gate_tokens": 120, "documents": 4, "drawn": 60},
        "paper": {**PAPER_BOTH, "seeds": 3, "gate_chunk": 32, "gate_tokens": 10_000, "examples": 100, "drawn": 600},
    }

    def shared(self) -> Mapping[str, Any]:
        """With fewer layers than the paper's there are fast memories low and high, and a slow one between them."""
        few = {"memories": f"PKM@{self.layers // 2}+FwPKM@1,{self.layers - 1}"}
        return {**super().shared(), **(few if self.layers < 12 else {})}

    def training_tasks(self) -> Mapping[str, Any]:
        return {NEEDLES: self.needle_task(), NAMES: self.names(self.context)}

    def prepare(self) -> Mapping[str, Any]:
        needles, names = self.training_tasks().values()
        return {**super().prepare(), "words": {NEEDLES: list(needles.words.words), NAMES: list(names.words.words)}}

    def scored(self, model: Any, name: str, test: Any) -> Iterator[dict[str, Any]]:
        from regard.models.hybrid.memories import chunk_size

        if name == NEEDLES:
            yield from self.slot_rows(model, test)
            return
        text = self.names(self.gate_tokens + 1)
        with chunk_size(model, self.gate_chunk):
            yield from read_names(model, text, self.gate_tokens, ("paper", "frozen"), count=self.documents,
                                  seed=self.seed)  # fmt: skip
            yield from gate_rows(model, text.example(self.seed, 0, "test").tokens[: self.drawn])

    @torch.no_grad()
    def slot_rows(self, model: Any, text: NeedleText) -> Iterator[dict[str, Any]]:
        """Read haystacks [E, L], answer greedily, and yield what was retrieved for the tokens of the answers. The chunk
        is the haystack: each reading is written once, the last one before the question's first token is read. A row of
        kind "layer" for each memory layer has counts over all questions; one of kind "slots" has the share of right
        answers ("exact"), and the slots of the first question that was answered correctly, if any."""
        from regard.models.hybrid.memories import chunk_size, keep_memory

        length, reads = self.haystack, self.reads
        haystacks, questions, examples = asked(text, length, self.needles, range(self.examples), self.seed)
        answers, cache = torch.tensor([text.encode(example.answer) for example in examples]), None
        with chunk_size(model, length), observed(model, lambda slots: WriterTrace(slots, WRITERS)) as traces:
            for _ in range(reads):
                cache = keep_memory(model, cache)
                model(input_ids=haystacks.to(model.device), cache=cache, logits_to_keep=1)
            spoken = greedy(model, questions.to(model.device), answers.shape[1], cache)
        retrieved = {layer_name(name): trace.retrieved() for name, trace in traces.items()}
        right = (spoken == answers).all(1)
        first = reads * length + questions.shape[1] - 1
        asking, readings = range(first, first + answers.shape[1]), []
        for row, tokens in enumerate(torch.cat([*[haystacks] * reads, questions, spoken], 1).tolist()):
            wanted = dict(zip(asking, answers[row].tolist(), strict=True))
            readings.append(slot_readings(retrieved, tokens, [""] * len(tokens), asking, answers=wanted, row=row))
        for name in retrieved:
            yield {"kind": "layer", "layer": name, **layer_counts(readings, right.tolist(), name)}
        shown = int(right.int().argmax())
        yield {"kind": "slots", "right": bool(right[shown]), **readings[shown].to_dict(),
               "exact": right.double().mean().item()}  # fmt: skip

    def claims(self, results: Results) -> list[Claim]:
        slots, gates = (self.chosen(results, "layer", task=task) for task in (NEEDLES, NAMES))
        of = lambda column: mean_intervals(slots.dropna(subset=[column]), ["layer"], column)  # noqa: E731
        low, high = (select(gates, layer=gates["layer"].iloc[at]) for at in (0, -1))
        read = self.chosen(results, "document")
        gain = paired(select(read, rule="paper"), select(read, rule="frozen"), "within")
        selective = {"mean, lower less higher": paired(low, high, "mean"),
                     "deviation, higher less lower": paired(high, low, "deviation")}  # fmt: skip
        over = lambda part, other: high[part] - high[other]  # noqa: E731
        spikes = {"repeated less other tokens": over("within", "other"), "new less other tokens": over("new", "other")}
        shown = "Share of the slots that the tokens of all answers retrieve"
        needles, names = ({"untestable": self.unlearned(results, task)} for task in (NEEDLES, NAMES))
        unmoved = {"untestable": names["untestable"] or (NOTHING if 0 <= gain.high < math.inf else "")}
        return claims_of(PAPER, [
            ("section 5.1", "The majority of retrieved slots contain the correct target tokens", of("hits"),
             "above", MAJORITY, f"{shown}: the last write stored the true next token.", needles),
            ("section 5.1", "Incorrect retrievals share the query token", of("same_query"), "above", MAJORITY,
             f"{shown} and that miss: their last writer is the same token as the one that asks.", needles),
            ("section 5.1", "Answers are right in spite of slots that miss", of("mixed"), "above", MAJORITY,
             "Share of the right answers with at least one miss.", needles),
            ("section 5.2", "Writing lowers the loss on names that come back", gain, "below", 0.0,
             "Loss (nats) on the items of repeated names: written memory minus the same memory without writes.", names),
            ("section 5.2", "The lower memory keeps its gate open on all tokens, the higher one is selective",
             selective if len(set(gates["layer"])) > 1 else {}, "above", MARGIN, "Gates on names text.", unmoved),
            ("section 5.2", "In the higher memory gates spike on names", spikes, "above", MARGIN,
             "Mean gate at the name, from which what it has is predicted.", unmoved),
            ("section 5.2", "They spike on repeated names more than on new ones", over("within", "new"), "above",
             MARGIN, "Mean gate of the higher memory; on a new name the memory holds nothing.", unmoved),
        ])  # fmt: skip

    def tables(self, results: Results) -> dict[str, Any]:
        slots, gates = (self.chosen(results, "layer", task=task) for task in (NEEDLES, NAMES))
        exact = self.chosen(results, "slots")["exact"].mean()
        # documents of one model are not independent
        read = self.chosen(results, "document").groupby(["rule", "seed"], sort=False)[list(PLACES)].mean().reset_index()
        return {
            "Retrieved slots": pivot(slots, {"layer": "memory"}, {
                "hits, last writer": "{hits:.0%}", f"hits, one of the last {WRITERS}": "{hits_of_four:.0%}",
                "weight on hits": "{weight:.0%}", "misses by the same token": "{same_query:.0%}",
                "the same by chance": "{same_by_chance:.0%}", "never written": "{never:.0%}",
                "right answers with a miss": "{mixed:.0%}",
            }, note=f"After {self.reads} readings; {exact:.0%} of the answers are right. Means; seeds: {self.seeds}."),
            "Gates": pivot(gates, {"layer": "memory"}, {
                "mean gate": interval("mean", 2), "deviation": interval("deviation", 2),
                **{f"on {tokens}": interval(part, 2) for part, tokens in PLACES.items()},
            }, note=f"On {self.documents} documents of {self.gate_tokens:,} tokens, written after every "
                    f"{self.gate_chunk}; a gate at a name decides what is predicted for it. ± half the 95 % interval "
                    f"over seeds."),
            "Loss with the memory written, and frozen": pivot(
                read, {"rule": "memory"}, {f"nats, {tokens}": interval(part) for part, tokens in PLACES.items()},
                note="paper: written, and carried on."),
            "One answer, slot by slot": slot_table(self.case(results)[0], reach=REACH),
            "Training": self.training_table(results),
        }  # fmt: skip

    def figures(self, results: Results) -> dict[str, bytes]:
        from regard.inspect.figures import gate_text, slot_figure

        case, title = self.case(results)
        return {
            "slots": slot_figure(case, title=title),
            "gates": gate_text(self.gates(results), title="Gates on held-out text"),
            "places": dots(self.chosen(results, "layer", task=NAMES), PLACES, "layer", x_label="mean gate"),
        }  # fmt: skip

    def pages(self, results: Results) -> dict[str, str]:
        from regard.inspect.report import MemoryPage, render_memory

        case, title = self.case(results)
        page = MemoryPage(
            title="What fast-weight memories did",
            introduction="Every slot that was retrieved for an answer, with what its last write stored; and the gates "
            "of the memory layers, token by token (the darker, the more is read from memory).",
            slots={"The slots of one answer": case},
            gates={"Gates on held-out text": self.gates(results)},
            notes={"The slots of one answer": (f"{title}.",)},
        )
        return {"look": render_memory(page, reach=REACH)}

    def case(self, results: Results) -> tuple[SlotReadings, str]:
        """Return the retrieved slots that are drawn, and what they are."""
        words = results.facts["words"][NEEDLES]
        row = self.chosen(results, "slots", seed=self.seed).iloc[0]
        wanted = "".join(words[token] for _, token in row["answers"])
        answer = "".join(words[row["tokens"][position + 1]] for position, _ in row["answers"])
        how = "correctly" if row["right"] else "wrongly"
        readings = SlotReadings.from_dict(row, [f" {words[token]}" for token in row["tokens"]])
        return readings, f"The answer {wanted}, given {how} as {answer}, after {self.reads} readings"

    def gates(self, results: Results) -> GateTrace:
        """Return the first model's gates on the part of the text that is drawn."""
        rows = self.chosen(results, "gates", seed=self.seed)
        labels = tuple(f" {results.facts['words'][NAMES][token]}" for token in rows["tokens"].iloc[0])
        return GateTrace(labels, tuple(rows["layer"]), torch.tensor(rows["gates"].tolist()))


def layer_counts(readings: Sequence[SlotReadings], right: list[bool], layer: str) -> dict[str, Any]:
    """Return counts of what one layer retrieved over all questions: hits, hits_of_four (share of the slots to which the
    last write, or one of the last four, gave the true next token); weight (share of the weight on hits); same_query (of
    the written slots that miss, the share whose last writer was the token that asks) and same_by_chance (share of that
    token among all that were read before); never (share of slots never written); mixed (of the right answers, the share
    with a miss, None where there is none)."""
    mean = lambda values: sum(values) / len(values) if values else 0.0  # noqa: E731
    of_layer = [(seen, reading) for seen in readings for reading in seen.readings if reading.layer == layer]
    slots = [(seen, seen.tokens[reading.position], slot, seen.hit(reading, slot))
             for seen, reading in of_layer for slot in reading.slots]  # fmt: skip
    missed = [seen.tokens[slot.writers[0].query] == asks for seen, asks, slot, hit in slots if slot.writers and not hit]
    chance = [seen.tokens[: at.position].count(seen.tokens[at.position]) / at.position for seen, at in of_layer]
    answered = [seen for seen, good in zip(readings, right, strict=True) if good]
    return {
        "hits": mean([seen.hits(1, layer) for seen in readings]),
        "hits_of_four": mean([seen.hits(WRITERS, layer) for seen in readings]),
        "weight": mean([seen.hit_weight(layer) for seen in readings]),
        "same_query": mean(missed), "same_by_chance": mean(chance), "misses": len(missed),
        "never": mean([not slot.writers for _, _, slot, _ in slots]),
        "mixed": mean([seen.hits(1, layer) < 1 for seen in answered]) if answered else None, "answered": len(answered),
    }  # fmt: skip


def gate_rows(model: Any, tokens: Tensor) -> Iterator[dict[str, Any]]:
    """Yield a row of kind "gates" for each memory layer: the tokens and their gates."""
    trace = gate_trace(model, tokens, [""] * len(tokens))
    for name, gates in zip(trace.layers, trace.gates.double().tolist(), strict=True):
        yield {"kind": "gates", "layer": name, "tokens": tokens.tolist(), "gates": [round(gate, 4) for gate in gates]}
