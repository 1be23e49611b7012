"""Makes `oracles` importable from every folder of tests, marks the second tier, and runs the longest tests first.

Tensors this small are slower on several threads, and much slower when test workers share the cores.
"""

import gc
import os
from collections.abc import Callable, Iterator

import pytest
import torch
from tiers import LONGEST, second_tier

os.environ.setdefault("OMP_NUM_THREADS", "1")
torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    listed = second_tier()
    for item in items:
        if item.nodeid in listed:
            item.add_marker(pytest.mark.slow)
    items.sort(key=lambda item: not item.nodeid.startswith(LONGEST))  # a long test at the end leaves a worker idle


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Collect no garbage while tests are collected, and look at none of these objects after that: there are millions,
    they stay, and going through them takes a second each time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_sessionfinish() -> None:
    gc.unfreeze()  # what stays at the end of the process is reported as leaked by extensions


@pytest.fixture
def default_dtype() -> Iterator[Callable[[torch.dtype], None]]:
    """`default_dtype(dtype)`: sets that of torch until the test ends."""
    yield torch.set_default_dtype
    torch.set_default_dtype(torch.float32)


@pytest.fixture
def fresh_dynamo() -> Iterator[None]:
    """Forget what other tests compiled, and then what this one did."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
