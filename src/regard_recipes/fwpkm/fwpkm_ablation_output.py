"""Tables, figures and verdicts of the recipe `fwpkm-ablation`."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from regard.tasks.needle import wilson

from ..lib.language_output import DIVERGED, Gap, curve_figure, finite_runs, seeds_note
from ..lib.language_runs import LanguageRun
from .fwpkm_ablation import DOT, NONE, PARTS, RULES, WHOLE

LOOK_AHEAD = "without look-ahead"
CLEAR = 0.01
"""Nats per token by which two models of one seed must differ to be told apart; with several seeds also beyond the noise
of their differences."""
COLLAPSED = 0.5
"""Share of the whole memory's coverage below which a memory counts as collapsed."""


@dataclass(frozen=True)
class Seen:
    """What was trained.

    Attributes:
        groups, needled: variant to its runs on text, and on needles; in the order of the variants.
        digits: of a needle's number; reads: readings that were asked after.
    """

    groups: Mapping[str, Sequence[LanguageRun]]
    needled: Mapping[str, Sequence[LanguageRun]]
    digits: int
    reads: int

    def loss(self, variant: str, frozen: bool = False) -> float:
        """Nats per token on held-out text, mean over the seeds; NaN where one diverged."""
        runs = self.groups[variant]
        found = [run.extra["frozen"] if frozen else run.extra["text"]["loss"] for run in runs]
        return math.nan if any(run.diverged for run in runs) else statistics.fmean(found)

    def gap(self, variant: str) -> Gap:
        """Nats per token above the whole memory, seed by seed; NaN where one diverged."""
        own, whole = (
            {run.seed: math.nan if run.diverged else run.extra["text"]["loss"] for run in self.groups[name]}
            for name in (variant, WHOLE)
        )
        return Gap(tuple(own[seed] - whole[seed] for seed in own if seed in whole))

    def slots(self, variant: str, name: str) -> float | None:
        """A statistic of the slots, mean over layers and seeds; None where there is none."""
        found = [
            layer[name]
            for run in self.groups[variant]
            for layer in run.extra["text"]["slots"].values()
            if name in layer
        ]
        return statistics.fmean(found) if found else None

    def answers(self, variant: str, reads: int) -> tuple[int, int]:
        """(right answers, questions) after so many readings, all seeds together."""
        found = [run.extra for run in self.needled[variant]]
        return sum(each["exact"][reads - 1] for each in found), sum(each["asked"] for each in found)

    def needles(self, variant: str) -> list[float]:
        """Share of right answers by the number of readings, all seeds together."""
        found = (self.answers(variant, reads) for reads in range(1, self.reads + 1))
        return [hits / asked for hits, asked in found]

    def finds_fewer(self, variant: str) -> bool:
        """Whether it has fewer right answers than the whole memory after all readings, the 95 % intervals apart."""
        return wilson(*self.answers(variant, self.reads))[1] < wilson(*self.answers(WHOLE, self.reads))[0]

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
    from regard.inspect.tables import Table

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
    from regard.inspect.tables import Table

    rows = [(name, *(f"{share:.0%}" for share in seen.needles(name))) for name in seen.groups]
    header = ("memory", *(f"{n} readings" if n > 1 else "1 reading" for n in range(1, seen.reads + 1)))
    runs = next(iter(seen.needled.values()))
    note = (
        f"Share of right answers; {runs[0].extra['asked']} questions a seed. What waits is written before "
        f"each question. Chance: {10.0**-seen.digits:.2g}."
    )
    return Table(header, tuple(rows), note)


# Figures ---------------------------------------------------------------------------------------------------------


def figures(seen: Seen) -> dict[str, bytes]:
    """File name to PNG."""
    from regard.inspect.memory_figures import gate_histograms

    found = {
        "fwpkm-ablation.png": bars(seen),
        "fwpkm-ablation-curves.png": curve_figure({"text": finite_runs(seen.groups)}, "Same windows for all"),
    }
    gates = gate_shares(seen)
    if gates:
        found["fwpkm-ablation-gates.png"] = gate_histograms(gates, title="Gates on held-out text")
    return found


