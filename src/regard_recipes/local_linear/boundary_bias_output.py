"""Tables, figure and sentences of the boundary-bias recipe."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from regard.inspect.figures import COLOURS, png
from regard.inspect.tables import Table

from .boundary_bias import BAND, CURVATURE, ESTIMATORS, BoundaryBiasConfig

PARTS = ("whole", "boundary", "interior")
Runs = dict[int, dict[int, Any]]


def plain(config: BoundaryBiasConfig) -> dict[str, Any]:
    """The config as JSON has it."""
    return {f.name: str(v) if f.name == "out" else v for f in fields(config) for v in [getattr(config, f.name)]}


def rate_table(fitted: dict[int, Any]) -> Table:
    """Slopes of log error against log n, ± standard error, beside the theory's."""
    rows = []
    for d, by_name in fitted.items():
        for name, rate in by_name.items():
            cells = (f"{rate[part][0]:.3f} ± {rate[part][1]:.3f}" for part in ("whole", "upper", *PARTS[1:]))
            width = f"{rate['h']:.3f}" if "h" in rate else "–"
            rows.append((f"d = {d}, {name}", f"{rate['theory']:.3f}", *cells, width))
    note = "Fitted slopes ± standard error. The boundary layer is as deep as the bandwidth, and shrinks with it."
    return Table(("", "theory", "whole", "larger n", *PARTS[1:], "bandwidth"), tuple(rows), note)


def error_table(runs: Runs) -> Table:
    """Integrated squared errors at the best bandwidth."""
    rows = [
        (
            f"{d}, {n}, {name}",
            f"{run['h']:.3f}" if name != "global linear" else "–",
            *(f"{run[part][0]:.4g} ± {run[part][1]:.1g}" for part in (*PARTS, "bias")),
        )
        for d, by_n in runs.items()
        for n, by_name in by_n.items()
        for name, run in by_name.items()
    ]
    return Table(("d, n, estimator", "bandwidth", *PARTS, "bias, squared"), tuple(rows), "± standard error.")


def notes(config: BoundaryBiasConfig, runs: Runs, fitted: dict[int, Any]) -> tuple[str, ...]:
    """How it was measured, and what has to be known to read it."""
    edge = [
        f"d = {d}, n = {n}, {name}"
        for d, by_n in runs.items()
        for n, by_name in by_n.items()
        for name, run in by_name.items()
        if not run["inside_grid"]
    ]
    made = [
        f"f(x) = {CURVATURE:g} |x|^2 on the unit ball, uniform design, noise {config.noise:g}, {config.samples} "
        f"designs for each n; Epanechnikov kernel, the bandwidth with the least mean error against the known f."
    ]
    for d, by_name in fitted.items():
        constant, linear = by_name["local constant"], by_name["local linear"]
        last = runs[d][max(runs[d])]
        share = last["local constant"]["boundary"][0] / last["local constant"]["whole"][0]
        times = last["local constant"]["whole"][0] / last["local linear"]["whole"][0]
        made.append(
            f"d = {d}: local constant {constant['whole'][0]:.3f} ± {constant['whole'][1]:.3f} (theory "
            f"{constant['theory']:.3f}), local linear {linear['whole'][0]:.3f} ± {linear['whole'][1]:.3f} "
            f"({linear['theory']:.3f}); at the largest n {share:.0%} of the local constant's error lie "
            f"in the boundary layer, and it errs {times:.2f} times as much as the local linear estimator."
        )
    if edge:
        made.append(f"The best bandwidth stood at the edge of the grid: {'; '.join(edge)}.")
    return tuple(made)


def figure(config: BoundaryBiasConfig, runs: Runs, fitted: dict[int, Any]) -> bytes:
    """A row for every d: the whole error with lines of the theory's slopes, then boundary and interior."""
    drawing = Figure(figsize=(11.5, 3.6 * len(runs) + 0.6), dpi=110, layout="constrained")
    axes: Any = drawing.subplots(len(runs), 3, sharex=True, sharey="row", squeeze=False)
    for line, (d, by_n) in zip(axes, runs.items(), strict=True):
        for place, part in zip(line, PARTS, strict=True):
            for name, colour in zip(ESTIMATORS, COLOURS, strict=False):
                _course(place, config, by_n, name, part, colour, fitted[d][name])
            place.set(xscale="log", yscale="log", title=f"d = {d}, {part}")
            place.minorticks_off()
            place.set_xticks(config.sizes, [str(n) for n in config.sizes])
            place.grid(color="#dddddd", linewidth=0.5)
            place.spines[["top", "right"]].set_visible(False)
        line[0].set_ylabel("integrated squared error")
        line[0].legend(frameon=False, fontsize=8)
    for place in axes[-1]:
        place.set_xlabel("design points n")
    return png(drawing)


def _course(
    axes: Axes,
    config: BoundaryBiasConfig,
    by_n: dict[int, Any],
    name: str,
    part: str,
    colour: str,
    rate: dict[str, Any],
) -> None:
    n = np.array(config.sizes, float)
    middle, error = np.array([by_n[size][name][part] for size in config.sizes]).T
    label = f"{name}: {rate['whole'][0]:.3f} (theory {rate['theory']:.3f})"
    axes.errorbar(n, middle, BAND * error, color=colour, marker="o", markersize=4, linewidth=1.2, label=label)
    if part == "whole":
        centre = np.exp(np.log(middle).mean() - rate["theory"] * np.log(n).mean())
        axes.plot(n, centre * n ** rate["theory"], color=colour, linestyle=":", linewidth=1.2)
