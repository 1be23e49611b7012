"""What a row reports about itself, against numbers worked out by hand."""

import math

import numpy as np
import pytest
import torch

import regard
from regard.grammar import Status

IMPLS = ["reference", "blocked"]


def report(z: list, spec: str, impl: str = "reference", scale: float | None = 1.0, **how) -> regard.Diagnostics:
    """Diagnostics of one row of scores; None hides a key."""
    row = torch.tensor([0.0 if x is None else x for x in z], dtype=torch.float64)
    mask = torch.tensor([x is not None for x in z])
    one = torch.ones(1, 1, 1, 1, dtype=torch.float64)
    key = row.view(1, 1, -1, 1)
    how = {"attn_mask": mask, "scale": scale, "impl": impl, "return_diagnostics": True, **how}
    return regard.attention(one, key, key, spec, **how)[1]


def numbers(found: regard.Diagnostics) -> tuple[float, float, float, float]:
    """(tau, bandwidth, support, effective sample size) of the only row."""
    return tuple(float(x) for x in (found.tau, found.bandwidth, found.support, found.effective_sample_size))


# z = (1, .5, -1, hidden). H = sqrt(2 (1 - theta)) at scale 1.
CASES = {
    # tau = theta = (1.5 - 1)/2 = .25; p = (.75, .25): 1/(.5625 + .0625) = 1.6
    "sparsemax": (0.25, math.sqrt(1.5), 2, 1.6),
    # theta = 1 - 1 = 0; p = (2/3, 1/3): 1/(5/9) = 1.8
    "relumax": (0.0, math.sqrt(2), 2, 1.8),
    # theta = -bias = -2; w = (3, 2.5, 1): 6.5^2 / 16.25 = 2.6
    "epanechnikov*fixed(bias=2)": (-2.0, math.sqrt(6), 3, 2.6),
    # theta = third score = -1; w = (2, 1.5): 3.5^2/6.25 = 1.96
    "epanechnikov*nearest(k=2)": (-1.0, 2.0, 2, 1.96),
    # k + 1 > 3 visible: theta = -1 - 1 = -2; w = (3, 2.5, 1)
    "epanechnikov*nearest(k=5)": (-2.0, math.sqrt(6), 3, 2.6),
    # the margin .4 leaves the best key alone; theta = .6
    "gaussian*anchored(margin=0.4)": (0.6, math.sqrt(0.8), 1, 1.0),
    # theta = 1 - 1.6 = -.6; two keys of equal weight
    "uniform*anchored(margin=1.6)": (-0.6, math.sqrt(3.2), 2, 2.0),
    # biweight: a1 - a2 = .25, a1^2 + a2^2 = 1; a2 = (sqrt(1.9375) - .25)/2, tau = .25 - a2
    "biweight": (
        0.25 - (math.sqrt(1.9375) - 0.25) / 2,
        math.sqrt(2 - 4 * (0.25 - (math.sqrt(1.9375) - 0.25) / 2)),
        2,
        1 / (((math.sqrt(1.9375) - 0.25) / 2) ** 4 + ((math.sqrt(1.9375) + 0.25) / 2) ** 4),
    ),
    # softmax has no edge: the Gaussian's standard deviation is 1/sqrt(scale) = 1
    "softmax": (-math.inf, 1.0, 3, (math.e + math.exp(0.5) + math.exp(-1)) ** 2 / (math.e**2 + math.e + math.exp(-2))),
    # top-k softmax: theta is the k-th score
    "gaussian*nearest(k=2)": (0.5, 1.0, 2, (math.e + math.exp(0.5)) ** 2 / (math.e**2 + math.e)),
    # linear sums reach everywhere; |w| = (1, .5, 1): 2.5^2/2.25
    "linear": (-math.inf, math.inf, 3, 6.25 / 2.25),
}


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("spec", CASES)
def test_by_hand(spec: str, impl: str) -> None:
    found = report([1.0, 0.5, -1.0, None], spec, impl)
    np.testing.assert_allclose(numbers(found), CASES[spec], rtol=1e-13, atol=1e-14)
    assert found.status.tolist() == [[[Status.OK]]]
    assert found.empty.tolist() == [[[False]]]
    assert found.fallback.tolist() == [[[False]]]
    assert found.status.dtype == torch.int32
    assert found.empty.dtype == found.fallback.dtype == torch.bool


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize(
    ("spec", "z", "support", "ess"),
    [
        ("normrelu", [-1.0, -2.0, None, -0.5], 3, 3.0),
        ("epanechnikov*fixed(empty=zero)", [-1.0, -2.0], 0, 0.0),
        ("epanechnikov*fixed(empty=nearest)", [-1.0, -2.0], 1, 1.0),
        ("epanechnikov*nearest(k=2)", [0.5, 0.5, 0.5], 2, 2.0),  # kept keys tie with the next
    ],
)
def test_fallbacks_are_counted(spec: str, z: list, support: int, ess: float, impl: str) -> None:
    found = report(z, spec, impl)
    assert found.fallback.tolist() == [[[True]]]
    assert found.empty.tolist() == [[[False]]]
    assert float(found.support) == support
    assert math.isclose(float(found.effective_sample_size), ess, rel_tol=1e-14)


