"""Measure the largest errors against independent references: `python benchmarks/accuracy.py`. Needs the `dev` extra."""

import numpy as np
import torch
from statsmodels.nonparametric.kernel_regression import KernelReg

import regard

LENGTHS = (1, 2, 17, 512, 8192)
ALPHAS = (1.1, 4 / 3, 1.5, 1.75, 2.0, 3.0)


def bisected(z: np.ndarray, alpha: float) -> np.ndarray:
    """entmax of a row by 200 bisections in extended precision."""
    x = z.astype(np.longdouble) * (alpha - 1)
    power = 1 / np.longdouble(alpha - 1)
    low, high = x.max() - 1, x.max()
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if (np.maximum(x - middle, 0) ** power).sum() >= 1 else (low, middle)
    p = np.maximum(x - low, 0) ** power
    return p / p.sum()


def entmax_errors(dtype: torch.dtype, alphas: tuple[float, ...]) -> tuple[float, float]:
    """(largest error of a weight, largest distance of a row's sum from 1)."""
    generator = torch.Generator().manual_seed(0)
    error = total = 0.0
    for alpha in alphas:
        for length in LENGTHS:
            for spread in (0.1, 1.0, 4.0):
                z = torch.randn(length, generator=generator, dtype=torch.float64).mul(spread).to(dtype)
                p = regard.entmax(z, alpha).double().numpy()
                error = max(error, float(np.abs(p - bisected(z.double().numpy(), alpha)).max()))
                total = max(total, abs(float(p.sum()) - 1))
    return error, total


def statsmodels_error() -> float:
    """Gaussian local constant and local linear regression in one dimension (ridge 0)."""
    rng = np.random.default_rng(0)
    x, y, at = rng.normal(size=80), rng.normal(size=80), rng.normal(size=11)
    worst = 0.0
    for kind, spec in (
        ("lc", "gaussian*fixed(h=0.7)*euclidean"),
        ("ll", "gaussian*fixed(h=0.7)*euclidean*linear(ridge=0)"),
    ):
        expected = KernelReg(y, x, "c", reg_type=kind, bw=[0.7]).fit(at)[0]
        query, key, value = (torch.from_numpy(a)[None, None, :, None] for a in (at, x, y))
        found = regard.attention(query, key, value, spec)[0, 0, :, 0].numpy()
        worst = max(worst, float(np.abs(found - expected).max()))
    return worst


if __name__ == "__main__":
    for name, dtype, alphas in (
        ("float64, all alphas", torch.float64, ALPHAS),
        ("float32, alpha <= 2", torch.float32, ALPHAS[:-1]),
        ("float32, alpha = 3", torch.float32, ALPHAS[-1:]),
        ("float32, alpha = 5", torch.float32, (5.0,)),
    ):
        error, total = entmax_errors(dtype, alphas)
        print(f"entmax {name}: weight {error:.1e}, sum {total:.1e}")
    print(f"statsmodels, local constant and linear: {statsmodels_error():.1e}")
