"""Figures from frames, as PNG: lines over a column, and dots for each seed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from .pivots import label

if TYPE_CHECKING:
    import pandas as pd


def lines(
    panels: Mapping[str, pd.DataFrame],
    x: str, y: Mapping[str, str], hue: str,
    *, x_label: str = "", title: str = "", log_x: bool = False, log_y: bool = False,
) -> bytes:  # fmt: skip
    """Draw the mean over seeds against `x`, a line for each value of `hue`, in a band from the least to the largest.

    Args:
        panels: title to rows; one column of panels for each.
        y: column to the label of its axis; one row of panels for each.
    """
    from matplotlib.figure import Figure

    from regard.inspect.figures import line_style, png

    names = list(dict.fromkeys(value for rows in panels.values() for value in rows[hue]))
    styles = {name: line_style(place) for place, name in enumerate(names)}
    size = (5.2 * len(panels) + 1.0, 3.6 * len(y) + 0.6)
    figure = Figure(figsize=size, dpi=110, layout="constrained")
    grid: Any = figure.subplots(len(y), len(panels), squeeze=False, sharey="row", sharex="col")
    for row, (column, y_label) in enumerate(y.items()):
        for axes, (heading, rows) in zip(grid[row], panels.items(), strict=True):
            for name, group in rows.groupby(hue, sort=False):
                _line(axes, group, x, column, styles[name], label(name))
            if row == 0:
                axes.set_title(heading, fontsize=10)
                axes.legend(frameon=False, fontsize=7, ncols=2)
            _plain(axes, log_x, log_y)
        grid[row, 0].set_ylabel(y_label)
    for axes in grid[-1]:
        axes.set_xlabel(x_label or x)
    figure.suptitle(title, x=0.02, ha="left", fontsize=11)
    return png(figure)


def _line(axes: Any, rows: pd.DataFrame, x: str, y: str, style: tuple[str, str], name: str) -> None:
    found = rows.astype({y: float}).groupby(x)[y].agg(["min", "mean", "max", "count"])
    axes.plot(found.index, found["mean"], color=style[0], linestyle=style[1], linewidth=1.4, label=name)
    if found["count"].max() > 1:
        axes.fill_between(found.index, found["min"], found["max"], color=style[0], alpha=0.15, linewidth=0)


def dots(frame: pd.DataFrame, value: str, rows: str, hue: str, *, x_label: str, title: str = "") -> bytes:
    """Draw a dot for each seed: a line of the figure for each value of `rows`, a colour for each value of `hue`."""
    from matplotlib.figure import Figure

    from regard.inspect.figures import COLOURS, png

    names, kinds = (list(dict.fromkeys(frame[column])) for column in (rows, hue))
    figure = Figure(figsize=(7.6, 1.6 + 0.34 * len(names)), dpi=110, layout="constrained")
    axes = figure.subplots()
    for at, kind in enumerate(kinds):
        group = frame[frame[hue] == kind]
        shift = 0.5 * (at - (len(kinds) - 1) / 2) / len(kinds)
        heights = [names.index(name) + shift for name in group[rows]]
        colour = COLOURS[at % len(COLOURS)]
        axes.plot(group[value], heights, "o", color=colour, markersize=4, alpha=0.8, label=label(kind))
    axes.set_yticks(range(len(names)), [label(name) for name in names], fontsize=8)
    axes.invert_yaxis()
    axes.set(xlabel=x_label, title=title)
    _plain(axes)
    if len(kinds) > 1:
        axes.legend(frameon=False, fontsize=8)
    return png(figure)


def _plain(axes: Any, log_x: bool = False, log_y: bool = False) -> None:
    axes.set(xscale="log" if log_x else "linear", yscale="log" if log_y else "linear")
    axes.grid(color="#dddddd", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
