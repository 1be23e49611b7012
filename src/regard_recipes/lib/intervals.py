"""Means with 95 % intervals, and differences paired by seed."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pandas as pd

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Estimate:
    """A number with its 95 % interval.

    Attributes:
        mean: the mean, or the number itself.
        low, high: ends of the interval; equal to `mean` where the number is exact, infinite where one sample has none.
        count: samples; 0 where the number is exact.
    """

    mean: float
    low: float
    high: float
    count: int

    @property
    def finite(self) -> bool:
        """Whether no sample was NaN or infinite."""
        return math.isfinite(self.mean)

    @property
    def half(self) -> float:
        """Return half the width of the interval."""
        return (self.high - self.low) / 2

    def text(self, digits: int = 3, signed: bool = False) -> str:
        """Return "mean ± half"; "low to high" where the interval is not symmetric; "diverged" for NaN."""
        if not self.finite:
            return "diverged"
        mean = f"{self.mean:{'+' if signed else ''}.{digits}f}"
        if not self.count or not math.isfinite(self.half):
            return mean
        if not math.isclose(self.high - self.mean, self.mean - self.low, rel_tol=1e-6, abs_tol=1e-12):
            return f"{mean} ({self.low:.{digits}f} to {self.high:.{digits}f})"
        return f"{mean} ± {self.half:.{digits}f}"


def exact(value: float) -> Estimate:
    """Return a number that is no sample, such as a count of operations or the share of cells that do something."""
    return Estimate(value, value, value, 0)


def _student(mean: float, error: float, freedom: int, count: int) -> Estimate:
    """Return a mean with Student's t interval from its standard error; without end if that is not known."""
    from scipy import stats

    if freedom < 1 or not math.isfinite(mean):
        return Estimate(mean, -math.inf, math.inf, count)
    half = error * float(stats.t.ppf((1 + CONFIDENCE) / 2, freedom))
    return Estimate(mean, mean - half, mean + half, count)


def mean_interval(values: Iterable[float]) -> Estimate:
    """Return the mean of independent samples, one for each seed, with Student's t interval."""
    from scipy import stats

    samples = [float(value) for value in values]
    mean = sum(samples) / len(samples) if samples else math.nan
    error = float(stats.sem(samples)) if len(samples) > 1 and math.isfinite(mean) else math.nan
    return _student(mean, error, len(samples) - 1, len(samples))


def share_interval(hits: int, trials: int) -> Estimate:
    """Return a share of independent trials with Wilson's interval."""
    from scipy import stats

    found = stats.binomtest(hits, trials).proportion_ci(CONFIDENCE, method="wilson")
    return Estimate(hits / trials, float(found.low), float(found.high), trials)


def log_slope(frame: pd.DataFrame, x: str, y: str) -> Estimate:
    """Return the slope of log mean `y` against log `x`, with the standard errors of the means over seeds carried
    through."""
    import numpy as np

    groups = frame.groupby(x)[y]
    means, errors, counts = groups.mean(), groups.sem().fillna(0.0), groups.count()
    place = np.log(means.index.to_numpy(float))
    lever = (place - place.mean()) / ((place - place.mean()) ** 2).sum()
    slope = float(lever @ np.log(means.to_numpy()))
    error = float(np.sqrt(lever**2 @ ((errors / means) ** 2).to_numpy()))
    return _student(slope, error, int((counts - 1).sum()), int(counts.min()))


def paired(one: pd.DataFrame, other: pd.DataFrame, value: str, ratio: bool = False) -> Estimate:
    """Return the mean of a column in one set of rows less that in another (or divided by it), paired by seed.

    Seeds that only one of them has are left out. Of several rows with one seed, such as several cells, the mean is
    compared.
    """
    a, b = (rows.groupby("seed")[value].mean() for rows in (one, other))
    both = a.index.intersection(b.index)
    return mean_interval(a[both] / b[both] if ratio else a[both] - b[both])


def unpaired(one: Estimate, other: Estimate) -> Estimate:
    """Return the difference of two estimates from separate samples; too wide where the samples vary together."""
    mean, half = one.mean - other.mean, math.hypot(one.half, other.half)
    return Estimate(mean, mean - half, mean + half, min(one.count, other.count))


def ratio_interval(one: pd.Series, other: pd.Series) -> Estimate:
    """Return the ratio of the means of two columns of numbers from the same samples, in the same order, with its
    interval to first order: it varies as the difference of the two in units of their means."""
    a, b = one.to_numpy(float), other.to_numpy(float)
    found, ratio = mean_interval(a / a.mean() - b / b.mean()), float(a.mean() / b.mean())
    return Estimate(ratio, ratio - ratio * found.half, ratio + ratio * found.half, len(a))
