"""Tables, figures, page and verdicts of the recipe `fwpkm-case-studies`."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from regard.inspect.gates import GateTrace
from regard.inspect.slot_trace import RetrievedSlot, SlotReading, SlotReadings, Writer, slot_table

from ..lib.language_output import seeds_note
from ..lib.language_runs import LanguageRun
from .fwpkm_case_studies_measure import RARE, WRITERS

MAJORITY = 0.5
REACH = 4
"""Words on each side of a writer that tables and pages show."""
MARGIN = 0.05
"""By which the means and the deviations of two layers' gates must differ to be told apart."""
TIED = 0.05
"""A rank correlation up to this size counts as none."""


@dataclass(frozen=True)
class Seen:
    """What was trained and read off.

    Attributes:
        needled, texts: models that learned from needles, and from text, one a seed; the first one's case is drawn.
        words: token to word.
        reads: readings before a question; gate_chunk: tokens between two writes where the gates were looked at; drawn:
            tokens of that text that are drawn.
    """

    needled: Sequence[LanguageRun]
    texts: Sequence[LanguageRun]
    words: Sequence[str]
    reads: int
    gate_chunk: int
    drawn: int

    @property
    def slots(self) -> Mapping[str, Any]:
        """What `look_at_slots` found in the first model."""
        return self.needled[0].extra

    @property
    def read(self) -> Mapping[str, Any]:
        """What `look_at_gates` found in the first model."""
        return self.texts[0].extra

    def labels(self, tokens: Sequence[int]) -> tuple[str, ...]:
        """Tokens as text, a blank before each word."""
        return tuple(f" {self.words[token]}" for token in tokens)

    def case(self) -> SlotReadings:
        """The retrieved slots that are drawn."""
        found = self.slots["case"]
        readings = tuple(
            SlotReading(
                each["layer"],
                each["position"],
                tuple(
                    RetrievedSlot(slot["slot"], slot["weight"], tuple(Writer(*writer) for writer in slot["writers"]))
                    for slot in each["slots"]
                ),
            )
            for each in found["readings"]
        )
        return SlotReadings(tuple(found["tokens"]), self.labels(found["tokens"]), readings, dict(found["answers"]))

    def gates(self, drawn: bool = True) -> GateTrace:
        """The gates on the text, or on the part that is drawn."""
        found = self.read
        end = self.drawn if drawn else len(found["tokens"])
        layers = found["layers"]
        values = torch.tensor([layer["gates"][:end] for layer in layers.values()])
        return GateTrace(self.labels(found["tokens"][:end]), tuple(layers), values)

    @property
    def layers(self) -> tuple[str, ...]:
        """Names of the memory layers, from low to high."""
        return tuple(self.read["layers"])

    def mean(self, part: str, layer: str, name: str) -> float | None:
        """A number of a layer, mean over the seeds that have it; `part` is "slots" or "gates"."""
        runs = self.needled if part == "slots" else self.texts
        found = [run.extra["layers"][layer][name] for run in runs]
        known = [value for value in found if value is not None]
        return statistics.fmean(known) if known else None

    @property
    def exact(self) -> float:
        """Share of right answers."""
        return statistics.fmean(run.extra["exact"] for run in self.needled)


# Tables ----------------------------------------------------------------------------------------------------------


def tables(seen: Seen) -> dict[str, Any]:
    """Name to table."""
    return {
        "Retrieved slots": slots_table(seen),
        "Gates": gates_table(seen),
        "One answer, slot by slot": slot_table(seen.case(), reach=REACH),
    }


