"""Every kernel x rule x degree x similarity x normalisation equals the dense oracle, values and gradients, or is
refused for a reason listed here. Every implementation equals the reference, at every length and precision."""

from functools import lru_cache
from itertools import product
from typing import Any

import pytest
import torch
from mistakes import error_of
from torch import Tensor

import regard
from regard.checks import ArgumentError
from regard.grammar.spec import _TEXTS

from . import oracle
from .cases import (
    FAST,
    IMPLS,
    KERNELS,
    PAIRS,
    PRESETS,
    REGISTRIES,
    REPRESENTATIVES,
    RULES,
    SIMILARITIES,
    SMALL,
    SPECS,
    Data,
    attend,
    built,
    close,
    draw,
    few_pairs_first,
    gradients,
    impls_of,
    learned,
    like,
    masks,
    named,
    outputs,
    run,
    text,
)

POLYNOMIALS = ("polynomial", "epanechnikov", "biweight", "triweight")
RANKED = ("gaussian", "uniform", *POLYNOMIALS)
UNBOUNDED = ("dot", "relu", "relu2", "elu")  # similarities that can exceed one
SIGNED = ("dot", "cosine", "euclidean")

MORE = (
    "clipped-geometric(limit=10,eps=0.5)*fixed*unnormalised",
    "linear*fixed(bias=2)*unnormalised",
    "linear*fixed*cosine(eps=7)",
    "polynomial(r=0.5)*fixed(bias=2)*unnormalised",
    "uniform*fixed(bias=-0.4)*unnormalised",
    "gaussian*fixed(bias=1)*unnormalised",
    "gaussian*nearest(k=1,gradient=soft)",
    "gaussian*fixed(h=1.4)*euclidean",
    "biweight*fixed(h=1.4)*euclidean",
    "polynomial(r=0.5)*fixed(h=1.7)*cosine(eps=0)",
    "uniform*nearest(k=3,gradient=soft,temperature=0.3)",
    "gaussian*fixed*linear(ridge=0.3,ridge_mode=absolute)",
    "triweight*anchored(margin=1.5)*linear(ridge=0.3,ridge_mode=absolute)",
    "epanechnikov*fixed(bias=2)*linear(ridge=0.3,ridge_mode=absolute)",
    "gaussian*fixed*cosine*linear(ridge=0.3,ridge_mode=absolute)",
    "gaussian*fixed*linear(ridge=0.3,solver=block-diagonal(blocks=1))",
)
"""Specs with other constants, absolute ridges and options, which are compared with the oracle alone."""

# Why a spec has no meaning: (a fragment of the message, which specs). The first that fits is meant.
REFUSED = [
    ("needs scores below 1", lambda kernel, rule, degree, s, n: kernel == "geometric" and s in UNBOUNDED),
    ("a function of the score itself", lambda kernel, rule, degree, s, n: kernel not in RANKED and rule != "fixed"),
    ("the limit alpha -> 1", lambda kernel, rule, degree, s, n: (kernel, rule) == ("gaussian", "adaptive")),
    ("a 0/1 kernel jumps", lambda kernel, rule, degree, s, n: (kernel, rule) == ("uniform", "adaptive")),
    ("so normalise=False cannot be used", lambda kernel, rule, degree, s, n: rule != "fixed" and not n),
    ("non-negative weights that sum to one", lambda kernel, rule, degree, s, n: degree and not n),
    (
        "non-negative weights that sum to one",
        lambda kernel, rule, degree, s, n: degree and kernel == "linear" and s in SIGNED,
    ),
]  # fmt: skip
BUILT_IN = (
    {*RANKED, "linear", "geometric", "clipped-geometric"},
    {"fixed", "adaptive", "anchored", "nearest"},
    {"dot", "cosine", "euclidean", "relu", "relu2", "elu"},
)


def listed(kernel: str, rule: str, similarity: str) -> bool:
    return all(name in names for name, names in zip((kernel, rule, similarity), BUILT_IN, strict=True))


