"""Cheaper local linear attention: error against time for sliding windows, diagonal blocks and solver budgets (Local
Linear Attention paper, appendix E: SW-LLA, BD-LLA and Table 1).

The data are those of test-time regression (`regard.tasks.ConeRegression`); what counts is the squared error after the
first segment in units of the zero predictor's. Under both protocols: self-included (a position sees its own pair) and
strictly-past. Nothing is chosen per variant: all ridges are shown.

The paper defines BD-LLA as the diagonal blocks of Sigma, the second moment about the query, where its denominator
delta = omega - mu . rho is no longer positive; regard takes the blocks of the covariance about the weighted mean of the
keys, where there is no denominator. Both are measured.
"""

from __future__ import annotations

import itertools
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from regard.checks import ArgumentError
from regard.grammar.solvers import Auto, BlockDiagonal, Cholesky, ConjugateGradient, Solver
from regard.pairwise.attention import attention
from regard.pairwise.local_linear_attention import local_linear_attention
from regard.recipes import Findings, Progress, recipes
from regard.recurrent.mesa import mesa_attention
from regard.tasks import ConeRegression

from .lla_variants_cost import COSTS, Sizes

CALL = "reproduce: lla-variants"
PROTOCOLS = ("self-included", "strictly-past")
ROWS = 128
"""Rows whose matrices are formed at a time, and the B of the formulas: regard's own blocks of queries."""
BAND = 1.96
"""Standard errors on each side of a mean."""
DIGITS = 4


@dataclass(frozen=True, kw_only=True)
class VariantsConfig:
    """Measure error and time of windows, diagonal blocks and solver budgets of local linear attention."""

    out: Path = Path("lla-variants-out")
    """Folder to write. An earlier result in it is replaced; any other folder must be empty."""
    quick: bool = False
    """Small: options that are not given otherwise take values that need a few seconds."""
    dim: int = 64
    """Channels of keys and values, a power of two: blocks are its divisors."""
    length: int = 1024
    """Positions of a sequence."""
    segment: int = 256
    """Positions for which the map stays the same."""
    sequences: int = 8
    """Sequences."""
    noise: float = 0.1
    """Standard deviation of a value around the map."""
    ridges: tuple[float, ...] = (0.1, 1.0)
    """Ridges, relative to the kernel weight."""
    windows: tuple[int, ...] = (32, 64, 128, 256, 512)
    """Keys that a query sees with a sliding window."""
    steps: tuple[int, ...] = (1, 2, 4, 8, 16)
    """Budgets of conjugate gradients, in steps."""
    tols: tuple[float, ...] = (1e-1, 1e-2, 1e-3)
    """Budgets of conjugate gradients, in relative residuals; the last one is that of the windows."""
    repeats: int = 5
    """Timings of every variant, taken in turns."""
    seed: int = 0
    """Decides all sequences."""


QUICK: dict[str, Any] = {
    "dim": 16, "length": 256, "segment": 64, "sequences": 4, "windows": (32, 128), "steps": (1, 4), "repeats": 2,
}  # fmt: skip
"""What `quick` makes of the defaults."""

Solve = Callable[[Tensor, Tensor, Tensor, float, bool, bool], tuple[Tensor, Tensor | None]]
"""(q, k, v [B, 1, T, d], ridge, strictly past, counted) -> predictions, and if counted the iterations of every row
where there are some."""


@dataclass(frozen=True)
class Variant:
    """A way to predict.

    Attributes:
        name, group: in tables and figures.
        run: see `Solve`.
        window: keys that a query sees; None for all.
        blocks: diagonal blocks.
        cost: a row of `COSTS`.
        takes_ridge: whether the ridge matters.
    """

    name: str
    group: str
    run: Solve
    cost: str
    window: int | None = None
    blocks: int = 1
    takes_ridge: bool = True

    def sizes(self, config: VariantsConfig, steps: float | None) -> Sizes:
        """What the formulas need: n is the mean over rows."""
        seen = self.window or config.length
        n = sum(min(i + 1, seen) for i in range(config.length)) / config.length
        return Sizes(n, config.dim, steps or 0.0, self.blocks, ROWS)


