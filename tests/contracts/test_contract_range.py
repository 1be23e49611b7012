"""Numbers, shapes and devices at the edge of what is allowed: sizes that overflow, empty batches, the meta device; and
what goes on around a call: autocast, forward mode, torch.func transforms."""

from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from mistakes import refuses
from torch import Tensor

import regard

from .cases import (
    FAST,
    IMPLS,
    PAIRS,
    PRESETS,
    SPECS,
    Data,
    attend,
    draw,
    few_first,
    few_pairs_first,
    gradients,
    named,
    outputs,
    same,
)

LARGEST = 2.0**56
"""The largest entry that is not taken for infinite, in float32."""


def limits(sizes: tuple[int, int, int, int]) -> dict[str, dict[str, Any]]:
    """Calls in which queries 0 to 5 do not see keys 6 to 8."""
    batch, _, _, keys = sizes
    padding = torch.ones(batch, 1, 1, keys, dtype=torch.bool)
    padding[..., 6:] = False
    return {
        "causal": {"is_causal": True},
        "window": {"is_causal": True, "window": 3},
        "mask": {"attn_mask": padding},
        "pairs": {"attn_mask": torch.ones(keys, keys, dtype=torch.bool).tril()},
        "segments": {"segment_ids": (torch.arange(keys) >= 6).long()[None]},
    }


def hidden_size(data: Data, size: float) -> Data:
    k, v = data.k.detach().clone(), data.v.detach().clone()
    k[:, :, 6:] *= size / k[:, :, 6:].abs().amax()
    v[:, :, 6:] = size
    return data.with_(k=k, v=v)


@few_pairs_first
def test_large_hidden_keys_change_no_bit(label: str, impl: str) -> None:
    """Neither outputs nor gradients of the rows that do not see them, at queries and scales that overflow with them."""
    spec, base = SPECS[label], draw(9, dtype=torch.float32)
    scale = {"scale": 1e6} if spec.takes_scale else {}
    for queries in (1.0, 2.0**48):
        data = base.with_(q=torch.cat([base.q[:, :, :6] * queries, base.q[:, :, 6:]], 2))
        for name, call in limits(data.sizes).items():
            found = []
            for size in (1.0, LARGEST, -LARGEST):
                leaves = hidden_size(data, size).leaves()
                for _, _, out in outputs(label, impl, leaves, {name: call}, **scale):
                    grads = gradients(out[:, :, :6], named(leaves), weight=torch.ones_like(out[:, :, :6]))
                    found.append([x[:, :, :6].detach().nan_to_num() for x in (out, *grads.values())])
            for other in found[1:]:
                same(other, found[0], name)


@pytest.mark.parametrize(
    ("label", "impl"), few_first((label, impl) for label, impl in PAIRS if SPECS[label].takes_scale)
)
def test_a_query_whose_scores_could_overflow_is_not_finite(label: str, impl: str) -> None:
    """At a scale of 1e38 a row that sees a key is NaN and passes no gradient; other rows keep their bits."""
    spec, leaves = SPECS[label], draw(6, dtype=torch.float32).leaves()
    scale = torch.full((2, 2, 6), 0.5)
    out = attend(spec, impl, leaves, is_causal=True, scale=scale)
    large = scale.index_fill(2, torch.tensor([3]), 1e38)
    again = attend(spec, impl, leaves, is_causal=True, scale=large)
    assert again[:, :, 3].isnan().all()
    rest = torch.tensor([0, 1, 2, 4, 5])
    same(again[:, :, rest], out[:, :, rest])
    before = gradients(out[:, :, rest], named(leaves))
    same(gradients(again[:, :, rest], named(leaves), retain_graph=True), before)
    assert all(grad.isfinite().all() for grad in gradients(again.nan_to_num(), named(leaves)).values())
    assert attend(spec, impl, leaves, is_causal=True, scale=1e38).isnan().all()


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize(("spec", "largest"), [("relu2", 2.0**28), ("rbf", 2.0**27), ("relu", LARGEST)])
def test_squares_have_half_the_range(spec: str, largest: float, impl: str) -> None:
    """relu2 and euclidean square their entries: up to there they are finite and right, beyond they are NaN."""
    data = draw(5, dtype=torch.float32)
    for size, bad in ((largest, False), (largest * 4, True)):
        q, k = (x * (size / x.abs().amax()) for x in (data.q, data.k))
        out = attend(SPECS[str(regard.Spec.parse(spec))], impl, Data(q, k, data.v))
        if out is None:
            return
        assert bool(out.isnan().any()) == bad
        if spec == "relu2" and not bad:
            w = (q.double().relu() ** 2) @ (k.double().relu() ** 2).transpose(-1, -2) + 1e-4
            exact = w @ data.v.double() / w.sum(-1, keepdim=True)
            assert (out - exact).abs().max() < 1e-5


