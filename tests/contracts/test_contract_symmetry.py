"""Laws of a single row (ties, equal scores, very large and very small ones), and what a call may not depend on:
batching, the order of keys, how a sequence is cut, strides, shared heads."""

from itertools import pairwise, product
from typing import Any

import pytest
import torch
from torch import Tensor

import regard

from . import oracle
from .cases import (
    PAIRS,
    REPRESENTATIVES,
    SPECS,
    Data,
    attend,
    close,
    draw,
    few_first,
    few_pairs_first,
    gradients,
    learned,
    like,
    masks,
    named,
    outputs,
    same,
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
        close(gradients(out, named(data)), expected, 1e-9, "gradients")


@few_pairs_first
def test_a_query_of_zeros(label: str, impl: str) -> None:
    """All scores are equal: the oracle's weights, finite gradients; a relative rule weighs what it keeps the same."""
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
    """float32 scores up to 1e4: finite gradients, and outputs between the least and largest value seen (degree 0)."""
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
        close(run({name}), whole, 1e-12)
    with torch.no_grad():
        out = attend(spec, impl, data, params=params, scale=scale, **call)
    assert not out.requires_grad


def test_numbers_of_another_dtype() -> None:
    """Learned numbers in float32 beside inputs of any dtype, with gradients in their own."""
    for dtype, (spec, name), impl in product(
        (torch.float64, torch.bfloat16), (("relumax", "margin"), ("local-linear", "ridge")), ("reference", "blocked")
    ):
        data, tolerance = draw(5, 7, dtype=dtype), max(1e-12, torch.finfo(dtype).eps)
        number = torch.full((2, 1), 0.75, requires_grad=True)
        scale = torch.tensor(0.5, requires_grad=True)
        out = regard.attention(*data.tensors, spec, params={name: number}, scale=scale, impl=impl)
        assert out.dtype == dtype
        close(out, regard.attention(*data.tensors, spec, params={name: 0.75}, scale=0.5, impl=impl), tolerance)
        for grad in torch.autograd.grad(out.float().square().sum(), (number, scale)):
            assert grad.dtype == torch.float32
            assert grad.isfinite().all()


ENDS = {"steps": list(range(1, 17)), "chunks": [5, 6, 13, 16]}


@pytest.mark.parametrize(
    ("label", "impl"),
    few_first([*((label, "auto") for label in SPECS), *((label, "reference") for label in REPRESENTATIVES)]),
)
@pytest.mark.parametrize("order", ["is_causal", "exclude_self", "window"])
def test_prefill_is_chunks_is_steps(label: str, impl: str, order: str) -> None:
    """Queries that come in pieces, each with the keys so far and no offset given: float32, 1e-5."""
    call: dict[str, Any] = {"is_causal": True, "window": 5} if order == "window" else {order: True}
    spec, data = SPECS[label], draw(16, dtype=torch.float32, batch=1)
    # Signed weights over their sum multiply rounding by up to 1/GUARD, the documented limit.
    tolerance = 1e-2 if spec.normalise and not spec.weighting.nonnegative else 1e-5
    whole = attend(spec, impl, data, **call)
    for cut, ends in ENDS.items():
        pieces = (Data(data.q[:, :, a:b], data.k[:, :, :b], data.v[:, :, :b]) for a, b in pairwise([0, *ends]))
        close(torch.cat([attend(spec, impl, piece, **call) for piece in pieces], 2), whole, tolerance, cut)


@few_pairs_first
def test_strides_do_not_matter(label: str, impl: str) -> None:
    """Transposed axes, strided features, broadcast batches, and gradients that arrive expanded or transposed."""
    plain = draw(6, 9, batch=2)
    plain = plain.with_(v=plain.v[:1].expand_as(plain.v))
    padded = draw(6, 9, batch=2, dim=6, value_dim=4)
    padded.q[..., ::2], padded.k[..., ::2], padded.v[..., ::2] = plain.tensors
    views = {
        "transposed": plain.map(lambda x: x.transpose(1, 2).contiguous().transpose(1, 2)),
        "features first": plain.map(lambda x: x.transpose(2, 3).contiguous().transpose(2, 3)),
        "strided": padded.map(lambda x: x[..., ::2]),
        "broadcast": plain.with_(v=plain.v[:1].clone().expand_as(plain.v)),
    }
    call = masks(*plain.sizes)["padding, causal"]
    mask = call["attn_mask"].transpose(0, 3).contiguous().transpose(0, 3)
    leaves = plain.map(lambda x: x.contiguous()).leaves()
    out = attend(SPECS[label], impl, leaves, **call)
    expected = gradients(out, named(leaves))
    for what, view in views.items():
        assert not (view.q.is_contiguous() and view.v.is_contiguous()), what
        view = view.map(lambda x: x.detach().requires_grad_())
        again = attend(SPECS[label], impl, view, **{**call, "attn_mask": mask})
        close(again, out, 1e-12, what)
        turned = like(out).transpose(1, 3).contiguous().transpose(1, 3)
        close(gradients(again, named(view), weight=turned), expected, 1e-11, what)
    out = attend(SPECS[label], impl, leaves, **call)
    dense = gradients(out, named(leaves), weight=torch.ones_like(out), retain_graph=True)
    same(gradients(out, named(leaves), weight=torch.ones(1, dtype=out.dtype).expand_as(out)), dense)


@pytest.mark.parametrize("label", REPRESENTATIVES)
def test_numbers_per_head_are_numbers_per_row(label: str) -> None:
    """A parameter as a number, as [H, 1] and as [B, H, Tq] is one parameter; so is a scale."""
    spec, data = SPECS[label], draw(5, 7)
    values = {name: float(info.default) + 0.05 for name, info in spec.params.items()}
    for name, value in (values | ({"scale": 0.3} if spec.takes_scale else {})).items():
        forms = (value, *(torch.full(size, value, dtype=torch.float64) for size in ((2, 1), (2, 2, 5))))
        calls = [{"scale": x} if name == "scale" else {"params": {name: x}} for x in forms]
        outs = [regard.attention(*data.tensors, spec, is_causal=True, **call) for call in calls]
        for out in outs[1:]:
            close(out, outs[0], 1e-12, name)
