"""Tables, figures and sentences of the variants recipe."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from regard.inspect.figures import COLOURS, png
from regard.inspect.tables import Table

from .lla_variants import BAND, PROTOCOLS, ROWS, VariantsConfig
from .lla_variants_cost import COSTS

Records = Sequence[dict[str, Any]]
GREY = "#777777"
STYLES: dict[str, tuple[str, str, str]] = {
    "softmax": (GREY, "s", "None"),
    "softmax windows": (GREY, "x", ":"),
    "mesa": (COLOURS[4], "D", "None"),
    "exact": (COLOURS[0], "*", "None"),
    "tolerances": (COLOURS[0], "o", "-"),
    "steps": (COLOURS[5], "o", "-"),
    "blocks": (COLOURS[1], "^", "-"),
    "windows": (COLOURS[2], "v", "-"),
    "windows and blocks": (COLOURS[3], "+", "None"),
}
"""Colour, marker and line of a group."""
ENDS = {
    "softmax windows": ("left", -7),
    "steps": ("right", -7),
    "tolerances": ("right", 7),
    "blocks": ("left", 7),
    "windows": ("left", -4),
}
"""Of these groups the first and the last point are named: the side of the first name that is at its point, and how far
above the points both stand."""
WORSE = 1.02
"""What has at most this many times the error of the full model counts as as good."""


def tables(config: VariantsConfig, records: Records, theirs: Records) -> dict[str, Table]:
    """Errors and times first, then the paper's Table 1, then its blocks beside regard's."""
    return {
        "Error and time of the variants": by_variant(config, records),
        "The paper's Table 1, corrected, beside what was measured": by_cost(config, records),
        "Diagonal blocks: the paper's, centred at the query, and of the covariance": by_blocks(config, records, theirs),
    }


def _at(records: Records, ridge: float) -> list[dict[str, Any]]:
    """Records at a ridge, and those that have none."""
    return [r for r in records if r["ridge"] in (None, ridge)]


def _pair(pair: Sequence[float]) -> str:
    return f"{pair[0]:.3g} ± {pair[1]:.1g}"


def by_variant(config: VariantsConfig, records: Records) -> Table:
    """A row for every variant; by ridge the errors under both protocols, the time of a query and the mean steps."""
    header = ["variant"]
    for ridge in config.ridges:
        header += [f"ridge {ridge:g}: {protocol}" for protocol in PROTOCOLS] + ["µs a query", "steps"]
    rows = []
    for name in dict.fromkeys(r["name"] for r in records):
        row = [name]
        for ridge in config.ridges:
            (own,) = (r for r in _at(records, ridge) if r["name"] == name)
            steps = own["steps"]["self-included"]
            row += [_pair(own["error"][protocol]) for protocol in PROTOCOLS]
            row += [f"{own['microseconds_median']:.3g}", "–" if steps is None else f"{steps:.3g}"]
        rows.append(tuple(row))
    note = (
        f"Squared error after the first segment in units of the zero predictor's, ± {BAND} standard errors over "
        f"{config.sequences} sequences; forward, median of {config.repeats} timings of the self-included protocol."
    )
    return Table(tuple(header), tuple(rows), note)


MEASURED = {
    "softmax": ("softmax", "sdpa"),
    "mesa": ("mesa",),
    "lla, weights again": (),
    "lla, weights kept": ("tolerances", "windows"),
    "lla, direct": ("cholesky",),
    "block-diagonal, cg": (),
    "block-diagonal, direct": ("blocks", "windows and blocks"),
}
"""Row of Table 1 to the groups or names whose measurements stand in it."""


def by_cost(config: VariantsConfig, records: Records) -> Table:
    """A row for every form, and below it those that were measured, at the first ridge."""
    rows: list[tuple[str, ...]] = []
    for name, cost in COSTS.items():
        paper = tuple(part or "–" for part in cost.paper)
        rows.append((name, paper[0], cost.computed, paper[1], cost.moved, "", "", "", "", ""))
        for own in _at(records, config.ridges[0]):
            if {own["name"], own["group"]} & set(MEASURED[name]) and own["cost"] == name:
                rows.append(("· " + own["name"], "", "", "", "", *_numbers(own)))
    header = (
        "", "operations, paper", "corrected", "numbers moved, paper", "corrected", "mean steps", "kFLOP a query",
        "kB a query", "µs a query", "GFLOP/s",
    )  # fmt: skip
    note = (
        f"Formulas at n = the mean number of keys a query sees, d = {config.dim}, T = the steps, g blocks, B = {ROWS} "
        f"queries of a block, ridge {config.ridges[0]:g}, forward, 4 bytes a number. Times are measured; traffic is "
        f"the formula's."
    )
    return Table(header, tuple(rows), note)


def _numbers(own: dict[str, Any]) -> tuple[str, ...]:
    steps, micro = own["steps"]["self-included"], own["microseconds_median"]
    return (
        "–" if steps is None else f"{steps:.3g}",
        f"{own['flops'] / 1e3:.4g}",
        f"{4e-3 * own['numbers']:.3g}",
        f"{micro:.3g}",
        f"{own['flops'] / micro / 1e3:.3g}",
    )


def _blocks(records: Records, ridge: float) -> dict[int, dict[str, Any]]:
    return {r["blocks"]: r for r in _at(records, ridge) if r["group"] == "blocks"}


def by_blocks(config: VariantsConfig, records: Records, theirs: Records) -> Table:
    """A row for every protocol, ridge and number of blocks."""
    rows = []
    for their in theirs:
        own = _blocks(records, their["ridge"])[their["blocks"]]
        rows.append((
            f"{their['protocol']}, ridge {their['ridge']:g}, g = {their['blocks']}",
            _pair(their["error"]), f"{their['not_positive']:.1%}", _pair(own["error"][their["protocol"]]),
        ))  # fmt: skip
    header = ("", "of Sigma, as in the paper", "rows with delta <= 0", "of the covariance (regard)")
    return Table(header, tuple(rows), "Errors as in the first table; g = 1 is local linear attention itself, twice.")


# Sentences ---------------------------------------------------------------------------------------------------


def notes(config: VariantsConfig, records: Records, theirs: Records) -> tuple[str, ...]:
    """What was measured: the paper's blocks, the cheapest that is as good, windows."""
    made = [
        f"d = {config.dim}, {config.length} positions in segments of {config.segment}, {config.sequences} sequences, "
        f"noise {config.noise:g}; errors in units of the zero predictor's, after the first segment."
    ]
    for ridge in config.ridges:
        made.append(_contrast(config, records, theirs, ridge))
    for ridge in config.ridges:
        for protocol in PROTOCOLS:
            made.append(_cheapest(records, ridge, protocol))
    return tuple(made)


