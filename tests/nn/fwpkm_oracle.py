"""The whole layer from its formulas, one token at a time in float64; `dense_fast_weights` has those of its memory."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from dense_fast_weights import Dense
from torch import Tensor


def linear(p: dict[str, Tensor], name: str, x: Tensor, eps: float) -> Tensor:
    x = x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * p[f"projections.{name}_norm.weight"]
    return x @ p[f"projections.{name}_proj.weight"].T + p[f"projections.{name}_proj.bias"]


def projected(
    p: dict[str, Tensor], h: Tensor, value_norm: bool, gating: bool, eps: float = 1e-5
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Queries, values and gates [B, T] (None without gating) of hidden states, as any memory layer makes them."""
    v = linear(p, "v", h, eps)
    if value_norm:
        v = v - v.mean(-1, keepdim=True)
        v = v / ((v.pow(2).sum(-1, keepdim=True) / (v.shape[-1] - 1)).sqrt() + 1e-6)
    g = 1 / (1 + torch.exp(-linear(p, "gate", h, eps).mean(-1))) if gating else None
    return linear(p, "q", h, eps), v, g


def mixed(p: dict[str, Tensor], read: Tensor, v: Tensor, g: Tensor | None, eps: float = 1e-5) -> Tensor:
    """The output for what was read."""
    both = read + v if g is None else g[..., None] * read + (1 - g[..., None]) * v
    return linear(p, "out", both, eps)


@dataclass
class Oracle:
    """Parameters and options of a layer, and what it does to hidden states.

    p: state_dict of the layer; the names follow the projections q, v, gate, out.
    """

    p: dict[str, Tensor]
    k: int
    chunk: int
    rule: str = "normalized"
    rate: float = 1.0
    address: float = 10.0
    key_update: str = "entropy"
    score: str = "idw"
    look_ahead: bool = True
    border: bool = True
    value_norm: bool = True
    gating: bool = True
    gate_loss: bool = True
    shared: bool = False
    eps: float = 1e-5
    idw_eps: float = 1e-3
    reads: list[tuple[int, int, list[int], list[float]]] = field(default_factory=list)  # row, t, slots, weights

    def project(self, h: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        q, v, g = projected(self.p, h, self.value_norm, self.gating, self.eps)
        return q.unflatten(-1, (len(self.p["keys"]), -1)), v, g

    def write(self, memory: Dense, places: list[tuple[int, list[int]]], t: int, mask: Tensor, given: Any) -> None:
        """Learn tokens [(row, positions)], after which the token at t comes in each row."""
        q, v, g = given
        tokens = []
        for row, own in places:
            target, has = memory.targets(v[row, own], v[row, t] if mask[row, t] else None)
            gate = torch.ones(len(own)) if g is None or not self.gate_loss else g[row, own]
            tokens.append((q[row, own], target, gate, has))
        if tokens:
            memory.learn(*(torch.cat(x) for x in zip(*tokens, strict=True)))

    def memory(self) -> Dense:
        how = (self.k, self.rule, self.rate, self.address, self.key_update, self.look_ahead, self.border)
        return Dense(self.p["keys"], self.p["values"], *how, score=self.score, eps=self.idw_eps)

    @torch.enable_grad()
    def run(self, hidden: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """(output [B, T, C], keys [M, ...], values [M, N, Dv]), what waits at the end not written. Masked tokens are as
        if removed."""
        self.p = {name: x.detach() for name, x in self.p.items()}
        hidden = hidden.detach()
        rows, tokens, _ = hidden.shape
        mask = torch.ones(rows, tokens, dtype=torch.bool) if mask is None else mask
        q, v, g = self.project(torch.where(mask[..., None], hidden, 0))
        out = torch.zeros_like(hidden)
        groups = [list(range(rows))] if self.shared else [[row] for row in range(rows)]
        written = []
        for group in groups:
            memory, waiting = self.memory(), []
            for t in range(tokens):
                here = [row for row in group if mask[row, t]]
                if not here:
                    continue
                if len(waiting) == self.chunk:
                    places = [(row, [s for s in waiting if mask[row, s]]) for row in group]
                    self.write(memory, [(row, own) for row, own in places if own], t, mask, (q, v, g))
                    waiting = []
                for row in here:
                    self.reads.append((row, t, *memory.look(q[row, t])))
                    read = memory.read(q[row, t])
                    out[row, t] = mixed(self.p, read, v[row, t], None if g is None else g[row, t], self.eps)
                waiting.append(t)
            written.append((memory.keys, memory.values))
        keys, values = (torch.stack(x) for x in zip(*written, strict=True))
        return out, keys, values
