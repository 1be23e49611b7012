"""Tables, figures and verdicts of the recipe `fwpkm-ablation`."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .fwpkm_ablation import DOT, NONE, PARTS, RULES, WHOLE
from .language_output import DIVERGED, curve_figure, finite_runs, seeds_note
from .language_runs import LanguageRun

LOOK_AHEAD = "without look-ahead"
CLEAR = 0.01
"""Nats per token by which two models must differ to be told apart."""
COLLAPSED = 0.5
"""Share of the whole memory's coverage below which a memory counts as collapsed."""


@dataclass(frozen=True)
class Seen:
    """What was trained.

    Attributes:
        groups: variant to its runs, in the order of the variants.
        digits: of a needle's number; reads: readings that were asked after.
    """

    groups: Mapping[str, Sequence[LanguageRun]]
    digits: int
    reads: int

    def loss(self, variant: str, frozen: bool = False) -> float:
        """Nats per token on held-out text, mean over the seeds; NaN where one diverged."""
        found = [run.extra["frozen"] if frozen else run.extra["text"]["loss"] for run in self.groups[variant]]
        return math.nan if any(run.diverged for run in self.groups[variant]) else statistics.fmean(found)

    def slots(self, variant: str, name: str) -> float | None:
        """A statistic of the slots, mean over layers and seeds; None where there is none."""
        found = [
            layer[name]
            for run in self.groups[variant]
            for layer in run.extra["text"]["slots"].values()
            if name in layer
        ]
        return statistics.fmean(found) if found else None

    def needles(self, variant: str) -> list[float]:
        """Share of exact answers by the number of readings, mean over the seeds."""
        found = [run.extra["needles"] for run in self.groups[variant]]
        shares = ([hits / each["asked"] for hits in each["exact"]] for each in found)
        return [statistics.fmean(column) for column in zip(*shares, strict=True)]

    @property
    def compared(self) -> list[str]:
        """Variants of the memory, the whole one left out."""
        return [name for name in self.groups if name not in (NONE, WHOLE)]


# Tables ----------------------------------------------------------------------------------------------------------


def tables(seen: Seen) -> dict[str, Any]:
    """Name to table."""
    return {"What a part is worth": main_table(seen), "Needles by readings": needle_table(seen)}


def main_table(seen: Seen) -> Any:
    """A row for each variant: text, gates, slots."""
    from ..inspect.tables import Table

    rows = []
    for name, runs in seen.groups.items():
        memory = name != NONE
        rows.append(
            (
                name,
                perplexity(seen.loss(name)),
                difference(seen, name),
                perplexity(seen.loss(name, frozen=True)) if memory else "-",
                *(number(seen.slots(name, what), digits) for what, digits in (("gate", 2), ("coverage", 3))),
                *(number(seen.slots(name, what), 2) for what in ("collisions", "kl_uniform")),
                f"{seen.needles(name)[-1]:.0%}",
                f"{1e3 * statistics.median(run.step_cpu_seconds for run in runs):.0f} ms",
            )
        )
    header = (
        "memory",
        "perplexity",
        f"nats above {WHOLE}",
        "never written",
        "mean gate",
        "coverage",
        "collisions",
        "KL to even use",
        f"needles, {seen.reads} reads",
        "CPU, a step",
    )
    note = (
        f"Perplexity on held-out text read in order, the memory carried on; 'never written': the same with the memory "
        f"frozen as it is made. Coverage: share of the slots that were read; collisions: share of the reads that hit a "
        f"slot read more than once. {seeds_note(len(next(iter(seen.groups.values()))))}"
    ).replace("Mean ± standard deviation", "Means")
    return Table(header, tuple(rows), note)


def perplexity(loss: float) -> str:
    """As text."""
    return f"{math.exp(loss):.2f}" if math.isfinite(loss) and loss < 700 else DIVERGED


def difference(seen: Seen, name: str) -> str:
    """Nats above the whole memory."""
    if name == WHOLE or WHOLE not in seen.groups:
        return ""
    gap = seen.loss(name) - seen.loss(WHOLE)
    return f"{gap:+.4f}" if math.isfinite(gap) else DIVERGED


def number(value: float | None, digits: int) -> str:
    """As text."""
    return "-" if value is None or not math.isfinite(value) else f"{value:.{digits}f}"


