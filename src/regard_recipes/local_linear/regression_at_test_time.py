"""Test-time regression: every estimator on data whose linear map changes, nothing trained (Local Linear Attention
paper, section 4, figures 2, 3 and 6).

docs/test-time-regression.md has the two protocols, and says what is measured as given and as chosen.
"""

import itertools
from collections.abc import Iterator
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from regard.checks import ArgumentError
from regard.tasks import ConeRegression

from ..lib.claims import Claim, Estimate, claims_of, exact, ratio_interval
from ..lib.display import MISSING, Show, lines, panels, pivot
from ..lib.recipe import Cell, Frame, Recipe, Results, check_once, select, significant
from ._estimators import Method, Setting, methods

PAPER, LLA = "Local Linear Attention", "local-linear"
SELF, PAST = PROTOCOLS = ("self-included", "strictly-past")
GIVEN, CHOSEN = "given", "chosen"
SHOWN = {SELF: GIVEN, PAST: CHOSEN}  # which measurement figures and tables show
CLEAN = {"query noise": 0.0}
KEY = ["protocol", "d", "S", "query noise"]
PAPERS = (LLA, "softmax", "linear", "mesa")  # the methods that the paper compares
DRAWN = (
    "local-linear", "softmax", "local-linear[biweight]", "biweight", "local-linear[relumax]", "local-linear[triweight]",
    "linear", "elu", "mesa", "softmax+mesa", "random", "zero", "oracle",
)  # fmt: skip
POINTS = 128  # of a curve: errors of neighbouring positions are averaged
BATCH = 8  # sequences at a time
FULL = 32  # channels up to which a cell has all sequences


def errors(task: ConeRegression, method: Method, setting: Setting, seed: int, count: int) -> Tensor:
    """Return the squared errors [count, L] on the first sequences of a stream."""
    batches = [task.examples(seed, part.tolist()) for part in torch.arange(count).split(BATCH)]
    return torch.cat([task.error(method.predict(batch, setting), batch) for batch in batches])


def parts(length: int, segment: int) -> dict[str, Tensor]:
    """Return the positions of the first segment, of all later ones, of the second halves of these, and all."""
    at = torch.arange(length)
    later, half = at >= segment, at % segment >= segment // 2
    return {"first": at[~later], "later": at[later], "late": at[later & half], "whole": at}


def curve(error: Tensor) -> list[float]:
    """Return the error by position, neighbours averaged to at most POINTS, over sequences."""
    points = max(p for p in range(1, min(POINTS, error.shape[1]) + 1) if error.shape[1] % p == 0)
    return [significant(x) for x in error.reshape(len(error), points, -1).mean((0, 2)).tolist()]


