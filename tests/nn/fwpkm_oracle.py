"""The whole layer from its formulas, in float64; `dense_fast_weights` has those of its memory."""

from dataclasses import dataclass, field

import torch
from dense_fast_weights import Dense, stream
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


class Watched(Dense):
    """A memory that notes what is read of it."""

    def read(self, query: Tensor) -> Tensor:
        self.__dict__.setdefault("looks", []).append([[self.look(token) for token in row] for row in query])
        return super().read(query)


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

    @torch.enable_grad()
    def run(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(output [B, T, C], keys [M, ...], values [M, N, Dv]), what waits at the end not written."""
        self.p = {name: x.detach() for name, x in self.p.items()}
        q, v, g = self.project(hidden.detach())
        gate = torch.ones_like(v[..., 0]) if g is None or not self.gate_loss else g
        how = (self.k, self.rule, self.rate, self.address, self.key_update, self.look_ahead, self.border)
        read, memories, rows = [], [], len(hidden)
        for group in [slice(0, rows)] if self.shared else [slice(b, b + 1) for b in range(rows)]:
            memory = Watched(self.p["keys"], self.p["values"], *how, score=self.score, eps=self.idw_eps)
            read.append(stream(memory, q[group], v[group], gate[group], self.chunk))
            memories.append(memory)
            for place, look in enumerate(memory.looks):
                for row, line in enumerate(look):
                    first = place * self.chunk
                    self.reads += [(group.start + row, first + t, *each) for t, each in enumerate(line)]
        keys, values = (torch.stack([getattr(m, name) for m in memories]) for name in ("keys", "values"))
        return mixed(self.p, torch.cat(read), v, g, self.eps), keys, values