def needle_table(seen: Seen) -> Any:
    """A row for each variant: exact answers after each number of readings."""
    from ..inspect.tables import Table

    rows = [(name, *(f"{share:.0%}" for share in seen.needles(name))) for name in seen.groups]
    header = ("memory", *(f"{n} readings" if n > 1 else "1 reading" for n in range(1, seen.reads + 1)))
    runs = next(iter(seen.groups.values()))
    note = (
        f"Share of right answers; {runs[0].extra['needles']['asked']} questions a seed. What waits is written before "
        f"each question. Chance: {10.0**-seen.digits:.2g}."
    )
    return Table(header, tuple(rows), note)


# Figures ---------------------------------------------------------------------------------------------------------


def figures(seen: Seen) -> dict[str, bytes]:
    """File name to PNG."""
    from ..inspect.memory_figures import gate_histograms

    found = {
        "fwpkm-ablation.png": bars(seen),
        "fwpkm-ablation-curves.png": curve_figure({"": finite_runs(seen.groups)}, "Needle documents, same windows"),
    }
    gates = gate_shares(seen)
    if gates:
        found["fwpkm-ablation-gates.png"] = gate_histograms(gates, title="Gates on held-out text")
    return found


def gate_shares(seen: Seen) -> dict[str, dict[str, Any]]:
    """Variant to layer to how often its gate was in each part of [0, 1], of the first seed."""
    import torch

    from ..inspect.gates import layer_name

    found: dict[str, dict[str, Any]] = {}
    for name, runs in seen.groups.items():
        for point, counts in runs[0].extra["text"]["gates"].items():
            own = torch.tensor(counts, dtype=torch.float64)
            found.setdefault(name, {})[layer_name(point)] = own / own.sum().clamp(min=1)
    return found


