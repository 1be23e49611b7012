"""Every kernel of the registry, and the weights of every kernel under every bandwidth rule over three scores.

The sparse-attention paper's Figure 1, drawn from what is registered: on its left the kernels against distance, on its
right the transformations of the score vector [0, u1, u2]. Beside that plane the same weights along the line (t, 0, -t),
with their slopes. The caption of the paper's figure swaps two names ("4/3- and 1.5-entmax mirror biweight (r = 2) and
triweight (r = 3)"); Proposition 1 and the text below it say the right pairs: 1.5-entmax is r = 2, biweight, and
4/3-entmax is r = 3, triweight.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from regard.checks import ArgumentError
from regard.grammar import Spec, bandwidths, kernels

from ..lib.pivots import pivot
from ..lib.recipe import Cell, Recipe, RecipeConfig, recipe
from ..lib.results import Results, select

ALONE = "by itself"  # in place of a rule: the kernel as a function of distance or score
DIGITS = 4
"""Of the numbers in the JSON file."""
CORRECTION = (
    "The caption of the paper's Figure 1 swaps two names: 1.5-entmax is r = 2, the biweight kernel, and 4/3-entmax is "
    "r = 3, the triweight kernel (its Proposition 1 and the text after it)."
)


@dataclass(frozen=True, kw_only=True)
class KernelZooConfig(RecipeConfig):
    """Draw every kernel, and its weights over three scores under every bandwidth rule."""

    workers: int = 0
    """Cells measured at the same time; they are small, so by default in this process."""
    reach: float = 3.0
    """Scores are drawn from -reach to reach."""
    points: int = 121
    """Points of each curve."""
    plane: int = 40
    """Points along each side of the plane of scores [0, u1, u2]; an even number leaves out ties with 0."""
    nearest: int = 2
    """How many of the three keys the nearest rule keeps."""
    bias: float = 1.0
    """What the fixed rule adds to the scores of kernels that end at a threshold."""


@dataclass(frozen=True)
class Shape:
    """A kernel by itself: its value and slope over distance (ranked kernels) or score."""

    names: tuple[str, ...]
    over: str  # "distance" or "score"
    x: Tensor
    value: Tensor
    slope: Tensor


@dataclass(frozen=True)
class Product:
    """A kernel under a bandwidth rule: the weights of three scores, or the reason why there are none.

    Attributes:
        unit: every score is multiplied by this (only kernels with a limit of their own have another unit than 1).
        edge: how far scores are drawn, in that unit.
        line: weights [points, 3] of the scores (t, 0, -t); slopes: their derivative by t.
        plane: the weight of the first of the scores [0, u1, u2], [plane, plane], u1 along the last axis.
        support: how many of those three scores have a weight that is not zero, as `plane`.
    """

    kernel: str
    rule: str
    spec: str = ""
    unit: float = 1.0
    edge: float = 0.0
    reason: str = ""
    line: Tensor | None = None
    slopes: Tensor | None = None
    plane: Tensor | None = None
    support: Tensor | None = None

    def edges(self) -> Tensor:
        """Return the support on `FINE` times as many points a side, for the edges that are drawn."""
        assert self.plane is not None
        return (_plane(Spec.parse(self.spec), self.edge, self.unit, FINE * len(self.plane)) != 0).sum(-1)


FINE = 8
"""Times as many points a side as the plane has, where the edges of the support are looked for."""


def distinct_kernels() -> dict[tuple[str, ...], Any]:
    """Names to kernel; names that make the same kernel stand together, the most particular first."""
    groups: dict[Any, list[str]] = {}
    for name, make in kernels.items():
        groups.setdefault(make(), []).append(name)
    return {tuple(sorted(names, key=lambda n: n == kernel.name)): kernel for kernel, names in groups.items()}


def shape(names: tuple[str, ...], kernel: Any, config: KernelZooConfig) -> Shape:
    """Return a kernel, normalised over distance where it is a function of distance.

    Compact kernels end at distance 1, a = 1 - u^2; the Gaussian is that of standard deviation 1, a = -u^2 / 2.
    """
    side = torch.linspace(-config.reach, config.reach, config.points, dtype=torch.float64) * _unit(kernel, config)
    x = side.requires_grad_()
    if kernel.ranked:
        fine = torch.linspace(-8, 8, 32001, dtype=torch.float64)
        mass = torch.trapezoid(kernel.value(_excess(kernel, fine), {}), fine)
        value = kernel.value(_excess(kernel, x), {}) / mass
    else:
        below = getattr(kernel, "below", None)
        seen = x.detach() < (torch.inf if below is None else below - 1e-9)
        value = torch.where(seen, kernel.value(torch.where(seen, x, 0), {}), torch.nan)
    slope = _slope(value.nansum(), x)
    over = "distance" if kernel.ranked else "score"
    return Shape(names, over, x.detach(), value.detach(), torch.where(value.isnan(), torch.nan, slope))


def _unit(kernel: Any, config: KernelZooConfig) -> float:
    """What a score of 1 is drawn as: a kernel with a limit, its own scale, reaches it at the edge."""
    return getattr(kernel, "limit", config.reach) / config.reach


def _slope(total: Tensor, x: Tensor) -> Tensor:
    """The derivative of a sum of functions of single entries of x."""
    found = torch.autograd.grad(total, x, retain_graph=True, allow_unused=True)[0] if total.requires_grad else None
    return torch.zeros_like(x) if found is None else found


def _excess(kernel: Any, u: Tensor) -> Tensor:
    return 1 - u * u if kernel.compact else -u * u / 2


def product(name: str, kernel: Any, rule: str, config: KernelZooConfig) -> Product:
    """Return a kernel under a rule, or the reason why that has no meaning."""
    empty = Product(kernel=name, rule=rule)
    similarity = "cosine" if hasattr(kernel, "below") else "dot"
    try:
        spec = Spec(kernel, bandwidths.get(rule)(**_chosen(rule, kernel, config)), similarity=similarity)
    except ArgumentError as error:
        return replace(empty, reason=str(error))
    return _measured(empty, spec, config)


def _chosen(rule: str, kernel: Any, config: KernelZooConfig) -> dict[str, Any]:
    """The rule's numbers, where its defaults would show little over three scores."""
    if rule == "fixed" and kernel.compact:
        return {"bias": config.bias}
    return {"k": config.nearest} if rule == "nearest" else {}


