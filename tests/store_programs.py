"""Random operations on stores of memories' values, and the tables [M, N, D] that they should hold, in float64."""

import random
from typing import Any

import torch
from torch import Tensor

from regard.memory.stores.slot_values import slot_values

SLOTS, WIDTH, TOKENS, SELECTED = 12, 4, 5, 3


def picks(memories: int, tokens: int, selected: int, slots: int, seed: int) -> Tensor:
    """Slots of tokens: those of one token differ, those of several meet."""
    order = torch.rand(memories, tokens, slots, generator=torch.Generator().manual_seed(seed)).argsort(-1)
    return order[..., :selected].contiguous()


def dense_read(table: Tensor, weights: Tensor, slots: Tensor) -> Tensor:
    """Sums over one-hot selections of tables [M, N, D]."""
    hot = torch.nn.functional.one_hot(slots, table.shape[1]).to(table.dtype)
    return torch.einsum("mpk,mpkn,mnd->mpd", weights, hot, table)


def dense_write(table: Tensor, slots: Tensor, shares: Tensor, errors: Tensor, counted: Tensor) -> Tensor:
    hot = torch.nn.functional.one_hot(slots, table.shape[1]).to(table.dtype)
    number = torch.einsum("mpkn,mp->mn", hot, counted.to(table.dtype)).clamp(min=1)
    moved = torch.einsum("mpkn,mpk,mpd->mnd", hot, shares, errors)
    return table - moved / number[..., None]


class Program:
    """Stores that grew from one base, and the tables [M, N, D] that they should hold. Every operation goes on from any
    store of before, so that stores fork, and some are dropped while a graph still needs their rows."""

    def __init__(self, name: str, seed: int, recorded: bool, slots: int = SLOTS) -> None:
        self.draw, self.make = random.Random(seed), torch.Generator().manual_seed(seed)
        self.recorded, self.dense, self.tables = recorded, name == "reference", name != "sparse"
        self.dtype, self.atol = (torch.float32, 2e-5) if name == "triton" else (torch.float64, 1e-11)
        self.base = self.leaf(slots, WIDTH).detach().to(self.dtype).requires_grad_(recorded)
        self.leaves = [self.base]
        memories = self.draw.choice([1, 2, 3])
        self.live: list[tuple[Any, Tensor]] = [
            (slot_values.get(name).start(self.base, memories), self.base.double().expand(memories, -1, -1))
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
        slots = picks(memories, TOKENS, SELECTED, len(self.base), seed=self.draw.randrange(50))
        if what in ("read", "rows"):
            weights = self.leaf(memories, TOKENS, SELECTED)
            self.leaves.append(weights)
            rows = torch.stack([table[m][slots[m]] for m in range(memories)])
            self.found.append(store.read(weights.to(self.dtype), slots) if what == "read" else store.rows(slots))
            self.wanted.append(dense_read(table, weights, slots) if what == "read" else rows)
            self.agree(self.found[-1:], self.wanted[-1:])
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
            store, table = store.reset(rows), torch.where(rows[:, None, None], self.base.double(), table)
        elif what == "detach":
            store, table = store.detach(), table.detach()
        elif what == "cut":
            rows = self.flags(memories)
            store, table = store.detach(rows), torch.where(rows[:, None, None], table.detach(), table)
        elif not self.tables:  # the base of a copied table is no leaf, so that a detached one never reaches it again
            store = store.clone()
        self.agree([store.dense()], [table])
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
        own = shares.to(self.dtype), hidden.to(self.dtype)
        return store.write(slots, *own, counted), dense_write(table, slots, shares, plain, counted)

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
        self.agree(*grads, 100)

    def agree(self, given: Any, wanted: Any, times: float = 1.0) -> None:
        given, wanted = ([x.double() for x in each] for each in (given, wanted))
        torch.testing.assert_close(given, wanted, atol=times * self.atol, rtol=0)
