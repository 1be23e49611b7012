"""Compare compact attention with AdaSplash (PyPI: adasplash), whose kernels run in Triton's interpreter here.

Version 1 alone: the kernels of version 2 get their block sizes from the autotuner, which the interpreter does not run.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import regard

adasplash = pytest.importorskip("adasplash", reason="adasplash is not installed: run `make test-peers`")
pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")]


@pytest.fixture(autouse=True)
def interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Interpret the kernels: AdaSplash imports their files at the first call."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")


def _compare(peer: Any, spec: str, causal: bool) -> None:
    draw = torch.Generator().manual_seed(0)
    inputs = [(2 * torch.randn(1, 2, 128, 32, generator=draw)).requires_grad_() for _ in range(3)]
    weight = torch.randn(1, 2, 128, 32, generator=draw)

    def run(call: Any) -> tuple[Tensor, ...]:
        out = call(*inputs)
        return out, *torch.autograd.grad((out * weight).sum(), inputs)

    expected = run(lambda *x: regard.attention(*x, spec, is_causal=causal))
    for found, wanted in zip(run(peer), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("alpha", [1.25, 1.5, 1.75])
def test_version_1(alpha: float, causal: bool) -> None:
    spec = f"polynomial(r={1 / (alpha - 1)})*adaptive"
    _compare(lambda q, k, v: adasplash.adasplash_no_block_mask(q, k, v, alpha=alpha, is_causal=causal), spec, causal)
