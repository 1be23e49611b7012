"""Makes `oracles` importable from every folder of tests, and marks the second tier."""

from __future__ import annotations

import pytest
from tiers import second_tier


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    listed = second_tier()
    for item in items:
        if item.nodeid in listed:
            item.add_marker(pytest.mark.slow)