def _sdpa(q: Tensor, k: Tensor, v: Tensor, ridge: float, strict: bool, counted: bool) -> tuple[Tensor, None]:
    if not strict:
        return scaled_dot_product_attention(q, k, v, is_causal=True), None
    return attention(q, k, v, "softmax", exclude_self=True), None


def _mesa(q: Tensor, k: Tensor, v: Tensor, ridge: float, strict: bool, counted: bool) -> tuple[Tensor, Tensor | None]:
    found = mesa_attention(
        q, k, v, ridge=ridge, solver="cg", tol=1e-3, max_iter=4 * q.shape[-1], exclude_self=strict,
        return_diagnostics=counted,
    )  # fmt: skip
    return found[0], found[2]["iterations"] if counted else None


def _softmax(window: int | None) -> Solve:
    def run(q: Tensor, k: Tensor, v: Tensor, ridge: float, strict: bool, counted: bool) -> tuple[Tensor, None]:
        return attention(q, k, v, "softmax", is_causal=True, exclude_self=strict, window=window, impl="blocked"), None

    return run


def _local_linear(solver: Solver, window: int | None = None) -> Solve:
    def run(q: Tensor, k: Tensor, v: Tensor, ridge: float, strict: bool, counted: bool) -> tuple[Tensor, Tensor | None]:
        found = local_linear_attention(
            q, k, v, ridge=ridge, solver=solver, window=window, is_causal=True, exclude_self=strict, impl="blocked",
            return_diagnostics=counted,
        )  # fmt: skip
        return (found[0], found[1].solver["iterations"]) if counted else (found, None)

    return run