@pytest.mark.parametrize("normalise", [True, False], ids=["normalised", "unnormalised"])
@pytest.mark.parametrize(
    ("kernel", "rule", "degree", "similarity"), list(product(KERNELS, RULES, (0, 1), SIMILARITIES))
)
def test_product(kernel: str, rule: str, degree: int, similarity: str, normalise: bool) -> None:
    words = text(kernel, SMALL.get(rule, rule), similarity, degree, normalise)
    choice = (kernel, rule, degree, similarity, normalise)
    reason = next((fragment for fragment, fits in REFUSED if fits(*choice)), None)
    if not listed(kernel, rule, similarity):  # of a third party: it works, or says one of the known reasons
        found = built(words, [*(fragment for fragment, _ in REFUSED), "no power r"])
        if found is not None:
            agrees(found)
    elif reason is None:
        agrees(regard.Spec.parse(words))
    else:
        assert reason in error_of(regard.Spec.parse, words)


@pytest.mark.parametrize("label", [*SPECS, *MORE])
def test_spec(label: str) -> None:
    ways = {"pairs, strict": 4, "offsets, window": 1, "beyond": 2, "segments, causal, padding": 2}
    for how, kv_heads in ways.items():
        agrees(regard.Spec.parse(label), how, kv_heads)


def agrees(spec: regard.Spec, how: str = "padding, causal", kv_heads: int = 2) -> None:
    """Every implementation equals the oracle in the output and in every gradient; without an oracle's formula
    (parts of third parties) the implementations equal each other."""
    data = draw(6, 9, heads=4, kv_heads=kv_heads).leaves()
    call = masks(*data.sizes)[how]
    seen = oracle.visible(*data.sizes, **call)
    params, scale = learned(spec, data)
    inputs = named(data, params, scale)
    choices = oracle.read(spec)
    # Below r = 1 the slope at the edge is infinite, and rounding of the threshold is multiplied with it.
    tolerance = 1e-7 if choices.rule == "adaptive" and choices.r < 1 else 1e-9
    expected = None
    if oracle.knows(choices):
        out, _ = oracle.attention(choices, *data.tensors, seen, scale, params)
        expected = (out.detach(), gradients(out, inputs))
    for impl in IMPLS:
        out = attend(spec, impl, data, scale=scale, params=params, enable_gqa=True, **call)
        if out is None:
            continue
        found = gradients(out, inputs)
        expected = expected or (out.detach(), found)
        close(out, expected[0], 1e-10, f"{spec} {impl} output")
        close(found, expected[1], tolerance, f"{spec} {impl} gradients")


@pytest.mark.parametrize("name", oracle.PRESETS)
def test_preset_means_what_the_table_says(name: str) -> None:
    """At the default numbers and the default scale, with rows longer than the presets' k."""
    data = draw(40, batch=1, dim=5)
    expected, _ = oracle.attention(oracle.PRESETS[name], *data.tensors, oracle.visible(*data.sizes, is_causal=True))
    for impl in IMPLS:
        out = attend(SPECS[str(regard.presets()[name])], impl, data, is_causal=True)
        if out is not None:
            close(out, expected, 1e-10, f"{name} {impl}")


def test_the_oracle_knows_all_that_is_built_in() -> None:
    """A new kernel, rule, similarity or preset of the package needs its formula in the oracle."""
    axes = {"kernel": BUILT_IN[0], "bandwidth": BUILT_IN[1], "similarity": BUILT_IN[2]}
    for axis, names in axes.items():
        own = {n for n, made in REGISTRIES[axis].items() if made.__module__.startswith("regard.")}
        assert own == names
    own = {name for name in PRESETS if name in _TEXTS}
    assert set(oracle.PRESETS) == own
    assert all(oracle.knows(oracle.read(SPECS[str(s)])) for n, s in regard.presets().items() if n in own)


def test_local_linear_without_ridge_has_least_norm() -> None:
    """ridge = 0, with rows that see fewer keys than the model has unknowns."""
    data = draw(9, dim=4, batch=1)
    seen = oracle.visible(*data.sizes, is_causal=True)
    for words in ("gaussian*fixed*linear(ridge=0)", "biweight*linear(ridge=0)"):
        spec = regard.Spec.parse(words)
        expected, _ = oracle.attention(oracle.read(spec), *data.tensors, seen)
        leaves = data.leaves()
        out = regard.attention(*leaves.tensors, spec, is_causal=True)
        close(out, expected, 1e-7, words)
        assert all(g.isfinite().all() for g in gradients(out, named(leaves)).values())