@few_pairs_first
def test_small_inputs_have_finite_gradients(label: str, impl: str) -> None:
    """Queries and keys down to 1e-30 in float32: the scores are as good as 0."""
    for size in (1e-6, 1e-12, 1e-16, 1e-20, 1e-30):
        data = draw(6, dtype=torch.float32)
        data = Data(data.q * size, data.k * size, data.v).leaves()
        out = attend(SPECS[label], impl, data)
        assert out.isfinite().all(), size
        assert all(grad.isfinite().all() for grad in gradients(out, named(data)).values()), size


@pytest.mark.parametrize(("label", "impl"), few_first((x, impl) for x, impl in PAIRS if not SPECS[x].degree))
def test_large_keys_have_finite_gradients(label: str, impl: str) -> None:
    """Keys up to 2^26 in float32. The default scale 1 / sqrt(D) is no power of two here, so that it rounds scores.
    Local linear models are left out: a solution can be as long as the inverse of the ridge."""
    for size, causal in product((2.0**13, 2.0**26), (False, True)):
        data = draw(40, dtype=torch.float32)
        data = data.with_(k=data.k * size).leaves()
        out = attend(SPECS[label], impl, data, is_causal=causal)
        assert out.isfinite().all(), size
        grads = gradients(out, named(data))
        assert all(grad.isfinite().all() for grad in grads.values()), size
        if SPECS[label].normalise:
            assert all(grad.abs().max() < 100 * size for grad in grads.values()), size


def test_an_output_that_float16_cannot_hold_is_infinite() -> None:
    """The sums are made in float32, and rounded once."""
    data = draw(4, dtype=torch.float16)
    large = Data(data.q * 100, data.k * 100, data.v * 100)
    spec = regard.Spec.parse("linear*fixed(bias=0.5)")
    w = large.q.double() @ large.k.double().transpose(-1, -2) / 3**0.5 + 0.5
    exact = w @ large.v.double()
    assert exact.abs().max() > 65504
    for impl in ("reference", "blocked", "linear"):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = regard.attention(*large.tensors, spec, impl=impl)
        torch.testing.assert_close(out.double(), exact.half().double(), rtol=2e-3, atol=10.0)


@few_pairs_first
@pytest.mark.parametrize("keys", [0, 5])
def test_an_empty_batch(label: str, impl: str, keys: int) -> None:
    """With segments, masks and diagnostics: empty outputs, statistics and gradients."""
    calls = (
        {},
        {"segment_ids": torch.zeros(0, keys, dtype=torch.long)},
        {"segment_ids": torch.zeros(1, keys, dtype=torch.long), "is_causal": True},
        {"attn_mask": torch.ones(0, 1, 1, keys, dtype=torch.bool)},
        {"attn_mask": torch.ones(0, 1, keys, keys, dtype=torch.bool)},
        {"is_causal": True, "query_offset": torch.zeros(0, dtype=torch.long)},
    )
    data = draw(keys, batch=0).leaves()
    for diagnostics in (False, True):
        for _, _, out in outputs(label, impl, data, dict(enumerate(calls)), return_diagnostics=diagnostics):
            if diagnostics:
                out, rows = out
                assert rows.support.shape == rows.density.shape == (0, 2, keys)
            assert out.shape == (0, 2, keys, 2)
            for name, grad in gradients(out, named(data)).items():
                assert grad.shape == named(data)[name].shape


