"""Block sizes, warps and stages of every kernel.

A `TileTable` ships a choice for every width and dtype. With the environment variable REGARD_TRITON_TUNE=1 the few
alternatives are timed at the first call of a key. A key holds widths, dtype and flags, never lengths.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch


@dataclass(frozen=True)
class Tiles:
    """Block sizes of one launch: rows and keys of a block (or sizes along the kernel's two axes), powers of two, and >=
    16 along an axis of a matrix product; warps of a program; stages of the software pipeline."""

    rows: int = 64
    keys: int = 64
    warps: int = 4
    stages: int = 2


Row = tuple[int, int, int, int]


def power_of_two(n: int) -> int:
    """Return the least power of two >= n >= 1. Triton's own function takes microseconds."""
    return 1 << (n - 1).bit_length()


def padded(dim: int) -> tuple[int, int]:
    """Return a number of columns and the power of two that holds them in a kernel."""
    return dim, max(16, power_of_two(dim))


class TileTable:
    """The tiles of one kernel: `shipped` by (largest width, bytes of a number), and `others` that tuning tries."""

    tables: ClassVar[dict[str, "TileTable"]] = {}
    """Every table by its name."""

    def __init__(self, name: str, shipped: Mapping[tuple[int, int], Tiles], others: Sequence[Tiles] = ()) -> None:
        self.name, self.shipped, self.others = name, dict(sorted(shipped.items())), tuple(others)
        self.tuned: dict[tuple[Any, ...], Tiles] = {}
        TileTable.tables[name] = self

    @classmethod
    def by_width(cls, name: str, narrow: Sequence[Row], wide: Sequence[Row], others: Sequence[Row] = ()) -> "TileTable":
        """Make a table from tiles for widths up to 64, 128, 256 ..., in bfloat16 (`narrow`) and float32 (`wide`)."""
        columns = {2: narrow, 4: wide}
        shipped = {(64 << i, size): Tiles(*row) for size, rows in columns.items() for i, row in enumerate(rows)}
        return cls(name, shipped, [Tiles(*row) for row in others])

    def pick(
        self, width: int, dtype: torch.dtype, run: Callable[[Tiles], Any] | None = None, flags: tuple[Any, ...] = ()
    ) -> Tiles:
        """Return the tiles for a width and dtype. If tuning is on, time `run`, which launches with given tiles."""
        if _FORCED:
            return replace(self._default(width, dtype), **_FORCED[-1])
        key = (width, dtype, flags)
        if key not in self.tuned and run is not None and os.environ.get("REGARD_TRITON_TUNE") == "1":
            self.tuned[key] = self._fastest(run, (self._default(width, dtype), *self.others))
        return self.tuned.get(key) or self._default(width, dtype)

    def _default(self, width: int, dtype: torch.dtype) -> Tiles:
        for (most, size), tiles in self.shipped.items():
            if width <= most and dtype.itemsize <= size:
                return tiles
        return list(self.shipped.values())[-1]

    @staticmethod
    def _fastest(run: Callable[[Tiles], Any], among: Sequence[Tiles]) -> Tiles:
        from triton.runtime.errors import OutOfResources
        from triton.testing import do_bench

        times = {}
        for tiles in dict.fromkeys(among):
            try:
                times[tiles] = do_bench(lambda tiles=tiles: run(tiles), warmup=5, rep=20, return_mode="median")
            except OutOfResources:
                continue
        return min(times, key=lambda tiles: times[tiles], default=among[0])


_FORCED: list[dict[str, int]] = []


@contextmanager
def forced(**sizes: int) -> Iterator[None]:
    """Give every kernel these sizes (`rows=16, keys=16`), so that small inputs have many blocks."""
    _FORCED.append(sizes)
    try:
        yield
    finally:
        _FORCED.pop()
