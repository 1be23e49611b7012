"""The one place that starts kernels, so that tools and tests can record launches instead.

Triton takes tens of microseconds to look up the compiled kernel for the arguments of a launch. Here Triton only
classifies the arguments (`kinds`: dtypes, which pointers and numbers are multiples of 16 or 1, constants), and the
kernel that it compiled for the same kinds on the same device is called directly."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor

from .interpreting import patch_interpreter
from .tiles import Tiles

Grid = tuple[int, ...]
Watcher = Callable[[Any, Grid, tuple[Any, ...], dict[str, Any]], None]
_WATCHERS: list[Watcher] = []
_MADE: dict[tuple[Any, ...], tuple[Any, ...]] = {}
"""What Triton compiled, (launcher, function, its metadata, what is kept), by (id of the kernel, device, options and
kinds). The kernel is kept so that no other kernel gets its id, and the compiled code so that it is not unloaded."""
KNOWN = ((3, 6), (3, 9))
"""Versions of Triton whose kernels may be called directly; with others Triton launches."""


def launch(kernel: Any, grid: Grid, *args: Any, tiles: Tiles, **constants: Any) -> None:
    """Start `grid` programs of a kernel with positional arguments and constants by name. An empty grid does nothing."""
    if 0 in grid:
        return
    if _WATCHERS:
        _WATCHERS[-1](kernel, grid, args, {**constants, "num_warps": tiles.warps, "num_stages": tiles.stages})
        return
    at = _device_of(args)
    if at is None or at.type != "cuda" or at.index == torch.cuda.current_device():
        _start(kernel, grid, args, tiles, constants)
    else:
        with torch.cuda.device(at):  # Triton uses the current device
            _start(kernel, grid, args, tiles, constants)


def _device_of(args: tuple[Any, ...]) -> torch.device | None:
    """Return the device of the first tensor, which may be within a tuple."""
    for x in args:
        device = x.device if isinstance(x, Tensor) else _device_of(x) if isinstance(x, tuple) else None
        if device is not None:
            return device
    return None


def _start(kernel: Any, grid: Grid, args: tuple[Any, ...], tiles: Tiles, constants: dict[str, Any]) -> None:
    """Start a kernel on the current device."""
    caches, key = getattr(kernel, "device_caches", None), None  # None if kernels are interpreted
    if caches is not None and (driver := _driver()) is not None:
        device = driver.get_current_device()
        bound, kinds, _ = caches[device][-1](*args, **constants)
        key = (id(kernel), device, tiles.warps, tiles.stages, *kinds)
        made = _MADE.get(key)
        if made is not None:
            run, function, metadata, _ = made
            stream, ones = driver.get_current_stream(device), (1,) * (3 - len(grid))  # a grid has three axes
            run(*grid, *ones, stream, function, metadata, None, None, None, *bound.values())
            return
    patch_interpreter()
    compiled = kernel[grid](*args, **constants, num_warps=tiles.warps, num_stages=tiles.stages)
    if key is not None and hasattr(compiled, "packed_metadata"):  # else it is not compiled yet
        _MADE[key] = compiled.run, compiled.function, compiled.packed_metadata, (kernel, compiled)


def _driver() -> Any:
    """Return Triton's driver if what it compiled may be called: nothing asks Triton to report launches."""
    known, driver, runtime = _triton()
    hooks = runtime.launch_enter_hook, runtime.launch_exit_hook
    return driver.active if known and not any(getattr(hook, "calls", hook) for hook in hooks) else None


@cache
def _triton() -> tuple[bool, Any, Any]:
    """Return whether this version of Triton is known, the holder of its driver, and its settings."""
    import triton
    from triton import knobs
    from triton.runtime.driver import driver

    return tuple(map(int, triton.__version__.split(".")[:2])) in KNOWN, driver, knobs.runtime


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