class Regression(Recipe, name="test-time-regression"):
    """Local linear attention beside attention and linear states on a linear map that changes, nothing trained."""

    specs: tuple[str, ...] = ("softmax", "rbf", "biweight", "relumax", "triweight")
    """Kernels, each measured as a local constant and as a local linear model."""
    residuals: tuple[str, ...] = ("softmax+mesa", "softmax+linear", "biweight+mesa")
    """Kernels on the residuals of a linear state (equation 9): KERNEL+mesa or KERNEL+linear."""
    dims: tuple[int, ...] = (8, 16, 32, 64, 128)  # Channels of keys and values.
    segments: tuple[int, ...] = (8, 16, 32, 64, 128, 256, 512, 1024)  # Positions for which the map stays the same.
    length: int = 1024  # Positions of a sequence.
    sequences: int = 32
    """Sequences of every cell with at most 32 channels, in proportion fewer of wider ones, whose errors are means over
    more channels; the paper has 10,000."""
    held_out: int = 2  # Sequences of another seed, on which scale and ridge are chosen.
    tol: float = 1e-3  # Relative residual at which the systems of local linear models count as solved.
    noise: float = 0.1  # Standard deviation of a value around the map.
    query_noise: tuple[float, ...] = (0.1, 0.3, 1.0)
    """Standard deviations of a query around its key, for the sweep; the grid of dims and segments has none."""
    noisy_segment: int = 128  # The segment of that sweep.
    ridge: float = 0.1  # The ridge of what is measured as given.
    scales: tuple[float, ...] = (0.125, 0.25, 0.5, 1.0, 2.0, 4.0)
    """The scales to choose from, in units of the scale that a method has by itself."""
    ridges: tuple[float, ...] = (0.01, 0.1, 1.0, 10.0)  # The ridges to choose from.
    limits: ClassVar = {"seeds": (1, 1), **dict.fromkeys(("scales", "ridges", "ridge", "tol"), (1e-6, 1e6))}
    by_size: ClassVar = {
        "quick": {
            "dims": (8, 16, 32), "segments": (64, 128, 512), "sequences": 4, "held_out": 1, "query_noise": (0.3,),
            "scales": (0.25, 0.5, 1.0, 2.0), "ridges": (0.1, 1.0, 10.0),
        },
        "paper": {"sequences": 10_000},
    }  # fmt: skip

    def check(self) -> None:
        for cell in self.cells():
            self.task(cell)
        names = [method.name for method in methods(self.specs, self.residuals, self.tol, self.seed)]
        check_once(self.call(), "--specs or --residuals", names)
        if "softmax" not in self.specs:
            raise ArgumentError("--specs lacks softmax, to which all others are compared; add it.")

    def task(self, cell: Cell) -> ConeRegression:
        """Return the data of a cell."""
        return ConeRegression(cell["d"], self.length, cell["S"], self.noise, cell["query noise"])

    def count(self, dim: int) -> int:
        """Return the number of sequences of a cell."""
        return min(self.sequences, max(2, self.sequences * FULL // dim))

    def choose(self, task: ConeRegression, method: Method, strict: bool, seed: int) -> Setting:
        """Return the setting of the grid with the least error on held-out sequences; of equals the first."""
        scales = self.scales if method.takes_scale else (1.0,)
        ridges = self.ridges if method.takes_ridge else (self.ridge,)
        settings = [Setting(*pair, strict) for pair in itertools.product(scales, ridges)]
        score = lambda setting: float(errors(task, method, setting, seed + 1, self.held_out).mean())  # noqa: E731
        return min(settings, key=score) if len(settings) > 1 else settings[0]

    def cells(self) -> list[Cell]:
        kinds = [(d, s, 0.0) for d, s in itertools.product(self.dims, self.segments)]
        kinds += [(d, self.noisy_segment, n) for d, n in itertools.product(self.dims, self.query_noise) if n]
        return [{"protocol": protocol, "d": d, "S": s, "query noise": n} for d, s, n in kinds for protocol in PROTOCOLS]

    @torch.no_grad()
    def measure(self, cell: Cell, seed: int) -> Iterator[dict[str, Any]]:
        task, strict = self.task(cell), cell["protocol"] == PAST
        oracle = Method("oracle", lambda examples, setting: task.oracle(examples, exclude_self=setting.strict))
        known = [*methods(self.specs, self.residuals, self.tol, seed), oracle]
        given, sequences, measured = Setting(1.0, self.ridge, strict), self.count(cell["d"]), {}
        for how in (GIVEN, CHOSEN) if strict else (GIVEN,):
            for method in known:
                setting = self.choose(task, method, strict, seed) if how == CHOSEN else given
                if how == GIVEN or setting != given:  # else it is measured already
                    measured[method.name] = errors(task, method, setting, seed, sequences)
                error = measured[method.name]
                row = {"method": method.name, "how": how, "scale": setting.scale, "ridge": setting.ridge}
                means = {part: error[:, at].mean(-1) for part, at in parts(self.length, cell["S"]).items()}
                for sequence in range(sequences):
                    yield {"kind": "error", **row, "sequence": sequence, "seed": seed + sequence,
                           **{part: significant(mean[sequence].item()) for part, mean in means.items()}}  # fmt: skip
                if method.name in DRAWN and not cell["query noise"]:
                    yield {"kind": "curve", **row, "curve": curve(error)}

    def claims(self, results: Results) -> list[Claim]:
        clean = select(in_view(results), **CLEAN)
        wide = clean[(clean["d"] >= 16) & (clean["S"] < self.length)]
        cells = lambda protocol: panels(select(wide, protocol=protocol), "d = {d}, S = {S}")  # noqa: E731
        over = lambda protocol: {cell: over_softmax(rows, "later") for cell, rows in cells(protocol).items()}  # noqa: E731
        rows = select(clean, protocol=SELF, method=PAPERS)
        means = rows.groupby(["d", "S", "method"])["first"].mean().unstack()[list(PAPERS)]
        least = float((means.idxmin(axis=1) == "mesa").mean())
        note = "Error of LLA over that of softmax after the first segment, each cell with d >= 16, {}."
        return claims_of(PAPER, [
            ("section 4", "LLA adapts to a changed map better than softmax attention", over(SELF), "below", 1,
             note.format("self-included")),
            ("section 4", "Mesa has the least error in the first segment", exact(least), "at least", 1,
             f"Share of cells, self-included, of {', '.join(PAPERS)}."),
            ("section 4", "The same without the pair itself among the data", over(PAST), "below", 1,
             note.format("strictly-past, scale and ridge chosen")),
        ], effect=0.1)  # fmt: skip

    def tables(self, results: Results) -> dict[str, Any]:
        rows = in_view(results)
        versus: dict[str, Show] = {part: partial(versus_softmax, part) for part in ("first", "later", "late", "whole")}
        shares = partial(pivot, index=KEY[1:], values={"": "{share:#.4g}"}, columns="method", note="All positions.")
        return {
            "Squared error of LLA in units of softmax attention's": pivot(
                select(rows, method=[LLA, "softmax"], **CLEAN), ["protocol", "d", "S"], versus,
                note="Self-included: given; strictly past: chosen. Later: after the first segment; late: in the second "
                     "halves of those segments; whole: all positions. ± half the 95 % interval."),
            **{f"Squared error in units of the zero predictor's, {protocol}": shares(of_protocol)
               for protocol, of_protocol in panels(rows[rows["method"] != "zero"], "{protocol}").items()},
        }  # fmt: skip

    def figures(self, results: Results) -> dict[str, bytes]:
        rows, curves = in_view(results), in_view(results, "curve")
        mean = select(rows, **CLEAN).groupby([*KEY, "method"], sort=False)["whole"].mean()
        ratio = (mean / mean.xs(LLA, level="method")).rename("ratio").reset_index()
        ratio = ratio[~ratio["method"].isin(["zero", "oracle"])]
        draw = partial(lines, hue="method", log_y=True)
        over = panels(ratio.sort_values(["S", "protocol"], kind="stable"), "S = {S}, {protocol}")
        figures = {"ratio": draw(over, "d", {"ratio": "error / LLA's"}, log_x=True, wrap=2)}
        if self.query_noise:
            swept = panels(select(rows, S=self.noisy_segment, method=DRAWN), "d = {d}, {protocol}")
            figures["noise"] = draw(swept, "query noise", {"share": "error / zero predictor's"}, wrap=2)
        points = curves.sort_values(["S", "d"], kind="stable").explode("curve").astype({"curve": float})
        bin_middle = points.groupby(level=0).cumcount() + 0.5
        points["position"] = bin_middle * self.length / (bin_middle.max() + 0.5)
        for protocol, of_protocol in panels(points[points["curve"] > 0], "{protocol}").items():
            each, title = panels(of_protocol, "d = {d}, S = {S}"), f"{protocol} ({SHOWN[protocol]})"
            figures[protocol] = draw(each, "position", {"curve": "squared error"}, wrap=len(self.dims), title=title)
        return figures

    def notes(self, results: Results) -> list[str]:
        scales, ridges = (", ".join(f"{x:g}" for x in numbers) for numbers in (self.scales, self.ridges))
        return [
            f"Noise {self.noise:g} on values. Given: every method's own scale, ridge {self.ridge:g}. Chosen: on "
            f"{self.held_out} sequences of another seed, the scale out of {scales} times its own and the ridge out of "
            f"{ridges}.",
        ]


def in_view(results: Results, kind: str = "error") -> Frame:
    """Return the rows that figures and tables show, self-included as given, strictly past as chosen, with a column
    "share": the error in units of the zero predictor's mean error in the same cell."""
    rows = results.select(kind=kind)
    rows = rows[rows["how"] == rows["protocol"].map(SHOWN)]
    zero = select(rows, method="zero").groupby(KEY)["whole"].mean()
    return rows.assign(share=rows["whole"] / rows[KEY].join(zero, on=KEY)["whole"])


def over_softmax(rows: Frame, part: str) -> Estimate:
    """Return the error of LLA over that of softmax on the same sequences."""
    return ratio_interval(*(select(rows, method=name)[part] for name in (LLA, "softmax")))


def versus_softmax(part: str, rows: Frame) -> str:
    """Return `over_softmax` as text; a dash where there is no such part."""
    return MISSING if rows[part].isna().all() else over_softmax(rows, part).text()
