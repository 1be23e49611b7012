"""The dense forms that benchmarks/gpu.py checks kernels against, and the errors of sums of moments."""

from typing import Any

import pytest
import torch
from contracts import oracle
from regression import draw, lower

KINDS = {
    "softmax": "softmax", "adaptive 1": "sparsemax", "adaptive 2": "biweight", "adaptive 3": "triweight",
    "anchored": "relumax", "fixed": "normrelu",
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_the_dense_weights_and_their_gradients(module: Any, kind: str) -> None:
    generator = torch.Generator().manual_seed(2)
    z = torch.randn(2, 1, 6, 6, generator=generator, dtype=torch.float64).mul_(2).requires_grad_()
    g = torch.randn(2, 1, 6, 6, generator=generator, dtype=torch.float64)
    found = module("gpu_dense").weights(kind, z, lower(6))
    expected = oracle.weights(oracle.PRESETS[KINDS[kind]], z, lower(6).expand(z.shape))
    torch.testing.assert_close(found, expected, atol=1e-9, rtol=0)
    grads = [torch.autograd.grad((p * g).sum(), z)[0] for p in (found, expected)]
    torch.testing.assert_close(*grads, atol=1e-7, rtol=0)
    assert not module("gpu_dense").weights("softmax", z, torch.zeros(6, 6, dtype=torch.bool)).any()


def test_the_dense_local_linear_form_is_a_weighted_ridge_regression(module: Any) -> None:
    q, k, v = draw(1, 1, 7, 3, seed=5)
    found = module("gpu_dense").local_linear(q, k, v, lower(7), 0.3)
    torch.testing.assert_close(found, oracle.dense(q, k, v, lower(7), 0.3), atol=1e-10, rtol=0)


def test_the_inputs_have_weight_in_about_the_blocks_that_are_asked_for(module: Any) -> None:
    part, dense = module("gpu_compact"), module("gpu_dense")
    for share in (0.3, 0.4, 0.6, 1.0):
        q, k = part.inputs(module("gpu_measure").Bench(True), 1024, 64, share)[:2]
        for kind in ("adaptive 2", "anchored"):
            assert dense.live_share(q, k, kind, 16, rows=64) == pytest.approx(share, abs=0.07)


def test_the_share_of_live_blocks_by_hand(module: Any) -> None:
    """Blocks of two queries score high with their own keys alone: of 1 + 2 + 3 + 4 visible blocks four are live."""
    q = torch.eye(4).repeat_interleave(2, 0)[None, None] * 8
    assert module("gpu_dense").live_share(q, q, "adaptive 2", 2) == pytest.approx(0.4)


def test_windows_and_strict_order_of_the_dense_forms(module: Any) -> None:
    seen = module("gpu_dense").causal(4, 4, torch.device("cpu"), window=2, strict=True)
    assert seen.int().tolist() == [[0, 0, 0, 0], [1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 1, 0]]
    assert module("gpu_dense").causal(2, 4, torch.device("cpu")).int().tolist() == [[1, 1, 1, 0], [1, 1, 1, 1]]


def test_sums_of_moments_need_two_terms(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    moments = module("gpu_moments")
    monkeypatch.setattr(moments, "KEYS", 512)
    monkeypatch.setattr(moments, "DRAWS", 1)
    found = moments.errors("normal around a mean of deviation 3")
    assert found["two terms"] < 1e-3 < 1e-2 < found["one term"]
    assert found["two terms, centred by tile"] < 1e-3
    assert 1e-3 < found["rounded output"] < 4e-3
