"""The memory's operators as torch sees them: schemas that say what they write, fakes shaped like the real results."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from regard.triton.memory import operators as memory_ops

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


def calls() -> dict[str, tuple[Any, tuple[Any, ...], dict[str, Any]]]:
    x = given()
    slots, weights = x["slots"].view(2, P, H, K), x["weights"].view(2, P, H, K)
    order = memory_ops.order_of(x["slots"], x["flags"], N * N)
    log = torch.zeros(2, P * H * K, WIDTH)
    write = (x["table"].clone(), *order[:2], x["weights"], x["values"])
    halves, flags = x["halves"], x["flags"]
    pick = (x["table"], x["slots"])
    return {
        "search": (memory_ops.best_halves, (x["query"], x["keys"], K, 1e-3), {"distance": True}),
        "join": (memory_ops.join, (x["half_scores"], halves, N), {}),
        "rows": (memory_ops.picked_rows, (*pick, x["weights"], x["values"], flags), {}),
        "sums alone": (memory_ops.picked_rows, (*pick, x["weights"], None, None), {}),
        "mixed": (memory_ops.mixed_rows, (*pick, x["weights"], flags, x["values"], x["gate"]), {}),
        "mixed without gates": (memory_ops.mixed_rows, (*pick, x["weights"], None, x["values"], None), {}),
        "pulled": (
            memory_ops.pulled_rows,
            (*pick, flags, x["values"] + 1, x["values"] + 2, x["values"] + 3, x["values"], x["gate"]),
            {},
        ),
        "pulled without gates": (
            memory_ops.pulled_rows, (*pick, None, None, x["values"] + 2, x["values"] + 3, x["values"], None), {}
        ),
        "errors": (memory_ops.errors_of, (x["values"], x["values"] + 1, None, flags, None, True), {}),
        "shares": (memory_ops.shares_of, (weights, slots, x["gate"], None, flags, "normalized", 1.0), {}),
        "marginal": (memory_ops.marginal_of, (x["half_scores"], halves, flags, 2, N), {}),
        "sums by key": (memory_ops.marginal_of, (x["half_scores"], halves, None, 2, N), {"raw": True}),
        "keys": (
            memory_ops.moved_keys,
            (x["keys"], x["query"], x["half_scores"], halves, None, torch.zeros(2 * H * 2, N), 1.0),
            {"distance": True},
        ),
        "order": (memory_ops.order_of, (x["slots"], flags, N * N), {}),
        "write": (memory_ops.written, (*write, log), {}),
        "write without a log": (memory_ops.written, write, {"add": True}),
        "swap": (memory_ops.swapped, (x["table"].clone(), order[0], log), {"keep": True}),
    }  # fmt: skip


@pytest.mark.parametrize("name", sorted(calls()))
def test_operators_keep_their_word(name: str) -> None:
    operator, arguments, options = calls()[name]
    torch.library.opcheck(operator, arguments, options, test_utils=UTILITIES)
