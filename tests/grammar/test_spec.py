"""Specs: reading, writing, presets, and messages that teach."""

import copy
import dataclasses
import json
import pickle
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
from contracts.cases import SPECS
from hypothesis import given, settings
from hypothesis import strategies as st
from mistakes import error_of

import regard
import regard.grammar.spec as spec_module
from regard.checks import ArgumentError
from regard.grammar import Spec, bandwidths, kernels, local_linear, similarities, solvers
from regard.grammar.spec import NO_TREND

positive = st.floats(1e-3, 1e6)
number = st.floats(-1e6, 1e6)


def made(registry, name: str, **arguments) -> st.SearchStrategy:
    return st.fixed_dictionaries(arguments).map(lambda given: registry.get(name)(**given))


KERNELS = st.one_of(
    st.sampled_from(kernels.names()),
    made(kernels, "polynomial", r=positive),
    made(kernels, "clipped-geometric", limit=positive, eps=positive),
)
GRADIENTS = st.sampled_from(["hard", "straight-through", "soft"])
BANDWIDTHS = st.one_of(
    st.none(),
    st.sampled_from(bandwidths.names()),
    made(bandwidths, "fixed", bias=number, empty=st.sampled_from(["uniform", "zero", "nearest"])),
    made(bandwidths, "fixed", h=positive),
    made(bandwidths, "anchored", margin=positive),
    made(bandwidths, "nearest", k=st.integers(1, 10**6), gradient=GRADIENTS, temperature=positive),
)
SIMILARITIES = st.one_of(st.sampled_from(similarities.names()), made(similarities, "cosine", eps=positive))
RIDGES = st.one_of(st.none(), positive, st.just(0))
SOLVERS = st.one_of(st.none(), st.sampled_from(solvers.names()))
MODELS = st.one_of(st.just({}), st.fixed_dictionaries({"degree": st.just(1), "ridge": RIDGES, "solver": SOLVERS}))


@settings(deadline=None, derandomize=True, max_examples=600)
@given(KERNELS, BANDWIDTHS, SIMILARITIES, MODELS, st.sampled_from([None, True, False]))
def test_round_trips(kernel, bandwidth, similarity, model, normalise) -> None:
    try:
        spec = Spec(kernel, bandwidth, similarity=similarity, normalise=normalise, **model)
    except ArgumentError:
        return  # the product has no meaning: tests/contracts/test_contract_product.py
    assert Spec.parse(str(spec)) == spec
    assert Spec.parse("*".join(spec.parts())) == spec
    assert Spec.from_json(spec.to_json()) == spec
    assert hash(Spec.parse(str(spec))) == hash(spec)


@pytest.mark.parametrize("label", SPECS)
def test_specs_round_trip(label: str) -> None:
    spec = SPECS[label]
    for again in (Spec.parse(label), Spec.parse("*".join(spec.parts())), Spec.from_json(spec.to_json())):
        assert again == spec
    assert pickle.loads(pickle.dumps(spec)) == copy.deepcopy(spec) == spec


