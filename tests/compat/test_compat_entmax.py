"""`regard.compat.entmax` against the package entmax, and against what defines each function."""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import entmax as package
import pytest
import torch
from mistakes import error_of
from torch import Tensor

from regard.compat import entmax as ours
from regard.compat.entmax import activations, losses, root_finding

EXACT = {"rtol": 1e-7, "atol": 1e-9}
NAMES = [n for n, found in vars(package).items() if not n.startswith("_") and not inspect.ismodule(found)]
MAPS: list[tuple[str, dict[str, Any]]] = [
    ("sparsemax", {}), ("sparsemax", {"k": 2}), ("entmax15", {}), ("entmax15", {"k": 2}), ("sparsemax_bisect", {}),
    *(("entmax_bisect", {"alpha": alpha}) for alpha in (0.2, 0.5, 0.9, 1.1, 1.5, 2, 3.0)),
    *(("normmax_bisect", {"alpha": alpha}) for alpha in (1.2, 2, 5)),
    *(("budget_bisect", {"budget": budget}) for budget in (1, 2, 3.5)),
]  # fmt: skip
LOSSES: list[tuple[str, dict[str, Any]]] = [
    ("SparsemaxLoss", {}), ("SparsemaxBisectLoss", {}), ("Entmax15Loss", {}), ("EntmaxBisectLoss", {}),
    ("EntmaxBisectLoss", {"alpha": 1.2}), ("EntmaxBisectLoss", {"alpha": 0.6}), ("NormmaxBisectLoss", {}),
    ("NormmaxBisectLoss", {"alpha": 3}),
]  # fmt: skip


