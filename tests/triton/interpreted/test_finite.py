"""The kernel that puts vectors which are not finite to zero."""

from __future__ import annotations

import pytest
import torch

from regard.triton.runtime.finite import clean


@pytest.mark.parametrize("shape", [(2, 3, 37, 5), (1, 1, 1, 64), (2, 1, 0, 8), (7, 40)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_vectors_that_are_not_finite_are_zero_and_named(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(shape, generator=generator).to(dtype)
    flat = x.view(-1, shape[-1])
    expected = torch.zeros(len(flat), dtype=torch.bool)
    for place, value in enumerate((torch.nan, torch.inf, -torch.inf, 2.0**57)):
        at = 5 * place + 1
        if at < len(flat):
            flat[at, place % shape[-1]] = value
            expected[at] = True
    good, bad = clean(x)
    assert torch.equal(bad.flatten(), expected)
    assert torch.equal(good.view(-1, shape[-1])[~expected], flat[~expected])
    assert not good.view(-1, shape[-1])[expected].any()


def test_strides_are_followed() -> None:
    x = torch.randn(2, 19, 3, 8).transpose(1, 2)
    x[1, 2, 7, 3] = torch.nan
    good, bad = clean(x)
    assert bad.nonzero().tolist() == [[1, 2, 7]]
    assert torch.equal(good, torch.where(bad[..., None], 0, x))


def test_gradients_stop_at_such_vectors() -> None:
    x = torch.randn(1, 1, 4, 3)
    x[0, 0, 2, 1] = torch.inf
    x.requires_grad_()
    (clean(x)[0] * 3).sum().backward()
    expected = torch.full((4, 3), 3.0)
    expected[2] = 0
    assert torch.equal(x.grad[0, 0], expected)
