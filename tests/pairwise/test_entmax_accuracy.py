"""entmax against bisection in extended precision: float64, float32, half precision, large shifts, long rows."""

from __future__ import annotations

import numpy as np
import oracles
import pytest
import torch

import regard

ALPHAS = (1.1, 4 / 3, 1.5, 1.75, 2.0, 3.0)
LENGTHS = (1, 2, 17, 512, 8192)
SPREADS = (0.1, 1.0, 4.0)


def rows(length: int, spread: float, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Normal scores [rows, length]; one row where rows are long, since the oracle is slow."""
    generator = torch.Generator().manual_seed(length + int(10 * spread))
    count = 1 if length > 1000 else 3
    return (torch.randn(count, length, generator=generator, dtype=torch.float64) * spread).to(dtype)


def error(p: torch.Tensor, expected: np.ndarray) -> float:
    return float(np.abs(p.double().numpy() - expected).max())


@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize("length", LENGTHS)
def test_float64_equals_bisection(alpha: float, length: int) -> None:
    for spread in SPREADS if length < 8192 else (1.0,):
        z = rows(length, spread)
        expected = oracles.entmax_rows(z.numpy(), alpha)
        for given in (alpha, torch.tensor(alpha, dtype=torch.float64)):  # Newton; bracketed
            p = regard.entmax(z, given)
            assert error(p, expected) <= 1e-12
            assert max(abs(oracles.fsum(row) - 1) for row in p) <= 1e-14


@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize("length", LENGTHS)
def test_float32_equals_bisection(alpha: float, length: int) -> None:
    # Above alpha = 2 the power 1/(alpha - 1) < 1 turns rounding at the threshold into its square root.
    limit = 5e-7 if alpha <= 2 else 5e-4
    for spread in SPREADS if length < 8192 else (1.0,):
        z = rows(length, spread, torch.float32)
        expected = oracles.entmax_rows(z.numpy(), alpha, np.float64)
        for given in (alpha, torch.tensor(alpha)):
            p = regard.entmax(z, given)
            assert p.dtype == torch.float32
            assert error(p, expected) <= limit
            assert max(abs(oracles.fsum(row) - 1) for row in p) <= 2e-6


@pytest.mark.parametrize("alpha", [1.1, 1.5, 2.0, 3.0])
def test_long_rows(alpha: float) -> None:
    z = torch.randn(2, 65536, generator=torch.Generator().manual_seed(0))
    for scores in (z, z * 0.1):
        p = regard.entmax(scores, alpha)
        assert max(abs(oracles.fsum(row) - 1) for row in p) <= 2e-6
        assert bool((p >= 0).all())
    expected = oracles.entmax_row(z[0].numpy(), alpha, wide=np.float64)[0]
    assert error(regard.entmax(z[0], alpha), expected) <= (5e-7 if alpha <= 2 else 5e-4)


NORMALISERS = {
    "entmax-1.1": lambda z: regard.entmax(z, 1.1),
    "entmax-4/3": lambda z: regard.entmax(z, 4 / 3),
    "entmax-1.5": lambda z: regard.entmax(z, 1.5),
    "entmax-3": lambda z: regard.entmax(z, 3.0),
    "entmax-tensor": lambda z: regard.entmax(z, torch.tensor(1.5)),
    "softmax": lambda z: regard.entmax(z, 1.0),
    "sparsemax": regard.sparsemax,
    "relumax": regard.relumax,
    "topk-softmax": lambda z: regard.topk_softmax(z, 7),
    "topk-uniform": lambda z: regard.topk_uniform(z, 7),
}


def best7(z: np.ndarray) -> np.ndarray:
    return np.isin(np.arange(len(z)), oracles.order(z)[:7])


ORACLES = {
    "entmax-1.1": lambda z: oracles.entmax_row(z, 1.1, wide=np.float64)[0],
    "entmax-4/3": lambda z: oracles.entmax_row(z, 4 / 3, wide=np.float64)[0],
    "entmax-1.5": lambda z: oracles.entmax_row(z, 1.5, wide=np.float64)[0],
    "entmax-3": lambda z: oracles.entmax_row(z, 3.0, wide=np.float64)[0],
    "entmax-tensor": lambda z: oracles.entmax_row(z, 1.5, wide=np.float64)[0],
    "softmax": oracles.softmax,
    "sparsemax": lambda z: oracles.entmax_row(z, 2.0, wide=np.float64)[0],
    "relumax": lambda z: oracles.rectified(z, z.max() - 1, 1),
    "topk-softmax": lambda z: oracles.shares(np.where(best7(z), np.exp(z - z.max()), 0)),
    "topk-uniform": lambda z: best7(z) / 7,
}


@pytest.mark.parametrize("name", NORMALISERS)
@pytest.mark.parametrize(("dtype", "shift"), [(torch.bfloat16, 1e4), (torch.float16, 6e4)])
def test_half_precision_with_large_shifts(name: str, dtype: torch.dtype, shift: float) -> None:
    z = torch.randn(4, 512, generator=torch.Generator().manual_seed(1))
    for scores in (z, z + shift, z - shift, torch.cat([z, z + shift], -1)):
        scores = scores.to(dtype)
        assert bool(torch.isfinite(scores).all())
        p = NORMALISERS[name](scores)
        assert p.dtype == dtype
        assert bool(torch.isfinite(p).all())
        assert float((p.double().sum(-1) - 1).abs().max()) <= 4e-3
        # Computed in float32 inside: exact weights rounded once to the output dtype, and float32's own error.
        exact = np.array([ORACLES[name](row) for row in scores.double().numpy()]).astype(float)
        slack = 1e-4 if name == "entmax-3" else 1e-6
        assert np.all(np.abs(p.double().numpy() - exact) <= 0.51 * torch.finfo(dtype).eps * exact + slack)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_long_rows(dtype: torch.dtype) -> None:
    z = torch.randn(1, 65536, generator=torch.Generator().manual_seed(2)).to(dtype)
    for name, call in NORMALISERS.items():
        p = call(z)
        assert bool(torch.isfinite(p).all()), name
        # float16 cannot hold softmax weights below 6e-8: allow half a step of its subnormals a key.
        slack = 65536 * 3e-8 if dtype == torch.float16 and name in ("softmax", "entmax-1.1") else 0.0
        assert abs(float(p.double().sum()) - 1) <= 4e-3 + slack, name


def test_float32_shift_invariance() -> None:
    # Distances to the best score are exact for these numbers, so a shift changes nothing at all.
    z = torch.randint(-64, 64, (8, 100), generator=torch.Generator().manual_seed(3)).float() / 16
    for name, call in NORMALISERS.items():
        for shift in (1e4, -1e4):
            assert torch.equal(call(z + shift), call(z)), name


@pytest.mark.parametrize("length", [2, 64, 512, 8192])
def test_alpha_one_is_softmax(length: int) -> None:
    z = rows(length, 1.0)
    for alpha in (1, 1.0):
        assert error(regard.entmax(z, alpha), oracles.softmax(z.numpy())) <= 1e-15


@pytest.mark.parametrize("n", [10, 100, 1000])
@pytest.mark.parametrize("length", [2, 4, 8, 16])
def test_entmax_tends_to_softmax(n: int, length: int) -> None:
    z = rows(length, 1.0)
    p = regard.entmax(z, 1 + 1 / n).numpy()
    assert np.abs(p - oracles.softmax(z.numpy())).sum(-1).max() < 3 / n


@pytest.mark.parametrize("length", [2, 16, 64, 512, 8192])
def test_rate_at_which_entmax_tends_to_softmax(length: int) -> None:
    """n times the L1 distance tends to E_q |x^2 - E_q x^2| / 2 with q = softmax and x = -log q.

    From p = (1 - x'/n)^n, so log p = -x' - x'^2/(2n) + O(1/n^2). The rate grows with the entropy of the row.
    """
    z = rows(length, 1.0)
    q = oracles.softmax(z.numpy())
    square = np.log(q) ** 2
    rate = (q * np.abs(square - (q * square).sum(-1, keepdims=True))).sum(-1) / 2
    for n, slack in ((100, 0.3), (1000, 0.03)):
        distance = np.abs(regard.entmax(z, 1 + 1 / n).numpy() - q).sum(-1)
        np.testing.assert_allclose(n * distance, rate, rtol=slack)
