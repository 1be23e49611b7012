"""Tables, figure and verdicts of the recipe `fwpkm-cost`."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from ..lib.language_runs import LanguageRun
from .fwpkm_cost import PAPER, PAPER_SIZES, Counted
from .memory_layouts import Row

Counts = Mapping[Row, Counted]
Runs = Mapping[Row, Sequence[LanguageRun]]
CLOSE = 0.005
"""Millions of parameters by which a count may be off: the paper's last digit."""


def seconds(runs: Sequence[LanguageRun]) -> float:
    """Of a step, by the processor's clock (an accelerator's by the wall's), the median over seeds."""
    return statistics.median(run.step_cpu_seconds for run in runs)


def slower(runs: Runs, row: Row) -> float:
    """A step in units of the same layout without a memory."""
    return seconds(runs[row]) / seconds(runs[Row(row.layout)])


def held(runs: Sequence[LanguageRun]) -> int | None:
    """Bytes at the peak of training beyond those before the model was made; None where the system does not say."""
    found = [
        run.peak_bytes - run.before_bytes for run in runs if run.peak_bytes is not None and run.before_bytes is not None
    ]
    return max(found) if found else None


def paper_of(row: Row) -> tuple[float, float, float, float] | None:
    """The paper's numbers of a row, where it has them."""
    return PAPER.get((row.layout, row.memory))


def tables(counts: Counts, runs: Runs, batch: int) -> dict[str, Any]:
    """Table 2, where the operations go, and what was measured."""
    return {
        "Table 2, counted": count_table(counts),
        "Operations of a step by what they do": part_table(counts),
        "Measured": measured_table(counts, runs, batch),
    }


def count_table(counts: Counts) -> Any:
    """Parameters and operations beside the paper's."""
    from regard.inspect.tables import Table

    rows = []
    for row, count in counts.items():
        paper = paper_of(row)
        rows.append(
            (
                row.name,
                f"{count.numbers / 1e6:.3f}",
                "-" if paper is None else f"{paper[0]:.2f}",
                f"{count.learned / 1e6:.2f}",
                f"{count.fast / 1e6:.2f}",
                f"{count.paper_flops / 1e12:.2f}",
                "-" if paper is None else f"{paper[1]:.2f}",
                f"{count.flops / 1e12:.2f}",
            )
        )
    header = ("model", "parameters, M", "paper", "learned", "fast", "6 x parameters x tokens, T", "paper", "all, T")
    note = (
        "At the paper's size; operations of a training step of 8 sequences of 4096 tokens. Six operations for every "
        "learned number that is multiplied and every token, as the paper counts; all: attention, delta rule, search, "
        "read and write too, the backward pass as twice the forward pass."
    )
    return Table(header, tuple(rows), note)


def part_table(counts: Counts) -> Any:
    """A column for each part."""
    from regard.inspect.tables import Table

    names = list(next(iter(counts.values())).parts)
    rows = tuple(
        (row.name, *(f"{3 * count.parts[name] * count.tokens / 1e12:.3f}" for name in names))
        for row, count in counts.items()
    )
    note = (
        f"T operations, forward and backward. What is written moves {bytes_written() / 1e6:.0f} MB a chunk at most "
        f"where all reads hit different rows, of a table of {table_bytes() / 1e6:.0f} MB."
    )
    return Table(("model", *names), rows, note)


def bytes_written() -> float:
    """Bytes of a chunk's rows, read and written once, in float32, for the paper's micro-batch."""
    sizes = PAPER_SIZES
    return 2 * 4.0 * 8 * sizes.chunk * sizes.fast_top_k * sizes.memory_dim


def table_bytes() -> float:
    """Of one memory's values in float32."""
    return 4.0 * PAPER_SIZES.sub_keys**2 * PAPER_SIZES.memory_dim


def measured_table(counts: Counts, runs: Runs, batch: int) -> Any:
    """Samples per second, how much slower than without a memory, and the memory of the process."""
    from regard.inspect.tables import Table

    rows = []
    for row in counts:
        paper, base = paper_of(row), paper_of(Row(row.layout))
        most = held(runs[row])
        rows.append(
            (
                row.name,
                f"{runs[row][0].parameters:,}",
                f"{batch / seconds(runs[row]):.2f}",
                f"{slower(runs, row):.2f}",
                "-" if paper is None or base is None else f"{base[3] / paper[3]:.2f}",
                "-" if paper is None else f"{paper[3]:.2f}",
                "-" if most is None else f"{most / 2**20:.0f} MiB",
            )
        )
    header = ("model", "learned", "samples/s", "step, in units of none", "paper", "samples/s, paper", "peak")
    note = (
        "At the measured size (see the JSON), on this machine; the paper's samples per second at its own size and on "
        "its own machines. The peak is the process's, beyond what it held before the model was made."
    )
    return Table(header, tuple(rows), note)


