"""What recipes that compare language models print and draw: losses over seeds, gaps paired by seed, curves."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from .language_runs import LanguageRun

Which = Literal["train", "held_out"]
# Two-sided 95 % points of Student's t with n - 1 degrees of freedom, by n (any statistical table); the normal's beyond.
_T = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78, 6: 2.57, 7: 2.45, 8: 2.36, 9: 2.31, 10: 2.26, 11: 2.23, 12: 2.20}
_NORMAL = 1.96
DIVERGED, ONE_SEED = "diverged", "one seed"


def finals(runs: Sequence[LanguageRun]) -> list[float]:
    """The last held-out losses, in nats per token."""
    return [run.held_out[-1] for run in runs]


def spread(values: Sequence[float], digits: int = 4, signed: bool = False) -> str:
    """Mean and standard deviation, as text; `DIVERGED` where one is not finite."""
    if not all(map(math.isfinite, values)):
        return DIVERGED
    mean = f"{statistics.mean(values):{'+' if signed else ''}.{digits}f}"
    return mean if len(values) == 1 else f"{mean} ± {statistics.stdev(values):.{digits}f}"


@dataclass(frozen=True)
class Gap:
    """How much more (above 0) or less one model loses than another, seed by seed.

    Attributes:
        each: differences of the last held-out losses, in nats per token, in the order of the seeds.
    """

    each: tuple[float, ...]

    @classmethod
    def between(cls, runs: Sequence[LanguageRun], base: Sequence[LanguageRun]) -> Gap:
        """`runs` less `base`, over the seeds that both have."""
        own, other = ({run.seed: run.held_out[-1] for run in many} for many in (runs, base))
        return cls(tuple(own[seed] - other[seed] for seed in own if seed in other))

    @property
    def mean(self) -> float:
        return statistics.mean(self.each)

    @property
    def finite(self) -> bool:
        """Whether neither model diverged."""
        return all(map(math.isfinite, self.each))

    @property
    def noise(self) -> float:
        """Half the width of the 95 % interval of the mean (Student's t); infinite for one seed."""
        count = len(self.each)
        if count < 2:
            return math.inf
        return _T.get(count, _NORMAL) * statistics.stdev(self.each) / math.sqrt(count)

    @property
    def decided(self) -> bool:
        """Whether the mean is beyond the noise of the seeds."""
        return self.finite and abs(self.mean) > self.noise

    @property
    def side(self) -> str:
        """ "lower" or "higher" beyond the noise of the seeds, "level" within it, "one seed" where that is all."""
        if not self.finite:
            return DIVERGED
        if len(self.each) < 2:
            return ONE_SEED
        if not self.decided:
            return "level"
        return "lower" if self.mean < 0 else "higher"

    def __str__(self) -> str:
        if not self.finite:
            return DIVERGED
        noise = f" ± {self.noise:.4f}" if len(self.each) > 1 else ""
        return f"{self.mean:+.4f}{noise}"


def verdict(gaps: Sequence[Gap], side: str) -> str:
    """Whether all of several gaps are on the side that was claimed, "lower" or "higher", beyond the noise."""
    sides = [gap.side for gap in gaps]
    if all(found == side for found in sides):
        return "holds"
    if side in sides:
        return "holds in part"
    return f"not decided ({ONE_SEED})" if ONE_SEED in sides else "not seen here"


GAP_NOTE = "Gaps are paired by seed; after ± half the 95 % interval of their mean (Student's t)."


def band(runs: Sequence[LanguageRun], which: Which) -> tuple[list[float], list[float], list[float]]:
    """Least, mean and largest loss over the seeds at every look; NaN where a seed diverged."""
    columns = list(zip(*(getattr(run, which) for run in runs), strict=True))
    mean = [statistics.fmean(column) for column in columns]
    return [min(column) for column in columns], mean, [max(column) for column in columns]


def draw_curves(axes: Any, groups: Mapping[str, Sequence[LanguageRun]], which: Which) -> None:
    """One line for every model, the mean over its seeds, in a band from the least to the largest."""
    from ..inspect.figures import line_style

    for place, (name, runs) in enumerate(groups.items()):
        colour, style = line_style(place)
        low, mean, high = band(runs, which)
        steps = runs[0].steps
        axes.plot(steps, mean, color=colour, linestyle=style, linewidth=1.4, label=name)
        if len(runs) > 1:
            axes.fill_between(steps, low, high, color=colour, alpha=0.15, linewidth=0)
    axes.grid(color="#dddddd", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)


def curve_figure(columns: Mapping[str, Mapping[str, Sequence[LanguageRun]]], title: str) -> bytes:
    """Training loss above, held-out loss below; a column for each group of models.

    Returns:
        A PNG.
    """
    from matplotlib.figure import Figure

    from ..inspect.figures import png

    figure = Figure(figsize=(5.2 * len(columns) + 1.0, 7.6), dpi=120, layout="constrained")
    grid: Any = figure.subplots(2, len(columns), squeeze=False, sharey="row", sharex="col")
    for column, (name, groups) in enumerate(columns.items()):
        for row, which in enumerate(("train", "held_out")):
            draw_curves(grid[row, column], groups, which)  # type: ignore[arg-type]
        grid[0, column].set_title(name, fontsize=10)
        grid[1, column].set_xlabel("optimiser step")
        grid[0, column].legend(frameon=False, fontsize=7, ncols=2)
    for row, kind in enumerate(("training", "held-out")):
        grid[row, 0].set_ylabel(f"{kind} loss, nats/token")
    figure.suptitle(title, x=0.02, ha="left", fontsize=11)
    return png(figure)


def dot_figure(rows: Mapping[str, Mapping[str, Sequence[LanguageRun]]], title: str) -> bytes:
    """Last held-out losses: a row for every name, a colour for every kind, a dot for every seed.

    Args:
        rows: name to kind to runs; kinds may be missing in a row.

    Returns:
        A PNG.
    """
    from matplotlib.figure import Figure

    from ..inspect.figures import COLOURS, png

    kinds = list(dict.fromkeys(kind for row in rows.values() for kind in row))
    figure = Figure(figsize=(7.6, 1.6 + 0.34 * len(rows)), dpi=120, layout="constrained")
    axes = figure.subplots()
    for place, row in enumerate(rows.values()):
        for kind, runs in row.items():
            at = kinds.index(kind)
            height = place + 0.5 * (at - (len(kinds) - 1) / 2) / max(1, len(kinds))
            axes.plot(
                finals(runs), [height] * len(runs), "o", color=COLOURS[at % len(COLOURS)], markersize=4, alpha=0.8
            )
    for at, kind in enumerate(kinds):
        axes.plot([], [], "o", color=COLOURS[at % len(COLOURS)], markersize=4, label=kind)
    axes.set_yticks(range(len(rows)), list(rows), fontsize=8)
    axes.invert_yaxis()
    axes.grid(axis="x", color="#dddddd", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set(xlabel="held-out loss at the end, nats/token", title=title)
    if len(kinds) > 1:
        axes.legend(frameon=False, fontsize=8)
    return png(figure)
