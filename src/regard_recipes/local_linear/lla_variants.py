"""Cheaper local linear attention: error against time for sliding windows, diagonal blocks and solver budgets (Local
Linear Attention paper, appendix E: SW-LLA, BD-LLA and Table 1).

The data and protocols are those of test-time regression. docs/local-linear-results.md says why regard's diagonal blocks
are not the paper's; both are measured, with every ridge.
"""

import time
import warnings
from collections.abc import Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor

from regard.checks import ArgumentError
from regard.tasks import ConeExamples, ConeRegression

from ..lib.claims import Claim, Estimate, claims_of, exact, mean_interval, unpaired
from ..lib.display import Show, lines, only, panels, pivot, stat
from ..lib.recipe import Cell, Frame, Recipe, Results, select, significant, stacked
from ._variants import COSTS, ROWS, blocks, costs, formulas, variants
from .lla_numerics_schemes import q_centred_blocks
from .regression_at_test_time import PAPER, PAST, PROTOCOLS, SELF

SIGMA = "blocks of Sigma"  # the paper's


class Variants(Recipe, name="lla-variants"):
    """Error of windows, diagonal blocks and solver budgets of local linear attention against time and cost."""

    workers: int = 1
    """Cells measured at the same time; more than one spoils the times."""
    dim: int = 64  # Channels of keys and values, a power of two: blocks are its divisors.
    length: int = 1024  # Positions of a sequence.
    segment: int = 256  # Positions for which the map stays the same.
    sequences: int = 8  # Sequences.
    noise: float = 0.1  # Standard deviation of a value around the map.
    ridges: tuple[float, ...] = (0.1, 1.0)  # Ridges, relative to the kernel weight.
    windows: tuple[int, ...] = (32, 64, 128, 256, 512)  # Keys that a query sees with a sliding window.
    steps: tuple[int, ...] = (1, 2, 4, 8, 16)  # Budgets of conjugate gradients, in steps.
    tols: tuple[float, ...] = (1e-1, 1e-2, 1e-3)
    """Budgets of conjugate gradients, in relative residuals; the last one is that of the windows."""
    repeats: int = 5  # Timings of every variant.
    limits: ClassVar = {
        "length": (16, 4096), "sequences": (1, 4096), "repeats": (1, 1000), "seeds": (1, 1), "ridges": (1e-6, 1e6),
        "windows": (1, 2**20), "steps": (0, 10_000), "tols": (1e-7, 1.0),
    }  # fmt: skip
    by_size: ClassVar = {
        "quick": {"dim": 16, "length": 256, "segment": 64, "sequences": 4, "windows": (32, 128), "steps": (1, 4),
                  "repeats": 2},
    }  # fmt: skip
    no_paper_size = "The paper has formulas for the cost of windows and diagonal blocks, and measures neither."

    @property
    def task(self) -> ConeRegression:
        return ConeRegression(self.dim, self.length, self.segment, self.noise)

    def check(self) -> None:
        _ = self.task
        if self.dim & (self.dim - 1) or not 2 <= self.dim <= 128:
            raise ArgumentError(f"--dim is {self.dim}, expected a power of two from 2 to 128.")
        if self.tols[-1] != min(self.tols):
            raise ArgumentError(f"--tols is {self.tols}; give the smallest last, windows are solved to it.")

    def cells(self) -> list[Cell]:
        known = variants(self)
        plain = [(v.name, None) for v in known if not v.takes_ridge]
        local = [(v.name, ridge) for ridge in self.ridges for v in known if v.takes_ridge]
        return [{"variant": name, "ridge": ridge} for name, ridge in (*plain, *local, (SIGMA, None))]

    @torch.no_grad()
    def measure(self, cell: Cell, seed: int) -> Iterator[dict[str, Any]]:
        data = self.task.examples(seed, range(self.sequences))
        if cell["variant"] == SIGMA:
            yield from self.blocks_of_sigma(data)
            return
        (variant,) = (v for v in variants(self) if v.name == cell["variant"])
        times, keys, values, ridge = [], data.keys[:, None], data.values[:, None], cell["ridge"]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # too few steps are the point
            predicted = {part: variant.predict(keys, values, ridge, part == PAST, True) for part in PROTOCOLS}
            for _ in range(self.repeats):
                start = time.perf_counter()
                variant.predict(keys, values, ridge, False)
                times.append(1e6 * (time.perf_counter() - start) / (len(keys) * self.length))
        middle, seen = sorted(times)[len(times) // 2], variant.window or self.length
        common = {
            "group": variant.group, "cost": variant.cost, "window": variant.window, "blocks": variant.blocks,
            "keys": sum(min(i + 1, seen) for i in range(self.length)) / self.length,  # the mean over rows
            "microseconds": significant(middle), "fastest": significant(min(times)), "slowest": significant(max(times)),
        }  # fmt: skip
        for protocol, (out, steps) in predicted.items():
            mean = None if steps is None else significant(steps.double().mean())
            yield {**common, "protocol": protocol, **self.share(out, data), "steps": mean}

    def blocks_of_sigma(self, data: ConeExamples) -> Iterator[dict[str, Any]]:
        """Yield error and the share of rows with delta <= 0 of the paper's blocks."""
        for protocol in PROTOCOLS:
            each = [q_centred_blocks(k, v, self.ridges, blocks(self.dim), protocol == PAST)
                    for k, v in zip(data.keys, data.values, strict=True)]  # fmt: skip
            for ridge, count in each[0]:
                out, delta = (torch.stack(parts) for parts in zip(*(one[ridge, count] for one in each), strict=True))
                yield {"variant": f"{SIGMA} {count}", "ridge": ridge, "group": SIGMA, "blocks": count,
                       "protocol": protocol, **self.share(out, data),
                       "not_positive": significant((self.later(delta) <= 0).double().mean())}  # fmt: skip

    def later(self, rows: Tensor) -> Tensor:
        """Return the positions of [B, T] that count: those after the first segment, or all if there is no other."""
        return rows[:, self.segment % self.length :]

    def share(self, predicted: Tensor, data: ConeExamples) -> dict[str, float]:
        """Return the error in units of the zero predictor's, and half its 95 % interval over sequences."""
        off, zero = (self.later(self.task.error(out, data)).sum(-1) for out in (predicted, torch.zeros(())))
        share = mean_interval((off / zero.mean()).tolist())
        return {"error": significant(share.mean), "half": significant(share.half)}

    def at_every_ridge(self, results: Results) -> Frame:
        """Return the rows, those of variants without a ridge once for each ridge."""
        ridges, frame = self.ridges, results.frame
        return stacked(frame[frame["ridge"].isna() | (frame["ridge"] == r)].assign(ridge=r) for r in ridges)

    def claims(self, results: Results) -> list[Claim]:
        rows, count = list(self.at_every_ridge(results).itertuples()), self.sequences
        errors = {(row.variant, row.ridge, row.protocol):
                  Estimate(row.error, row.error - row.half, row.error + row.half, count) for row in rows}  # fmt: skip
        named = lambda row: f"{row.variant}, ridge {row.ridge:g}, {row.protocol}"  # noqa: E731
        less = lambda base, group: {  # noqa: E731
            named(row): unpaired(*(errors[name, row.ridge, row.protocol] for name in (row.variant, base)))
            for row in rows if group in (row.group, row.variant)
        }  # fmt: skip
        shares = {named(row): exact(row.not_positive) for row in rows if row.group == SIGMA and row.blocks > 1}
        unit, part = "Error after the first segment in units of the zero predictor's", "appendix E"
        return claims_of(PAPER, [
            ("section 4", "Local linear attention errs less than softmax attention", less("softmax", "auto"), "below",
             0, f"{unit}, local linear less softmax."),
            (part, "A sliding window (SW-LLA) loses no accuracy", less("auto", "windows"), "at most", 0,
             f"{unit}, window less all keys."),
            (part, "Diagonal blocks of the covariance lose no accuracy", less("auto", "blocks"), "at most", 0,
             f"{unit}, blocks less full."),
            (part, "The denominator delta of BD-LLA is positive", shares, "at most", 0,
             "Share of rows with delta <= 0 for diagonal blocks of Sigma, more than one block."),
        ], effect=0.05, digits=4)  # fmt: skip

    def tables(self, results: Results) -> dict[str, Any]:
        frame = results.frame
        regards = frame[frame["group"] != SIGMA]
        values: dict[str, Show] = {
            SELF: only(_pair, protocol=SELF), PAST: only(_pair, protocol=PAST), "µs a query": "{microseconds:.3g}",
            "steps": only("{steps:.3g}", protocol=SELF),
        }  # fmt: skip
        parts = select(frame, group=["blocks", SIGMA]).sort_values(["protocol", "ridge", "blocks"], kind="stable")
        return {
            "Error and time of the variants": pivot(regards, ["variant", "ridge"], values, note=(
                f"Squared error after the first segment in units of the zero predictor's, ± half the 95 % interval "
                f"over {self.sequences} sequences; forward, median of {self.repeats} timings, self-included.")),
            "The paper's Table 1, corrected": formulas(),
            "Operations and numbers moved, beside the time": self.cost_table(regards),
            "Diagonal blocks: the paper's, centred at the query, and of the covariance": pivot(
                parts, ["protocol", "ridge", "blocks"],
                {"of Sigma, as in the paper": only(_pair, group=SIGMA),
                 "rows with delta <= 0": only("{not_positive:.1%}", group=SIGMA),
                 "of the covariance (regard)": only(_pair, group="blocks")},
                note="One block is local linear attention itself, twice.",
            ),
        }  # fmt: skip

    def cost_table(self, rows: Frame) -> Any:
        """Return the corrected formulas beside the times, at the first ridge."""
        rows = select(rows[rows["ridge"].isna() | (rows["ridge"] == self.ridges[0])], protocol=SELF)
        rows = rows[(rows["variant"] != "auto") & ~rows["group"].isin(["steps", "softmax windows"])]
        rows = costs(rows, self.dim).sort_values("cost", key=lambda c: c.map(list(COSTS).index), kind="stable")
        return pivot(rows, {"cost": "form", "variant": "variant"}, {
            "mean steps": "{steps:.3g}", "kFLOP a query": stat("flops", "mean", "{:.4g}", 1e-3),
            "kB a query": stat("numbers", "mean", "{:.4g}", 4e-3), "µs a query": "{microseconds:.4g}",
            "GFLOP/s": "{speed:.4g}",
        }, note=(
            f"Corrected formulas at n = the mean number of keys a query sees, d = {self.dim}, T = the steps, "
            f"B = {ROWS}, ridge {self.ridges[0]:g}, 4 bytes a number. Times are measured; traffic is the formula's."
        ))  # fmt: skip

    def figures(self, results: Results) -> dict[str, bytes]:
        rows = self.at_every_ridge(results)
        timed, parts = rows[rows["microseconds"].notna()], select(rows, group=["blocks", SIGMA])
        against = lambda rows, x, x_label: lines(  # noqa: E731
            panels(rows, "{protocol}, ridge {ridge:g}"), x, {"error": "error / zero predictor's"}, "group",
            x_label=x_label, log_x=True, log_y=True, wrap=2,
        )  # fmt: skip
        return {"time": against(timed, "microseconds", "µs a query, forward"),
                "blocks": against(parts, "blocks", "diagonal blocks")}  # fmt: skip

    def notes(self, results: Results) -> list[str]:
        return [
            f"d = {self.dim}, {self.length} positions in segments of {self.segment}, {self.sequences} sequences, noise "
            f"{self.noise:g}. Self-included: a position sees its own pair; strictly-past: it does not.",
        ]


def _pair(rows: Frame) -> str:
    (row,) = rows.itertuples()
    return f"{row.error:.3g} ± {row.half:.1g}"
