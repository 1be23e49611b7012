"""How much one program takes on: block sizes, warps and stages of every kernel.

A `TileTable` ships a choice for every width and dtype. With the environment variable REGARD_TRITON_TUNE=1 the few
alternatives are timed at the first call of a key instead, a key being widths, dtype and flags, never lengths.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch


@dataclass(frozen=True)
class Tiles:
    """Block sizes of one launch.

    Attributes:
        rows, keys: queries and keys of a block (or whatever the kernel's two axes are); powers of two, >= 16.
        warps: of a program.
        stages: of the software pipeline.
    """

    rows: int = 64
    keys: int = 64
    warps: int = 4
    stages: int = 2

    def fitted(self, rows: int, keys: int) -> Tiles:
        """These with `keys` keys and a multiple of `rows` rows: what kernels take that hand each other blocks of pairs
        of these sizes, whatever was shipped, tuned or forced."""
        return replace(self, rows=max(self.rows, rows), keys=keys)


class TileTable:
    """The tiles of one kernel.

    Args:
        name: of the kernel.
        shipped: (largest width, bytes of a number) to tiles; the first whose width and bytes are enough is taken.
        others: what tuning tries beside it.
    """

    tables: ClassVar[dict[str, TileTable]] = {}
    """Every table by its name."""

    def __init__(self, name: str, shipped: Mapping[tuple[int, int], Tiles], others: Sequence[Tiles] = ()) -> None:
        self.name, self.shipped, self.others = name, dict(sorted(shipped.items())), tuple(others)
        self.tuned: dict[tuple[Any, ...], Tiles] = {}
        TileTable.tables[name] = self

    def pick(
        self, width: int, dtype: torch.dtype, run: Callable[[Tiles], Any] | None = None, flags: tuple[Any, ...] = ()
    ) -> Tiles:
        """The tiles for that width and dtype. `run` does the launch with the tiles it is given; where tuning is on,
        it is timed with each of the alternatives."""
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
    """Within it every kernel takes these (`rows=16, keys=16`): small inputs then have many blocks."""
    _FORCED.append(sizes)
    try:
        yield
    finally:
        _FORCED.pop()
