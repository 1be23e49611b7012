"""Means with 95 % intervals, and claims of a paper beside what was measured, each with one of four verdicts."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np

Frame = Any
"""A pandas DataFrame; pandas is slow to import."""
HOLDS, FAILS, UNDECIDED, NOT_TESTABLE = "holds", "fails", "undecided", "not testable at this size"


@dataclass(frozen=True)
class Estimate:
    """A number with its 95 % interval.

    Attributes:
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
        """Half the width of the interval."""
        return (self.high - self.low) / 2

    def plus(self, by: float) -> "Estimate":
        """Return the estimate of the number plus a constant."""
        return Estimate(self.mean + by, self.low + by, self.high + by, self.count)

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
    from scipy.stats import t

    if freedom < 1 or not math.isfinite(mean):
        return Estimate(mean, -math.inf, math.inf, count)
    half = error * float(t.ppf(0.975, freedom))
    return Estimate(mean, mean - half, mean + half, count)


def mean_interval(values: Iterable[float]) -> Estimate:
    """Return the mean of independent samples, one for each seed, with Student's t interval."""
    from scipy import stats

    samples = [float(value) for value in values]
    mean = sum(samples) / len(samples) if samples else math.nan
    error = float(stats.sem(samples)) if len(samples) > 1 and math.isfinite(mean) else math.nan
    return _student(mean, error, len(samples) - 1, len(samples))


def label(value: Any) -> str:
    """Return a value of a column for people; nothing for NaN and None."""
    if value is None or value != value:
        return ""
    return f"{value:g}" if isinstance(value, float) else str(value)


def mean_intervals(frame: Frame, by: Sequence[str], value: str) -> dict[str, Estimate]:
    """Return the mean of a column with its interval for each combination of values of `by`, which name it."""
    groups = frame.groupby(list(by), sort=False)[value]
    return {", ".join(map(label, key)): mean_interval(values) for key, values in groups}


def log_slope(frame: Frame, x: str, y: str) -> Estimate:
    """Return the slope of log mean `y` against log `x`; standard errors of the means over seeds are carried through."""
    groups = frame.groupby(x)[y]
    means, errors, counts = groups.mean(), groups.sem().fillna(0.0), groups.count()
    log_x = np.log(means.index.to_numpy(float))
    lever = (log_x - log_x.mean()) / ((log_x - log_x.mean()) ** 2).sum()
    slope = float(lever @ np.log(means.to_numpy()))
    error = float(np.sqrt(lever**2 @ ((errors / means) ** 2).to_numpy()))
    return _student(slope, error, int((counts - 1).sum()), int(counts.min()))


def paired(one: Frame, other: Frame, value: str, ratio: bool = False) -> Estimate:
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


def ratio_interval(one: Frame, other: Frame) -> Estimate:
    """Return the ratio of the means of two columns of numbers from the same samples, in the same order, with its
    interval to first order: it varies as the difference of the two in units of their means."""
    a, b = one.to_numpy(float), other.to_numpy(float)
    difference, ratio = mean_interval(a / a.mean() - b / b.mean()), float(a.mean() / b.mean())
    return Estimate(ratio, ratio - ratio * difference.half, ratio + ratio * difference.half, len(a))


