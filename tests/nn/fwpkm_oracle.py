"""The whole layer from its formulas, one token at a time in float64: full search over all n^2 slots, dense tables, and
gradients of the paper's losses where it defines a step by them."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor


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

    def linear(self, name: str, x: Tensor) -> Tensor:
        x = x / (x.pow(2).mean(-1, keepdim=True) + self.eps).sqrt() * self.p[f"projections.{name}_norm.weight"]
        return x @ self.p[f"projections.{name}_proj.weight"].T + self.p[f"projections.{name}_proj.bias"]

    def project(self, h: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        heads, _, _, half = self.p["keys"].shape
        q = self.linear("q", h).unflatten(-1, (heads, 2, half))
        v = self.linear("v", h)
        if self.value_norm:
            mean = v.mean(-1, keepdim=True)
            std = ((v - mean).pow(2).sum(-1, keepdim=True) / (v.shape[-1] - 1)).sqrt()
            v = (v - mean) / (std + 1e-6)
        g = 1 / (1 + torch.exp(-self.linear("gate", h).mean(-1))) if self.gating else None
        return q, v, g

    def scores(self, q: Tensor, keys: Tensor) -> Tensor:
        """[2, d] and [2, n, d] -> [2, n]"""
        if self.score == "dot":
            return (q[:, None] * keys).sum(-1)
        return -torch.log(self.idw_eps + (q[:, None] - keys).pow(2).sum(-1))

    def look(self, q: Tensor, keys: Tensor) -> tuple[list[int], Tensor, Tensor]:
        """One token: slots of all heads, their weights, and p [H, 2, n]."""
        slots: list[int] = []
        chosen, halves = [], []
        for own, table in zip(q, keys, strict=True):
            s = self.scores(own, table)
            every = (s[0][:, None] + s[1][None]).flatten()
            best = sorted(range(len(every)), key=lambda i: (-float(every[i].detach()), i))[: self.k]
            slots += best
            chosen.append(every[torch.tensor(best)])
            for half in s:
                top = torch.tensor(sorted(range(len(half)), key=lambda i: (-float(half[i].detach()), i))[: self.k])
                halves.append(torch.zeros_like(half).scatter(0, top, half[top].softmax(0)))
        weights = torch.cat(chosen).softmax(0)
        return slots, weights, torch.stack(halves).unflatten(0, (-1, 2))

    def write(self, waiting: list[tuple], keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens (q, gate or None, target or None) of one chunk."""
        pairs = sum(target is not None for _, _, target in waiting)
        factor = self.k * len(keys) * len(waiting) / max(pairs, 1) if self.rule == "reference" else 1.0
        leaf = keys.detach().requires_grad_()
        readers, moved = values.new_zeros(len(values)), torch.zeros_like(values)
        marginal, error_loss = 0.0, 0.0
        for q, gate, target in waiting:
            slots, weights, p = self.look(q, leaf)
            marginal = marginal + p / len(waiting)
            for slot in slots:
                readers[slot] += 1
            if target is None:
                continue
            usage = values.new_zeros(len(values)).index_add(0, torch.tensor(slots), weights.detach())
            share = 1.0 if gate is None or not self.gate_loss else float(gate)
            share = share / float(usage.pow(2).sum()) if self.rule == "normalized" else share * factor
            read = (weights[:, None] * values[torch.tensor(slots)]).sum(0)
            mean = (1.0 if gate is None or not self.gate_loss else float(gate)) / (pairs * values.shape[1])
            moved += share * usage[:, None] * (read.detach() - target)
            error_loss = error_loss + 0.5 * mean * (read - target).pow(2).sum()
        if self.key_update == "entropy":
            loss = (marginal * torch.log(marginal + 1e-8)).sum()
            keys = keys - self.rate * self.address * torch.autograd.grad(loss, leaf)[0]
        elif self.key_update == "mse" and pairs:
            keys = keys - self.rate * torch.autograd.grad(error_loss, leaf)[0]
        return keys, values - self.rate * moved / readers.clamp(min=1)[:, None]

    def targets(self, places: list[int], v: Tensor, following: int | None) -> list[Tensor | None]:
        if not self.look_ahead:
            return [v[t] for t in places]
        last = v[following] if self.border and following is not None else None
        return [*(v[t] for t in places[1:]), last]

    @torch.enable_grad()
    def run(
        self, hidden: Tensor, mask: Tensor | None = None, spoilt: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(output [B, T, C], keys [M, ...], values [M, N, Dv]), what waits at the end not written. Masked tokens are as
        if removed; spoilt ones have a place in the chunk, and nothing else."""
        self.p = {name: x.detach() for name, x in self.p.items()}
        hidden = hidden.detach()
        rows, tokens, _ = hidden.shape
        mask = torch.ones(rows, tokens, dtype=torch.bool) if mask is None else mask
        good = mask if spoilt is None else mask & ~spoilt
        q, v, g = self.project(torch.where(good[..., None], hidden, 0))
        out = torch.zeros_like(hidden)
        groups = [list(range(rows))] if self.shared else [[row] for row in range(rows)]
        keys, values = [], []
        for group in groups:
            key, value, waiting = self.p["keys"], self.p["values"], []
            for t in range(tokens):
                here = [row for row in group if mask[row, t]]
                if not here:
                    continue
                if len(waiting) == self.chunk:
                    parts = []
                    for row in group:
                        own = [s for s in waiting if good[row, s]]
                        parts += [
                            (q[row, s], None if g is None else g[row, s], target)
                            for s, target in zip(
                                own, self.targets(own, v[row], t if good[row, t] else None), strict=True
                            )
                        ]
                    key, value = self.write(parts, key, value)
                    waiting = []
                for row in (row for row in here if good[row, t]):
                    slots, weights, _ = self.look(q[row, t], key)
                    self.reads.append((row, t, slots, weights.tolist()))
                    read = (weights[:, None] * value[torch.tensor(slots)]).sum(0)
                    mixed = read + v[row, t] if g is None else g[row, t] * read + (1 - g[row, t]) * v[row, t]
                    out[row, t] = self.linear("out", mixed).detach()
                waiting.append(t)
            keys.append(key)
            values.append(value)
        return out, torch.stack(keys).detach(), torch.stack(values).detach()