def _contrast(config: VariantsConfig, records: Records, theirs: Records, ridge: float) -> str:
    said = []
    for their in theirs:
        if their["ridge"] == ridge and their["blocks"] in (config.dim, config.dim // 2) and their["blocks"] > 1:
            own = _blocks(records, ridge)[their["blocks"]]["error"][their["protocol"]][0]
            said.append(
                f"{their['protocol']}, g = {their['blocks']}: delta <= 0 in {their['not_positive']:.0%} of rows, error "
                f"{their['error'][0]:.3g} (of the covariance {own:.3g})"
            )
    return f"The paper's diagonal blocks at ridge {ridge:g}: {'; '.join(said)}."


def _cheapest(records: Records, ridge: float, protocol: str) -> str:
    """The fastest variant whose error is that of the full model, and the one with the least error."""
    named = {r["name"]: r for r in _at(records, ridge)}
    full, plain = named["auto"], named["softmax"]
    good = [r for r in named.values() if r["error"][protocol][0] <= WORSE * full["error"][protocol][0]]
    best = min(good, key=lambda r: r["microseconds_median"])
    faster = full["microseconds_median"] / best["microseconds_median"]
    least = min(named.values(), key=lambda r: r["error"][protocol][0])
    return (
        f"Ridge {ridge:g}, {protocol}: local linear attention {full['error'][protocol][0]:.3g}, softmax "
        f"{plain['error'][protocol][0]:.3g}; the fastest with at most {WORSE:g} times the former's error: "
        f"{best['name']} ({best['error'][protocol][0]:.3g}, {faster:.3g} times faster); the least error: "
        f"{least['name']} ({least['error'][protocol][0]:.3g})."
    )


# Figures -----------------------------------------------------------------------------------------------------


def figures(config: VariantsConfig, records: Records, theirs: Records) -> dict[str, bytes]:
    """Error against time, and error against blocks."""
    return {
        "lla-variants-time.png": against_time(config, records),
        "lla-variants-blocks.png": against_blocks(config, records, theirs),
    }


def _grid(config: VariantsConfig) -> tuple[Figure, dict[tuple[float, str], Axes]]:
    """A panel for every ridge (down) and protocol (across)."""
    drawing = Figure(figsize=(11.0, 3.6 * len(config.ridges) + 0.8), dpi=100, layout="constrained")
    grid: Any = drawing.subplots(len(config.ridges), len(PROTOCOLS), sharex=True, squeeze=False)
    axes = {(r, p): grid[i][j] for i, r in enumerate(config.ridges) for j, p in enumerate(PROTOCOLS)}
    for (ridge, protocol), place in axes.items():
        place.set_title(f"{protocol}, ridge {ridge:g}", fontsize=9)
        place.grid(color="#dddddd", linewidth=0.5)
        place.spines[["top", "right"]].set_visible(False)
        place.set(xscale="log", ylabel="error / zero predictor's")
    return drawing, axes


def _legend(drawing: Figure, axes: dict[tuple[float, str], Axes]) -> None:
    handles, labels = next(iter(axes.values())).get_legend_handles_labels()
    drawing.legend(handles, labels, loc="outside lower center", ncols=5, frameon=False, fontsize=8)


def against_time(config: VariantsConfig, records: Records) -> bytes:
    """Error against the time of a query, a line for every group, whose ends are named: the table names the rest."""
    drawing, axes = _grid(config)
    for (ridge, protocol), place in axes.items():
        for group, (colour, marker, line) in STYLES.items():
            own = [r for r in _at(records, ridge) if r["group"] == group]
            x, y = [r["microseconds_median"] for r in own], [r["error"][protocol][0] for r in own]
            place.plot(x, y, color=colour, marker=marker, linestyle=line, markersize=5, linewidth=1.0, label=group)
            first, above = ENDS.get(group, ("", 0))
            for r, side in ((own[0], first), (own[-1], "left")) if first and own else ():
                label = r["name"].removeprefix("softmax, ").replace("blocks ", "g ").replace("window ", "W ")
                at = (r["microseconds_median"], r["error"][protocol][0])
                shift = (5 if side == "left" else -5, above)
                place.annotate(
                    label, at, shift, textcoords="offset points", fontsize=8, color=colour, ha=side, va="center"
                )
        place.set(yscale="log")
    for protocol in PROTOCOLS:
        axes[config.ridges[-1], protocol].set_xlabel("µs a query, forward")
    _legend(drawing, axes)
    return png(drawing)


def against_blocks(config: VariantsConfig, records: Records, theirs: Records) -> bytes:
    """Error against the number of blocks, of Sigma and of the covariance, with their bands."""
    drawing, axes = _grid(config)
    for (ridge, protocol), place in axes.items():
        own = {g: r["error"][protocol] for g, r in _blocks(records, ridge).items()}
        other = {t["blocks"]: t["error"] for t in theirs if (t["ridge"], t["protocol"]) == (ridge, protocol)}
        for found, colour, marker, label in (
            (own, COLOURS[0], "o", "of the covariance (regard)"),
            (other, COLOURS[1], "^", "of Sigma, centred at the query (the paper's)"),
        ):
            y, half = [e for e, _ in found.values()], [h for _, h in found.values()]
            bars = ([min(h, 0.9 * e) for e, h in found.values()], half)  # the axis has no 0
            place.errorbar(list(found), y, yerr=bars, color=colour, marker=marker, capsize=2, label=label)
        (plain,) = (r for r in records if r["name"] == "softmax")
        place.axhline(plain["error"][protocol][0], color=GREY, linestyle="--", label="softmax")
        place.axhline(1.0, color=GREY, linestyle=":", label="zero predictor")
        place.set(yscale="log")
        place.set_xticks(list(own), [str(g) for g in own])
        place.minorticks_off()
    for protocol in PROTOCOLS:
        axes[config.ridges[-1], protocol].set_xlabel("diagonal blocks g")
    _legend(drawing, axes)
    return png(drawing)