def test_who_computes_what() -> None:
    """The reference and blocked compute everything: no contract passes for want of a runner."""
    for name in ("reference", "blocked"):
        assert {label for label, impl in PAIRS if impl == name} == set(SPECS)
    if "cpu" in IMPLS:
        assert {("biweight", "cpu"), ("local-linear[biweight]", "cpu")} <= set(PAIRS)
    assert ("softmax", "sdpa") in PAIRS
    assert ("rbf", "sdpa") in PAIRS
    data = draw()
    for how, call in masks(*data.sizes).items():
        for label, impl in product(("biweight", "local-linear[biweight]"), ("reference", "blocked")):
            assert attend(SPECS[label], impl, data, **call) is not None, f"{label}, {impl}: {how}"
    for how in ("all", "causal", "padding", "pairs, strict", "window, padding"):
        assert attend(SPECS["softmax"], "sdpa", data, **masks(*data.sizes)[how]) is not None, how


# Every implementation is the reference -----------------------------------------------------------------------


LENGTHS = (1, 2, 7, 15, 16, 17, 63, 64, 65, 127)


WAYS = ("causal", "pairs, strict", "offsets, window, causal", "padding", "keys by head, causal", "segments")


@lru_cache(maxsize=2)  # the implementations of a spec come one after the other
def _reference(label: str) -> tuple[Data, dict[str, Any], dict[str, tuple[Tensor, dict[str, Tensor]]]]:
    data = draw(17, 20, heads=4, kv_heads=2).leaves()
    params, scale = learned(SPECS[label], data)
    inputs, always = named(data, params, scale), {"enable_gqa": True, "scale": scale, "params": params}
    found = outputs(label, "reference", data, WAYS, **always)
    return data, always, {how: (out.detach(), gradients(out, inputs)) for how, _, out in found}


@pytest.mark.usefixtures("tiny_blocks")
@pytest.mark.parametrize(("label", "impl"), FAST)
def test_equals_the_reference(label: str, impl: str) -> None:
    """Values and gradients of inputs, scale and learned numbers, over many block borders and limits: float64."""
    spec, (data, always, expected) = SPECS[label], _reference(label)
    inputs = named(data, always["params"], always["scale"])
    edge = spec.bandwidth.name == "adaptive" and spec.kernel.r < 1
    for how, _, out in outputs(label, impl, data, WAYS, **always):
        close(out, expected[how][0], 1e-11, how)
        close(gradients(out, inputs), expected[how][1], 1e-6 if edge else 1e-10, f"{how}: gradients")


@pytest.mark.parametrize(("label", "impl"), FAST)
def test_diagnostics_equal_the_reference(label: str, impl: str) -> None:
    """tau, bandwidth, support, effective sample size and the flags of each row."""
    data = draw(9, 12)
    for how in ("pairs, strict", "behind", "segments"):
        call = masks(*data.sizes)[how]
        rows = [_diagnostics(SPECS[label], i, data, call) for i in ("reference", impl)]
        if rows[1] is None:
            continue
        expected, found = rows
        for name in ("tau", "bandwidth", "support", "effective_sample_size", "empty", "fallback", "status"):
            one, two = getattr(found, name), getattr(expected, name)
            one, two = one.expand(2, 2, 9).double(), two.expand(2, 2, 9).double()
            infinite = two.isinf()
            assert torch.equal(one[infinite], two[infinite]), name
            close(one[~infinite], two[~infinite], 1e-10, name)


def _diagnostics(spec: regard.Spec, impl: str, data: Data, call: dict[str, Any]) -> regard.Diagnostics | None:
    try:
        return run(spec, impl, data, return_diagnostics=True, **call)[1]
    except ArgumentError as error:
        if "no row statistics" not in str(error):
            raise
        return None


