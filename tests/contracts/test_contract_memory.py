"""Memory beside inputs and gradients, measured in a fresh process."""

import pytest
from peak import on_linux, peak

from .cases import PRESETS, SPECS

LIMIT_MIB = 64


def extra(label: str, impl: str, length: int) -> float:
    """Return the MiB of one causal forward and backward pass of one head of 64 features, float32, beside its inputs and
    gradients."""
    call = f"lambda q, k, v: regard.attention(q, k, v, '{label}', is_causal=True, impl='{impl}')"
    whole, gradients = peak(call, 1, 1, length, 64)
    return whole - gradients


DENSE = [n for n in PRESETS if SPECS.get(n) is not None and SPECS[n].degree == 0]
VARIED = [
    "biweight*nearest(k=32)",
    "gaussian*nearest(k=32,gradient=soft)",
    "gaussian*nearest(k=32,gradient=straight-through)",
    "gaussian*anchored",
    "uniform*anchored",
    "polynomial(r=0.5)*adaptive",
    "polynomial(r=1.5)*adaptive",
]


@on_linux
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("label", "impl"), [*((name, "blocked") for name in (*DENSE, *VARIED)), ("softmax", "sdpa"), ("rbf", "sdpa")]
)
def test_16384_positions_within_64_mib(label: str, impl: str) -> None:
    assert extra(label, impl, 16384) <= LIMIT_MIB


@on_linux
def test_the_measure_sees_all_pairs() -> None:
    """The reference at 2048 builds several tensors of 16 MiB: a measure that missed them would prove nothing."""
    assert extra("relumax", "reference", 2048) > 48
