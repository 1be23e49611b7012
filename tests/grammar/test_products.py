"""Every product of kernel, bandwidth rule, similarity and normalisation: refused for its reason, or equal to the
plain formula, with the gradient of the scores and of every number."""

from __future__ import annotations

import itertools

import numpy as np
import oracles
import pytest
import torch
from torch import Tensor

import regard
from regard.checks import ArgumentError
from regard.grammar import Spec, bandwidths, kernels, similarities

RANKED = {"gaussian", "polynomial", "epanechnikov", "biweight", "triweight", "uniform"}
POLYNOMIAL = {"polynomial": 1.0, "epanechnikov": 1.0, "biweight": 2.0, "triweight": 3.0}
POINTWISE = {"linear", "geometric", "clipped-geometric"}
RULES = {"fixed", "adaptive", "anchored", "nearest"}


def test_the_lists_above_are_registered() -> None:
    """What is added later need not be named here: its formula stands in a test of its own."""
    assert set(kernels.names()) >= RANKED | POINTWISE
    assert set(bandwidths.names()) >= RULES
    assert set(similarities.names()) >= {"dot", "cosine", "euclidean", "relu", "relu2", "elu"}


# Products without a meaning ---------------------------------------------------------------------------------


def refusal(kernel: str, rule: str, similarity: str, normalise: bool) -> str | None:
    """Words of the reason, or None where the product has a meaning."""
    if kernel == "geometric" and similarity not in ("cosine", "euclidean"):
        return "needs scores below 1; use similarity='cosine'"
    if rule == "fixed":
        return None
    if kernel in POINTWISE:
        return "function of the score itself" if rule != "adaptive" else "only the fixed rule has a meaning"
    if rule == "adaptive" and kernel == "gaussian":
        return "use gaussian*fixed"
    if rule == "adaptive" and kernel == "uniform":
        return r"use uniform\*nearest or uniform\*anchored"
    return None if normalise else "weights that sum to one"


@pytest.mark.parametrize("kernel", sorted(RANKED | POINTWISE))
@pytest.mark.parametrize("rule", sorted(RULES))
def test_which_products_are_refused_and_why(kernel: str, rule: str) -> None:
    for similarity, normalise in itertools.product(similarities.names(), (True, False)):
        reason = refusal(kernel, rule, similarity, normalise)
        if reason is None:
            spec = Spec(kernel, rule, similarity=similarity, normalise=normalise)
            assert spec.weighting.normalised == normalise
        else:
            with pytest.raises(ArgumentError, match=reason.replace("gaussian*", r"gaussian\*")) as caught:
                Spec(kernel, rule, similarity=similarity, normalise=normalise)
            assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("gaussian*fixed(bias=1)", "a bias cancels when gaussian weights are normalised"),
        ("geometric*fixed(bias=0.5)*cosine", "takes no bias"),
        ("clipped-geometric*fixed(bias=0.5)", "takes no bias"),
        ("epanechnikov*fixed(h=1)", "needs similarity 'cosine' or 'euclidean', not 'dot'"),
        ("gaussian*fixed(h=1)*relu", "needs similarity 'cosine' or 'euclidean', not 'relu'"),
        ("linear*fixed(h=1)*cosine", "normalised gaussian, polynomial and uniform kernels"),
        ("gaussian*fixed(h=1)*euclidean*unnormalised", "normalised gaussian, polynomial and uniform kernels"),
        ("epanechnikov*fixed(h=1,bias=2)*cosine", "give one of them"),
        ("biweight*nearest(gradient=soft)", "no jump to smooth"),
        ("epanechnikov*nearest(k=3,gradient=soft)", "no jump to smooth"),
        ("linear*fixed*linear", "non-negative weights that sum to one"),
        ("gaussian*fixed*unnormalised*linear", "non-negative weights that sum to one"),
        ("linear*fixed*cosine*normalised*linear", "non-negative weights that sum to one"),
    ],
)
def test_refusals_that_hang_on_an_argument(text: str, reason: str) -> None:
    with pytest.raises(ArgumentError, match=reason):
        Spec.parse(text)


