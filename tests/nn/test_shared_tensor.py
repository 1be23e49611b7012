"""Queries that are the keys: one tensor serves as both, in what is computed and in what is kept."""

from __future__ import annotations

import pytest
import torch

import regard
from regard.nn import Attention

B, H, T, D = 2, 4, 9, 8


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


CASES = [(n, s) for n, spec in regard.presets().items() for s in ((None, 0.7, "rows") if spec.takes_scale else (None,))]


@pytest.mark.parametrize(("name", "scale"), CASES)
def test_one_tensor_for_both_equals_two(name, scale):
    """The same call with a copy as the key; gradients of the two copies add up."""
    spec = regard.presets()[name]
    options = {} if scale is None else {"scale": draw(T, seed=3).exp() if scale == "rows" else scale}
    x, v, g = draw(B, H, T, D), draw(B, H, T, D, seed=1), draw(B, H, T, D, seed=2)
    one, first, second = (x.clone().requires_grad_() for _ in range(3))
    found = regard.attention(one, one, v, spec, exclude_self=True, **options)
    expected = regard.attention(first, second, v, spec, exclude_self=True, **options)
    torch.testing.assert_close(found, expected, atol=1e-11, rtol=1e-11)
    (found * g).sum().backward()
    (expected * g).sum().backward()
    torch.testing.assert_close(one.grad, first.grad + second.grad, atol=1e-10, rtol=1e-10)


def kept(module, x):
    """Bytes that the backward pass of one call keeps, the module's weights apart."""
    weights = {weight.untyped_storage().data_ptr() for weight in module.parameters()}
    found = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            found[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = module(x)[0]
    del out
    return sum(found.values())


@pytest.mark.parametrize("spec", ["softmax", "biweight", "relumax", "shift-cosine", "elu"])
def test_the_backward_pass_keeps_one_tensor_less(spec):
    x = draw(B, 64, H * D).float()
    apart, shared = (kept(Attention(H * D, H, spec=spec, share_query_key=flag), x) for flag in (False, True))
    assert apart - shared >= B * H * 64 * D * 4


def test_a_query_that_is_not_a_number_spoils_its_own_row_and_later_ones():
    """As a key it is seen by later rows, as a query by its own."""
    x = draw(B, H, T, D)
    x[:, :, 3] = torch.nan
    for name in ("softmax", "elu"):
        out = regard.attention(x, x, draw(B, H, T, D, seed=1), name, is_causal=True)
        assert torch.isfinite(out[:, :, :3]).all()
        assert torch.isnan(out[:, :, 3:]).all()
