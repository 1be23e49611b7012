"""Calls with `impl="triton"` of attention at degree 0 and 1, and helpers that their tests share."""

from typing import Any

import pytest
import torch
from dense_oracles import LINEAR, attend, near, seen_by
from torch import Tensor

import regard
from regard.triton.runtime import tiles

BATCH, HEADS, KV, T = 2, 2, 1, 21
IDS = torch.tensor([[4] * 5 + [2] * 9 + [5] + [4] * 6, [0] * 12 + [1] * 9])
KEEP = torch.rand(BATCH, 1, 1, T, generator=torch.Generator().manual_seed(5)) > 0.4

CALLS: dict[str, tuple[int, int, dict[str, Any]]] = {
    "all": (T, T, {}),
    "causal": (T, T, {"is_causal": True}),
    "strict": (T, T, {"exclude_self": True}),
    "window": (T, T, {"is_causal": True, "window": 6}),
    "strict window": (T, T, {"exclude_self": True, "window": 12}),
    "both sides": (T, T, {"window": 5}),
    "segments": (T, T, {"segment_ids": IDS, "is_causal": True}),
    "segments, both sides": (T, T, {"segment_ids": IDS[:1]}),
    "mask": (T, T, {"attn_mask": KEEP, "is_causal": True}),
    "mask of heads": (T, T, {"attn_mask": KEEP.expand(BATCH, HEADS, 1, T) ^ torch.tensor([[[[True]], [[False]]]])}),
    "fewer queries": (11, T, {"is_causal": True}),
    "more queries": (T, 17, {"is_causal": True}),
    "an offset": (17, T, {"is_causal": True, "query_offset": 7, "window": 9}),
    "offsets": (17, T, {"is_causal": True, "query_offset": torch.tensor([15, -6])}),
    "offsets, both sides": (17, T, {"window": 8, "query_offset": torch.tensor([-20, 12]), "attn_mask": KEEP}),
}
"""(queries, keys, arguments of the call): every way to say which pairs are visible."""

WAYS: dict[str, dict[str, Any]] = {
    "all": {},
    "window": {"window": 30, "is_causal": True},
    "offsets": {"query_offset": torch.tensor([50, -1]), "is_causal": True},
}
"""Calls of one query with 70 keys."""
WIDTHS = [(1, 1), (16, 40), (40, 16), (64, 64), (100, 3), (128, 100), (256, 128), (64, 256)]

DEGREE_1: dict[str, dict[str, Any]] = {
    "local-linear": {},
    "solved": {"ridge": 0.05},
    "loosely": {"ridge": 0.05, "solver": "cg", "tol": 1e-2},
    "learned": {"solver": "learned"},
}
"""Names of calls of `regard.local_linear_attention`; "learned" takes a probe, which may be a fourth leaf."""


def draw(
    queries: int = T, keys: int = T, dim: int = 8, value_dim: int | None = None, *, batch: int = BATCH,
    heads: int = HEADS, kv: int = KV, seed: int = 0, dtype: torch.dtype = torch.float32, grad: bool = True,
    spread: float = 2.0, probe: bool = False,
) -> list[Tensor]:  # fmt: skip
    """Query, key and value, and a probe if asked. With the default spread compact rules leave many keys out."""
    make = torch.Generator().manual_seed(seed)
    sizes = [(batch, heads, queries, dim), (batch, kv, keys, dim), (batch, kv, keys, value_dim or dim)]
    found = [torch.randn(*size, generator=make) for size in [*sizes, sizes[0]][: 3 + probe]]
    found[0] *= spread
    return [x.to(dtype).requires_grad_(grad) for x in found]


