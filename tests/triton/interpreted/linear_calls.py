"""Calls of `regard.local_linear_attention(..., impl="triton")` for tests, and what they have in common."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import regard
from regard.triton.runtime import tiles

BATCH, HEADS, KV, T = 2, 2, 1, 19


IDS = torch.tensor([[4] * 5 + [2] * 7 + [5] + [4] * 6, [0] * 10 + [1] * 9])


def draw(
    queries: int = T, keys: int = T, dim: int = 6, value_dim: int | None = None, *, batch: int = BATCH,
    heads: int = HEADS, kv: int = KV, seed: int = 0, dtype: torch.dtype = torch.float32, grad: bool = True,
) -> list[Tensor]:  # fmt: skip
    make = torch.Generator().manual_seed(seed)
    sizes = ((batch, heads, queries, dim), (batch, kv, keys, dim), (batch, kv, keys, value_dim or dim))
    return [torch.randn(*size, generator=make).to(dtype).requires_grad_(grad) for size in sizes]


def triton(leaves: list[Tensor], **call: Any) -> Any:
    return regard.local_linear_attention(*leaves, impl="triton", enable_gqa=True, **call)


def weight_of(out: Tensor, seed: int = 9) -> Tensor:
    return torch.randn(out.shape, generator=torch.Generator().manual_seed(seed)).to(out.dtype)


def wide(leaves: list[Tensor]) -> list[Tensor]:
    return [x.detach().double().requires_grad_() for x in leaves]


def both(leaves: list[Tensor], weight: Tensor, **call: Any) -> list[Tensor]:
    """Output and gradients in small tiles."""
    leaves = [x.detach().requires_grad_() for x in leaves]
    with tiles.forced(rows=16, keys=16):
        out = triton(leaves, **call)
        return [out.detach(), *torch.autograd.grad((out * weight).sum(), leaves)]


def far(x: Tensor, axis: int) -> Tensor:
    """The same numbers with steps of 2^31 and more elements along an axis, in memory that is not touched elsewhere."""
    stride = list(torch.empty(x.shape).stride())
    stride[axis] = 2**31 + 16
    return torch.empty_strided(x.shape, stride, dtype=x.dtype).copy_(x)
