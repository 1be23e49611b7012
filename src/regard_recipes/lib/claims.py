"""Claims of a paper beside what was measured, each with one of four verdicts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from .intervals import Estimate

HOLDS, FAILS, UNDECIDED, NOT_TESTABLE = "holds", "fails", "undecided", "not testable at this size"
Says = Literal["above", "at least", "below", "at most", "within"]


@dataclass(frozen=True)
class Claim:
    """What a paper says, and what was measured.

    The claim says that each estimate is `says` (above, at least, below, at most) `margin`, or within `margin` of zero.
    It holds where the whole interval of every estimate lies there, and fails where the whole interval of one lies
    elsewhere.

    Attributes:
        paper, where: the source, such as "Kernel selection", "section 7".
        wording: the claim in the paper's words or close to them.
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
    says: Says
    margin: float = 0.0
    effect: float | None = None
    untestable: str = ""
    note: str = ""
    digits: int = 3

    @property
    def verdict(self) -> str:
        """Return the verdict on all estimates together."""
        found = {self.judge(estimate) for estimate in self.estimates.values()}
        if self.untestable or not found:
            return NOT_TESTABLE
        for verdict in (FAILS, UNDECIDED, NOT_TESTABLE):
            if verdict in found:
                return verdict
        return HOLDS

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
        texts = {name: self._text(name, estimate) for name, estimate in self.estimates.items()}
        if len(texts) <= most:
            return "; ".join(texts.values())
        verdicts = {name: self.judge(estimate) for name, estimate in self.estimates.items()}
        counts = [f"{list(verdicts.values()).count(v)} {v}" for v in (HOLDS, FAILS, UNDECIDED, NOT_TESTABLE)]
        summary = f"of {len(texts)}: {', '.join(count for count in counts if not count.startswith('0 '))}"
        kept = [texts[name] for name in texts if verdicts[name] == self.verdict]
        if self.verdict == HOLDS:
            return summary
        return f"{summary}; {'; '.join(kept[:most])}{' and others' * (len(kept) > most)}"

    def _text(self, name: str, estimate: Estimate) -> str:
        signed = self.margin == 0 or self.says == "within"
        return f"{name} {estimate.text(self.digits, signed)}".strip()

    def record(self) -> dict[str, Any]:
        """Return the claim as plain data."""
        sides = {
            name: {"mean": e.mean, "low": e.low, "high": e.high, "count": e.count, "verdict": self.judge(e)}
            for name, e in self.estimates.items()
        }
        own = {name: getattr(self, name) for name in ("paper", "where", "wording", "says", "margin", "effect", "note")}
        return {**own, "verdict": self.verdict, "untestable": self.untestable, "estimates": sides}


def one(estimate: Estimate) -> dict[str, Estimate]:
    """Return `estimates` of a claim about a single number."""
    return {"": estimate}


def claims_table(claims: Sequence[Claim]) -> Any:
    """Return a table with a row for each claim."""
    from regard.inspect.tables import Table

    rows = []
    for claim in claims:
        says = f"within ±{claim.margin:g}" if claim.says == "within" else f"{claim.says} {claim.margin:g}"
        rows.append((f"“{claim.wording}” ({claim.where})", claim.verdict, says, claim.measured(), claim.note))
    papers = list(dict.fromkeys(claim.paper for claim in claims))
    source = f"Claims of {'; '.join(papers)}. " if papers else ""
    note = (
        f"{source}A claim holds or fails where the whole 95 % interval (±) is on one side of what it says. It is not "
        f"testable at this size where one seed has no interval, or the interval is wider than the effect."
    )
    return Table(("claim", "verdict", "it says", "measured", "what is compared"), tuple(rows), note)
