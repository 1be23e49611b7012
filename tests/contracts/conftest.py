"""One thread, and operators that work in many small blocks if a test asks for it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from regard.pairwise.blocked import block_rows
from regard.pairwise.cpu import implementation as cpu
from regard.recurrent import implementation as linear


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def tiny_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use blocks of 16 queries and one head, and chunks of 8, so that short inputs cross many borders."""
    for rows in (block_rows.TorchRows, cpu.NumbaRows):
        monkeypatch.setattr(rows, "elements", 64)
    monkeypatch.setattr(linear, "CHUNK", 8)
