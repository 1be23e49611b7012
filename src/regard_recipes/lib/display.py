"""Tables and figures from frames: a row of text for each group of rows; lines, dots for each seed, coloured cells."""

import math
from collections.abc import Callable, Mapping, Sequence
from string import Formatter
from typing import Any

import numpy as np

from .claims import label, mean_interval, paired
from .recipe import Frame, select

ToText = Callable[[Frame], str]
"""Rows of a group, usually one for each seed, as the text of a cell."""
Show = ToText | str
"""The same; a text such as "{loss:.3f} nats" stands for the means of these columns over the rows."""
MISSING = "–"


def pivot(
    frame: Frame, index: Sequence[str] | Mapping[str, str], values: Mapping[str, Show],
    columns: str | None = None, *, note: str = "",
) -> Any:  # fmt: skip
    """Return a table (`regard.inspect.tables.Table`) with a row for each combination of `index`. Of a frame without
    rows it has none, and pages leave it out.

    Args:
        index: columns that name the rows, or column to heading; rows are in the order in which they first come.
        values: heading ("" with `columns` that name all) to how a cell is shown, a function or a text with columns.
        columns: a column of the frame whose values become headings, each with all of `values`; in the order in which
            they first come, or of the categories of a categorical column.
        note: a sentence below the table.
    """
    from regard.inspect.tables import Table

    heads: list[Any] = [None]
    if frame.empty:
        return Table((), (), note)
    if columns is not None:
        named = frame[columns]
        heads = list(named.cat.categories) if named.dtype == "category" else list(dict.fromkeys(named))
    names = [
        title if head is None else label(head) if len(values) == 1 else f"{label(head)}: {title}"
        for head in heads
        for title in values
    ]
    shows, rows = [means(show) for show in values.values()], []
    for key, group in frame.groupby(list(index), sort=False, dropna=False):
        parts = [group if head is None else group[group[columns] == head] for head in heads]
        cells = [show(part) if len(part) else MISSING for part in parts for show in shows]
        rows.append((*map(label, key), *cells))
    headings = index.values() if isinstance(index, Mapping) else index
    return Table((*headings, *names), tuple(rows), note)


def spread(column: str, digits: int = 3) -> ToText:
    """Return a function that shows mean ± standard deviation."""

    def show(rows: Frame) -> str:
        values = rows[column].astype(float)
        if not np.isfinite(values).all():
            return "diverged"
        deviation = f" ± {values.std():.{digits}f}" if len(values) > 1 else ""
        return f"{values.mean():.{digits}f}{deviation}"

    return show


def interval(column: str, digits: int = 3) -> ToText:
    """Return a function that shows mean ± half the 95 % interval."""
    return lambda rows: mean_interval(rows[column]).text(digits)


def gap(column: str, base: Frame, digits: int = 3, ratio: bool = False, same: Sequence[str] = ()) -> ToText:
    """Return a function that shows the mean less that of `base`, or with `ratio` over it, paired by seed, ± half the
    95 % interval; nothing for rows of `base`, of which those with the same values in the columns `same` count."""

    def show(rows: Frame) -> str:
        other = select(base, **{name: rows[name].iloc[0] for name in same})
        if rows.index.equals(other.index):
            return ""
        return paired(rows, other, column, ratio).text(digits, signed=not ratio) if len(other) else MISSING

    return show


def means(form: Show) -> ToText:
    """Return `form`, or if it is a text (`Show`) a function that shows it; a dash where no row has a number."""
    if not isinstance(form, str):
        return form

    def show(rows: Frame) -> str:
        numbers = {name: rows[name].astype(float).mean() for name in _columns_in(form)}
        return MISSING if any(map(math.isnan, numbers.values())) else form.format(**numbers)

    return show


def _columns_in(form: str) -> list[str]:
    return [name for _, name, *_ in Formatter().parse(form) if name]


