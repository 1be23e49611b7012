"""Calls of `regard.fast_weight_memory(..., impl="triton")` for tests, and what tests of its kernels have in common."""

from typing import Any

import torch
from attention_calls import weight_of as weight_of
from dense_fast_weights import Dense, stream
from store_programs import dense_write
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


def memory(keys: Tensor, values: Tensor, **how: Any) -> Dense:
    return Dense(keys, values, **{"k": 4, "address": 0.5, **how})


def dense(leaves: list[Tensor], chunk: int = CHUNK, **how: Any) -> Tensor:
    """Return what every row of the batch reads from a memory of its own."""
    *tokens, keys, values = leaves
    rows = zip(*(x.split(1) for x in tokens), strict=True)
    return torch.cat([stream(memory(keys, values, **how), *row, chunk) for row in rows])


def blend(read: Tensor, value: Tensor, gate: Tensor | None) -> Tensor:
    """What was read, mixed with the tokens' own values."""
    return read + value if gate is None else gate[..., None] * read + (1 - gate[..., None]) * value


def grads(loss: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    return list(torch.autograd.grad(loss, leaves, retain_graph=True, allow_unused=True, materialize_grads=True))


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def gap(found: Tensor, wanted: Tensor) -> float:
    """The largest error, for numbers of the size of the largest."""
    assert found.shape == wanted.shape
    assert found.isfinite().all()
    return float((found.double() - wanted).abs().max() / wanted.abs().max().clamp(min=1e-6))


def written_by_hand(table: Tensor, slots: Tensor, shares: Tensor, errors: Tensor, counted: Tensor) -> Tensor:
    """Return V_i - (1 / N_i) sum over entries of slot i of share e, in float64; what is not counted may be NaN."""
    shares, errors = (torch.where(counted[..., None], x, 0).double() for x in (shares, errors))
    return dense_write(table.double(), slots, shares, errors, counted)