def gate_shares(seen: Seen) -> dict[str, dict[str, Any]]:
    """Variant to layer to how often its gate was in each part of [0, 1], of the first seed."""
    import torch

    from regard.inspect.gates import layer_name

    found: dict[str, dict[str, Any]] = {}
    for name, runs in seen.groups.items():
        for point, counts in runs[0].extra["text"]["gates"].items():
            own = torch.tensor(counts, dtype=torch.float64)
            found.setdefault(name, {})[layer_name(point)] = own / own.sum().clamp(min=1)
    return found


def bars(seen: Seen) -> bytes:
    """A row for each variant: nats above the whole memory, coverage, and a bar of needles for every reading."""
    from matplotlib.figure import Figure

    from regard.inspect.figures import COLOURS, png

    names = list(seen.groups)
    figure = Figure(figsize=(10.5, 1.8 + 0.34 * len(names)), dpi=120, layout="constrained")
    left, middle, right = figure.subplots(1, 3, sharey=True)
    base = seen.loss(WHOLE) if WHOLE in seen.groups else 0.0
    places = range(len(names))
    gaps = [seen.loss(name) - base for name in names]
    left.barh(places, [gap if math.isfinite(gap) else 0.0 for gap in gaps], color=COLOURS[0])
    left.axvline(0, color="#333333", linewidth=0.8)
    left.set_xlabel(f"nats/token above {WHOLE}" if WHOLE in seen.groups else "nats/token")
    middle.barh(places, [seen.slots(name, "coverage") or 0.0 for name in names], color=COLOURS[2])
    middle.set_xlabel("share of the slots that were read")
    thick = 0.8 / seen.reads
    for read in range(seen.reads):
        at = [place - 0.4 + thick * (read + 0.5) for place in places]
        values = [seen.needles(name)[read] for name in names]
        shade = 0.25 + 0.75 * (read + 1) / seen.reads
        right.barh(at, values, color=COLOURS[1], alpha=shade, height=thick, label=f"{read + 1}")
    right.set(xlabel="needles answered exactly", xlim=(0, 1.01))
    handles, labels = right.get_legend_handles_labels()
    figure.legend(handles, labels, title="after so many readings", ncols=seen.reads, frameon=False, fontsize=8,
                  title_fontsize=8, loc="outside lower right")  # fmt: skip
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


def side(gap: Gap) -> str:
    """ "lower", "level" or "higher" in loss, or that it diverged: with several seeds beyond their noise, always by more
    than `CLEAR`."""
    if not gap.finite:
        return DIVERGED
    if abs(gap.mean) <= CLEAR or (len(gap.each) > 1 and not gap.decided):
        return "level"
    return "lower" if gap.mean < 0 else "higher"


def worth(seen: Seen) -> Iterator[str]:
    """Whether the memory helps at all."""
    change = seen.loss(WHOLE) - seen.loss(WHOLE, frozen=True)
    word = "lowers" if change < -CLEAR else "raises" if change > CLEAR else "does not change"
    parts = [f"writing {word} the loss on text ({perplexity_gap(change)}) against the same memory never written"]
    if NONE in seen.groups:
        gap = seen.gap(NONE)
        parts.append(f"without a memory the loss is {side(gap)} ({perplexity_gap(gap.mean)})")
        last, none = seen.needles(WHOLE)[-1], seen.needles(NONE)[-1]
        parts.append(f"needles after {seen.reads} readings {last:.0%} with it, {none:.0%} without")
    yield f"What the memory is worth: {'; '.join(parts)}."


