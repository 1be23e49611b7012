"""Memory of a forward and a backward pass, measured in a fresh process."""

import pytest
from peak import on_linux, peak

from .cases import PRESETS, SPECS

SCORES = (2048, 2048)  # 16 MiB
HEAD = (1, 1, 16384, 64)  # all pairs at once are 1024 MiB
HEADS = (1, 8, 8192, 64)  # 16 MiB; all pairs at once are 256 MiB a head
NORMALISERS = ("entmax(z, 1.5", "entmax(z, 3.0", "sparsemax(z", "relumax(z", "normrelu(z", "topk_softmax(z, 32")
ON_CPU = ("biweight", "sparsemax", "relumax", "topk-softmax", "biweight*nearest(k=32)")
VARIED = [
    "biweight*nearest(k=32)",
    "gaussian*nearest(k=32,gradient=soft)",
    "gaussian*nearest(k=32,gradient=straight-through)",
    "gaussian*anchored",
    "uniform*anchored",
    "polynomial(r=0.5)*adaptive",
    "polynomial(r=1.5)*adaptive",
]
DENSE = [n for n in PRESETS if SPECS.get(n) is not None and SPECS[n].degree == 0]


def attention(label: str, impl: str) -> str:
    return f"lambda q, k, v: regard.attention(q, k, v, '{label}', is_causal=True, impl='{impl}')"


def local_linear(spec: str) -> str:
    return f"lambda q, k, v: regard.local_linear_attention(q, k, v, spec='{spec}', tol=1e-3, is_causal=True)"


WITH_GRADIENTS = [
    *((f"lambda z: regard.{call}, impl='cpu')", SCORES, 2.6 * 16) for call in NORMALISERS),
    *((attention(label, "cpu"), HEAD, 64) for label in ON_CPU),
    *((local_linear(spec), HEADS, 12 * 16 + 64) for spec in ("softmax", "biweight")),
]


@on_linux
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("call", "shape", "most"), WITH_GRADIENTS)
def test_peak_memory(call: str, shape: tuple[int, ...], most: float) -> None:
    """MiB beyond the inputs and the upstream gradient; output and gradients are included."""
    pytest.importorskip("numba")
    assert 1 < peak(call, *shape)[0] <= most


def extra(label: str, impl: str, length: int) -> float:
    """MiB of a causal forward and backward pass of one float32 head of 64, beside inputs and gradients."""
    whole, gradients = peak(attention(label, impl), 1, 1, length, 64)
    return whole - gradients


@on_linux
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("label", "impl"), [*((name, "blocked") for name in (*DENSE, *VARIED)), ("softmax", "sdpa"), ("rbf", "sdpa")]
)
def test_16384_positions_within_64_mib(label: str, impl: str) -> None:
    assert extra(label, impl, 16384) <= 64


@on_linux
def test_the_measure_sees_all_pairs() -> None:
    """The reference at 2048 builds several tensors of 16 MiB: a measure that missed them would prove nothing."""
    assert extra("relumax", "reference", 2048) > 48
