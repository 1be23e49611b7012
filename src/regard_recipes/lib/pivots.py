"""Tables from frames: a row of text for each group of rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from .intervals import mean_interval, paired
from .results import select

if TYPE_CHECKING:
    import pandas as pd

Show = Callable[["pd.DataFrame"], str]
"""Rows of a group, usually one for each seed, as the text of a cell."""
MISSING = "–"


def pivot(
    frame: pd.DataFrame, index: Sequence[str] | Mapping[str, str], values: Mapping[str, Show],
    columns: str | None = None, *, note: str = "",
) -> Any:  # fmt: skip
    """Return a table (`regard.inspect.tables.Table`) with a row for each combination of `index`.

    Args:
        index: columns of the frame that name the rows, or column to heading; rows are in the order in which they first
            come.
        values: heading ("" with `columns` that name all) to how a cell is shown.
        columns: a column of the frame whose values become headings, each with all of `values`; in the order in which
            they first come, or of the categories of a categorical column.
        note: a sentence below the table.
    """
    from regard.inspect.tables import Table

    heads: list[Any] = [None]
    if columns is not None:
        own = frame[columns]
        heads = list(own.cat.categories) if own.dtype == "category" else list(dict.fromkeys(own))
    names = [
        title if head is None else label(head) if len(values) == 1 else f"{label(head)}: {title}"
        for head in heads
        for title in values
    ]
    rows = []
    for key, group in frame.groupby(list(index), sort=False, dropna=False):
        parts = [group if head is None else group[group[columns] == head] for head in heads]
        cells = [show(part) if len(part) else MISSING for part in parts for show in values.values()]
        rows.append((*map(label, key), *cells))
    headings = index.values() if isinstance(index, Mapping) else index
    return Table((*headings, *names), tuple(rows), note)


def spread(column: str, digits: int = 3) -> Show:
    """Return a function that shows mean ± standard deviation."""

    def show(rows: pd.DataFrame) -> str:
        values = rows[column].astype(float)
        if not all(map(math.isfinite, values)):
            return "diverged"
        text = f"{values.mean():.{digits}f}"
        return f"{text} ± {values.std():.{digits}f}" if len(values) > 1 else text

    return show


def interval(column: str, digits: int = 3, signed: bool = False) -> Show:
    """Return a function that shows mean ± half the 95 % interval."""
    return lambda rows: mean_interval(rows[column]).text(digits, signed)


def gap(column: str, base: pd.DataFrame, digits: int = 3, ratio: bool = False) -> Show:
    """Return a function that shows how much more (above 0) the rows have than `base`, paired by seed, ± half the 95 %
    interval; with `ratio` how many times as much. Nothing for the rows of `base` itself."""

    def show(rows: pd.DataFrame) -> str:
        if rows.index.equals(base.index):
            return ""
        return paired(rows, base, column, ratio).text(digits, signed=not ratio)

    return show


def stat(column: str, how: str, form: str = "{:.3g}", scale: float = 1.0) -> Show:
    """Return a function that shows a statistic times `scale`; `how` is "mean", "median", "min" or "max"."""
    return lambda rows: form.format(float(getattr(rows[column].astype(float), how)()) * scale)


def median(column: str, form: str = "{:.3g}", scale: float = 1.0) -> Show:
    """Return a function that shows the median times `scale`."""
    return stat(column, "median", form, scale)


def only(show: Show, **values: Any) -> Show:
    """Return `show` for the rows whose columns have these values; nothing where there is no such row."""
    return lambda rows: show(kept) if len(kept := select(rows, **values)) else MISSING


def first(column: str, form: str = "{}", scale: float | None = None) -> Show:
    """Return a function that shows the first value, for what is equal for all seeds; nothing where it is missing."""

    def show(rows: pd.DataFrame) -> str:
        value = rows[column].iloc[0]
        if value is None or value != value:
            return MISSING
        return form.format(value if scale is None else value * scale)

    return show


def label(value: Any) -> str:
    """Return a value of a column for people; nothing for NaN and None."""
    if value is None or value != value:
        return ""
    return f"{value:g}" if isinstance(value, float) else str(value)