def variants(config: VariantsConfig) -> list[Variant]:
    """All of them, plain attention first."""
    plain, kept, direct, parts = "softmax", "lla, weights kept", "lla, direct", "block-diagonal, direct"
    tol = config.tols[-1]
    made = [
        Variant("sdpa", "softmax", _sdpa, plain, takes_ridge=False),
        Variant("softmax", "softmax", _softmax(None), plain, takes_ridge=False),
        Variant("mesa", "mesa", _mesa, "mesa"),
        Variant("auto", "exact", _local_linear(Auto()), kept),
        Variant("cholesky", "exact", _local_linear(Cholesky()), direct),
    ]
    made += [Variant(f"tol {t:g}", "tolerances", _local_linear(ConjugateGradient(tol=t)), kept) for t in config.tols]
    made += [Variant(f"steps {n}", "steps", _local_linear(ConjugateGradient(max_iter=n)), kept) for n in config.steps]
    made += [
        Variant(f"blocks {g}", "blocks", _local_linear(BlockDiagonal(g)), parts, blocks=g) for g in blocks(config.dim)
    ]
    for w in (w for w in config.windows if w < config.length):
        name = f"window {w}"
        made += [
            Variant(f"softmax, {name}", "softmax windows", _softmax(w), plain, w, takes_ridge=False),
            Variant(name, "windows", _local_linear(ConjugateGradient(tol=tol), w), kept, w),
        ]
        for g in (g for g in (config.dim // 2, config.dim) if g > 1):
            both = f"blocks {g}, {name}"
            made.append(Variant(both, "windows and blocks", _local_linear(BlockDiagonal(g), w), parts, w, g))
    return made


def blocks(dim: int) -> list[int]:
    """1, 2, 4, ..., dim."""
    return [g for g in (2**i for i in range(dim.bit_length())) if dim % g == 0]


@dataclass(frozen=True)
class Data:
    """Keys (which are the queries) and values [B, 1, T, d], and the positions that count."""

    keys: Tensor
    values: Tensor
    later: slice

    def share(self, predicted: Tensor) -> list[float]:
        """[mean, half the width of its band] of the error after the first segment, in units of the zero predictor's,
        over sequences."""
        off = (predicted - self.values)[:, 0, self.later].double().square().sum((-1, -2))
        zero = self.values[:, 0, self.later].double().square().sum((-1, -2))
        own = off / zero.mean()
        spread = own.std().item() if len(own) > 1 else 0.0
        return [_digits(own.mean().item()), _digits(BAND * spread / len(own) ** 0.5)]


def draw(config: VariantsConfig) -> Data:
    """The sequences."""
    task = ConeRegression(config.dim, config.length, config.segment, config.noise)
    drawn = task.examples(config.seed, range(config.sequences))
    return Data(drawn.keys[:, None], drawn.values[:, None], slice(config.segment % config.length, None))


def _digits(x: float) -> float:
    return float(f"{x:.{DIGITS}g}")


def measure(config: VariantsConfig, data: Data, progress: Progress) -> list[dict[str, Any]]:
    """A record for every variant and ridge; those without a ridge have one, with None."""
    known = variants(config)
    work: list[tuple[Variant, float | None]] = [(v, None) for v in known if not v.takes_ridge]
    work += [(v, ridge) for ridge in config.ridges for v in known if v.takes_ridge]
    records = []
    for variant, ridge in work:
        progress(f"errors of {variant.name}")
        record: dict[str, Any] = {"name": variant.name, "group": variant.group, "ridge": ridge, "cost": variant.cost}
        record |= {"window": variant.window, "blocks": variant.blocks, "error": {}, "steps": {}}
        for protocol in PROTOCOLS:
            out, steps = _run(variant, data, ridge, protocol == "strictly-past", True)
            record["error"][protocol] = data.share(out)
            direct = variant.cost.endswith("direct")
            record["steps"][protocol] = None if steps is None or direct else _digits(steps.double().mean().item())
        sizes = variant.sizes(config, record["steps"]["self-included"])
        record |= {"flops": _digits(COSTS[variant.cost].flops(sizes)), "keys": sizes.n}
        record |= {"numbers": _digits(COSTS[variant.cost].numbers(sizes))}
        records.append(record)
    queries = data.keys.shape[0] * config.length
    samples: list[list[float]] = [[] for _ in work]
    for turn in range(config.repeats):
        progress(f"times, turn {turn + 1} of {config.repeats}")
        for (variant, ridge), own in zip(work, samples, strict=True):
            start = time.perf_counter()
            _run(variant, data, ridge, False, False)
            own.append((time.perf_counter() - start) / queries)
    for record, own in zip(records, samples, strict=True):
        record["microseconds"] = [_digits(1e6 * seconds) for seconds in own]
        record["microseconds_median"] = _digits(1e6 * sorted(own)[len(own) // 2])
    return records


def _run(
    variant: Variant, data: Data, ridge: float | None, strict: bool, counted: bool
) -> tuple[Tensor, Tensor | None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # too few steps are the point
        return variant.run(data.keys, data.keys, data.values, 0.0 if ridge is None else ridge, strict, counted)


# The paper's blocks ------------------------------------------------------------------------------------------


def q_centred_blocks(
    k: Tensor, v: Tensor, ridges: Sequence[float], counts: Sequence[int], strict: bool
) -> dict[tuple[float, int], tuple[Tensor, Tensor]]:
    """BD-LLA as the paper defines it, for one sequence with q = k [T, d], in float64: the diagonal blocks of
    Sigma = sum w (k - q)(k - q)^T + ridge omega, o = sum w (1 - (k - q) . rho) v / delta, rho = Sigma^-1 mu.

    Returns:
        By ridge and number of blocks the predictions [T, dv], 0 where nothing is seen, and delta / omega [T], 1 there.
    """
    k, v = k.double(), v.double()
    length, dim = k.shape
    hidden = torch.ones(length, length, dtype=torch.bool).triu(0 if strict else 1)
    p = ((k @ k.T) * dim**-0.5).masked_fill(hidden, -torch.inf).softmax(-1).nan_to_num(0.0)
    mass = p.sum(-1, keepdim=True)
    near = p @ k - mass * k  # mu / omega
    pairs = (k[:, :, None] * k[:, None, :]).flatten(1)
    slopes: dict[tuple[float, int], list[Tensor]] = {at: [] for at in itertools.product(ridges, counts)}
    for start in range(0, length, ROWS):
        at = slice(start, start + ROWS)
        q, mu = k[at], near[at]
        cross = mu[:, :, None] * q[:, None, :]
        own = (mass[at] * q)[:, :, None] * q[:, None, :]
        sigma = (p[at] @ pairs).unflatten(-1, (dim, dim)) - cross - cross.mT - own
        for (ridge, count), parts in slopes.items():
            size = dim // count
            tiled = sigma.unflatten(-1, (count, size)).unflatten(-3, (count, size))
            block = tiled.diagonal(dim1=-4, dim2=-2).movedim(-1, -3) + ridge * torch.eye(size, dtype=k.dtype)
            parts.append(torch.linalg.solve(block, mu.unflatten(-1, (count, size))[..., None]).flatten(-3))
    found = {}
    for key, parts in slopes.items():
        rho = torch.cat(parts)
        delta = 1 - (near * rho).sum(-1)
        tilted = p * (1 - rho @ k.T + (rho * k).sum(-1, keepdim=True))
        found[key] = tilted @ v / delta[:, None], delta
    return found


def contrast(config: VariantsConfig, data: Data, progress: Progress) -> list[dict[str, Any]]:
    """Error and the share of rows with delta <= 0 of the paper's blocks, by protocol, ridge and blocks."""
    found = []
    for protocol in PROTOCOLS:
        progress(f"the paper's blocks, {protocol}")
        each = [
            q_centred_blocks(k, v, config.ridges, blocks(config.dim), protocol == "strictly-past")
            for k, v in zip(data.keys[:, 0], data.values[:, 0], strict=True)
        ]
        for ridge, count in each[0]:
            out = torch.stack([one[ridge, count][0] for one in each])[:, None]
            delta = torch.stack([one[ridge, count][1] for one in each])[:, data.later]
            share = _digits((delta <= 0).double().mean().item())
            record = {"protocol": protocol, "ridge": ridge, "blocks": count}
            found.append(record | {"error": data.share(out), "not_positive": share})
    return found


@recipes.register("lla-variants")
class Variants:
    """Error of windows, diagonal blocks and solver budgets of local linear attention against time and cost."""

    Config: ClassVar[type[Any]] = VariantsConfig

    @staticmethod
    def run(config: VariantsConfig, progress: Progress) -> Findings:
        """See `regard.recipes.Recipe`."""
        config = effective(config)
        check(config)
        with torch.no_grad():
            data = draw(config)
            records = measure(config, data, progress)
            theirs = contrast(config, data, progress)
        progress("drawing")
        from . import lla_variants_output as shown

        used = {f.name: getattr(config, f.name) for f in fields(config)}
        found = {"records": records, "q_centred": theirs, "threads": torch.get_num_threads()}
        return Findings(
            {"config": {**used, "out": str(config.out)}, **found},
            shown.tables(config, records, theirs),
            shown.figures(config, records, theirs),
            shown.notes(config, records, theirs),
        )


def effective(config: VariantsConfig) -> VariantsConfig:
    """The config with what `quick` says in place of defaults."""
    defaults = VariantsConfig()
    left = {name for name in QUICK if getattr(config, name) == getattr(defaults, name)}
    return replace(config, **{name: QUICK[name] for name in left}) if config.quick else config


def check(config: VariantsConfig) -> None:
    """The numbers are in range.

    Raises:
        ArgumentError: one is not.
    """
    try:
        ConeRegression(config.dim, config.length, config.segment, config.noise)
    except ArgumentError as error:
        raise ArgumentError(f"{CALL}: {error}") from None
    if config.dim & (config.dim - 1) or not 2 <= config.dim <= 128:
        raise ArgumentError(f"{CALL}: --dim is {config.dim}, expected a power of two from 2 to 128.")
    for name, least, most in (("length", 16, 4096), ("sequences", 1, 4096), ("repeats", 1, 1000), ("seed", 0, 2**31)):
        if not least <= getattr(config, name) <= most:
            raise ArgumentError(f"{CALL}: --{name} is {getattr(config, name)}, expected {least} to {most}.")
    limits: Sequence[tuple[str, float, float]]
    limits = (("ridges", 1e-6, 1e6), ("windows", 1, 2**20), ("steps", 0, 10_000), ("tols", 1e-7, 1.0))
    for name, low, high in limits:
        levels = getattr(config, name)
        if not levels or len(set(levels)) < len(levels):
            raise ArgumentError(f"{CALL}: --{name} is {levels}, expected at least one number, each once.")
        for level in levels:
            if not low <= level <= high:
                raise ArgumentError(f"{CALL}: --{name} has {level:g}, expected numbers from {low:g} to {high:g}.")
    if config.tols[-1] != min(config.tols):
        raise ArgumentError(f"{CALL}: --tols is {config.tols}; give the smallest last, windows are solved to it.")
