"""Every kernel of the registry, and the weights of every kernel under every thresholding rule over three scores.

The sparse-attention paper's Figure 1, drawn from the registries: the kernels against distance, and the weights of the
score vector [0, u1, u2]; also the weights along the line (t, 0, -t), with their slopes.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor

from regard.checks import ArgumentError
from regard.grammar import Spec, bandwidths, kernels

from ..lib.display import pivot
from ..lib.recipe import Cell, Recipe, Results, select

ALONE = "by itself"  # in place of a rule: the kernel as a function of distance or score
DIGITS = 4  # decimals of stored numbers


def distinct_kernels() -> dict[str, Any]:
    """Return names to kernel; names that make the same kernel stand together, the most particular first."""
    groups: dict[Any, list[str]] = {}
    for name, make in kernels.items():
        groups.setdefault(make(), []).append(name)
    return {" = ".join(sorted(names, key=lambda n: n == kernel.name)): kernel for kernel, names in groups.items()}


def with_slope(function: Callable[[Tensor], Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the values of a function at the numbers x [n], and their derivatives."""
    return torch.func.jvp(function, (x,), (torch.ones_like(x),))


def drawn_scores(kernel: Any, config: "KernelZoo") -> tuple[float, float]:
    """Return what a score of 1 is drawn as (a kernel with a limit reaches it at the edge) and a bound of all scores."""
    return getattr(kernel, "limit", config.reach) / config.reach, getattr(kernel, "below", math.inf)


def shape(kernel: Any, config: "KernelZoo") -> dict[str, Any]:
    """Return value and slope of a kernel over x, of mass 1 where it is a function of the distance u: compact kernels
    end at u = 1, with a = 1 - u^2, and the Gaussian has standard deviation 1, with a = -u^2 / 2."""
    unit, below = drawn_scores(kernel, config)
    x = torch.linspace(-config.reach, config.reach, config.points, dtype=torch.float64) * unit
    if kernel.ranked:
        raw = lambda u: kernel.value(1 - u * u if kernel.compact else -u * u / 2, {})  # noqa: E731
        fine = torch.linspace(-8, 8, 32001, dtype=torch.float64)
        mass = torch.trapezoid(raw(fine), fine)
        value, slope = with_slope(lambda u: raw(u) / mass, x)
    else:
        curves = with_slope(lambda z: kernel.value(z, {}), x)
        value, slope = (curve.masked_fill(x >= below - 1e-9, torch.nan) for curve in curves)
    return {"over": "distance" if kernel.ranked else "score", "x": x, "value": value, "slope": slope}


def product(kernel: Any, rule: str, config: "KernelZoo") -> dict[str, Any]:
    """Return a kernel under a thresholding rule, or the reason why that is invalid: spec, reason; unit (every score is
    multiplied by it); edge (how far scores are drawn, in that unit); line, slopes [points, 3] (weights of the scores
    (t, 0, -t), and their derivative by t); plane [plane, plane] (weight of the first of the scores [0, u1, u2], u1
    along the last axis); support (how many of these three have weight)."""
    # numbers for which three scores show more than under the rule's defaults
    chosen: dict[str, Any] = {"k": config.nearest} if rule == "nearest" else {}
    if rule == "fixed" and kernel.compact:
        chosen = {"bias": config.bias}
    unit, below = drawn_scores(kernel, config)
    try:
        spec = Spec(kernel, bandwidths.get(rule)(**chosen), similarity="dot" if below == math.inf else "cosine")
    except ArgumentError as error:
        return {"spec": "no meaning", "reason": str(error)}
    edge = min(config.reach, below - 1e-3)
    along = lambda t: spec.weighting.fit_weights(torch.stack([t, 0 * t, -t], -1) * unit, {})[1]  # noqa: E731
    line, slopes = with_slope(along, torch.linspace(-edge, edge, config.points, dtype=torch.float64))
    weights = plane(spec, edge, unit, config.plane)
    support = ["".join(map(str, row)) for row in (weights != 0).sum(-1).tolist()]
    curves = {"line": line, "slopes": slopes, "plane": weights[..., 0], "support": support}
    return {"spec": str(spec), "reason": "", "unit": unit, "edge": edge, **curves}


def plane(spec: Spec, edge: float, unit: float, points: int) -> Tensor:
    """Return the weights [points, points, 3] of the scores [0, u1, u2], u1 along the second axis."""
    side = torch.linspace(-edge, edge, points, dtype=torch.float64)
    u2, u1 = torch.meshgrid(side, side, indexing="ij")
    scores = torch.stack([torch.zeros_like(u1), u1, u2], -1)
    return spec.weighting.fit_weights(scores.flatten(0, 1) * unit, {})[1].view_as(scores)


class KernelZoo(Recipe, name="kernel-zoo"):
    """Every kernel, and its weights over three scores under every thresholding rule."""

    workers: int = 0
    """Cells measured at the same time; they are small, so by default in this process."""
    reach: float = 3.0  # Scores are drawn from -reach to reach.
    points: int = 121  # Points of each curve.
    plane: int = 40  # Points along each side of the plane of scores [0, u1, u2]; an even number leaves out ties with 0.
    nearest: int = 2  # How many of the three keys the nearest rule keeps.
    bias: float = 1.0  # What the fixed rule adds to the scores of kernels that end at a threshold.
    limits: ClassVar = {"points": (3, math.inf), "plane": (3, math.inf), "reach": (1e-3, 100),
                        "seeds": (1, 1)}  # nothing is random  # fmt: skip
    by_size: ClassVar = {"quick": {"points": 41, "plane": 20}}
    no_paper_size = "The paper's figure 1 is a drawing and states no numbers of points."

    def cells(self) -> list[Cell]:
        rules = (ALONE, *bandwidths.names())
        return [{"kernel": names, "rule": rule} for rule in rules for names in distinct_kernels()]

    def measure(self, cell: Cell, seed: int) -> Iterator[dict[str, Any]]:
        kernel, rule = distinct_kernels()[cell["kernel"]], cell["rule"]
        measured = shape(kernel, self) if rule == ALONE else product(kernel, rule, self)
        yield {name: value.round(decimals=DIGITS).tolist() if isinstance(value, Tensor) else value
               for name, value in measured.items()}  # fmt: skip

    def tables(self, results: Results) -> dict[str, Any]:
        rows = results.frame[results.frame["rule"] != ALONE]
        shown = pivot(rows, ["kernel"], {"": lambda cell: str(cell["spec"].iloc[0])}, columns="rule",
                      note="The reasons for 'no meaning' are in the JSON file.")  # fmt: skip
        return {"Kernels x thresholding rules": shown}

    def figures(self, results: Results) -> dict[str, bytes]:
        from . import _kernel_zoo_figures as drawing

        rows = results.frame
        products = select(rows, reason="").assign(kernel=rows["kernel"].str.partition(" = ")[0])
        drawn, alone = list(products.itertuples()), list(select(rows, rule=ALONE).itertuples())
        return {"kernels": drawing.kernels(alone), "plane": drawing.planes(drawn, plane), "line": drawing.lines(drawn)}

    def notes(self, results: Results) -> list[str]:
        return ["The caption of the paper's Figure 1 swaps two names: 1.5-entmax is r = 2, the biweight kernel, and "
                "4/3-entmax is r = 3, the triweight kernel (its Proposition 1 and the text after it)."]  # fmt: skip