@pytest.mark.parametrize("name", regard.presets())
def test_presets_are_printed_by_name(name: str) -> None:
    if name != "exponential":  # the same spec as softmax, which comes first
        assert str(Spec.parse(name)) == name
    assert Spec.parse(name) == regard.presets()[name]


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ("biweight", Spec("biweight", "adaptive")),
        ("polynomial", Spec("polynomial", "adaptive")),
        ("uniform", Spec("uniform", "nearest")),
        ("gaussian", Spec("gaussian", "fixed")),
        (" triweight * anchored( margin = .5 ) ", Spec("triweight", bandwidths.get("anchored")(0.5))),
        ("gaussian*euclidean*fixed", Spec("gaussian", "fixed", similarity="euclidean")),
        ("gaussian*linear", Spec("gaussian", degree=1, ridge=0.1)),
        ("gaussian*constant", Spec("gaussian")),
        ("biweight*linear(ridge=0)", Spec("biweight", degree=1, ridge=0.0)),
        ("biweight*linear(ridge=2e-3,solver=cholesky)", Spec("biweight", degree=1, ridge=0.002, solver="cholesky")),
        ("linear*fixed*cosine*normalised", Spec("linear", similarity="cosine", normalise=True)),
        ("local-linear[relumax]", local_linear(Spec.parse("relumax"))),
        ("local-linear[local-linear]", local_linear(Spec("gaussian"))),  # already linear
        ("local-linear[triweight*nearest(k=4)]", local_linear(Spec("triweight", bandwidths.get("nearest")(4)))),
        ("linear", Spec("linear")),  # the kernel and preset; the local model comes after a kernel
    ],
)
def test_reading(text: str, spec: Spec) -> None:
    assert Spec.parse(text) == spec


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        (Spec("gaussian"), "softmax"),
        (Spec("polynomial"), "sparsemax"),  # r = 1 under the adaptive rule
        (Spec("biweight", bandwidths.get("anchored")(2.0)), "biweight*anchored(margin=2.0)"),
        (Spec("biweight", degree=1), "local-linear[biweight]"),
        (Spec("gaussian", degree=1), "local-linear"),
        (Spec("biweight", degree=1, ridge=0.3), "biweight*adaptive*linear(ridge=0.3)"),
        (Spec("biweight", degree=1, solver="cholesky"), "biweight*adaptive*linear(ridge=0.1,solver=cholesky)"),
        (
            Spec("gaussian", degree=1, solver=solvers.get("cg")(tol=1e-4), ridge_mode="absolute"),
            "gaussian*fixed*linear(ridge=0.1,solver=cg(tol=0.0001),ridge_mode=absolute)",
        ),
        (
            Spec("gaussian", degree=1, ridge=1, solver=solvers.get("block-diagonal")(blocks=2)),
            "gaussian*fixed*linear(ridge=1.0,solver=block-diagonal(blocks=2))",
        ),
        (Spec("gaussian", normalise=False), "gaussian*fixed*unnormalised"),
        (Spec("linear", similarity="cosine", normalise=True), "linear*fixed*cosine*normalised"),
        (Spec("gaussian", bandwidths.get("fixed")(bias=1), normalise=False), "gaussian*fixed(bias=1.0)*unnormalised"),
        (Spec(kernels.get("polynomial")(7.5)), "polynomial(r=7.5)*adaptive"),
        (Spec(kernels.get("polynomial")(2.0)), "biweight"),
    ],
)
def test_writing(spec: Spec, text: str) -> None:
    assert str(spec) == text


def test_a_spec_is_immutable_and_usable_as_a_key() -> None:
    spec = Spec("biweight")
    with pytest.raises(dataclasses.FrozenInstanceError):
        spec.kernel = "gaussian"
    assert {spec: 1}[Spec("biweight", "adaptive")] == 1
    changed = regard.presets()
    changed["softmax"] = spec
    assert str(regard.presets()["softmax"]) == "softmax"  # a copy: nobody changes a preset for others


def test_json_is_plain_and_kernel_alone_is_enough() -> None:
    data = json.loads(Spec.parse("triweight*anchored(margin=0.5)*linear(ridge=0.2)").to_json())
    assert data["kernel"] == {"name": "triweight"}
    assert data["bandwidth"] == {"name": "anchored", "margin": 0.5}
    assert (data["degree"], data["ridge"]) == (1, 0.2)
    assert Spec.from_json('{"kernel": "biweight"}') == Spec("biweight")
    assert Spec.from_json('{"kernel": {"name": "polynomial", "r": 7.5}}') == Spec(kernels.get("polynomial")(7.5))


