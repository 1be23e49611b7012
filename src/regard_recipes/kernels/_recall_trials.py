"""What a memory recalls in one condition; part of the recipe recall-capacity."""

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import normalize

from regard.grammar import Spec
from regard.memory.associative import AssociativeMemory

PAIRWISE = 2**24  # numbers that a read of a local linear model may build at once: one for every pair and channel


class Trial(NamedTuple):
    """Keys, values and cues, unit vectors [1, 1, n, D], in one condition: a panel, its level, a seed of damage."""

    keys: Tensor
    values: Tensor
    cues: Tensor
    panel: str
    level: float
    seed: int


def trial(config: Any, panel: str, level: float, seed: int) -> Trial:
    """Return keys, values and cues of the sizes of a recipe, a function of (seed, number of pairs, condition)."""
    count = int(level) if panel == "pairs" else config.stored
    draw = torch.Generator().manual_seed(seed * 1_000_003 + count)
    keys, values = (normalize(torch.randn(1, 1, count, config.dim, generator=draw), dim=-1) for _ in range(2))
    cues = keys[:, :, : config.cues]
    if panel == "noise":
        cues = normalize(cues + level * normalize(torch.randn(cues.shape, generator=draw), dim=-1), dim=-1)
    elif panel == "erased":
        rank = torch.rand(cues.shape, generator=draw).argsort(-1).argsort(-1)
        cues = cues * (rank >= round(level * config.dim))
    return Trial(keys, values, cues, panel, float(level), seed + 1)


def retrieve(spec: Spec, store: str, scale: float | None, case: Trial, values: Tensor) -> Tensor:
    """Return what the cues retrieve after the damage, [1, 1, C, Dv], float64, from a memory that keeps the pairs as
    `store` says (of AssociativeMemory). A spec without a scale has keys and cues of that squared length instead."""
    length = 1.0 if scale is None or spec.takes_scale else scale**0.5
    memory = AssociativeMemory(spec, scale=scale if spec.takes_scale else None, store=store, impl="reference")
    memory.write(case.keys * length, values)
    draw = torch.Generator().manual_seed(case.seed)
    if case.panel == "zeroed":
        memory.transform(lambda t: t * (torch.rand(t.shape, generator=draw) >= case.level))
    elif case.panel == "jitter":
        memory.transform(lambda t: t + case.level * t.square().mean().sqrt() * torch.randn(t.shape, generator=draw))
    parts = (case.cues * length).split(max(1, PAIRWISE // case.keys.numel()), dim=2)
    return torch.cat([memory.read(part) for part in parts], 2).double()


def recall(spec: Spec, store: str, scale: float | None, case: Trial) -> dict[str, Tensor]:
    """Return relative squared error and exact-match rate, to which an empty result does not count; with clean cues also
    signal bias and interference, means of squares, and the inverse signal-to-noise ratio."""
    read, values = partial(retrieve, spec, store, scale, case), case.values.double()
    retrieved = read(case.values)
    count = retrieved.shape[2]
    targets = values[:, :, :count]
    nearest = (retrieved @ values.mT).argmax(-1)  # of unit vectors the nearest
    right = (nearest == torch.arange(count)) & (retrieved != 0).any(-1)
    measured = {"match": right.double().mean(), "error": (retrieved - targets).square().sum(-1).mean()}
    if case.panel != "pairs":
        return measured
    marks = torch.eye(case.keys.shape[2], count, dtype=case.values.dtype)[None, None]
    signal = read(marks).diagonal(dim1=-2, dim2=-1)[..., None] * targets  # weight of the cue's own value
    interference, power = (retrieved - signal).square().sum(-1), signal.square().sum()
    return {
        **measured, "bias": (signal - targets).square().sum(-1).mean(), "interference": interference.mean(),
        "inverse_snr": interference.sum() / power.clamp(min=torch.finfo(power.dtype).tiny),
    }  # fmt: skip
