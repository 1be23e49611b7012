"""Part 4 of `cpu.py`: local linear attention, against scaled_dot_product_attention and the plain dense form."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from cpu_linear import several
from cpu_measure import PASSES, Function, child_peaks, digits, growth, interleaved, runner, say, summary, timed, warm_up
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import regard

BASELINE, DENSE, AUTO, SOFTMAX = "sdpa", "dense local-linear", "regard local-linear", "regard softmax"
DIM, RIDGE, TOL = 64, 0.1, 1e-3
DENSE_LIMIT = 2**27
"""B H Tq Tk D of the dense form at most: it holds several tensors of so many float32 numbers, 512 MiB each."""
MEMORY = (BASELINE, AUTO)
"""Whose peaks are taken at the longest length; other kernels and tolerances keep what the second keeps."""
BAR_TENSORS, BAR_MB = 12, 64
"""Peak memory of forward and backward at most: so many times the queries, and so many megabytes."""


def ours(q: Tensor, k: Tensor, v: Tensor, impl: str = "auto", spec: str = "softmax", **solver: Any) -> Tensor:
    return regard.local_linear_attention(q, k, v, ridge=RIDGE, spec=spec, is_causal=True, impl=impl, **solver)


def functions(config: dict[str, Any]) -> dict[str, Function]:
    """By name; the dense form where its tensors are small enough."""
    found: dict[str, Function] = {
        BASELINE: partial(scaled_dot_product_attention, is_causal=True),
        AUTO: ours,
        f"regard local-linear, tol {TOL:g}": partial(ours, solver="cg", tol=TOL),
        "regard local-linear[biweight]": partial(ours, spec="biweight"),
    }
    if config["heads"] * config["length"] ** 2 * config["dim"] <= DENSE_LIMIT:
        found[DENSE] = partial(ours, impl="reference")
    return found


def inputs(config: dict[str, Any]) -> tuple[list[Tensor], Tensor]:
    """Normal queries, keys and values [1, heads, length, dim], float32, and a cotangent."""
    generator = torch.Generator().manual_seed(0)
    shape = (1, config["heads"], 256 if config.get("warm") else config["length"], config["dim"])
    q, k, v, g = (torch.randn(shape, generator=generator) for _ in range(4))
    return [q, k, v], g


def configs(quick: bool) -> list[dict[str, Any]]:
    """Lengths at DIM features, the other numbers of features at one length."""
    sizes = [(32, 2, 16), (64, 2, 16), (128, 1, 16)] if quick else [(512, 8, DIM), (1024, 8, DIM), (2048, 8, DIM)]
    sizes += [(64, 2, 8)] if quick else [(8192, 1, DIM), *((1024, 8, dim) for dim in (16, 32, 128))]
    return [{"length": length, "heads": heads, "dim": dim, "causal": True} for length, heads, dim in sizes]


def run(quick: bool, threads: int) -> dict[str, Any]:
    """times of all configurations, what the solver did there, growth in T, decoding and memory."""
    most, budget = (2, 1.0) if quick else (7, 1.0)
    small = {"heads": 1, "length": 256, "dim": 16 if quick else DIM}
    warm_up(functions(small), inputs, small)
    times, solved = [], []
    for config in configs(quick):
        given, g = inputs(config)
        contestants = functions(config)
        solved.append({"config": config, "contestants": dict(solver(contestants, given))})
        for which in PASSES:
            say(f"  local linear: T {config['length']}, H {config['heads']}, D {config['dim']}, {which}")
            calls = {name: runner(f, given, g, which) for name, f in contestants.items()}
            samples = interleaved(calls, most=most, budget=budget)
            times.append({"config": config, "pass": which, "contestants": summary(samples, BASELINE)})
    return {
        "baseline": BASELINE,
        "ridge": RIDGE,
        "times": times,
        "solver": solved,
        "growth": exponents(times),
        "decoding": decoding((64, 256) if quick else (1024, 8192), quick),
        "memory": memory(quick, threads),
    }


def solver(contestants: dict[str, Function], given: list[Tensor]) -> Iterator[tuple[str, dict[str, float]]]:
    """Mean and largest iterations and the largest relative residual of a row, of regard's contestants."""
    for name, f in contestants.items():
        if name not in (BASELINE, DENSE):
            with torch.no_grad():
                found = f(*given, return_diagnostics=True)[1].solver
            steps, residual = found["iterations"], found["residual"]
            yield (
                name,
                {"mean": digits(float(steps.mean())), "max": int(steps.max()), "residual": digits(residual.max())},
            )


