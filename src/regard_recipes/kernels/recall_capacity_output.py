"""Table and figures of the recall-capacity recipe."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LogNorm, Normalize
from matplotlib.figure import Figure

from regard.inspect.figures import png
from regard.inspect.tables import Table

from .recall_capacity import RecallCapacityConfig

Row = tuple[str, dict[str, Any]]
PANELS = (
    ("stored pairs, clean cues", ("pairs",)),
    ("length of cue noise", ("noise",)),
    ("coordinates of the cue erased", ("erased",)),
    ("damage: numbers zeroed | noise", ("zeroed", "jitter")),
)
ENOUGH = 0.99
"""Exact matches that count as recalled."""


def rows(found: dict[str, Any]) -> list[Row]:
    """(label, run) of every kernel at its best scale, the best kernel first; then the sums."""
    pairs: list[Row] = []
    sums: list[Row] = []
    for name, record in found.items():
        chosen = [r for r in record["runs"] if r["scale"] == record["best_scale"]]
        alias = "".join(f" = {other}" for other in record["same_as"])
        for run in chosen:
            label = f"{name}{alias}, {record['best_scale']:g}"
            (sums if run["store"] == "sums" else pairs).append(
                (label + (", sums" if run["store"] == "sums" else ""), run)
            )
    return [*sorted(pairs, key=_mean_match, reverse=True), *sorted(sums, key=_mean_match, reverse=True)]


def _mean_match(row: Row) -> float:
    means = [mean for _, names in PANELS for name in names for mean, _ in row[1].get(name, {}).get("match", [])]
    return sum(means) / len(means)


def figure(config: RecallCapacityConfig, found: dict[str, Any], what: str) -> bytes:
    """Four panels, two by two, of kernels down and levels across; `what` is "match" or "error".

    Colours of cividis, which colour-blind readers can order; every cell says its mean, in small its spread.
    """
    shown = rows(found)
    widths = [sum(len(getattr(config, name)) for name in names) for _, names in PANELS]
    columns = [max(widths[0], widths[2]), max(widths[1], widths[3])]
    size = (3.0 + 0.56 * sum(columns), 1.8 + 0.5 * len(shown))
    drawing = Figure(figsize=size, dpi=110, layout="constrained")
    grid: Any = drawing.subplots(2, 2, sharey=True, width_ratios=columns, squeeze=False).ravel()
    norm = Normalize(0, 1) if what == "match" else LogNorm(1e-3, 1e2, clip=True)
    for axes, (title, names) in zip(grid, PANELS, strict=True):
        _panel(axes, config, shown, names, what, norm)
        axes.set_title(title if names == ("pairs",) else f"{title}\n({config.stored} pairs)", fontsize=10)
    grid[0].set_yticks(range(len(shown)), [label for label, _ in shown], fontsize=9)
    grid[2].tick_params(axis="y", labelsize=9)
    label = "exact matches, percent ± standard deviation over seeds" if what == "match" else "relative squared error"
    mapped = ScalarMappable(norm, "cividis" if what == "match" else "cividis_r")
    drawing.colorbar(mapped, ax=list(grid), location="bottom", shrink=0.6, aspect=45, pad=0.01, label=label)
    drawing.suptitle(
        f"Recall by kernel and scale; D = {config.dim}, {config.seeds} seeds", x=0.01, ha="left", fontsize=11
    )
    return png(drawing)


def _panel(
    axes: Axes, config: RecallCapacityConfig, shown: list[Row], names: tuple[str, ...], what: str, norm: Any
) -> None:
    levels = [(name, level) for name in names for level in getattr(config, name)]
    means = np.full((len(shown), len(levels)), np.nan)
    for row, (_, run) in enumerate(shown):
        column = 0
        for name in names:
            for mean, spread in run.get(name, {}).get(what, []):
                means[row, column] = mean
                axes.text(column, row, cell(mean, spread, what), ha="center", va="center", fontsize=8.5,
                          color=_ink(float(norm(mean)), what))  # fmt: skip
                column += 1
    axes.set_facecolor("#ececec")  # not measured: whole sums read as whole pairs do
    axes.imshow(
        np.ma.masked_invalid(means), aspect="auto", cmap="cividis" if what == "match" else "cividis_r", norm=norm
    )
    axes.set_xticks(range(len(levels)), [f"{level:g}" for _, level in levels], fontsize=9)
    axes.tick_params(length=0)
    if len(names) > 1:
        axes.axvline(len(getattr(config, names[0])) - 0.5, color="white", linewidth=4)
    whole = sum(run["store"] == "pairs" for _, run in shown)
    if whole < len(shown):
        axes.axhline(whole - 0.5, color="white", linewidth=4)


def _ink(shade: float, what: str) -> str:
    """Black on light cells, white on dark ones."""
    return "black" if (shade > 0.5) == (what == "match") else "white"


def cell(mean: float, spread: float, what: str) -> str:
    """What a cell says."""
    if what == "match":
        return f"{100 * mean:.0f}±{100 * spread:.0f}"
    if mean < 1e-3:
        return "<.001"
    return f"{mean:.2g}" if mean < 100 else f"{mean:.0e}".replace("e+0", "e")


def table(config: RecallCapacityConfig, found: dict[str, Any]) -> Table:
    """Per kernel at its best scale: how many pairs it recalls, and the middle level of every other condition."""
    lines = [(label, *_line(config, run)) for label, run in rows(found)]
    return Table(_header(config, "kernel, scale"), tuple(lines), note=_spread(config))


def models(config: RecallCapacityConfig, found: dict[str, Any]) -> Table:
    """The same of global linear models, whose state is what is damaged."""
    lines = [(label, *_line(config, run)) for label, run in found.items()]
    return Table(_header(config, "model"), tuple(lines), note=_spread(config))


def _spread(config: RecallCapacityConfig) -> str:
    return f"Means ± standard deviations over {config.seeds} seeds."


def _middle(config: RecallCapacityConfig) -> dict[str, int]:
    return {name: len(getattr(config, name)) // 2 for name in ("noise", "erased", "zeroed", "jitter")}


def _header(config: RecallCapacityConfig, first: str) -> tuple[str, ...]:
    words = {"noise": "cue noise", "erased": "erased", "zeroed": "zeroed", "jitter": "state noise"}
    levels = [f"{words[name]} {getattr(config, name)[at]:g}" for name, at in _middle(config).items()]
    return (first, f"pairs at ≥ {100 * ENOUGH:.0f} %", f"{max(config.pairs)} pairs", *levels)


def _line(config: RecallCapacityConfig, run: dict[str, Any]) -> list[str]:
    recalled, last = "–", "–"
    if "pairs" in run:
        enough = [n for n, (mean, _) in zip(config.pairs, run["pairs"]["match"], strict=True) if mean >= ENOUGH]
        recalled = str(max(enough)) if enough else f"< {min(config.pairs)}"
        last = _said(run, "pairs", config.pairs.index(max(config.pairs)))
    return [recalled, last, *(_said(run, name, at) for name, at in _middle(config).items())]


def parts(config: RecallCapacityConfig, found: dict[str, Any], models: dict[str, Any]) -> Table:
    """Equation 5 with clean cues: signal bias and interference at a middle number of pairs, and their ratio for all."""
    middle = len(config.pairs) // 2
    both = [*((label, run) for label, run in rows(found) if "pairs" in run), *models.items()]
    lines = []
    for label, run in both:
        panel = run["pairs"]
        cells = [cell(panel[name][middle][0], 0.0, "error") for name in ("bias", "interference")]
        lines.append((label, *cells, *(cell(mean, 0.0, "error") for mean, _ in panel["inverse_snr"])))
    header = (
        "kernel, scale, or model",
        *(f"{name}, {config.pairs[middle]} pairs" for name in ("signal bias", "interference")),
        *(f"1/SNR, {n} pairs" for n in config.pairs),
    )
    return Table(header, tuple(lines), note="Means of squares relative to the values'.")


def by_scale(config: RecallCapacityConfig, found: dict[str, Any]) -> Table:
    """The mean of all conditions, for every kernel and scale."""
    lines = []
    for name, record in found.items():
        means = {run["scale"]: _mean_match((name, run)) for run in record["runs"] if run["store"] == "pairs"}
        alias = "".join(f" = {other}" for other in record["same_as"])
        lines.append((name + alias, *(f"{100 * means[scale]:.1f}" for scale in config.scales)))
    return Table(("kernel", *(f"scale {scale:g}" for scale in config.scales)), tuple(lines))


def _said(run: dict[str, Any], name: str, at: int) -> str:
    if name not in run:
        return "–"
    mean, spread = run[name]["match"][at]
    return cell(mean, spread, "match")


def notes(config: RecallCapacityConfig) -> tuple[str, ...]:
    """What has to be known to read table and figures."""
    return (
        f"Random unit keys and values, D = {config.dim}; {config.seeds} memories per condition, up to {config.cues} "
        f"cues each. Exact match: the stored value nearest to what is retrieved is the right one.",
        f"The number after a kernel's name is its scale, of {', '.join(f'{s:g}' for s in config.scales)} the one with "
        f"the most exact matches over all conditions (of equals, that with the smaller error); the JSON file has all "
        f"scales. Kernels that take no scale have keys and cues of that squared length.",
        f"Except under 'pairs', {config.stored} pairs are stored. 'sums': damage to the sums that the kernel's pairs "
        f"fold into; undamaged sums read as undamaged pairs do.",
        "Of global linear models the state is damaged. Cues are of the pairs that were stored first, which the delta "
        "rule overwrites first.",
        "Signal bias and interference are the parts of the error with clean cues: the weight of the cue's own value, "
        "less one, and all others; 1/SNR is the interference relative to what is left of the signal.",
    )
