"""Makes `oracles` importable from every folder of tests, marks the second tier, and runs the longest tests first."""

from __future__ import annotations

import pytest
from tiers import LONGEST, second_tier


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    listed = second_tier()
    for item in items:
        if item.nodeid in listed:
            item.add_marker(pytest.mark.slow)
    items.sort(key=lambda item: not item.nodeid.startswith(LONGEST))  # a long test at the end leaves a worker idle
