"""The one place from which kernels are started, so that whoever wants to see launches instead (the proof that every
kernel compiles for a device that is not there) has one place to stand."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from .interpreting import mend
from .tiles import Tiles

Grid = tuple[int, ...]
Watcher = Callable[[Any, Grid, tuple[Any, ...], dict[str, Any]], None]
_WATCHERS: list[Watcher] = []


def launch(kernel: Any, grid: Grid, *args: Any, tiles: Tiles, **constants: Any) -> None:
    """Start `grid` programs of a kernel: positional arguments, then constants by name. An empty grid does nothing."""
    options = {**constants, "num_warps": tiles.warps, "num_stages": tiles.stages}
    if 0 in grid:
        return
    if _WATCHERS:
        _WATCHERS[-1](kernel, grid, args, options)
        return
    mend()
    with _device(args):
        kernel[grid](*args, **options)


def _device(args: tuple[Any, ...]) -> AbstractContextManager[Any]:
    """Triton launches on the current device, which need not be that of the tensors."""
    at = next((x.device for x in args if isinstance(x, Tensor)), None)
    return torch.cuda.device(at) if at is not None and at.type == "cuda" else nullcontext()


def watching() -> bool:
    """Whether launches are only watched now, so that tensors on any device will do."""
    return bool(_WATCHERS)


@contextmanager
def watched(watcher: Watcher) -> Iterator[None]:
    """Within it no kernel runs; `watcher` is told (kernel, grid, arguments, constants and options) of every launch."""
    _WATCHERS.append(watcher)
    try:
        yield
    finally:
        _WATCHERS.pop()
