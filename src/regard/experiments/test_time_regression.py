"""Test-time regression: every estimator on data whose linear map changes, nothing trained (Local Linear Attention
paper, section 4, figures 2, 3 and 6).

At every position the pairs so far are fitted and a query is predicted; what counts is the squared error there,
|f(q_i) - v_i|^2. Two protocols:

* self-included: pair i is among the pairs that position i sees. This is the paper's; at a query that is its key it
  rewards giving back what was just stored.
* strictly-past: only pairs before i are seen, so that something has to be predicted.

The paper states neither ridge nor bandwidth. Every estimator is measured twice: as `given` (its own scale, one ridge
for all), and `chosen`: with the scale and ridge that have the least error, in the same protocol and cell, on sequences
of another seed, from a grid which is the same for all. Figures of the first protocol show `given`, since there the
choice is the sharpest bandwidth, which looks up the pair itself; figures of the second show `chosen`.
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

from ..checks import ArgumentError
from ..grammar import Spec
from ..tasks import ConeRegression
from .recipes import Findings, Progress, recipes
from .test_time_regression_methods import STATES, Method, methods

CALL = "reproduce: test-time-regression"
PROTOCOLS = ("self-included", "strictly-past")
SHOWN = {"self-included": "given", "strictly-past": "chosen"}
"""Which of the two measurements figures and tables show."""
DRAWN = (
    "local-linear", "softmax", "local-linear[biweight]", "biweight", "local-linear[relumax]", "local-linear[triweight]",
    "linear", "mesa", "softmax+mesa", "random", "zero", "oracle",
)  # fmt: skip
"""Whose curves are kept."""
LLA = "local-linear"
POINTS = 128
"""Of a curve: errors of neighbouring positions are averaged."""
BATCH = 8
"""Sequences at a time."""
BAND = 1.96
"""Standard errors on each side of a mean."""
DIGITS = 4
"""Significant ones, of the numbers in the JSON file."""


@dataclass(frozen=True, kw_only=True)
class RegressionConfig:
    """Measure how attention, local linear models and linear states follow a linear map that changes."""

    output: Path = Path("test-time-regression-out")
    """Folder to write. An earlier result in it is replaced; any other folder must be empty."""
    quick: bool = False
    """Small: options that are not given otherwise take values that need less than two minutes."""
    specs: tuple[str, ...] = ("softmax", "biweight", "relumax", "triweight")
    """Kernels: each is measured as a local constant, as a local linear model and on the residuals of linear states."""
    states: tuple[str, ...] = ("mesa", "linear")
    """Linear states whose residuals the kernels regress (equation 9)."""
    dims: tuple[int, ...] = (8, 16, 32, 64, 128)
    """Channels of keys and values."""
    segments: tuple[int, ...] = (8, 16, 32, 64, 128, 256, 512, 1024)
    """Positions for which the map stays the same."""
    length: int = 1024
    """Positions of a sequence."""
    sequences: int = 32
    """Sequences of every cell; the paper has 10,000."""
    held_out: int = 2
    """Sequences of another seed, on which scale and ridge are chosen."""
    noise: float = 0.1
    """Standard deviation of a value around the map."""
    query_noise: tuple[float, ...] = (0.1, 0.3, 1.0)
    """Standard deviations of a query around its key, for the sweep; the grid of dims and segments has none."""
    noisy_segment: int = 128
    """The segment of that sweep."""
    ridge: float = 0.1
    """The ridge of what is measured as given."""
    scales: tuple[float, ...] = (0.25, 0.5, 1.0, 2.0)
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
    "segments": (8, 64, 128, 512),
    "length": 512,
    "sequences": 8,
    "held_out": 1,
    "query_noise": (0.3,),
    "scales": (0.5, 1.0, 2.0),
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


def errors(own: ConeRegression, method: Method, setting: Setting, strict: bool, seed: int, count: int) -> Tensor:
    """Squared errors [count, L] on the first sequences of a stream."""
    found = []
    for start in range(0, count, BATCH):
        examples = own.examples(seed, range(start, min(start + BATCH, count)))
        found.append(own.error(method.predict(examples, setting.scale, setting.ridge, strict), examples))
    return torch.cat(found)


def choose(config: RegressionConfig, own: ConeRegression, method: Method, strict: bool) -> Setting:
    """The setting with the least error on the held-out sequences; of equals the first."""
    scales = config.scales if "scale" in method.takes else (1.0,)
    ridges = config.ridges if "ridge" in method.takes else (config.ridge,)
    grid = [Setting(scale, ridge) for scale, ridge in itertools.product(scales, ridges)]
    if len(grid) == 1:
        return grid[0]
    return min(grid, key=lambda s: float(errors(own, method, s, strict, config.seed + 1, config.held_out).mean()))


def measure_cell(config: RegressionConfig, cell: Cell, protocol: str) -> dict[str, Any]:
    """Every estimator on one cell: what the JSON file says about it."""
    own, strict = task(config, cell), protocol == "strictly-past"
    oracle = Method("oracle", (), lambda examples, *_: own.oracle(examples, exclude_self=strict))
    run = lambda method, setting: errors(own, method, setting, strict, config.seed, config.sequences)  # noqa: E731
    given = Setting(1.0, config.ridge)
    settings: dict[str, dict[str, Setting]] = {}
    found: dict[str, dict[str, Tensor]] = {"given": {}, "chosen": {}}
    for method in [*methods(config.specs, config.states, config.seed), oracle]:
        chosen = choose(config, own, method, strict)
        settings[method.name] = {"given": given, "chosen": chosen}
        found["given"][method.name] = run(method, given)
        found["chosen"][method.name] = found["given"][method.name] if chosen == given else run(method, chosen)
    record: dict[str, Any] = {}
    for name, own_settings in settings.items():
        record[name] = {
            how: {
                "scale": setting.scale,
                "ridge": setting.ridge,
                **summary(found[how][name], cell.segment),
                "to_lla": ratio(found[how][name], found[how][LLA]),
            }
            for how, setting in own_settings.items()
        }
        if name in DRAWN and not cell.query_noise:
            record[name][SHOWN[protocol]]["curve"] = curve(found[SHOWN[protocol]][name])
    data = {f.name: getattr(own, f.name) for f in fields(own)}
    return {"protocol": protocol, **data, "methods": record}


def summary(error: Tensor, segment: int) -> dict[str, Any]:
    """Means over positions of the first segment, of all later ones (None where there are none) and of all, each as
    [mean over sequences, half the width of its band]."""
    later = mean(error[:, segment:].mean(-1)) if segment < error.shape[1] else None
    return {"first": mean(error[:, :segment].mean(-1)), "later": later, "whole": mean(error.mean(-1))}


def mean(x: Tensor) -> list[float]:
    """[mean, half the width of the band] of numbers [N]."""
    spread = x.std().item() if len(x) > 1 else 0.0
    return [rounded(x.mean().item()), rounded(BAND * spread / len(x) ** 0.5)]


def ratio(error: Tensor, base: Tensor) -> list[float]:
    """[ratio of summed errors, half the width of its band], both on the same sequences: to first order the ratio varies
    as the difference of the two in units of their means."""
    a, b = error.mean(-1), base.mean(-1)
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
        """See `regard.experiments.recipes.Recipe`."""
        config = effective(config)
        check(config)
        with torch.no_grad():
            found = list(measure(config, progress))
        progress("drawing")
        from . import test_time_regression_output as output

        tables, figures = output.tables(config, found), output.figures(config, found)
        used = {f.name: getattr(config, f.name) for f in fields(config)}
        data = {"config": {**used, "output": str(config.output)}, "shown": SHOWN, "cells": found}
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
    for name in ("dims", "segments", "scales", "ridges", "specs"):
        if not getattr(config, name):
            raise ArgumentError(f"{CALL}: --{name} names nothing; give at least one.")
    for name, levels in (("scales", config.scales), ("ridges", config.ridges), ("ridge", (config.ridge,))):
        for level in levels:
            if not 1e-6 <= level <= 1e6:
                raise ArgumentError(f"{CALL}: --{name} is {level:g}, expected 1e-06 to 1e+06.")
    for state in config.states:
        if state not in STATES:
            raise ArgumentError(f"{CALL}: --states: unknown state {state!r}. Choose from: {', '.join(STATES)}.")
    try:
        for text in config.specs:
            known = Spec.parse(text)
            if known.degree:
                raise ArgumentError(f"{text} is a local linear model already; give its kernel alone.")
        for cell in cells(config):
            task(config, cell)
        names = [method.name for method in methods(config.specs, config.states, config.seed)]
    except ArgumentError as error:
        raise ArgumentError(f"{CALL}: {error}") from None
    if LLA not in names or "softmax" not in config.specs:
        raise ArgumentError(f"{CALL}: --specs lacks softmax, to which all others are compared; add it.")
    if len(set(names)) < len(names):
        raise ArgumentError(f"{CALL}: --specs names the same kernel twice; name each once.")
