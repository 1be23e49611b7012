"""A small fast-weight product-key memory layer, its tokens, and the whole layer from its formulas in float64;
`dense_fast_weights` has those of its memory."""

from dataclasses import dataclass, field
from typing import Any

import torch
from dense_fast_weights import Dense, stream
from torch import Tensor

from regard.nn import FastWeightProductKeyMemory

C, N, DK, DV, CHUNK = 12, 6, 8, 5, 4
SMALL = {"sub_keys": N, "key_dim": DK, "value_dim": DV, "top_k": 3, "chunk_size": CHUNK}
NAMES = {"top_k": "k", "step_rule": "step", "address_weight": "address", "learning_rate": "rate", "idw_eps": "eps"}


def layer(
    seed: int = 0, dtype: torch.dtype = torch.float64, spread: float = 10.0, **options
) -> FastWeightProductKeyMemory:
    """A small layer whose queries and gates differ visibly from token to token."""
    torch.manual_seed(seed)
    made = FastWeightProductKeyMemory(C, **{**SMALL, **options})
    for name, number in made.named_parameters():
        if "norm" not in name:
            number.data.mul_(spread) if name.endswith("weight") else number.data.normal_(std=0.3)
        else:
            number.data.add_(0.1 * torch.randn_like(number))
    return made.to(dtype)


def tokens(length: int = 15, rows: int = 2, seed: int = 1, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(rows, length, C, dtype=dtype, generator=torch.Generator().manual_seed(seed))


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
    """What a layer with these parameters and options does to hidden states.

    p: state_dict of the layer; the names follow the projections q, v, gate, out. memory: options of `Dense`.
    """

    p: dict[str, Tensor]
    memory: dict[str, Any]
    chunk_size: int
    value_norm: bool = True
    gating: bool = True
    gate_loss: bool = True
    shared: bool = False
    norm_eps: float = 1e-5
    reads: list[tuple[int, int, list[int], list[float]]] = field(default_factory=list)  # row, t, slots, weights

    def project(self, h: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        q, v, g = projected(self.p, h, self.value_norm, self.gating, self.norm_eps)
        return q.unflatten(-1, (len(self.p["keys"]), -1)), v, g

    @torch.enable_grad()
    def run(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(output [B, T, C], keys [M, ...], values [M, N, Dv]), what waits at the end not written."""
        self.p = {name: x.detach() for name, x in self.p.items()}
        q, v, g = self.project(hidden.detach())
        gate = torch.ones_like(v[..., 0]) if g is None or not self.gate_loss else g
        read, memories, rows = [], [], len(hidden)
        for group in [slice(0, rows)] if self.shared else [slice(b, b + 1) for b in range(rows)]:
            memory = Watched(self.p["keys"], self.p["values"], **self.memory)
            read.append(stream(memory, q[group], v[group], gate[group], self.chunk_size))
            memories.append(memory)
            for place, look in enumerate(memory.looks):
                for row, line in enumerate(look):
                    first = place * self.chunk_size
                    self.reads += [(group.start + row, first + t, *each) for t, each in enumerate(line)]
        keys, values = (torch.stack([getattr(m, name) for m in memories]) for name in ("keys", "values"))
        return mixed(self.p, torch.cat(read), v, g, self.norm_eps), keys, values


def oracle(made: FastWeightProductKeyMemory, **options) -> Oracle:
    given = {NAMES.get(name, name): value for name, value in {**SMALL, **options}.items()}
    memory, own = ({name: given[name] for name in given if name in kind.__annotations__} for kind in (Dense, Oracle))
    return Oracle(made.state_dict(), memory, **own)
