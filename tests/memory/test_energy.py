"""Energies: values from the definitions, gradients by finite differences, and that no step raises them."""

import math

import numpy as np
import pytest
import torch
from dense_fast_weights import numbers as drawn
from mistakes import error_of, refuses
from oracles import entmax_rows
from torch import Tensor
from torch.nn.functional import normalize

from regard import AssociativeMemory
from regard.memory.associative import energies
from regard.memory.associative.energy import integral


def written(spec: str, keys: Tensor, scale: float | None = None) -> AssociativeMemory:
    memory = AssociativeMemory(spec, scale=scale)
    memory.write(keys)
    return memory


def tsallis_conjugate(z: np.ndarray, alpha: float) -> np.ndarray:
    """max over the simplex of p . z + sum (p - p^alpha) / (alpha (alpha - 1)), at the p of the bisection."""
    p = entmax_rows(z, alpha).astype(float)
    return (p * z).sum(-1) + (p - p**alpha).sum(-1) / (alpha * (alpha - 1))


WELLS = {  # spec: (scale, g of scores z = scale q.k and y = -scale |q - k|^2 / 2), as the module's docstring defines it
    "softmax": (2.0, lambda z, y: np.log(np.exp(z).sum(-1))),
    "rbf": (1.5, lambda z, y: np.log(np.exp(y).sum(-1))),
    "sparsemax": (1.2, lambda z, y: tsallis_conjugate(z, 2.0)),
    "biweight": (2.0, lambda z, y: tsallis_conjugate(z, 1.5)),
    "triweight": (2.0, lambda z, y: tsallis_conjugate(z, 4 / 3)),
    "biweight*adaptive*euclidean": (1.2, lambda z, y: tsallis_conjugate(y, 1.5)),
    "gaussian*nearest(k=3)": (2.0, lambda z, y: np.log(np.exp(np.sort(z, -1)[:, -3:]).sum(-1))),
    "uniform*nearest(k=3)": (2.0, lambda z, y: np.sort(z, -1)[:, -3:].mean(-1)),
    "linear": (0.7, lambda z, y: (z * z).sum(-1) / 2),
    "linear*fixed(bias=0.3)": (0.7, lambda z, y: ((z + 0.3) ** 2).sum(-1) / 2),
    "biweight*fixed(bias=0.5)*unnormalised": (0.5, lambda z, y: (np.maximum(z + 0.5, 0) ** 3).sum(-1) / 3),
    "uniform*fixed*unnormalised": (0.5, lambda z, y: np.maximum(z, 0).sum(-1)),
    "gaussian*fixed*unnormalised": (0.4, lambda z, y: np.exp(z).sum(-1)),
    "biweight*fixed(bias=4)*euclidean": (1.0, lambda z, y: (np.maximum(4 + y, 0) ** 3).sum(-1) / 3),
}
SPECS = {spec: scale for spec, (scale, _) in WELLS.items()}


def expected(spec: str, q: np.ndarray, k: np.ndarray) -> np.ndarray:
    scale, well = WELLS[spec]
    g = well(scale * q @ k.T, -scale * ((q[:, None] - k) ** 2).sum(-1) / 2) / scale
    return -g if spec == "rbf" or "euclidean" in spec else (q * q).sum(-1) / 2 - g


FLAT = ("biweight*fixed(bias=4)*euclidean",)  # mean shift: the step is not the negative gradient, but along it


