"""LaCT written out: dense attention, a network per head taught by autograd, and small inputs for both.

Shapes: B rows, T tokens, C model width, H attention heads, HF heads of fast weights, D = C / HF, F inner width.
"""

import math
from types import SimpleNamespace

import torch
from dense_fast_weights import numbers
from nn import layers_by_hand as by
from torch import Tensor
from torch.autograd import grad

from regard.nn import LargeChunkTTT

B, T, C, H, HF, F, CHUNK, WINDOW = 3, 15, 12, 3, 2, 9, 4, 5
D = C // HF
STEPS = (
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
)
Weights = tuple[Tensor, Tensor, Tensor]
OPTIONS = {"fast_heads": HF, "inner": F / D, "window": WINDOW, "chunk_size": CHUNK, "layer_idx": 0}


def layer(seed: int = 0, **options) -> LargeChunkTTT:
    """A small layer in float64 that learns fast enough to be seen."""
    torch.manual_seed(seed)
    made = LargeChunkTTT(C, H, **{**OPTIONS, **options}).double()
    with torch.no_grad():
        for name, number in made.named_parameters():
            if name not in ("gate", "up", "down"):
                number.add_(0.2 * torch.randn_like(number))
        made.rate_proj.bias.fill_(5.0)
    return made


def tokens(length: int = T, rows: int = B, seed: int = 1) -> Tensor:
    return numbers(rows, length, C, seed=seed)


