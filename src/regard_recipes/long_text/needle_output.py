"""Tables, figures and verdicts of the recipe `needle`."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from textwrap import fill
from typing import Any

from regard.tasks import Share

from ..fwpkm.memory_layouts import FULL, LACT, RESTRICTED, Row
from ..lib.language_runs import LanguageRun
from .needle_reading import PROTOCOLS

GOOD = 0.7
"""What the paper calls a boost (finding 4), and what reads are counted up to."""
TOLD = {
    "whole": "written after the question (the paper)",
    "chunked": "the chunk of the training",
    "flushed": "written before the question",
}


@dataclass(frozen=True)
class Seen:
    """What was measured.

    Attributes:
        groups: row to its runs; context: tokens of a training window.
    """

    groups: Mapping[Row, Sequence[LanguageRun]]
    context: int

    def rereads(self, row: Row) -> bool:
        """Whether it has fast weights, which reads can change."""
        return row.remembers or row.layout == LACT

    def shares(self, row: Row, length: int, protocol: str, kept: bool = False) -> list[Share]:
        """Exact answers by the number of reads, over all seeds; empty where nothing was asked."""
        return [Share(round(hits), round(trials)) for hits, trials in self.sums(row, length, protocol, "exact", kept)]

    def sums(self, row: Row, length: int, protocol: str, which: str, kept: bool = False) -> list[tuple[float, float]]:
        """(hits, trials) of a kind of score by the number of reads, over all seeds. A model without fast weights
        answers the same by every protocol."""
        protocol = protocol if self.rereads(row) else PROTOCOLS[0]
        found = []
        for run in self.groups.get(row, ()):
            part = run.extra.get("kept" if kept else "new", {}).get(str(length), {}).get(protocol)
            if part:
                found.append([each[which] for each in part])
        return [(sum(hits for hits, _ in each), sum(many for _, many in each)) for each in zip(*found, strict=True)]

    @property
    def lengths(self) -> list[int]:
        """Of haystacks."""
        return [int(length) for length in next(iter(self.groups.values()))[0].extra["new"]]

    @property
    def memories(self) -> list[Row]:
        """Rows with fast weights."""
        return [row for row in self.groups if self.rereads(row)]


def needed(shares: Sequence[Share]) -> int | None:
    """After how many reads the share is first `GOOD` or more."""
    return next((place + 1 for place, share in enumerate(shares) if share.mean >= GOOD), None)


# Tables ----------------------------------------------------------------------------------------------------------


def tables(seen: Seen) -> dict[str, Any]:
    """Exact answers by protocol, digits and candidates, with and without a reset."""
    found = {f"Exact answers, {TOLD[protocol]}": answer_table(seen, protocol) for protocol in PROTOCOLS}
    found["Reads needed"] = needed_table(seen)
    found["Training"] = training_table(seen)
    if any("kept" in run.extra for runs in seen.groups.values() for run in runs):
        found["Memory kept from sample to sample"] = kept_table(seen)
    return found


def answer_table(seen: Seen, protocol: str) -> Any:
    """A row for every model, a column for every length and number of reads."""
    from regard.inspect.tables import Table

    reads = max((len(seen.shares(row, seen.lengths[0], protocol)) for row in seen.groups), default=1)
    rows = []
    for row in seen.groups:
        cells = []
        for length in seen.lengths:
            shares = seen.shares(row, length, protocol)
            cells += [str(shares[place]) if place < len(shares) else "-" for place in range(reads)]
        rows.append((row.name, *cells))
    header = ("model", *(f"{length}, read {place + 1}" for length in seen.lengths for place in range(reads)))
    seeds = len(next(iter(seen.groups.values())))
    several = f" and for the {seeds} seeds of each, so that it is somewhat too narrow" if seeds > 1 else ""
    note = (
        f"Share of exact answers with its 95 % interval (Wilson, over haystacks, which are the "
        f"same for all models{several}); windows of training had {seen.context} tokens. Without fast weights all reads "
        f"and protocols are the same."
    )
    return Table(header, tuple(rows), note)


def needed_table(seen: Seen) -> Any:
    """How many reads it takes, by length."""
    from regard.inspect.tables import Table

    rows = []
    for row in seen.memories:
        for protocol in PROTOCOLS:
            cells = [
                "-" if (count := needed(seen.shares(row, length, protocol))) is None else str(count)
                for length in seen.lengths
            ]
            rows.append((f"{row.name}, {protocol}", *cells))
    header = ("model and protocol", *(f"{length} tokens" for length in seen.lengths))
    return Table(header, tuple(rows), f"Reads until {GOOD:.0%} of the answers are exact; -: never among those tried.")


def training_table(seen: Seen) -> Any:
    """What was trained, and other scores at the shortest length."""
    from regard.inspect.tables import Table

    rows = []
    length = seen.lengths[0]
    for row, runs in seen.groups.items():
        last = [seen.sums(row, length, "flushed", which) for which in ("digits", "candidate")]
        cells = [f"{sums[-1][0] / max(1, sums[-1][1]):.0%}" if sums else "-" for sums in last]
        rows.append(
            (
                row.name,
                f"{runs[0].parameters:,}",
                " to ".join(f"{statistics.fmean(run.train[place] for run in runs):.2f}" for place in (0, -1)),
                *cells,
                f"{1e3 * statistics.median(run.step_cpu_seconds for run in runs):.0f} ms",
            )
        )
    header = ("model", "learned", "training loss on answers", "digits", "any candidate", "CPU, a step")
    note = (
        f"Nats per answer; chance 4.6. Digits at their place and answers that are "
        f"the number of any needle: {length} tokens, last read, {TOLD['flushed']}."
    )
    return Table(header, tuple(rows), note)


def kept_table(seen: Seen) -> Any:
    """Reset between samples or not."""
    from regard.inspect.tables import Table

    rows = []
    length = seen.lengths[0]
    for row in seen.memories:
        for protocol in PROTOCOLS:
            kept = seen.shares(row, length, protocol, kept=True)
            if kept:
                new = seen.shares(row, length, protocol)
                cells = [f"{one.mean:.0%} / {other}" for one, other in zip(new, kept, strict=True)]
                rows.append((f"{row.name}, {protocol}", *cells))
    reads = max((len(row) - 1 for row in rows), default=0)
    header = ("model and protocol", *(f"read {place + 1}" for place in range(reads)))
    return Table(header, tuple(rows), f"{length} tokens: memory new for every haystack / kept from one to the next.")


# Figures ---------------------------------------------------------------------------------------------------------


def figures(seen: Seen) -> dict[str, bytes]:
    """The paper's figure 4, by protocol, and accuracy against length."""
    found = {f"needle-{protocol}.png": bar_figure(seen, protocol) for protocol in PROTOCOLS if seen.memories}
    found["needle-lengths.png"] = length_figure(seen)
    return found


