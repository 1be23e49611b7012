"""Boundary bias: how the error of global linear, local constant and local linear regression falls with n (Local Linear
Attention paper, propositions 2.1 and 2.2).

Design points are uniform on the unit ball D in d dimensions, whose boundary is smooth; f(x) = 2 |x|^2, the paper's own
example of a function with a large normal gradient all along the boundary; values are f plus normal noise. With the
bandwidth that is best at each n the integrated squared error should fall as

    global linear n^0      local constant n^(-3/(d+3))      local linear n^(-4/(d+4))

The local constant's exponent comes from the boundary: within a bandwidth h of it the bias is of order h, not h^2.

Both local estimators are `regard.attention` with the Epanechnikov kernel, w = [1 - |q - k|^2 / h^2]_+: compactly
supported, as the propositions assume. The bandwidth is the one of a grid with the least mean error against the known
truth. The integral over D is a quadrature over radii times a few directions, since everything is symmetric.

Legend: R samples, n design points, P evaluation points, d dimensions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from regard.checks import ArgumentError
from regard.grammar import Spec
from regard.pairwise.attention import attention
from regard.recipes import Findings, Progress, recipes

from ..lib.threads import one_thread

CALL = "reproduce: boundary-bias"
KERNEL = "epanechnikov*fixed(bias=1,empty=nearest)*euclidean"
CURVATURE = 2.0
"""f(x) = CURVATURE |x|^2."""
RIDGE = 1e-6
"""Of the local linear model, in units of h^2: it only keeps windows with fewer than d + 1 points solvable."""
STEP = 1.12
"""Ratio of neighbouring bandwidths of the grid."""
REPEATS = 16
"""Draws of the noise on each design: further channels of the values, which cost next to nothing."""
DIGITS = 5
BAND = 1.96
"""Standard errors on each side of a mean."""


@dataclass(frozen=True, kw_only=True)
class BoundaryBiasConfig:
    """Measure how fast global linear, local constant and local linear regression learn, and where they err."""

    out: Path = Path("boundary-bias-out")
    """Folder to write. An earlier result in it is replaced; any other folder must be empty."""
    quick: bool = False
    """Small: options that are not given otherwise take values that need less than two minutes."""
    dims: tuple[int, ...] = (1, 2)
    """Dimensions of the design, each from 1 to 3."""
    sizes: tuple[int, ...] = (512, 1024, 2048, 4096, 8192, 16384)
    """Numbers n of design points."""
    samples: int = 24
    """Independent designs for each n."""
    noise: float = 0.5
    """Standard deviation of the noise on values."""
    radii: int = 96
    """Evaluation points along a radius."""
    directions: int = 4
    """Radii (in one dimension there are two)."""
    seed: int = 0
    """Decides all designs."""


QUICK: dict[str, Any] = {"sizes": (512, 1024, 2048, 4096), "samples": 12, "radii": 64}
"""What `quick` makes of the defaults."""


@dataclass(frozen=True)
class Places:
    """Where errors are measured, and how much of the ball each place stands for.

    Attributes:
        points: [P, d]; weights [P], which sum to the volume of the ball; depths [P], distances to the boundary.
    """

    points: Tensor
    weights: Tensor
    depths: Tensor


def truth(x: Tensor) -> Tensor:
    """f, [..., d] -> [...]."""
    return CURVATURE * x.square().sum(-1)


def places(dim: int, radii: int, directions: int) -> Places:
    """A Gauss-Legendre rule over radii, the same along every direction."""
    nodes, shares = (torch.from_numpy(part) for part in np.polynomial.legendre.leggauss(radii))
    r, share = (nodes + 1) / 2, shares / 2
    if dim == 1:
        rays = torch.tensor([[1.0], [-1.0]], dtype=r.dtype)
    else:
        draw = torch.Generator().manual_seed(dim)
        rays = torch.randn(directions, dim, generator=draw, dtype=r.dtype)
        rays = rays / rays.norm(dim=-1, keepdim=True)
    sphere = 2 * math.pi ** (dim / 2) / math.gamma(dim / 2)
    weights = (share * r ** (dim - 1) * sphere / len(rays)).expand(len(rays), -1)
    points = rays[:, None] * r[:, None]
    return Places(points.flatten(0, 1), weights.flatten(), (1 - r).expand(len(rays), -1).flatten())


def design(config: BoundaryBiasConfig, dim: int, n: int, sample: int) -> tuple[Tensor, Tensor]:
    """Design points [n, d], uniform on the ball, and values [n, 1 + REPEATS]: f, and f with noise. A function of the
    seed and the arguments."""
    key = ((config.seed * 4 + dim) * 1_000_003 + n) * 1_000_003 + sample
    draw = torch.Generator().manual_seed(key % 2**63)
    normal = torch.randn(n, dim, generator=draw, dtype=torch.float64)
    radius = torch.rand(n, 1, generator=draw, dtype=torch.float64) ** (1 / dim)
    x = normal / normal.norm(dim=-1, keepdim=True) * radius
    off = torch.randn(n, REPEATS, generator=draw, dtype=torch.float64) * config.noise
    f = truth(x)[:, None]
    return x, torch.cat([f, f + off], -1)


def global_linear(x: Tensor, y: Tensor, at: Tensor) -> Tensor:
    """Least squares with an intercept, read at `at`: [n, d], [n, C], [P, d] -> [P, C]."""
    affine = lambda u: torch.cat([torch.ones_like(u[:, :1]), u], -1)  # noqa: E731
    return affine(at) @ torch.linalg.lstsq(affine(x), y).solution


def local(x: Tensor, y: Tensor, at: Tensor, h: float, degree: int) -> Tensor:
    """`regard.attention` of degree 0 or 1 with bandwidth h, read at `at`: -> [P, C]."""
    spec = Spec.parse(KERNEL + (f"*linear(ridge={RIDGE * h * h})" if degree else ""))
    q, k, v = (u[None, None] for u in (at, x, y))
    found: Tensor = attention(q, k, v, spec, scale=2 / h**2)
    return found[0, 0]


Fit = Callable[[Tensor, Tensor, Tensor, float], Tensor]
ESTIMATORS: dict[str, tuple[Fit, Callable[[int], float]]] = {
    "global linear": (lambda x, y, at, h: global_linear(x, y, at), lambda d: 0.0),
    "local constant": (lambda x, y, at, h: local(x, y, at, h, 0), lambda d: -3 / (d + 3)),
    "local linear": (lambda x, y, at, h: local(x, y, at, h, 1), lambda d: -4 / (d + 4)),
}
"""Name to (fit, the theory's exponent)."""


def bandwidths(name: str, dim: int, n: int) -> list[float]:
    """The grid: around the theory's order of magnitude, wide enough to hold the best one inside; one entry, without
    meaning, for the global estimator."""
    if name == "global linear":
        return [1.0]
    power = 3 if name == "local constant" else 4
    middle = (1.0 if name == "local constant" else 1.7) * n ** (-1 / (dim + power)) * (0.65 if dim == 1 else 0.85)
    return [middle * STEP**i for i in range(-7, 8)]


def measure(config: BoundaryBiasConfig, dim: int, n: int) -> dict[str, Any]:
    """Every estimator at its best bandwidth: the integrated squared error in all, in the boundary layer (depth below h;
    for the global estimator below the local constant's h) and inside, and the parts of bias and noise."""
    where = places(dim, config.radii, config.directions)
    known = truth(where.points)[:, None]
    samples = [design(config, dim, n, sample) for sample in range(config.samples)]
    found: dict[str, Any] = {}
    for name in ("local constant", "local linear", "global linear"):
        fit = ESTIMATORS[name][0]
        runs = []
        for h in bandwidths(name, dim, n):
            off = torch.stack([fit(x, y, where.points, h) - known for x, y in samples])  # [R, P, 1 + REPEATS]
            runs.append((h, off[..., 1:].square().mean(-1), off[..., 0].square()))
        best = min(range(len(runs)), key=lambda i: float((runs[i][1] @ where.weights).mean()))
        h, error, bias = runs[best]
        layer = where.depths < (h if name != "global linear" else found["local constant"]["h"])
        found[name] = {
            "h": h,
            "inside_grid": len(runs) == 1 or 0 < best < len(runs) - 1,
            "whole": mean(error @ where.weights),
            "boundary": mean(error[:, layer] @ where.weights[layer]),
            "interior": mean(error[:, ~layer] @ where.weights[~layer]),
            "bias": mean(bias @ where.weights),
        }
    return found


def mean(x: Tensor) -> list[float]:
    """[mean, its standard error] of numbers [R]."""
    error = x.std().item() / len(x) ** 0.5 if len(x) > 1 else 0.0
    return [float(f"{number:.{DIGITS}g}") for number in (x.mean().item(), error)]


def slope(sizes: Sequence[int], pairs: Sequence[Sequence[float]]) -> list[float]:
    """[slope, standard error] of log error against log n by least squares, the errors of the means carried through."""
    x = np.log(np.array(sizes, float))
    mid, error = np.array(pairs, float).T
    lever = (x - x.mean()) / ((x - x.mean()) ** 2).sum()
    return [round(float(lever @ np.log(mid)), 4), round(float(np.sqrt((lever**2) @ ((error / mid) ** 2))), 4)]


def rates(config: BoundaryBiasConfig, runs: dict[int, dict[int, Any]]) -> dict[int, Any]:
    """d and estimator to the fitted slopes of all parts, of the whole over the larger half of the sizes, of the best
    bandwidth, and the theory's."""
    made: dict[int, Any] = {}
    upper = sorted(config.sizes)[-max(2, len(config.sizes) // 2) :]
    for d, by_n in runs.items():
        made[d] = {}
        for name, (_, theory) in ESTIMATORS.items():
            own = [by_n[n][name] for n in config.sizes]
            made[d][name] = {"theory": round(theory(d), 4)}
            for part in ("whole", "boundary", "interior"):
                made[d][name][part] = slope(config.sizes, [run[part] for run in own])
            made[d][name]["upper"] = slope(upper, [by_n[n][name]["whole"] for n in upper])
            if name != "global linear":
                made[d][name]["h"] = slope(config.sizes, [(run["h"], 0.0) for run in own])[0]
    return made


@recipes.register("boundary-bias")
class BoundaryBias:
    """Error of global linear, local constant and local linear regression against n, and the theory's rates."""

    Config: ClassVar[type[Any]] = BoundaryBiasConfig

    @staticmethod
    def run(config: BoundaryBiasConfig, progress: Progress) -> Findings:
        """See `regard.recipes.Recipe`."""
        config = effective(config)
        check(config)
        runs: dict[int, dict[int, Any]] = {d: {} for d in config.dims}
        for d in config.dims:
            for n in config.sizes:
                progress(f"d = {d}, n = {n}")
                with torch.no_grad(), one_thread():
                    runs[d][n] = measure(config, d, n)
        fitted = rates(config, runs)
        progress("drawing")
        from . import boundary_bias_output as output

        return Findings(
            {"config": output.plain(config), "runs": runs, "rates": fitted},
            {"Rates": output.rate_table(fitted), "Errors": output.error_table(runs)},
            {"boundary-bias.png": output.figure(config, runs, fitted)},
            output.notes(config, runs, fitted),
        )


def effective(config: BoundaryBiasConfig) -> BoundaryBiasConfig:
    """The config with what `quick` says in place of defaults."""
    defaults = BoundaryBiasConfig()
    left = {name for name in QUICK if getattr(config, name) == getattr(defaults, name)}
    return replace(config, **{name: QUICK[name] for name in left}) if config.quick else config


def check(config: BoundaryBiasConfig) -> None:
    """The numbers are in range.

    Raises:
        ArgumentError: one is not.
    """
    for name, least in (("samples", 2), ("radii", 8), ("directions", 1)):
        if getattr(config, name) < least:
            raise ArgumentError(f"{CALL}: --{name} is {getattr(config, name)}, expected at least {least}.")
    if not 0 <= config.seed < 2**31:
        raise ArgumentError(f"{CALL}: --seed is {config.seed}, expected 0 to {2**31 - 1}.")
    if not 0 < config.noise < 1e3:
        raise ArgumentError(f"{CALL}: --noise is {config.noise:g}, expected a number between 0 and 1000.")
    if not config.dims or any(not 1 <= d <= 3 for d in config.dims):
        raise ArgumentError(f"{CALL}: --dims is {config.dims}, expected whole numbers from 1 to 3.")
    if len(set(config.sizes)) < 2 or any(not 32 <= n <= 2**17 for n in config.sizes):
        raise ArgumentError(f"{CALL}: --sizes is {config.sizes}, expected two or more numbers from 32 to {2**17}.")
