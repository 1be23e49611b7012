"""Cheaper local linear attention: error against time for sliding windows, diagonal blocks and solver budgets (Local
Linear Attention paper, appendix E: SW-LLA, BD-LLA and Table 1).

The data are those of test-time regression (`regard.tasks.ConeRegression`), under both of its protocols. The paper
defines BD-LLA as the diagonal blocks of Sigma, the second moment about the query, where its denominator
delta = omega - mu . rho is no longer positive; regard takes the blocks of the covariance about the weighted mean of the
keys, where there is no denominator. Both are measured, with every ridge.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from regard.checks import ArgumentError
from regard.grammar.solvers import Auto, BlockDiagonal, Cholesky, ConjugateGradient, Solver
from regard.pairwise.attention import attention
from regard.pairwise.local_linear_attention import local_linear_attention
from regard.recurrent.mesa import mesa_attention
from regard.tasks import ConeRegression

from ..lib.claims import Claim, Estimate, exact, mean_interval, unpaired
from ..lib.display import MISSING, Show, first, lines, panels, pivot
from ..lib.recipe import Cell, Frame, Recipe, RecipeConfig, Results, recipe, select, significant
from .lla_numerics_schemes import q_centred_blocks
from .lla_variants_cost import COSTS, Sizes

PAPER = "Local Linear Attention"
SELF, PAST = "self-included", "strictly-past"
SIGMA = "blocks of Sigma"  # the paper's
ROWS = 128  # the B of the formulas: regard's own blocks of queries


@dataclass(frozen=True, kw_only=True)
class VariantsConfig(RecipeConfig):
    """Measure error and time of windows, diagonal blocks and solver budgets of local linear attention."""

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


Solve = Callable[[Tensor, Tensor, float, bool, bool], tuple[Tensor, Tensor | None]]
"""(keys and queries, values [B, 1, T, d], ridge, whether a position's own pair is hidden from it, whether iterations
are counted) -> predictions, and if counted the iterations of every row where there are some."""


class Variant(NamedTuple):
    """A way to predict: its name and group in tables and figures, a row of `COSTS`, the keys that a query sees (None:
    all), its diagonal blocks, and whether the ridge matters."""

    name: str
    group: str
    run: Solve
    cost: str
    window: int | None = None
    blocks: int = 1
    takes_ridge: bool = True

    def sizes(self, config: VariantsConfig, steps: float | None) -> Sizes:
        """Return what the formulas need: n is the mean over rows."""
        seen = self.window or config.length
        n = sum(min(i + 1, seen) for i in range(config.length)) / config.length
        return Sizes(n, config.dim, steps or 0.0, self.blocks, ROWS)


def _sdpa(k: Tensor, v: Tensor, ridge: float, strict: bool, counted: bool) -> tuple[Tensor, None]:
    if strict:
        return attention(k, k, v, "softmax", exclude_self=True), None
    return scaled_dot_product_attention(k, k, v, is_causal=True), None


def _mesa(k: Tensor, v: Tensor, ridge: float, strict: bool, counted: bool) -> tuple[Tensor, Tensor | None]:
    how: dict[str, Any] = {"solver": "cg", "tol": 1e-3, "max_iter": 4 * k.shape[-1], "exclude_self": strict}
    found = mesa_attention(k, k, v, ridge=ridge, return_diagnostics=counted, **how)
    return found[0], found[2]["iterations"] if counted else None


def _softmax(window: int | None) -> Solve:
    how: dict[str, Any] = {"is_causal": True, "window": window, "impl": "blocked"}
    return lambda k, v, ridge, strict, counted: (attention(k, k, v, "softmax", exclude_self=strict, **how), None)


def _local_linear(solver: Solver, window: int | None = None) -> Solve:
    how: dict[str, Any] = {"solver": solver, "window": window, "is_causal": True, "impl": "blocked"}

    def run(k: Tensor, v: Tensor, ridge: float, strict: bool, counted: bool) -> tuple[Tensor, Tensor | None]:
        more: dict[str, Any] = {"ridge": ridge, "exclude_self": strict, "return_diagnostics": counted}
        found = local_linear_attention(k, k, v, **how, **more)
        return (found[0], found[1].solver["iterations"]) if counted else (found, None)

    return run


def variants(config: VariantsConfig) -> list[Variant]:
    """Return all of them, plain attention first."""
    plain, kept, direct, parts = "softmax", "lla, weights kept", "lla, direct", "block-diagonal, direct"
    tol = config.tols[-1]
    made = [
        Variant("sdpa", "softmax", _sdpa, plain, takes_ridge=False),
        Variant("softmax", "softmax", _softmax(None), plain, takes_ridge=False), Variant("mesa", "mesa", _mesa, "mesa"),
        Variant("auto", "exact", _local_linear(Auto()), kept),
        Variant("cholesky", "exact", _local_linear(Cholesky()), direct),
    ]  # fmt: skip
    made += [Variant(f"tol {t:g}", "tolerances", _local_linear(ConjugateGradient(tol=t)), kept) for t in config.tols]
    made += [Variant(f"steps {n}", "steps", _local_linear(ConjugateGradient(max_iter=n)), kept) for n in config.steps]
    made += [Variant(f"blocks {g}", "blocks", _local_linear(BlockDiagonal(g)), parts, blocks=g)
             for g in blocks(config.dim)]  # fmt: skip
    for w in (w for w in config.windows if w < config.length):
        name = f"window {w}"
        made += [
            Variant(f"softmax, {name}", "softmax windows", _softmax(w), plain, w, takes_ridge=False),
            Variant(name, "windows", _local_linear(ConjugateGradient(tol=tol), w), kept, w),
        ]
        made += [Variant(f"blocks {g}, {name}", "windows and blocks", _local_linear(BlockDiagonal(g), w), parts, w, g)
                 for g in (config.dim // 2, config.dim) if g > 1]  # fmt: skip
    return made


def blocks(dim: int) -> list[int]:
    """Return 1, 2, 4, ..., dim, a power of two."""
    return [2**i for i in range(dim.bit_length())]


class Data(NamedTuple):
    """Keys (which are the queries) and values [B, 1, T, d], and the positions that count."""

    keys: Tensor
    values: Tensor
    later: slice

    def share(self, predicted: Tensor) -> dict[str, float]:
        """Return the error after the first segment, in units of the zero predictor's, and half the width of its 95 %
        interval over sequences."""
        off = (predicted - self.values)[:, 0, self.later].double().square().sum((-1, -2))
        zero = self.values[:, 0, self.later].double().square().sum((-1, -2))
        found = mean_interval((off / zero.mean()).tolist())
        return {"error": significant(found.mean), "half": significant(found.half)}


def draw(config: VariantsConfig, seed: int) -> Data:
    """Return the sequences."""
    task = ConeRegression(config.dim, config.length, config.segment, config.noise)
    drawn = task.examples(seed, range(config.sequences))
    return Data(drawn.keys[:, None], drawn.values[:, None], slice(config.segment % config.length, None))


@recipe("lla-variants")
class Variants(Recipe):
    """Error of windows, diagonal blocks and solver budgets of local linear attention against time and cost."""

    Config = VariantsConfig
    sizes: ClassVar = {
        "quick": {"dim": 16, "length": 256, "segment": 64, "sequences": 4, "windows": (32, 128), "steps": (1, 4),
                  "repeats": 2},
    }  # fmt: skip

    limits: ClassVar = {
        "length": (16, 4096), "sequences": (1, 4096), "repeats": (1, 1000), "seeds": (1, 1), "ridges": (1e-6, 1e6),
        "windows": (1, 2**20), "steps": (0, 10_000), "tols": (1e-7, 1.0),
    }  # fmt: skip

    def check(self) -> None:
        own = self.config
        ConeRegression(own.dim, own.length, own.segment, own.noise)
        if own.dim & (own.dim - 1) or not 2 <= own.dim <= 128:
            raise ArgumentError(f"--dim is {own.dim}, expected a power of two from 2 to 128.")
        if own.tols[-1] != min(own.tols):
            raise ArgumentError(f"--tols is {own.tols}; give the smallest last, windows are solved to it.")

    def cells(self) -> list[Cell]:
        known, ridges = variants(self.config), self.config.ridges
        made: list[Cell] = [{"variant": v.name, "ridge": None} for v in known if not v.takes_ridge]
        made += [{"variant": v.name, "ridge": ridge} for ridge in ridges for v in known if v.takes_ridge]
        return [*made, {"variant": SIGMA, "ridge": None}]

    @torch.no_grad()
    def measure(self, cell: Cell, seed: int) -> Iterator[dict[str, Any]]:
        data = draw(self.config, seed)
        if cell["variant"] == SIGMA:
            yield from self.blocks_of_sigma(data)
            return
        (variant,) = (v for v in variants(self.config) if v.name == cell["variant"])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # too few steps are the point
            yield from self.errors_and_times(variant, data, cell["ridge"] or 0.0)

    def errors_and_times(self, variant: Variant, data: Data, ridge: float) -> Iterator[dict[str, Any]]:
        """Yield a row for each protocol."""
        found: dict[str, dict[str, Any]] = {}
        for protocol in (SELF, PAST):
            out, steps = variant.run(data.keys, data.values, ridge, protocol == PAST, True)
            direct = variant.cost.endswith("direct")
            count = None if steps is None or direct else significant(steps.double().mean().item())
            found[protocol] = {"protocol": protocol, **data.share(out), "steps": count}
        times = []
        for _ in range(self.config.repeats):
            start = time.perf_counter()
            variant.run(data.keys, data.values, ridge, False, False)
            times.append(1e6 * (time.perf_counter() - start) / (len(data.keys) * self.config.length))
        cost, sizes = COSTS[variant.cost], variant.sizes(self.config, found[SELF]["steps"])
        numbers = {
            "flops": cost.flops(sizes), "numbers": cost.numbers(sizes), "microseconds": sorted(times)[len(times) // 2],
            "fastest": min(times), "slowest": max(times),
        }  # fmt: skip
        for row in found.values():
            yield {
                "group": variant.group, "cost": variant.cost, "window": variant.window, "blocks": variant.blocks,
                **row, "keys": sizes.n, **{name: significant(number) for name, number in numbers.items()},
            }  # fmt: skip

    def blocks_of_sigma(self, data: Data) -> Iterator[dict[str, Any]]:
        """Yield error and the share of rows with delta <= 0 of the paper's blocks."""
        for protocol in (SELF, PAST):
            each = [q_centred_blocks(k, v, self.config.ridges, blocks(self.config.dim), protocol == PAST)
                    for k, v in zip(data.keys[:, 0], data.values[:, 0], strict=True)]  # fmt: skip
            for ridge, count in each[0]:
                out = torch.stack([one[ridge, count][0] for one in each])[:, None]
                delta = torch.stack([one[ridge, count][1] for one in each])[:, data.later]
                yield {"variant": f"{SIGMA} {count}", "ridge": ridge, "group": SIGMA, "blocks": count,
                       "protocol": protocol, **data.share(out),
                       "not_positive": significant((delta <= 0).double().mean().item())}  # fmt: skip

    def claims(self, results: Results) -> list[Claim]:
        frame, ridges = results.frame, self.config.ridges
        at = [(ridge, protocol) for ridge in ridges for protocol in (SELF, PAST)]
        full = {key: self.estimate(frame, "auto", *key) for key in at}
        softmax = {key: self.estimate(frame, "softmax", *key) for key in at}
        apart = lambda groups: {  # noqa: E731
            f"{row.variant}, ridge {row.ridge:g}, {row.protocol}":
                unpaired(self.estimate(frame, row.variant, row.ridge, row.protocol), full[row.ridge, row.protocol])
            for row in select(frame, group=groups).itertuples()
        }  # fmt: skip
        shares = {f"{row.variant}, ridge {row.ridge:g}, {row.protocol}": exact(row.not_positive)
                  for row in select(frame, group=SIGMA).itertuples() if row.blocks > 1}  # fmt: skip
        unit = "Error after the first segment in units of the zero predictor's"
        return [
            Claim(PAPER, "section 4", "Local linear attention errs less than softmax attention",
                  {f"ridge {r:g}, {p}": unpaired(full[r, p], softmax[r, p]) for r, p in at}, "below", 0, 0.05,
                  note=f"{unit}, local linear less softmax."),
            *(Claim(PAPER, "appendix E", wording, apart([group]), "at most", 0, 0.05, note=f"{unit}, {less}.", digits=4)
              for wording, group, less in (
                  ("A sliding window (SW-LLA) loses no accuracy", "windows", "window less all keys"),
                  ("Diagonal blocks of the covariance lose no accuracy", "blocks", "blocks less full"))),
            Claim(PAPER, "appendix E", "The denominator delta of BD-LLA is positive", shares, "at most", 0,
                  note="Share of rows with delta <= 0 for diagonal blocks of Sigma, more than one block."),
        ]  # fmt: skip

    def estimate(self, frame: Frame, variant: str, ridge: float, protocol: str) -> Estimate:
        """Return the error of a variant over sequences; variants without ridge have it at all ridges."""
        rows = select(frame, variant=variant, protocol=protocol)
        (row,) = rows[(rows["ridge"] == ridge) | rows["ridge"].isna()].itertuples()
        return Estimate(row.error, row.error - row.half, row.error + row.half, self.config.sequences)

    def tables(self, results: Results) -> dict[str, Any]:
        frame = results.frame
        own, theirs = select(frame[frame["group"] != SIGMA]), select(frame, group=SIGMA)
        error: Callable[[str], Show] = lambda protocol: lambda r: _pair(select(r, protocol=protocol))  # noqa: E731
        values = {SELF: error(SELF), PAST: error(PAST), "µs a query": first("microseconds", "{:.3g}"),
                  "steps": first("steps", "{:.3g}")}  # fmt: skip
        same = ["ridge", "protocol", "blocks"]
        mine: Show = lambda rows: _pair(select(own, group="blocks", **rows[same].iloc[0]))  # noqa: E731
        note = (
            f"Squared error after the first segment in units of the zero predictor's, ± half the 95 % interval over "
            f"{self.config.sequences} sequences; forward, median of {self.config.repeats} timings, self-included."
        )
        return {
            "Error and time of the variants": pivot(own, ["variant", "ridge"], values, note=note),
            "The paper's Table 1, corrected, beside what was measured": self.cost_table(own),
            "Diagonal blocks: the paper's, centred at the query, and of the covariance": pivot(
                theirs, ["protocol", "ridge", "blocks"],
                {"of Sigma, as in the paper": _pair, "rows with delta <= 0": first("not_positive", "{:.1%}"),
                 "of the covariance (regard)": mine},
                note="One block is local linear attention itself, twice.",
            ),
        }  # fmt: skip

    def cost_table(self, own: Frame) -> Any:
        """Return a row for every form of Table 1, and below it the variants that were measured, at the first ridge."""
        from regard.inspect.tables import Table

        own = select(own[own["ridge"].isna() | (own["ridge"] == self.config.ridges[0])], protocol=SELF)
        own = own[~own["variant"].isin(["auto"]) & ~own["group"].isin(["steps", "softmax windows"])]
        rows: list[tuple[str, ...]] = []
        for name, cost in COSTS.items():
            paper = [part or MISSING for part in cost.paper]
            rows.append((name, paper[0], cost.computed, paper[1], cost.moved, "", "", "", "", ""))
            for row in select(own, cost=name).itertuples():
                steps = MISSING if row.steps is None or math.isnan(row.steps) else f"{row.steps:.3g}"
                numbers = (row.flops / 1e3, 4e-3 * row.numbers, row.microseconds, row.flops / row.microseconds / 1e3)
                rows.append((f"· {row.variant}", "", "", "", "", steps, *(f"{x:.4g}" for x in numbers)))
        header = ("", "operations, paper", "corrected", "numbers moved, paper", "corrected", "mean steps",
                  "kFLOP a query", "kB a query", "µs a query", "GFLOP/s")  # fmt: skip
        note = (
            f"Formulas at n = the mean number of keys a query sees, d = {self.config.dim}, T = the steps, g blocks, "
            f"B = {ROWS} queries of a block, ridge {self.config.ridges[0]:g}, forward, 4 bytes a number. Times are "
            f"measured; traffic is the formula's."
        )
        return Table(header, tuple(rows), note)

    def figures(self, results: Results) -> dict[str, bytes]:
        import pandas as pd

        frame = results.frame
        alike = frame["ridge"].isna()  # without a ridge, the same with all
        own = pd.concat([frame[alike | (frame["ridge"] == ridge)].assign(ridge=ridge) for ridge in self.config.ridges])
        timed, parts = own[own["microseconds"].notna()], select(own, group=["blocks", SIGMA])
        against = lambda rows, x, x_label: lines(  # noqa: E731
            panels(rows, "{protocol}, ridge {ridge:g}"), x, {"error": "error / zero predictor's"}, "group",
            x_label=x_label, log_x=True, log_y=True, wrap=2,
        )  # fmt: skip
        return {"time": against(timed, "microseconds", "µs a query, forward"),
                "blocks": against(parts, "blocks", "diagonal blocks")}  # fmt: skip

    def notes(self, results: Results) -> list[str]:
        own = self.config
        return [
            f"d = {own.dim}, {own.length} positions in segments of {own.segment}, {own.sequences} sequences, noise "
            f"{own.noise:g}. Self-included: a position sees its own pair; strictly-past: it does not.",
        ]


def _pair(rows: Frame) -> str:
    (row,) = rows.itertuples()
    return f"{row.error:.3g} ± {row.half:.1g}"
