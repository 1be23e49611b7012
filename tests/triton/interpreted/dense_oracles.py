"""What the three mechanisms are, dense and in float64, one formula beside another: nothing here calls regard, and the
weights of the adaptive rule are those of the package `entmax`.

Legend: B batch, H query heads (Hkv key heads), Tq queries, Tk keys; z scores, `seen` boolean, both [B, H, Tq, Tk].
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from entmax import entmax15, entmax_bisect, sparsemax
from torch import Tensor

# Which keys a query sees ----------------------------------------------------------------------------------------


def seen_pairs(
    batch: int, heads: int, queries: int, keys: int, *, is_causal: bool = False, exclude_self: bool = False,
    window: int | None = None, query_offset: int | Tensor | None = None, segment_ids: Tensor | None = None,
    attn_mask: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Boolean [B, H, Tq, Tk], pair by pair, as the arguments of `regard.attention` are worded."""
    found = torch.zeros(batch, heads, queries, keys, dtype=torch.bool)
    offsets = [keys - queries if query_offset is None else query_offset] * batch
    if isinstance(query_offset, Tensor):
        offsets = query_offset.tolist()
    for b in range(batch):
        ids = None if segment_ids is None else segment_ids[b % segment_ids.shape[0]].tolist()
        for i in range(queries):
            at = i + offsets[b]
            low, high = 0, keys
            if is_causal or exclude_self:
                high = at if exclude_self else at + 1
                low = 0 if window is None else high - window
            elif window is not None:
                low, high = at - window + 1, at + window
            if ids is not None:
                start = stop = at
                while start > 0 and ids[start - 1] == ids[at]:
                    start -= 1
                while stop < keys and ids[stop] == ids[at]:
                    stop += 1
                low, high = max(low, start), min(high, stop)
            found[b, :, i, max(low, 0) : max(high, 0)] = True
    return found if attn_mask is None else found & attn_mask


# Compact attention ----------------------------------------------------------------------------------------------


def _share(w: Tensor) -> Tensor:
    total = w.sum(-1, keepdim=True)
    return w / torch.where(total > 0, total, 1)


def _softmax(z: Tensor) -> Tensor:
    return z.softmax(-1)


def _adaptive(z: Tensor, power: int) -> Tensor:
    """alpha-entmax with alpha = 1 + 1 / power."""
    if power == 1:
        return sparsemax(z, -1)
    return entmax15(z, -1) if power == 2 else entmax_bisect(z, 1 + 1 / power, -1, n_iter=60)


def _anchored(z: Tensor, power: int, margin: float | Tensor) -> Tensor:
    """[z - max z + margin]_+^power over its sum; keys that tie for the maximum share its derivative."""
    return _share((z - z.amax(-1, keepdim=True) + margin).clamp(min=0) ** power)


def _fixed(z: Tensor, power: int, bias: float | Tensor, empty: str, seen: Tensor) -> Tensor:
    """[z + bias]_+^power over its sum; where that is 0, the stand-in, which has no derivative."""
    w = (z + bias).clamp(min=0) ** power
    lost = w.sum(-1, keepdim=True) == 0
    stand = torch.zeros_like(z)
    if empty == "uniform":
        stand = seen / seen.sum(-1, keepdim=True).clamp(min=1)
    elif empty == "nearest":
        first = (z == z.amax(-1, keepdim=True)).int().argmax(-1, keepdim=True)
        stand = stand.scatter(-1, first, 1.0)
    return torch.where(lost, stand.to(z), _share(torch.where(lost, 1.0, w)))


@dataclass(frozen=True)
class Rule:
    """A weighting. text: as regard reads it; kind: softmax, adaptive, anchored or fixed; number: margin or bias."""

    text: str
    kind: str
    power: int = 1
    number: float = 0.0
    empty: str = "uniform"

    def weights(self, z: Tensor, seen: Tensor, number: Tensor | None = None) -> Tensor:
        """p [B, H, Tq, Tk], rows of sum one; 0 in rows without a key. `number` [B, H, Tq]: instead of the own."""
        at = self.number if number is None else number[..., None]
        lost = ~seen.any(-1, keepdim=True)
        top = torch.where(seen, z, -torch.inf).amax(-1, keepdim=True).detach()
        far = torch.where(lost, 0.0, top) - 1e3  # finite and out of reach of every threshold: no -inf in the package
        z = torch.where(seen, z, far)
        if self.kind == "softmax":
            p = _softmax(z)
        elif self.kind == "adaptive":
            p = _adaptive(z, self.power)
        elif self.kind == "anchored":
            p = _anchored(z, self.power, at)
        else:
            p = _fixed(z, self.power, at, self.empty, seen)
        return torch.where(seen & ~lost, p, 0.0)