def scores(*sizes: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(sizes, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def shape_of(found: Callable[..., Any]) -> list[tuple[str, Any, Any]]:
    return [(p.name, p.kind, p.default) for p in inspect.signature(found).parameters.values()]


@pytest.mark.parametrize("name", NAMES)
def test_names_and_signatures_are_those_of_the_package(name: str) -> None:
    assert shape_of(getattr(ours, name)) == shape_of(getattr(package, name))
    assert name in ours.__all__
    home = getattr(package, name).__module__.split(".")[-1]
    place = {"activations": activations, "root_finding": root_finding, "losses": losses}[home]
    assert getattr(place, name) is getattr(ours, name)


@pytest.mark.parametrize("dim", [0, -1])
@pytest.mark.parametrize(("name", "how"), MAPS)
def test_maps(name: str, how: dict[str, Any], dim: int) -> None:
    results = []
    for place in (ours, package):
        x = scores(6, 3, 6).requires_grad_()
        p = getattr(place, name)(x, dim=dim, **how)
        results.append((p, *torch.autograd.grad((p * scores(6, 3, 6, seed=1)).sum(), x)))
    torch.testing.assert_close(*results, **EXACT)


def test_alpha_as_a_tensor_on_both_sides_of_one() -> None:
    results = []
    for place in (ours, package):
        x, alpha = scores(5, 6).requires_grad_(), torch.tensor([0.3, 0.8, 1.3, 1.5, 2.5]).double().requires_grad_()
        p = place.entmax_bisect(x, alpha[:, None])
        results.append((p, *torch.autograd.grad((p * scores(5, 6, seed=1)).sum(), (x, alpha))))
    torch.testing.assert_close(*results, **EXACT)


@pytest.mark.parametrize("alpha", [0.05, 0.5, 0.99, 0.9999, 1.0])
@pytest.mark.parametrize("spread", [1.0, 1e4])
def test_heavy_tails(alpha: float, spread: float) -> None:
    """Differences of X are those of p^(alpha - 1) / (alpha - 1): p maximises p . X plus the Tsallis entropy."""
    x = spread * scores(3, 1000)
    p = root_finding.entmax_bisect(x, alpha)
    torch.testing.assert_close(p.sum(-1), torch.ones(3, dtype=torch.float64))
    if alpha == 1:
        return torch.testing.assert_close(p, x.softmax(-1))
    slope = torch.expm1((alpha - 1) * p.log()) / (alpha - 1)
    if slope.isfinite().all():
        torch.testing.assert_close(slope - slope[:, :1], x - x[:, :1], rtol=1e-6, atol=1e-7 * spread)
    return None


def test_heavy_tails_of_a_million_equal_scores() -> None:
    p = root_finding.entmax_bisect(torch.zeros(1_000_000), 0.01)
    assert (p * 1e6 - 1).abs().max() < 1e-4


def test_budget_is_the_nearest_point() -> None:
    """p = X - tau cut to [0, 1] with one tau, and the sum is the budget: that is the projection."""
    x = scores(50, 8)
    for budget in (0, 0.5, 3, 7.5, 8):
        p = root_finding.budget_bisect(x, budget)
        torch.testing.assert_close(p.sum(-1), torch.full((50,), float(budget), dtype=torch.float64))
        inside = (p > 0) & (p < 1)
        tau = torch.where(inside, x - p, torch.nan)
        assert ((tau - tau.nanmean(-1, keepdim=True)).abs().nan_to_num() < 1e-12).all()
        middle = tau.nanmean(-1, keepdim=True)
        assert torch.where(p == 0, x <= middle + 1e-12, True)[inside.any(-1)].all()
        assert torch.where(p == 1, x - 1 >= middle - 1e-12, True)[inside.any(-1)].all()


@pytest.mark.parametrize(
    "function",
    [
        ours.sparsemax, ours.entmax15, ours.normmax_bisect, partial(ours.entmax_bisect, alpha=0.7),
        partial(ours.budget_bisect, budget=1.5),
    ],
)  # fmt: skip
def test_first_and_second_derivatives(function: Callable[..., Tensor]) -> None:
    x = scores(2, 4, seed=3).requires_grad_()
    assert torch.autograd.gradcheck(function, (x,))
    assert torch.autograd.gradgradcheck(function, (x,))


def test_derivatives_by_the_numbers() -> None:
    x = scores(2, 4, seed=3).requires_grad_()
    number = torch.tensor(1.7, dtype=torch.float64, requires_grad=True)
    for function in (ours.normmax_bisect, ours.budget_bisect, ours.entmax_bisect):
        assert torch.autograd.gradcheck(function, (x, number))
    heavy = torch.tensor(0.6, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(ours.entmax_bisect, (x, heavy))


@pytest.mark.parametrize(("name", "how"), MAPS)
def test_hidden_scores_and_empty_rows(name: str, how: dict[str, Any]) -> None:
    x = scores(3, 6)
    x[0, 2:5] = -torch.inf
    x[1] = -torch.inf
    x[2, 1] = torch.nan
    x.requires_grad_()
    p = getattr(ours, name)(x, **how)
    torch.testing.assert_close(p[0, [0, 1, 5]], getattr(ours, name)(x[:1, [0, 1, 5]], **how)[0])
    assert p[0, 2:5].abs().max() == p[1].abs().max() == 0
    assert p[2].isnan().any()
    assert torch.autograd.grad(p[:2].square().sum(), x)[0][:2].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("name", "how"), MAPS)
def test_dtypes(name: str, how: dict[str, Any], dtype: torch.dtype) -> None:
    x = scores(4, 9, dtype=dtype)
    p = getattr(ours, name)(x, **how)
    assert p.dtype == dtype
    expected = getattr(ours, name)(x.double(), **how)
    torch.testing.assert_close(p.double(), expected, rtol=0, atol=8 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("reduction", ["elementwise_mean", "sum", "none"])
@pytest.mark.parametrize(("name", "how"), LOSSES)
def test_losses(name: str, how: dict[str, Any], reduction: str) -> None:
    target, results = torch.tensor([0, 3, 2, 2, 5]), []
    for place in (ours, package):
        x = (3 * scores(5, 6)).requires_grad_()
        loss = getattr(place, name)(**how, ignore_index=2, reduction=reduction)(x, target)
        results.append((loss, *torch.autograd.grad(loss.sum(), x)))
    torch.testing.assert_close(*results, **EXACT)


def test_losses_are_ignored_at_every_index_and_are_zero_where_the_class_is_sure() -> None:
    x, target = (4 * scores(4, 3)).requires_grad_(), torch.tensor([0, -100, 2, -100])
    for name, how in LOSSES:
        loss = getattr(ours, name)(**how)(x, target)
        torch.testing.assert_close(loss, getattr(ours, name)(**how)(x[::2], target[::2]))
        assert torch.autograd.grad(loss, x)[0][1::2].abs().max() == 0
    sure = torch.tensor([[9.0, 1.0, -torch.inf]], dtype=torch.float64, requires_grad=True)
    loss = ours.entmax15_loss(sure, torch.tensor([0]))
    assert loss.item() == 0
    assert torch.autograd.grad(loss.sum(), sure)[0].abs().max() == 0


def test_alpha_of_a_loss_by_row() -> None:
    x, target, alpha = scores(3, 5), torch.tensor([1, 0, 4]), torch.tensor([0.5, 1.3, 2.0]).double()
    loss = ours.entmax_bisect_loss(x, target, alpha[:, None])
    each = [ours.entmax_bisect_loss(x[i : i + 1], target[i : i + 1], alpha[i].item()) for i in range(3)]
    torch.testing.assert_close(loss, torch.cat(each))


@pytest.mark.parametrize(("name", "how"), LOSSES)
def test_second_derivatives_of_losses(name: str, how: dict[str, Any]) -> None:
    x, target = scores(2, 4, seed=3).requires_grad_(), torch.tensor([1, 3])
    loss = getattr(ours, name)(**how)
    assert torch.autograd.gradgradcheck(lambda x: loss(x, target), (x,))


def test_large_scores_lose_no_precision() -> None:
    """The gradient is p minus one at the target, also far from zero in float32."""
    for offset in (0.0, 1e4):
        x = (scores(20, 8, dtype=torch.float32) + offset).requires_grad_()
        target = torch.arange(20) % 8
        slope = torch.autograd.grad(ours.entmax15_loss(x, target).sum(), x)[0]
        expected = ours.entmax15(x.double()).detach() - torch.nn.functional.one_hot(target, 8)
        torch.testing.assert_close(slope.double(), expected, rtol=0, atol=1e-5)


def test_thresholds() -> None:
    x = scores(4, 7, seed=2)
    for kind, power in (("sparsemax", 1), ("entmax", 2)):
        tau, size = getattr(activations, f"_{kind}_threshold_and_support")(x)
        p = (x - tau).relu() ** power
        torch.testing.assert_close(p.sum(-1), torch.ones(4, dtype=torch.float64))
        assert torch.equal((p > 0).sum(-1, keepdim=True), size)


def test_mistakes() -> None:
    x, target = scores(2, 3), torch.tensor([0, 1])
    assert "sparsemax: X has dtype torch.int64" in error_of(ours.sparsemax, target)
    assert "entmax15: k is 0" in error_of(ours.entmax15, x, k=0)
    assert "entmax_bisect: alpha is 0, expected alpha > 0" in error_of(ours.entmax_bisect, x, 0)
    assert "normmax_bisect: alpha is 1, expected alpha > 1" in error_of(ours.normmax_bisect, x, 1)
    assert "budget_bisect: budget is -1" in error_of(ours.budget_bisect, x, -1)
    assert "budget_bisect: dim is 2, but X has shape [2, 3]" in error_of(ours.budget_bisect, x, dim=2)
    wrong = torch.full((2, 3), 1.5)
    assert "alpha has shape [2, 3], which does not broadcast" in error_of(ours.entmax_bisect, x, wrong)
    assert "n_iter is 0" in error_of(ours.entmax_bisect, x, n_iter=0)
    assert "target has shape [2], expected [1]" in error_of(ours.sparsemax_loss, x[:1], target)
    assert "X has shape [3], expected [n, C]" in error_of(ours.sparsemax_loss, x[0], target)
    assert "cross_entropy" in error_of(ours.entmax_bisect_loss, x, target, 1)
    assert "reduction is 'mean'" in error_of(ours.SparsemaxLoss, reduction="mean")
