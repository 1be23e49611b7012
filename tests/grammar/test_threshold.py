"""The threshold search: how many Newton steps it needs, and that it says so when they do not suffice."""

from functools import cache

import numpy as np
import oracles
import pytest
import torch
from torch import Tensor

import regard
from regard.grammar import Status, threshold

LENGTHS = (1, 2, 17, 512, 8192, 65536)
SPREADS = (0.02, 0.1, 1.0, 4.0)


def distances(length: int, spread: float) -> Tensor:
    """d = max z - z of normal scores [1, length]."""
    z = torch.randn(1, length, generator=torch.Generator().manual_seed(length), dtype=torch.float64) * spread
    return z.max() - z


@cache
def peak(length: int, spread: float, r: float) -> float:
    """b with sum [b - d/r]_+^r = 1, by bisection in extended precision."""
    z = -distances(length, spread)[0].numpy()  # best score 0, so that tau = -b
    return -float(oracles.entmax_row(z, 1 + 1 / r, steps=90)[1])


@pytest.mark.parametrize(("r", "steps"), [(2.0, 8), (3.0, 8), (1.0, 16)])
@pytest.mark.parametrize("length", LENGTHS)
def test_newton_steps(monkeypatch: pytest.MonkeyPatch, r: float, steps: int, length: int) -> None:
    """1e-7 within 8 steps for r = 2 and 3, within 16 for r = 1, up to 65536 keys."""
    monkeypatch.setattr(threshold, "NEWTON_STEPS", steps)
    for spread in SPREADS if length < 65536 else (0.1, 1.0):
        d = distances(length, spread)
        b, _ = threshold.solve_peak(d, r)
        norm = float((np.maximum(float(b) - d.numpy() / r, 0) ** r).sum() ** (1 / r))
        assert abs(norm - 1) <= 1e-7
        assert abs(float(b) - peak(length, spread, r)) <= 1e-7


@pytest.mark.parametrize("r", [0.2, 0.5, 0.9, 1.0, 1.5, 2.0, 3.0, 10.0])
@pytest.mark.parametrize("fast", [False, True])
def test_the_search_converges_to_rounding(r: float, fast: bool) -> None:
    """By 16 steps of Newton's method, or by bisection for r < 1."""
    for length in (1, 2, 17, 512, 8192):
        for spread in SPREADS if length < 8192 else (0.1,):
            d = distances(length, spread)
            b, converged = threshold.solve_peak(d, r, fast=fast)
            assert bool(converged.all())
            assert abs(float(b) - peak(length, spread, r)) <= 4e-16 * (4 if r >= 1 else 1)


def test_a_tensor_of_powers() -> None:
    powers = [0.3, 0.8, 1.0, 2.0, 5.0, 40.0]
    d = distances(100, 1.0).expand(len(powers), 100)
    b, converged = threshold.solve_peak(d, torch.tensor(powers, dtype=torch.float64)[:, None])
    assert bool(converged.all())
    np.testing.assert_allclose(b[:, 0].numpy(), [peak(100, 1.0, r) for r in powers], rtol=0, atol=1e-15)


def staircase() -> np.ndarray:
    """Scores on which every Newton step for sparsemax drops one block of keys and no more.

    From a support of n keys with peak b_n, half as many keys again sit at distance b_n + e: with them the step
    lands at b_n + e/3, which drops just them, if the e of the block before is less than half of this one.
    """
    d = np.zeros(2)
    gap = 1e-7
    while gap < 0.45:
        b = (1 + d.sum()) / len(d)
        block = max(len(d) // 2, 1)
        d = np.concatenate([d, np.full(block, b + gap)])
        gap *= 2.05 * len(d) / (3 * block)
    return -d


def test_a_row_on_which_sixteen_steps_do_not_suffice() -> None:
    row = staircase()
    assert row.min() > -1  # every key is a candidate at first
    assert len(row) <= 65536
    z = torch.from_numpy(row)
    exact, tau = oracles.entmax_row(row, 2.0)
    np.testing.assert_allclose(exact[:2], 0.5, rtol=0, atol=1e-6)

    one = torch.ones(1, 1, 1, 1, dtype=torch.float64)
    key = z[None, None, :, None]
    value = torch.ones_like(key)
    found = {
        impl: regard.attention(one, key, value, "sparsemax", scale=1.0, impl=impl, return_diagnostics=True)
        for impl in ("reference", "blocked")
    }
    out, seen = found["reference"]
    assert seen.status.flatten().tolist() == [int(Status.UNCONVERGED)]
    assert abs(float(out) - 1) <= 1e-14  # the weights still sum to one
    # The fast form goes on until it has converged.
    assert found["blocked"][1].status.flatten().tolist() == [int(Status.OK)]
    np.testing.assert_allclose(float(found["blocked"][1].tau), float(tau), rtol=0, atol=1e-15)


def test_converged_rows_stay_as_they_are() -> None:
    """A row's answer does not depend on the rows solved with it, to the last bit."""
    rows = torch.cat([distances(300, s) for s in SPREADS])
    for r in (0.5, 1.0, 2.0, 3.0, 4.7):
        for fast in (False, True):
            together = threshold.solve_peak(rows, r, fast=fast)[0]
            apart = torch.cat([threshold.solve_peak(row[None], r, fast=fast)[0] for row in rows])
            assert torch.equal(together, apart)


@pytest.mark.parametrize("alpha", [1.1, 4 / 3, 1.5, 1.75, 2.0, 3.0])
def test_no_false_alarms_in_float32(alpha: float) -> None:
    for length in (1, 2, 17, 512, 8192):
        for spread in SPREADS:
            d = distances(length, spread).float()
            for fast in (False, True):
                assert bool(threshold.solve_peak(d, 1 / (alpha - 1), fast=fast)[1].all())


@pytest.mark.parametrize("r", [1.0, 2.0, 3.0, 6.0])
def test_never_unconverged_in_silence(monkeypatch: pytest.MonkeyPatch, r: float) -> None:
    """However few steps there are, an answer that is off by more than rounding says so."""
    said = set()
    for length, spread in ((17, 1.0), (512, 0.1), (512, 4.0), (8192, 1.0)):
        d = distances(length, spread)
        for steps in range(1, 17):
            monkeypatch.setattr(threshold, "NEWTON_STEPS", steps)
            b, converged = threshold.solve_peak(d, r)
            off = abs(float(b) - peak(length, spread, r)) > 1e-12
            assert not (off and bool(converged))
            said.add(bool(converged))
    assert said == {True, False}
    monkeypatch.setattr(threshold, "BISECTIONS", 10)
    assert not bool(threshold.solve_peak(distances(512, 1.0), 0.5)[1])
