"""Part 1 of `cpu.py`: weightings of plain scores, against torch.softmax and the entmax package."""

from typing import Any

import entmax
import torch
from cpu_measure import PASSES, Function, child_peaks, digits, interleaved, runner, say, summary, warm_up
from cpu_table import PAIRS
from torch import Tensor

import regard

BASELINE = "softmax"
FUNCTIONS: dict[str, Function] = {
    "softmax": lambda z: torch.softmax(z, -1),
    "regard alpha=2": lambda z: regard.entmax(z, 2.0, impl="cpu"),
    "regard alpha=1.5": lambda z: regard.entmax(z, 1.5, impl="cpu"),
    "regard alpha=4/3": lambda z: regard.entmax(z, 4 / 3, impl="cpu"),
    "regard relumax": lambda z: regard.relumax(z, impl="cpu"),
    "regard normrelu": lambda z: regard.normrelu(z, impl="cpu"),
    "entmax sparsemax": lambda z: entmax.sparsemax(z, -1),
    "entmax entmax15": lambda z: entmax.entmax15(z, -1),
    "entmax entmax_bisect 1.5": lambda z: entmax.entmax_bisect(z, 1.5, -1),
    "entmax entmax_bisect 4/3": lambda z: entmax.entmax_bisect(z, 4 / 3, -1),
}
"""entmax_bisect with its default of 50 bisections."""


ALPHAS = {"regard alpha=2": 2.0, "regard alpha=1.5": 1.5, "regard alpha=4/3": 4 / 3}
ALPHAS |= {theirs: ALPHAS[ours] for ours, theirs in PAIRS}
SPREADS = (0.05, 1.0, 4.0)


def functions(config: dict[str, Any]) -> dict[str, Function]:
    return FUNCTIONS


def inputs(config: dict[str, Any]) -> tuple[list[Tensor], Tensor]:
    """Normal scores [elements / length, length] of the given spread, float32, and a cotangent."""
    generator = torch.Generator().manual_seed(0)
    elements = 2**14 if config.get("warm") else config["elements"]
    shape = (max(1, elements // config["length"]), config["length"])
    scores = torch.randn(shape, generator=generator).mul_(config["spread"])
    return [scores], torch.randn(shape, generator=generator)


def run(quick: bool, threads: int) -> dict[str, Any]:
    """times, accuracy and memory; see `cpu_measure.summary` for the fields of a time."""
    elements = 2**12 if quick else 2**22
    warm_up(FUNCTIONS, inputs, {"length": 512, "spread": 1.0})
    times = []
    for length in (64, 128, 256) if quick else (512, 2048, 8192):
        for spread in SPREADS:
            config = {"elements": elements, "length": length, "spread": spread}
            given, cotangent = inputs(config)
            for which in PASSES:
                say(f"  normalisers: length {length}, spread {spread}, {which}")
                calls = {name: runner(f, given, cotangent, which) for name, f in FUNCTIONS.items()}
                samples = interleaved(calls, most=2 if quick else 15, budget=1.0)
                times.append({"config": config, "pass": which, "contestants": summary(samples, BASELINE)})
    return {
        "baseline": BASELINE,
        "times": times,
        "accuracy": [accuracy(name, 256 if quick else 8192) for name in FUNCTIONS],
        "memory": memory(elements, quick, threads),
    }


def memory(elements: int, quick: bool, threads: int) -> list[dict[str, Any]]:
    """Peaks in MiB and in units of the score tensor."""
    config = {"elements": max(elements, 2**18), "length": 2048, "spread": 1.0}
    found = []
    for name in ("regard alpha=1.5",) if quick else FUNCTIONS:
        say(f"  normalisers: memory of {name}")
        mib = child_peaks("normalisers", name, config, threads)
        unit = config["elements"] * 4 / 2**20
        tensors = {which: round(size / unit, 2) for which, size in mib.items()}
        found.append({"name": name, "config": config, "mib": mib, "tensors": tensors})
    return found


# Accuracy ----------------------------------------------------------------------------------------------------


def accuracy(name: str, length: int) -> dict[str, Any]:
    """Worst |sum - 1| of a row and worst error of a weight over the spreads, 16 rows each, float32 and bfloat16."""
    found: dict[str, Any] = {"name": name, "length": length}
    for dtype in (torch.float32, torch.bfloat16):
        total = error = 0.0
        for spread in SPREADS:
            generator = torch.Generator().manual_seed(1)
            z = torch.randn(16, length, generator=generator, dtype=torch.float64).mul_(spread).to(dtype)
            p = FUNCTIONS[name](z).double()
            total = max(total, float((p.sum(-1) - 1).abs().max()))
            error = max(error, float((p - exact(name, z.double())).abs().max()))
        found[str(dtype).removeprefix("torch.")] = {"sum": digits(total, 2), "weight": digits(error, 2)}
    return found


def exact(name: str, z: Tensor) -> Tensor:
    """The weights in float64: from the formula, or for alpha-entmax from 100 bisections of its threshold."""
    top = z.amax(-1, keepdim=True)
    if name in ALPHAS:
        return bisected(z - top, ALPHAS[name])
    w = {
        "softmax": (z - top).exp(),
        "regard relumax": (z - top + 1).clamp(min=0),
        "regard normrelu": z.clamp(min=0),
    }[name]
    return w / w.sum(-1, keepdim=True)


def bisected(z: Tensor, alpha: float) -> Tensor:
    """alpha-entmax of float64 rows whose largest score is 0."""
    x = z * (alpha - 1)
    low = x.new_full((*x.shape[:-1], 1), -1.0)
    high = torch.zeros_like(low)
    for _ in range(100):
        middle = (low + high) / 2
        heavy = (x - middle).clamp(min=0).pow(1 / (alpha - 1)).sum(-1, keepdim=True) >= 1
        low, high = torch.where(heavy, middle, low), torch.where(heavy, high, middle)
    p = (x - low).clamp(min=0).pow(1 / (alpha - 1))
    return p / p.sum(-1, keepdim=True)
