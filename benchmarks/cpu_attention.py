"""Part 2 of `cpu.py`: attention, against torch's scaled_dot_product_attention and dense entmax15 attention."""

from functools import partial
from typing import Any

import entmax
import torch
from cpu_measure import PASSES, Function, child_peaks, growth, interleaved, runner, say, summary, warm_up
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import regard

BASELINE, DENSE = "sdpa", "dense entmax15"
DIM = 64
CLUSTER = 128
"""Positions of a cluster of keys: regard marks which keys have weight by blocks of as many."""


def dense_entmax15(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """What one writes with the package: all scores, entmax15, weighted sums."""
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu_(1)
        scores = scores.masked_fill_(hidden, -torch.inf)
    return entmax.entmax15(scores, -1) @ v


def ours(q: Tensor, k: Tensor, v: Tensor, spec: str, impl: str, causal: bool) -> Tensor:
    return regard.attention(q, k, v, spec, is_causal=causal, impl=impl)


def functions(config: dict[str, Any]) -> dict[str, Function]:
    causal = config["causal"]
    return {
        BASELINE: partial(scaled_dot_product_attention, is_causal=causal),
        "regard biweight": partial(ours, spec="biweight", impl="cpu", causal=causal),
        "regard sparsemax": partial(ours, spec="sparsemax", impl="cpu", causal=causal),
        "regard relumax": partial(ours, spec="relumax", impl="cpu", causal=causal),
        "regard biweight, impl=blocked": partial(ours, spec="biweight", impl="blocked", causal=causal),
        DENSE: partial(dense_entmax15, causal=causal),
    }


def inputs(config: dict[str, Any]) -> tuple[list[Tensor], Tensor]:
    """Normal queries, keys and values [1, heads, length, DIM], float32, and a cotangent."""
    generator = torch.Generator().manual_seed(0)
    shape = (1, config["heads"], 256 if config.get("warm") else config["length"], DIM)
    q, k, v, g = (torch.randn(shape, generator=generator) for _ in range(4))
    return [q, k, v], g


def clustered(heads: int, length: int, cluster: int) -> tuple[list[Tensor], list[Tensor], Tensor]:
    """Queries, keys, values in clusters along time, the same with keys and values shuffled in time, and a cotangent.

    A query has weight on the keys of its own cluster alone: its scores with those are near 32, with others near
    0 +- 4. Shuffling changes no output of attention that is not causal, only where the weights are.
    """
    generator = torch.Generator().manual_seed(0)
    centres = 2 * torch.randn(1, heads, length // cluster, DIM, generator=generator).repeat_interleave(cluster, 2)
    q, k = (centres + 0.3 * torch.randn(centres.shape, generator=generator) for _ in range(2))
    v, g = (torch.randn(centres.shape, generator=generator) for _ in range(2))
    order = torch.randperm(length, generator=generator)
    return [q, k, v], [q, k[:, :, order], v[:, :, order]], g


def run(quick: bool, threads: int) -> dict[str, Any]:
    """times of all configurations, exponents of growth in T, the clustered case and memory."""
    sizes = [(32, 2), (64, 2), (128, 1)] if quick else [(512, 8), (2048, 8), (8192, 1)]
    alone = [(length, 1) for length, heads in sizes if heads != 1]  # equal heads for the exponent of growth
    most, budget = (2, 1.0) if quick else (9, 1.5)
    warm_up(functions({"causal": True}), inputs, {"heads": 1})
    times = []
    for length, heads in sizes + alone:
        for causal in (False, True):
            config = {"length": length, "heads": heads, "causal": causal}
            given, g = inputs(config)
            for which in PASSES:
                say(f"  attention: T {length}, H {heads}, {'causal' if causal else 'full'}, {which}")
                calls = {name: runner(f, given, g, which) for name, f in functions(config).items()}
                samples = interleaved(calls, most=most, budget=budget)
                times.append({"config": config, "pass": which, "contestants": summary(samples, BASELINE)})
    return {
        "baseline": BASELINE,
        "times": times,
        "growth": exponents(times),
        "clustered": clustered_times(quick, most, budget),
        "memory": memory(sizes, quick, threads),
    }


def exponents(times: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Growth of every contestant in T with one head, by causal and pass."""
    found = []
    for causal in (False, True):
        for which in PASSES:
            same = [
                t for t in times
                if t["config"]["heads"] == 1 and t["config"]["causal"] == causal and t["pass"] == which
            ]  # fmt: skip
            names = same[0]["contestants"]
            fits = {n: growth((t["config"]["length"], t["contestants"][n]["median_ms"]) for t in same) for n in names}
            found.append({"causal": causal, "pass": which, "contestants": fits})
    return found


def clustered_times(quick: bool, most: int, budget: float) -> list[dict[str, Any]]:
    """sdpa and biweight on clustered keys in order and shuffled: what leaving out blocks of keys gives."""
    config = {"length": 256, "heads": 1} if quick else {"length": 2048, "heads": 8}
    config |= {"causal": False, "cluster": CLUSTER}
    ordered, shuffled, g = clustered(config["heads"], config["length"], CLUSTER)
    f = functions(config)
    biweight = f["regard biweight"]
    torch.testing.assert_close(biweight(*ordered), biweight(*shuffled), atol=1e-4, rtol=1e-4)
    found = []
    for which in PASSES:
        say(f"  attention: clustered keys, {which}")
        calls = {
            BASELINE: runner(f[BASELINE], ordered, g, which),
            "regard biweight, clusters in order": runner(biweight, ordered, g, which),
            "regard biweight, the same shuffled": runner(biweight, shuffled, g, which),
        }
        samples = interleaved(calls, most=most, budget=budget)
        found.append({"config": config, "pass": which, "contestants": summary(samples, BASELINE)})
    return found


def memory(sizes: list[tuple[int, int]], quick: bool, threads: int) -> list[dict[str, Any]]:
    """Peaks in MiB, full attention at the two longest lengths."""
    found = []
    for length, heads in sizes[1:]:
        config = {"length": length, "heads": heads, "causal": False}
        for name in ("regard biweight",) if quick else functions(config):
            if not quick or length == sizes[-1][0]:
                say(f"  attention: memory of {name}, T {length}, H {heads}")
                mib = child_peaks("attention", name, config, threads)
                found.append({"name": name, "config": config, "mib": mib})
    return found
