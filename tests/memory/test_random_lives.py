"""Random lives of the memories that are written in chunks, against a loop over single tokens: calls of any length,
padding, tokens that are not finite, documents, frozen reads, chunks that change, flushes, rows that are chosen, doubled
and go on apart, memories that all rows share; what is read, what is held, and every gradient.

The loop reads and writes by `dense_fast_weights`, `fwmlp_oracle` and `lact_oracle`, in float64 and with gradients.
"""

import copy
import random
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from dense_fast_weights import Dense
from nn.fwmlp_oracle import network, taught
from nn.lact_oracle import Learner
from nn.lact_oracle import network as head_network
from torch import Tensor

from regard import WriteRule
from regard.memory import fast_weight_mlp, fast_weights, large_chunk

Fields = dict[str, Tensor]


def leaf(*size: int, scale: float = 1.0) -> Tensor:
    return (scale * torch.randn(*size, dtype=torch.float64)).requires_grad_()


# What each memory is given, and what it does to tokens: a `read` of one token, and a `write` of the tokens of each row
# before the next ones (None: there is none) ---------------------------------------------------------------------------


class Slots:
    """`fast_weight_memory`; D is the width of a value, WIDTH that of half a query."""

    D, WIDTH, impl = 3, 2, "reference"

    def __init__(self, draw: random.Random) -> None:
        choose, heads, n = draw.choice, draw.choice([1, 2]), draw.choice([2, 3, 4])
        name, k = choose(["normalized", "paper", "reference"]), draw.randint(1, n)
        rate = 0.1 if name == "reference" else choose([0.3, 1.0])
        keys = choose(["entropy", "pooled-entropy", "mse", "none"])
        rule = (name, rate, choose([0.0, 1.0, 3.0]), keys, choose([True, True, True, False]), choose([True, False]))
        self.rule = WriteRule(*rule)
        self.leaves = [leaf(heads, 2, n, self.WIDTH), leaf(n * n, self.D)]
        self.how = {"keys": self.leaves[0], "values": self.leaves[1], "rule": self.rule, "top_k": k, "impl": self.impl}
        self.kinds = torch.randn(3, heads, 2 * self.WIDTH, dtype=torch.float64)
        self.memory = Dense(*self.leaves, k, *rule)

    def fields(self, rows: int, tokens: int) -> Fields:
        query = self.kinds[torch.randint(0, 3, (rows, tokens))]
        gate = torch.rand(rows, tokens, dtype=torch.float64, requires_grad=True)
        query = (query + 0.2 * torch.randn_like(query)).requires_grad_()
        return {"query": query, "value": leaf(rows, tokens, self.D), "gate": gate}

    def call(self, **given: Any) -> tuple[Tensor, Any]:
        return fast_weights.fast_weight_memory(**given, **self.how)

    def flush(self, state: Any) -> Any:
        return fast_weights.flush(state, rule=self.rule)

    def held(self, state: Any) -> Tensor:
        return state.values.dense()

    def now(self) -> Tensor:
        return self.memory.values

    def fork(self) -> "Slots":
        twin = copy.copy(self)
        twin.memory = copy.copy(self.memory)
        return twin

    def read(self, token: Fields) -> Tensor:
        return self.memory.read(token["query"])

    def write(self, rows: list[list[Fields]], following: list[Fields | None]) -> None:
        tokens = [token for row in rows for token in row]
        if tokens:
            after = [None if token is None else token["value"] for token in following]
            lessons = [
                self.memory.targets(torch.stack([token["value"] for token in row]), last)
                for row, last in zip(rows, after, strict=True)
                if row
            ]
            target, has = (torch.cat(parts) for parts in zip(*lessons, strict=True))
            query, gate = (torch.stack([token[name] for token in tokens]) for name in ("query", "gate"))
            self.memory.learn(query, target, gate, has)


class SparseSlots(Slots):
    impl = "sparse"


class Network:
    """`fast_weight_mlp`."""

    def __init__(self, draw: random.Random) -> None:
        self.leaves = [leaf(*size, scale=0.5) for size in ((5, 4), (5, 4), (2, 6))]
        self.how = {"learning_rate": draw.choice([0.1, 0.5]), "target": draw.choice(["mean", "look-ahead"])}
        self.weights = tuple(self.leaves)

    def fields(self, rows: int, tokens: int) -> Fields:
        return {"query": leaf(rows, tokens, 3), "value": leaf(rows, tokens, 2)}

    def call(self, **given: Any) -> tuple[Tensor, Any]:
        return fast_weight_mlp.fast_weight_mlp(**given, weights=tuple(self.leaves), **self.how)

    def flush(self, state: Any) -> Any:
        return fast_weight_mlp.flush(state, **self.how)

    def held(self, state: Any) -> Tensor:
        return state.down

    def now(self) -> Tensor:
        return self.weights[2]

    def fork(self) -> "Network":
        return copy.copy(self)

    def read(self, token: Fields) -> Tensor:
        return network(token["query"], self.weights)

    def write(self, rows: list[list[Fields]], following: list[Fields | None]) -> None:
        whole = [[*row, *([] if last is None else [last])] for row, last in zip(rows, following, strict=True)]
        groups = [[(token["query"], token["value"]) for token in row] for row in whole]
        self.weights = taught(self.weights, groups, self.how["target"], self.how["learning_rate"])


