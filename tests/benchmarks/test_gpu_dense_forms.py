"""The dense forms that benchmarks/gpu.py checks kernels against are what they should be."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from entmax import entmax15, entmax_bisect, sparsemax


@pytest.mark.parametrize(("kind", "wanted"), [
    ("softmax", lambda z: z.softmax(-1)),
    ("adaptive 1", lambda z: sparsemax(z, -1)),
    ("adaptive 2", lambda z: entmax15(z, -1)),
    ("adaptive 3", lambda z: entmax_bisect(z, 4 / 3, -1, n_iter=60)),
])  # fmt: skip
def test_the_dense_weights_and_their_gradients_are_those_of_the_package(
    module: Any, kind: str, wanted: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    generator = torch.Generator().manual_seed(2)
    z = torch.randn(2, 1, 6, 6, generator=generator, dtype=torch.float64).mul_(2).requires_grad_()
    g = torch.randn(2, 1, 6, 6, generator=generator, dtype=torch.float64)
    seen = torch.ones(6, 6, dtype=torch.bool).tril()
    found = module("gpu_dense").weights(kind, z, seen)
    own = torch.autograd.grad((found * g).sum(), z)[0]
    for i in range(6):
        row = z[:, :, i, : i + 1]
        p = wanted(row)
        torch.testing.assert_close(found[:, :, i, : i + 1], p, atol=1e-9, rtol=0)
        assert not found[:, :, i, i + 1 :].any()
        by_row = torch.autograd.grad((p * g[:, :, i, : i + 1]).sum(), z, retain_graph=True)[0]
        torch.testing.assert_close(own[:, :, i], by_row[:, :, i], atol=1e-7, rtol=0)


def test_the_other_dense_weights_by_hand(module: Any) -> None:
    z = torch.tensor([[2.0, 1.5, 0.0, 5.0], [-1.0, -2.0, 9.0, 9.0]], dtype=torch.float64)[None, None]
    seen = torch.tensor([[True, True, True, False], [True, True, False, False]])
    weights = module("gpu_dense").weights
    anchored = torch.tensor([[2 / 3, 1 / 3, 0, 0], [1, 0, 0, 0]], dtype=torch.float64)
    fixed = torch.tensor([[2 / 3.5, 1.5 / 3.5, 0, 0], [0.5, 0.5, 0, 0]], dtype=torch.float64)
    torch.testing.assert_close(weights("anchored", z, seen)[0, 0], anchored)
    torch.testing.assert_close(weights("fixed", z, seen)[0, 0], fixed)
    none = weights("softmax", z, torch.zeros(2, 4, dtype=torch.bool))
    assert torch.equal(none, torch.zeros_like(none))


def test_the_dense_local_linear_form_is_a_weighted_ridge_regression(module: Any) -> None:
    """Row by row: the intercept of min sum p |v - a - W (k - q)|^2 + ridge |W|^2, by the normal equations."""
    generator = torch.Generator().manual_seed(5)
    q, k, v = (torch.randn(1, 1, 7, 3, generator=generator, dtype=torch.float64) for _ in range(3))
    seen = module("gpu_dense").causal(7, 7, q.device)
    found = module("gpu_dense").local_linear(q, k, v, seen, 0.3)
    for i in range(7):
        p = (k[0, 0, : i + 1] @ q[0, 0, i] / math.sqrt(3)).softmax(0)
        design = torch.cat((torch.ones(i + 1, 1, dtype=torch.float64), k[0, 0, : i + 1] - q[0, 0, i]), 1)
        penalty = 0.3 * torch.diag(torch.tensor([0.0, 1, 1, 1], dtype=torch.float64))
        fit = torch.linalg.solve(design.T @ (p[:, None] * design) + penalty, design.T @ (p[:, None] * v[0, 0, : i + 1]))
        torch.testing.assert_close(found[0, 0, i], fit[0], atol=1e-10, rtol=0)


def test_the_inputs_have_weight_in_about_the_blocks_that_are_asked_for(module: Any) -> None:
    part, dense = module("gpu_compact"), module("gpu_dense")
    for share in (0.3, 0.4, 0.6, 1.0):
        q, k = part.inputs(module("gpu_measure").Bench(True), 1024, 64, share)[:2]
        for kind in ("adaptive 2", "anchored"):
            assert dense.live_share(q, k, kind, 16, rows=64) == pytest.approx(share, abs=0.07)


def test_the_share_of_live_blocks_by_hand(module: Any) -> None:
    """Scores of a block of two queries with its own keys are high, with all others low: of 1 + 2 + 3 + 4 visible
    blocks four are live."""
    q = torch.eye(4).repeat_interleave(2, 0)[None, None] * 8
    assert module("gpu_dense").live_share(q, q, "adaptive 2", 2) == pytest.approx(0.4)


def test_windows_and_strict_order_of_the_dense_forms(module: Any) -> None:
    seen = module("gpu_dense").causal(4, 4, torch.device("cpu"), window=2, strict=True)
    assert seen.int().tolist() == [[0, 0, 0, 0], [1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 1, 0]]
    assert module("gpu_dense").causal(2, 4, torch.device("cpu")).int().tolist() == [[1, 1, 1, 0], [1, 1, 1, 1]]