def bar_figure(seen: Seen, protocol: str) -> bytes:
    """Bars of one to n reads, with intervals: a panel for every length."""
    from matplotlib.figure import Figure

    from regard.inspect.figures import COLOURS, png

    rows = list(seen.groups)
    figure = Figure(figsize=(1 + 0.55 * len(rows) * 1.4, 2.4 * len(seen.lengths)), dpi=120, layout="constrained")
    panels: Any = figure.subplots(len(seen.lengths), 1, squeeze=False, sharex=True, sharey=True)[:, 0]
    for axes, length in zip(panels, seen.lengths, strict=True):
        for place, row in enumerate(rows):
            shares = seen.shares(row, length, protocol)
            for turn, share in enumerate(shares):
                low, high = share.interval
                x = place + 0.8 * ((turn + 0.5) / len(shares) - 0.5)
                axes.bar([x], [share.mean], width=0.8 / len(shares), color=COLOURS[turn % len(COLOURS)])
                axes.plot([x, x], [low, high], color="#333333", linewidth=0.8)
        axes.set_ylim(0, 1)
        axes.set_title(f"{length} tokens", fontsize=9)
        axes.spines[["top", "right"]].set_visible(False)
    panels[-1].set_xticks(range(len(rows)), [row.name for row in rows], rotation=60, ha="right", fontsize=7)
    figure.suptitle(f"Exact answers after 1, 2, ... reads: {TOLD[protocol]}", x=0.02, ha="left", fontsize=10)
    return png(figure)


