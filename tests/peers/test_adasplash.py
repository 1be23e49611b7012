"""Compare compact attention with AdaSplash (PyPI: adasplash), whose kernels run in Triton's interpreter.

Version 1 alone: the kernels of version 2 get their block sizes from the autotuner, which the interpreter does not run.

Triton reads TRITON_INTERPRET when it is imported, which other tests do before. So this file is also a program: in a
process of its own it writes what AdaSplash computes.
"""

import os
import sys
from collections.abc import Callable
from functools import partial

import pytest
import torch
from programs import python
from torch import Tensor

import regard

adasplash = pytest.importorskip("adasplash", reason="adasplash is not installed: run `make test-peers`")
pytestmark = pytest.mark.peers
CASES = [(alpha, causal) for alpha in (1.25, 1.5, 1.75) for causal in (False, True)]
Results = dict[tuple[float, bool], tuple[Tensor, ...]]


def _run(call: Callable[..., Tensor]) -> tuple[Tensor, ...]:
    """The output and the gradients of query, key and value."""
    draw = torch.Generator().manual_seed(0)
    inputs = [(2 * torch.randn(1, 2, 128, 32, generator=draw)).requires_grad_() for _ in range(3)]
    weight = torch.randn(1, 2, 128, 32, generator=draw)
    out = call(*inputs)
    return out.detach(), *torch.autograd.grad((out * weight).sum(), inputs)


def _write(path: str) -> None:
    peer = adasplash.adasplash_no_block_mask
    torch.save({case: _run(partial(peer, alpha=case[0], is_causal=case[1])) for case in CASES}, path)


@pytest.fixture(scope="module")
def computed(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """What AdaSplash computes in each case."""
    path = tmp_path_factory.mktemp("adasplash") / "results.pt"
    python("-W", "ignore", __file__, path, TRITON_INTERPRET="1", PYTHONPATH=os.pathsep.join(sys.path))
    found: Results = torch.load(path)
    return found


@pytest.mark.parametrize(("alpha", "causal"), CASES)
def test_version_1(alpha: float, causal: bool, computed: Results) -> None:
    spec = f"polynomial(r={1 / (alpha - 1)})*adaptive"
    expected = _run(lambda q, k, v: regard.attention(q, k, v, spec, is_causal=causal))
    for found, wanted in zip(computed[alpha, causal], expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-3)


if __name__ == "__main__":
    _write(sys.argv[1])
