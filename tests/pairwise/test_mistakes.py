"""Mistakes in calling attention, local linear attention and the normalisers: one line that names the call, what came
and what was expected. That every bad value of every argument is named is tested in `tests/fuzz`; here are the words."""

import math
from typing import Any

import pytest
import torch
from mistakes import says
from torch import Tensor

import regard
from regard.grammar.solvers import BlockDiagonal, Cholesky

NAMES = ("query", "key", "value")
FLAGS = ("is_causal", "exclude_self", "enable_gqa", "return_diagnostics")
IDS = torch.zeros(1, 7, dtype=torch.int64)
SCALELESS = ("cosine", "shift-cosine", "geometric", "clipped-geometric", "relu", "relu2", "elu",
             "gaussian*fixed(h=1)*cosine")  # fmt: skip


def tensors(dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """query [2, 4, 5, 8], key [2, 4, 7, 8] and value [2, 4, 7, 3]."""
    g = torch.Generator().manual_seed(0)
    sizes = zip(NAMES, ((5, 8), (7, 8), (7, 3)), strict=True)
    return {name: torch.randn(2, 4, *size, generator=g).to(dtype) for name, size in sizes}


def zeros(**sizes: tuple[int, ...]) -> dict[str, Tensor]:
    return {name: torch.zeros(size) for name, size in sizes.items()}


def pairs(heads: int) -> dict[str, Tensor]:
    return zeros(key=(2, heads, 7, 8), value=(2, heads, 7, 3))


def ones(*size: int, **how: Any) -> Tensor:
    return torch.ones(size, **how)


OTHER, META = tensors(torch.float64), {"device": "meta"}
SHARED, LOST = "cannot be divided among", "the position of every query must be that of one of the 7 keys"
TENSORS = [
    *((f"attention: {n} has shape {list(s)} ... expected [batch, heads, length, dim]", {n: ones(*s)})
      for n in NAMES for s in ((5, 8), (2, 5, 8), (1, 2, 4, 5, 8))),
    *((f"{n} has dtype {t}, expected a floating-point dtype", {n: OTHER[n].to(t)})
      for n in NAMES for t in (torch.int64, torch.int32, torch.bool, torch.complex64)),
    *((f"{n} is a list, expected a torch.Tensor", {n: [[1.0]]}) for n in NAMES),
    *((f"{n} is a NoneType", {n: None}) for n in NAMES),
    ("query has dtype torch.float8_e4m3fn", tensors(torch.float8_e4m3fn)),
    ("key is torch.float64 on cpu, but query is torch.float32 on cpu; convert one", {"key": OTHER["key"]}),
    ("value is torch.bfloat16 on cpu", {"value": OTHER["value"].bfloat16()}),
    ("key is torch.float32 on meta, but query is torch.float32 on cpu", {"key": ones(2, 4, 7, 8, **META)}),
    ("batch sizes differ: query [2, 4, 5, 8], key [3, 4, 7, 8]", zeros(key=(3, 4, 7, 8))),
    ("batch sizes differ", zeros(value=(1, 4, 7, 3))),
    ("query and key differ in their last axis", zeros(key=(2, 4, 7, 9))),
    ("key and value differ in heads or length", zeros(value=(2, 4, 6, 3))),
    ("key and value differ in heads or length", zeros(value=(2, 2, 7, 3))),
    ("value has no features", zeros(value=(2, 4, 7, 0))),
    ("query and key have no features", zeros(query=(2, 4, 5, 0), key=(2, 4, 7, 0))),
    ("pass enable_gqa=True", pairs(2)),
    ("query [2, 4, 5, 8], key [2, 2, 7, 8]", pairs(2)),
    *((SHARED, {**pairs(heads), "enable_gqa": True}) for heads in (3, 8, 0)),
]  # fmt: skip
LIMITS = [
    *((f"attn_mask has dtype {t}, expected torch.bool with True where a key may be attended", {"attn_mask": IDS.to(t)})
      for t in (torch.float32, torch.int64)),
    ("attn_mask is a list", {"attn_mask": [[True]]}),
    *((f"attn_mask has shape {list(s)}, which does not broadcast to [2, 4, 5, 7]", {"attn_mask": ones(*s) > 0})
      for s in ((6,), (5, 6), (4, 5, 6), (3, 1, 5, 7), (2, 3, 5, 7), (1, 2, 4, 5, 7))),
    ("attn_mask is on meta ... cpu", {"attn_mask": ones(5, 7, **META) > 0}),
    ("attn_mask is on meta ... cpu", {"attn_mask": ones(7, **META) > 0}),
    *((f"{n} is {v!r}, expected True or False", {n: v}) for n in FLAGS for v in ("no", 1, None)),
    *((f"window is {w!r}, expected a whole number >= 1 or None", {"window": w}) for w in (0, -1, 2.5, True, "4")),
    *((f"query_offset is {o!r}, expected a whole number or integers [B]", {"query_offset": o})
      for o in (1.5, True, "end")),
    *(("expected integers [2], one a sequence", {"query_offset": o})
      for o in (ones(2), IDS[0, :3], torch.tensor(1), ones(2) > 0)),
    *(("segment_ids  ... , expected ", {"segment_ids": ids})
      for ids in (IDS.tolist(), IDS.float(), IDS > 0, IDS[0], IDS[None], 3)),
    *(("segment_ids has shape", {"segment_ids": IDS.new_zeros(s)}) for s in ((1, 6), (3, 7), (7, 1), (2, 8))),
    ("segment_ids ... on meta", {"segment_ids": IDS.to("meta")}),
    *((LOST, {"segment_ids": IDS, "query_offset": o}) for o in (-1, 3, 100, torch.tensor([0, 3]))),
    *(("segment ... Those that can:", {"segment_ids": IDS, "impl": i, "spec": s})
      for i, s in (("sdpa", "softmax"), ("linear", "linear"))),
]  # fmt: skip
NUMBERS = [
    *((f"scale is {x}, expected a finite number", {"scale": x}) for x in (math.nan, math.inf)),
    *((f"scale is {x:g}, expected scale > 0", {"scale": x}) for x in (0, -1.0)),
    ("scale is '1'", {"scale": "1"}),
    ("scale is 1e+300, expected scale <= 3.40282e+38", {"scale": 1e300}),  # of float32 tensors
    ("scale has shape [3], which does not broadcast to [2, 4, 5]", {"scale": ones(3)}),
    ("scale has dtype torch.int64", {"scale": ones(5, dtype=torch.int64)}),
    ("scale is on meta ... cpu", {"scale": ones(5, **META)}),
    *(("scale ... leave scale out", {"scale": x, "spec": s}) for s in SCALELESS for x in (1.0, ones(5))),
    ("params is a list, expected", {"params": [1.5]}),
    ("unknown parameter 'alhpa' for biweight; it takes: alpha.", {"spec": "biweight", "params": {"alhpa": 1.5}}),
    ("unknown parameter 'alpha' for softmax; it takes: none.", {"params": {"alpha": 1.5}}),
    ("it takes: r, margin", {"spec": "relumax", "params": {"bias": 1.0}}),
    ("it takes: r, h", {"spec": "biweight*fixed(h=1)*cosine", "params": {"bias": 1.0}}),
    ("it takes: alpha, ridge", {"spec": "local-linear[biweight]", "params": {"h": 1.0}}),
    ("unknown parameter 'ridge'", {"spec": "biweight", "params": {"ridge": 1.0}}),
    *((f"params['alpha'] {words}", {"spec": "biweight", "params": {"alpha": x}}) for x, words in (
        (math.nan, "is nan, expected a finite number"), ("1", "is '1'"), (True, "is True"),
        (ones(3), "has shape [3], which does not broadcast to [2, 4, 5]"), (ones(5, **META), "is on meta"),
        (ones(5, dtype=torch.int64), "has dtype torch.int64"),
    )),
]  # fmt: skip
NAMED = [
    *((f"impl ... {x!r}", {"impl": x}) for x in (None, 3)),
    ("unknown impl 'referense'. Did you mean 'reference'?", {"impl": "referense"}),
    ("unknown impl 'cuda-kernel'. Choose from: auto, ", {"impl": "cuda-kernel"}),
    *(
        (f"impl='sdpa' {why} ... Those that can: {able}blocked, reference", {"impl": "sdpa", **how})
        for why, able, how in (
            ("computes only normalised Gaussian weights of degree 0", "cpu, ", {"spec": "biweight"}),
            ("computes only normalised Gaussian weights of degree 0", "", {"spec": "local-linear"}),
            ("computes only normalised Gaussian weights of degree 0", "cpu, ", {"spec": "local-linear[biweight]"}),
            ("has no window and no strictly causal order", "", {"exclude_self": True}),
            ("has no window and no strictly causal order", "", {"window": 2}),
            ("aligns causal order to the first key", "", {"is_causal": True, "query_offset": 2}),
            ("has no row statistics", "", {"return_diagnostics": True}),
        )
    ),
    ("expected a Spec or its text, got 3 (int)", {"spec": 3}),
    ("Did you mean 'softmax'", {"spec": "sofmax"}),
]


@pytest.mark.parametrize(("words", "given"), [*TENSORS, *LIMITS, *NUMBERS, *NAMED])
def test_attention(words: str, given: dict[str, Any]) -> None:
    assert len(says(words, regard.attention, **{**tensors(), "spec": "softmax", **given})) < 400


@pytest.mark.parametrize(
    ("spec", "name", "value", "words"),
    [
        ("biweight", "alpha", 0.9, "is 0.9, expected params['alpha'] >= 1"),
        ("biweight", "alpha", 0.5, "is 0.5, expected params['alpha'] >= 1"),
        ("relumax", "margin", 0.0, "is 0, expected params['margin'] > 0"),
        ("relumax", "margin", -1, "is -1, expected params['margin'] > 0"),
        ("relumax", "r", 0, "is 0, expected params['r'] > 0"),
        ("epanechnikov*fixed(h=1)*cosine", "h", -0.5, "is -0.5, expected params['h'] > 0"),
        ("gaussian*fixed(h=1)*euclidean", "h", 0.0, "is 0, expected params['h'] > 0"),
        ("local-linear", "ridge", -0.1, "is -0.1, expected params['ridge'] >= 0"),
        ("local-linear[shift-cosine]", "bias", 0.5, "is 0.5, expected params['bias'] >= 1"),
    ],
)
def test_params_out_of_range(spec: str, name: str, value: float, words: str) -> None:
    says(words, regard.attention, **tensors(), spec=spec, params={name: value})
    # As tensors they are looked at under debug() only, since looking waits for the device.
    with regard.checks.debug():
        says(words.split("expected")[0], regard.attention, **tensors(), spec=spec, params={name: ones() * value})


@pytest.mark.parametrize("name", NAMES)
def test_debug_names_a_tensor_that_is_not_finite(name: str) -> None:
    given = tensors()
    given[name][1, 2, 4, 1] = math.inf
    with regard.checks.debug():
        says(f"attention: {name} holds NaN or infinite", regard.attention, **given)


def test_numbers_out_of_range_show_in_every_row() -> None:
    margin = {"margin": torch.tensor(-1.0)}
    for impl in ("auto", "reference"):
        assert regard.attention(**tensors(), spec="relumax", params=margin, impl=impl).isnan().all()


# Local linear attention --------------------------------------------------------------------------------------


PROBE, BUDGET = torch.zeros(2, 4, 5, 8), "max_iter and tol belong to conjugate gradients"
LOCAL = [
    *(("ridge", {"ridge": x}) for x in (-1, math.nan, math.inf, "0.1", None, True, [0.1])),
    ("ridge >= 0", {"ridge": -0.1}),
    *(("ridge ... which does not broadcast to", {"ridge": ones(*s)})
      for s in ((3,), (3, 1), (2, 4, 6), (2, 4, 5, 3), (2, 3, 1, 8), (1, 1, 1, 1, 1))),
    ("dtype torch.int64", {"ridge": ones(5, dtype=torch.int64)}),
    ("on meta", {"ridge": ones(5, **META)}),
    ("the solver cg needs ridge > 0", {"ridge": 0, "solver": "cg"}),
    ("the solver cg needs ridge > 0", {"ridge": 0, "max_iter": 5}),
    ("Did you mean 'cholesky'", {"solver": "colesky"}),
    *((BUDGET, {"solver": x, "max_iter": 3}) for x in ("cholesky", "block-diagonal", "learned", Cholesky())),
    (BUDGET, {"solver": "cholesky", "tol": 1e-3}),
    *(("max_iter is", {"solver": "cg", "max_iter": x}) for x in (-1, 2.5, True)),
    *(("tol is", {"solver": "cg", "tol": x}) for x in (0.0, -1e-3, math.nan)),
    ("8 coordinates do not divide into 3 blocks", {"solver": BlockDiagonal(3)}),
    ("solver", {"solver": 3}),
    ("ridge_mode is 'both'", {"ridge_mode": "both"}),
    ("an absolute ridge needs the total", {"spec": "biweight", "ridge_mode": "absolute"}),
    ("non-negative weights that sum to one", {"spec": "linear"}),
    *(("a probe was given, which only solver='learned' takes", {"solver": x, "probe": PROBE})
      for x in ("auto", "cg", "cholesky")),
    ("give params={'probe': r}", {"solver": "learned"}),
    *(("probe", {"solver": "learned", "probe": torch.zeros(s)})
      for s in ((2, 4, 5, 3), (2, 4, 5, 1), (2, 4, 4, 8), (4,), (5, 4))),
    ("probe", {"solver": "learned", "probe": 0.1}),
    ("unknown parameter 'probe'", {"solver": "cg", "params": {"probe": PROBE}}),
]  # fmt: skip
DEBUGGED = [
    ("expected params['ridge'] >= 0", {"ridge": torch.tensor([-0.1, 0.2]).view(2, 1, 1)}),
    ("NaN or infinite", {"ridge": torch.tensor(torch.nan)}),
    ("ridge", {"ridge": torch.zeros(5), "solver": "cg"}),  # 0 has no solution that CG finds
    ("NaN or infinite", {"solver": "learned", "probe": PROBE / 0}),
]


@pytest.mark.parametrize(
    ("words", "given", "debug"), [*((*each, False) for each in LOCAL), *((*each, True) for each in DEBUGGED)]
)
def test_local_linear_attention(words: str, given: dict[str, Any], debug: bool) -> None:
    with regard.checks.debug(debug):
        assert len(says(words, regard.local_linear_attention, **tensors(), **given)) < 400


# Normalisers -------------------------------------------------------------------------------------------------


Z = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
CALLS = {
    "entmax": regard.entmax,
    "sparsemax": regard.sparsemax,
    "relumax": regard.relumax,
    "normrelu": regard.normrelu,
    "topk_softmax": lambda z, **how: regard.topk_softmax(z, 2, **how),
    "topk_uniform": lambda z, **how: regard.topk_uniform(z, 2, **how),
}
EVERY = [
    ("scores has dtype torch.int64, expected a floating-point dtype", Z.long(), {}),
    ("scores has dtype torch.float8_e4m3fn", Z.to(torch.float8_e4m3fn), {}),
    ("scores is a list, expected a torch.Tensor", [1.0], {}),
    ("scores is a scalar", torch.tensor(1.0), {}),
    *((f"dim is {d!r}, but scores has shape [3, 4]", Z, {"dim": d}) for d in (2, -3, 1.0, None, True)),
    ("mask has dtype torch.float32, expected torch.bool", Z, {"mask": Z}),
    ("mask is a bool", Z, {"mask": True}),
    ("mask is on meta", Z, {"mask": ones(4, **META) > 0}),
    *(("mask ... does not broadcast to [3, 4]", Z, {"mask": ones(*s) > 0}) for s in ((3,), (4, 1), (2, 3, 4), (5, 4))),
]


@pytest.mark.parametrize("name", CALLS)
def test_every_normaliser(name: str) -> None:
    for words, z, how in EVERY:
        says(f"{name}: {words}", CALLS[name], z, **how)
    with regard.checks.debug():
        for bad in (math.nan, math.inf):
            says(f"{name}: scores holds NaN or infinite values", CALLS[name], torch.tensor([0.0, bad]))
        assert float(CALLS[name](torch.tensor([0.5, -math.inf, 0.2]))[1]) == 0  # no mistake


OWN = [
    *((regard.entmax, "entmax: alpha is", x) for x in (0.99, 0.0, -1.0, math.nan, math.inf, "1.5", None, True)),
    (regard.entmax, "entmax: alpha has dtype torch.int64", torch.tensor(2)),
    (regard.entmax, "alpha has shape [3], which does not broadcast to [3, 4]", ones(3)),
    (regard.entmax, "alpha has shape [3, 4], but rows run along dim -1 of scores [3, 4]", Z),
    (regard.entmax, "its length there must be 1", Z),
    (regard.entmax, "entmax: alpha is on meta", torch.tensor(1.5, **META)),
    *((regard.relumax, "margin is", x) for x in (math.nan, math.inf, "1")),
    *((regard.relumax, "margin is ... expected margin > 0", x) for x in (0, -1.0)),
    (regard.relumax, "relumax: margin is on meta", torch.tensor(1.5, **META)),
    (regard.normrelu, "bias is nan", math.nan),
    (regard.normrelu, "bias is 'a'", "a"),
    *((call, f"k is {k!r}, expected a whole number >= 1", k)
      for call in (regard.topk_softmax, regard.topk_uniform) for k in (0, -2, 2.0, True, "3", None)),
]  # fmt: skip


@pytest.mark.parametrize(("call", "words", "number"), OWN)
def test_numbers_of_normalisers(call: Any, words: str, number: Any) -> None:
    says(words, call, Z, number)


def test_words_and_contents_of_normalisers() -> None:
    says("rows run along dim 0", regard.entmax, Z, ones(3, 1) + 0.5, dim=0)
    says("unknown empty='unifrom'. Did you mean 'uniform'?", regard.normrelu, Z, empty="unifrom")
    for call in (regard.topk_softmax, regard.topk_uniform):
        says("unknown gradient='sotf'. Did you mean 'soft'?", call, Z, 2, gradient="sotf")
    with regard.checks.debug():
        says("alpha is 0.5, expected alpha >=", regard.entmax, Z, torch.tensor([[1.5], [0.5], [2.0]]))
        says("alpha holds NaN or infinite", regard.entmax, Z, torch.tensor(math.nan))
        for margin in (0.0, -1.0):
            says("relumax: margin is", regard.relumax, Z, torch.tensor(margin))
