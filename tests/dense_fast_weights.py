"""A memory of fast weights as its formulas say, in float64 and with every slot written out: scores of all n^2 slots,
dense losses, and torch.autograd.grad for what a write does. Imports nothing of regard.

Legend: one memory; R rows, L tokens of a chunk, H heads, n sub-keys of a half, N = n^2, k slots a head, d = Dk / 2.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


def numbers(*size: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*size, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).to(dtype)


def close(found: Any, expected: Any, atol: float = 1e-10) -> None:
    """Compare tensors, or sequences of them."""
    torch.testing.assert_close(found, expected, rtol=0, atol=atol)


def half_scores(query: Tensor, keys: Tensor, score: str = "idw", eps: float = 1e-3) -> Tensor:
    """[..., H, 2, n] of queries [..., H, 2 d] and sub-keys [H, 2, n, d]."""
    q = query.unflatten(-1, (2, -1))[..., None, :]
    if score == "dot":
        return (q * keys).sum(-1)
    return -torch.log(eps + (q - keys).square().sum(-1))


def all_scores(halves: Tensor) -> Tensor:
    """[..., H, N] of the scores of halves [..., H, 2, n]."""
    return (halves[..., 0, :, None] + halves[..., 1, None, :]).flatten(-2)


def best(scores: Tensor, k: int) -> Tensor:
    """Where the k largest stand, the lowest index first among equals."""
    return scores.detach().sort(dim=-1, descending=True, stable=True).indices[..., :k]


def kept(scores: Tensor, k: int) -> Tensor:
    """The scores with -inf at all but the k largest."""
    at = best(scores, k)
    return torch.full_like(scores, -torch.inf).scatter(-1, at, scores.gather(-1, at))


def slot_shares(query: Tensor, keys: Tensor, k: int, score: str = "idw", eps: float = 1e-3) -> Tensor:
    """The weights of all slots, one softmax over the heads' selected ones: [..., H, N]."""
    scores = kept(all_scores(half_scores(query, keys, score, eps)), k)
    return scores.flatten(-2).softmax(-1).view(scores.shape)


@dataclass
class Dense:
    """One memory and how it is written."""

    keys: Tensor  # [H, 2, n, d]
    values: Tensor  # [N, Dv]
    k: int
    step: str = "normalized"  # this and what follows up to `border`: as in `WriteRule`
    rate: float = 1.0
    address: float = 10.0
    key_update: str = "entropy"
    look_ahead: bool = True
    border: bool = True
    score: str = "idw"
    eps: float = 1e-3

    def read(self, query: Tensor) -> Tensor:
        """[R, L, Dv] of queries [R, L, H, 2 d]."""
        return slot_shares(query, self.keys, self.k, self.score, self.eps).sum(-2) @ self.values

    def look(self, query: Tensor) -> tuple[list[int], list[float]]:
        """The slots that one token [H, 2 d] reads, the best of each head first, and their weights."""
        shares, at = slot_shares(query, self.keys, self.k, self.score, self.eps), self.slots(query, self.keys)
        return at.flatten().tolist(), shares.gather(-1, at).flatten().tolist()

    def slots(self, query: Tensor, keys: Tensor) -> Tensor:
        return best(all_scores(half_scores(query, keys, self.score, self.eps)), self.k)

    def targets(self, value: Tensor, following: Tensor | None) -> tuple[Tensor, Tensor]:
        """What tokens with values [L, Dv] are taught before the value `following` [Dv], and which have a target."""
        has = torch.ones(len(value), dtype=torch.bool)
        if not self.look_ahead:
            return value, has
        has[-1] = self.border and following is not None
        last = following if has[-1] else value[-1]
        return torch.cat([value[1:], last[None]]), has

    def write(self, query: Tensor, value: Tensor, gate: Tensor, following: Tensor | None) -> None:
        """Learn a chunk: query [R, L, H, 2 d], value [R, L, Dv], gate [R, L], the next values [R, Dv] or None."""
        after = [None] * len(value) if following is None else following
        target, has = zip(*(self.targets(v, last) for v, last in zip(value, after, strict=True)), strict=True)
        self.learn(query.flatten(0, 1), torch.cat(target), gate.flatten(0, 1), torch.cat(has))

    def learn(self, query: Tensor, target: Tensor, gate: Tensor, has: Tensor) -> None:
        """Write P tokens: queries [P, H, 2 d], targets [P, Dv], gates [P], and which have a target [P]. Gradients pass
        through where the values have any."""
        graph = self.values.requires_grad
        keys, values = (x if graph else x.detach().requires_grad_() for x in (self.keys, self.values))
        weights, pairs = slot_shares(query, keys, self.k, self.score, self.eps), max(int(has.sum()), 1)
        error = (weights.sum(-2) @ values - target).square().sum(-1) / 2 * gate * has
        at = self.slots(query, keys)
        met = torch.zeros(weights.shape).scatter(-1, at, 1.0).to(weights)
        step: Tensor | float = 1.0
        if self.step == "reference":
            step = at.shape[1] * self.k * len(query) / pairs
        elif self.step == "normalized":
            step = 1 / (weights.sum(-2).square() / met.sum(-2).clamp(min=1)).sum(-1)
        moved = torch.autograd.grad((error * step).sum(), values, create_graph=True)[0]
        after = values - self.rate * moved / met.sum((0, 1)).clamp(min=1)[:, None]
        if self.key_update != "none":
            mse = self.key_update == "mse"
            loss = error.sum() / pairs / target.shape[-1] if mse else -self.address * self.entropy(query, keys)
            keys = keys - self.rate * torch.autograd.grad(loss, keys, create_graph=True)[0]
        self.keys, self.values = (x if graph else x.detach() for x in (keys, after))

    def entropy(self, query: Tensor, keys: Tensor | None = None) -> Tensor:
        """The entropy of how often each sub-key is used, all sets added up; pooled, the heads are one set."""
        scores = kept(half_scores(query, self.keys if keys is None else keys, self.score, self.eps), self.k)
        marginal = scores.softmax(-1).flatten(0, -4).mean(0)  # [H, 2, n]
        if self.key_update == "pooled-entropy":
            marginal = marginal.mean(0)
        return -(marginal * (marginal + 1e-8).log()).sum()


def stream(memory: Dense, query: Tensor, value: Tensor, gate: Tensor, chunk: int) -> Tensor:
    """What the rows [R, T, ...] of one memory read, chunk after chunk; the last, even if full, stays unwritten."""
    out = []
    for start in range(0, query.shape[1], chunk):
        if start:
            span = slice(start - chunk, start)
            memory.write(query[:, span], value[:, span], gate[:, span], value[:, start])
        out.append(memory.read(query[:, start : start + chunk]))
    return torch.cat(out, 1)
