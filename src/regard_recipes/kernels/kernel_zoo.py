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
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from regard.checks import ArgumentError
from regard.grammar import Spec, bandwidths, kernels
from regard.recipes import Findings, Progress, recipes

CALL = "reproduce: kernel-zoo"
DIGITS = 4
"""Of the numbers in the JSON file."""
CORRECTION = (
    "The caption of the paper's Figure 1 swaps two names: 1.5-entmax is r = 2, the biweight kernel, and 4/3-entmax is "
    "r = 3, the triweight kernel (its Proposition 1 and the text after it)."
)


@dataclass(frozen=True, kw_only=True)
class KernelZooConfig:
    """Draw every kernel, and its weights over three scores under every bandwidth rule."""

    out: Path = Path("kernel-zoo-out")
    """Folder to write. An earlier result in it is replaced; any other folder must be empty."""
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
    seed: int = 0
    """Nothing is drawn at random; kept because every recipe has one."""


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
        edges: the same on `FINE` times as many points a side, for the edges that are drawn.
    """

    kernel: str
    rule: str
    sentence: str = ""
    unit: float = 1.0
    edge: float = 0.0
    reason: str = ""
    line: Tensor | None = None
    slopes: Tensor | None = None
    plane: Tensor | None = None
    support: Tensor | None = None
    edges: Tensor | None = None


FINE = 8
"""Times as many points a side as the plane has, where the edges of the support are looked for."""


def distinct_kernels() -> dict[tuple[str, ...], Any]:
    """Names to kernel; names that make the same kernel stand together, the most particular first."""
    groups: dict[Any, list[str]] = {}
    for name, make in kernels.items():
        groups.setdefault(make(), []).append(name)
    return {tuple(sorted(names, key=lambda n: n == kernel.name)): kernel for kernel, names in groups.items()}


def shapes(config: KernelZooConfig) -> list[Shape]:
    """Every registered kernel, normalised over distance where it is a function of distance.

    Compact kernels end at distance 1, a = 1 - u^2; the Gaussian is that of standard deviation 1, a = -u^2 / 2.
    """
    drawn = []
    for names, kernel in distinct_kernels().items():
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
        drawn.append(Shape(names, over, x.detach(), value.detach(), torch.where(value.isnan(), torch.nan, slope)))
    return drawn


def _unit(kernel: Any, config: KernelZooConfig) -> float:
    """What a score of 1 is drawn as: a kernel with a limit, its own scale, reaches it at the edge."""
    return getattr(kernel, "limit", config.reach) / config.reach


def _slope(total: Tensor, x: Tensor) -> Tensor:
    """The derivative of a sum of functions of single entries of x."""
    found = torch.autograd.grad(total, x, retain_graph=True, allow_unused=True)[0] if total.requires_grad else None
    return torch.zeros_like(x) if found is None else found


def _excess(kernel: Any, u: Tensor) -> Tensor:
    return 1 - u * u if kernel.compact else -u * u / 2


def products(config: KernelZooConfig) -> Iterator[Product]:
    """Every kernel under every registered rule, those that have no meaning with their reason."""
    for names, kernel in distinct_kernels().items():
        for rule in bandwidths.names():
            product = Product(kernel=names[0], rule=rule)
            similarity = "cosine" if hasattr(kernel, "below") else "dot"
            try:
                made = bandwidths.get(rule)(**_chosen(rule, kernel, config))
                spec = Spec(kernel, made, similarity=similarity)
            except ArgumentError as error:
                yield replace(product, reason=str(error))
                continue
            yield _measured(product, spec, config)


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
        sentence=str(spec),
        unit=unit,
        edge=edge,
        line=line.detach(),
        slopes=torch.stack(slopes, -1),
        plane=plane[..., 0],
        support=(plane != 0).sum(-1),
        edges=(_plane(spec, edge, unit, FINE * config.plane) != 0).sum(-1),
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


@recipes.register("kernel-zoo")
class KernelZoo:
    """Every kernel, and its weights over three scores under every bandwidth rule."""

    Config: ClassVar[type[Any]] = KernelZooConfig

    @staticmethod
    def run(config: KernelZooConfig, progress: Progress) -> Findings:
        """Compute and draw."""
        check(config)
        from regard.inspect.tables import Table

        from . import kernel_zoo_figures as figures

        progress("kernels")
        drawn = shapes(config)
        progress("weights")
        found = list(products(config))
        progress("drawing")
        pictures = {
            "kernel-zoo-kernels.png": figures.kernels(drawn),
            "kernel-zoo-plane.png": figures.planes(found),
            "kernel-zoo-line.png": figures.lines(found),
        }
        cells = {(p.kernel, p.rule): p.sentence or "no meaning" for p in found}
        rows = tuple(
            (" = ".join(names), *(cells[names[0], rule] for rule in bandwidths.names())) for names in distinct_kernels()
        )
        table = Table(("kernel", *bandwidths.names()), rows, note="The reasons for 'no meaning' are in the JSON file.")
        return Findings(as_data(drawn, found), {"Kernels x bandwidth rules": table}, pictures, (CORRECTION,))


def check(config: KernelZooConfig) -> None:
    """The numbers are in range.

    Raises:
        ArgumentError: one is not.
    """
    for name, least in (("points", 3), ("plane", 3), ("nearest", 1)):
        if getattr(config, name) < least:
            raise ArgumentError(f"{CALL}: --{name} is {getattr(config, name)}, expected at least {least}.")
    if not 0 < config.reach <= 100:
        raise ArgumentError(f"{CALL}: --reach is {config.reach}, expected a number between 0 and 100.")


def as_data(drawn: list[Shape], found: list[Product]) -> dict[str, Any]:
    """Every number that is drawn; null where a kernel is not defined."""
    return {
        "correction": CORRECTION,
        "kernels": [
            {"names": s.names, "over": s.over, "x": numbers(s.x), "value": numbers(s.value), "slope": numbers(s.slope)}
            for s in drawn
        ],
        "products": [_product_data(p) for p in found],
    }


def _product_data(product: Product) -> dict[str, Any]:
    """One product; its support a string of digits a row of the plane."""
    own: dict[str, Any] = {"kernel": product.kernel, "bandwidth": product.rule}
    if product.line is None or product.support is None:
        return {**own, "reason": product.reason}
    for name in ("sentence", "unit", "edge"):
        own[name] = getattr(product, name)
    for name in ("line", "slopes", "plane"):
        own[name] = numbers(getattr(product, name))
    return {**own, "support": ["".join(map(str, row)) for row in product.support.tolist()]}


def numbers(x: Any) -> Any:
    """A tensor as nested lists of rounded numbers, None for NaN."""
    if isinstance(x, Tensor):
        return numbers(x.tolist())
    if isinstance(x, list):
        return [numbers(item) for item in x]
    return None if x != x else round(x, DIGITS)
