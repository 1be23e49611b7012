"""Calls of `regard.fast_weight_memory(..., impl="triton")` for tests, and what they have in common."""

from __future__ import annotations

from typing import Any

import torch
from dense_oracles import Memory, stream
from torch import Tensor

import regard

CHUNK, T = 4, 10
"""Two writes, and two tokens that wait."""


def draw(
    batch: int = 1, tokens: int = T, heads: int = 1, n: int = 6, half: int = 3, width: int = 7, *, seed: int = 0,
    dtype: torch.dtype = torch.float32, grad: bool = True,
) -> list[Tensor]:  # fmt: skip
    """Query, value, gate, sub-keys and values."""
    make = torch.Generator().manual_seed(seed)
    normal = lambda *size: torch.randn(*size, generator=make)  # noqa: E731
    found = [
        normal(batch, tokens, heads, 2 * half).to(dtype),
        normal(batch, tokens, width).to(dtype),
        torch.rand(batch, tokens, generator=make).to(dtype),
        normal(heads, 2, n, half),
        normal(n * n, width),
    ]
    return [x.requires_grad_(grad) for x in found]


def triton(leaves: list[Tensor], **call: Any) -> tuple[Tensor, Any]:
    return regard.fast_weight_memory(*leaves, impl="triton", **{"top_k": 4, "chunk_size": CHUNK, **call})


def rule(step: str = "normalized", update: str = "entropy") -> regard.WriteRule:
    return regard.WriteRule(step, address_weight=0.5, key_update=update)  # type: ignore[arg-type]


def dense(leaves: list[Tensor], chunk: int = CHUNK, **how: Any) -> Tensor:
    """Every row of the batch with a memory of its own."""
    query, value, gate, keys, values = leaves
    rows = zip(query, value, gate, strict=True)
    return torch.stack([stream(Memory(keys, values, **{"address": 0.5, **how}), *row, chunk) for row in rows])


def weight_of(out: Tensor, seed: int = 9) -> Tensor:
    return torch.randn(out.shape, generator=torch.Generator().manual_seed(seed)).to(out.dtype)


def grads(loss: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    found = torch.autograd.grad(loss, leaves, retain_graph=True, allow_unused=True)
    return [torch.zeros_like(x) if g is None else g for g, x in zip(found, leaves, strict=True)]