@pytest.mark.parametrize("impl", IMPLS)
def test_bandwidth_follows_the_scale(impl: str) -> None:
    """Unit keys at similarities 1 and .5: sparsemax at scale 4 has z = (4, 2), theta = 3, theta_s = .75."""
    found = report([1.0, 0.5], "sparsemax", impl, scale=4.0)
    np.testing.assert_allclose(numbers(found), (3.0, math.sqrt(0.5), 1, 1.0), rtol=1e-14)
    found = report([1.0, 0.5], "softmax", impl, scale=4.0)
    assert float(found.bandwidth) == 0.5
    # A scale per row as a tensor says the same.
    one = torch.ones(1, 1, 2, 1, dtype=torch.float64)
    key = torch.tensor([1.0, 0.5], dtype=torch.float64).view(1, 1, 2, 1)
    scale = torch.tensor([4.0, 1.0], dtype=torch.float64)
    found = regard.attention(one, key, key, "sparsemax", scale=scale, impl=impl, return_diagnostics=True)[1]
    np.testing.assert_allclose(found.bandwidth.flatten().numpy(), [math.sqrt(0.5), math.sqrt(1.5)], rtol=1e-14)


@pytest.mark.parametrize("impl", IMPLS)
def test_tau_is_in_entmax_units(impl: str) -> None:
    """tau = theta / r, also where alpha is given per call: one key at z = .7 has tau = z/r - 1."""
    for params, r in (({"alpha": 1.25}, 4.0), ({"alpha": torch.tensor(1.25, dtype=torch.float64)}, 4.0), ({}, 2.0)):
        assert math.isclose(float(report([0.7], "biweight", impl, params=params).tau), 0.7 / r - 1, rel_tol=1e-13)


def test_asking_for_diagnostics_changes_nothing_and_they_have_no_gradient() -> None:
    q, k, v = (torch.randn(1, 2, n, 4, generator=torch.Generator().manual_seed(n)) for n in (5, 7, 7))
    for spec in ("biweight", "relumax", "normrelu", "linear", "topk-softmax"):
        for impl in IMPLS:
            plain = regard.attention(q, k, v, spec, impl=impl)
            out, found = regard.attention(q.requires_grad_(), k, v, spec, impl=impl, return_diagnostics=True)
            assert torch.equal(out, plain)
            assert out.requires_grad
            assert not any(x.requires_grad for x in vars(found).values() if isinstance(x, torch.Tensor))
            assert (found.weights is not None) == (impl == "reference")


@pytest.mark.parametrize("rule", ["adaptive", "anchored(margin=0.3)", "fixed(h=0.9)"])
@pytest.mark.parametrize("gamma", [0.05, 1.0, 10.0])
@pytest.mark.parametrize("r", [0.5, 1, 2, 3, 7.5])
def test_weights_on_the_unit_sphere_are_those_of_nadaraya_watson(r: float, gamma: float, rule: str) -> None:
    """[1 - |k_i - q|^2 / H^2]_+^r, normalised, at the bandwidth H that is reported; uniform where no key is inside."""
    q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in np.random.default_rng(1).normal(size=(2, 40, 6)))
    query, key = (torch.from_numpy(x)[None, None] for x in (q[:12], k))
    scale = None if "h=" in rule else 1 / gamma
    spec = f"polynomial(r={r})*{rule}*cosine(eps=0)"
    found = regard.attention(query, key, key, spec, scale=scale, impl="reference", return_diagnostics=True)[1]
    h, distance2 = found.bandwidth[0, 0, :, None].numpy(), ((k - q[:12, None]) ** 2).sum(-1)
    w = np.maximum(1 - distance2 / h**2, 0) ** r
    lone = w.sum(-1) == 0
    w[lone] = 1
    np.testing.assert_allclose(found.weights[0, 0].numpy(), w / w.sum(-1, keepdims=True), rtol=0, atol=1e-9)
    np.testing.assert_array_equal(found.fallback[0, 0].numpy(), lone)
    if scale is None:
        np.testing.assert_allclose(h, 0.9, rtol=1e-14)