def figures(counts: Counts, runs: Runs, batch: int) -> dict[str, bytes]:
    """How much slower a memory makes each layout, here and in the paper."""
    from matplotlib.figure import Figure

    from regard.inspect.figures import COLOURS, png

    shown = [row for row in counts if row.memory != "none"]
    figure = Figure(figsize=(8, 1.6 + 0.3 * max(1, len(shown))), dpi=120, layout="constrained")
    axes: Any = figure.subplots()
    for place, row in enumerate(shown):
        axes.plot([slower(runs, row)], [place], "o", color=COLOURS[0], label="here" if place == 0 else None)
        paper, base = paper_of(row), paper_of(Row(row.layout))
        if paper is not None and base is not None:
            label = "paper" if place == 0 else None
            axes.plot([base[3] / paper[3]], [place], "s", color=COLOURS[1], markerfacecolor="none", label=label)
    axes.axvline(1.0, color="#999999", linewidth=0.8)
    axes.set_yticks(range(len(shown)), [row.name for row in shown], fontsize=8)
    axes.invert_yaxis()
    axes.set(xlabel="a training step, in units of the same layout without a memory", title="Cost of memories")
    axes.grid(axis="x", color="#dddddd", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    if shown:
        axes.legend(frameon=False, fontsize=8)
    return {"fwpkm-cost-steps.png": png(figure)}


def notes(counts: Counts, runs: Runs, batch: int) -> tuple[str, ...]:
    """What is reproduced, and what the paper's columns leave out."""
    found = [parameters(counts), operations(counts), left_out(counts), slowdown(counts, runs)]
    return tuple(note for note in found if note)


def parameters(counts: Counts) -> str:
    """All rows to the paper's last digit."""
    off = {row.name: abs(count.numbers / 1e6 - paper[0]) for row, count in counts.items() if (paper := paper_of(row))}
    if not off:
        return ""
    close = [name for name, gap in off.items() if gap <= CLOSE + 1e-9]
    worst = max(off, key=lambda name: off[name])
    return (
        f"Parameters of table 2: {len(close)} of {len(off)} rows within {CLOSE} M; the furthest is {worst}, by "
        f"{off[worst]:.4f} M."
    )


def operations(counts: Counts) -> str:
    """The paper's FLOPs, as six for every multiplied number and token."""
    off = {row.name: count.paper_flops / 1e12 - paper[1] for row, count in counts.items() if (paper := paper_of(row))}
    if not off:
        return ""
    worst = max(off, key=lambda name: abs(off[name]))
    return (
        f"FLOPs of table 2 as 6 x (learned - looked up) x tokens: within {max(map(abs, off.values())):.3f} T in all "
        f"{len(off)} rows (furthest: {worst}, {off[worst]:+.3f} T)."
    )


def left_out(counts: Counts) -> str:
    """What that count leaves out."""
    parts = []
    for row, count in counts.items():
        if row.memory in ("none", "FwPKM"):
            more = count.flops / count.paper_flops - 1
            own = 3 * sum(count.parts[name] for name in ("search", "read", "write")) * count.tokens
            parts.append(f"{row.name} {more:+.1%}" + (f" ({own / 1e12:.2f} T in memories)" if own else ""))
    return f"Left out by that count: {', '.join(parts)}." if parts else ""


def slowdown(counts: Counts, runs: Runs) -> str:
    """A step with memories in units of one without, beside the paper's."""
    parts = []
    for row in counts:
        paper, base = paper_of(row), paper_of(Row(row.layout))
        if row.memory != "none":
            own = f"{row.name} {slower(runs, row):.2f}"
            parts.append(own if paper is None or base is None else f"{own} (paper {base[3] / paper[3]:.2f})")
    if not parts:
        return ""
    return (
        f"A training step in units of the same layout without a memory, at the measured size: {', '.join(parts)}. "
        f"Measured on models of another size and another machine than the paper's."
    )