def test_the_refusal_of_degree_1_lists_presets_that_can() -> None:
    with pytest.raises(ArgumentError) as caught:
        Spec("linear", degree=1)
    able = str(caught.value).split("Presets that do: ")[1].rstrip(".").split(", ")
    positive = set(regard.presets()) - {"linear", "cosine", "local-linear"}
    assert set(able) == positive
    for name in able:  # and they do
        preset = regard.presets()[name]
        Spec(preset.kernel, preset.bandwidth, 1, similarity=preset.similarity, normalise=preset.normalise)


# Products with a meaning ------------------------------------------------------------------------------------

ROWS, KEYS = 5, 11


def shape_of(kernel: str, r: Tensor | float, a: Tensor) -> Tensor:
    """K(a), with exact zeros outside, differentiable inside."""
    if kernel == "gaussian":
        return torch.exp(a)
    if kernel == "uniform":
        return (a > 0).to(a.dtype)
    inside = a > 0
    return torch.where(inside, torch.where(inside, a, 1.0) ** r, 0.0)


def threshold(rule: str, kernel: str, z: Tensor, numbers: dict[str, Tensor]) -> Tensor | None:
    """theta of each row, differentiable in z and the numbers; None where every visible key counts."""
    visible = torch.where(torch.isinf(z), torch.nan, z)
    if rule == "fixed":
        return None if kernel == "gaussian" else -numbers["bias"]
    if rule == "anchored":
        return torch.amax(z, -1, keepdim=True) - numbers["margin"]
    if rule == "nearest":
        ranked = torch.sort(z, dim=-1, descending=True).values
        count = (~torch.isnan(visible)).sum(-1, keepdim=True)
        following = ranked[:, 3:4]  # k = 3
        lowest = ranked.gather(-1, count - 1) - 1
        return torch.where(count > 3, following, lowest)
    alpha = numbers["alpha"]
    r = 1 / (alpha - 1)
    rows, alphas = z.detach().numpy(), alpha.detach().expand(len(z), 1)
    tau = [float(oracles.entmax_row(x, float(a))[1]) for x, a in zip(rows, alphas, strict=True)]
    theta = torch.tensor(tau, dtype=z.dtype)[:, None]
    # One Newton step from the root: its value is zero, its derivative that of the implicit function.
    a = torch.where(torch.isinf(z), -1e3, z) / r - theta
    inside = a > 0
    a = torch.where(inside, a, 1.0)
    total = torch.where(inside, a**r, 0.0).sum(-1, keepdim=True)
    slope = torch.where(inside, r * a ** (r - 1), 0.0).sum(-1, keepdim=True).detach()
    return r * (theta + (total - 1) / slope)


def plain(rule: str, kernel: str, z: Tensor, numbers: dict[str, Tensor]) -> Tensor:
    """K(z - theta) / sum K; rows without support are uniform over what is visible."""
    theta = threshold(rule, kernel, z, numbers)
    r = 1 / (numbers["alpha"] - 1) if "alpha" in numbers else numbers.get("r", POLYNOMIAL.get(kernel, 1.0))
    hidden = torch.isinf(z)
    a = torch.where(hidden, -1.0, z) if theta is None else torch.where(hidden, -1.0, z - theta)
    w = torch.where(hidden, 0.0, shape_of(kernel, r, a))
    if theta is not None and kernel == "gaussian":  # nearest keeps theta's key out, anchored the edge
        w = torch.where(a > 0, torch.exp(torch.where(hidden, 0.0, z)), 0.0)
    mass = w.sum(-1, keepdim=True)
    none = mass == 0
    even = (~hidden).to(z.dtype) / (~hidden).sum(-1, keepdim=True)
    return torch.where(none, even, w / torch.where(none, 1.0, mass))


