"""Mistakes in calling the normalisers."""

from __future__ import annotations

import math

import pytest
import torch

import regard
from regard.checks import ArgumentError

CALLS = {
    "entmax": regard.entmax,
    "sparsemax": regard.sparsemax,
    "relumax": regard.relumax,
    "normrelu": regard.normrelu,
    "topk_softmax": lambda z, **how: regard.topk_softmax(z, 2, **how),
    "topk_uniform": lambda z, **how: regard.topk_uniform(z, 2, **how),
}
Z = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))


def message(call, *arguments, **named) -> str:
    with pytest.raises(ArgumentError) as caught:
        call(*arguments, **named)
    text = str(caught.value)
    assert "\n" not in text
    return text


@pytest.mark.parametrize("name", CALLS)
def test_scores_axis_and_mask(name: str) -> None:
    call = CALLS[name]
    assert f"{name}: scores has dtype torch.int64, expected a floating-point dtype" in message(call, Z.long())
    assert f"{name}: scores is a list, expected a torch.Tensor" in message(call, [1.0])
    assert f"{name}: scores is a scalar" in message(call, torch.tensor(1.0))
    for dim in (2, -3, 1.0, None, True):
        assert f"{name}: dim is {dim!r}, but scores has shape [3, 4]" in message(call, Z, dim=dim)
    assert f"{name}: mask has dtype torch.float32, expected torch.bool" in message(call, Z, mask=Z)
    assert f"{name}: mask is a bool" in message(call, Z, mask=True)
    for shape in ((3,), (4, 1), (2, 3, 4), (5, 4)):
        assert "does not broadcast to [3, 4]" in message(call, Z, mask=torch.ones(shape, dtype=torch.bool))
    with regard.checks.debug():
        for bad in (math.nan, math.inf):
            assert f"{name}: scores holds NaN or infinite values" in message(call, torch.tensor([0.0, bad]))


@pytest.mark.parametrize("name", CALLS)
def test_minus_infinity_is_no_mistake_even_under_debug(name: str) -> None:
    with regard.checks.debug():
        p = CALLS[name](torch.tensor([0.5, -math.inf, 0.2]))
    assert float(p[1]) == 0


@pytest.mark.parametrize("alpha", [0.99, 0.0, -1.0, math.nan, math.inf, "1.5", None, True])
def test_alpha(alpha: object) -> None:
    assert "entmax: alpha is" in message(regard.entmax, Z, alpha)


def test_alpha_tensors() -> None:
    assert "entmax: alpha has dtype torch.int64" in message(regard.entmax, Z, torch.tensor(2))
    assert "alpha has shape [3], which does not broadcast to [3, 4]" in message(regard.entmax, Z, torch.ones(3))
    text = message(regard.entmax, Z, torch.full((3, 4), 1.5))
    assert "alpha has shape [3, 4], but rows run along dim -1 of scores [3, 4]; its length there must be 1" in text
    assert "rows run along dim 0" in message(regard.entmax, Z, torch.full((3, 1), 1.5), dim=0)
    with regard.checks.debug():
        assert "alpha is 0.5, expected alpha >=" in message(regard.entmax, Z, torch.tensor([[1.5], [0.5], [2.0]]))
        assert "alpha holds NaN or infinite" in message(regard.entmax, Z, torch.tensor(math.nan))


@pytest.mark.parametrize("margin", [0, -1.0, math.nan, math.inf, "1"])
def test_margin(margin: object) -> None:
    assert "margin is" in message(regard.relumax, Z, margin)
    if isinstance(margin, (int, float)) and margin <= 0:
        assert "expected margin > 0" in message(regard.relumax, Z, margin)
        with regard.checks.debug():
            assert "relumax: margin is" in message(regard.relumax, Z, torch.tensor(float(margin)))


def test_bias_and_empty() -> None:
    assert "bias is nan" in message(regard.normrelu, Z, math.nan)
    assert "bias is 'a'" in message(regard.normrelu, Z, "a")
    assert "unknown empty='unifrom'. Did you mean 'uniform'?" in message(regard.normrelu, Z, empty="unifrom")


@pytest.mark.parametrize("call", [regard.topk_softmax, regard.topk_uniform])
def test_k_and_gradient(call) -> None:
    for k in (0, -2, 2.0, True, "3", None):
        assert f"k is {k!r}, expected a whole number >= 1" in message(call, Z, k)
    assert "unknown gradient='sotf'. Did you mean 'soft'?" in message(call, Z, 2, gradient="sotf")


def test_another_device() -> None:
    assert "entmax: alpha is on meta" in message(regard.entmax, Z, torch.tensor(1.5, device="meta"))
    assert "relumax: margin is on meta" in message(regard.relumax, Z, torch.tensor(1.5, device="meta"))
    for call in CALLS.values():
        assert "mask is on meta" in message(call, Z, mask=torch.ones(4, dtype=torch.bool, device="meta"))


def test_dtypes_without_arithmetic() -> None:
    for call in CALLS.values():
        assert "scores has dtype torch.float8_e4m3fn" in message(call, Z.to(torch.float8_e4m3fn))