# Messages ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("softmx", "unknown spec 'softmx'. Did you mean 'softmax'"),
        ("biwieght", "Did you mean 'biweight'"),
        ("local-liner", "Did you mean 'local-linear'"),
        ("epanechnikow*fixed", "unknown kernel 'epanechnikow'. Did you mean 'epanechnikov'?"),
        ("zzz*fixed", "unknown kernel 'zzz'. Choose from: "),
        ("biweight*adaptiv", "unknown part 'adaptiv'. Did you mean 'adaptive'?"),
        ("biweight*cosin", "Did you mean 'cosine'"),
        ("biweight*unnormalized", "Did you mean 'unnormalised'"),
        ("biweight*anchored(margins=1)", "anchored: unknown argument 'margins'; anchored takes margin."),
        ("biweight*adaptive(k=3)", "adaptive: unknown argument 'k'; adaptive takes no arguments."),
        ("biweight(r=2)*adaptive", "biweight: unknown argument 'r'"),
        ("biweight*linear(rigde=1)", "linear: unknown argument 'rigde'; it takes: ridge, solver, ridge_mode."),
        ("biweight*linear(solver=colesky)", "unknown solver 'colesky'. Did you mean 'cholesky'?"),
        ("biweight*constant(ridge=1)", "constant: unknown argument 'ridge'; it takes: none."),
        ("biweight*adaptive*anchored", "names its bandwidth twice"),
        ("biweight*cosine*euclidean", "names its similarity twice"),
        ("softmax*cosine", "'softmax' is a preset, which stands alone; write its parts: gaussian*fixed."),
        ("biweight*anchored(margin=1", "expected ',' but found the end"),
        ("biweight*anchored(margin=1,margin=2)", "'margin' is given twice"),
        ("biweight*", "expected a name but found the end"),
        ("biweight*(margin=1)", "expected a name but found '('"),
        ("biweight adaptive", "expected '*' but found 'adaptive'"),
        ("biweight*adaptive?", "cannot read '?'"),
        ("", "expected the text of a spec, such as 'softmax', got ''"),
        ("   ", "expected the text of a spec"),
        ("local-linear[softmx]", "unknown spec 'softmx'"),
        ("polynomial(r=0)", "polynomial: r is 0, expected r > 0."),
        ("polynomial(r=nan)", "r is"),
        ("polynomial(r=big)", "r is 'big'"),
        ("gaussian*nearest(k=0)", "k is 0, expected a whole number >= 1"),
        ("gaussian*nearest(k=2.5)", "k is 2.5"),
        ("uniform*nearest(gradient=sofd)", "unknown gradient='sofd'. Did you mean 'soft'?"),
        ("uniform*nearest(gradient=soft,temperature=0)", "temperature is 0"),
        ("biweight*anchored(margin=0)", "margin is 0, expected margin > 0."),
        ("epanechnikov*fixed(h=0)*cosine", "h is 0, expected h > 0."),
        ("epanechnikov*fixed(empty=unifrom)", "unknown empty='unifrom'. Did you mean 'uniform'?"),
        ("epanechnikov*fixed(bias=wide)", "bias is 'wide'"),
        ("linear*fixed*cosine(eps=-1)", "eps is -1, expected eps >= 0."),
        ("clipped-geometric(limit=0)", "limit is 0, expected limit > 0."),
        ("clipped-geometric(eps=0)", "eps is 0, expected eps > 0."),
        ("biweight*linear(ridge=-0.1)", "ridge is -0.1, expected ridge >= 0."),
        ("gaussian*linear(solver=block-diagonal(blocks=-1))", "blocks is -1, expected a whole number >= 0"),
        ("biweight*linear(ridge=small)", "ridge is 'small'"),
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
def test_texts_that_are_refused(text: str, words: str) -> None:
    assert words in error_of(Spec.parse, text)
    check_prefix(text)


WORDS = [*kernels.names(), *bandwidths.names(), *similarities.names(), *solvers.names(), *regard.presets()]
WORDS += ["linear", "normalised", "unnormalised", "residual", "interpolated[mesa]", "word", "absolute", "ridge_mode"]
WORDS += ["bias", "h", "k", "r", "margin", "ridge", "solver", *"*****((()))===,[]?", "0", "1", "-1", "2.5", "nan"]


def check_prefix(text: str) -> None:
    """Check that an error names the call that was made, its argument, and no other call."""
    try:
        Spec.parse(text)
    except ArgumentError as error:
        empty, prefix, words = str(error).partition("Spec.parse: text: ")
        assert (empty, prefix) == ("", "Spec.parse: text: ")
        assert "Spec" not in words.replace(NO_TREND, "")
        assert not words.startswith(("text: ", "kernel: ", "bandwidth: ", "similarity: ", "solver: "))
        assert error_of(regard.explain, text, (1, 1, 2, 2)) == f"explain: spec: {words}"


@given(st.lists(st.sampled_from(WORDS), max_size=9).map("".join))
def test_errors_of_texts_have_one_prefix(text: str) -> None:
    check_prefix(text)


def test_deep_brackets_are_refused() -> None:
    for text in ("word(r=" * 9999, "local-linear[" * 9999 + "softmax" + "]" * 9999):
        assert "brackets within brackets" in error_of(Spec.parse, text)


