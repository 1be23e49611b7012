"""Fuzzing of all public calls, valid and invalid, with fixed seeds.

A valid call must give what a formula in float64 says (where there is one, and something finite elsewhere), a share of
them with gradients. A call in which one argument is replaced must end in an `ArgumentError` that names the call and the
argument, or, where the value is documented as valid, in something finite.
"""

import random
import warnings
from collections import Counter

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import regard

from .draw import Draw
from .judge import compared, judged, replacements
from .table import CALLS

VALID, INVALID = 50, 200
"""Calls of every function in the slow run."""
HEAVY = {"HybridConfig", "MemoryMosaicConfig", "ICLMConfig", "match_parameters", "count_parameters", "convert"}
"""Calls that take long: a quarter as many of each."""
COUNTS: Counter[tuple[str, str]] = Counter()


def fuzz(examples: int):
    """Draw from a source of random numbers that hypothesis replays and shrinks, the same at every run."""
    quiet = settings(
        max_examples=examples, derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck)
    )
    return lambda test: quiet(given(st.randoms(use_true_random=False))(test))


def valid(name: str, source: random.Random) -> None:
    """One valid call, with gradients in one case of three."""
    draw = Draw(source)
    assert compared(CALLS[name](draw), draw.whole(0, 2) == 0) is None
    COUNTS[name, "valid"] += 1


def invalid(name: str, source: random.Random) -> None:
    """One call with one argument replaced."""
    draw = Draw(source)
    call = CALLS[name](draw)
    kind, why = judged(call, *draw.one(*replacements(call)))
    assert kind in ("refused", "valid"), f"{kind}: {why}"
    COUNTS[name, "invalid" if kind == "refused" else "valid"] += 1


@pytest.mark.parametrize("name", sorted(CALLS))
def test_a_few_calls(name: str) -> None:
    for seed in range(2):
        valid(name, random.Random(f"{name} {seed}"))
    for seed in range(8):
        invalid(name, random.Random(f"{name} {seed}"))


@pytest.mark.parametrize(
    "name", ["linear_attention", "delta_rule", "mesa_attention", "interpolated_attention", "local_linear_attention"]
)
def test_every_bad_value_is_named(name: str) -> None:
    call = CALLS[name](Draw(random.Random(name)))
    for argument, value in replacements(call):
        kind, why = judged(call, argument, value)
        assert kind in ("refused", "valid"), f"{kind}: {why}"


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(CALLS))
def test_valid_calls_give_what_the_formulas_say(name: str) -> None:
    fuzz(VALID // 4 if name in HEAVY else VALID)(lambda source: valid(name, source))()


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(CALLS))
def test_invalid_calls_name_the_argument(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    fuzz(INVALID // 4 if name in HEAVY else INVALID)(lambda source: invalid(name, source))()
    with capsys.disabled():
        print(f"\n  {name}: {COUNTS[name, 'valid']} valid, {COUNTS[name, 'invalid']} invalid calls")


def test_every_public_function_is_fuzzed() -> None:
    """A new public function or class needs calls here, or a word why not."""
    elsewhere = {
        "checks", "presets", "registries",  # no arguments
        "Diagnostics", "LinearState", "MesaState", "DeltaState", "FastWeightState",  # results
    }  # fmt: skip
    named = {name for name in regard.__all__ if not name.startswith("__")}
    assert named - elsewhere - set(CALLS) == set()
    assert elsewhere <= named


def test_the_judge_sees_faults() -> None:
    """What a fault is: a foreign error, one without the argument's name, a bad value that passes, a wrong result."""
    from .draw import Call
    from .kinds import Flag

    def run(flag: object) -> torch.Tensor:
        if flag == 0.5:
            raise TypeError("foreign")
        if flag == 7:
            raise regard.checks.ArgumentError("run: something is wrong.")
        return torch.zeros(1)

    call = Call("run", run, {"flag": True}, {"flag": Flag()}, lambda flag: torch.ones(1, dtype=torch.float64))
    assert judged(call, "flag", 0.5)[0] == "foreign"
    assert judged(call, "flag", 7)[0] == "nameless"
    assert judged(call, "flag", "no")[0] == "accepted"
    assert judged(call, "flag", False)[0] == "valid"
    assert "0.5 off" in str(compared(call, False))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert judged(call, "flag", True)[0] == "valid"
