"""Calls of `regard.attention(..., impl="triton")` for tests, and what they have in common."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import regard
from regard.triton.runtime import tiles

BATCH, HEADS, KV, T = 2, 2, 1, 21


IDS = torch.tensor([[4] * 5 + [2] * 9 + [5] + [4] * 6, [0] * 12 + [1] * 9])


def draw(
    queries: int = T, keys: int = T, dim: int = 8, value_dim: int | None = None, *, batch: int = BATCH,
    heads: int = HEADS, kv: int = KV, seed: int = 0, dtype: torch.dtype = torch.float32, grad: bool = True,
) -> list[Tensor]:  # fmt: skip
    """Query, key and value; scores have a deviation of about 2, so that compact rules leave many keys out."""
    make = torch.Generator().manual_seed(seed)
    sizes = ((batch, heads, queries, dim), (batch, kv, keys, dim), (batch, kv, keys, value_dim or dim))
    found = [torch.randn(*size, generator=make) * spread for size, spread in zip(sizes, (2.0, 1.0, 1.0), strict=True)]
    return [x.to(dtype).requires_grad_(grad) for x in found]


def triton(leaves: list[Tensor], spec: str, **call: Any) -> Any:
    return regard.attention(*leaves, spec, impl="triton", enable_gqa=True, **call)


def weight_of(out: Tensor, seed: int = 9) -> Tensor:
    """What the output is multiplied with to make a loss."""
    return torch.randn(out.shape, generator=torch.Generator().manual_seed(seed)).to(out.dtype)


def some(names: Any, quick: Any) -> list[Any]:
    """All of them, of which those that are not quick are left to `make test-all`."""
    return [x if x in quick else pytest.param(x, marks=pytest.mark.slow) for x in names]


def pairs(names: Any, quick: Any) -> list[Any]:
    """The same of tuples, whose parts are arguments of their own."""
    return [pytest.param(*x, marks=[] if x in quick else [pytest.mark.slow]) for x in names]


def both(leaves: list[Tensor], spec: str, weight: Tensor, **call: Any) -> list[Tensor]:
    """Output and gradients in small tiles."""
    leaves = [x.detach().requires_grad_() for x in leaves]
    with tiles.forced(rows=16, keys=16):
        out = triton(leaves, spec, **call)
        return [out.detach(), *torch.autograd.grad((out * weight).sum(), leaves)]


def far(x: Tensor, axis: int) -> Tensor:
    """The same numbers with steps of 2^31 and more elements along an axis, in memory that is not touched elsewhere."""
    stride = list(torch.empty(x.shape).stride())
    stride[axis] = 2**31 + 16
    found = torch.empty_strided(x.shape, stride, dtype=x.dtype)
    return found.copy_(x)
