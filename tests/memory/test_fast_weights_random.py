"""Random lives of a memory against a loop over single tokens: calls of any length, padding, tokens that are not finite,
documents, frozen reads, chunks that change, flushes, rows that are chosen, doubled and go on apart; what is read, what
is held, and every gradient.

The loop searches all n^2 slots, and writes by autograd on the dense losses of section 3.2 and 3.3 of the paper (sums
over features, 1/2, gates; entropy with its sign mended); float64.

Legend: H heads, n sub-keys of a half, k slots a head, d width of a half of a query, D of a value.
"""

from __future__ import annotations

import copy
import random
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from regard import WriteRule, fast_weight_memory
from regard.memory.fast_weights import flush

D, WIDTH = 3, 2


def read(query: Tensor, keys: Tensor, values: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """One token [H, 2 d]: what it reads [D], slots and weights [H k], and the shares of the sub-keys [H, 2, n]."""
    heads, _, _, width = keys.shape
    score = -torch.log(1e-3 + (query.view(heads, 2, 1, width) - keys).square().sum(-1))
    every = (score[:, 0, :, None] + score[:, 1, None, :]).flatten(1)
    slots = every.detach().sort(dim=-1, descending=True, stable=True).indices[:, :k]
    weights = every.gather(1, slots).flatten().softmax(0)
    best = score.detach().sort(dim=-1, descending=True, stable=True).indices[..., :k]
    shares = torch.zeros_like(score).scatter(-1, best, score.gather(-1, best).softmax(-1))
    return weights @ values[slots.flatten()], slots.flatten(), weights, shares


@dataclass
class Row:
    """The memory of one row, token by token."""

    first: tuple[Tensor, Tensor]
    rule: WriteRule
    k: int
    now: tuple[Tensor, Tensor] = None  # type: ignore[assignment]
    waiting: list[tuple[Tensor, Tensor, Tensor, bool]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.now = self.first if self.now is None else self.now

    def fork(self) -> Row:
        other = copy.copy(self)
        other.waiting = list(self.waiting)
        return other

    def restart(self) -> None:
        self.now, self.waiting = self.first, []

    def token(self, query: Tensor, value: Tensor, gate: Tensor, good: bool, chunk: int, frozen: bool) -> Tensor:
        if len(self.waiting) >= chunk and not frozen:
            self.write(value if good else None)
        if not frozen:
            self.waiting.append((query, value, gate, good))
        return read(query, *self.now, self.k)[0] if good else torch.zeros(D, dtype=torch.float64)

    def write(self, following: Tensor | None) -> None:
        tokens = [(q, v, g) for q, v, g, good in self.waiting if good]
        self.waiting = []
        if not tokens:
            return
        rule, (keys, values) = self.rule, self.now
        after = [*(v for _, v, _ in tokens[1:]), following if rule.border else None]
        targets = after if rule.look_ahead else [v for _, v, _ in tokens]
        pairs = sum(target is not None for target in targets)
        counts, loss, errors = torch.zeros(len(values), dtype=torch.float64), values.sum() * 0, keys.sum() * 0
        marginal = torch.zeros_like(keys[..., 0])
        for (query, _, gate), target in zip(tokens, targets, strict=True):
            found, slots, weights, shares = read(query, keys, values, self.k)
            counts = counts.index_add(0, slots, torch.ones(len(slots), dtype=torch.float64))
            marginal = marginal + shares / len(tokens)
            if target is None:
                continue
            own = torch.zeros_like(counts).index_add(0, slots, weights)
            times = torch.zeros_like(counts).index_add(0, slots, torch.ones_like(weights)).clamp(min=1)
            step = {"paper": 1.0, "reference": len(slots) * len(tokens) / pairs}.get(rule.name)
            step = 1 / (own.square() / times).sum() if step is None else step
            # by the values alone: weights and steps are numbers of the reading there
            loss = loss + step * gate * (own @ values - target).square().sum() / 2
            errors = errors + gate * (found - target).square().sum() / 2 / max(pairs, 1) / D
        (slope,) = torch.autograd.grad(loss, values, create_graph=True)
        new = values - rule.learning_rate * slope / counts.clamp(min=1)[:, None]
        own, pooled = (-(p * (p + 1e-8).log()).sum() * rule.address_weight for p in (marginal, marginal.mean(0)))
        goals = {"entropy": own, "pooled-entropy": pooled, "mse": -errors, "none": keys.sum() * 0}
        goal = goals[rule.key_update]
        (rise,) = torch.autograd.grad(goal, keys, create_graph=True)
        self.now = (keys + rule.learning_rate * rise, new)


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
        self.rows = [Row((keys, values), self.rule, self.k) for _ in range(choose([1, 2, 3]))]
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
            held = torch.stack([row.now[1] for row in self.rows])
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
    moved = [max((row.now[1] - row.first[1]).abs().max().item() for row in life.rows) for life in lives]
    assert sum(each > 0.1 for each in moved) >= 10