@dataclass(frozen=True)
class Claim:
    """What a paper says, and what was measured.

    The claim says that each estimate is `says` (above, at least, below, at most) `margin`, or within `margin` of zero.
    It holds where the whole interval of every estimate lies there, and fails where the whole interval of one lies
    elsewhere.

    Attributes:
        paper, where, wording: the source, such as "Kernel selection", "section 7", and its words or close to them.
        estimates: what was measured, by name of the cell or comparison.
        effect: the size of the effect that the paper reports or that would matter. An interval that contains the
            margin and reaches further than this to both sides could not have shown it: not testable at this size.
        untestable: why this run cannot test the claim, such as a device that is missing; empty if it can.
        note: what a reader must know about the estimate: what was compared, and its unit.
        digits: digits of the numbers after the point.
    """

    paper: str
    where: str
    wording: str
    estimates: Mapping[str, Estimate]
    says: Literal["above", "at least", "below", "at most", "within"]
    margin: float = 0.0
    effect: float | None = None
    untestable: str = ""
    note: str = ""
    digits: int = 3

    @property
    def expected(self) -> str:
        """Return the expected range as text."""
        return f"{self.says} {'±' if self.says == 'within' else ''}{self.margin:g}"

    @property
    def verdict(self) -> str:
        """Return the verdict on all estimates together."""
        verdicts = {self.judge(estimate) for estimate in self.estimates.values()}
        if self.untestable or not verdicts:
            return NOT_TESTABLE
        return next((verdict for verdict in (FAILS, UNDECIDED, NOT_TESTABLE) if verdict in verdicts), HOLDS)

    def judge(self, estimate: Estimate) -> str:
        """Return the verdict on one estimate."""
        low, high, margin = estimate.low, estimate.high, self.margin
        if not estimate.finite:
            return UNDECIDED
        if estimate.count == 1:
            return NOT_TESTABLE  # one seed has no interval
        inside, outside = {
            "above": (low > margin, high <= margin),
            "at least": (low >= margin, high < margin),
            "below": (high < margin, low >= margin),
            "at most": (high <= margin, low > margin),
            "within": (-margin <= low and high <= margin, low > margin or high < -margin),
        }[self.says]
        if inside or outside:
            return HOLDS if inside else FAILS
        if self.effect is not None and estimate.half > abs(self.effect):
            return NOT_TESTABLE
        return UNDECIDED

    def measured(self, most: int = 3) -> str:
        """Return the estimates as text; of many those that decide, and how many have each verdict."""
        if self.untestable:
            return self.untestable
        signed = self.margin == 0 or self.says == "within"
        texts = {name: f"{name} {e.text(self.digits, signed)}".strip() for name, e in self.estimates.items()}
        if len(texts) <= most:
            return "; ".join(texts.values())
        verdicts = {name: self.judge(estimate) for name, estimate in self.estimates.items()}
        counts = Counter(verdicts.values())
        kinds = ", ".join(f"{counts[v]} {v}" for v in (HOLDS, FAILS, UNDECIDED, NOT_TESTABLE) if counts[v])
        summary = f"of {len(texts)}: {kinds}"
        if self.verdict == HOLDS:
            return summary
        deciding = [texts[name] for name in texts if verdicts[name] == self.verdict]
        return f"{summary}; {'; '.join(deciding[:most])}{' and others' * (len(deciding) > most)}"

    def record(self) -> dict[str, Any]:
        """Return the claim as plain data."""
        estimates = {name: {**asdict(e), "verdict": self.judge(e)} for name, e in self.estimates.items()}
        names = ("paper", "where", "wording", "says", "margin", "effect", "note", "verdict", "untestable")
        return {**{name: getattr(self, name) for name in names}, "estimates": estimates}


def claims_of(paper: str, rows: Iterable[Sequence[Any]], **common: Any) -> list[Claim]:
    """Return claims of a paper, without estimates that have no sample and without claims that are left with none.

    Args:
        rows: (where, wording, estimates, says, margin, note) of each, and where it differs from `common` a dictionary
            of further fields. A single estimate needs no name, and samples, one for each seed, stand for their mean.
        common: further fields of all claims.
    """
    made = []
    for where, wording, estimates, says, margin, note, *changes in rows:
        named = estimates if isinstance(estimates, Mapping) else {"": estimates}
        intervals = {name: e if isinstance(e, Estimate) else mean_interval(e) for name, e in named.items()}
        measured = {name: e for name, e in intervals.items() if e.count or e.low != -math.inf}
        if measured:
            fields = {**common, **dict(*changes), "note": note}
            made.append(Claim(paper, where, wording, measured, says, margin, **fields))
    return made


def claims_table(claims: Sequence[Claim]) -> Any:
    """Return a table with a row for each claim."""
    from regard.inspect.tables import Table

    rows = [(f"“{c.wording}” ({c.where})", c.verdict, c.expected, c.measured(), c.note) for c in claims]
    papers = "; ".join(dict.fromkeys(claim.paper for claim in claims))
    return Table(("claim", "verdict", "expected", "measured", "what is compared"), tuple(rows), (
        f"Claims of {papers}. A claim holds if its 95 % interval (±) lies entirely within the expected range, and "
        f"fails if it lies entirely outside. It is not testable at this size if a single seed gives no interval, or if "
        f"the interval is wider than the effect."))  # fmt: skip
