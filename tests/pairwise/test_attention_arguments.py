"""Every mistake in calling `regard.attention`: one line that names the call, what came and what was expected."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import regard
from regard.checks import ArgumentError


def tensors(dtype: torch.dtype = torch.float32, heads: int = 4, kv_heads: int = 4) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(0)
    return {
        "query": torch.randn(2, heads, 5, 8, generator=g).to(dtype),
        "key": torch.randn(2, kv_heads, 7, 8, generator=g).to(dtype),
        "value": torch.randn(2, kv_heads, 7, 3, generator=g).to(dtype),
    }


def message(spec: str = "softmax", **changes) -> str:
    with pytest.raises(ArgumentError) as caught:
        regard.attention(**{**tensors(), **changes}, spec=spec)
    text = str(caught.value)
    assert "\n" not in text
    assert len(text) < 400
    return text


@pytest.mark.parametrize("name", ["query", "key", "value"])
def test_rank(name: str) -> None:
    for shape in ((5, 8), (2, 5, 8), (1, 2, 4, 5, 8)):
        text = message(**{name: torch.zeros(shape)})
        assert f"attention: {name} has shape [{', '.join(map(str, shape))}]" in text
        assert "expected [batch, heads, length, dim]" in text


@pytest.mark.parametrize("name", ["query", "key", "value"])
def test_not_a_floating_tensor(name: str) -> None:
    for dtype in (torch.int64, torch.int32, torch.bool, torch.complex64):
        text = message(**{name: tensors()[name].to(dtype)})
        assert f"{name} has dtype {dtype}, expected a floating-point dtype" in text
    assert f"{name} is a list, expected a torch.Tensor" in message(**{name: [[1.0]]})
    assert f"{name} is a NoneType" in message(**{name: None})


def test_mixed_dtypes_and_devices() -> None:
    assert "key is torch.float64 on cpu, but query is torch.float32 on cpu; convert one" in message(
        key=tensors(torch.float64)["key"]
    )
    assert "value is torch.bfloat16 on cpu" in message(value=tensors(torch.bfloat16)["value"])
    assert "key is torch.float32 on meta, but query is torch.float32 on cpu" in message(key=tensors()["key"].to("meta"))


def test_sizes_that_do_not_fit() -> None:
    assert "batch sizes differ: query [2, 4, 5, 8], key [3, 4, 7, 8]" in message(key=torch.zeros(3, 4, 7, 8))
    assert "batch sizes differ" in message(value=torch.zeros(1, 4, 7, 3))
    assert "query and key differ in their last axis" in message(key=torch.zeros(2, 4, 7, 9))
    assert "key and value differ in heads or length" in message(value=torch.zeros(2, 4, 6, 3))
    assert "key and value differ in heads or length" in message(value=torch.zeros(2, 2, 7, 3))
    assert "value has no features" in message(value=torch.zeros(2, 4, 7, 0))
    assert "query and key have no features" in message(query=torch.zeros(2, 4, 5, 0), key=torch.zeros(2, 4, 7, 0))


def test_heads() -> None:
    fewer = {"key": torch.zeros(2, 2, 7, 8), "value": torch.zeros(2, 2, 7, 3)}
    text = message(**fewer)
    assert "pass enable_gqa=True" in text
    assert "query [2, 4, 5, 8], key [2, 2, 7, 8]" in text
    odd = {"key": torch.zeros(2, 3, 7, 8), "value": torch.zeros(2, 3, 7, 3)}
    assert "cannot be shared out among" in message(**odd, enable_gqa=True)
    more = {"key": torch.zeros(2, 8, 7, 8), "value": torch.zeros(2, 8, 7, 3)}
    assert "cannot be shared out among" in message(**more, enable_gqa=True)
    none = {"key": torch.zeros(2, 0, 7, 8), "value": torch.zeros(2, 0, 7, 3)}
    assert "cannot be shared out among" in message(**none, enable_gqa=True)


def test_masks() -> None:
    for dtype in (torch.float32, torch.int64):
        text = message(attn_mask=torch.zeros(5, 7, dtype=dtype))
        assert f"attn_mask has dtype {dtype}, expected torch.bool with True where a key may be attended" in text
    assert "attn_mask is a list" in message(attn_mask=[[True]])
    for shape in ((6,), (5, 6), (4, 5, 6), (3, 1, 5, 7), (2, 3, 5, 7), (1, 2, 4, 5, 7)):
        text = message(attn_mask=torch.ones(shape, dtype=torch.bool))
        assert f"attn_mask has shape [{', '.join(map(str, shape))}], which does not broadcast to [2, 4, 5, 7]" in text


def test_masks_and_numbers_on_another_device() -> None:
    elsewhere = torch.ones(5, device="meta")
    assert "attn_mask is on meta" in message(attn_mask=torch.ones(5, 7, dtype=torch.bool, device="meta"))
    assert "scale is on meta" in message(scale=elsewhere)
    assert "params['alpha'] is on meta" in message("biweight", params={"alpha": elsewhere + 1})
    for text in (message(scale=elsewhere), message(attn_mask=torch.ones(7, dtype=torch.bool, device="meta"))):
        assert "cpu" in text


def test_arguments_of_the_wrong_kind() -> None:
    assert "params is a list, expected" in message("biweight", params=[1.5])
    for impl in (None, 3):
        assert f"impl is {impl!r}" in message(impl=impl) or f"unknown impl {impl!r}" in message(impl=impl)
    for name in ("is_causal", "exclude_self", "enable_gqa", "return_diagnostics"):
        for value in ("no", 1, None):
            assert f"{name} is {value!r}, expected True or False" in message(**{name: value})
    eighth = {name: tensor.to(torch.float8_e4m3fn) for name, tensor in tensors().items()}
    assert "query has dtype torch.float8_e4m3fn" in message(**eighth)


@pytest.mark.parametrize("window", [0, -1, 2.5, True, "4"])
def test_window(window: object) -> None:
    assert f"window is {window!r}, expected a whole number >= 1 or None" in message(window=window)


def test_query_offset() -> None:
    for offset in (1.5, True, "end"):
        assert f"query_offset is {offset!r}, expected a whole number or integers [B]" in message(query_offset=offset)
    for offset in (torch.zeros(2), torch.zeros(3, dtype=torch.int64), torch.tensor(1), torch.ones(2, dtype=torch.bool)):
        assert "expected integers [2], one a sequence" in message(query_offset=offset)


def test_scale() -> None:
    for scale in (math.nan, math.inf):
        assert f"scale is {scale}, expected a finite number" in message(scale=scale)
    for scale in (0, -1.0):
        assert f"scale is {scale:g}, expected scale > 0" in message(scale=scale)
    assert "scale is '1'" in message(scale="1")
    assert "scale is 1e+300, expected scale <= 3.40282e+38" in message(scale=1e300)  # of float32 tensors
    assert "scale has shape [3], which does not broadcast to [2, 4, 5]" in message(scale=torch.ones(3))
    assert "scale has dtype torch.int64" in message(scale=torch.ones(5, dtype=torch.int64))


@pytest.mark.parametrize(
    "spec",
    ["cosine", "shift-cosine", "geometric", "clipped-geometric", "relu", "relu2", "elu", "gaussian*fixed(h=1)*cosine"],
)
def test_kernels_without_a_scale_refuse_one(spec: str) -> None:
    for scale in (1.0, torch.ones(5)):
        text = message(spec, scale=scale)
        assert "scale" in text
        assert "leave scale out" in text
    assert regard.attention(**tensors(), spec=spec).shape == (2, 4, 5, 3)


def test_params() -> None:
    text = message("biweight", params={"alhpa": 1.5})
    assert "unknown parameter 'alhpa' for biweight; it takes: alpha." in text
    assert "unknown parameter 'alpha' for softmax; it takes: none." in message(params={"alpha": 1.5})
    assert "it takes: r, margin" in message("relumax", params={"bias": 1.0})
    assert "it takes: r, h" in message("biweight*fixed(h=1)*cosine", params={"bias": 1.0})
    assert "it takes: alpha, ridge" in message("local-linear[biweight]", params={"h": 1.0})
    assert "unknown parameter 'ridge'" in message("biweight", params={"ridge": 1.0})
    for value, words in (
        (math.nan, "is nan, expected a finite number"),
        ("1", "is '1'"),
        (True, "is True"),
        (torch.ones(3), "has shape [3], which does not broadcast to [2, 4, 5]"),
        (torch.ones(5, dtype=torch.int64), "has dtype torch.int64"),
    ):
        assert "params['alpha']" in message("biweight", params={"alpha": value})
        assert words in message("biweight", params={"alpha": value})


@pytest.mark.parametrize(
    ("spec", "params", "words"),
    [
        ("biweight", {"alpha": 0.9}, "is 0.9, expected params['alpha'] >= 1"),
        ("biweight", {"alpha": 0.5}, "is 0.5, expected params['alpha'] >= 1"),
        ("relumax", {"margin": 0.0}, "is 0, expected params['margin'] > 0"),
        ("relumax", {"margin": -1}, "is -1, expected params['margin'] > 0"),
        ("relumax", {"r": 0}, "is 0, expected params['r'] > 0"),
        ("epanechnikov*fixed(h=1)*cosine", {"h": -0.5}, "is -0.5, expected params['h'] > 0"),
        ("gaussian*fixed(h=1)*euclidean", {"h": 0.0}, "is 0, expected params['h'] > 0"),
        ("local-linear", {"ridge": -0.1}, "is -0.1, expected params['ridge'] >= 0"),
    ],
)
def test_params_out_of_range(spec: str, params: dict, words: str) -> None:
    assert words in message(spec, params=params)
    # As tensors they are looked at under debug() only, since looking waits for the device.
    given = {name: torch.tensor(float(value)) for name, value in params.items()}
    with regard.checks.debug():
        assert words.split("expected")[0] in message(spec, params=given)


def test_implementations() -> None:
    assert "unknown impl 'referense'. Did you mean 'reference'?" in message(impl="referense")
    assert "unknown impl 'cuda-kernel'. Choose from: auto, " in message(impl="cuda-kernel")
    text = message("biweight", impl="sdpa")
    assert "impl='sdpa' computes only normalised Gaussian weights" in text
    assert "Those that can: cpu, blocked, reference" in text
    assert "Those that can: blocked, reference" in message("local-linear", impl="sdpa")
    assert "Those that can: cpu, blocked, reference" in message("local-linear[biweight]", impl="sdpa")
    assert "Those that can: blocked, reference" in message(impl="sdpa", return_diagnostics=True)


def test_spec() -> None:
    assert "expected a Spec or its text, got 3 (int)" in message(3)
    assert "Did you mean 'softmax'" in message("sofmax")


@pytest.mark.parametrize("spec", sorted(regard.presets()))
def test_a_nan_in_a_scale_or_number_stays_in_its_row(spec: str) -> None:
    sentence = regard.Spec.parse(spec)
    names = [*(("scale",) if sentence.takes_scale else ()), *sentence.params]
    for name in names:
        for impl in ("blocked", "reference"):
            if sentence.degree and impl == "blocked":
                continue
            t = tensors(torch.float64)
            default = sentence.params[name].default if name in sentence.params else 0.4
            number = torch.full((5,), float(default), dtype=torch.float64)
            outs = []
            for value in (float(default), math.nan):
                number[3] = value
                given = {"scale": number} if name == "scale" else {"params": {name: number}}
                outs.append(regard.attention(**t, spec=spec, impl=impl, **given))
            rows = torch.arange(5) != 3
            assert torch.equal(outs[0][:, :, rows], outs[1][:, :, rows]), (name, impl)
            assert bool(torch.isnan(outs[1][:, :, 3]).all()), (name, impl)


@pytest.mark.parametrize("name", ["query", "key", "value"])
def test_debug_names_a_tensor_that_is_not_finite(name: str) -> None:
    given = tensors()
    given[name][1, 2, 4, 1] = math.inf
    with regard.checks.debug():
        assert f"attention: {name} holds NaN or infinite" in message(**given)


def test_numbers_out_of_range_show_in_every_row() -> None:
    margin = {"margin": torch.tensor(-1.0)}
    for impl in ("auto", "reference"):
        assert regard.attention(**tensors(), spec="relumax", params=margin, impl=impl).isnan().all()
