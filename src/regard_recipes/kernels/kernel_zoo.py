"""Every kernel of the registry, and the weights of every kernel under every thresholding rule over three scores.

The sparse-attention paper's Figure 1, drawn from the registries: the kernels against distance, and the weights of the
score vector [0, u1, u2]; also the weights along the line (t, 0, -t), with their slopes.
"""

import math
from collections.abc import Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor

from regard.checks import ArgumentError
from regard.grammar import Spec, bandwidths, kernels

from ..lib.display import pivot
from ..lib.recipe import Cell, Recipe, Results, recipe, select

ALONE = "by itself"  # in place of a rule: the kernel as a function of distance or score
DIGITS = 4  # decimals of stored numbers
CORRECTION = (
    "The caption of the paper's Figure 1 swaps two names: 1.5-entmax is r = 2, the biweight kernel, and 4/3-entmax is "
    "r = 3, the triweight kernel (its Proposition 1 and the text after it)."
)


def distinct_kernels() -> dict[str, Any]:
    """Return names to kernel; names that make the same kernel stand together, the most particular first."""
    groups: dict[Any, list[str]] = {}
    for name, make in kernels.items():
        groups.setdefault(make(), []).append(name)
    return {" = ".join(sorted(names, key=lambda n: n == kernel.name)): kernel for kernel, names in groups.items()}


def shape(kernel: Any, config: "KernelZoo") -> dict[str, Any]:
    """Return value and slope of a kernel over x, of mass 1 where it is a function of the distance u: compact kernels
    end at u = 1, with a = 1 - u^2, and the Gaussian has standard deviation 1, with a = -u^2 / 2."""
    side = torch.linspace(-config.reach, config.reach, config.points, dtype=torch.float64) * _unit(kernel, config)
    x = side.requires_grad_()
    excess = lambda u: 1 - u * u if kernel.compact else -u * u / 2  # noqa: E731
    if kernel.ranked:
        fine = torch.linspace(-8, 8, 32001, dtype=torch.float64)
        value = kernel.value(excess(x), {}) / torch.trapezoid(kernel.value(excess(fine), {}), fine)
    else:
        below = getattr(kernel, "below", None)
        seen = x.detach() < (torch.inf if below is None else below - 1e-9)
        value = torch.where(seen, kernel.value(torch.where(seen, x, 0), {}), torch.nan)
    slope = torch.where(value.isnan(), torch.nan, _slope(value.nansum(), x))
    return {"over": "distance" if kernel.ranked else "score", "x": x, "value": value, "slope": slope}


def _unit(kernel: Any, config: "KernelZoo") -> float:
    """Return what a score of 1 is drawn as: a kernel with a limit reaches it at the edge."""
    return getattr(kernel, "limit", config.reach) / config.reach


def _slope(total: Tensor, x: Tensor) -> Tensor:
    """Return the derivative of a sum of functions of single entries of x."""
    found = torch.autograd.grad(total, x, retain_graph=True, allow_unused=True)[0] if total.requires_grad else None
    return torch.zeros_like(x) if found is None else found


def product(kernel: Any, rule: str, config: "KernelZoo") -> dict[str, Any]:
    """Return a kernel under a thresholding rule, or the reason why that is invalid: spec, reason; unit (every score is
    multiplied by it); edge (how far scores are drawn, in that unit); line, slopes [points, 3] (weights of the scores
    (t, 0, -t), and their derivative by t); plane [plane, plane] (weight of the first of the scores [0, u1, u2], u1
    along the last axis); support (how many of these three have weight)."""
    # numbers for which three scores show more than under the rule's defaults
    chosen: dict[str, Any] = {"k": config.nearest} if rule == "nearest" else {}
    if rule == "fixed" and kernel.compact:
        chosen = {"bias": config.bias}
    below = getattr(kernel, "below", None)
    try:
        similarity = "dot" if below is None else "cosine"
        spec = Spec(kernel, bandwidths.get(rule)(**chosen), similarity=similarity)
    except ArgumentError as error:
        return {"spec": "no meaning", "reason": str(error)}
    edge = config.reach if below is None else min(config.reach, below - 1e-3)
    t = torch.linspace(-edge, edge, config.points, dtype=torch.float64).requires_grad_()
    unit = _unit(kernel, config)
    line = weigh(spec, torch.stack([t, torch.zeros_like(t), -t], -1) * unit)
    slopes = torch.stack([_slope(line[:, j].sum(), t) for j in range(3)], -1)
    weights = plane(spec, edge, unit, config.plane)
    support = ["".join(map(str, row)) for row in (weights != 0).sum(-1).tolist()]
    curves = {"line": line, "slopes": slopes, "plane": weights[..., 0], "support": support}
    return {"spec": str(spec), "reason": "", "unit": unit, "edge": edge, **curves}