def meta(*sizes: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(*sizes, dtype=dtype, device="meta", requires_grad=True)


@pytest.mark.parametrize("label", [*PRESETS, "local-linear[biweight]", "gaussian*fixed*linear(ridge=0.3,solver=cg)"])
def test_attention_on_the_meta_device(label: str) -> None:
    """Shapes and dtypes of outputs, gradients and diagnostics, by every implementation that can."""
    ids = torch.zeros(2, 6, dtype=torch.long, device="meta")
    mask = torch.ones(2, 1, 6, 6, dtype=torch.bool, device="meta")
    calls = ({}, {"is_causal": True}, {"window": 2}, {"segment_ids": ids}, {"attn_mask": mask})
    able = 0
    for impl, dtype, call in product(("auto", *IMPLS), (torch.float32, torch.bfloat16), calls):
        data = Data(meta(2, 4, 6, 3, dtype=dtype), meta(2, 2, 6, 3, dtype=dtype), meta(2, 2, 6, 5, dtype=dtype))
        out = attend(regard.Spec.parse(label), impl, data, enable_gqa=True, **call)
        if out is not None:
            able += 1
            assert (out.shape, out.dtype, out.device.type) == ((2, 4, 6, 5), dtype, "meta")
            found = torch.autograd.grad(out.float().sum(), data.tensors, allow_unused=True)
            assert all(g is None or g.shape == x.shape for g, x in zip(found, data.tensors, strict=True))
    assert able > 10
    _, rows = regard.attention(meta(2, 2, 6, 3), meta(2, 2, 6, 3), meta(2, 2, 6, 3), label, return_diagnostics=True)
    assert rows.support.shape == (2, 2, 6)


def test_other_calls_on_the_meta_device() -> None:
    q, k, v, beta = meta(2, 2, 6, 4), meta(2, 2, 6, 4), meta(2, 2, 6, 5), meta(2, 2, 6)
    out = regard.local_linear_attention(q, k, v)
    assert (out.shape, out.device.type) == (v.shape, "meta")
    assert torch.autograd.grad(out.sum(), q)[0].shape == q.shape
    for weights in (regard.entmax(q), regard.entmax(q, 4.0), regard.entmax(q, beta[..., None] + 1), regard.relumax(q)):
        assert (weights.shape, weights.device.type) == (q.shape, "meta")
    for spec in ("softmax", "biweight", "elu"):
        memory = regard.AssociativeMemory(spec)
        memory.write(k.detach())
        assert memory.read(q).shape == q.shape


AUTOCAST = [*(name for name, spec in regard.presets().items() if str(spec) == name), "local-linear[biweight]"]
AUTOCAST += ["epanechnikov*nearest(k=4)", "gaussian*nearest(k=4)", "triweight*anchored(margin=0.5)"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("spec", AUTOCAST)
def test_autocast_changes_nothing(spec: str, impl: str, dtype: torch.dtype) -> None:
    """Neither around the call nor, but for the reference, around its backward pass."""
    data = draw(12, batch=1, dim=8, value_dim=8, dtype=dtype).leaves()

    def run(inside: bool, after: bool) -> list[Tensor]:
        with torch.autocast("cpu", torch.bfloat16, enabled=inside):
            out = attend(regard.Spec.parse(spec), impl, data, is_causal=True)
        with torch.autocast("cpu", torch.bfloat16, enabled=after):
            return [] if out is None else [out.detach(), *gradients(out, named(data)).values()]

    expected = run(False, False)
    for inside, after in ((True, False), (True, impl != "reference")):  # autograd of the reference is torch's own
        same(run(inside, after), expected)


@pytest.mark.parametrize("spec", ["softmax", "biweight", "relumax", "shift-cosine"])
def test_forward_mode_through_the_default_implementation(spec: str) -> None:
    """The tangent equals a central difference."""
    data = draw(6, batch=1, dim=8)
    direction, step = torch.linspace(-1, 1, data.q.numel(), dtype=torch.float64).view_as(data.q), 1e-6

    def run(x: Tensor, impl: str = "auto") -> Tensor:
        return regard.attention(x, data.k, data.v, spec, is_causal=True, impl=impl)

    _, tangent = torch.func.jvp(run, (data.q,), (direction,))
    expected = (run(data.q + step * direction) - run(data.q - step * direction)) / (2 * step)
    assert expected.abs().max() > 1e-3
    assert (tangent - expected).abs().max() < 1e-7
    refuses("no forward mode", torch.func.jvp, partial(run, impl="blocked"), (data.q,), (direction,))


def test_a_score_one_ulp_inside_the_edge_has_a_finite_gradient() -> None:
    texts = ("0x0p0", "-0x1.c4a4ep-5", "-0x1.d97ca8p-3", "-0x1.e85b5ep-1")
    z = torch.tensor([[float.fromhex(t) for t in texts]], requires_grad=True)
    (grad,) = torch.autograd.grad(regard.entmax(z, 1.6)[0, 0], z)
    assert bool(torch.isfinite(grad).all())
    assert abs(float(grad.sum())) < 1e-5


LOOPED = [label for label in SPECS if SPECS[label].degree and "cg" not in label and "learned" not in label]
"""Local linear models that vmap takes: conjugate gradients look at residuals, and a learned solver needs a probe."""


@pytest.mark.parametrize("label", LOOPED)
def test_vmap_of_the_local_linear_model(label: str) -> None:
    """vmap over calls is a loop over them, forward and backward."""
    many = [draw(5, batch=1, seed=seed).leaves() for seed in range(3)]
    q, k, v = (torch.stack(x).detach() for x in zip(*(data.tensors for data in many), strict=True))

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return regard.attention(q, k, v, SPECS[label], is_causal=True)

    def loss(*tensors: Tensor) -> Tensor:
        return call(*tensors).square().sum()

    torch.testing.assert_close(torch.func.vmap(call)(q, k, v), torch.stack([call(*x.tensors) for x in many]))
    slopes = torch.func.vmap(torch.func.grad(loss, argnums=(0, 1, 2)))(q, k, v)
    each = zip(*(torch.autograd.grad(loss(*data.tensors), data.tensors) for data in many), strict=True)
    torch.testing.assert_close(slopes, tuple(map(torch.stack, each)), rtol=1e-9, atol=1e-9)


def test_conjugate_gradients_under_a_transform_are_refused() -> None:
    spec, data = "gaussian*fixed*linear(ridge=0.3,solver=cg)", draw(4)
    call = torch.func.vmap(lambda q: regard.attention(q[None], data.k[:1], data.v[:1], spec))
    refuses("solver=cholesky", call, data.q)


@pytest.mark.parametrize(("label", "impl"), few_first(FAST))
def test_a_window_beyond_all_integers_is_none(label: str, impl: str) -> None:
    data = draw(6, dtype=torch.float32)
    for order, _, out in outputs(label, impl, data, ("all", "causal"), window=10**30):
        expected = attend(SPECS[label], "reference", data, is_causal=order == "causal")
        torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("impl", ["reference", "blocked", "cpu"])
@pytest.mark.parametrize("kernel", ["gaussian", "uniform", "biweight"])
def test_a_number_of_keys_beyond_all_integers_is_all(kernel: str, impl: str) -> None:
    data = draw(6, dtype=torch.float32).leaves()
    for k in (10**20, 2**63, 2**63 - 1):
        out = attend(regard.Spec.parse(f"{kernel}*nearest(k={k})"), impl, data)
        same(out, attend(regard.Spec.parse(f"{kernel}*nearest(k=6)"), impl, data))
    assert torch.equal(regard.topk_uniform(data.v, 10**20), torch.full_like(data.v, 1 / data.v.shape[-1]))


@pytest.mark.parametrize("score", [1e2, 1e4, 1e6])
def test_gradients_of_softmax_at_large_scores(score: float) -> None:
    """As docs/conventions.md says: torch's kernel loses digits in proportion to the scores, the reference does not."""
    q, k = torch.full((1, 1, 1, 4), score / 4), torch.ones(1, 1, 16, 4)
    for impl, error in (("sdpa", 3e-7 * score), ("reference", 1e-6)):
        v = torch.ones(1, 1, 16, 2, requires_grad=True)
        (grad,) = torch.autograd.grad(regard.attention(q, k, v, "softmax", scale=1.0, impl=impl).sum(), v)
        assert (16 * grad - 1).abs().max() < error + 1e-6, impl
