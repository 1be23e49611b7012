"""Expected values of the kernels in float64, by the oracles that the other tests use too, and how results are compared.

Legend: B batch, H query heads (Hkv key heads), Tq queries, Tk keys; z scores, `seen` boolean, both [B, H, Tq, Tk].
"""

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from contracts import oracle
from contracts.oracle import Choices
from contracts.oracle import visible as seen_pairs
from torch import Tensor

import regard

RULES = {
    "softmax": "softmax",
    "adaptive 1": "sparsemax",
    "adaptive 2": "biweight",
    "adaptive 3": "triweight",
    "anchored 1": "relumax",
    "anchored 2": "biweight*anchored(margin=1.5)",
    "anchored 3": "triweight*anchored(margin=2.5)",
    "fixed 1": "normrelu",
    "fixed 2": "biweight*fixed(bias=0.25,empty=zero)",
    "fixed 3": "triweight*fixed(bias=-0.5,empty=nearest)",
}
"""Short name to spec, for every rule that the kernels have."""
LINEAR = {"linear": "local-linear", "learned": "gaussian*fixed*linear(solver=learned)"}
"""Short name to spec, for local linear attention and Parallax."""


@cache
def choices(text: str) -> Choices:
    return oracle.read(regard.Spec.parse(text))


def seen_by(q: Tensor, k: Tensor, **call: Any) -> Tensor:
    """Return which pairs a call with these tensors and arguments sees."""
    return seen_pairs(*q.shape[:3], k.shape[2], **call)


def scores(q: Tensor, k: Tensor, scale: float | Tensor | None = None) -> Tensor:
    """Return z = scale q . k, with the key heads repeated."""
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return q @ k.mT * (scale[..., None] if isinstance(scale, Tensor) else scale)


def attend(
    q: Tensor, k: Tensor, v: Tensor, seen: Tensor, text: str, scale: float | Tensor | None = None,
    **numbers: float | Tensor,
) -> Tensor:  # fmt: skip
    """Return the output of a spec; `numbers` are its parameters: margin, bias, ridge or probe."""
    return oracle.attention(choices(text), q, k, v, seen, scale, numbers)[0]


def ratio(found: Tensor, expected: Tensor) -> float:
    """Return the root mean square of the difference over that of what is expected, or over 0.05 if that is more: a
    derivative that cancels is known no better. NaN if anything is NaN."""
    assert found.shape == expected.shape, f"{tuple(found.shape)} for {tuple(expected.shape)}"
    gap = (found.detach().double() - expected.detach().double()).square().mean().sqrt()
    return float(gap / expected.detach().double().square().mean().sqrt().clamp(min=0.05))


def equal(found: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    """Check that tensors are equal to the last bit."""
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)


def near(
    found: Sequence[Tensor], expected: Sequence[Tensor], tolerance: Sequence[float] | float, what: Any = ""
) -> None:
    """Check that every tensor is within its relative root mean square, and no entry ten times farther off."""
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
