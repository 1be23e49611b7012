"""Part 3 of `cpu.py`: linear-time forms and the cost of a decoded token, against scaled_dot_product_attention."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from cpu_measure import PASSES, Function, child_peaks, growth, interleaved, runner, say, summary, timed, warm_up
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import regard

BASELINE = "sdpa"
HEADS, DIM = 4, 64
PRESETS = ("linear", "cosine", "shift-cosine", "relu", "relu2", "elu")
SPECS = {name: regard.Spec.parse(name) for name in PRESETS}
SPECS |= {f"{n}, normalised": replace(SPECS[n], normalise=True) for n in PRESETS if not SPECS[n].normalise}
"""The presets as they are, and those that leave their weights unnormalised once more divided by their sum."""
LONGEST_SDPA = 8192
DECODE = "elu"


def chunked(q: Tensor, k: Tensor, v: Tensor, spec: regard.Spec) -> Tensor:
    return regard.linear_attention(q, k, v, spec, form="chunked")[0]


def functions(config: dict[str, Any]) -> dict[str, Function]:
    ours: dict[str, Function] = {name: partial(chunked, spec=spec) for name, spec in SPECS.items()}
    return {BASELINE: partial(scaled_dot_product_attention, is_causal=True), **ours}


def inputs(config: dict[str, Any]) -> tuple[list[Tensor], Tensor]:
    """Normal queries, keys and values [1, HEADS, length, DIM], float32, and a cotangent."""
    generator = torch.Generator().manual_seed(0)
    shape = (1, HEADS, 256 if config.get("warm") else config["length"], DIM)
    q, k, v, g = (torch.randn(shape, generator=generator) for _ in range(4))
    return [q, k, v], g


def run(quick: bool, threads: int) -> dict[str, Any]:
    """times by length, exponents of growth, decoding and memory. sdpa runs up to LONGEST_SDPA; ratios are to it
    there, and to the first preset beyond."""
    lengths = (64, 128, 256) if quick else (1024, 4096, LONGEST_SDPA, 16384, 65536)
    most, budget = (2, 1.0) if quick else (9, 1.5)
    warm_up(functions({}), inputs, {})
    times = []
    for length in lengths:
        config = {"length": length, "heads": HEADS, "causal": True}
        given, g = inputs(config)
        for which in PASSES:
            say(f"  linear: T {length}, {which}")
            some = {n: f for n, f in functions(config).items() if n != BASELINE or length <= LONGEST_SDPA}
            samples = interleaved({n: runner(f, given, g, which) for n, f in some.items()}, most=most, budget=budget)
            baseline = BASELINE if BASELINE in some else PRESETS[0]
            found = {"config": config, "pass": which, "baseline": baseline, "contestants": summary(samples, baseline)}
            times.append(found)
    return {
        "baseline": BASELINE,
        "times": times,
        "growth": exponents(times),
        "decoding": decoding((64, 256) if quick else (1024, 65536), quick),
        "memory": memory(lengths[-2:], quick, threads),
    }


def exponents(times: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Growth of every contestant in T, by pass, over the lengths at which it ran."""
    found = []
    for which in PASSES:
        points: dict[str, list[tuple[int, float]]] = {}
        for t in times:
            for name, cell in t["contestants"].items() if t["pass"] == which else ():
                points.setdefault(name, []).append((t["config"]["length"], cell["median_ms"]))
        fits = {name: growth(of) for name, of in points.items()}
        found.append({"causal": True, "pass": which, "contestants": fits})
    return found


def decoding(lengths: tuple[int, ...], quick: bool) -> list[dict[str, Any]]:
    """One token after so many: milliseconds of a step, by contestant and length, all taken in turns. A sample is the
    mean of as many steps as fit in 20 ms, since a short one alone is near what the clock and the machine disturb."""
    calls: dict[str, Callable[[], Any]] = {}
    steps: dict[str, int] = {}
    for length in lengths:
        (q, k, v), _ = inputs({"length": length})
        new = [x[:, :, -1:] for x in (q, k, v)]
        with torch.no_grad():
            state = regard.linear_attention(q, k, v, DECODE)[1]
        steppers: dict[str, Callable[[], Any]] = {
            f"regard {DECODE}, a state": partial(regard.linear_attention, new[0], new[1], new[2], DECODE, state=state),
            "sdpa, a cache": partial(scaled_dot_product_attention, new[0], k, v),
            "regard biweight, impl=cpu, a cache": partial(
                regard.attention, new[0], k, v, "biweight", is_causal=True, impl="cpu"
            ),
            "regard biweight, impl=blocked, a cache": partial(
                regard.attention, new[0], k, v, "biweight", is_causal=True, impl="blocked"
            ),
        }
        for name, step in steppers.items():
            several(step, 1)()
            n = steps[f"{name}|{length}"] = max(1, min(2 if quick else 50, int(0.02 / timed(several(step, 1)))))
            calls[f"{name}|{length}"] = several(step, n)
    say(f"  linear: decoding after {' and '.join(map(str, lengths))} tokens")
    samples = interleaved(calls, most=3 if quick else 15, budget=2.0)
    found = []
    for length in lengths:
        here = {n.split("|")[0]: [s / steps[n] for s in of] for n, of in samples.items() if n.endswith(f"|{length}")}
        config = {"length": length, "heads": HEADS, "steps": {name: steps[f"{name}|{length}"] for name in here}}
        found.append({"config": config, "contestants": summary(here, "sdpa, a cache")})
    return found


def several(step: Callable[[], Any], steps: int) -> Callable[[], None]:
    def call() -> None:
        with torch.no_grad():
            for _ in range(steps):
                step()

    return call


def memory(lengths: tuple[int, ...], quick: bool, threads: int) -> list[dict[str, Any]]:
    """Peaks in MiB: of all at the shorter length, of one form, for the growth, at the longer."""
    found = []
    cases = [(DECODE, lengths[1])] if quick else [*((name, lengths[0]) for name in functions({})), (DECODE, lengths[1])]
    for name, length in cases:
        say(f"  linear: memory of {name}, T {length}")
        config = {"length": length, "heads": HEADS, "causal": True}
        found.append({"name": name, "config": config, "mib": child_peaks("linear", name, config, threads)})
    return found
