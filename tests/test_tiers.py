"""The list of the second tier names tests that exist, and is made as `tiers` says."""

import re
from pathlib import Path

from tiers import LIMIT, REPRESENTATIVE, chosen, read_times, second_tier

ROOT = Path(__file__).parents[1]


def test_every_listed_function_exists() -> None:
    functions = {case.split("[")[0] for case in second_tier()}
    assert functions
    for function in functions:
        path, _, name = function.partition("::")
        assert re.search(rf"^ *def {name.split('::')[-1]}\(", (ROOT / path).read_text(), re.M), function


def test_what_is_chosen() -> None:
    slow, fast = 2 * LIMIT, LIMIT / 2
    log = f"""
    {slow}s call     tests/a.py::test_one[x y]
    {fast}s setup    tests/a.py::test_one[z]
    {slow}s call     tests/a.py::test_all_slow[a]
    {slow + 0.1}s call     tests/a.py::test_all_slow[b]
    {REPRESENTATIVE + slow}s call     tests/a.py::test_very_slow
    {fast}s call     tests/a.py::test_in_parts
    {fast + 0.1}s teardown tests/a.py::test_in_parts
    50s call     tests/a.py::test_equals_the_reference[c]
    3 passed in 1.00s
    """
    times = read_times(log)
    assert times["tests/a.py::test_one[x y]"] == slow
    # the cheapest case of a function stays: all_slow[a], in_parts
    slow_ones = [case.removeprefix("tests/a.py::test_") for case in chosen(times)]
    assert slow_ones == ["all_slow[b]", "one[x y]", "very_slow"]
    assert chosen(times, scale=0.01) == []
