"""The one place that starts kernels, so that tools and tests can record launches instead."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from .interpreting import mend
from .tiles import Tiles

Grid = tuple[int, ...]
Watcher = Callable[[Any, Grid, tuple[Any, ...], dict[str, Any]], None]
_WATCHERS: list[Watcher] = []


def launch(kernel: Any, grid: Grid, *args: Any, tiles: Tiles, **constants: Any) -> None:
    """Start `grid` programs of a kernel with positional arguments and constants by name. An empty grid does nothing."""
    options = {**constants, "num_warps": tiles.warps, "num_stages": tiles.stages}
    if 0 in grid:
        return
    if _WATCHERS:
        _WATCHERS[-1](kernel, grid, args, options)
        return
    mend()
    at = next((x.device for x in args if isinstance(x, Tensor)), None)
    with torch.cuda.device(at) if at is not None and at.type == "cuda" else nullcontext():  # Triton takes the current
        kernel[grid](*args, **options)


def watching() -> bool:
    """Return whether launches are only recorded now, so that tensors on any device will do."""
    return bool(_WATCHERS)


@contextmanager
def watched(watcher: Watcher) -> Iterator[None]:
    """Run no kernel; instead call `watcher` with (kernel, grid, arguments, constants and options) of every launch."""
    _WATCHERS.append(watcher)
    try:
        yield
    finally:
        _WATCHERS.pop()