def _measured(product: Product, spec: Spec, config: KernelZooConfig) -> Product:
    below = getattr(spec.kernel, "below", None)
    edge = config.reach if below is None else min(config.reach, below - 1e-3)
    t = torch.linspace(-edge, edge, config.points, dtype=torch.float64).requires_grad_()
    unit = _unit(spec.kernel, config)
    line = weigh(spec, torch.stack([t, torch.zeros_like(t), -t], -1) * unit)
    slopes = [_slope(line[:, j].sum(), t) for j in range(3)]
    plane = _plane(spec, edge, unit, config.plane)
    return replace(
        product,
        spec=str(spec),
        unit=unit,
        edge=edge,
        line=line.detach(),
        slopes=torch.stack(slopes, -1),
        plane=plane[..., 0],
        support=(plane != 0).sum(-1),
    )


def _plane(spec: Spec, edge: float, unit: float, points: int) -> Tensor:
    """Return the weights [points, points, 3] of the scores [0, u1, u2], u1 along the second axis."""
    side = torch.linspace(-edge, edge, points, dtype=torch.float64)
    u2, u1 = torch.meshgrid(side, side, indexing="ij")
    scores = torch.stack([torch.zeros_like(u1), u1, u2], -1)
    return weigh(spec, scores.flatten(0, 1) * unit).view_as(scores)


def weigh(spec: Spec, scores: Tensor) -> Tensor:
    """The weights of rows of scores [m, 3]."""
    found = spec.weighting.fit(scores, {})
    return spec.weighting.weights(scores, found, {})


