"""Laws of a single row: ties, equal scores, very large and very small ones, numbers shared in odd ways."""

import pytest
import torch
from torch import Tensor

import regard

from . import oracle
from .cases import (
    PAIRS,
    SPECS,
    Data,
    attend,
    close,
    draw,
    few_first,
    few_pairs_first,
    gradients,
    learned,
    masks,
    named,
    outputs,
)

EXACT = ("dot", "euclidean", "relu", "relu2")  # similarities that are exact on small whole numbers
ALIVE = [(label, impl) for label, impl in PAIRS if SPECS[label].convex]


def _whole_numbers(seed: int) -> Data:
    """Queries and keys of -1, 0 and 1, so that scores are exact, tie, and lie on thresholds."""
    data = draw(6, 12, dim=4, seed=seed)
    return data.with_(q=data.q.clamp(-1, 1).round(), k=data.k.clamp(-1, 1).round())


@pytest.mark.parametrize(
    ("label", "impl"), [(label, impl) for label, impl in PAIRS if SPECS[label].similarity.name in EXACT]
)
def test_ties(label: str, impl: str) -> None:
    """Equal scores, at the maximum, at the k-th place and on the threshold: the documented weights (equal, or
    the lowest index first) and the documented gradients (shared at a maximum, 0 at an edge)."""
    choices = oracle.read(SPECS[label])
    if not oracle.knows(choices):
        return
    for seed in (0, 1):
        data = _whole_numbers(seed).leaves()
        call = masks(*data.sizes)["pairs, strict"]
        truth, _ = oracle.attention(choices, *data.tensors, oracle.visible(*data.sizes, **call))
        expected = gradients(truth, named(data))
        out = attend(SPECS[label], impl, data, **call)
        if out is None:
            continue
        close(out, truth, 1e-10)
        if choices.rule == "adaptive" and choices.r <= 1:
            continue  # a key that lies on the threshold has a kink there, and rounding takes a side
        for name, grad in gradients(out, named(data)).items():
            close(grad, expected[name], 1e-9, f"gradient of {name}")


@few_pairs_first
def test_a_query_of_zeros(label: str, impl: str) -> None:
    """All scores are equal: the oracle's weights, finite gradients; a rule relative to the best key then weighs
    every key it keeps the same."""
    data = draw(3, 7)
    data = data.with_(q=torch.zeros_like(data.q)).leaves()
    ways = {"window": {"window": 4}, "all": {}}  # an implementation may have no window
    _, call, out = next(outputs(label, impl, data, ways))
    assert out.isfinite().all()
    assert all(grad.isfinite().all() for grad in gradients(out, named(data)).values())
    choices = oracle.read(SPECS[label])
    if oracle.knows(choices):
        truth, _ = oracle.attention(choices, *data.tensors, oracle.visible(*data.sizes, **call))
        close(out, truth, 1e-10)


@pytest.mark.parametrize(("label", "impl"), few_first(ALIVE))
@pytest.mark.parametrize("size", [1e4, 1e-6])
def test_large_and_small_scores(label: str, impl: str, size: float) -> None:
    """float32 scores up to 1e4: finite, and at degree 0 every output lies between the least and the largest
    value that its row sees; gradients are finite."""
    data = draw(8, 12, dtype=torch.float32, dim=8)
    data = data.with_(q=data.q * size).leaves()
    _, call, out = next(outputs(label, impl, data, ("causal", "all")))
    assert out.isfinite().all()
    assert all(grad.isfinite().all() for grad in gradients(out, named(data)).values())
    if SPECS[label].degree == 0:
        _between(out, data.v, oracle.visible(*data.sizes, **call))


def _between(out: Tensor, v: Tensor, seen: Tensor) -> None:
    values = v[:, :, None].expand(*seen.shape, v.shape[-1])
    least = torch.where(seen[..., None], values, torch.inf).amin(-2)
    most = torch.where(seen[..., None], values, -torch.inf).amax(-2)
    slack = 2e-5 * (1 + v.abs().max())
    # A row without weight (rectified features that share no component) is 0.
    inside = (out >= least - slack) & (out <= most + slack)
    assert bool((inside | (out == 0)).all())


@few_pairs_first
def test_any_choice_of_inputs_collects_gradients(label: str, impl: str) -> None:
    """Gradients of some inputs alone equal those of all together."""
    spec, data = SPECS[label], draw(5, 7).leaves()
    params, scale = learned(spec, data)
    everything = named(data, params, scale)
    call = masks(*data.sizes)["padding"]

    def run(chosen: set[str]) -> dict[str, Tensor]:
        mine = {n: x.detach().clone().requires_grad_(n in chosen) for n, x in everything.items()}
        given = Data(mine["query"], mine["key"], mine["value"])
        rest = {n: mine[n] for n in params}
        out = attend(spec, impl, given, params=rest, scale=mine.get("scale"), **call)
        return gradients(out, {n: mine[n] for n in everything if n in chosen}) if out.requires_grad else {}

    whole = run(set(everything))
    for name in everything:
        for which, grad in run({name}).items():
            close(grad, whole[which], 1e-12, which)
    with torch.no_grad():
        out = attend(spec, impl, data, params=params, scale=scale, **call)
    assert not out.requires_grad


def test_numbers_of_another_dtype() -> None:
    """Learned numbers in float32 beside inputs of any dtype, with gradients in their own."""
    for dtype in (torch.float64, torch.bfloat16):
        data = draw(5, 7, dtype=dtype)
        margin = torch.full((2, 1), 0.8, requires_grad=True)
        scale = torch.tensor(0.5, requires_grad=True)
        for impl in ("reference", "blocked"):
            out = regard.attention(*data.tensors, "relumax", params={"margin": margin}, scale=scale, impl=impl)
            assert out.dtype == dtype
            for grad in torch.autograd.grad(out.float().square().sum(), (margin, scale)):
                assert grad.dtype == torch.float32
                assert grad.isfinite().all()
