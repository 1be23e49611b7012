"""Linear attention: the guard of sums that cancel."""

from typing import Any

import pytest
import torch
from recurrences import CASES, FORMS, close, loss
from torch.autograd import gradcheck

import regard

TEXT = "linear*fixed*normalised"


def test_derivatives_through_the_squares_of_the_state() -> None:
    """Finite differences in the second moments, where the guard holds the sum and where it does not."""
    x, first = CASES[TEXT].draw(4, grad=False), CASES[TEXT].run(CASES[TEXT].draw(3, 8, grad=False))[1]
    held = x["k"].clone()
    held[:, :, 1] = -held[:, :, 0]  # two keys whose weights cancel
    for keys, own in ((x["k"], first), (held[:, :, :2], first.reset())):
        squares, leaf = own.squares.detach().requires_grad_(), keys.clone().requires_grad_()
        found = []
        for form in ("chunked", "parallel"):

            def run(keys: Any, squares: Any, form: str = form, own: Any = own) -> Any:
                state = regard.LinearState(own.values, own.keys, squares, own.non_finite, tokens=own.tokens)
                tensors = (x["q"][:, :, : keys.shape[2]], keys, x["v"][:, :, : keys.shape[2]])
                out, after = regard.linear_attention(*tensors, TEXT, state=state, form=form, chunk_size=3)
                return out, after.squares

            if own is first:
                assert gradcheck(run, (leaf, squares), eps=1e-6, atol=1e-5, rtol=1e-4)
            out, after = run(leaf, squares)
            found.append(torch.autograd.grad(loss(out) + loss(after), (leaf, squares)))
        for one, two in zip(*found, strict=True):
            close(one, two, 1e-9)


@pytest.mark.parametrize("form", FORMS)
def test_the_guard_holds_a_sum_that_cancels(form: str) -> None:
    """Weights 1 and -1 are divided by 1e-3 sqrt(2 (1 + 1)); weights of zero by one; squares of 2^50 do not overflow."""
    one = torch.ones(1, 1, 2, 1)
    k, v = torch.tensor([1.0, -1.0]).view(1, 1, 2, 1), torch.eye(2)[None, None]
    for size in (1.0, 2.0**-40, 2.0**50):
        out, _ = regard.linear_attention(one * size, k * size, v, TEXT, form=form, scale=1.0)
        torch.testing.assert_close(out[0, 0], torch.tensor([[1.0, 0.0], [500.0, -500.0]]), rtol=1e-6, atol=0)
    leaf = torch.zeros(1, 1, 2, 1, requires_grad=True)
    out, _ = regard.linear_attention(one * 3, leaf, v, TEXT, form=form, scale=1.0)
    assert not out.any()
    (grad,) = torch.autograd.grad(out[0, 0, 1, 0], leaf)
    assert grad.flatten().tolist() == [3.0, 0.0]
