"""The recurrences behind `regard.compat.fla`, one token after the other, in plain PyTorch. Imports nothing of regard.

Legend: q, k [B, T, H, K], v [B, T, HV, V], g [B, T, HV] or [B, T, HV, K], beta [B, T, HV], state [B, HV, K, V].
"""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from contracts import oracle
from torch import Tensor


def loop(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    beta: Tensor | None = None,
    scale: float | None = None,
    state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(outputs, last state) of the delta rule, without beta of linear attention."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    q, k = (x.repeat_interleave(v.shape[2] // x.shape[2], 2) for x in (q, k))
    s = q.new_zeros(q.shape[0], v.shape[2], q.shape[3], v.shape[3]) if state is None else state
    rows = []
    for t in range(q.shape[1]):
        if g is not None:
            fade = g[:, t].exp()
            s = s * (fade[..., None] if fade.dim() == 3 else fade[..., None, None])
        new = v[:, t]
        if beta is not None:
            new = beta[:, t, :, None] * (new - torch.einsum("bhkv,bhk->bhv", s, k[:, t]))
        s = s + torch.einsum("bhk,bhv->bhkv", k[:, t], new)
        rows.append(scale * torch.einsum("bhkv,bhk->bhv", s, q[:, t]))
    return torch.stack(rows, 1), s


def mesa(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, ridge: Tensor, kk: Tensor, kv: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """(outputs, last kk, last kv) of MesaNet by dense solves; ridge [H, K]."""
    rows = []
    for t in range(q.shape[1]):
        fade, left = g[:, t].exp()[..., None, None], beta[:, t, :, None, None] * k[:, t, :, :, None]
        kk, kv = fade * kk + left * k[:, t, :, None], fade * kv + left * v[:, t, :, None]
        inverse = torch.linalg.inv(kk + torch.diag_embed(ridge))
        rows.append((kv.mT @ inverse @ q[:, t, ..., None])[..., 0])
    return torch.stack(rows, 1), kk, kv


def parallax(q: Tensor, r: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
    """Softmax means plus the covariance of k and v under the same weights, applied to -r; H heads of keys serve all."""
    q, r, k, v = (x.transpose(1, 2) for x in (q, r, k, v))
    seen = oracle.visible(*q.shape[:3], k.shape[2], is_causal=True, window=window)
    choices = oracle.Choices("gaussian", "fixed", degree=1, solver="learned")
    return oracle.attention(choices, q, k, v, seen, None, {"probe": r})[0].transpose(1, 2)


def apart(run: Callable[..., Any], ends: list[int], states: list[Tensor], tokens: dict[str, Tensor]) -> list[Tensor]:
    """`run` of each sequence by itself: the outputs joined along T, and the states joined along N."""
    found = [
        run(**{name: x[:, a:b] for name, x in tokens.items()}, states=[state[i : i + 1] for state in states])
        for i, (a, b) in enumerate(pairwise(ends))
    ]
    return [torch.cat(parts, 0 if i else 1) for i, parts in enumerate(zip(*found, strict=True))]
