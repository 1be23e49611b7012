"""The modules of the benchmarks."""

import importlib
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Modules beside the scripts, by name."""
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[2] / "benchmarks"))
    return importlib.import_module


@pytest.fixture(params=["cpu", "gpu"])
def tables(request: pytest.FixtureRequest, module: Any) -> Any:
    """The module that writes the tables of a script."""
    return module(f"{request.param}_table")