def length_figure(seen: Seen) -> bytes:
    """Exact answers after the last read, written before the question, against the length. Rows with the same answers
    are one curve."""
    from matplotlib.figure import Figure

    from regard.inspect.figures import line_style, png

    figure = Figure(figsize=(7.2, 5.0), dpi=120, layout="constrained")
    axes: Any = figure.subplots()
    same: dict[tuple[Share, ...], list[str]] = {}
    for row in seen.groups:
        shares = tuple(found[-1] for length in seen.lengths if (found := seen.shares(row, length, "flushed")))
        if len(shares) == len(seen.lengths):
            same.setdefault(shares, []).append(row.name)
    for place, (shares, names) in enumerate(same.items()):
        colour, style = line_style(place)
        label = fill("; ".join(names), 90)
        axes.plot(seen.lengths, [share.mean for share in shares], style, color=colour, marker="o", label=label)
        low, high = zip(*(share.interval for share in shares), strict=True)
        axes.fill_between(seen.lengths, low, high, color=colour, alpha=0.08, linewidth=0)
    axes.axvline(seen.context, color="#999999", linewidth=0.8)
    axes.set_xscale("log", base=2)
    axes.set(xlabel="tokens of a haystack (line: a training window)", ylabel="exact answers, last read")
    axes.set_ylim(-0.03, 1.03)
    axes.set_xticks(seen.lengths, [str(length) for length in seen.lengths])
    axes.minorticks_off()
    figure.legend(frameon=False, fontsize=8, loc="outside lower left")
    axes.spines[["top", "right"]].set_visible(False)
    return png(figure)


# Verdicts --------------------------------------------------------------------------------------------------------


def notes(seen: Seen) -> tuple[str, ...]:
    """The paper's findings 4 to 6 beside what was measured, and what its protocol makes of the first read."""
    found = [first_read(seen), iterative(seen), generalises(seen), longer(seen), kept_note(seen), gates_note(seen)]
    return tuple(note for note in (*found, caveat(seen)) if note)


def apart(one: Share, other: Share) -> str:
    """ "higher", "lower" or "level": whether the intervals of two shares are apart."""
    if one.interval[0] > other.interval[1]:
        return "higher"
    return "lower" if one.interval[1] < other.interval[0] else "level"


def word(sides: Sequence[str], wanted: str) -> str:
    """Whether all sides are the claimed one."""
    if set(sides) == {wanted}:
        return "holds"
    if wanted in sides:
        return "holds in part"
    return "not seen here" if set(sides) <= {"level"} else "does not hold here"


def first_read(seen: Seen) -> str:
    """Writing before the question against after it, at one read."""
    parts, sides = [], []
    length = seen.lengths[0]
    for row in seen.memories:
        pair = [seen.shares(row, length, protocol) for protocol in ("flushed", "whole")]
        if all(pair):
            sides.append(apart(pair[0][0], pair[1][0]))
            parts.append(f"{row.name} {pair[0][0]} and {pair[1][0]} ({sides[-1]})")
    if not parts:
        return ""
    return (
        f"One read of {length} tokens, written before the question better than after it (the paper's protocol): "
        f"{word(sides, 'higher')}: {'; '.join(parts)}."
    )