def plane(spec: Spec, edge: float, unit: float, points: int) -> Tensor:
    """Return the weights [points, points, 3] of the scores [0, u1, u2], u1 along the second axis."""
    side = torch.linspace(-edge, edge, points, dtype=torch.float64)
    u2, u1 = torch.meshgrid(side, side, indexing="ij")
    scores = torch.stack([torch.zeros_like(u1), u1, u2], -1)
    return weigh(spec, scores.flatten(0, 1) * unit).view_as(scores)


def weigh(spec: Spec, scores: Tensor) -> Tensor:
    """Return the weights of rows of scores [m, 3]."""
    return spec.weighting.weights(scores, spec.weighting.fit(scores, {}), {})


@recipe("kernel-zoo")
class KernelZoo(Recipe):
    """Every kernel, and its weights over three scores under every thresholding rule."""

    workers: int = 0
    """Cells measured at the same time; they are small, so by default in this process."""
    reach: float = 3.0  # Scores are drawn from -reach to reach.
    points: int = 121  # Points of each curve.
    plane: int = 40  # Points along each side of the plane of scores [0, u1, u2]; an even number leaves out ties with 0.
    nearest: int = 2  # How many of the three keys the nearest rule keeps.
    bias: float = 1.0  # What the fixed rule adds to the scores of kernels that end at a threshold.
    limits: ClassVar = {  # nothing is random: one seed
        "points": (3, math.inf), "plane": (3, math.inf), "nearest": (1, math.inf), "reach": (1e-3, 100),
        "seeds": (1, 1),
    }  # fmt: skip
    by_size: ClassVar = {"quick": {"points": 41, "plane": 20}}

    def cells(self) -> list[Cell]:
        rules = (ALONE, *bandwidths.names())
        return [{"kernel": names, "rule": rule} for rule in rules for names in distinct_kernels()]

    def measure(self, cell: Cell, seed: int) -> Iterator[dict[str, Any]]:
        kernel, rule = distinct_kernels()[cell["kernel"]], cell["rule"]
        found = shape(kernel, self) if rule == ALONE else product(kernel, rule, self)
        yield {name: value.detach().round(decimals=DIGITS).tolist() if isinstance(value, Tensor) else value
               for name, value in found.items()}  # fmt: skip

    def tables(self, results: Results) -> dict[str, Any]:
        rows = results.frame[results.frame["rule"] != ALONE]
        shown = pivot(rows, ["kernel"], {"": lambda cell: str(cell["spec"].iloc[0])}, columns="rule",
                      note="The reasons for 'no meaning' are in the JSON file.")  # fmt: skip
        return {"Kernels x thresholding rules": shown}

    def figures(self, results: Results) -> dict[str, bytes]:
        from . import _kernel_zoo_figures as drawing

        rows = results.frame
        products = select(rows, reason="").assign(kernel=rows["kernel"].str.partition(" = ")[0])
        found, alone = list(products.itertuples()), list(select(rows, rule=ALONE).itertuples())
        return {"kernels": drawing.kernels(alone), "plane": drawing.planes(found, plane), "line": drawing.lines(found)}

    def notes(self, results: Results) -> list[str]:
        return [CORRECTION]