def exponents(times: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Growth in T of the time of a head, of every contestant that ran at all lengths with the first number of
    features."""
    found = []
    for which in PASSES:
        same = [t for t in times if t["pass"] == which and t["config"]["dim"] == times[0]["config"]["dim"]]
        points = {
            name: [(t["config"]["length"], t["contestants"][name]["median_ms"] / t["config"]["heads"]) for t in same]
            for name in same[0]["contestants"]
            if all(name in t["contestants"] for t in same)
        }
        fits = {name: growth(of) for name, of in points.items()}
        found.append({"causal": True, "pass": which, "contestants": fits})
    return found


def decoding(lengths: tuple[int, ...], quick: bool) -> list[dict[str, Any]]:
    """One query after so many keys: milliseconds of a step, by contestant and length, all taken in turns; of samples
    and their steps as in `cpu_linear.decoding`. Ratios are to regard's own softmax."""
    heads, dim = (2, 16) if quick else (8, DIM)
    calls: dict[str, Callable[[], Any]] = {}
    steps: dict[str, int] = {}
    for length in lengths:
        (q, k, v), _ = inputs({"length": length, "heads": heads, "dim": dim})
        one = q[:, :, -1:]
        for name, step in decoders(one, k, v).items():
            several(step, 1)()
            n = steps[f"{name}|{length}"] = max(1, min(2 if quick else 50, int(0.02 / timed(several(step, 1)))))
            calls[f"{name}|{length}"] = several(step, n)
    say(f"  local linear: decoding after {' and '.join(map(str, lengths))} keys")
    samples = interleaved(calls, most=3 if quick else 15, budget=2.0)
    found = []
    for length in lengths:
        here = {n.split("|")[0]: [s / steps[n] for s in of] for n, of in samples.items() if n.endswith(f"|{length}")}
        config = {"length": length, "heads": heads, "dim": dim}
        config["steps"] = {name: steps[f"{name}|{length}"] for name in here}
        found.append({"config": config, "baseline": SOFTMAX, "contestants": summary(here, SOFTMAX)})
    return found


def decoders(one: Tensor, k: Tensor, v: Tensor) -> dict[str, Callable[[], Any]]:
    """A decoded token, by name: query [1, H, 1, D] against a cache."""
    return {
        "sdpa": partial(scaled_dot_product_attention, one, k, v),
        SOFTMAX: partial(regard.attention, one, k, v, "softmax", is_causal=True),
        AUTO: partial(ours, one, k, v),
        "regard local-linear[biweight]": partial(ours, one, k, v, spec="biweight"),
    }


def memory(quick: bool, threads: int) -> list[dict[str, Any]]:
    """Peaks in MiB at the longest length, eight heads, beside the size of the queries and the target."""
    config = {"length": 256, "heads": 2, "dim": 16} if quick else {"length": 8192, "heads": 8, "dim": DIM}
    queries = 4 * config["length"] * config["heads"] * config["dim"] / 2**20
    bar = BAR_TENSORS * queries + BAR_MB * 1e6 / 2**20
    found = []
    for name in MEMORY[-1:] if quick else MEMORY:
        say(f"  local linear: memory of {name}, T {config['length']}, H {config['heads']}")
        mib = child_peaks("local_linear", name, config | {"causal": True}, threads)
        found.append({"name": name, "config": config, "mib": mib, "queries_mib": queries, "bar_mib": digits(bar)})
    return found
