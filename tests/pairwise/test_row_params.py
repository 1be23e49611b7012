"""Parameters and scales that are NaN or infinite: their rows are NaN, and no others; parameters without gradients."""

import pytest
import torch

import regard

SHAPE = (1, 2, 6, 4)
CASES = [
    (name, param, impl)
    for name, spec in regard.presets().items()
    for param in (*spec.params, *(["scale"] if spec.takes_scale else []))
    for impl, _, cost in regard.explain(name, SHAPE, mask="pairs").rows
    if cost is not None
]


@pytest.mark.parametrize(("name", "param", "impl"), CASES)
def test_bad_parameters_make_their_rows_nan(name: str, param: str, impl: str) -> None:
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(SHAPE, generator=g) for _ in range(3))
    mask = torch.ones(6, 6, dtype=torch.bool)
    mask[5] = False  # a row without keys stays 0
    good = torch.full((1, 2, 6), 2.0)
    bad = good.clone()
    bad[0, 0, 2], bad[0, 0, 4], bad[0, 1, 5] = torch.nan, torch.inf, torch.nan
    if param == "ridge":
        bad[0, 0, 4] = torch.nan  # an infinite ridge is a local constant
    found = {}
    for which, numbers in {"good": good, "bad": bad}.items():
        leaves = [x.clone().requires_grad_() for x in (q, k, v, numbers)]
        given = {"scale": leaves[3]} if param == "scale" else {"params": {param: leaves[3]}}
        out = regard.attention(*leaves[:3], name, attn_mask=mask, impl=impl, **given)
        weight = torch.ones_like(out)
        weight[0, 0, 2], weight[0, 0, 4] = 0, 0
        (torch.where(weight > 0, out, 0) * weight).sum().backward()
        found[which] = out.detach(), [x.grad if x.grad is not None else torch.zeros_like(x) for x in leaves]
    (good_out, good_grads), (bad_out, bad_grads) = found["good"], found["bad"]
    rows = torch.zeros(1, 2, 6, dtype=torch.bool)
    rows[0, 0, 2] = rows[0, 0, 4] = True
    assert torch.equal(bad_out.isnan().all(-1), rows)
    assert not bad_out[0, 1, 5].any()
    assert torch.equal(bad_out[~rows], good_out[~rows])
    for own, other in zip(bad_grads, good_grads, strict=True):
        torch.testing.assert_close(own, other)