def test_constructor_messages() -> None:
    assert "unknown kernel 'gausian'. Did you mean 'gaussian'?" in error_of(Spec, "gausian")
    assert "use Spec.parse('softmax')" in error_of(Spec, "softmax")
    assert "unknown thresholding rule 'adaptve'. Did you mean 'adaptive'?" in error_of(Spec, "biweight", "adaptve")
    assert "Did you mean 'cosine'" in error_of(Spec, "biweight", similarity="cosin")
    assert "degree is 2, expected 0 (constant) or 1 (linear)" in error_of(Spec, "biweight", degree=2)
    assert "ridge belongs to the local linear model" in error_of(Spec, "biweight", ridge=0.1)
    assert "solver belongs to the local linear model" in error_of(Spec, "biweight", solver="cholesky")
    assert "3 is not a kernel" in error_of(Spec, 3)
    assert "is not a kernel" in error_of(Spec, kernels.get("gaussian"))  # the class, not an instance
    assert "is not a thresholding rule" in error_of(Spec, "gaussian", kernels.get("gaussian")())
    assert "is not a solver" in error_of(Spec, "gaussian", degree=1, solver=0.5)
    assert "expected a Spec or its text, got 3" in error_of(regard.explain, 3, (1, 1, 2, 2))


def test_values_of_the_wrong_kind() -> None:
    for value in ("no", 1, 0.0):
        assert f"normalise is {value!r}, expected True, False or None" in error_of(Spec, "gaussian", normalise=value)
    assert "degree is True" in error_of(Spec, "gaussian", degree=True)
    assert "temperature is True" in error_of(bandwidths.get("nearest"), temperature=True)
    for text in (None, 3, [1], {"kernel": "gaussian"}):
        assert f"expected the text of a spec, such as 'softmax', got {text!r}" in error_of(Spec.parse, text)
        assert "Spec.from_json: " in error_of(Spec.from_json, text)


def test_json_messages() -> None:
    assert "Spec.from_json: text: not JSON" in error_of(Spec.from_json, "{")
    other = error_of(Spec.from_json, '{"kernel": "linear", "bandwidth": "adaptive"}')
    assert other.startswith("Spec.from_json: text: linear*adaptive: the linear kernel is a function")
    assert "expected an object with at least 'kernel'" in error_of(Spec.from_json, "[1]")
    assert "expected an object with at least 'kernel'" in error_of(Spec.from_json, "{}")
    unknown = error_of(Spec.from_json, '{"kernel": "gaussian", "bandwith": "fixed"}')
    assert "unknown field 'bandwith'. Did you mean 'bandwidth'?" in unknown
    assert "a kernel is a name or an object with 'name', got 3" in error_of(Spec.from_json, '{"kernel": 3}')
    assert "unknown kernel 'os.system'" in error_of(Spec.from_json, '{"kernel": "os.system"}')
    assert "unknown argument 'x'" in error_of(Spec.from_json, '{"kernel": {"name": "gaussian", "x": 1}}')


def test_the_refusal_of_degree_1_lists_presets_that_can() -> None:
    able = error_of(Spec, "linear", degree=1).split("Presets that do: ")[1].rstrip(".").split(", ")
    positive = set(regard.presets()) - {"linear", "cosine", "local-linear"}
    assert set(able) == positive
    for name in able:  # and they do
        preset = regard.presets()[name]
        Spec(preset.kernel, preset.bandwidth, 1, similarity=preset.similarity, normalise=preset.normalise)


def test_texts_that_change_at_every_call_fill_no_memory() -> None:
    """More texts than are kept, each read right, also the first one again."""
    texts = [f"epanechnikov*anchored(margin={n})" for n in range(1, 1101)]
    for _ in range(2):
        assert [Spec.parse(text).bandwidth.margin for text in texts] == list(range(1, 1101))
    results = spec_module._parsed.results
    assert len([name for name in vars(results) if name.startswith("made_")]) == len(results.names) == 1024


def test_threads_that_read_texts_at_once() -> None:
    """More texts than are kept, so that threads drop old ones at the same time."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(8) as pool:
            read = pool.map(lambda n: Spec.parse(f"epanechnikov*anchored(margin={n})").bandwidth.margin, range(1, 4001))
            assert list(read) == list(range(1, 4001))
    finally:
        sys.setswitchinterval(before)
    results = spec_module._parsed.results
    assert len([name for name in vars(results) if name.startswith("made_")]) == len(results.names) == 1024


def test_a_text_that_another_thread_dropped_meanwhile_is_read_again() -> None:
    text, results = "epanechnikov*anchored(margin=0.125)", spec_module._parsed.results
    first = Spec.parse(text)
    delattr(results, results.names[text,])
    try:
        assert Spec.parse(text) == first
    finally:
        del results.names[text,]
