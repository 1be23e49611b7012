"""Both stores of memories' values under random operations, against plain tables and autograd in float64."""

import random
from typing import Any

import pytest
import torch
from test_overlay import agree, dense_read, dense_write, picks
from torch import Tensor

from regard.memory.stores.slot_values import slot_values

SLOTS, WIDTH, TOKENS, SELECTED = 12, 4, 5, 3


class Program:
    """Stores that grew from one base, and the tables [M, N, D] that they should hold.

    Every operation goes on from any store of before, so that stores fork, and some are dropped while a graph still
    needs their rows.
    """

    def __init__(self, name: str, seed: int, recorded: bool) -> None:
        self.draw, self.make = random.Random(seed), torch.Generator().manual_seed(seed)
        self.recorded, self.dense = recorded, name == "reference"
        self.base = self.leaf(SLOTS, WIDTH)
        self.leaves = [self.base]
        memories = self.draw.choice([1, 2, 3])
        self.live: list[tuple[Any, Tensor]] = [
            (slot_values.get(name).start(self.base, memories), self.base.expand(memories, -1, -1))
        ]
        self.found: list[Tensor] = []
        self.wanted: list[Tensor] = []

    def leaf(self, *size: int) -> Tensor:
        return torch.randn(*size, generator=self.make, dtype=torch.float64).requires_grad_(self.recorded)

    def flags(self, memories: int) -> Tensor:
        return torch.rand(memories, generator=self.make) < 0.5

    def step(self) -> None:
        store, table = self.draw.choice(self.live)
        memories = len(table)
        what = self.draw.choice(["write"] * 4 + ["read", "rows", "select", "repeat", "reset", "detach", "cut", "clone"])
        slots = picks(memories, TOKENS, SELECTED, SLOTS, seed=self.draw.randrange(50))
        if what in ("read", "rows"):
            weights = self.leaf(memories, TOKENS, SELECTED)
            self.leaves.append(weights)
            rows = torch.stack([table[m][slots[m]] for m in range(memories)])
            self.found.append(store.read(weights, slots) if what == "read" else store.rows(slots))
            self.wanted.append(dense_read(table, weights, slots) if what == "read" else rows)
            agree(self.found[-1:], self.wanted[-1:])
            return
        if what == "write":
            store, table = self.write(store, table, slots)
        elif what == "select":
            index = torch.tensor([self.draw.randrange(memories) for _ in range(self.draw.choice([1, 2, 3]))])
            store, table = store.select(index), table[index]
        elif what == "repeat" and memories < 4:
            store, table = store.repeat(2), table.repeat_interleave(2, 0)
        elif what == "reset":
            rows = self.flags(memories)
            store, table = store.reset(rows), torch.where(rows[:, None, None], self.base, table)
        elif what == "detach":
            store, table = store.detach(), table.detach()
        elif what == "cut":
            rows = self.flags(memories)
            store, table = store.detach(rows), torch.where(rows[:, None, None], table.detach(), table)
        elif not self.dense:  # the base of a dense copy is no leaf, so that a detached one never reaches it again
            store = store.clone()
        agree([store.dense()], [table])
        self.live = [] if what == "detach" and self.draw.random() < 0.5 else self.live[-3:]
        self.live.append((store, table))

    def write(self, store: Any, table: Tensor, slots: Tensor) -> tuple[Any, Tensor]:
        """Tokens that do not count have share 0, in the sparse store beside errors that are not finite."""
        memories = len(table)
        shares, errors = self.leaf(memories, TOKENS, SELECTED), self.leaf(memories, TOKENS, WIDTH)
        self.leaves += [shares, errors]
        counted = torch.rand(memories, TOKENS, generator=self.make) < self.draw.choice([0.0, 0.8, 1.0])
        shares = shares * (self.draw.random() < 0.8)
        shares = torch.where(counted[..., None], shares, 0)
        hidden = torch.where(
            counted[..., None], errors, 0.0 if self.dense else self.draw.choice([0.0, torch.nan, torch.inf])
        )
        plain = torch.where(counted[..., None], errors, 0)
        return store.write(slots, shares, hidden, counted), dense_write(table, slots, shares, plain, counted)

    def gradients_agree(self) -> None:
        found, wanted = [*self.found, *(s.dense() for s, _ in self.live)], [*self.wanted, *(t for _, t in self.live)]
        self.live.clear()
        up = [torch.randn(x.shape, generator=self.make, dtype=torch.float64) for x in wanted]
        some: dict[str, Any] = {"allow_unused": True, "materialize_grads": True}
        grads = []
        for outs in (found, wanted):
            loss = sum((x * u).sum() for x, u in zip(outs, up, strict=True))
            grads.append(
                torch.autograd.grad(loss, self.leaves, retain_graph=True, **some) if loss.requires_grad else []
            )
        agree(*grads, atol=1e-9)


@pytest.mark.parametrize("recorded", [True, False], ids=["recorded", "without-gradients"])
@pytest.mark.parametrize("seed", [*range(12), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(12, 40))])
@pytest.mark.parametrize("name", ["reference", "sparse"])
def test_a_random_program_gives_what_plain_tables_give(name: str, seed: int, recorded: bool) -> None:
    program = Program(name, seed, recorded)
    for _ in range(30):
        program.step()
    if recorded:
        program.gradients_agree()


def test_shares_of_zero_leave_no_trace() -> None:
    base = torch.randn(SLOTS, WIDTH, dtype=torch.float64, requires_grad=True)
    nothing = torch.zeros(2, TOKENS, SELECTED, dtype=torch.float64, requires_grad=True)
    args = (
        picks(2, TOKENS, SELECTED, SLOTS, 0),
        nothing,
        torch.ones(2, TOKENS, WIDTH).double(),
        torch.ones(2, TOKENS) > 0,
    )
    store = slot_values.get("sparse").start(base, 2)
    assert store.write(*args).written().tolist() == [0, 0]
    with torch.no_grad():
        assert slot_values.get("sparse").start(base, 2).write(*args).pool.bytes == 0
    held = store.pool.bytes
    store.select(torch.tensor([1, 1, 0])).repeat(2)
    assert store.pool.bytes == held
