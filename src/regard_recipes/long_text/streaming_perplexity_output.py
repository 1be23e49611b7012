"""Tables, figures and verdicts of the recipe `streaming-perplexity`."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from regard.inspect.gates import BINS

from ..fwpkm.memory_layouts import FULL, LACT, RESTRICTED, Row
from ..lib.language_output import DIVERGED, spread, student
from ..lib.language_runs import LanguageRun

Groups = Mapping[Row, Sequence[LanguageRun]]
KINDS = ("short", "long")
MIXED = ("PKM", "FwPKM", "PKM+FwPKM")
RULE_NAMES = {
    "new": "all new at every segment",
    "paper": "memory through everything (the paper)",
    "document": "memory through a document",
    "carried": "all states through a document",
    "frozen": "memory never written",
}
SAME = 0.01
"""Mean gates that differ by less are called level, where there is one training of each."""
COLOURED = ("new", "frozen", "document", "paper", "carried")


@dataclass(frozen=True)
class Difference:
    """How many nats per token more (above 0) or less one reading costs than another.

    Attributes:
        seeds: of each seed; documents: of each document, the mean over seeds.
    """

    seeds: tuple[float, ...]
    documents: tuple[float, ...] = ()

    @property
    def mean(self) -> float:
        return statistics.mean(self.seeds)

    @property
    def noise(self) -> float:
        """Half the 95 % interval of the mean (Student's t), over seeds, and over documents where there is one seed."""
        over = self.seeds if len(self.seeds) > 1 else self.documents
        if len(over) < 2:
            return math.inf
        return student(len(over) - 1) * statistics.stdev(over) / math.sqrt(len(over))

    @property
    def side(self) -> str:
        """ "lower" or "higher" beyond the noise, else "level"."""
        if not math.isfinite(self.mean):
            return DIVERGED
        if abs(self.mean) <= self.noise:
            return "level"
        return "lower" if self.mean < 0 else "higher"

    def less(self, other: Difference) -> Difference:
        """A difference of differences, seed by seed and document by document."""
        pairs = [zip(a, b, strict=False) for a, b in ((self.seeds, other.seeds), (self.documents, other.documents))]
        return Difference(*(tuple(a - b for a, b in pair) for pair in pairs))

    def __str__(self) -> str:
        if not math.isfinite(self.mean):
            return DIVERGED
        return f"{self.mean:+.3f}" + (f" ± {self.noise:.3f}" if math.isfinite(self.noise) else "")


def difference(groups: Groups, kind: str, one: tuple[Row, str], other: tuple[Row, str]) -> Difference | None:
    """One (row, rule) less another, on documents of a kind; None where either was not read."""
    runs = [groups.get(row, ()) for row, _ in (one, other)]
    pairs = list(zip(*runs, strict=False))
    read = [
        [run.extra.get(kind, {}).get(rule) for run, (_, rule) in zip(pair, (one, other), strict=True)] for pair in pairs
    ]
    if not read or any(each is None for pair in read for each in pair):
        return None
    by_document = [[(a - b) / n for a, b, n in zip(x["nats"], y["nats"], x["tokens"], strict=True)] for x, y in read]
    return Difference(
        tuple(x["loss"] - y["loss"] for x, y in read), tuple(map(statistics.mean, zip(*by_document, strict=True)))
    )


def paper_rule(row: Row) -> str:
    """How the paper reads a model."""
    return "paper" if row.remembers else "new"


def fair_rule(row: Row) -> str:
    """Every state of fixed size through a document, and none further."""
    return "carried" if row.recurrent else "document" if row.remembers else "new"


def gain(groups: Groups, layout: str, memory: str, kind: str, fair: bool = False) -> Difference | None:
    """A memory less none, in one layout."""
    rule = fair_rule if fair else paper_rule
    row, none = Row(layout, memory), Row(layout)
    return difference(groups, kind, (row, rule(row)), (none, rule(none)))


def layouts(groups: Groups) -> list[str]:
    """In the order of the recipe."""
    return list(dict.fromkeys(row.layout for row in groups))


def losses(groups: Groups, row: Row, kind: str, rule: str) -> list[float]:
    """Nats per token, by seed; empty where it was not read so."""
    return [run.extra[kind][rule]["loss"] for run in groups[row] if rule in run.extra.get(kind, {})]


# Tables ----------------------------------------------------------------------------------------------------------


def tables(groups: Groups) -> dict[str, Any]:
    """Perplexities, every way of reading, gates and slots."""
    found = {"Perplexity": perplexity_table(groups), "Nats per token by what is carried": rule_table(groups)}
    if any(True for _ in gates(groups)):
        found["Gates and slots"] = gate_table(groups)
    return found


def perplexity_table(groups: Groups) -> Any:
    """The paper's figure 2 as a table: by its protocol, and by the fair one."""
    from regard.inspect.tables import Table

    rows = []
    for row, runs in groups.items():
        cells = [row.name, f"{runs[0].parameters:,}"]
        for fair in (False, True):
            rule = (fair_rule if fair else paper_rule)(row)
            for kind in KINDS:
                found = losses(groups, row, kind, rule)
                difference = gain(groups, row.layout, row.memory, kind, fair)
                cells.append(spread([math.exp(min(loss, 700)) for loss in found], 3) if found else DIVERGED)
                cells.append("" if row.memory == "none" or difference is None else str(difference))
        rows.append((*cells, f"{1e3 * statistics.median(run.step_cpu_seconds for run in runs):.0f} ms"))
    parts = [f"{kind}, {rule}" for rule in ("paper", "fair") for kind in KINDS]
    header = ("model", "learned", *(name for part in parts for name in (part, "above none")), "CPU, a step")
    seeds = len(next(iter(groups.values())))
    over = "seeds" if seeds > 1 else "documents, of one training each"
    note = (
        f"Perplexity per token; above none: nats per token, with half the 95 % interval over {over}. paper: the fast "
        f"memory is carried through all documents, all else is new at every segment. fair: memory and recurrent states "
        f"are carried through a document and no further; attention sees its segment."
    )
    return Table(header, tuple(rows), note)


def rule_table(groups: Groups) -> Any:
    """Losses by every rule."""
    from regard.inspect.tables import Table

    rows = []
    for row in groups:
        cells = [spread(found, 3) if (found := losses(groups, row, kind, rule)) else "-"
                 for kind in KINDS for rule in COLOURED]  # fmt: skip
        rows.append((row.name, *cells))
    header = ("model", *(f"{kind}, {rule}" for kind in KINDS for rule in COLOURED))
    note = "; ".join(f"{name}: {told}" for name, told in RULE_NAMES.items()) + "."
    return Table(header, tuple(rows), note)


def gates(groups: Groups) -> Iterator[tuple[Row, str, str, list[int], dict[str, float]]]:
    """(row, kind, hook point, counts over seeds, numbers of the first seed) of every gate: "gate", its mean, and where
    there are slots their statistics."""
    for row, runs in groups.items():
        for kind in KINDS:
            read = [run.extra[kind]["paper"] for run in runs if "paper" in run.extra.get(kind, {})]
            for place, name in enumerate(read[0]["gates"] if read else ()):
                counts = [sum(column) for column in zip(*(each["gates"][name] for each in read), strict=True)]
                slots = list(read[0]["slots"].values())
                own = slots[place] if place < len(slots) else {}
                yield row, kind, name, counts, {**own, "gate": read[0]["means"][name]}


def gate_means(groups: Groups, row: Row, kind: str) -> list[float]:
    """The mean over the gates of a row, by seed; empty where it has none."""
    read = [run.extra[kind]["paper"]["means"] for run in groups.get(row, ()) if "paper" in run.extra.get(kind, {})]
    return [statistics.mean(means.values()) for means in read if means]


def gate_side(one: Sequence[float], other: Sequence[float]) -> str:
    """ "higher" or "lower" beyond the noise of the seeds, or by `SAME` where there is one."""
    if not all(map(math.isfinite, (*one, *other))):
        return DIVERGED
    gap = Difference(tuple(a - b for a, b in zip(one, other, strict=False)))
    if len(gap.seeds) > 1:
        return gap.side
    return "level" if abs(gap.mean) < SAME else "lower" if gap.mean < 0 else "higher"


def told_gate(means: Sequence[float]) -> str:
    """For people."""
    return f"{statistics.mean(means):.2f}" if all(map(math.isfinite, means)) else DIVERGED


def gate_table(groups: Groups) -> Any:
    """Gates in numbers, and how evenly slots are used."""
    from regard.inspect.tables import Table

    rows = []
    for row, kind, name, counts, slots in gates(groups):
        low, high = (f"{sum(part) / max(1, sum(counts)):.0%}" for part in (counts[:2], counts[-2:]))
        own = [f"{slots[key]:.1%}" if key in slots else "-" for key in ("coverage", "collisions")]
        kl = f"{slots['kl_uniform']:.2f}" if "kl_uniform" in slots else "-"
        place = name.removesuffix(".hook_gate")
        rows.append((f"{row.name}, {kind}", place, told_gate([slots["gate"]]), low, high, *own, kl))
    header = ("model", "memory", "mean gate", "below 0.2", "above 0.8", "slots read", "reads of shared slots",
              "KL to uniform, nats")  # fmt: skip
    return Table(header, tuple(rows), "By the paper's protocol. Slots: over all that one stream reads.")


# Figures ---------------------------------------------------------------------------------------------------------


def figures(groups: Groups) -> dict[str, bytes]:
    """The paper's figures 2 and 3, and losses along a document."""
    found = {
        "streaming-perplexity-losses.png": loss_figure(groups),
        "streaming-perplexity-segments.png": segment_figure(groups),
    }
    if any(True for _ in gates(groups)):
        found["streaming-perplexity-gates.png"] = gate_figure(groups)
    return found


def loss_figure(groups: Groups) -> bytes:
    """A row for every model, a dot for every way of reading."""
    from matplotlib.figure import Figure

    from regard.inspect.figures import COLOURS, png

    figure = Figure(figsize=(11, 1.8 + 0.28 * len(groups)), dpi=120, layout="constrained")
    panels: Any = figure.subplots(1, 2, sharey=True)
    for axes, kind in zip(panels, KINDS, strict=True):
        for at, rule in enumerate(COLOURED):
            points = [(loss, place) for place, row in enumerate(groups) for loss in losses(groups, row, kind, rule)]
            points = [point for point in points if math.isfinite(point[0])]
            style = {"color": COLOURS[at], "alpha": 0.85, "markersize": 5, "label": RULE_NAMES[rule]}
            axes.plot([x for x, _ in points], [y for _, y in points], "o", **style)
        axes.set(title=f"{kind} documents", xlabel="nats per token")
        axes.grid(color="#dddddd", linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_yticks(range(len(groups)), [row.name for row in groups], fontsize=8)
    panels[0].invert_yaxis()
    figure.legend(
        *panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False, fontsize=8
    )
    return png(figure)


def segment_figure(groups: Groups) -> bytes:
    """Loss by the place in a long document: what a memory adds should grow with it."""
    from matplotlib.figure import Figure

    from regard.inspect.figures import line_style, png

    names = layouts(groups)
    figure = Figure(figsize=(1 + 3.2 * len(names), 3.6), dpi=120, layout="constrained")
    panels: Any = figure.subplots(1, len(names), squeeze=False, sharey=True)[0]
    for axes, layout in zip(panels, names, strict=True):
        for place, (row, runs) in enumerate((row, runs) for row, runs in groups.items() if row.layout == layout):
            read = [run.extra["long"][fair_rule(row)]["by_segment"] for run in runs if "long" in run.extra]
            if not read or not all(map(math.isfinite, read[0])):
                continue
            mean = [statistics.mean(column) for column in zip(*read, strict=True)]
            colour, style = line_style(place)
            axes.plot(range(1, len(mean) + 1), mean, color=colour, linestyle=style, linewidth=1.2, label=row.memory)
        axes.set(title=layout, xlabel="segment of a long document")
        axes.grid(color="#dddddd", linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize=7)
    panels[0].set_ylabel("nats per token, fair")
    return png(figure)


def gate_figure(groups: Groups) -> bytes:
    """The paper's figure 3: histograms of the gates, by kind of document and layer."""
    from matplotlib.figure import Figure

    from regard.inspect.figures import COLOURS, png

    found = list(gates(groups))
    lines = list(dict.fromkeys((row, name) for row, _, name, _, _ in found))
    figure = Figure(figsize=(7.5, 0.8 + 1.15 * len(lines)), dpi=120, layout="constrained")
    grid: Any = figure.subplots(len(lines), len(KINDS), squeeze=False, sharex=True)
    for row, kind, name, counts, _ in found:
        axes = grid[lines.index((row, name)), KINDS.index(kind)]
        total = max(1, sum(counts))
        middles = [(place + 0.5) / BINS for place in range(BINS)]
        axes.bar(middles, [count / total for count in counts], width=0.9 / BINS, color=COLOURS[0])
        axes.set_title(f"{row.name}, {name.removesuffix('.hook_gate')}, {kind}", fontsize=7)
        axes.set_ylim(0, 1)
        axes.tick_params(labelsize=6)
        axes.spines[["top", "right"]].set_visible(False)
    for axes in grid[-1]:
        axes.set_xlabel("gate: share of the memory in the output", fontsize=8)
    return png(figure)


# Verdicts --------------------------------------------------------------------------------------------------------


def notes(groups: Groups) -> tuple[str, ...]:
    """The paper's findings beside what was measured."""
    found = [complementary(groups), competes(groups), restricted(groups), writing(groups), protocol(groups)]
    return tuple(note for note in (*found, baselines(groups), caveat(groups)) if note)


def told(gains: Mapping[Any, Difference]) -> str:
    return "; ".join(f"{name} {each}" for name, each in gains.items())


def complementary(groups: Groups) -> str:
    """Finding 1: fast memories for long documents, slow ones for short ones, and both together best for both."""
    parts, judged = [], {"apart": [], "both": []}  # type: ignore[var-annotated]
    for layout in ("GDN", "GDN+SWA"):
        slow, fast, both = ((row := Row(layout, memory), paper_rule(row)) for memory in MIXED)
        gains = {
            f"{memory} on {kind}": found
            for memory in MIXED
            for kind in KINDS
            if (found := gain(groups, layout, memory, kind)) is not None
        }
        pairs = {
            "FwPKM less PKM on long": difference(groups, "long", fast, slow),
            "PKM less FwPKM on short": difference(groups, "short", slow, fast),
        }
        if None in pairs.values():
            continue
        best = {
            f"both less {name} on {kind}": found
            for kind in KINDS
            for name, other in (("PKM", slow), ("FwPKM", fast))
            if (found := difference(groups, kind, both, other)) is not None
        }
        own = {name: found for name, found in (*pairs.items(), *best.items()) if found is not None}
        judged["apart"] += [own[name].side for name in pairs]
        judged["both"] += [found.side for found in best.values()]
        parts.append(
            f"{layout}: {told(gains)}; {'; '.join(f'{name} {each} ({each.side})' for name, each in own.items())}"
        )
    if not parts:
        return ""
    both_best = f'; "both together are best": {word(judged["both"], "lower")}' if judged["both"] else ""
    return (
        f'"Fast memories gain on long documents, slow ones on short ones": {word(judged["apart"], "lower")}'
        f"{both_best}. {'. '.join(parts)}."
    )


def word(sides: Sequence[str], wanted: str) -> str:
    """Whether all sides are the claimed one."""
    if DIVERGED in sides:
        return f"not decided ({DIVERGED})"
    if set(sides) == {wanted}:
        return "holds"
    if wanted in sides:
        return "holds in part"
    return "not seen here" if set(sides) == {"level"} else "does not hold here"


def competes(groups: Groups) -> str:
    """Finding 2: beside full attention a fast memory gains little and its gates close."""
    base = gain(groups, "GDN", "FwPKM", "long")
    full = {layout: found for layout in FULL if (found := gain(groups, layout, "FwPKM", "long")) is not None}
    if base is None or not full:
        return ""
    # a gain is a loss below none's, so that less of it is a higher difference
    less = [found.less(base).side for found in full.values()]
    verdict = word(less, "higher") if base.side == "lower" else f"not decided (no gain beside GDN: {base.side})"
    means = {layout: gate_means(groups, Row(layout, "FwPKM"), "long") for layout in ("GDN", *full)}
    closed = [gate_side(means[layout], means["GDN"]) for layout in full]
    shown = ", ".join(f"{layout} {told_gate(each)}" for layout, each in means.items())
    return (
        f'"FwPKM gains less beside full attention": {verdict} (long documents: GDN {base}; {told(full)}); '
        f'"its gates close there": {word(closed, "lower")} (mean gate on long documents: {shown}). {once(groups)}'
    ).rstrip()


def restricted(groups: Groups) -> str:
    """Finding 3: pSWA opens the gates."""
    parts, sides = [], []
    for layout, full in RESTRICTED.items():
        one, other = (gate_means(groups, Row(each, "FwPKM"), "long") for each in (layout, full))
        own = [gain(groups, each, "FwPKM", "long") for each in (layout, full)]
        if not one or not other:
            continue
        sides.append(gate_side(one, other))
        parts.append(f"{layout} {told_gate(one)} and {full} {told_gate(other)}, gain on long {own[0]} and {own[1]}")
    if not parts:
        return ""
    return (
        f'"Windows in training open the gates": {word(sides, "higher")} (mean gate: {"; ".join(parts)}). {once(groups)}'
    ).rstrip()


def once(groups: Groups) -> str:
    """How many trainings a comparison of gates rests on."""
    seeds = len(next(iter(groups.values())))
    return "One training of each: whether another seed would say the same is not decided." if seeds == 1 else ""


def writing(groups: Groups) -> str:
    """What is written, in one and the same model: with writing less without."""
    found = {
        row.name: each
        for row in groups
        if row.remembers and (each := difference(groups, "long", (row, "paper"), (row, "frozen"))) is not None
    }
    if not found:
        return ""
    sides = [each.side for each in found.values()]
    return (
        f"Writing against a memory that is never written, same model, long documents: {word(sides, 'lower')}: "
        f"{told(found)}."
    )


def protocol(groups: Groups) -> str:
    """How much of the gain the paper's protocol makes: its baselines forget at every segment."""
    parts = []
    for row in groups:
        if row.memory != "FwPKM":
            continue
        paper, fair = (gain(groups, row.layout, row.memory, "long", fair) for fair in (False, True))
        if paper is not None and fair is not None:
            parts.append(f"{row.layout} {paper} and {fair}")
    if not parts:
        return ""
    return (
        f"FwPKM less none on long documents, by the paper's protocol and with all states carried through a document "
        f"and no further: {'; '.join(parts)}."
    )


def baselines(groups: Groups) -> str:
    """Other fast weights."""
    found = {}
    for layout in layouts(groups):
        each = difference(groups, "long", (Row(layout, "FwPKM"), "paper"), (Row(layout, "FwMLP"), "paper"))
        if each is not None:
            found[f"{layout}, FwPKM less FwMLP"] = each
    lact = difference(groups, "long", (Row("GDN", "FwPKM"), "carried"), (Row(LACT), "carried"))
    if lact is not None:
        found["GDN | FwPKM less LaCT, all states through a document"] = lact
    return f"Other fast weights, long documents: {told(found)}." if found else ""


def caveat(groups: Groups) -> str:
    """What these models are."""
    runs = next(iter(groups.values()))
    worst = max((run.held_out[-1] for each in groups.values() for run in each), default=math.nan)
    diverged = [row.name for row, each in groups.items() if any(run.diverged for run in each)]
    lost = f" Diverged: {', '.join(diverged)}." if diverged else ""
    return (
        f"All models saw the same {runs[0].steps[-1]:,} steps and have the same learning rate, chosen for none of "
        f"them; the worst ends at {worst:.2f} nats per token of held-out text, so these are beginnings of trainings, "
        f"not their ends.{lost}"
    )
