"""What recipes that compare language models print and draw: losses over seeds, gaps paired by seed, curves."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from .language_runs import LanguageRun

Which = Literal["train", "held_out"]
_NORMAL = 1.959964
_T = (
    12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281, 2.2010, 2.1788, 2.1604, 2.1448,
    2.1314, 2.1199, 2.1098, 2.1009, 2.0930, 2.0860, 2.0796, 2.0739, 2.0687, 2.0639, 2.0595, 2.0555, 2.0518, 2.0484,
    2.0452, 2.0423,
)  # fmt: skip
"""Two-sided 95 % points of the normal, and of Student's t with 1 to 30 degrees of freedom (any statistical table)."""
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


def student(freedom: int) -> float:
    """Two-sided 95 % point of Student's t with this many degrees of freedom, at least 1, to 0.001: beyond the table the
    normal's with two corrections (Abramowitz and Stegun 26.7.5)."""
    if freedom <= len(_T):
        return _T[freedom - 1]
    first, second = _NORMAL**3 + _NORMAL, 5 * _NORMAL**5 + 16 * _NORMAL**3 + 3 * _NORMAL
    return _NORMAL + first / (4 * freedom) + second / (96 * freedom**2)


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
        return student(count - 1) * statistics.stdev(self.each) / math.sqrt(count)

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
    """Whether all of several gaps are on the side that was claimed, "lower" or "higher", beyond the noise: "not seen
    here" where all are level, "does not hold here" where some are on the other side and none on this."""
    sides = [gap.side for gap in gaps]
    for undecided in (DIVERGED, ONE_SEED):
        if undecided in sides and side not in sides:
            return f"not decided ({undecided})"
    if side in sides:
        return "holds" if set(sides) == {side} else "holds in part"
    return "not seen here" if set(sides) == {"level"} else "does not hold here"


def order(one: Gap, other: Gap) -> str:
    """Whether two models stand on the same side of a third: only sides beyond the noise tell."""
    sides = {one.side, other.side}
    if not sides <= {"lower", "higher"}:
        return "not decided"
    return "the order stays" if len(sides) == 1 else "the order changes"


def rate_note(rates: float | Mapping[int, float]) -> str:
    """That no learning rate was sought for any model.

    Args:
        rates: the highest learning rate, or depth to it.
    """
    if isinstance(rates, float):
        told = f"{rates:g}"
    elif len(set(rates.values())) == 1:
        told = f"{next(iter(rates.values())):g}" + (", at every depth" if len(rates) > 1 else "")
    else:
        told = ", ".join(f"{rate:g} at depth {depth}" for depth, rate in rates.items())
    return f"All have the same learning rate ({told}), chosen for none of them by itself: gaps are those at this rate."


def finite_runs(groups: Mapping[str, Sequence[LanguageRun]]) -> dict[str, Sequence[LanguageRun]]:
    """Without the models that diverged: their line would have no scale."""
    return {name: runs for name, runs in groups.items() if not any(run.diverged for run in runs)}


def seeds_note(count: int) -> str:
    """What a `spread` over this many seeds shows."""
    return "One seed." if count == 1 else f"Mean ± standard deviation over {count} seeds."


GAP_NOTE = "Gaps are paired by seed; after ± half the 95 % interval of their mean (Student's t)."


def band(runs: Sequence[LanguageRun], which: Which) -> tuple[list[float], list[float], list[float]]:
    """Least, mean and largest loss over the seeds at every look; NaN where a seed diverged."""
    columns = list(zip(*(getattr(run, which) for run in runs), strict=True))
    mean = [statistics.fmean(column) for column in columns]
    return [min(column) for column in columns], mean, [max(column) for column in columns]


def draw_curves(axes: Any, groups: Mapping[str, Sequence[LanguageRun]], which: Which) -> None:
    """One line for every model, the mean over its seeds, in a band from the least to the largest."""
    from regard.inspect.figures import line_style

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

    from regard.inspect.figures import png

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

    from regard.inspect.figures import COLOURS, png

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