def angles(place: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Cosines and sines of positions [B or 1, T] (0, 1, ... where None) for heads of C / H channels."""
    half = C // H // 2
    place = torch.arange(T)[None] if place is None else place
    angle = place[..., None].double() * 100.0 ** (-torch.arange(half, dtype=torch.float64) / half)
    return angle.cos(), angle.sin()


def cache() -> SimpleNamespace:
    return SimpleNamespace(layers=[SimpleNamespace(window_state=None, fast_state=None)])


def network(x: Tensor, w: Weights) -> Tensor:
    """x [..., D] through one head's SwiGLU network."""
    a = x @ w[0].T
    return (a / (1 + torch.exp(-a)) * (x @ w[1].T)) @ w[2].T


def polar(step: Tensor) -> Tensor:
    """The polynomials applied to the singular values."""
    u, s, v = torch.linalg.svd(step, full_matrices=False)
    s = s / (s.square().sum().sqrt() + 1e-7)
    for a, b, c in STEPS:
        s = a * s + b * s**3 + c * s**5
    return u @ torch.diag(s) @ v


class Learner:
    """One head of one sequence, taught chunk by chunk by autograd on - sum_t v_t^T f(k_t)."""

    def __init__(self, w: Weights, optimizer: str) -> None:
        self.first = self.w = w
        self.momentum, self.muon = "momentum" in optimizer, "muon" in optimizer
        self.steps: tuple[Tensor, ...] | None = None

    def teach(self, key: Tensor, value: Tensor, rates: Tensor, share: Tensor) -> None:
        """key, value [P, D], rates [P, 3] of gate, up and down, share [P]."""
        leaves = [x if x.requires_grad else x.detach().requires_grad_() for x in self.w]
        whole = [torch.zeros_like(x) for x in leaves]
        for k, v, eta in zip(key, value, rates, strict=True):
            loss = -(v * network(k, (leaves[0], leaves[1], leaves[2]))).sum()
            parts = grad(loss, leaves, create_graph=True)
            whole = [g - rate * part for g, rate, part in zip(whole, eta, parts, strict=True)]
        if self.momentum and self.steps is not None:
            whole = [g + share.mean() * s for g, s in zip(whole, self.steps, strict=True)]
        self.steps = tuple(whole)
        new = [x + (polar(s) if self.muon else s) for x, s in zip(leaves, whole, strict=True)]
        size = [x.square().sum(1, keepdim=True).sqrt() for x in new]
        old = [x.square().sum(1, keepdim=True).sqrt() for x in self.first]
        made = [x / (n + 1e-5) * o for x, n, o in zip(new, size, old, strict=True)]
        self.w = (made[0], made[1], made[2])


def inputs(seed: int = 0, length: int = T, rows: int = B) -> dict[str, Tensor]:
    """What `large_chunk_ttt` is given, rates and shares as a layer would make them."""
    size = (rows, length, HF)
    made = {name: numbers(*size, D, seed=seed + i) for i, name in enumerate(("query", "key", "value"))}
    return {**made, "rates": numbers(*size, 3, seed=seed + 3).abs(), "share": numbers(*size, seed=seed + 4).sigmoid()}


def weights() -> Weights:
    made = [numbers(HF, *size, seed=20 + i) / 2 for i, size in enumerate(((F, D), (F, D), (D, F)))]
    return made[0], made[1], made[2]


def expected_reads(
    given: dict[str, Tensor], w: Weights, optimizer: str, chunk: int
) -> tuple[Tensor, list[list[Learner]]]:
    """What is read [B, T, HF, D], and the learners [B][HF] after every chunk that a next token closed."""
    rows, length = given["query"].shape[:2]
    learners = [[Learner((w[0][h], w[1][h], w[2][h]), optimizer) for h in range(HF)] for _ in range(rows)]
    out = []
    for start in range(0, length, chunk):
        span = slice(start, start + chunk)
        read = [[network(given["query"][b, span, h], learners[b][h].w) for h in range(HF)] for b in range(rows)]
        out.append(torch.stack([torch.stack(row, 1) for row in read]))
        if start + chunk < length:
            for b in range(rows):
                for h in range(HF):
                    learners[b][h].teach(*(given[n][b, span, h] for n in ("key", "value", "rates", "share")))
    return torch.cat(out, 1), learners


def layer_by_hand(made: LargeChunkTTT, hidden: Tensor, places: tuple[Tensor, Tensor] | None) -> Tensor:
    """The whole layer of its parameters, one row after another."""
    p, rows, length = dict(made.named_parameters()), hidden.shape[0], hidden.shape[1]

    def turned(x: Tensor) -> Tensor:  # [B, T, C] by attention heads
        x = x.unflatten(-1, (H, -1))
        return x if places is None else by.turn(x, torch.atan2(places[1], places[0])[:, :, None])

    def linear(name: str) -> Tensor:
        out = hidden @ p[f"{name}.weight"].T
        return out + p[f"{name}.bias"] if f"{name}.bias" in p else out

    def silu(x: Tensor) -> Tensor:
        return x / (1 + torch.exp(-x))

    q, k, v = linear("q_proj"), linear("k_proj"), linear("v_proj")
    if "q_norm.weight" in p:
        q, k = (by.normalised(x, "rms", p[f"{n}_norm.weight"]) for n, x in (("q", q), ("k", k)))
    scores = torch.einsum("bthd,bshd->bhts", turned(q), turned(k)) / math.sqrt(C // H)
    ahead = torch.arange(length)[:, None] - torch.arange(length)
    scores = scores.masked_fill((ahead < 0) | (ahead >= made.window), -math.inf)
    attended = torch.einsum("bhts,bshd->bthd", scores.softmax(-1), v.unflatten(-1, (H, -1))).flatten(2)
    fast = []
    for name, x in (("q", q), ("k", k)):
        x = silu(x * p[f"{name}_scale"] + p[f"{name}_shift"]).unflatten(-1, (HF, D))
        x = (x / (x.square().sum(-1, keepdim=True).sqrt() + 1e-5)).flatten(2)
        fast.append((turned(x).flatten(2) if made.fast_rotary else x).unflatten(-1, (HF, D)))
    rates = torch.log1p(torch.exp(linear("rate_proj") + math.log(math.expm1(1e-3)))).unflatten(-1, (HF, 3))
    share = linear("momentum_proj").sigmoid() if "momentum_proj.weight" in p else torch.zeros(rows, length, HF)
    given = {"query": fast[0], "key": fast[1], "value": silu(v).unflatten(-1, (HF, D)), "rates": rates, "share": share}
    read, _ = expected_reads(given, (p["gate"], p["up"], p["down"]), made.settings.optimizer, made.chunk_size)
    read = by.normalised(read, "rms", p["read_norm.weight"]) * silu(linear("read_proj"))[..., None]
    return (attended + read.flatten(2)) @ p["o_proj.weight"].T
