"""The kernel that puts vectors which are not finite to zero."""

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
    good, bad = clean(x)[0]
    assert torch.equal(bad.flatten(), expected)
    assert torch.equal(good.view(-1, shape[-1])[~expected], flat[~expected])
    assert not good.view(-1, shape[-1])[expected].any()


def test_strides_are_followed() -> None:
    x = torch.randn(2, 19, 3, 8).transpose(1, 2)
    x[1, 2, 7, 3] = torch.nan
    good, bad = clean(x)[0]
    assert bad.nonzero().tolist() == [[1, 2, 7]]
    assert torch.equal(good, torch.where(bad[..., None], 0, x))


def test_three_tensors_at_once_are_as_each_alone() -> None:
    generator = torch.Generator().manual_seed(1)
    shapes = [(2, 4, 19, 8), (2, 2, 70, 8), (2, 2, 70, 33)]
    tensors = [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]
    with torch.no_grad():
        for x in tensors:
            x[1, 1, 7, 3] = torch.nan
    weights = [torch.randn(shape, generator=generator) for shape in shapes]
    found = clean(*tensors)
    sum((good * w).sum() for (good, _), w in zip(found, weights, strict=True)).backward()
    for x, w, (good, bad) in zip(tensors, weights, found, strict=True):
        alone, expected = clean(x.detach())[0]
        assert torch.equal(good, alone)
        assert torch.equal(bad, expected)
        assert bad.sum() == 1
        assert torch.equal(x.grad, torch.where(bad[..., None], 0, w))


def test_second_derivatives_and_unused_outputs() -> None:
    x, y = torch.randn(1, 1, 4, 3, dtype=torch.float32), torch.randn(1, 2, 5, 3)
    x[0, 0, 2, 1] = torch.inf
    x, y = x.requires_grad_(), y.requires_grad_()
    good, bad = clean(y, x)[1]
    (first,) = torch.autograd.grad((good**3).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    assert torch.allclose(second, torch.where(bad[..., None], 0, 6 * x.detach()))


def test_operators_pass_opcheck() -> None:
    x, y = torch.randn(1, 2, 5, 3, requires_grad=True), torch.randn(1, 1, 7, 4, requires_grad=True)
    torch.library.opcheck(torch.ops.regard.triton_clean, (x, y, *4 * [None]))
    bad = torch.zeros(1, 2, 5, dtype=torch.bool)
    torch.library.opcheck(torch.ops.regard.triton_clean, (x, None, None, bad, None, None))
