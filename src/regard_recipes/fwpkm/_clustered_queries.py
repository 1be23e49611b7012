"""Queries around one point: how many slots of a fast-weight memory they use; part of the recipe fast-weight-recall."""

from collections.abc import Iterator
from functools import partial
from itertools import product
from typing import Any

import torch

from regard.memory.fast_weights import WriteRule, fast_weight_memory
from regard.nn.memory_trace import SlotStatistics

from ..lib.claims import Estimate, ratio_interval
from ..lib.recipe import Frame, select

SPREADS, WEIGHTS = (0.25, 0.5, 1.0, 1.5), (0.0, 1.0, 10.0)  # of the queries, and of the entropy


def clustered_rows(seed: int) -> Iterator[dict[str, Any]]:
    """Yield the share of slots in use for each spread of the queries and weight of the entropy."""
    for spread, weight in product(SPREADS, WEIGHTS):
        yield {"kind": "clustered", "spread": spread, "weight": weight, "coverage": coverage(spread, weight, seed)}


@torch.no_grad()
def coverage(
    spread: float, weight: float, seed: int, *, sub_keys: int = 32, width: int = 64, top_k: int = 4, chunk: int = 128,
    chunks: int = 64, looked_at: int = 16, centre: float = 0.25,
) -> float:  # fmt: skip
    """Return the share of slots that are read in the last chunks, after the chunks before them have moved the keys.

    Every query is the same point, of standard deviation `centre` a coordinate, moved by noise of `spread` times as
    much; `weight` is that of the entropy.
    """
    early, slots = chunk * (chunks - looked_at), sub_keys**2
    draw = torch.Generator().manual_seed(seed)
    keys = (2 * torch.rand(1, 2, sub_keys, width // 2, generator=draw) - 1) * width**-0.5
    point, noise = (centre * torch.randn(rows, width, generator=draw) for rows in (1, chunk * chunks))
    query = (point + spread * noise)[None, :, None]
    # one value for all: what is written does not move the keys
    value, values = torch.zeros(1, chunk * chunks, 2), torch.zeros(slots, 2)
    watched, rule = SlotStatistics(slots), WriteRule("normalized", address_weight=weight)
    read = partial(fast_weight_memory, rule=rule, top_k=top_k, chunk_size=chunk)
    _, state = read(query[:, :early], value[:, :early], None, keys, values)
    read(query[:, early:], value[:, early:], None, keys, values, state=state, observer=watched)
    return watched.summary()["coverage"]


def widest(rows: Frame) -> dict[str, Estimate]:
    """Return the largest ratio of slots in use with the entropy to those without it."""
    ratios = {
        f"spread {spread:g}, weight {weight:g}": ratio_interval(some["coverage"], select(each, weight=0.0)["coverage"])
        for spread, each in rows.groupby("spread") for weight, some in each.groupby("weight") if weight
    }  # fmt: skip
    return dict(sorted(ratios.items(), key=lambda item: -item[1].mean)[:1])