def look_ahead(seen: Seen) -> Iterator[str]:
    """Which part is worth most."""
    present = [name for name in PARTS if name in seen.groups]
    if LOOK_AHEAD not in present or len(present) < 2:
        return
    gaps = {name: seen.gap(name) for name in present}
    size = lambda name: gaps[name].mean if gaps[name].finite else math.inf  # noqa: E731
    worst, second = sorted(present, key=size, reverse=True)[:2]
    if side(gaps[worst]) not in ("higher", DIVERGED):
        verdict = "not decided for perplexity: no part's absence raises it clearly"
    elif worst == LOOK_AHEAD and size(worst) - size(second) > CLEAR:
        verdict = "holds for perplexity"
    elif size(LOOK_AHEAD) >= size(worst) - CLEAR:
        verdict = "not decided for perplexity: others do as much"
    else:
        verdict = "does not hold here for perplexity"
    fewest = min(present, key=lambda name: seen.needles(name)[-1])
    yield (
        f'The paper: "removing lookahead values yields the most significant harm": {verdict} (most by leaving out '
        f"{worst.removeprefix('without ')}, {perplexity_gap(gaps[worst].mean)}; look-ahead "
        f"{perplexity_gap(gaps[LOOK_AHEAD].mean)}). Fewest needles are found {fewest} ({seen.needles(fewest)[-1]:.0%}; "
        f"{LOOK_AHEAD} {seen.needles(LOOK_AHEAD)[-1]:.0%})."
    )


def perplexity_gap(gap: float) -> str:
    """As text."""
    return f"{gap:+.4f} nats/token" if math.isfinite(gap) else DIVERGED


def slight(seen: Seen) -> Iterator[str]:
    """Which variants have a lower loss, and which a higher one."""
    sides = {name: side(seen.gap(name)) for name in seen.compared}
    words = ("lower", "level", "higher", *([DIVERGED] if DIVERGED in sides.values() else []))
    told = "; ".join(f"{word}: {', '.join(n for n, own in sides.items() if own == word) or 'none'}" for word in words)
    yield f"Loss on text against the whole memory (level within {CLEAR:g} nats/token): {told}."


def utility(seen: Seen) -> Iterator[str]:
    """Whether fewer slots in use go with fewer needles."""
    whole = seen.slots(WHOLE, "coverage")
    if not whole:
        return
    shares = {name: (seen.slots(name, "coverage") or 0.0) / whole for name in seen.compared}
    fewer = [name for name, share in shares.items() if share < 1]
    worse = [name for name in fewer if seen.finds_fewer(name)]
    told = ", ".join(f"{name} {shares[name]:.2f} times" for name in fewer) or "none"
    yield (
        f"Variants that use fewer slots than the whole memory ({whole:.3f} of them): {told}. Of these {len(worse)} of "
        f"{len(fewer)} also find fewer needles (the whole memory: {seen.needles(WHOLE)[-1]:.0%}; 95% intervals apart)."
    )


def dot_product(seen: Seen) -> Iterator[str]:
    """Collapse and divergence."""
    if DOT not in seen.groups:
        return
    runs = [*seen.groups[DOT], *seen.needled[DOT]]
    diverged = sum(run.diverged for run in runs)
    own, whole = seen.slots(DOT, "coverage"), seen.slots(WHOLE, "coverage")
    collapsed = own is not None and whole is not None and own < COLLAPSED * whole
    verdict = "holds" if diverged or collapsed else "not seen at this size"
    fewer = "fewer" if seen.finds_fewer(DOT) else "not clearly fewer"
    yield (
        f'The paper: dot-product scores often result in "memory collapsing and loss divergence": {verdict}. {diverged} '
        f"of {len(runs)} diverged, coverage {number(own, 3)} against {number(whole, 3)}, loss "
        f"{perplexity_gap(seen.loss(DOT) - seen.loss(WHOLE))} from the whole memory, {fewer} needles "
        f"({seen.needles(DOT)[-1]:.0%})."
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
