"""The checks themselves: what they let through, what they refuse, and when tensors are looked at."""

import math
import threading

import pytest
import torch
from mistakes import error_of, says

import regard
from regard import checks
from regard.checks import ArgumentError


def test_argument_errors_are_value_errors() -> None:
    assert issubclass(ArgumentError, ValueError)


def test_suggestions() -> None:
    names = ["softmax", "sparsemax", "relumax"]
    assert checks.suggestion("softmx", names) == " Did you mean 'softmax'?"
    assert checks.suggestion("spasemax", names).startswith(" Did you mean 'sparsemax'")
    assert checks.suggestion("zebra", names) == " Choose from: relumax, softmax, sparsemax."
    assert checks.suggestion("", names) == " Choose from: relumax, softmax, sparsemax."


def test_require() -> None:
    checks.require(True, "call", "never seen")
    assert error_of(checks.require, False, "call", "what is wrong.") == "call: what is wrong."


def test_dtypes() -> None:
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        checks.floating("f", "x", torch.zeros(1, dtype=dtype))
    says("f: x has dtype torch.int8, expected a floating-point dtype; convert it with x.float().",
         checks.floating, "f", "x", torch.zeros(1, dtype=torch.int8))  # fmt: skip
    says("f: x is a float, expected a torch.Tensor.", checks.floating, "f", "x", 1.0)
    checks.boolean_mask("f", "m", torch.ones(2, dtype=torch.bool))
    uint8 = torch.ones(2, dtype=torch.uint8)
    says("m has dtype torch.uint8, expected torch.bool", checks.boolean_mask, "f", "m", uint8)
    says("m is a list, expected a boolean torch.Tensor", checks.boolean_mask, "f", "m", [True])


def test_broadcastable() -> None:
    for shape in ((), (3,), (1,), (2, 1), (2, 3)):
        checks.broadcastable("f", "x", torch.zeros(shape), (2, 3))
    checks.broadcastable("f", "x", torch.zeros(1, 3), (0, 3))
    for shape in ((2,), (3, 2), (0,), (1, 2, 3)):  # the last would enlarge the target
        says("does not broadcast to [", checks.broadcastable, "f", "x", torch.zeros(shape), (2, 3))


@pytest.mark.parametrize(
    ("value", "low", "high", "strict", "words"),
    [
        (1.0, 0.0, 2.0, True, None),
        (1, None, None, True, None),
        (0.0, 0.0, None, False, None),
        (0.0, 0.0, None, True, "x is 0, expected x > 0."),
        (-0.5, 0.0, None, False, "x is -0.5, expected x >= 0."),
        (2.0, None, 2.0, False, None),
        (2.0, None, 2.0, True, "x is 2, expected x < 2."),
        (3, None, 2.0, False, "x is 3, expected x <= 2."),
        (math.nan, None, None, False, "x is nan, expected a finite number."),
        (-math.inf, None, None, False, "x is -inf, expected a finite number."),
        (True, None, None, False, "x is True (bool), expected a number or tensor."),
        ("1", None, None, False, "x is '1' (str), expected a number or tensor."),
        (None, None, None, False, "x is None (NoneType), expected a number or tensor."),
    ],
)
def test_in_range(value: object, low: float | None, high: float | None, strict: bool, words: str | None) -> None:
    if words is None:
        checks.in_range("f", "x", value, low, high, strict=strict)
    else:
        assert error_of(checks.in_range, "f", "x", value, low, high, strict=strict) == f"f: {words}"


def test_tensors_are_looked_at_under_debug_only() -> None:
    bad = torch.tensor([1.0, -2.0])
    nan = torch.tensor([math.nan])
    checks.in_range("f", "x", bad, low=0.0, strict=True)
    checks.finite("f", "x", nan)
    with checks.debug():
        assert error_of(checks.in_range, "f", "x", bad, low=0.0, strict=True) == "f: x is -2, expected x > 0."
        assert error_of(checks.in_range, "f", "x", -bad, high=1.0, strict=False) == "f: x is 2, expected x <= 1."
        assert error_of(checks.in_range, "f", "x", nan, strict=False) == "f: x holds NaN or infinite values."
        assert error_of(checks.finite, "f", "x", nan) == "f: x holds NaN or infinite values."
        checks.in_range("f", "x", torch.zeros(0), low=1.0, strict=True)  # nothing in it is wrong
        checks.in_range("f", "x", bad.abs(), low=0.0, strict=True)


def test_debug_nests_and_ends() -> None:
    assert not checks.debugging()
    with checks.debug():
        assert checks.debugging()
        with checks.debug(False):
            assert not checks.debugging()
        assert checks.debugging()
    assert not checks.debugging()
    with pytest.raises(RuntimeError, match="inside"), checks.debug():
        raise RuntimeError("inside")
    assert not checks.debugging()


def test_debug_is_of_its_own_thread() -> None:
    seen: list[bool] = []
    with checks.debug():
        other = threading.Thread(target=lambda: seen.append(checks.debugging()))
        other.start()
        other.join()
    assert seen == [False]


def test_debug_is_off_inside_compiled_graphs() -> None:
    """Looking at contents would break the graph."""

    @torch.compile(fullgraph=True, backend="eager")
    def call(z: torch.Tensor) -> torch.Tensor:
        return regard.sparsemax(z)

    with checks.debug():
        assert bool(torch.isnan(call(torch.tensor([0.0, math.nan]))).all())
