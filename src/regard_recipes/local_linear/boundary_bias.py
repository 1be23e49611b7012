"""Boundary bias: how the error of global linear, local constant and local linear regression falls with n (Local Linear
Attention paper, propositions 2.1 and 2.2).

n design points are uniform on the unit ball in d dimensions; values are f(x) = 2 |x|^2 plus normal noise. Both local
estimators are `regard.attention` with the Epanechnikov kernel, w = [1 - |q - k|^2 / h^2]_+, at the bandwidth of a grid
with the least mean error against f. The error is integrated over radii times a few directions (P evaluation points).
"""

import math
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from regard.checks import require
from regard.grammar import Spec
from regard.pairwise.attention import attention

from ..lib.claims import Claim, claims_of, log_slope, paired
from ..lib.display import Show, ToText, interval, lines, panels, pivot
from ..lib.recipe import Cell, Frame, Recipe, Results, select

PAPER = "Local Linear Attention"
KERNEL = "epanechnikov*fixed(bias=1,empty=nearest)*euclidean"
CURVATURE = 2.0  # f(x) = CURVATURE |x|^2
RIDGE = 1e-6  # of the local linear model, in units of h^2: it only keeps windows with fewer than d + 1 points solvable
STEP = 1.12  # ratio of neighbouring bandwidths of the grid
REPEATS = 16  # draws of the noise on each design: further channels of the values, which cost next to nothing
NEAR = 0.1  # difference of exponents that counts as none at finite n
GLOBAL, CONSTANT, LINEAR = "global linear", "local constant", "local linear"
THEORY: dict[str, Callable[[int], float]] = {
    GLOBAL: lambda d: 0.0, CONSTANT: lambda d: -3 / (d + 3), LINEAR: lambda d: -4 / (d + 4)
}  # fmt: skip
LAWS = {GLOBAL: "n^0", CONSTANT: "n^(-3/(d+3))", LINEAR: "n^(-4/(d+4))"}
PARTS = ("whole", "boundary", "interior")


class Places(NamedTuple):
    """Evaluation points [P, d], weights [P] that sum to the volume of the ball, and distances [P] to the boundary."""

    points: Tensor
    weights: Tensor
    depths: Tensor


def truth(x: Tensor) -> Tensor:
    """Return f, [..., d] -> [..., 1]."""
    return CURVATURE * x.square().sum(-1, keepdim=True)


def places(dim: int, radii: int, directions: int) -> Places:
    """Return a Gauss-Legendre rule over radii, the same along every direction."""
    nodes, shares = (torch.from_numpy(part) for part in np.polynomial.legendre.leggauss(radii))
    r, share = (nodes + 1) / 2, shares / 2
    if dim == 1:
        rays = torch.tensor([[1.0], [-1.0]], dtype=r.dtype)
    else:
        rays = torch.randn(directions, dim, generator=torch.Generator().manual_seed(dim), dtype=r.dtype)
        rays = rays / rays.norm(dim=-1, keepdim=True)
    sphere = 2 * math.pi ** (dim / 2) / math.gamma(dim / 2)
    weights = (share * r ** (dim - 1) * sphere / len(rays)).expand(len(rays), -1)
    return Places((rays[:, None] * r[:, None]).flatten(0, 1), weights.flatten(), (1 - r).repeat(len(rays)))


def design(dim: int, n: int, seed: int, noise: float) -> tuple[Tensor, Tensor]:
    """Return design points [n, d], uniform on the ball, and values [n, 1 + REPEATS]: f, and f with noise."""
    draw = torch.Generator().manual_seed(((dim * 1_000_003 + n) * 1_000_003 + seed) % 2**63)
    normal = torch.randn(n, dim, generator=draw, dtype=torch.float64)
    radius = torch.rand(n, 1, generator=draw, dtype=torch.float64) ** (1 / dim)
    x = normal / normal.norm(dim=-1, keepdim=True) * radius
    off = torch.randn(n, REPEATS, generator=draw, dtype=torch.float64) * noise
    f = truth(x)
    return x, torch.cat([f, f + off], -1)