@recipe("kernel-zoo")
class KernelZoo(Recipe):
    """Every kernel, and its weights over three scores under every bandwidth rule."""

    Config = KernelZooConfig
    sizes: ClassVar = {"quick": {"points": 41, "plane": 20}}

    def check(self) -> None:
        own, call = self.config, self.call()
        for name, least in (("points", 3), ("plane", 3), ("nearest", 1)):
            if getattr(own, name) < least:
                raise ArgumentError(f"{call}: --{name} is {getattr(own, name)}, expected at least {least}.")
        if own.seeds != 1:
            raise ArgumentError(f"{call}: --seeds is {own.seeds}, expected 1: nothing is random.")
        if not 0 < own.reach <= 100:
            raise ArgumentError(f"{call}: --reach is {own.reach}, expected a number between 0 and 100.")

    def cells(self) -> list[Cell]:
        rules = [ALONE, *bandwidths.names()]
        return [{"kernel": " = ".join(names), "rule": rule} for rule in rules for names in distinct_kernels()]

    def measure(self, cell: Cell, seed: int) -> Iterator[dict[str, Any]]:
        names = tuple(cell["kernel"].split(" = "))
        kernel = distinct_kernels()[names]
        if cell["rule"] == ALONE:
            own = shape(names, kernel, self.config)
            yield {"over": own.over, **{name: numbers(getattr(own, name)) for name in ("x", "value", "slope")}}
            return
        found = product(names[0], kernel, cell["rule"], self.config)
        row: dict[str, Any] = {"spec": found.spec or "no meaning", "reason": found.reason}
        if found.line is not None and found.support is not None:
            row |= {"unit": found.unit, "edge": found.edge}
            row |= {name: numbers(getattr(found, name)) for name in ("line", "slopes", "plane")}
            row["support"] = ["".join(map(str, line)) for line in found.support.tolist()]
        yield row

    def tables(self, results: Results) -> dict[str, Any]:
        rows = results.frame[results.frame["rule"] != ALONE]
        shown = pivot(rows, ["kernel"], {"": lambda cell: str(cell["spec"].iloc[0])}, columns="rule",
                      note="The reasons for 'no meaning' are in the JSON file.")  # fmt: skip
        return {"Kernels x bandwidth rules": shown}

    def figures(self, results: Results) -> dict[str, bytes]:
        from . import _kernel_zoo_figures as drawing

        found = [stored_product(row) for row in results.frame[results.frame["rule"] != ALONE].itertuples()]
        alone = [
            Shape(tuple(row.kernel.split(" = ")), row.over, *(tensor(part) for part in (row.x, row.value, row.slope)))
            for row in select(results.frame, rule=ALONE).itertuples()
        ]
        return {"kernels": drawing.kernels(alone), "plane": drawing.planes(found), "line": drawing.lines(found)}

    def notes(self, results: Results) -> list[str]:
        return [CORRECTION]


def stored_product(row: Any) -> Product:
    """Return the product of a stored row."""
    empty = Product(kernel=row.kernel.split(" = ")[0], rule=row.rule, reason=row.reason)
    if row.reason:
        return empty
    support = torch.tensor([[int(digit) for digit in line] for line in row.support])
    parts = {name: tensor(getattr(row, name)) for name in ("line", "slopes", "plane")}
    return replace(empty, spec=row.spec, unit=row.unit, edge=row.edge, support=support, **parts)


def tensor(x: Any) -> Tensor:
    """Return nested lists as a tensor; None becomes NaN."""
    return torch.from_numpy(np.array(x, dtype=float))


def numbers(x: Any) -> Any:
    """Return a tensor as nested lists of rounded numbers, None for NaN."""
    if isinstance(x, Tensor):
        return numbers(x.tolist())
    if isinstance(x, list):
        return [numbers(item) for item in x]
    return None if x != x else round(x, DIGITS)
