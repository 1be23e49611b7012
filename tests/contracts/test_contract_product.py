"""Every kernel x rule x degree x similarity x normalisation equals the dense oracle, values and gradients, or
is refused for a reason listed here."""

from itertools import product

import pytest
from mistakes import error_of

import regard
from regard.grammar.spec import _TEXTS

from . import oracle
from .cases import (
    IMPLS,
    KERNELS,
    PAIRS,
    PRESETS,
    REGISTRIES,
    RULES,
    SIMILARITIES,
    SMALL,
    SPECS,
    attend,
    built,
    close,
    draw,
    gradients,
    learned,
    masks,
    named,
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
    ("so normalise=False has no meaning", lambda kernel, rule, degree, s, n: rule != "fixed" and not n),
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


def refusal(kernel: str, rule: str, degree: int, similarity: str, normalise: bool) -> str | None:
    """The fragment expected in the error, or None where the spec has a meaning."""
    choice = (kernel, rule, degree, similarity, normalise)
    return next((fragment for fragment, fits in REFUSED if fits(*choice)), None)


def listed(kernel: str, rule: str, similarity: str) -> bool:
    return all(name in names for name, names in zip((kernel, rule, similarity), BUILT_IN, strict=True))


@pytest.mark.parametrize("normalise", [True, False], ids=["normalised", "unnormalised"])
@pytest.mark.parametrize(
    ("kernel", "rule", "degree", "similarity"), list(product(KERNELS, RULES, (0, 1), SIMILARITIES))
)
def test_product(kernel: str, rule: str, degree: int, similarity: str, normalise: bool) -> None:
    words = text(kernel, SMALL.get(rule, rule), similarity, degree, normalise)
    reason = refusal(kernel, rule, degree, similarity, normalise)
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
    """Presets and variants with numbers of their own, on rows limited in several ways."""
    for how in ("pairs, strict", "offsets, window", "beyond", "segments, causal, padding"):
        agrees(regard.Spec.parse(label), how)


def agrees(spec: regard.Spec, how: str = "padding, causal") -> None:
    """Every implementation equals the oracle in the output and in every gradient; without an oracle's formula
    (parts of third parties) the implementations equal each other."""
    data = draw(6, 9, heads=4, kv_heads=2).leaves()
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
        for name, grad in found.items():
            close(grad, expected[1][name], tolerance, f"{spec} {impl} gradient of {name}")


@pytest.mark.parametrize("name", oracle.PRESETS)
def test_preset_means_what_the_table_says(name: str) -> None:
    """At the default numbers and the default scale, with rows longer than the presets' k."""
    data = draw(40, batch=1, dim=5)
    seen = oracle.visible(*data.sizes, is_causal=True)
    expected, _ = oracle.attention(oracle.PRESETS[name], *data.tensors, seen)
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