def global_linear(x: Tensor, y: Tensor, at: Tensor) -> Tensor:
    """Predict by least squares with an intercept at `at`: [n, d], [n, C], [P, d] -> [P, C]."""
    affine = lambda u: torch.cat([torch.ones_like(u[:, :1]), u], -1)  # noqa: E731
    return affine(at) @ torch.linalg.lstsq(affine(x), y).solution


def local(x: Tensor, y: Tensor, at: Tensor, h: float, degree: int) -> Tensor:
    """Predict by `regard.attention` of degree 0 or 1 with bandwidth h at `at`: -> [P, C]."""
    spec = Spec.parse(KERNEL + (f"*linear(ridge={RIDGE * h * h})" if degree else ""))
    return attention(at[None, None], x[None, None], y[None, None], spec, scale=2 / h**2)[0, 0]


def bandwidths(estimator: str, dim: int, n: int) -> list[float]:
    """Return the grid: around the theory's order of magnitude, wide enough to hold the best bandwidth inside."""
    factor, power = (1.7, 4) if estimator == LINEAR else (1.0, 3)
    middle = factor * n ** (-1 / (dim + power)) * (0.65 if dim == 1 else 0.85)
    return [middle * STEP**i for i in range(-7, 8)]


class BoundaryBias(Recipe, name="boundary-bias"):
    """Error of global linear, local constant and local linear regression against n, and the theory's rates."""

    seeds: int = 24  # Independent designs for each n.
    dims: tuple[int, ...] = (1, 2)  # Dimensions of the design, each from 1 to 3.
    sizes: tuple[int, ...] = (512, 1024, 2048, 4096, 8192, 16384)  # Numbers n of design points.
    noise: float = 0.5  # Standard deviation of the noise on values.
    radii: int = 96  # Evaluation points along a radius.
    directions: int = 4  # Radii (in one dimension there are two).
    limits: ClassVar = {"seeds": (2, math.inf), "radii": (8, math.inf), "noise": (1e-6, 1e3), "dims": (1, 3),
                        "sizes": (32, 2**17)}  # fmt: skip
    by_size: ClassVar = {"quick": {"sizes": (512, 1024, 2048, 4096), "seeds": 12, "radii": 64}}
    no_paper_size = "The paper proves these rates and measures nothing."

    def check(self) -> None:
        require(len(self.sizes) > 1, self.call(), f"--sizes is {self.sizes}, expected two or more numbers.")

    def cells(self) -> list[Cell]:
        return [{"d": d, "n": n} for d in self.dims for n in self.sizes]

    @torch.no_grad()
    def measure(self, cell: Cell, seed: int) -> Iterator[dict[str, Any]]:
        d, n = cell["d"], cell["n"]
        where = places(d, self.radii, self.directions)
        x, y = design(d, n, seed, self.noise)
        known = truth(where.points)
        whole = global_linear(x, y, where.points)
        for estimator in THEORY:
            for i, h in enumerate(bandwidths(estimator, d, n)):
                off = (whole if estimator == GLOBAL else local(x, y, where.points, h, estimator == LINEAR)) - known
                error, layer = off[:, 1:].square().mean(-1) * where.weights, where.depths < h
                yield {
                    "estimator": estimator, "bandwidth": h, "place": i, "whole": error.sum().item(),
                    "boundary": error[layer].sum().item(), "interior": error[~layer].sum().item(),
                    "bias": (off[:, 0].square() * where.weights).sum().item(),
                }  # fmt: skip

    def claims(self, results: Results) -> list[Claim]:
        chosen, dims = best(results), self.dims
        of = lambda name, d, **at: select(chosen, d=d, estimator=name, **at)  # noqa: E731
        last = {"n": max(self.sizes)}
        ratio = {f"d = {d}": paired(of(CONSTANT, d, **last), of(LINEAR, d, **last), "whole", True) for d in dims}
        return claims_of(PAPER, [
            *(("propositions 2.1 and 2.2", f"The error of {name} regression falls as {LAWS[name]}",
               {f"d = {d}": log_slope(of(name, d), "n", "whole").plus(-theory(d)) for d in dims}, "within", NEAR,
               f"Fitted exponent of n less the theory's; within {NEAR:g} counts as equal at these n.")
              for name, theory in THEORY.items()),
            ("section 2", "Local linear regression errs less than local constant regression", ratio, "above", 1,
             "Errors at the largest n, local constant over local linear.", {"effect": 0.1}),
        ], effect=NEAR)  # fmt: skip

    def tables(self, results: Results) -> dict[str, Any]:
        chosen, upper = best(results), sorted(self.sizes)[-max(2, len(self.sizes) // 2) :]
        slope: Callable[[str], ToText] = lambda part: lambda rows: log_slope(rows, "n", part).text()  # noqa: E731
        errors: dict[str, Show] = {part: interval(part, 5) for part in (*PARTS, "bias")}
        return {
            "Rates": pivot(chosen, ["d", "estimator"], {
                "theory": lambda rows: f"{THEORY[rows['estimator'].iloc[0]](rows['d'].iloc[0]):.3f}",
                "whole": slope("whole"), "larger n": lambda rows: slope("whole")(select(rows, n=upper)),
                "boundary": slope("boundary"), "interior": slope("interior"),
                "bandwidth": lambda rows: f"{log_slope(rows, 'n', 'bandwidth').mean:.3f}",
            }, note="Least squares of log mean error on log n, ± half the 95 % interval. The boundary layer is as deep "
                    "as the bandwidth (for the global estimator: that of the local constant), and shrinks with it."),
            "Errors": pivot(chosen, ["d", "n", "estimator"], {"bandwidth": "{bandwidth:.3f}", **errors},
                            note="Integrated squared errors; bias: squared."),
        }  # fmt: skip

    def figures(self, results: Results) -> dict[str, bytes]:
        over = panels(best(results), "d = {d}")
        y = {part: f"{part}: squared error" for part in PARTS}
        return {"errors": lines(over, "n", y, "estimator", x_label="design points n", log_x=True, log_y=True)}

    def notes(self, results: Results) -> list[str]:
        chosen = best(results)
        edge = int(select(chosen, estimator=[CONSTANT, LINEAR])["place"].isin([0, 14]).sum() / self.seeds)
        last = select(chosen, estimator=CONSTANT, n=max(self.sizes)).groupby("d")[["boundary", "whole"]].mean()
        share = "; ".join(f"d = {d}: {row.boundary / row.whole:.0%}" for d, row in last.iterrows())
        return [
            f"f(x) = {CURVATURE:g} |x|^2 on the unit ball, uniform design, noise {self.noise:g}, "
            f"{self.seeds} designs for each n; Epanechnikov kernel. The bandwidth has the least mean error "
            f"against the known f; it is at the edge of its grid in {edge} cases.",
            f"Share of the local constant's error in the boundary layer at the largest n: {share}.",
        ]


def best(results: Results) -> Frame:
    """Return the rows with the bandwidth that has the least mean error, sorted by d and n; for the global estimator,
    whose error does not depend on it, with the bandwidth of the local constant."""
    rows, key = results.frame, ["d", "n", "estimator", "place"]
    chosen = select(rows, estimator=[CONSTANT, LINEAR]).groupby(key)["whole"].mean().groupby(key[:-1]).idxmin()
    named = rows.assign(estimator=rows["estimator"].replace(GLOBAL, CONSTANT)).set_index(key)
    return rows[named.index.isin(chosen)].sort_values(["d", "n"], kind="stable")
