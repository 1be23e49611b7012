"""The two tiers of the tests.

`make test` leaves out what is marked slow: tests with `@pytest.mark.slow`, and the cases listed in `second_tier.txt`,
which `conftest.py` marks. `make test-all` runs everything. To renew the list from measured times:

    make test-all ARGS="--durations=0 --durations-min=0.02" > LOG
    python tests/tiers.py LOG

A case is listed if it takes more than `LIMIT` seconds of a quiet core. The cheapest case of a function stays in the
first tier if it takes at most `REPRESENTATIVE` seconds. Functions in `ALWAYS` stay with all their cases.
"""

import re
import sys
from collections import defaultdict
from pathlib import Path

LIST = Path(__file__).with_name("second_tier.txt")
LIMIT = 0.1
REPRESENTATIVE = 1.0
ALWAYS = (
    "test_first_derivatives",
    "test_equals_the_reference",
    "test_hidden_content_cannot_matter",
    "test_what_is_not_finite_shows_in_exactly_the_rows_that_see_it",
    "test_train_eval_generate",
    "test_the_readme_shows_the_example_and_its_output",
    "test_two_runs_are_bit_equal",
    "test_half_and_half_equals_straight",
    "test_the_core_of_the_kernels_compiles_within_its_ceilings",
    "test_a_few_cases_of_every_file_in_the_interpreter",
    "test_no_import_circles",
    "test_the_pages_are_those_of_the_stored_rows",
)
LONGEST = ("tests/triton/test_interpreter", "tests/triton/test_compile.py", "tests/recipes/test_every_recipe")
"""Files with the longest single tests."""
LINE = re.compile(r"^([0-9.]+)s (?:call|setup|teardown)\s+(.+)$")


def second_tier() -> frozenset[str]:
    """Return the node ids of the listed cases."""
    return frozenset(LIST.read_text().split("\n")) - {""}


def read_times(text: str) -> dict[str, float]:
    """Return the seconds of each test, from what `pytest --durations=0` printed."""
    times: dict[str, float] = defaultdict(float)
    for line in text.split("\n"):
        if found := LINE.match(line.strip()):
            times[found[2]] += float(found[1])
    return dict(times)


def chosen(times: dict[str, float], scale: float = 1.0) -> list[str]:
    """Return the cases for the second tier. `scale` turns the measured seconds into those of a quiet core."""
    functions: dict[str, list[str]] = defaultdict(list)
    for case in times:
        functions[case.split("[")[0]].append(case)
    slow: list[str] = []
    for function, cases in functions.items():
        if function.split("::")[-1] in ALWAYS:
            continue
        listed = [case for case in cases if scale * times[case] > LIMIT]
        cheapest = min(cases, key=times.__getitem__)
        if len(listed) == len(cases) and scale * times[cheapest] <= REPRESENTATIVE:
            listed.remove(cheapest)
        slow += listed
    return sorted(slow)


if __name__ == "__main__":
    times = read_times(Path(sys.argv[1]).read_text())
    scale = float(sys.argv[2]) if len(sys.argv) > 2 else 1.0
    slow = chosen(times, scale)
    unseen = second_tier() - set(times)  # `make test` does not run them: they stay listed
    LIST.write_text("\n".join(sorted({*slow, *unseen})) + "\n")
    left = sum(times.values()) - sum(times[case] for case in slow)
    print(f"{len(slow)} of {len(times)} cases are listed; the others take {scale * left:.0f} seconds of one core")
