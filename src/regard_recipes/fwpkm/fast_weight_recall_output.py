"""Tables, figures and verdicts of the recipe `fast-weight-recall`."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from regard.tasks import CrossDocumentRecall

from ..lib.language_output import seeds_note
from .fast_weight_recall import DETACHED, NORMALIZED, PAPER, REFERENCE
from .fast_weight_recall_model import WRITERS, RecallRun

CHANCE, ONCE, REMAPPED, SINGLE = 0.03, 0.99, 0.95, 0.95
"""The bars: below the first on a first reading; at least the others on the second reading of the first document, of the
second, and where a text is read once in smaller chunks."""
HITS = (0.75, 0.95)
"""Least shares of retrieved slots that hold the right value, by the last write and by the last four."""
WIDER = 2.0
"""Times the slots that queries must use with the entropy, of those that they use without."""
EXPECTED = (NORMALIZED, REFERENCE)
"""The rules of which the bars are demanded; the others are reported."""


@dataclass(frozen=True)
class Seen:
    """What was measured.

    Attributes:
        rules, small: models with room enough, and with too few slots.
        collapse: of every seed, the records of `measure_collapse`.
        task: as it was measured.
    """

    rules: Sequence[RecallRun]
    small: Sequence[RecallRun]
    collapse: Sequence[Sequence[Mapping[str, float]]]
    task: CrossDocumentRecall

    @staticmethod
    def by_rule(runs: Sequence[RecallRun]) -> dict[str, list[RecallRun]]:
        """Rule to its runs, in the order in which they come."""
        return {rule: [run for run in runs if run.rule == rule] for rule in dict.fromkeys(run.rule for run in runs)}

    def coverage(self) -> dict[float, dict[float, list[float]]]:
        """Spread to weight to the coverages of the seeds."""
        found: dict[float, dict[float, list[float]]] = {}
        for record in (record for records in self.collapse for record in records):
            found.setdefault(record["spread"], {}).setdefault(record["weight"], []).append(record["coverage"])
        return found


def cell(runs: Sequence[RecallRun], document: int, read: int) -> float:
    """Mean accuracy over the seeds; documents and readings are counted from 0."""
    return statistics.fmean(run.accuracy[document][read] for run in runs)


# Tables ----------------------------------------------------------------------------------------------------------


def tables(seen: Seen) -> dict[str, Any]:
    """Name to table."""
    found = {"Recall by document and reading": recall_table(seen, seen.rules)}
    if seen.small:
        found["Recall with too few slots"] = recall_table(seen, seen.small)
    if any(run.single for run in seen.rules):
        found["One reading, smaller chunks"] = single_table(seen)
    found["Clustered queries: share of the slots in use"] = collapse_table(seen)
    return found


def recall_table(seen: Seen, runs: Sequence[RecallRun]) -> Any:
    """A row for each rule, a column for each document with the accuracies of its readings."""
    from regard.inspect.tables import Table

    rows = []
    for rule, own in Seen.by_rule(runs).items():
        cells = [
            " / ".join(f"{cell(own, document, read):.3f}" for read in range(seen.task.reads))
            for document in range(seen.task.documents)
        ]
        hits = [run.hits for run in own if run.hits is not None]
        shown = " / ".join(f"{statistics.fmean(each):.2f}" for each in zip(*hits, strict=True)) if hits else "-"
        rows.append((rule, *cells, shown, f"{statistics.fmean(run.seconds for run in own):.0f} s"))
    header = (
        "rule of writing",
        *(f"document {i + 1}, reads 1-{seen.task.reads}" for i in range(seen.task.documents)),
        f"hits, last / {WRITERS} last",
        "training",
    )
    one = runs[0]
    note = (
        f"Share of right values; chance is {seen.task.chance:.3f}. {one.slots} slots, {2 * seen.task.pairs} pairs a "
        f"reading to write, {one.parameters:,} learned numbers. {seeds_note(len(Seen.by_rule(runs)[one.rule]))} Hits: "
        f"retrieved slots that hold the right value on the second reading of document 1."
    ).replace("Mean ± standard deviation", "Mean")
    return Table(header, tuple(rows), note)


def single_table(seen: Seen) -> Any:
    """A row for each rule, a column for each chunk."""
    from regard.inspect.tables import Table

    chunks = list(dict.fromkeys(chunk for run in seen.rules for chunk in run.single))
    rows = [
        (rule, *(f"{statistics.fmean(run.single[chunk] for run in own):.3f}" for chunk in chunks))
        for rule, own in Seen.by_rule(seen.rules).items()
        if own[0].single
    ]
    note = "A document followed by the same document as questions, read once: share of right answers. A chunk of the whole text is written after the questions."  # noqa: E501
    return Table(("rule of writing", *(f"chunk {chunk}" for chunk in chunks)), tuple(rows), note)


def collapse_table(seen: Seen) -> Any:
    """A row for each spread of the cluster, a column for each weight of the entropy."""
    from regard.inspect.tables import Table

    found = seen.coverage()
    weights = list(next(iter(found.values())))
    rows = []
    for spread, by_weight in found.items():
        means = {weight: statistics.fmean(values) for weight, values in by_weight.items()}
        rows.append((f"{spread:g}", *(f"{means[weight]:.3f}{_times(means, weight)}" for weight in weights)))
    header = ("spread of the queries", *(f"entropy weight {weight:g}" for weight in weights))
    note = "All queries are one point moved by noise of the spread times its size. In parentheses: times the slots without the entropy."  # noqa: E501
    return Table(header, tuple(rows), note)


def _times(means: Mapping[float, float], weight: float) -> str:
    return f" ({means[weight] / means[0.0]:.1f}x)" if weight and means.get(0.0) else ""


# Figures ---------------------------------------------------------------------------------------------------------


def figures(seen: Seen) -> dict[str, bytes]:
    """File name to PNG."""
    return {"fast-weight-recall.png": recall_figure(seen), "fast-weight-recall-collapse.png": collapse_figure(seen)}


def recall_figure(seen: Seen) -> bytes:
    """Accuracy by reading: a column for each document, a line for each rule, too few slots below."""
    from matplotlib.figure import Figure

    from regard.inspect.figures import line_style, png

    rows = [("room enough", seen.rules), *([("too few slots", seen.small)] if seen.small else [])]
    figure = Figure(figsize=(3.0 * seen.task.documents + 1.0, 2.8 * len(rows) + 0.6), dpi=120, layout="constrained")
    grid: Any = figure.subplots(len(rows), seen.task.documents, squeeze=False, sharex=True, sharey=True)
    reads = range(1, seen.task.reads + 1)
    for row, (kind, runs) in enumerate(rows):
        for document in range(seen.task.documents):
            axes = grid[row, document]
            for place, (rule, own) in enumerate(Seen.by_rule(runs).items()):
                colour, style = line_style(place)
                each = [run.accuracy[document] for run in own]
                mean = [statistics.fmean(column) for column in zip(*each, strict=True)]
                low, high = ([end(column) for column in zip(*each, strict=True)] for end in (min, max))
                axes.plot(reads, mean, color=colour, linestyle=style, marker="o", markersize=4, label=rule)
                axes.fill_between(reads, low, high, color=colour, alpha=0.15, linewidth=0)
            axes.axhline(seen.task.chance, color="#999999", linestyle=":", linewidth=1)
            axes.set(ylim=(-0.03, 1.03), xticks=list(reads))
            axes.set_title(f"document {document + 1}, {runs[0].slots} slots", fontsize=9)
            axes.grid(color="#dddddd", linewidth=0.6)
            axes.spines[["top", "right"]].set_visible(False)
        grid[row, 0].set_ylabel(f"{kind}\nshare of right values", fontsize=9)
    for axes in grid[-1]:
        axes.set_xlabel("reading")
    grid[0, -1].legend(frameon=False, fontsize=8, loc="lower right")
    figure.suptitle(
        "Recall; later documents give the same keys other values (dotted: chance)", x=0.02, ha="left", fontsize=11
    )
    return png(figure)


def collapse_figure(seen: Seen) -> bytes:
    """Share of the slots that clustered queries use, by spread, a line for each weight of the entropy."""
    from matplotlib.figure import Figure

    from regard.inspect.figures import line_style, png

    found = seen.coverage()
    figure = Figure(figsize=(5.6, 3.8), dpi=120, layout="constrained")
    axes = figure.subplots()
    for place, weight in enumerate(next(iter(found.values()))):
        colour, style = line_style(place)
        for seed in range(len(seen.collapse)):
            axes.plot(list(found), [found[spread][weight][seed] for spread in found], ".", color=colour)
        mean = [statistics.fmean(found[spread][weight]) for spread in found]
        axes.plot(list(found), mean, color=colour, linestyle=style, label=f"weight {weight:g}")
    axes.set(xlabel="spread of the queries around one point", ylabel="share of the slots in use", ylim=(0, 1.03))
    axes.set_title("Slots that clustered queries come to use", fontsize=10, loc="left")
    axes.grid(color="#dddddd", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(title="entropy of the addresses", frameon=False, fontsize=8, title_fontsize=8)
    return png(figure)


# Verdicts --------------------------------------------------------------------------------------------------------


def notes(seen: Seen) -> tuple[str, ...]:
    """What was expected beside what was measured."""
    rules = Seen.by_rule(seen.rules)
    found = [first_reading(seen), *rule_notes(rules), *reported(rules)]
    if seen.small:
        found.append(stress_note(seen))
    found += [*single_notes(rules), *hit_notes(rules), collapse_note(seen)]
    return tuple(found)


def first_reading(seen: Seen) -> str:
    """Nothing can be known on a first reading."""
    highest = max(document[0] for run in seen.rules for document in run.accuracy)
    verdict = "holds" if highest < CHANCE else "does not hold"
    return (
        f"Chance on every first reading (below {CHANCE:.0%}): {verdict}, at most {highest:.1%} in any document, rule "
        f"and seed."
    )


def rule_notes(rules: Mapping[str, Sequence[RecallRun]]) -> Iterator[str]:
    """Whether the rules that should rewrite in one step do."""
    for rule in (rule for rule in EXPECTED if rule in rules):
        runs = rules[rule]
        good = [run.accuracy[0][1] >= ONCE and all(doc[1] >= REMAPPED for doc in run.accuracy[1:2]) for run in runs]
        first = min(run.accuracy[0][1] for run in runs)
        after = min((doc[1] for run in runs for doc in run.accuracy[1:2]), default=None)
        remapped = "" if after is None else f", {after:.3f} or more after remapping (at least {REMAPPED} expected)"
        yield (
            f"One-step rewriting with the rule {rule!r}: {'holds' if all(good) else 'does not hold'}, in {sum(good)} "
            f"of {len(good)} seeds. The second reading of document 1 gives {first:.3f} or more (at least {ONCE} "
            f"expected){remapped}."
        )


def reported(rules: Mapping[str, Sequence[RecallRun]]) -> Iterator[str]:
    """The other rules."""
    if PAPER in rules:
        runs = rules[PAPER]
        steps = [cell(runs, min(1, len(runs[0].accuracy) - 1), read) for read in range(len(runs[0].accuracy[0]))]
        yield (
            f"The paper's equation 35 as written moves a slot by its weight alone: {cell(runs, 0, 1):.3f} on the "
            f"second reading of document 1, and after remapping {', '.join(f'{x:.3f}' for x in steps)} on readings 1 "
            f"to {len(steps)}."
        )
    if DETACHED in rules and NORMALIZED in rules:
        pairs = [(cell(rules[rule], 0, 1), cell(rules[rule], -1, 1)) for rule in (NORMALIZED, DETACHED)]
        yield (
            f"Without gradients through the writes the second readings of the first and the last document give "
            f"{pairs[1][0]:.3f} and {pairs[1][1]:.3f}, with them {pairs[0][0]:.3f} and {pairs[0][1]:.3f}."
        )


def stress_note(seen: Seen) -> str:
    """What too few slots cost."""
    parts = []
    for rule, runs in Seen.by_rule(seen.small).items():
        last = len(runs[0].accuracy[0]) - 1
        docs = range(min(2, len(runs[0].accuracy)))
        two, end = (", ".join(f"{cell(runs, d, read):.3f}" for d in docs) for read in (1, last))
        parts.append(f"{rule} {two}, after {last + 1} readings {end}")
    return (
        f"With {seen.small[0].slots} slots for {2 * seen.task.pairs} pairs of a reading, the second readings of "
        f"documents 1 and 2: {'; '.join(parts)}."
    )


def single_notes(rules: Mapping[str, Sequence[RecallRun]]) -> Iterator[str]:
    """One reading, with chunks that end before the questions and with one that does not."""
    for rule, runs in rules.items():
        if not runs[0].single:
            continue
        whole, *smaller = runs[0].single
        most = max(run.single[whole] for run in runs)
        least = min(run.single[chunk] for run in runs for chunk in smaller)
        good = most < CHANCE and least >= SINGLE
        leap = ": the leap from the first reading to the second is one of the protocol" if good else ""
        yield (
            f"One reading is enough where writes come before questions ({rule}): "
            f"{'holds' if good else 'does not hold'}. With the whole text as a chunk ({whole} tokens) {most:.1%} at "
            f"most, with chunks of {', '.join(map(str, smaller))} {least:.1%} or more (below {CHANCE:.0%} and at least "
            f"{SINGLE:.0%} expected){leap}."
        )


def hit_notes(rules: Mapping[str, Sequence[RecallRun]]) -> Iterator[str]:
    """Who wrote the slots that are read."""
    for rule, runs in rules.items():
        if runs[0].hits is None:
            continue
        least = [min(each) for each in zip(*(run.hits for run in runs if run.hits is not None), strict=True)]
        verdict = "holds" if all(one >= bar for one, bar in zip(least, HITS, strict=True)) else "does not hold"
        yield (
            f"Retrieved slots hold what was asked for ({rule}): {verdict}. On the second reading the last write of "
            f"{least[0]:.1%} of the retrieved slots or more was the right value (at least {HITS[0]:.0%} expected), one "
            f"of the last {WRITERS} of {least[1]:.1%} (at least {HITS[1]:.0%})."
        )


def collapse_note(seen: Seen) -> str:
    """Whether the entropy spreads clustered queries over more slots."""
    parts, wider, thrown = [], False, []
    for spread, by_weight in seen.coverage().items():
        means = {weight: statistics.fmean(values) for weight, values in by_weight.items()}
        times = {weight: mean / means[0.0] if means[0.0] else 0.0 for weight, mean in means.items() if weight}
        wider |= max(times.values()) >= WIDER
        thrown += [weight for weight, each in times.items() if each < 1]
        told = ", ".join(f"{each:.1f} times with weight {weight:g}" for weight, each in times.items())
        parts.append(f"spread {spread:g}: {told}")
    fewer = f" Weights with which fewer are used at some spread: {', '.join(f'{w:g}' for w in sorted(set(thrown)))}."
    return (
        f"The entropy of the addresses keeps clustered queries from few slots ({WIDER:g} times the slots without it, "
        f"at some spread): {'holds' if wider else 'does not hold'}. {'; '.join(parts)}.{fewer if thrown else ''}"
    )
