"""Operators that work in many small blocks if a test asks for it."""

import pytest

from regard.pairwise.blocked import block_rows
from regard.pairwise.cpu import implementation as cpu
from regard.recurrent import implementation as linear


@pytest.fixture
def tiny_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use blocks of 16 queries and one head, and chunks of 8, so that short inputs cross many borders."""
    for rows in (block_rows.Rows, cpu.NumbaRows):
        monkeypatch.setattr(rows, "elements", 64)
    monkeypatch.setattr(linear, "CHUNK", 8)