RULES: dict[str, Rule] = {
    "softmax": Rule("softmax", "softmax"),
    "adaptive 1": Rule("sparsemax", "adaptive", 1),
    "adaptive 2": Rule("biweight", "adaptive", 2),
    "adaptive 3": Rule("triweight", "adaptive", 3),
    "anchored 1": Rule("relumax", "anchored", 1, 1.0),
    "anchored 2": Rule("biweight*anchored(margin=1.5)", "anchored", 2, 1.5),
    "anchored 3": Rule("triweight*anchored(margin=2.5)", "anchored", 3, 2.5),
    "fixed 1": Rule("normrelu", "fixed", 1, 0.0),
    "fixed 2": Rule("biweight*fixed(bias=0.25,empty=zero)", "fixed", 2, 0.25, "zero"),
    "fixed 3": Rule("triweight*fixed(bias=-0.5,empty=nearest)", "fixed", 3, -0.5, "nearest"),
}
"""Every rule that the kernels have, by a short name."""


def scores(q: Tensor, k: Tensor, scale: float | Tensor | None = None) -> Tensor:
    """z = scale q . k, the key heads repeated."""
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return q @ k.mT * (scale[..., None] if isinstance(scale, Tensor) else scale)


def attend(
    q: Tensor, k: Tensor, v: Tensor, seen: Tensor, rule: Rule, scale: float | Tensor | None = None,
    number: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """sum_j p_ij v_j."""
    p = rule.weights(scores(q, k, scale), seen, number)
    return p @ v.repeat_interleave(q.shape[1] // v.shape[1], 1)


# Local linear attention -----------------------------------------------------------------------------------------


def softmax_rows(z: Tensor, seen: Tensor) -> Tensor:
    """softmax among the keys that are seen; 0 in a row that sees none."""
    return RULES["softmax"].weights(z, seen)


def local_linear(
    x: Tensor, y: Tensor, v: Tensor, seen: Tensor, ridge: float | Tensor, scale: float | None = None,
    rule: Rule | None = None,
) -> Tensor:  # fmt: skip
    """The intercept a of min sum_j p_ij |v_j - a - W (y_j - x_i)|^2 + |W|^2_ridge, by the normal equations about each
    row's own mean: A = sum_j p_ij (y_j - m)(y_j - m)' + ridge, t = A^-1 (x - m), o = sum_j p_ij (1 + (y_j - m) . t)
    v_j. Ridge a number, [B, H, Tq] or [B, H, Tq, D]."""
    groups = x.shape[1] // y.shape[1]
    y, v = y.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    p = (rule or RULES["softmax"]).weights(scores(x, y, scale), seen)
    amount = torch.as_tensor(ridge, dtype=x.dtype)
    amount = amount[..., None] if amount.dim() == 3 else amount
    out = []
    for i in range(x.shape[2]):  # a row at a time, so that [Tq, Tk, D] is never there
        p_i = p[:, :, i, :, None]
        mean = (p_i * y).sum(2)
        apart = y - mean[:, :, None]
        at = amount[:, :, i] if amount.dim() == 4 else amount
        matrix = (p_i * apart).mT @ apart + torch.diag_embed(at.expand(mean.shape))
        slope = torch.linalg.solve(matrix, (x[:, :, i] - mean)[..., None])
        out.append((p_i * (1 + apart @ slope) * v).sum(2))
    return torch.where(seen.any(-1, keepdim=True), torch.stack(out, 2), 0.0)


def with_probe(x: Tensor, y: Tensor, v: Tensor, seen: Tensor, probe: Tensor, scale: float | None = None) -> Tensor:
    """Parallax: o = sum_j p_ij (1 - (y_j - m_i) . r_i) v_j."""
    groups = x.shape[1] // y.shape[1]
    p = softmax_rows(scores(x, y, scale), seen)
    y, v = y.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    mean = p @ y
    slopes = probe @ y.mT - (probe * mean).sum(-1, keepdim=True)
    return (p * (1 - slopes)) @ v


# Fast-weight memory ---------------------------------------------------------------------------------------------


def _half_scores(query: Tensor, keys: Tensor, score: str, eps: float) -> Tensor:
    """[..., H, 2, n] of queries [..., H, 2, d] and sub-keys [H, 2, n, d]."""
    if score == "dot":
        return (query[..., None, :] * keys).sum(-1)
    return -torch.log(eps + (query[..., None, :] - keys).square().sum(-1))


def _best(x: Tensor, k: int) -> Tensor:
    """Where the k largest of the last axis stand, the lowest index first among equals."""
    return torch.sort(x.detach(), dim=-1, descending=True, stable=True).indices[..., :k]


@dataclass
class Memory:
    """One memory: sub-keys [H, 2, n, d] and values [N, Dv], read and written by plain sums over every slot. What it
    computes is differentiable, the writes too."""

    keys: Tensor
    values: Tensor
    k: int = 4
    score: str = "idw"
    eps: float = 1e-3
    step: str = "normalized"
    rate: float = 1.0
    address: float = 10.0
    key_update: str = "entropy"

    def shares(self, query: Tensor) -> tuple[Tensor, Tensor]:
        """Weights [L, H, N] of every slot, one softmax over those that any head selected, and those (1, else 0)."""
        halves = _half_scores(query.unflatten(-1, (2, -1)), self.keys, self.score, self.eps)
        total = (halves[..., 0, :, None] + halves[..., 1, None, :]).flatten(-2)
        at = _best(total, self.k)
        picked = total.gather(-1, at)
        w = (picked - picked.detach().amax((-1, -2), keepdim=True)).exp()
        w = w / w.sum((-1, -2), keepdim=True)
        none = torch.zeros_like(total)
        return none.scatter(-1, at, w), none.scatter(-1, at, 1.0)

    def read(self, query: Tensor) -> Tensor:
        """[L, Dv] of queries [L, H, 2 d]."""
        return self.shares(query)[0].sum(1) @ self.values

    def entropy(self, query: Tensor, keys: Tensor) -> Tensor:
        """Of how often the chunk's queries use each sub-key, all sets added up."""
        s = _half_scores(query.unflatten(-1, (2, -1)), keys, self.score, self.eps)
        at = _best(s, self.k)
        marginal = torch.zeros_like(s).scatter(-1, at, s.gather(-1, at).softmax(-1)).mean(0)
        return -(marginal * torch.log(marginal + 1e-8)).sum()

    def write(self, query: Tensor, target: Tensor, gate: Tensor) -> None:
        """Learn a chunk: queries [L, H, 2 d], targets [L, Dv], gates [L]."""
        weights, met = self.shares(query)
        total, hits = weights.sum(1), met.sum(1)  # [L, N]
        error = total @ self.values - target
        step = self.rate * gate
        if self.step == "normalized":
            step = step / (total.square() / hits.clamp(min=1)).sum(-1)
        moved = (step[:, None] * total).T @ error / hits.sum(0).clamp(min=1)[:, None]
        if self.key_update == "entropy":
            at = self.keys if self.keys.requires_grad else self.keys.clone().requires_grad_()
            rise = torch.autograd.grad(self.entropy(query, at), at, create_graph=True)[0]
            self.keys = self.keys + self.rate * self.address * rise
        self.values = self.values - moved


def stream(memory: Memory, query: Tensor, value: Tensor, gate: Tensor, chunk: int) -> Tensor:
    """What a stream [T, ...] reads: every chunk is written, towards the values of the next tokens, before the token
    after it reads."""
    out: list[Tensor] = []
    for start in range(0, len(query), chunk):
        if start:
            span = slice(start - chunk, start)
            memory.write(query[span], value[start - chunk + 1 : start + 1], gate[span])
        out.append(memory.read(query[start : start + chunk]))
    return torch.cat(out)


# Comparing ------------------------------------------------------------------------------------------------------


def ratio(found: Tensor, expected: Tensor) -> float:
    """The root mean square of the difference over that of what is expected (or over .05, where that is more: a
    derivative that cancels is not known better); NaN where anything is."""
    assert found.shape == expected.shape, f"{tuple(found.shape)} for {tuple(expected.shape)}"
    gap = (found.detach().double() - expected.detach().double()).square().mean().sqrt()
    return float(gap / expected.detach().double().square().mean().sqrt().clamp(min=0.05))


def near(
    found: Sequence[Tensor], expected: Sequence[Tensor], tolerance: Sequence[float] | float, what: Any = ""
) -> None:
    """Every tensor within its own relative root mean square, and no entry ten times farther off than that."""
    each = [tolerance] * len(found) if isinstance(tolerance, float) else list(tolerance)
    for place, (a, b, most) in enumerate(zip(found, expected, each, strict=True)):
        if b.numel() == 0:
            assert a.shape == b.shape
            continue
        error = ratio(a, b)
        assert error <= most, f"{what} [{place}]: {error:.3g} > {most:.3g}"
        worst = float((a.detach().double() - b.detach().double()).abs().max())
        size = max(float(b.detach().abs().max()), 0.1)
        assert worst <= 10 * most * size, f"{what} [{place}]: worst {worst:.3g} of {size:.3g}"
