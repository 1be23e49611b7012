"""Every implementation is the reference, at every length and precision."""

from functools import lru_cache
from typing import Any

import pytest
import torch
from torch import Tensor

import regard
from regard.checks import ArgumentError

from . import oracle
from .cases import (
    FAST,
    PRESETS,
    REPRESENTATIVES,
    SPECS,
    Data,
    attend,
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
)

LENGTHS = (1, 2, 7, 15, 16, 17, 63, 64, 65, 127)


WAYS = ("causal", "pairs, strict", "offsets, window, causal", "padding", "keys by head, causal", "segments")


@lru_cache(maxsize=2)  # the implementations of a spec come one after the other
def _reference(label: str) -> tuple[Data, dict[str, Any], dict[str, tuple[Tensor, dict[str, Tensor]]]]:
    """Inputs, the arguments of every call, and of each of `WAYS` the output and the gradients."""
    data = draw(17, 20, heads=4, kv_heads=2).leaves()
    params, scale = learned(SPECS[label], data)
    inputs, always = named(data, params, scale), {"enable_gqa": True, "scale": scale, "params": params}
    found = outputs(label, "reference", data, WAYS, **always)
    return data, always, {how: (out.detach(), gradients(out, inputs)) for how, _, out in found}


@pytest.mark.usefixtures("tiny_blocks")
@pytest.mark.parametrize(("label", "impl"), FAST)
def test_equals_the_reference(label: str, impl: str) -> None:
    """Values, and the gradients of inputs, scale and every number that can be learned, over many block
    borders and every way to limit a row: float64."""
    spec, (data, always, expected) = SPECS[label], _reference(label)
    inputs = named(data, always["params"], always["scale"])
    edge = spec.bandwidth.name == "adaptive" and spec.kernel.r < 1
    for how, _, out in outputs(label, impl, data, WAYS, **always):
        reference, slopes = expected[how]
        close(out, reference, 1e-11, how)
        for name, grad in gradients(out, inputs).items():
            close(grad, slopes[name], 1e-6 if edge else 1e-10, f"{how}: gradient of {name}")


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
        for which, grad in gradients(out, named(data)).items():
            close(grad, expected[which], 1e-9, f"{impl}: gradient of {which}")


@pytest.mark.slow
@pytest.mark.parametrize("label", [label for label in SPECS if SPECS[label].degree == 1])
def test_length_1000_local_linear(label: str) -> None:
    data = draw(1000, batch=1, heads=1)
    expected, _ = oracle.attention(
        oracle.read(SPECS[label]), *data.tensors, torch.ones(1000, 1000, dtype=torch.bool).tril()[None, None]
    )
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
        for name, grad in gradients(out, named(single)).items():
            close(grad, expected[name], 2e-5, f"{impl}: gradient of {name}")