def slots_table(seen: Seen) -> Any:
    """A row for each memory layer."""
    from regard.inspect.tables import Table

    names = ("hits", "hits_of_four", "weight", "same_query", "never", "mixed")
    rows = [(layer, *(share(seen.mean("slots", layer, name)) for name in names)) for layer in seen.layers]
    header = (
        "memory",
        "hits, last writer",
        f"hits, last {WRITERS}",
        "weight on hits",
        "misses by the same token",
        "never written",
        "right answers with a miss",
    )
    note = (
        f"Of the slots that the tokens of all answers retrieve after {seen.reads} readings: how many hold the true "
        f"next token. {seen.exact:.0%} of the answers are right. {told_seeds(seen)}"
    )
    return Table(header, tuple(rows), note)


def told_seeds(seen: Seen) -> str:
    """Over how many seeds the numbers are means."""
    return seeds_note(len(seen.texts)).replace("Mean ± standard deviation", "Means")


def share(value: float | None) -> str:
    """As text."""
    return "-" if value is None else f"{value:.0%}"


def gates_table(seen: Seen) -> Any:
    """A row for each memory layer."""
    from regard.inspect.tables import Table

    rows = []
    for layer in seen.layers:
        numbers = [seen.mean("gates", layer, name) for name in ("mean", "deviation", "correlation")]
        means = [seen.mean("gates", layer, name) for name in ("rare", "common", "rare_first", "rare_again")]
        cells = [f"{value:{sign}.2f}" for value, sign in zip(numbers, ("", "", "+"), strict=True) if value is not None]
        rows.append((layer, *cells, *("-" if value is None else f"{value:.2f}" for value in means)))
    header = (
        "memory",
        "mean gate",
        "deviation",
        "rank correlation with rarity",
        f"on the rarest {RARE:.0%}",
        "on the others",
        "rare, first time",
        "rare, again",
    )
    count = len(seen.read["tokens"])
    note = (
        f"On {count:,} held-out tokens, written after every {seen.gate_chunk}. How rare a token is: -log2 of its share "
        f"of the text that was learned. {told_seeds(seen)}"
    )
    return Table(header, tuple(rows), note)


# Figures ---------------------------------------------------------------------------------------------------------


def figures(seen: Seen) -> dict[str, bytes]:
    """File name to PNG, and the page."""
    from regard.inspect.memory_figures import gate_rarity, gate_text, slot_figure

    case, gates = seen.case(), seen.gates()
    bits = torch.tensor(seen.read["bits"], dtype=torch.float64)
    found = seen.read["layers"]
    correlations = [found[layer]["correlation"] for layer in seen.layers]
    return {
        "fwpkm-case-studies-slots.png": slot_figure(case, title=question(seen)),
        "fwpkm-case-studies-gates.png": gate_text(gates, title="Gates on held-out text"),
        "fwpkm-case-studies-rarity.png": gate_rarity(
            seen.gates(drawn=False), bits, correlations, title="Gates and how rare a token is"
        ),
        "fwpkm-case-studies.html": page(seen).encode(),
    }


def question(seen: Seen) -> str:
    """What the drawn case is."""
    case = seen.slots["case"]
    asked = [position for position, _ in case["answers"]]
    told = "".join(seen.words[token] for _, token in case["answers"])
    said = "".join(seen.words[case["tokens"][position + 1]] for position in asked)
    verdict = "rightly" if case["right"] else "wrongly"
    return f"The answer {told}, given {verdict} as {said}, after {seen.reads} readings"


def page(seen: Seen) -> str:
    """The page with both studies."""
    from regard.inspect.memory_page import MemoryPage, render_memory

    return render_memory(
        MemoryPage(
            title="What fast-weight memories did",
            introduction="Every slot that was retrieved for an answer, with what its last write stored; and the gates "
            "of the memory layers, token by token (the darker, the more is read from memory).",
            slots={"The slots of one answer": seen.case()},
            gates={"Gates on held-out text": seen.gates()},
            notes={
                "The slots of one answer": (question(seen) + ".", *slot_notes(seen)),
                "Gates on held-out text": tuple(gate_notes(seen)),
            },
        ),
        reach=REACH,
    )


# Verdicts --------------------------------------------------------------------------------------------------------


