"""Random lives of a memory against a loop over single tokens: calls of any length, padding, tokens that are not finite,
documents, frozen reads, chunks that change, flushes, rows that are chosen, doubled and go on apart; what is read, what
is held, and every gradient.

The loop reads and writes by `dense_fast_weights`, in float64 and with gradients. D is the width of a value, WIDTH that
of half a query.
"""

from __future__ import annotations

import copy
import random
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from dense_fast_weights import Dense
from torch import Tensor

from regard import WriteRule, fast_weight_memory
from regard.memory.fast_weights import flush

D, WIDTH = 3, 2


@dataclass
class Row:
    """The memory of one row, token by token."""

    first: Dense
    now: Dense
    waiting: list[tuple[Tensor, Tensor, Tensor, bool]] = field(default_factory=list)

    def fork(self) -> Row:
        return Row(self.first, copy.copy(self.now), list(self.waiting))

    def restart(self) -> None:
        self.now, self.waiting = copy.copy(self.first), []

    def token(self, query: Tensor, value: Tensor, gate: Tensor, good: bool, chunk: int, frozen: bool) -> Tensor:
        if len(self.waiting) >= chunk and not frozen:
            self.write(value if good else None)
        if not frozen:
            self.waiting.append((query, value, gate, good))
        return self.now.read(query) if good else torch.zeros(D, dtype=torch.float64)

    def write(self, following: Tensor | None) -> None:
        tokens = [(q, v, g) for q, v, g, good in self.waiting if good]
        self.waiting = []
        if tokens:
            query, value, gate = (torch.stack(x)[None] for x in zip(*tokens, strict=True))
            self.now.write(query, value, gate, None if following is None else following[None])


def spoil(x: Tensor, where: Tensor) -> Tensor:
    return torch.where(where.view(*where.shape, *[1] * (x.dim() - 2)), torch.nan, x)


class Life:
    """One memory and its rows, led by a seed."""

    def __init__(self, seed: int, impl: str) -> None:
        self.draw, self.impl, self.state = random.Random(seed), impl, None
        torch.manual_seed(seed)
        choose = self.draw.choice
        heads, n = choose([1, 1, 2]), choose([2, 3, 4])
        self.k = self.draw.randint(1, n)
        name = choose(["normalized", "paper", "reference"])
        self.rule = WriteRule(
            name,
            learning_rate=0.1 if name == "reference" else choose([0.3, 1.0]),
            address_weight=choose([0.0, 1.0, 3.0]),
            key_update=choose(["entropy", "pooled-entropy", "mse", "none"]),
            look_ahead=choose([True, True, True, False]),
            border=choose([True, False]),
        )
        keys = torch.randn(heads, 2, n, WIDTH, dtype=torch.float64, requires_grad=True)
        values = torch.randn(n * n, D, dtype=torch.float64, requires_grad=True)
        self.leaves = [keys, values]
        self.kinds = torch.randn(3, heads, 2 * WIDTH, dtype=torch.float64)
        rule = (name, self.rule.learning_rate, self.rule.address_weight, self.rule.key_update)
        memory = Dense(keys, values, self.k, *rule, self.rule.look_ahead, self.rule.border)
        self.rows = [Row(memory, copy.copy(memory)) for _ in range(choose([1, 2, 3]))]
        self.found: list[Tensor] = []
        self.expected: list[Tensor] = []

    def live(self) -> None:
        self.call(frozen=False)
        for _ in range(self.draw.randint(1, 4)):
            what = self.draw.choice(["call", "call", "call", "frozen", "select", "repeat", "flush"])
            if what in ("call", "frozen"):
                self.call(frozen=what == "frozen")
            elif what == "select":
                chosen = [self.draw.randrange(len(self.rows)) for _ in range(self.draw.randint(1, 3))]
                self.state = self.state.select(torch.tensor(chosen))
                self.rows = [self.rows[i].fork() for i in chosen]
            elif what == "repeat":
                self.state = self.state.repeat(2)
                self.rows = [row.fork() for row in self.rows for _ in range(2)]
            else:
                self.state = flush(self.state, rule=self.rule)
                for row in self.rows:
                    row.write(None)
            held = torch.stack([row.now.values for row in self.rows])
            assert (self.state.values.dense() - held).abs().max() < 1e-8 * (1 + held.abs().max())

    def call(self, frozen: bool) -> None:
        rows, tokens, chunk = len(self.rows), self.draw.choice([1, 2, 5, 9]), self.draw.choice([2, 3, 4, 7])
        query = self.kinds[torch.randint(0, 3, (rows, tokens))]
        query = (query + 0.2 * torch.randn_like(query)).requires_grad_()
        value = torch.randn(rows, tokens, D, dtype=torch.float64, requires_grad=True)
        gate = torch.rand(rows, tokens, dtype=torch.float64, requires_grad=True)
        self.leaves += [query, value, gate]
        real, bad = torch.ones(rows, tokens, dtype=torch.bool), torch.zeros(rows, tokens, dtype=torch.bool)
        if self.draw.random() < 0.5:
            real = torch.rand(rows, tokens) < 0.75
        if self.draw.random() < 0.4:
            bad = torch.rand(rows, tokens) < 0.15
        ids = torch.randint(0, 2, (rows, tokens)).cumsum(1) if self.draw.random() < 0.3 and not frozen else None
        given = [query, value, gate]
        part = self.draw.randrange(3)
        given[part] = spoil(given[part], bad)
        out, self.state = fast_weight_memory(
            *(spoil(x, ~real) for x in given),
            *self.leaves[:2],
            rule=self.rule,
            top_k=self.k,
            chunk_size=chunk,
            state=self.state,
            mask=real if not real.all() or self.draw.random() < 0.5 else None,
            segment_ids=ids,
            frozen=frozen,
            impl=self.impl,
        )
        expected = torch.zeros_like(out).unbind(0)
        lines = []
        for r, row in enumerate(self.rows):
            line, last = list(expected[r]), None
            for t in real[r].nonzero()[:, 0].tolist():
                document = None if ids is None else int(ids[r, t])
                if last is not None and document != last:
                    row.restart()
                last = document
                line[t] = row.token(query[r, t], value[r, t], gate[r, t], not bad[r, t], chunk, frozen)
            lines.append(torch.stack(line))
        self.found.append(out)
        self.expected.append(torch.stack(lines))

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


@pytest.mark.parametrize("impl", ["reference", "sparse"])
@pytest.mark.parametrize("seed", range(24))
def test_a_random_life(seed: int, impl: str) -> None:
    life = Life(seed, impl)
    life.live()
    life.compare()


def test_lives_differ_enough_to_prove_something() -> None:
    """Among them all rules, both orders of events around a write, and gradients through more than one write."""
    lives = [Life(seed, "reference") for seed in range(24)]
    for life in lives:
        life.live()
    assert {life.rule.name for life in lives} == {"normalized", "paper", "reference"}
    assert {life.rule.key_update for life in lives} == {"entropy", "pooled-entropy", "mse", "none"}
    moved = [max((row.now.values - row.first.values).abs().max().item() for row in life.rows) for life in lives]
    assert sum(each > 0.1 for each in moved) >= 10
