"""Test-time regression: every estimator on data whose linear map changes, nothing trained (Local Linear Attention
paper, section 4, figures 2, 3 and 6).

At every position the pairs so far are fitted and a query is predicted; what counts is the squared error there,
|f(q_i) - v_i|^2. Two protocols:

* self-included: pair i is among the pairs that position i sees. This is the paper's; at a query that is its key it
  rewards giving back what was just stored.
* strictly-past: only pairs before i are seen, so that something has to be predicted.

The paper states no ridge, and its bandwidth in the text alone (h = 2 sqrt(d), the usual scale of attention). `given`
is that: every estimator at its own scale, one ridge for all. `chosen`, in the second protocol: the scale and the
ridge with the least error on sequences of another seed, from a grid that is the same for all. The first protocol has
no choice: the sharpest bandwidth, which looks up the pair itself, would win for every kernel.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from regard.checks import ArgumentError
from regard.recipes import Findings, Progress, recipes
from regard.tasks import ConeRegression

from ..lib.running import one_thread
from .regression_at_test_time_methods import Method, methods

CALL = "reproduce: test-time-regression"
PROTOCOLS = ("self-included", "strictly-past")
SHOWN = {"self-included": "given", "strictly-past": "chosen"}
"""Which measurement figures and tables show."""
DRAWN = (
    "local-linear", "softmax", "local-linear[biweight]", "biweight", "local-linear[relumax]", "local-linear[triweight]",
    "linear", "elu", "mesa", "softmax+mesa", "random", "zero", "oracle",
)  # fmt: skip
"""Whose curves are kept."""
LLA = "local-linear"
POINTS = 128
"""Of a curve: errors of neighbouring positions are averaged."""
BATCH = 8
"""Sequences at a time."""
FULL = 32
"""Channels up to which a cell has all sequences."""
BAND = 1.96
"""Standard errors on each side of a mean."""
DIGITS = 4
"""Significant ones, of the numbers in the JSON file."""


@dataclass(frozen=True, kw_only=True)
class RegressionConfig:
    """Measure how attention, local linear models and linear states follow a linear map that changes."""

    out: Path = Path("test-time-regression-out")
    """Folder to write. An earlier result in it is replaced; any other folder must be empty."""
    quick: bool = False
    """Small: options that are not given otherwise take values that need less than two minutes."""
    specs: tuple[str, ...] = ("softmax", "rbf", "biweight", "relumax", "triweight")
    """Kernels, each measured as a local constant and as a local linear model."""
    residuals: tuple[str, ...] = ("softmax+mesa", "softmax+linear", "biweight+mesa")
    """Kernels on the residuals of a linear state (equation 9): KERNEL+mesa or KERNEL+linear."""
    dims: tuple[int, ...] = (8, 16, 32, 64, 128)
    """Channels of keys and values."""
    segments: tuple[int, ...] = (8, 16, 32, 64, 128, 256, 512, 1024)
    """Positions for which the map stays the same."""
    length: int = 1024
    """Positions of a sequence."""
    sequences: int = 32
    """Sequences of every cell with at most 32 channels, in proportion fewer of wider ones, whose errors are means over
    more channels; the paper has 10,000."""
    held_out: int = 2
    """Sequences of another seed, on which scale and ridge are chosen."""
    tol: float = 1e-3
    """Relative residual at which the systems of local linear models count as solved."""
    noise: float = 0.1
    """Standard deviation of a value around the map."""
    query_noise: tuple[float, ...] = (0.1, 0.3, 1.0)
    """Standard deviations of a query around its key, for the sweep; the grid of dims and segments has none."""
    noisy_segment: int = 128
    """The segment of that sweep."""
    ridge: float = 0.1
    """The ridge of what is measured as given."""
    scales: tuple[float, ...] = (0.125, 0.25, 0.5, 1.0, 2.0, 4.0)
    """The scales to choose from, in units of the scale that a method has by itself."""
    ridges: tuple[float, ...] = (0.01, 0.1, 1.0, 10.0)
    """The ridges to choose from."""
    curve_dim: int = 64
    """The dim of the figure of errors by position."""
    curve_segments: tuple[int, ...] = (64, 256, 512, 1024)
    """The segments of that figure."""
    seed: int = 0
    """Decides all sequences."""


QUICK: dict[str, Any] = {
    "dims": (8, 16, 32),
    "segments": (64, 128, 512),
    "sequences": 4,
    "held_out": 1,
    "query_noise": (0.3,),
    "scales": (0.25, 0.5, 1.0, 2.0),
    "ridges": (0.1, 1.0, 10.0),
    "curve_dim": 16,
    "curve_segments": (64, 128, 512),
}
"""What `quick` makes of the defaults."""


@dataclass(frozen=True)
class Cell:
    """One kind of data."""

    dim: int
    segment: int
    query_noise: float


@dataclass(frozen=True)
class Setting:
    """The numbers of an estimator; the scale in units of its own."""

    scale: float
    ridge: float


def effective(config: RegressionConfig) -> RegressionConfig:
    """The config with what `quick` says in place of defaults."""
    defaults = RegressionConfig()
    left = {name for name in QUICK if getattr(config, name) == getattr(defaults, name)}
    return replace(config, **{name: QUICK[name] for name in left}) if config.quick else config


def cells(config: RegressionConfig) -> list[Cell]:
    """The grid, then the sweep over query noise."""
    grid = [Cell(d, s, 0.0) for d, s in itertools.product(config.dims, config.segments)]
    sweep = [Cell(d, config.noisy_segment, n) for d, n in itertools.product(config.dims, config.query_noise)]
    return [*grid, *(cell for cell in sweep if cell.query_noise)]


def task(config: RegressionConfig, cell: Cell) -> ConeRegression:
    """The data of a cell."""
    return ConeRegression(cell.dim, config.length, cell.segment, config.noise, cell.query_noise)


def count(config: RegressionConfig, dim: int) -> int:
    """Sequences of a cell: enough to have a spread."""
    return min(config.sequences, max(2, config.sequences * FULL // dim))


def errors(own: ConeRegression, method: Method, setting: Setting, strict: bool, seed: int, count: int) -> Tensor:
    """Squared errors [count, L] on the first sequences of a stream."""
    found = []
    for start in range(0, count, BATCH):
        examples = own.examples(seed, range(start, min(start + BATCH, count)))
        found.append(own.error(method.predict(examples, setting.scale, setting.ridge, strict), examples))
    return torch.cat(found)


def choose(config: RegressionConfig, own: ConeRegression, method: Method, strict: bool) -> Setting:
    """The scale and ridge of the grid with the least error on the held-out sequences; of equals the first."""
    scales = config.scales if "scale" in method.takes else (1.0,)
    ridges = config.ridges if "ridge" in method.takes else (config.ridge,)
    settings = [Setting(scale, ridge) for scale, ridge in itertools.product(scales, ridges)]
    score = lambda s: float(errors(own, method, s, strict, config.seed + 1, config.held_out).mean())  # noqa: E731
    return min(settings, key=score) if len(settings) > 1 else settings[0]


def measure_cell(config: RegressionConfig, cell: Cell, protocol: str) -> dict[str, Any]:
    """Every estimator on one cell: what the JSON file says about it."""
    own, strict = task(config, cell), protocol == "strictly-past"
    oracle = Method("oracle", (), lambda examples, *_: own.oracle(examples, exclude_self=strict))
    known = [*methods(config.specs, config.residuals, config.tol, config.seed), oracle]
    sequences = count(config, cell.dim)
    data: dict[str, Any] = {"protocol": protocol, **{f.name: getattr(own, f.name) for f in fields(own)}}
    data |= {"sequences": sequences, "methods": {method.name: {} for method in known}}
    found: dict[str, Tensor] = {}
    for how in ("given", "chosen") if strict else ("given",):
        settings = {}
        for method in known:
            given = Setting(1.0, config.ridge)
            settings[method.name] = setting = choose(config, own, method, strict) if how == "chosen" else given
            if how == "given" or setting != given:  # else it is measured already
                found[method.name] = errors(own, method, setting, strict, config.seed, sequences)
        for name, setting in settings.items():
            record = {"scale": setting.scale, "ridge": setting.ridge}
            data["methods"][name][how] = record | summary(found[name], found[LLA], cell.segment)
    for name in set(DRAWN) & set(found) if not cell.query_noise else ():
        data["methods"][name][SHOWN[protocol]]["curve"] = curve(found[name])
    return data


def summary(error: Tensor, base: Tensor, segment: int) -> dict[str, Any]:
    """Of errors [N, L]: the mean over positions of each part as [mean over sequences, half the width of its band], and
    under "to_lla" its ratio to `base`. A part without positions is None."""
    record: dict[str, Any] = {"to_lla": {}}
    for name, places in parts(error.shape[1], segment).items():
        own, other = error[:, places].mean(-1), base[:, places].mean(-1)
        record[name] = mean(own) if len(places) else None
        record["to_lla"][name] = ratio(own, other) if len(places) else None
    return record


def parts(length: int, segment: int) -> dict[str, Tensor]:
    """Positions of the first segment, of all later ones, of the second halves of these, and all."""
    at = torch.arange(length)
    later = at >= segment
    half = at % segment >= segment // 2
    return {"first": at[~later], "later": at[later], "late": at[later & half], "whole": at}


def mean(x: Tensor) -> list[float]:
    """[mean, half the width of the band] of numbers [N]."""
    spread = x.std().item() if len(x) > 1 else 0.0
    return [rounded(x.mean().item()), rounded(BAND * spread / len(x) ** 0.5)]


def ratio(a: Tensor, b: Tensor) -> list[float]:
    """[ratio of the means, half the width of its band] of a and b [N], of the same sequences: to first order it varies
    as the difference of the two in units of their means."""
    own = (a.mean() / b.mean()).item()
    spread = (a / a.mean().clamp_min(1e-300) - b / b.mean()).std().item() if len(a) > 1 else 0.0
    return [rounded(own), rounded(BAND * own * spread / len(a) ** 0.5)]


def curve(error: Tensor) -> dict[str, list[float]]:
    """The error by position, neighbours averaged to at most POINTS: means over sequences and half bands."""
    points = max(p for p in range(1, min(POINTS, error.shape[1]) + 1) if error.shape[1] % p == 0)
    pairs = [mean(column) for column in error.reshape(len(error), points, -1).mean(-1).T]
    return {"mean": [m for m, _ in pairs], "half": [h for _, h in pairs]}


def rounded(x: float) -> float:
    """To DIGITS significant digits."""
    return float(f"{x:.{DIGITS}g}")


def measure(config: RegressionConfig, progress: Progress) -> Iterator[dict[str, Any]]:
    """Every cell under every protocol, telling how far it is."""
    work = [(cell, protocol) for cell in cells(config) for protocol in PROTOCOLS]
    sizes = [cell.dim + 16 for cell, _ in work]
    began, done = time.perf_counter(), 0
    for place, (cell, protocol) in enumerate(work):
        left = ""
        if done:
            seconds = (time.perf_counter() - began) * (sum(sizes) - done) / done
            left = f", about {seconds / 60:.0f} min left"
        said = f"d = {cell.dim}, S = {cell.segment}, query noise {cell.query_noise:g}, {protocol}"
        progress(f"{said} ({place + 1}/{len(work)}{left})")
        yield measure_cell(config, cell, protocol)
        done += sizes[place]


@recipes.register("test-time-regression")
class Regression:
    """Local linear attention beside attention and linear states on a linear map that changes, nothing trained."""

    Config: ClassVar[type[Any]] = RegressionConfig

    @staticmethod
    def run(config: RegressionConfig, progress: Progress) -> Findings:
        """See `regard.recipes.Recipe`."""
        config = effective(config)
        check(config)
        with torch.no_grad(), one_thread():
            found = list(measure(config, progress))
        progress("drawing")
        from . import regression_at_test_time_output as output

        tables, figures = output.tables(config, found), output.figures(config, found)
        used = {f.name: getattr(config, f.name) for f in fields(config)}
        data = {"config": {**used, "out": str(config.out)}, "shown": SHOWN, "cells": found}
        return Findings(data, tables, figures, output.notes(config, found))


def check(config: RegressionConfig) -> None:
    """The numbers are in range, the sentences can be read, every cell can be made.

    Raises:
        ArgumentError: one is not.
    """
    for name, least in (("sequences", 1), ("held_out", 1)):
        if getattr(config, name) < least:
            raise ArgumentError(f"{CALL}: --{name.replace('_', '-')} is {getattr(config, name)}, expected at least 1.")
    if not 0 <= config.seed < 2**31:
        raise ArgumentError(f"{CALL}: --seed is {config.seed}, expected 0 to {2**31 - 1}.")
    for name in ("dims", "segments", "scales", "ridges"):
        if not getattr(config, name):
            raise ArgumentError(f"{CALL}: --{name} names nothing; give at least one.")
    for name in ("scales", "ridges", "ridge", "tol"):
        levels = getattr(config, name)
        for level in levels if isinstance(levels, tuple) else (levels,):
            if not 1e-6 <= level <= 1e6:
                raise ArgumentError(f"{CALL}: --{name} is {level:g}, expected 1e-06 to 1e+06.")
    try:
        for cell in cells(config):
            task(config, cell)
        names = [method.name for method in methods(config.specs, config.residuals, config.tol, config.seed)]
    except ArgumentError as error:
        raise ArgumentError(f"{CALL}: {error}") from None
    if "softmax" not in config.specs:
        raise ArgumentError(f"{CALL}: --specs lacks softmax, to which all others are compared; add it.")
    for name in names:
        if names.count(name) > 1:
            raise ArgumentError(f"{CALL}: {name} would be measured twice; name every kernel once.")
