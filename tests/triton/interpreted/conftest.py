"""Tests of kernels in Triton's interpreter. Triton reads TRITON_INTERPRET when it is imported, so that they run in
processes of their own: `tests/triton/test_interpreter.py` starts one for every file here."""

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
collect_ignore_glob = [] if INTERPRETED else ["test_*.py"]

if INTERPRETED:
    import shortcuts

    shortcuts.take()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--few", type=int, help="run the first case of so many test functions of each file")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    few = config.getoption("--few", default=None)
    if few is not None:
        first: dict[str, dict[str, pytest.Item]] = {}
        for item in items:
            if not item.get_closest_marker("slow"):
                file, _, function = item.nodeid.split("[")[0].partition("::")
                first.setdefault(file, {}).setdefault(function, item)
        items[:] = [item for functions in first.values() for item in list(functions.values())[:few]]


@pytest.fixture
def in_bounds() -> Iterator[None]:
    """The test fails where a kernel reads or writes outside of the tensors that it was given."""
    from bounds import watched

    with watched():
        yield


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is allocated without being filled holds NaN (the least number of whole numbers, all ones of bytes), so that
    an element which no kernel writes is seen, and one that is read before it is written too."""
    for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch, "empty_strided"), (Tensor, "new_empty")):
        monkeypatch.setattr(owner, name, _filled(getattr(owner, name)))


def _filled(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def filled(*args: Any, **options: Any) -> Tensor:
        found = make(*args, **options)
        if found.is_floating_point():
            return found.fill_(torch.nan)
        if found.dtype in (torch.uint8, torch.bool):
            return found.fill_(True if found.dtype == torch.bool else 255)
        return found.fill_(torch.iinfo(found.dtype).min)

    return filled


@pytest.fixture
def small() -> Iterator[None]:
    """Tiles of 16 rows and 16 keys, so that short calls have many blocks."""
    from regard.triton.runtime.tiles import forced

    with forced(rows=16, keys=16):
        yield


@pytest.fixture
def small_tiles(poisoned: None) -> Iterator[None]:
    """Tiles of 16 keys, so that short caches have many."""
    from regard.triton.runtime.tiles import forced

    with forced(keys=16):
        yield