def iterative(seen: Seen) -> str:
    """Finding 4: a second read is a boost, by the paper's protocol."""
    parts, sides = [], []
    length = seen.lengths[0]
    for row in seen.memories:
        shares = seen.shares(row, length, "whole")
        if len(shares) > 1:
            sides.append(apart(shares[1], shares[0]))
            parts.append(f"{row.name} {shares[0].mean:.0%} to {shares[1].mean:.0%} ({sides[-1]})")
    if not parts:
        return ""
    return (
        f'"A second read boosts retrieval", the paper\'s protocol, {length} tokens: {word(sides, "higher")}: '
        f"{'; '.join(parts)}."
    )


def generalises(seen: Seen) -> str:
    """Finding 5: beyond the lengths of training a memory retrieves where the same layout without one does not."""
    beyond = [length for length in seen.lengths if length > seen.context]
    if not beyond:
        return ""
    parts, sides = [], []
    for row in seen.memories:
        own = seen.shares(row, beyond[-1], "flushed")
        none = seen.shares(Row(row.layout), beyond[-1], "flushed")
        if own and none and row.remembers:
            sides.append(apart(own[-1], none[-1]))
            parts.append(f"{row.name} {own[-1]} against {none[-1]} ({sides[-1]})")
    if not parts:
        return ""
    return (
        f'"Memories generalise to longer texts", {beyond[-1]} tokens after windows of {seen.context}, written before '
        f"the question, last read: {word(sides, 'higher')}: {'; '.join(parts)}."
    )


def longer(seen: Seen) -> str:
    """Finding 6: longer texts need more reads."""
    parts, sides = [], []
    for row in seen.memories:
        counts = [needed(seen.shares(row, length, "whole")) for length in seen.lengths]
        parts.append(f"{row.name} {', '.join('-' if count is None else str(count) for count in counts)}")
        first, last = (math.inf if count is None else count for count in (counts[0], counts[-1]))
        if counts[0] is not None:
            sides.append("higher" if last > first else "lower" if last < first else "level")
    if not parts:
        return ""
    found = word(sides, "higher") if sides else f"not decided (no model answers {GOOD:.0%} at the shortest length)"
    lengths = ", ".join(map(str, seen.lengths))
    return f'"Longer texts need more reads" (reads until {GOOD:.0%}, at {lengths} tokens): {found}: {"; ".join(parts)}.'


def kept_note(seen: Seen) -> str:
    """Whether what was read before gets in the way."""
    parts = []
    for row in seen.memories:
        kept, new = (seen.shares(row, seen.lengths[0], "flushed", kept=kept) for kept in (True, False))
        if kept and new:
            parts.append(f"{row.name} {kept[0]} and {new[0]} ({apart(kept[0], new[0])})")
    if not parts:
        return ""
    return f"One read with the memory kept from sample to sample, and new for each: {'; '.join(parts)}."


def gates_note(seen: Seen) -> str:
    """Finding 3's consequence: windows in training make attention's models use the memory."""
    parts = []
    for layout, full in RESTRICTED.items():
        pair = [seen.shares(Row(each, "FwPKM"), seen.lengths[-1], "flushed") for each in (layout, full)]
        if all(pair) and full in FULL:
            parts.append(f"{layout} {pair[0][-1]} and {full} {pair[1][-1]} ({apart(pair[0][-1], pair[1][-1])})")
    if not parts:
        return ""
    return f"FwPKM with windows in training and without, {seen.lengths[-1]} tokens, last read: {'; '.join(parts)}."


def caveat(seen: Seen) -> str:
    """What these models are."""
    runs = next(iter(seen.groups.values()))
    seeds = "One training of each: intervals are over haystacks, not over trainings. " if len(runs) == 1 else ""
    return (
        f"{seeds}All models saw the same {runs[0].steps[-1]:,} steps of text with needles and questions, with the loss "
        f"on answers alone, and one learning rate, chosen for none of them: a row at chance says that it did not learn "
        f"this in that time, not that it cannot."
    )
