"""The memory's operators as torch sees them: schemas that say what they write, fakes shaped like the real results."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from regard.ops.triton import memory_ops

N, K, H, P, WIDTH, D = 4, 2, 2, 3, 5, 4
UTILITIES = ("test_schema", "test_faketensor")


def given() -> dict[str, Tensor]:
    """One chunk of two memories of 16 slots."""
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
    pick = lambda *shape: torch.randint(N * N, shape, generator=generator)  # noqa: E731
    return {
        "query": draw(2, P, H, 2 * D),
        "keys": draw(2, H, 2, N, D),
        "half_scores": draw(2, P, H, 2, K).sort(-1, descending=True).values,
        "halves": torch.randint(N, (2, P, H, 2, K), generator=generator),
        "table": draw(2, N * N, WIDTH),
        "slots": pick(2, P, H * K),
        "weights": draw(2, P, H * K).softmax(-1),
        "values": draw(2, P, WIDTH),
        "flags": torch.tensor([[True, False, True], [True, True, True]]),
        "gate": draw(2, P).sigmoid(),
    }


def calls() -> dict[str, tuple[Any, tuple[Any, ...]]]:
    x = given()
    slots, weights = x["slots"].view(2, P, H, K), x["weights"].view(2, P, H, K)
    order = memory_ops.order_of(x["slots"], x["flags"], N * N)
    log = torch.zeros(2, P * H * K, WIDTH)
    write = (x["table"].clone(), log, *order, x["weights"], x["values"], False)
    return {
        "search": (memory_ops._search, (x["query"], x["keys"], K, 1e-3, True)),
        "join": (memory_ops.join, (x["half_scores"], x["halves"], N)),
        "rows": (memory_ops._rows, (x["table"], x["slots"], x["weights"], x["values"], x["flags"])),
        "sums alone": (memory_ops._rows, (x["table"], x["slots"], x["weights"], None, None)),
        "errors": (memory_ops.errors_of, (x["values"], x["values"] + 1, None, x["flags"], None, True)),
        "shares": (memory_ops.shares_of, (weights, slots, x["gate"], None, x["flags"], "normalized", 1.0)),
        "marginal": (memory_ops._marginal, (x["half_scores"], x["halves"], x["flags"], 2, N, False)),
        "sums by key": (memory_ops._marginal, (x["half_scores"], x["halves"], None, 2, N, True)),
        "keys": (
            memory_ops._moved,
            (x["keys"], x["query"], x["half_scores"], x["halves"], None, torch.zeros(2 * H * 2, N), 1.0, True),
        ),
        "order": (memory_ops.order_of, (x["slots"], x["flags"], N * N)),
        "write": (memory_ops._write, write),
        "write without a log": (memory_ops._write, (write[0], None, *write[2:])),
        "swap": (memory_ops._swap, (x["table"].clone(), order[0], log, False)),
    }


@pytest.mark.parametrize("name", sorted(calls()))
def test_operators_keep_their_word(name: str) -> None:
    operator, arguments = calls()[name]
    torch.library.opcheck(operator, arguments, test_utils=UTILITIES)
