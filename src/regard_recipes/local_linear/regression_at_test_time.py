"""Test-time regression: every estimator on data whose linear map changes, nothing trained (Local Linear Attention
paper, section 4, figures 2, 3 and 6).

docs/test-time-regression.md has the two protocols, and says what is measured as given and as chosen. A scale is counted
in units of the estimator's own (1/sqrt(d) for attention); a ridge is relative to the total weight of a kernel, absolute
for Mesa.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from regard.checks import ArgumentError, suggestion
from regard.grammar import Spec
from regard.grammar.solvers import ConjugateGradient
from regard.grammar.spec import local_linear
from regard.pairwise.attention import attention
from regard.recurrent.interpolated import interpolated_attention
from regard.recurrent.linear import linear_attention
from regard.recurrent.mesa import mesa_attention
from regard.tasks import ConeExamples, ConeRegression

from ..lib.claims import Claim, Estimate, claims_of, exact, ratio_interval
from ..lib.display import MISSING, Show, lines, panels, pivot
from ..lib.recipe import Cell, Frame, Recipe, Results, frame_of, recipe, select, significant

PAPER = "Local Linear Attention"
SELF, PAST = PROTOCOLS = ("self-included", "strictly-past")
GIVEN, CHOSEN = "given", "chosen"
SHOWN = {SELF: GIVEN, PAST: CHOSEN}  # which measurement figures and tables show
KEY = ["protocol", "d", "S", "query noise"]
LLA = "local-linear"
PARTS = ("first", "later", "late", "whole")  # see `parts`
PAPERS = (LLA, "softmax", "linear", "mesa")  # the methods that the paper compares
DRAWN = (
    "local-linear", "softmax", "local-linear[biweight]", "biweight", "local-linear[relumax]", "local-linear[triweight]",
    "linear", "elu", "mesa", "softmax+mesa", "random", "zero", "oracle",
)  # fmt: skip
POINTS = 128  # of a curve: errors of neighbouring positions are averaged
BATCH = 8  # sequences at a time
FULL = 32  # channels up to which a cell has all sequences

Setting = tuple[float, float]
"""The scale, in units of the estimator's own, and the ridge."""
Form = Callable[[Tensor, Tensor, Tensor, float, float, bool], Tensor]
"""(query, key, value [B, 1, L, d], scale, ridge, strictly past) -> what is predicted at the queries."""


class Method(NamedTuple):
    """An estimator: its name, (examples with a batch axis, scale, ridge, strictly past) -> predictions [B, L, d], and
    whether scale and ridge matter to it."""

    name: str
    predict: Callable[[ConeExamples, float, float, bool], Tensor]
    takes_scale: bool = False
    takes_ridge: bool = False


def errors(task: ConeRegression, method: Method, setting: Setting, strict: bool, seed: int, count: int) -> Tensor:
    """Return the squared errors [count, L] on the first sequences of a stream."""
    batches = [task.examples(seed, part.tolist()) for part in torch.arange(count).split(BATCH)]
    return torch.cat([task.error(method.predict(batch, *setting, strict), batch) for batch in batches])


def parts(length: int, segment: int) -> dict[str, Tensor]:
    """Return the positions of the first segment, of all later ones, of the second halves of these, and all."""
    at = torch.arange(length)
    later = at >= segment
    half = at % segment >= segment // 2
    return {"first": at[~later], "later": at[later], "late": at[later & half], "whole": at}


def curve(error: Tensor) -> list[float]:
    """Return the error by position, neighbours averaged to at most POINTS, over sequences."""
    points = max(p for p in range(1, min(POINTS, error.shape[1]) + 1) if error.shape[1] % p == 0)
    return [significant(x) for x in error.reshape(len(error), points, -1).mean((0, 2)).tolist()]