@pytest.mark.parametrize("spec", SPECS)
def test_values_and_gradients(spec: str) -> None:
    k, q = drawn(9, 5), drawn(6, 5, seed=1)
    memory = written(spec, k, SPECS[spec])
    found = memory.energy(q)
    assert found.shape == (6,)
    assert np.abs(found.numpy() - expected(spec, q.numpy(), k.numpy())).max() < 1e-12

    moving = q.clone().requires_grad_()
    (grad,) = torch.autograd.grad(memory.energy(moving).sum(), moving)
    step, numeric = 1e-6, np.zeros((6, 5))
    for d in range(5):
        at = np.zeros(5)
        at[d] = step
        ahead, behind = (expected(spec, q.numpy() + sign * at, k.numpy()) for sign in (1, -1))
        numeric[:, d] = (ahead - behind) / (2 * step)
    assert np.abs(grad.numpy() - numeric).max() < 1e-6 * max(1, np.abs(numeric).max())
    if spec not in FLAT:
        assert (grad - (q - memory.read(q))).abs().max() < 1e-10 * max(1, np.abs(numeric).max())


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("seed", range(3))
def test_no_step_raises_the_energy(spec: str, seed: int) -> None:
    """On the dot product a step of length s lowers it by s^2 / 2 at least; mean shift at least does not raise it."""
    k = normalize(drawn(40, 8, seed=seed), dim=-1)
    scale = SPECS[spec] if "unnormalised" in spec or "linear" in spec else 5 * SPECS[spec]
    q, how = 2 * drawn(30, 8, seed=seed + 9), {"return_trajectory": True, "return_energy": True}
    found = written(spec, k, scale).read(q, steps=6, **how)
    finite = (found.trajectory.abs().amax(-1) < 1e4)[1:]  # sums that are not normalised may run away, downhill
    fall = found.energy[:-1] - found.energy[1:]
    length = (found.trajectory[1:] - found.trajectory[:-1]).square().sum(-1)
    least = torch.zeros_like(length) if spec in FLAT else length / 2
    slack = 1e-12 * (1 + found.energy[:-1].abs() + found.energy[1:].abs())
    assert finite[0].sum() > 10
    assert (fall >= least - slack)[finite].all()
    assert (fall > 1e-3).any()


@pytest.mark.parametrize("combine", ["shared", "separate"])
def test_tied_slots_have_part_in_the_energy(combine: str) -> None:
    k, q = drawn(5, 4), drawn(6, 4, seed=1)
    memory = AssociativeMemory("softmax", scale=3.0, slots=7, dim=4, tied=True, combine=combine).double()
    memory.write(k)
    slots = memory.slot_keys[0].detach()
    one = lambda keys: torch.logsumexp(3.0 * q @ keys.T, -1) / 3.0  # noqa: E731
    wells = one(torch.cat([slots, k])) if combine == "shared" else one(slots) + one(k)
    assert torch.allclose(memory.energy(q), q.square().sum(-1) / 2 - wells, atol=1e-12)
    found = memory.read(q, steps=5, return_energy=True)
    assert (found.energy[1:] <= found.energy[:-1] + 1e-12).all()
    assert set(memory.state_dict()) == {"slot_keys"}
    moved = AssociativeMemory(slots=2, dim=3, tied=True).to("meta").to_empty(device="cpu")
    assert moved.energy(torch.zeros(1, 3)).shape == (1,)


def test_masked_and_missing_pairs_have_no_part() -> None:
    k, q = drawn(2, 1, 6, 4), drawn(2, 1, 3, 4, seed=1)
    mask = torch.tensor([[True, False, True, True, False, True], [False] * 6])
    for spec in ("softmax", "biweight", "rbf"):
        memory = AssociativeMemory(spec, scale=2.0)
        assert torch.equal(memory.energy(q), q.square().sum(-1) / 2)
        memory.write(k.masked_fill(~mask[:, None, :, None], torch.nan), mask=mask)
        found = memory.energy(q)
        alone = written(spec, k[0, 0, mask[0]], 2.0).energy(q[0, 0])
        assert torch.allclose(found[0, 0], alone, atol=1e-12)
        assert torch.equal(found[1], q[1].square().sum(-1) / 2)  # a read of nothing is 0, the lowest point of this


@pytest.mark.parametrize("spec", ["gaussian*nearest(k=3)", "uniform*nearest(k=3)"])
def test_of_tied_patterns_only_k_count(spec: str) -> None:
    """At the query 0 all patterns tie for the best score, and the first three are kept."""
    k, q = drawn(9, 5), torch.zeros(1, 5, dtype=torch.float64)
    wanted = -math.log(3) / 2 if spec.startswith("gaussian") else 0.0
    memory = written(spec, k, 2.0)
    assert abs(float(memory.energy(q)) - wanted) < 1e-12
    found = memory.read(q, steps=3, return_energy=True)
    assert (found.energy[1:] <= found.energy[:-1]).all()


