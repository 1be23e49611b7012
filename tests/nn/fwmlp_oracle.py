"""FwMLP written out: a network with biases taught by autograd on its loss, and small inputs for it.

Shapes: B rows, T tokens, DIN, F, DV widths of input, inner layer and output, C model width.
"""

from itertools import pairwise

import torch
from dense_fast_weights import numbers
from torch import Tensor
from torch.autograd import grad

from regard.nn import FastWeightMLP

B, T, DIN, F, DV, C, CHUNK = 3, 14, 4, 6, 3, 10, 4
RATE = 0.1
Weights = tuple[Tensor, Tensor, Tensor]


def network(x: Tensor, w: Weights) -> Tensor:
    """x [..., DIN] through the SwiGLU network, biases in the last columns."""
    a, u = x @ w[0][:, :-1].T + w[0][:, -1], x @ w[1][:, :-1].T + w[1][:, -1]
    return (a / (1 + torch.exp(-a)) * u) @ w[2][:, :-1].T + w[2][:, -1]


def taught(w: Weights, groups: list[list[tuple[Tensor, Tensor]]], target: str, rate: float = RATE) -> Weights:
    """One step on the pairs of consecutive tokens (query, value) of every group, by autograd."""
    pairs = [(a, b) for group in groups for a, b in pairwise(group)]
    if not pairs:
        return w
    wanted = torch.stack([(a[1] + b[1]) / 2 if target == "mean" else b[1] for a, b in pairs])
    made = [x if x.requires_grad else x.detach().requires_grad_() for x in w]
    found = network(torch.stack([a[0] for a, _ in pairs]), (made[0], made[1], made[2]))
    steps = grad(((found - wanted) ** 2).mean(), made, create_graph=True)
    after = [x - rate * g for x, g in zip(made, steps, strict=True)]
    return after[0], after[1], after[2]


def stream(
    query: Tensor, value: Tensor, w: Weights, target: str = "mean", chunk: int = CHUNK
) -> tuple[Tensor, Weights]:
    """What one row [T, ...] reads, token by token, and the weights after all chunks that a next token closed."""
    waits: list[tuple[Tensor, Tensor]] = []
    out = []
    for q, v in zip(query, value, strict=True):
        if len(waits) == chunk:
            w, waits = taught(w, [[*waits, (q, v)]], target), []
        out.append(network(q, w))
        waits.append((q, v))
    return torch.stack(out), w


def layer(seed: int = 0, **options) -> FastWeightMLP:
    """A small layer in float64 whose writes are visible."""
    torch.manual_seed(seed)
    sizes = {"in_dim": DIN, "hidden_dim": F, "value_dim": DV, "chunk_size": CHUNK, "learning_rate": RATE}
    made = FastWeightMLP(C, **{**sizes, **options}).double()
    for name, number in made.named_parameters():
        if "norm" not in name:
            number.data.normal_(std=0.5)
    return made


def tokens(length: int = T, rows: int = B, seed: int = 1) -> Tensor:
    return numbers(rows, length, C, seed=seed)
