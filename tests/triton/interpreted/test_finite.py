"""The kernel that puts vectors which are not finite to zero."""

import pytest
import torch

from regard.triton.runtime.finite import clean

BAD = (torch.nan, torch.inf, -torch.inf, 2.0**57)
SHAPES = [[(2, 3, 37, 5)], [(1, 1, 1, 64)], [(2, 1, 0, 8)], [(7, 40)], [(2, 4, 19, 8), (2, 2, 70, 8), (2, 2, 70, 33)]]


@pytest.mark.parametrize("shapes", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_vectors_that_are_not_finite_are_zero_and_named(shapes: list[tuple[int, ...]], dtype: torch.dtype) -> None:
    """Of one tensor and of three at once, whose gradients stop there."""
    make = torch.Generator().manual_seed(0)
    tensors = [torch.randn(shape, generator=make).to(dtype) for shape in shapes]
    wanted = [torch.zeros(shape[:-1], dtype=torch.bool) for shape in shapes]
    for nth, (x, bad) in enumerate(zip(tensors, wanted, strict=True)):
        for place, value in enumerate(BAD):
            at = 5 * place + 1 + nth
            if at < bad.numel():
                x.view(-1, x.shape[-1])[at, place % x.shape[-1]] = value
                bad.view(-1)[at] = True
    leaves = [x.clone().requires_grad_() for x in tensors]
    weights = [torch.randn(shape, generator=make).to(dtype) for shape in shapes]
    found = clean(*leaves)
    sum((good * w).sum() for (good, _), w in zip(found, weights, strict=True)).backward()
    for x, leaf, w, bad, (good, flags) in zip(tensors, leaves, weights, wanted, found, strict=True):
        assert torch.equal(flags, bad)
        assert torch.equal(good, torch.where(bad[..., None], 0, x))
        assert torch.equal(leaf.grad, torch.where(bad[..., None], 0, w))


def test_strides_are_followed_and_second_derivatives_of_one_output() -> None:
    x, y = torch.randn(2, 19, 3, 8).transpose(1, 2), torch.randn(1, 2, 5, 3).requires_grad_()
    x[1, 2, 7, 3] = torch.nan
    x = x.requires_grad_()
    good, bad = clean(y, x)[1]
    assert bad.nonzero().tolist() == [[1, 2, 7]]
    assert torch.equal(good, torch.where(bad[..., None], 0, x))
    (first,) = torch.autograd.grad((good**3).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    torch.testing.assert_close(second, torch.where(bad[..., None], 0, 6 * x.detach()))


def test_operators_pass_opcheck() -> None:
    x, y = torch.randn(1, 2, 5, 3, requires_grad=True), torch.randn(1, 1, 7, 4, requires_grad=True)
    torch.library.opcheck(torch.ops.regard.triton_clean, ([x, y], []))
    bad = torch.zeros(1, 2, 5, dtype=torch.bool)
    torch.library.opcheck(torch.ops.regard.triton_clean, ([x], [bad]))