class Heads(Network):
    """`large_chunk_ttt`, two heads of three channels."""

    def __init__(self, draw: random.Random) -> None:
        self.leaves = [leaf(*size, scale=0.5) for size in ((2, 4, 3), (2, 4, 3), (2, 3, 4))]
        self.how = {"optimizer": draw.choice(["sgd", "momentum"])}  # the oracle's Muon has no gradient of equal values
        heads = zip(*self.leaves, strict=True)
        self.learners = [Learner(w, self.how["optimizer"]) for w in heads]

    def fields(self, rows: int, tokens: int) -> Fields:
        made = {name: leaf(rows, tokens, 2, 3) for name in ("query", "key", "value", "rates")}
        rates = (0.3 * made["rates"].detach().sigmoid()).requires_grad_()
        return {**made, "rates": rates, "share": torch.rand(rows, tokens, 2, dtype=torch.float64, requires_grad=True)}

    def call(self, **given: Any) -> tuple[Tensor, Any]:
        out, state = large_chunk.large_chunk_ttt(**given, weights=tuple(self.leaves), **self.how)
        return out.flatten(2), state

    def flush(self, state: Any) -> Any:
        return large_chunk.flush(state, **self.how)

    def now(self) -> Tensor:
        return torch.stack([learner.w[2] for learner in self.learners])

    def fork(self) -> "Heads":
        twin = copy.copy(self)
        twin.learners = [copy.copy(learner) for learner in self.learners]
        return twin

    def read(self, token: Fields) -> Tensor:
        return torch.cat([head_network(token["query"][h], learner.w) for h, learner in enumerate(self.learners)])

    def write(self, rows: list[list[Fields]], following: list[Fields | None]) -> None:
        if rows[0]:
            whole = {name: torch.stack([token[name] for token in rows[0]], 1) for name in rows[0][0]}
            for h, learner in enumerate(self.learners):
                learner.teach(*(whole[name][h] for name in ("key", "value", "rates", "share")))


KINDS = {"slots": Slots, "sparse-slots": SparseSlots, "network": Network, "heads": Heads}


Column = list[Fields | None]
"""A token of each row: {} if it is not finite, None for padding."""


@dataclass
class Clock:
    """The memory of one row, or of all rows, column by column."""

    first: Any
    now: Any
    waiting: list[Column] = field(default_factory=list)

    def fork(self) -> "Clock":
        return Clock(self.first, self.now.fork(), list(self.waiting))

    def restart(self) -> None:
        self.now, self.waiting = self.first.fork(), []

    def column(self, tokens: Column, chunk: int, frozen: bool, nothing: Tensor) -> list[Tensor]:
        """Return what the tokens read."""
        if all(token is None for token in tokens):
            return [nothing for _ in tokens]
        if len(self.waiting) >= chunk and not frozen:
            self.write(tokens)
        if not frozen:
            self.waiting.append(tokens)
        return [self.now.read(token) if token else nothing for token in tokens]

    def write(self, following: Column | None = None) -> None:
        if self.waiting:
            rows = [[token for token in row if token] for row in zip(*self.waiting, strict=True)]
            self.waiting = []
            self.now.write(rows, [token or None for token in following or [None] * len(rows)])


def spoil(x: Tensor, where: Tensor) -> Tensor:
    return torch.where(where.view(*where.shape, *[1] * (x.dim() - 2)), torch.nan, x)


