"""Part 7 of `cpu.py`: one decoded token against few keys, where calls cost more than arithmetic."""

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from cpu_measure import digits, say, summary
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import regard

BASELINE, HEADS, DIM = "sdpa", 8, 64
SPECS = ("softmax", "biweight", "local-linear[biweight]")
CALLS = 10
"""Calls to a sample."""


def inputs(keys: int) -> list[Tensor]:
    """One query [1, HEADS, 1, DIM], and keys and values [1, HEADS, keys, DIM]."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, HEADS, length, DIM, generator=generator) for length in (1, keys, keys)]


def run(quick: bool, threads: int) -> dict[str, Any]:
    """Return the times of a call on one thread, whatever `threads` is, without gradients."""
    torch.set_num_threads(1)
    rounds, times = 4 if quick else 100, []
    for keys in (64,) if quick else (64, 1024):
        say(f"  token: {keys} keys")
        given = inputs(keys)
        calls: dict[str, Callable[[], Tensor]] = {BASELINE: partial(scaled_dot_product_attention, *given)}
        calls |= {spec: partial(regard.attention, *given, spec) for spec in SPECS}
        wall, processor = measured(calls, rounds)
        contestants = summary(wall, BASELINE)
        for name, found in contestants.items():
            found["cpu_us"] = digits(1e6 * processor[name])
            found["cpu_ratio"] = digits(processor[name] / processor[BASELINE])
        times.append({"config": {"keys": keys, "heads": HEADS, "dim": DIM}, "contestants": contestants})
    torch.set_num_threads(threads)
    return {"baseline": BASELINE, "times": times}


@torch.no_grad()
def measured(calls: dict[str, Callable[[], Tensor]], rounds: int) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Return the seconds of a call, sample by sample in turns, and the least processor time of one, by name."""
    for call in calls.values():
        for _ in range(2 * CALLS):  # compiles what must be compiled
            call()
    wall: dict[str, list[float]] = {name: [] for name in calls}
    processor = dict.fromkeys(calls, float("inf"))
    for _ in range(rounds):
        for name, call in calls.items():
            start, own = time.perf_counter(), time.thread_time()
            for _ in range(CALLS):
                call()
            processor[name] = min(processor[name], (time.thread_time() - own) / CALLS)
            wall[name].append((time.perf_counter() - start) / CALLS)
    return wall, processor