def triton(leaves: list[Tensor], spec: str, /, **call: Any) -> Any:
    """Call `regard.attention`, or `regard.local_linear_attention` for a name in `DEGREE_1`."""
    q, k, v, *probe = leaves
    if spec in DEGREE_1:
        call = {**DEGREE_1[spec], **({"probe": probe[0]} if probe else {}), **call}
        return regard.local_linear_attention(q, k, v, impl="triton", enable_gqa=True, **call)
    params = {name: call.pop(name) for name in ("margin", "bias") if name in call}
    call = {"params": params, **call} if params else call
    return regard.attention(q, k, v, spec, impl="triton", enable_gqa=True, **call)


def weight_of(out: Tensor, seed: int = 9) -> Tensor:
    """Return fixed random weights for a loss that is linear in the output."""
    return torch.randn(out.shape, generator=torch.Generator().manual_seed(seed)).to(out.dtype)


def wide(leaves: list[Tensor]) -> list[Tensor]:
    return [x.detach().double().requires_grad_() for x in leaves]


def some(names: Any, quick: Any) -> list[Any]:
    """Mark all names slow that are not in `quick`."""
    return [x if x in quick else pytest.param(x, marks=pytest.mark.slow) for x in names]


def pairs(names: Any, quick: Any) -> list[Any]:
    """Mark all tuples slow that are not in `quick`; their parts are arguments of their own."""
    return [pytest.param(*x, marks=[] if x in quick else [pytest.mark.slow]) for x in names]


def both(leaves: list[Tensor], spec: str, weight: Tensor, **call: Any) -> list[Tensor]:
    """Return the output and the gradients of all leaves, computed in small tiles."""
    leaves = [x.detach().requires_grad_() for x in leaves]
    with tiles.forced(rows=16, keys=16):
        out = triton(leaves, spec, **call)
        return [out.detach(), *torch.autograd.grad((out * weight).sum(), leaves)]


def checked(
    leaves: list[Tensor], spec: str, most: tuple[float, float], numbers: dict[str, Any] | None = None, **call: Any
) -> None:
    """Compare output and gradients with the dense form. `numbers` are a scale and parameters of the spec."""
    numbers = numbers or {}
    tensors = {name: x for name, x in numbers.items() if isinstance(x, Tensor) and x.requires_grad}
    out = triton(leaves, spec, **numbers, **call)
    leaves = [*leaves, *tensors.values()]
    q, k, v, *rest = exact = wide(leaves)
    same = {name: x.double() if isinstance(x, Tensor) else x for name, x in numbers.items()}
    same |= dict(zip(tensors, rest, strict=True))
    expected = attend(q, k, v, seen_by(q, k, **call), LINEAR.get(spec, spec), **same)
    compared(out, expected, leaves, exact, most, (spec, numbers.keys(), call.keys()))


def compared(
    out: Tensor, expected: Tensor, leaves: list[Tensor], exact: list[Tensor], most: tuple[float, float], what: Any = ""
) -> None:
    """Compare the output and the gradients of all leaves with those of the float64 form."""
    weight = weight_of(out)
    more = {"allow_unused": True, "materialize_grads": True}
    found = torch.autograd.grad((out * weight).sum(), leaves, **more)
    wanted = torch.autograd.grad((expected * weight.double()).sum(), exact, **more)
    assert [x.dtype for x in (out, *found)] == [x.dtype for x in (leaves[0], *leaves)]
    near([out, *found], [expected, *wanted], (most[0], *[most[1]] * len(leaves)), what)


def far(x: Tensor, axis: int, step: int = 2**31 + 16) -> Tensor:
    """Copy a tensor to memory where steps along an axis are so many elements."""
    stride = list(torch.empty(x.shape).stride())
    stride[axis] = step
    return torch.empty_strided(x.shape, stride, dtype=x.dtype).copy_(x)


def uncopied(patch: pytest.MonkeyPatch) -> None:
    """Let kernels read the tensors of the call, not the copies that the check for non-finite numbers makes."""
    from regard.triton.attention import Triton

    patch.setattr(Triton, "clean", lambda self, *tensors: [(x, None) for x in tensors])
    patch.setattr(Triton, "seen_rows", lambda self, *given: None)