@pytest.mark.parametrize("spec", ["softmax", "rbf", "sparsemax", "biweight", "gaussian*nearest(k=3)"])
def test_large_scores_keep_the_gradient(spec: str) -> None:
    """The gradient is q - read(q) also where the scores have no digits left for the logarithm of a count."""
    k = normalize(drawn(4, 6), dim=-1).float()[[0, 1, 1, 1, 2, 3]]
    q = (k[1:2] + 0.01).requires_grad_()
    for scale in (1e3, 1e6, 1e10):
        (grad,) = torch.autograd.grad(written(spec, k, scale).energy(q).sum(), q)
        assert (grad - (q.detach() - k[1])).abs().max() < 1e-5, scale


def test_a_nan_stays_in_its_rows() -> None:
    k, q = drawn(2, 2, 5, 4), drawn(2, 2, 3, 4, seed=1)
    k[0, 1, 2, 3] = torch.nan
    found = written("sparsemax", k).energy(q)
    assert found[0, 1].isnan().all()
    assert found.isnan().sum() == 3


@pytest.mark.parametrize("spec", ["relumax", "normrelu", "cosine", "geometric", "elu", "local-linear", "shift-cosine"])
def test_where_none_is_known(spec: str) -> None:
    said = error_of(written(spec, drawn(3, 2)).energy, drawn(1, 2))
    assert said.startswith(f"AssociativeMemory.energy: no energy is known for {spec}; presets that have one: ")
    listed = said.partition("presets that have one: ")[2].partition(";")[0].split(", ")
    assert listed == ["softmax", "sparsemax", "biweight", "triweight", "topk-softmax", "topk-uniform", "exponential",
                      "linear", "rbf"]  # fmt: skip


def test_what_has_no_energy() -> None:
    hetero = AssociativeMemory()
    hetero.write(drawn(3, 2), drawn(3, 2))
    sums = AssociativeMemory("linear", store="sums")
    sums.write(drawn(3, 2))
    untied = AssociativeMemory(slots=2, dim=2)
    shifted = AssociativeMemory("biweight*fixed(bias=1)*euclidean", slots=2, dim=2, tied=True, combine="separate")
    shifted.write(drawn(3, 2).float())
    for memory, words in (
        (hetero, "there is an energy only if the values are the keys"),
        (sums, "the energy needs the pairs"),
        (untied, "slots with tied=True"),
        (shifted, "no energy is known for the sum of two reads"),
    ):
        refuses(words, memory.energy, drawn(1, 2).float() if memory in (untied, shifted) else drawn(1, 2))
    hetero.forget(everything=True)
    hetero.write(drawn(3, 2))
    assert hetero.energy(drawn(1, 2)).isfinite().all()


def test_the_integral_of_the_clipped_geometric_kernel() -> None:
    """By quadrature, across the limit."""
    memory = written("clipped-geometric*fixed*unnormalised", drawn(1, 1) * 0 + 1)
    grid = np.linspace(0, 310, 400001)
    kernel = 1 / (1 + 1e-4 - np.minimum(grid, 300) / 300)
    area = np.trapezoid(kernel, grid) if hasattr(np, "trapezoid") else np.trapz(kernel, grid)  # noqa: NPY201
    ends = memory.energy(torch.tensor([[0.0], [310.0]], dtype=torch.float64))
    assert math.isclose(310**2 / 2 - (ends[1] - ends[0]).item(), area, rel_tol=1e-4)


def test_second_derivatives() -> None:
    k = drawn(9, 5)
    for spec in ("softmax", "sparsemax", "biweight"):
        assert torch.autograd.gradgradcheck(written(spec, k, 2.0).energy, drawn(2, 5, seed=1).requires_grad_())


def test_families_can_be_added() -> None:
    assert energies.group == "regard.energies"
    refuses(r"integral\.register", integral, object(), torch.zeros(1), {})


def test_mean_shift_falls_by_what_the_kernel_weighs() -> None:
    k, q = drawn(30, 4), drawn(20, 4, seed=1)
    memory = written("epanechnikov*fixed(bias=3)*euclidean", k, 1.0)
    found = memory.read(q, 4, return_trajectory=True, return_energy=True)
    away = (found.trajectory[:-1, :, None] - k).square().sum(-1)
    mass = (3 - away / 2).clamp(min=0).sum(-1)
    length = (found.trajectory[1:] - found.trajectory[:-1]).square().sum(-1)
    assert (found.energy[:-1] - found.energy[1:] >= mass * length / 2 - 1e-12).all()
    assert (mass > 0).any()