@pytest.mark.usefixtures("tiny_blocks")
@pytest.mark.parametrize("label", SPECS)
def test_every_length(label: str) -> None:
    """Self-attention at lengths on and around powers of two equals the oracle."""
    choices = oracle.read(SPECS[label])
    for length in LENGTHS:
        data = draw(length, batch=1, heads=1, seed=length)
        seen = torch.ones(length, length, dtype=torch.bool).tril()[None, None]
        expected = oracle.attention(choices, *data.tensors, seen)[0] if oracle.knows(choices) else None
        for impl in impls_of(label):
            out = attend(SPECS[label], impl, data, is_causal=True)
            expected = out if expected is None else expected
            close(out, expected, 1e-9, f"{impl}, length {length}")


@pytest.mark.parametrize("name", [name for name in PRESETS if regard.presets()[name].degree == 0])
def test_length_1000(name: str) -> None:
    """Real blocks with real borders, forward and backward."""
    data = draw(1000, batch=1, heads=1, dim=8, dtype=torch.float64).leaves()
    spec = regard.presets()[name]
    reference = attend(spec, "reference", data, is_causal=True)
    expected = gradients(reference, named(data))
    for impl in [impl for label, impl in FAST if label == str(spec)]:
        out = attend(spec, impl, data, is_causal=True)
        close(out, reference, 1e-10, impl)
        close(gradients(out, named(data)), expected, 1e-9, f"{impl}: gradients")


@pytest.mark.slow
@pytest.mark.parametrize("label", [label for label in SPECS if SPECS[label].degree == 1])
def test_length_1000_local_linear(label: str) -> None:
    data = draw(1000, batch=1, heads=1)
    seen = torch.ones(1000, 1000, dtype=torch.bool).tril()[None, None]
    expected, _ = oracle.attention(oracle.read(SPECS[label]), *data.tensors, seen)
    close(attend(SPECS[label], "auto", data, is_causal=True), expected, 1e-7)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
@few_pairs_first
def test_half_precision(label: str, impl: str, dtype: torch.dtype) -> None:
    """Against the oracle in float64 on the same rounded inputs: all arithmetic is float32, so that outputs and
    gradients are off by the last rounding and little more."""
    half = draw(17, 23, dtype=dtype).leaves()
    exact = half.map(lambda x: x.detach().double()).leaves()
    choices = oracle.read(SPECS[label])
    call = masks(*half.sizes)["padding, causal"]
    out = attend(SPECS[label], impl, half, **call)
    assert out.dtype == dtype
    found = gradients(out, named(half))
    assert all(grad.dtype == dtype for grad in found.values())
    if oracle.knows(choices):
        truth, _ = oracle.attention(choices, *exact.tensors, oracle.visible(*half.sizes, **call))
    else:
        truth = attend(SPECS[label], "reference", exact, **call)
    rounded(out, truth, dtype)
    expected = gradients(truth, named(exact), weight=like(out).double())
    for name, grad in found.items():
        rounded(grad, expected[name], dtype)


def rounded(found: Tensor, exact: Tensor, dtype: torch.dtype) -> None:
    """Within one rounding of `dtype`, and 1e-4 of the size of the whole for what is lost before it."""
    size = exact.abs().max().item()
    allowed = torch.finfo(dtype).eps * exact.abs() + 1e-4 * max(size, 1.0)
    assert bool(((found.double() - exact).abs() <= allowed).all())


@pytest.mark.parametrize("label", REPRESENTATIVES)
def test_float32(label: str) -> None:
    """1e-5 of the oracle, forward and backward, in every implementation."""
    single = draw(40, dtype=torch.float32, dim=8).leaves()
    exact = single.map(lambda x: x.detach().double()).leaves()
    seen = oracle.visible(*single.sizes, is_causal=True)
    truth, _ = oracle.attention(oracle.read(SPECS[label]), *exact.tensors, seen)
    expected = gradients(truth, named(exact))
    for impl in impls_of(label):
        out = attend(SPECS[label], impl, single, is_causal=True)
        close(out, truth, 1e-5, impl)
        close(gradients(out, named(single)), expected, 2e-5, f"{impl}: gradients")