def bars(seen: Seen) -> bytes:
    """A row for each variant: nats above the whole memory, coverage, and needles stacked by readings."""
    from matplotlib.figure import Figure

    from ..inspect.figures import COLOURS, png

    names = list(seen.groups)
    figure = Figure(figsize=(10.5, 1.6 + 0.3 * len(names)), dpi=120, layout="constrained")
    left, middle, right = figure.subplots(1, 3, sharey=True)
    base = seen.loss(WHOLE) if WHOLE in seen.groups else 0.0
    places = range(len(names))
    gaps = [seen.loss(name) - base for name in names]
    left.barh(places, [gap if math.isfinite(gap) else 0.0 for gap in gaps], color=COLOURS[0])
    left.axvline(0, color="#333333", linewidth=0.8)
    left.set_xlabel(f"nats/token above {WHOLE}" if WHOLE in seen.groups else "nats/token")
    middle.barh(places, [seen.slots(name, "coverage") or 0.0 for name in names], color=COLOURS[2])
    middle.set_xlabel("share of the slots that were read")
    for read in reversed(range(seen.reads)):
        shade = 0.35 + 0.65 * (read + 1) / seen.reads
        values = [seen.needles(name)[read] for name in names]
        right.barh(places, values, color=COLOURS[1], alpha=shade, height=0.8 - 0.15 * read, label=f"{read + 1}")
    right.set(xlabel="needles answered exactly", xlim=(0, 1))
    right.legend(title="readings", frameon=False, fontsize=7, title_fontsize=7)
    left.set_yticks(places, names, fontsize=8)
    left.invert_yaxis()
    for axes in (left, middle, right):
        axes.grid(axis="x", color="#dddddd", linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle("One part of the memory left out at a time", x=0.02, ha="left", fontsize=11)
    return png(figure)


# Verdicts --------------------------------------------------------------------------------------------------------


def notes(seen: Seen) -> tuple[str, ...]:
    """The paper's claims beside what was measured."""
    if WHOLE not in seen.groups:
        return ("The whole memory was not trained, so that nothing can be compared with it.",)
    return (*worth(seen), *look_ahead(seen), *slight(seen), *utility(seen), *dot_product(seen), *rules(seen))


def worth(seen: Seen) -> Iterator[str]:
    """Whether the memory helps at all."""
    written = seen.loss(WHOLE, frozen=True) - seen.loss(WHOLE)
    parts = [f"writing lowers the loss by {written:.4f} nats/token against the same memory never written"]
    if NONE in seen.groups:
        gap = seen.loss(NONE) - seen.loss(WHOLE)
        parts.append(f"the model without a memory loses {gap:+.4f} nats/token more")
        last, none = seen.needles(WHOLE)[-1], seen.needles(NONE)[-1]
        parts.append(f"needles after {seen.reads} readings {last:.0%} with it, {none:.0%} without")
    yield f"What the memory is worth: {'; '.join(parts)}."


def look_ahead(seen: Seen) -> Iterator[str]:
    """Which part is worth most."""
    present = [name for name in PARTS if name in seen.groups]
    if LOOK_AHEAD not in present or len(present) < 2:
        return
    gaps = {name: seen.loss(name) - seen.loss(WHOLE) for name in present}
    worst = max(gaps, key=lambda name: gaps[name] if math.isfinite(gaps[name]) else math.inf)
    fewest = min(present, key=lambda name: seen.needles(name)[-1])
    verdict = "holds" if worst == LOOK_AHEAD else "does not hold here"
    told = perplexity_gap(gaps[worst])
    yield (
        f'The paper: "removing lookahead values yields the most significant harm": {verdict} for perplexity (most by '
        f"leaving out {worst.removeprefix('without ')}, {told}; look-ahead {perplexity_gap(gaps[LOOK_AHEAD])}); fewest "
        f"needles are found {fewest} ({seen.needles(fewest)[-1]:.0%})."
    )


def perplexity_gap(gap: float) -> str:
    """As text."""
    return f"{gap:+.4f} nats/token" if math.isfinite(gap) else DIVERGED


def slight(seen: Seen) -> Iterator[str]:
    """Which variants have a lower loss, and which a higher one."""
    gaps = {name: seen.loss(name) - seen.loss(WHOLE) for name in seen.compared}
    lower = [name for name, gap in gaps.items() if gap < -CLEAR]
    higher = [name for name, gap in gaps.items() if gap > CLEAR]
    level = [name for name, gap in gaps.items() if abs(gap) <= CLEAR]
    groups = (("lower", lower), ("level", level), ("higher", higher))
    told = "; ".join(f"{word}: {', '.join(names) or 'none'}" for word, names in groups)
    yield f"Loss on text against the whole memory (level within {CLEAR:g} nats/token): {told}."


def utility(seen: Seen) -> Iterator[str]:
    """Whether fewer slots in use go with fewer needles."""
    whole = seen.slots(WHOLE, "coverage")
    if not whole:
        return
    shares = {name: (seen.slots(name, "coverage") or 0.0) / whole for name in seen.compared}
    fewer = [name for name, share in shares.items() if share < 1]
    last = seen.needles(WHOLE)[-1]
    worse = [name for name in fewer if seen.needles(name)[-1] < last]
    told = ", ".join(f"{name} {shares[name]:.2f} times" for name in fewer) or "none"
    yield (
        f"Variants that use fewer slots than the whole memory ({whole:.3f} of them): {told}. Of these {len(worse)} of "
        f"{len(fewer)} also find fewer needles (the whole memory: {last:.0%})."
    )


def dot_product(seen: Seen) -> Iterator[str]:
    """Collapse and divergence."""
    if DOT not in seen.groups:
        return
    runs = seen.groups[DOT]
    diverged = sum(run.diverged for run in runs)
    own, whole = seen.slots(DOT, "coverage"), seen.slots(WHOLE, "coverage")
    collapsed = own is not None and whole is not None and own < COLLAPSED * whole
    verdict = "holds" if diverged or collapsed else "not seen at this size"
    yield (
        f'The paper: dot-product scores often result in "memory collapsing and loss divergence": {verdict}. {diverged} '
        f"of {len(runs)} diverged, coverage {number(own, 3)} against {number(whole, 3)}, loss "
        f"{perplexity_gap(seen.loss(DOT) - seen.loss(WHOLE))} from the whole memory."
    )


def rules(seen: Seen) -> Iterator[str]:
    """The rules of writing."""
    present = [name for name in RULES if name in seen.groups]
    if not present:
        return
    told = [f"normalized (the whole memory) {perplexity(seen.loss(WHOLE))} and {seen.needles(WHOLE)[-1]:.0%}"]
    told += [
        f"{name.removeprefix('rule: ')} {perplexity(seen.loss(name))} and {seen.needles(name)[-1]:.0%}"
        for name in present
    ]
    yield f"Rules of writing, perplexity and needles after {seen.reads} readings: {'; '.join(told)}."
