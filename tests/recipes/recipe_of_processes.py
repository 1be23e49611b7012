"""A recipe that other processes can import."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from regard_recipes.lib.recipe import Cell, Recipe, RecipeConfig


@dataclass(frozen=True, kw_only=True)
class CubesConfig(RecipeConfig):
    """Measure cubes."""

    values: tuple[int, ...] = (1, 2)
    """Cells."""


class Cubes(Recipe):
    """Cubes of numbers."""

    Config = CubesConfig
    name = "cubes"

    def cells(self) -> list[Cell]:
        return [{"value": value} for value in self.config.values]

    def measure(self, cell: Cell, seed: int) -> Iterator[dict[str, Any]]:
        if cell["value"] == -100:
            os._exit(3)
        yield {"cube": cell["value"] ** 3 + 1 // cell["value"] + seed}