def stat(column: str, how: str, form: str = "{:.3g}", scale: float = 1.0) -> ToText:
    """Return a function that shows a "mean", "median", "min", "max" or "sum" times `scale`; a dash if not a number."""

    def show(rows: Frame) -> str:
        number = float(getattr(rows[column].astype(float), how)()) * scale
        return MISSING if math.isnan(number) else form.format(number)

    return show


def only(show: Show, **values: Any) -> ToText:
    """Return `show` for the rows whose columns have these values; nothing where there is no such row."""
    return lambda rows: means(show)(kept) if len(kept := select(rows, **values)) else MISSING


def panels(frame: Frame, title: str) -> dict[str, Frame]:
    """Return `title`, in which columns stand as in "d = {d}", to the rows of each combination of values, in order."""
    names = _columns_in(title)
    groups = frame.groupby(names, sort=False)
    return {title.format(**dict(zip(names, key, strict=True))): rows for key, rows in groups}


def lines(
    panels: Mapping[str, Frame],
    x: str, y: Mapping[str, str], hue: str,
    *, x_label: str = "", title: str = "", log_x: bool = False, log_y: bool = False, wrap: int = 0,
) -> bytes:  # fmt: skip
    """Draw the mean over seeds against `x`, a line for each value of `hue`, in a band from the least to the largest.

    Args:
        panels: title to rows; one column of panels for each.
        y: column to the label of its axis; one row of panels for each.
        wrap: with a single `y`, so many panels in a column.
    """
    from matplotlib.figure import Figure

    from regard.inspect.figures import line_style, png

    names = list(dict.fromkeys(value for rows in panels.values() for value in rows[hue]))
    styles = {name: line_style(number) for number, name in enumerate(names)}
    places = [(column, y_label, panel) for column, y_label in y.items() for panel in panels.items()]
    shape = (wrap, -(-len(places) // wrap)) if wrap else (len(y), len(panels))
    size = (5.2 * shape[1] + 1.0, 3.6 * shape[0] + 0.6) if not wrap else (3.2 * shape[1] + 1.0, 2.5 * shape[0] + 1.2)
    figure = Figure(figsize=size, dpi=110, layout="constrained")
    grid: Any = figure.subplots(*shape, squeeze=False, sharey="row", sharex="col")
    for axes, (column, y_label, (heading, rows)) in zip(grid.T.flat if wrap else grid.flat, places, strict=False):
        for name, group in rows.groupby(hue, sort=False):
            _line(axes, group, x, column, styles[name], label(name))
        axes.set_title(heading if wrap or axes in grid[0] else "", fontsize=10)
        if axes in grid[:, 0]:
            axes.set_ylabel(y_label)
        axes.set(xscale="log" if log_x else "linear", yscale="log" if log_y else "linear")
        plain_axes(axes)
        if log_x and len(measured := sorted(set(rows[x]))) <= 8:  # marks at few values say more than powers of ten
            axes.set_xticks(measured, [f"{value:g}" for value in measured])
            axes.tick_params(axis="x", which="minor", bottom=False, labelbottom=False)
    for axes in grid[-1]:
        axes.set_xlabel(x_label or x)
    drawn = [zip(*axes.get_legend_handles_labels(), strict=True) for axes in grid.flat]
    handles = {name: handle for pairs in drawn for handle, name in pairs}  # each name once
    where: dict[str, Any] = {"loc": "outside lower center", "ncols": min(6, 2 + shape[1])}
    figure.legend(handles.values(), handles.keys(), frameon=False, fontsize=8, **where)
    figure.suptitle(title, x=0.02, ha="left", fontsize=11)
    return png(figure)


def _line(axes: Any, rows: Frame, x: str, y: str, style: tuple[str, str], name: str) -> None:
    points = rows.astype({y: float}).groupby(x)[y].agg(["min", "mean", "max", "count"])
    look: dict[str, Any] = {"color": style[0], "linestyle": style[1], "linewidth": 1.4, "markersize": 3.5}
    axes.plot(points.index, points["mean"], marker="o" if len(points) <= 12 else None, label=name, **look)
    if points["count"].max() > 1:
        axes.fill_between(points.index, points["min"], points["max"], color=style[0], alpha=0.15, linewidth=0)


def dots(
    frame: Frame, value: str | Mapping[str, str], rows: str, hue: str = "", *, x_label: str, title: str = ""
) -> bytes:
    """Draw a dot for each seed: a line of the figure for each value of `rows`, a column or a text with columns as in
    "d = {d}"; a colour for each column of `value`, which has their names, or of a single column each value of `hue`."""
    from matplotlib.figure import Figure

    from regard.inspect.figures import COLOURS, png

    frame = frame.assign(row=frame[rows] if rows in frame else list(map(rows.format_map, frame.to_dict("records"))))
    names = list(dict.fromkeys(frame["row"]))
    columns = {value: ""} if isinstance(value, str) else value
    shown = [(column, name, frame) for column, name in columns.items()]
    if hue:
        shown = [(*columns, label(kind), group) for kind, group in frame.groupby(hue, sort=False)]
    figure = Figure(figsize=(7.6, 1.6 + 0.34 * len(names)), dpi=110, layout="constrained")
    axes = figure.subplots()
    for at, (column, kind, group) in enumerate(shown):
        shift = 0.5 * (at - (len(shown) - 1) / 2) / len(shown)
        heights = [names.index(name) + shift for name in group["row"]]
        axes.plot(group[column], heights, "o", color=COLOURS[at % len(COLOURS)], markersize=4, alpha=0.8, label=kind)
    plain_axes(axes)
    axes.set_yticks(range(len(names)), [label(name) for name in names], fontsize=8)
    axes.invert_yaxis()
    axes.set(xlabel=x_label, title=title)
    if len(shown) > 1:
        axes.legend(frameon=False, fontsize=8)
    return png(figure)


def heat(
    panels: Mapping[str, Frame], rows: str, columns: str, value: str, text: Callable[[float], str],
    *, label: str, log: tuple[float, float] | None = None,
) -> bytes:  # fmt: skip
    """Draw means over seeds as coloured cells with their numbers, a panel for each frame; cells without rows are grey.

    Args:
        text: a mean as the text of its cell.
        label: of the colours, which go from 0 to 1, or over the decades of `log`, its ends.
    """
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import LogNorm, Normalize
    from matplotlib.figure import Figure

    from regard.inspect.figures import png

    names = list(dict.fromkeys(name for frame in panels.values() for name in frame[rows]))
    widths = [frame[columns].nunique() for frame in panels.values()]
    figure = Figure(figsize=(3.0 + 0.56 * sum(widths), 2.2 + 0.28 * len(names)), dpi=110, layout="constrained")
    grid: Any = figure.subplots(1, len(panels), sharey=True, width_ratios=widths, squeeze=False)[0]
    norm, colours = (LogNorm(*log, clip=True), "cividis_r") if log else (Normalize(0, 1), "cividis")
    for axes, (title, frame) in zip(grid, panels.items(), strict=True):
        means = frame.groupby([rows, columns])[value].mean().unstack().reindex(names)
        axes.imshow(np.ma.masked_invalid(means.to_numpy()), aspect="auto", cmap=colours, norm=norm)
        for (row, column), mean in np.ndenumerate(means.to_numpy()):
            if mean == mean:
                ink = "black" if (norm(mean) > 0.5) == (log is None) else "white"
                axes.text(column, row, text(float(mean)), ha="center", va="center", fontsize=7, color=ink)
        axes.set_xticks(range(means.shape[1]), [f"{level:g}" for level in means.columns], fontsize=8)
        axes.set_title(title, fontsize=8, wrap=True)
        axes.set_facecolor("#ececec")
        axes.tick_params(length=0)
    grid[0].set_yticks(range(len(names)), names, fontsize=8)
    figure.colorbar(ScalarMappable(norm, colours), ax=list(grid), location="bottom", shrink=0.6, aspect=45, label=label)
    return png(figure)


def plain_axes(axes: Any) -> None:
    """Give axes a light grid and no frame at the top and right."""
    axes.grid(color="#dddddd", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
