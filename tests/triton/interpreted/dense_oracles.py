"""Expected values of the kernels in float64, by the oracles that the other tests use too, and how results are compared.

Legend: B batch, H query heads (Hkv key heads), Tq queries, Tk keys; z scores, `seen` boolean, both [B, H, Tq, Tk].
"""

from collections.abc import Sequence
from functools import cache
from typing import Any

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
NUMBERS = {"anchored": "margin", "fixed": "bias"}
"""The number of a rule that may be given for every row."""


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
    number: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Return sum_j p_ij v_j. `number` [B, H, Tq] replaces the number of the rule, if it has one."""
    s = choices(text)
    numbers = {NUMBERS[s.rule]: number} if number is not None and s.rule in NUMBERS else {}
    return oracle.attention(s, q, k, v, seen, scale, numbers)[0]


def local_linear(
    q: Tensor, k: Tensor, v: Tensor, seen: Tensor, ridge: float | Tensor, scale: float | None = None
) -> Tensor:
    """Return the local linear fit under softmax weights; ridge a number, [B, H, Tq] or [B, H, Tq, D]."""
    return oracle.dense(q, k, v, seen, ridge, scale=scale)


def with_probe(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, probe: Tensor, scale: float | None = None) -> Tensor:
    """Return Parallax, sum_j p_ij (1 - (k_j - mean_i) . r_i) v_j."""
    s = Choices("gaussian", "fixed", degree=1, solver="learned")
    return oracle.attention(s, q, k, v, seen, scale, {"probe": probe})[0]


def ratio(found: Tensor, expected: Tensor) -> float:
    """Return the root mean square of the difference over that of what is expected, or over 0.05 if that is more: a
    derivative that cancels is known no better. NaN if anything is NaN."""
    assert found.shape == expected.shape, f"{tuple(found.shape)} for {tuple(expected.shape)}"
    gap = (found.detach().double() - expected.detach().double()).square().mean().sqrt()
    return float(gap / expected.detach().double().square().mean().sqrt().clamp(min=0.05))


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