class Life:
    """One memory and its rows, led by a seed."""

    def __init__(self, kind: str, seed: int) -> None:
        self.draw, self.state = random.Random(seed), None
        torch.manual_seed(seed)
        self.memory = KINDS[kind](self.draw)
        self.leaves = list(self.memory.leaves)
        self.rows, self.shared = self.draw.choice([1, 2, 3]), kind != "heads" and self.draw.random() < 0.3
        self.clocks = [Clock(self.memory, self.memory.fork()) for _ in range(1 if self.shared else self.rows)]
        self.found: list[Tensor] = []
        self.expected: list[Tensor] = []

    def live(self) -> None:
        self.call(frozen=False)
        for _ in range(self.draw.randint(1, 4)):
            apart = [] if self.shared else ["select", "repeat"]
            what = self.draw.choice(["call", "call", "call", "frozen", "flush", *apart])
            if what in ("call", "frozen"):
                self.call(frozen=what == "frozen")
            elif what == "flush":
                self.state = self.memory.flush(self.state)
                for clock in self.clocks:
                    clock.write()
            else:
                chosen = [self.draw.randrange(self.rows) for _ in range(self.draw.randint(1, 3))]
                if what == "repeat":
                    chosen = [row for row in range(self.rows) for _ in range(2)]
                self.state = self.state.repeat(2) if what == "repeat" else self.state.select(torch.tensor(chosen))
                self.clocks, self.rows = [self.clocks[row].fork() for row in chosen], len(chosen)
            held = torch.stack([clock.now.now() for clock in self.clocks])
            assert (self.memory.held(self.state) - held).abs().max() < 1e-8 * (1 + held.abs().max())

    def call(self, frozen: bool) -> None:
        rows, tokens, chunk = self.rows, self.draw.choice([1, 2, 5, 9]), self.draw.choice([2, 3, 4, 7])
        given = self.memory.fields(rows, tokens)
        self.leaves += given.values()
        real, bad = torch.ones(rows, tokens, dtype=torch.bool), torch.zeros(rows, tokens, dtype=torch.bool)
        if self.draw.random() < 0.5:
            real = torch.rand(rows, tokens) < 0.75
        if self.draw.random() < 0.4:
            bad = torch.rand(rows, tokens) < 0.15
        ids, part = None, self.draw.choice(list(given))
        if self.draw.random() < 0.3 and not frozen and not self.shared:
            ids = torch.randint(0, 2, (self.draw.choice([1, rows]), tokens)).cumsum(1)
        before = self.state
        out, self.state = self.memory.call(
            **{name: spoil(x, ~real | bad if name == part else ~real) for name, x in given.items()},
            mask=real if not real.all() or self.draw.random() < 0.5 else None,
            segment_ids=ids,
            frozen=frozen,
            chunk_size=chunk,
            state=self.state,
            **({"shared": True} if self.shared else {}),
        )
        expected = [[torch.zeros_like(out[0, 0])] * tokens for _ in range(rows)]
        groups = [list(range(rows))] if self.shared else [[row] for row in range(rows)]
        for clock, group in zip(self.clocks, groups, strict=True):
            last = None
            for t in range(tokens):
                tokens_now = [{} if bad[r, t] else {n: x[r, t] for n, x in given.items()} for r in group]
                column = [token if real[r, t] else None for r, token in zip(group, tokens_now, strict=True)]
                if ids is not None and real[group[0], t]:
                    document = int(ids.expand(rows, tokens)[group[0], t])
                    if last is not None and document != last:
                        clock.restart()
                    last = document
                for row, read in zip(group, clock.column(column, chunk, frozen, expected[0][0] * 0), strict=True):
                    expected[row][t] = read
        assert not frozen or self.state is before
        self.found.append(out)
        self.expected.append(torch.stack([torch.stack(row) for row in expected]))

    def compare(self) -> None:
        for out, expected in zip(self.found, self.expected, strict=True):
            assert (out - expected).abs().max() < 1e-9 * (1 + expected.abs().max())
        probes = [torch.randn_like(out) for out in self.found]
        anything = sum(leaf.sum() for leaf in self.leaves) * 0
        slopes: list[Any] = []
        for outs in (self.found, self.expected):
            loss = sum((out * probe).sum() for out, probe in zip(outs, probes, strict=True)) + anything
            slopes.append(torch.autograd.grad(loss, self.leaves, retain_graph=True))
        for one, other in zip(*slopes, strict=True):
            assert (one - other).abs().max() < 1e-6 * (1 + other.abs().max())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(24))
def test_a_random_life(seed: int, kind: str) -> None:
    life = Life(kind, seed)
    life.live()
    life.compare()


@pytest.mark.parametrize("kind", ["slots", "network", "heads"])
def test_lives_differ_enough_to_prove_something(kind: str) -> None:
    """Among them are all rules, and many memories that were written."""
    lives = [Life(kind, seed) for seed in range(24)]
    for life in lives:
        life.live()
    if kind == "slots":
        assert {life.memory.rule.name for life in lives} == {"normalized", "paper", "reference"}
        assert {life.memory.rule.key_update for life in lives} == {"entropy", "pooled-entropy", "mse", "none"}
    moved = [max((c.now.now() - c.first.now()).abs().max().item() for c in life.clocks) for life in lives]
    assert sum(each > 0.1 for each in moved) >= 10
    assert len({life.shared for life in lives}) == 1 + (kind != "heads")