def notes(seen: Seen) -> tuple[str, ...]:
    """The paper's claims beside what was counted."""
    return (*slot_notes(seen), *gate_notes(seen))


def per_layer(seen: Seen, part: str, name: str) -> dict[str, float]:
    """Layer to a number, where there is one."""
    found = {layer: seen.mean(part, layer, name) for layer in seen.layers}
    return {layer: value for layer, value in found.items() if value is not None}


def told(values: Mapping[str, float], form: str = ".0%") -> str:
    """Layers with their numbers."""
    return ", ".join(f"{value:{form}} in {layer}" for layer, value in values.items())


def slot_notes(seen: Seen) -> Iterator[str]:
    """Section 5.1."""
    hits, four = per_layer(seen, "slots", "hits"), per_layer(seen, "slots", "hits_of_four")
    verdict = "holds" if min(hits.values()) > MAJORITY else "in part" if max(hits.values()) > MAJORITY else "not here"
    yield (
        f'The paper: "the majority of retrieved slots contain the correct target tokens": {verdict}. By the last write '
        f"{told(hits)}; by one of the last {WRITERS} {told(four)}. {seen.exact:.0%} of the answers are right."
    )
    same, chance = per_layer(seen, "slots", "same_query"), per_layer(seen, "slots", "same_by_chance")
    total = sum(run.extra["layers"][layer]["misses"] for run in seen.needled for layer in seen.layers)
    verdict = "holds" if total and min(same.values()) > MAJORITY else "does not hold here" if total else "not decided"
    yield (
        f"The paper: incorrect retrievals share the query token: {verdict}. Written by the same token as the one that "
        f"asks: {told(same)} of the {total} slots that miss; of all tokens of the stream that were read "
        f"{told(chance)} are the same as the one that asks."
    )
    mixed = per_layer(seen, "slots", "mixed")
    answered = sum(run.extra["layers"][seen.layers[0]]["answered"] for run in seen.needled)
    verdict = "not decided" if not answered else "holds" if max(mixed.values()) > MAJORITY else "does not hold here"
    yield (
        f"The paper: answers are right in spite of slots that miss: {verdict}. Of the right answers ({answered}) with "
        f"at least one miss: {told(mixed)}."
    )


def gate_notes(seen: Seen) -> Iterator[str]:
    """Section 5.2."""
    low, high = seen.layers[0], seen.layers[-1]
    means, deviations = per_layer(seen, "gates", "mean"), per_layer(seen, "gates", "deviation")
    if low != high:
        selective = means[low] - means[high] > MARGIN and deviations[high] - deviations[low] > MARGIN
        verdict = "holds" if selective and means[low] > MAJORITY else "does not hold here"
        yield (
            f"The paper: the lower memory keeps its gate open on all tokens, the higher one is selective (mean above "
            f"{MAJORITY:g}, means and deviations apart by {MARGIN:g}): {verdict}. Mean gate {told(means, '.2f')}; "
            f"standard deviation {told(deviations, '.2f')}."
        )
    correlation = per_layer(seen, "gates", "correlation")
    rare, common = per_layer(seen, "gates", "rare"), per_layer(seen, "gates", "common")
    opens = correlation[high] > TIED and rare.get(high, 0.0) - common.get(high, 1.0) > MARGIN
    yield (
        f"The paper: in the higher memory gates spike on rare names: {'holds' if opens else 'does not hold here'} for "
        f"rare words. Rank correlation of gate and rarity {told(correlation, '+.2f')}; on the rarest {RARE:.0%} "
        f"{told(rare, '.2f')}, on the others {told(common, '.2f')}."
    )
    first, again = per_layer(seen, "gates", "rare_first"), per_layer(seen, "gates", "rare_again")
    if first and again:
        yield (
            f"Only a second mention can be remembered: on rare words gates are {told(first, '.2f')} at the first "
            f"mention and {told(again, '.2f')} at later ones."
        )
