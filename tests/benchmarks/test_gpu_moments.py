"""Ways to sum moments: two bfloat16 terms are as exact as said, one is not."""

from typing import Any

import pytest


def test_two_terms_are_needed(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    own = module("gpu_moments")
    monkeypatch.setattr(own, "KEYS", 512)
    monkeypatch.setattr(own, "DRAWS", 1)
    found = own.errors("normal around a mean of deviation 3")
    assert found["two terms"] < 1e-3 < 1e-2 < found["one term"]
    assert found["two terms, centred by tile"] < 1e-3
    assert 1e-3 < found["rounded output"] < 4e-3
