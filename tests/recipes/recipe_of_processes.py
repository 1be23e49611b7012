"""A recipe that other processes can import."""

import os
import signal
from collections.abc import Iterator
from typing import Any, ClassVar

from regard_recipes.lib.recipe import Cell, Recipe


class Cubes(Recipe):
    """Cubes of numbers."""

    values: tuple[int, ...] = (1, 2)  # Cells.
    dies: ClassVar[bool] = False  # within the first cell
    name = "cubes"

    def cells(self) -> list[Cell]:
        return [{"value": value} for value in self.values]

    def measure(self, cell: Cell, seed: int) -> Iterator[dict[str, Any]]:
        if cell["value"] == -100:
            os._exit(3)
        if cell["value"] == -200:
            raise ModuleNotFoundError("No module named 'jinja2'", name="jinja2")
        yield {"cube": cell["value"] ** 3 + 1 // cell["value"] + seed}
        if self.dies:
            os.kill(os.getpid(), signal.SIGKILL)
        yield {"cube": -1}
