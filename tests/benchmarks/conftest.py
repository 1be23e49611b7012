"""The modules of the benchmarks."""

import importlib
from typing import Any

import pytest


@pytest.fixture
def module() -> Any:
    """Modules beside the scripts, by name."""
    return importlib.import_module


@pytest.fixture
def bench(module: Any) -> Any:
    """A dry bench of the GPU benchmarks, or one that measures: `bench(dry=False)`."""
    return lambda dry=True: module("gpu_measure").Bench(dry)


@pytest.fixture(params=["cpu", "gpu"])
def tables(request: pytest.FixtureRequest, module: Any) -> Any:
    """The module that writes the tables of a script."""
    return module(f"{request.param}_table")