def inputs(seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(keys [ROWS, KEYS] that are scores up to the scale, values, mask, output weights)."""
    g = torch.Generator().manual_seed(seed)
    key = torch.randn(ROWS, KEYS, generator=g, dtype=torch.float64)
    value = torch.randn(ROWS, KEYS, generator=g, dtype=torch.float64)
    mask = torch.rand(ROWS, KEYS, generator=g) < 0.8
    mask[0] = True
    mask[1] = torch.arange(KEYS) < 2  # fewer visible than k
    return key, value, mask, torch.randn(ROWS, generator=g, dtype=torch.float64)


NUMBERS = {
    "fixed": {"bias": (0.4, -0.3, 5.0, 0.1, -9.0), "r": (1.3, 2.0, 0.7, 1.0, 3.0)},
    "adaptive": {"alpha": (1.5, 1.2, 2.0, 2.7, 1.05)},
    "anchored": {"margin": (0.5, 1.0, 2.5, 0.2, 1.7), "r": (1.3, 2.0, 0.7, 1.0, 3.0)},
    "nearest": {"r": (1.3, 2.0, 0.7, 1.0, 3.0)},
}
PRODUCTS = [
    (kernel, rule)
    for kernel, rule in itertools.product(sorted(RANKED), sorted(RULES))
    if refusal(kernel, rule, "dot", True) is None
]


def numbers_of(kernel: str, rule: str) -> dict[str, Tensor]:
    """A tensor for every number the product takes."""
    own = dict(NUMBERS[rule])
    if kernel not in POLYNOMIAL:
        own.pop("r", None)
    if kernel == "gaussian":
        own.pop("bias", None)
    return {name: torch.tensor(x, dtype=torch.float64)[:, None] for name, x in own.items()}


@pytest.mark.parametrize(("kernel", "rule"), PRODUCTS)
@pytest.mark.parametrize("impl", ["reference", "blocked"])
def test_formula_and_all_gradients(kernel: str, rule: str, impl: str) -> None:
    key, value, mask, cotangent = inputs()
    numbers = numbers_of(kernel, rule)
    scale = torch.tensor([0.7, 1.0, 1.9, 0.2, 1.3], dtype=torch.float64)[:, None]
    spec = Spec.parse(f"{kernel}*{rule}" + ("(k=3)" if rule == "nearest" else ""))
    assert set(spec.params) == set(numbers)

    leaves = [t.clone().requires_grad_() for t in (key, value, scale, *numbers.values())]
    given = dict(zip(numbers, leaves[3:], strict=True))
    p = plain(rule, kernel, torch.where(mask, leaves[2] * leaves[0], -torch.inf), given)
    expected = (p * leaves[1]).sum(-1)
    slopes = torch.autograd.grad((expected * cotangent).sum(), leaves, allow_unused=True)

    ours = [t.clone().requires_grad_() for t in (key, value, scale, *numbers.values())]
    out = regard.attention(
        torch.ones(1, ROWS, 1, 1, dtype=torch.float64),
        ours[0][None, ..., None],
        ours[1][None, ..., None],
        spec,
        attn_mask=mask[None, :, None],
        scale=ours[2][None],
        params={name: x[None] for name, x in zip(numbers, ours[3:], strict=True)},
        impl=impl,
    ).flatten()
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)
    found = torch.autograd.grad((out * cotangent).sum(), ours, allow_unused=True)
    for name, a, b in zip(("key", "value", "scale", *numbers), found, slopes, strict=True):
        zero = torch.zeros(())
        a, b = zero if a is None else a, zero if b is None else b
        assert float((a - b).abs().max()) <= 1e-10 * (1 + float(b.abs().max())), name


@pytest.mark.parametrize("impl", ["reference", "blocked"])
@pytest.mark.parametrize("kernel", sorted(RANKED | POINTWISE - {"geometric"}))
@pytest.mark.parametrize("normalise", [True, False])
def test_sums_of_the_score_itself(kernel: str, normalise: bool, impl: str) -> None:
    """Unnormalised ranked kernels and the kernels of the score itself, with their numbers and gradients."""
    if normalise and kernel in RANKED:
        return  # the test above
    key, value, mask, cotangent = inputs(1)
    numbers = {}
    if kernel != "clipped-geometric":
        numbers["bias"] = torch.tensor([0.4, -0.3, 5.0, 0.1, -9.0], dtype=torch.float64)[:, None]
    if kernel in POLYNOMIAL:
        numbers["r"] = torch.tensor([1.3, 2.0, 0.7, 1.0, 3.0], dtype=torch.float64)[:, None]
    spec = Spec(kernel, "fixed", normalise=normalise)
    assert set(spec.params) == set(numbers)

    def formula(key: Tensor, value: Tensor, *rest: Tensor) -> Tensor:
        given = dict(zip(numbers, rest, strict=True))
        a = key + given.get("bias", 0.0)
        if kernel == "linear":
            w = a
        elif kernel == "clipped-geometric":
            w = 1 / (1.0001 - a / 300)
        else:
            w = shape_of(kernel, given.get("r", 1.0), a)
        w = torch.where(mask, w, 0.0)
        return ((w / w.sum(-1, keepdim=True) if normalise else w) * value).sum(-1)

    leaves = [t.clone().requires_grad_() for t in (key, value, *numbers.values())]
    expected = formula(*leaves)
    slopes = torch.autograd.grad((expected * cotangent).sum(), leaves, allow_unused=True)
    ours = [t.clone().requires_grad_() for t in (key, value, *numbers.values())]
    out = regard.attention(
        torch.ones(1, ROWS, 1, 1, dtype=torch.float64),
        ours[0][None, ..., None],
        ours[1][None, ..., None],
        spec,
        attn_mask=mask[None, :, None],
        scale=1.0 if spec.takes_scale else None,
        params={name: x[None] for name, x in zip(numbers, ours[2:], strict=True)},
        impl=impl,
    ).flatten()
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    found = torch.autograd.grad((out * cotangent).sum(), ours, allow_unused=True)
    for name, a, b in zip(("key", "value", *numbers), found, slopes, strict=True):
        zero = torch.zeros(())
        a, b = zero if a is None else a, zero if b is None else b
        assert float((a - b).abs().max()) <= 1e-10 * (1 + float(b.abs().max())), name


def test_numbers_of_a_spec_are_those_of_params() -> None:
    """What a sentence says with a number, `params` says with the same number or a tensor."""
    key, value, mask, _ = inputs(2)
    q = torch.ones(1, ROWS, 1, 1, dtype=torch.float64)
    k, v, seen = key[None, ..., None], value[None, ..., None], mask[None, :, None]
    for said, bare, params in (
        ("polynomial(r=1.7)*anchored(margin=0.6)", "epanechnikov*anchored", {"r": 1.7, "margin": 0.6}),
        ("triweight*fixed(bias=0.2)", "triweight*fixed", {"bias": 0.2}),
        ("polynomial(r=4)*adaptive", "biweight*adaptive", {"alpha": 1.25}),
        ("linear*fixed(bias=3)*unnormalised", "linear*fixed*unnormalised", {"bias": 3.0}),
    ):
        for impl in ("reference", "blocked"):
            expected = regard.attention(q, k, v, said, attn_mask=seen, scale=1.0, impl=impl)
            for numbers in (params, {n: torch.tensor(x, dtype=torch.float64) for n, x in params.items()}):
                got = regard.attention(q, k, v, bare, attn_mask=seen, scale=1.0, params=numbers, impl=impl)
                np.testing.assert_allclose(got.numpy(), expected.numpy(), rtol=0, atol=1e-14)