@recipe("test-time-regression")
class Regression(Recipe):
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
    limits: ClassVar = {
        **dict.fromkeys(("sequences", "held_out", "dims", "segments"), (1, math.inf)), "seeds": (1, 1),
        **dict.fromkeys(("scales", "ridges", "ridge", "tol"), (1e-6, 1e6)),
    }  # fmt: skip
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
        if "softmax" not in self.specs:
            raise ArgumentError("--specs lacks softmax, to which all others are compared; add it.")
        for name in names:
            if names.count(name) > 1:
                raise ArgumentError(f"{name} would be measured twice; name every kernel once.")

    def task(self, cell: Cell) -> ConeRegression:
        """Return the data of a cell."""
        return ConeRegression(cell["d"], self.length, cell["S"], self.noise, cell["query noise"])

    def count(self, dim: int) -> int:
        """Return the number of sequences of a cell."""
        return min(self.sequences, max(2, self.sequences * FULL // dim))

    def choose(self, task: ConeRegression, method: Method, strict: bool, seed: int) -> Setting:
        """Return the scale and ridge of the grid with the least error on held-out sequences; of equals the first."""
        scales = self.scales if method.takes_scale else (1.0,)
        ridges = self.ridges if method.takes_ridge else (self.ridge,)
        settings = list(itertools.product(scales, ridges))
        score = lambda s: float(errors(task, method, s, strict, seed + 1, self.held_out).mean())  # noqa: E731
        return min(settings, key=score) if len(settings) > 1 else settings[0]

    def cells(self) -> list[Cell]:
        kinds = [(d, s, 0.0) for d, s in itertools.product(self.dims, self.segments)]
        kinds += [(d, self.noisy_segment, n) for d, n in itertools.product(self.dims, self.query_noise) if n]
        return [{"protocol": protocol, "d": d, "S": s, "query noise": n} for d, s, n in kinds for protocol in PROTOCOLS]

    @torch.no_grad()
    def measure(self, cell: Cell, seed: int) -> Iterator[dict[str, Any]]:
        task, strict = self.task(cell), cell["protocol"] == PAST
        oracle = Method("oracle", lambda examples, *_: task.oracle(examples, exclude_self=strict))
        known = [*methods(self.specs, self.residuals, self.tol, seed), oracle]
        given, sequences, measured = (1.0, self.ridge), self.count(cell["d"]), {}
        for how in (GIVEN, CHOSEN) if strict else (GIVEN,):
            for method in known:
                setting = self.choose(task, method, strict, seed) if how == CHOSEN else given
                if how == GIVEN or setting != given:  # else it is measured already
                    measured[method.name] = errors(task, method, setting, strict, seed, sequences)
                error = measured[method.name]
                row = {"method": method.name, "how": how, "scale": setting[0], "ridge": setting[1]}
                means = {part: error[:, at].mean(-1) for part, at in parts(self.length, cell["S"]).items()}
                for sequence in range(sequences):
                    yield {"kind": "error", **row, "sequence": sequence, "seed": seed + sequence,
                           **{part: significant(mean[sequence].item()) for part, mean in means.items()}}  # fmt: skip
                if method.name in DRAWN and not cell["query noise"]:
                    yield {"kind": "curve", **row, "curve": curve(error)}

    def claims(self, results: Results) -> list[Claim]:
        clean = select(in_view(results), **{"query noise": 0.0})
        wide = clean[(clean["d"] >= 16) & (clean["S"] < self.length)]
        rows = select(clean, protocol=SELF, method=PAPERS)
        cells = rows.groupby(["d", "S", "method"])["first"].mean().unstack()[list(PAPERS)]
        least = float((cells.idxmin(axis=1) == "mesa").mean())
        note = "Error of LLA over that of softmax after the first segment, each cell with d >= 16, {}."
        over = {protocol: ratios(select(wide, protocol=protocol), "later") for protocol in PROTOCOLS}
        return claims_of(PAPER, [
            ("section 4", "LLA adapts to a changed map better than softmax attention", over[SELF], "below", 1,
             note.format("self-included")),
            ("section 4", "Mesa has the least error in the first segment", exact(least), "at least", 1,
             f"Share of cells, self-included, of {', '.join(PAPERS)}."),
            ("section 4", "The same without the pair itself among the data", over[PAST], "below", 1,
             note.format("strictly-past, scale and ridge chosen")),
        ], effect=0.1)  # fmt: skip

    def tables(self, results: Results) -> dict[str, Any]:
        shown = with_shares(in_view(results))
        clean = select(shown, **{"query noise": 0.0})
        softmax = select(clean, method="softmax")
        over: Callable[[str], Show] = lambda part: lambda rows: versus(rows, softmax, part)  # noqa: E731
        note = (
            "Self-included: given; strictly past: chosen. Later: after the first segment; late: in the second halves "
            "of those segments; whole: all positions. ± half the 95 % interval."
        )
        ratios = {part: over(part) for part in PARTS}
        lla = pivot(select(clean, method=LLA), ["protocol", "d", "S"], ratios, note=note)
        tables = {"Squared error of LLA in units of softmax attention's": lla}
        share: Show = lambda rows: small(rows["share"].mean())  # noqa: E731
        shown = shown[shown["method"] != "zero"]
        for protocol in PROTOCOLS:
            rows = select(shown, protocol=protocol, **{"query noise": 0.0})
            title = f"Squared error in units of the zero predictor's, {protocol}"
            tables[title] = pivot(rows, ["d", "S"], {"": share}, columns="method", note="All positions.")
        swept = select(shown[shown["query noise"] > 0], method=DRAWN)
        if len(swept):
            tables["The same against query noise"] = pivot(swept, KEY, {"": share}, columns="method")
        return tables

    def figures(self, results: Results) -> dict[str, bytes]:
        shown = with_shares(in_view(results))
        mean = select(shown, **{"query noise": 0.0}).groupby([*KEY, "method"], sort=False)["whole"].mean()
        ratio = (mean / mean.xs(LLA, level="method")).rename("ratio").reset_index()
        ratio = ratio[~ratio["method"].isin(["zero", "oracle"])]
        draw = partial(lines, hue="method", log_y=True)
        over = panels(ratio.sort_values(["S", "protocol"], kind="stable"), "S = {S}, {protocol}")
        figures = {"ratio": draw(over, "d", {"ratio": "error / LLA's"}, log_x=True, wrap=2)}
        if self.query_noise:
            swept = panels(select(shown, S=self.noisy_segment, method=DRAWN), "d = {d}, {protocol}")
            figures["noise"] = draw(swept, "query noise", {"share": "error / zero predictor's"}, wrap=2)
        curves = in_view(results, "curve").sort_values(["S", "d"], kind="stable")
        for protocol in PROTOCOLS:
            each = panels(select(curves, protocol=protocol), "d = {d}, S = {S}")
            over = {title: points(rows, self.length) for title, rows in each.items()}
            title = f"{protocol} ({SHOWN[protocol]})"
            figures[protocol] = draw(over, "position", {"error": "squared error"}, wrap=len(self.dims), title=title)
        return figures

    def notes(self, results: Results) -> list[str]:
        scales, ridges = (", ".join(f"{x:g}" for x in numbers) for numbers in (self.scales, self.ridges))
        return [
            f"Noise {self.noise:g} on values. Given: every method's own scale, ridge {self.ridge:g}. Chosen: on "
            f"{self.held_out} sequences of another seed, the scale out of {scales} times its own and the ridge out of "
            f"{ridges}.",
        ]


def in_view(results: Results, kind: str = "error") -> Frame:
    """Return the rows that figures and tables show: self-included as given, strictly past as chosen."""
    rows = results.select(kind=kind)
    return rows[rows["how"] == rows["protocol"].map(SHOWN)]


def with_shares(rows: Frame) -> Frame:
    """Return rows with a column "share": their error in units of the zero predictor's mean error in the same cell."""
    zero = select(rows, method="zero").groupby(KEY)["whole"].mean()
    return rows.assign(share=rows["whole"] / rows[KEY].join(zero, on=KEY)["whole"])


def points(rows: Frame, length: int) -> Frame:
    """Return curves with a row for each point."""
    return frame_of({"method": row.method, "position": (i + 0.5) * length / len(row.curve), "error": error}
                    for row in rows.itertuples() for i, error in enumerate(row.curve) if error > 0)  # fmt: skip


def ratios(rows: Frame, part: str) -> dict[str, Estimate]:
    """Return the error of LLA over that of softmax for each d and S."""
    return {f"d = {d}, S = {s}": ratio_interval(*(select(cell, method=name)[part] for name in (LLA, "softmax")))
            for (d, s), cell in rows.groupby(["d", "S"])}  # fmt: skip


def versus(rows: Frame, base: Frame, part: str) -> str:
    """Return the ratio of the error of rows to that of base in the same cell, as text."""
    same = select(base, **{name: rows[name].iloc[0] for name in KEY})
    return MISSING if rows[part].isna().all() else ratio_interval(rows[part], same[part]).text(3)


def small(x: float) -> str:
    """Return a share as text."""
    return f"{x:.3f}" if 0.001 <= x < 10 else f"{x:.1e}".replace("e-0", "e-").replace("e+0", "e")


def methods(specs: Iterable[str], residuals: Iterable[str], tol: float, seed: int) -> list[Method]:
    """Return every estimator: kernels (`specs`) as local constants and as local linear models solved to `tol`, linear
    states, kernels on the residuals of a state of `STATES` ("KERNEL+STATE", equation 9), and two that look at nothing,
    of which one draws with `seed`."""
    kernels = [(name, _constant(name)) for name in specs]
    made: list[Any] = [(name, partial(_kernel, spec), spec.takes_scale) for name, spec in kernels]
    for _, spec in kernels:
        model = local_linear(spec)
        solved = replace(model, solver=ConjugateGradient(tol=tol))
        made.append((str(model), partial(_kernel, solved), spec.takes_scale, True))
    made += [("elu", _elu), ("linear", _linear), ("mesa", _mesa, False, True)]
    for name in residuals:
        kernel, _, state = name.rpartition("+")
        if state not in STATES:
            raise ArgumentError(f"unknown state {state!r} of {name!r}.{suggestion(state, STATES)}")
        spec = _constant(kernel)
        made.append((name, partial(_interpolated, spec, STATES[state]), spec.takes_scale, state == "mesa"))
    made += [("random", partial(_random, seed)), ("zero", lambda q, k, v, *_: torch.zeros_like(v))]
    return [Method(name, partial(_predict, form), *takes) for name, form, *takes in made]


def _predict(form: Form, examples: ConeExamples, scale: float, ridge: float, strict: bool) -> Tensor:
    q, k, v = (x[:, None] for x in (examples.queries, examples.keys, examples.values))
    return form(q, k, v, scale, ridge, strict)[:, 0]


def _constant(name: str) -> Spec:
    spec = Spec.parse(name)
    if spec.degree:
        raise ArgumentError(f"{name} is a local linear model already; give its kernel alone.")
    return spec


def _kernel(spec: Spec, q: Tensor, k: Tensor, v: Tensor, scale: float, ridge: float, strict: bool) -> Tensor:
    spec = replace(spec, ridge=ridge) if spec.degree else spec
    out: Tensor = attention(q, k, v, spec, is_causal=True, exclude_self=strict, scale=_scale(spec, k, scale))
    return out


def _scale(spec: Spec, k: Tensor, scale: float) -> float | None:
    """Return `scale` times the scale that the spec has by itself."""
    return spec.similarity.default_scale(k.shape[-1]) * scale if spec.takes_scale else None


def _elu(q: Tensor, k: Tensor, v: Tensor, scale: float, ridge: float, strict: bool) -> Tensor:
    """Predict by linear attention as it was published, with the feature map 1 + elu and weights that sum to one."""
    return linear_attention(q, k, v, "elu", exclude_self=strict)[0]


def _linear(q: Tensor, k: Tensor, v: Tensor, scale: float, ridge: float, strict: bool) -> Tensor:
    """Return S_i q / (n + d + 1) with S_i the sum of the n visible v k^T (equation 2 with a multiple of the identity
    for H), the best multiple for normal keys and a single map: E|c S q - A q|^2 is least at c = 1 / (n + d + 1)."""
    visible = torch.arange(q.shape[-2]) + (0 if strict else 1)
    return linear_attention(q, k, v, "linear", exclude_self=strict, scale=1 / (visible + q.shape[-1] + 1.0))[0]


def _mesa(q: Tensor, k: Tensor, v: Tensor, scale: float, ridge: float, strict: bool) -> Tensor:
    """Return the ridge regression through the origin of all visible values on their keys (equation 2), in float64:
    with a small ridge and fewer pairs than channels its systems have condition numbers near 1e6."""
    out: Tensor = mesa_attention(q.double(), k.double(), v.double(), ridge=ridge, exclude_self=strict)[0]
    return out.to(v.dtype)


STATES: dict[str, Form] = {"linear": _linear, "mesa": _mesa}
"""Linear states, which equation 9 lets a kernel correct."""


def _interpolated(
    spec: Spec, state: Form, q: Tensor, k: Tensor, v: Tensor, scale: float, ridge: float, strict: bool
) -> Tensor:
    """Predict by equation 9: the local constant of the residuals v_j - W_i k_j, and W_i q_i on top."""
    trend = lambda q, k, v, **_: state(q, k, v, 1.0, ridge, strict)  # noqa: E731
    out: Tensor = interpolated_attention(q, k, v, trend, spec, exclude_self=strict, scale=_scale(spec, k, scale))
    return out


def _random(seed: int, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> Tensor:
    """Predict a vector with the law of a value, v ~ N(0, |q|^2 I), and nothing else in common with it."""
    return torch.randn(v.shape, generator=torch.Generator().manual_seed(seed)) * q.norm(dim=-1, keepdim=True)
