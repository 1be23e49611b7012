"""Options, sizes and training that the recipes about long text share: layouts with memories."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from regard.nn.memory.fast_weight_product_key_memory import PRESETS

from ..fwpkm.memory_layouts import (
    KNOWN,
    LACT,
    LAYOUTS,
    MEMORIES,
    PAPER_MODEL,
    MemoryConfig,
    Row,
    Sizes,
    check_sizes,
    row_config,
    rows_of,
)  # fmt: skip
from ..lib.language_training import Budget, initial_range
from ..lib.recipe import Cell, Frame, Recipe, Results, check_names, select

PAPER = "Fast-weight Product Key Memory"
QUICK: dict[str, Any] = {"layouts": ("GDN", "FA", "FA-pSWA"), "width": 32, "heads": 2, "sub_keys": 16,
                         "memory_dim": 32, "batch": 2, "looks": 2}  # fmt: skip
PAPER_SIZE: dict[str, Any] = {
    **PAPER_MODEL, "rule": "program", "batch": 128, "parts": 4, "steps": 20_000, "learning_rate": 1e-3, "looks": 20,
}  # fmt: skip
"""Here memories are new in every training window. The paper's training carries one memory, of all windows, on."""
RULES: dict[str, dict[str, Any]] = {"normalized": {}, **PRESETS}


@dataclass(frozen=True, kw_only=True)
class LayoutConfig(MemoryConfig):
    """Options of the models and their training."""

    layouts: tuple[str, ...] = LAYOUTS
    """GDN, GDN+SWA, GDN+FA, FA, FA-pSWA, GDN+FA-pSWA."""
    memories: tuple[str, ...] = MEMORIES
    """none, PKM, FwPKM, PKM+FwPKM, FwMLP."""
    lact: bool = True
    """Also train LaCT, once."""
    rule: str = "normalized"
    """How FwPKM is written: normalized, paper (its equations) or program (the released program)."""
    batch: int = 8
    steps: int = 150
    learning_rate: float = 3e-3
    """The highest, for all models."""


class LayoutRecipe(Recipe):
    """A comparison of layouts, each with several memories."""

    choices: ClassVar = {"layouts": KNOWN, "memories": MEMORIES}

    def check(self) -> None:
        own, call = self.config, self.call()
        check_sizes(call, own)
        check_names(call, "--rule", [own.rule], list(RULES))
        self.budget().check(call)
        for row in self.rows():
            self.model(row, 1000)

    def extra_rows(self) -> list[Row]:
        """Return the models besides layouts times memories."""
        return [Row(LACT)] if self.config.lact else []

    def rows(self) -> list[Row]:
        """Return the models."""
        return rows_of(self.config.layouts, self.config.memories, self.extra_rows())

    def cells(self) -> list[Cell]:
        return [{"layout": row.layout, "memory": row.memory} for row in self.rows()]

    def budget(self) -> Budget:
        """Return how every model is trained."""
        return Budget.of(self.config, measured=2048)

    def model(self, row: Row, vocabulary: int) -> Any:
        """Return the configuration of a model."""
        own = self.config
        sizes, first = Sizes.of(own, vocabulary), initial_range(own.width)
        return row_config(row, sizes, RULES[own.rule], initializer_range=first)

    def notes(self, results: Results) -> list[str]:
        runs = named(results.select(kind="run"))
        lost = dict.fromkeys(runs[runs["held_out"].isna()]["model"])
        return [
            f"All models had the same {self.config.steps:,} steps and the same learning rate, chosen for none of them; "
            f"the worst ends at {runs['held_out'].astype(float).max():.2f} nats per token of held-out text. These are "
            f"beginnings of trainings.",
            *([f"Diverged: {', '.join(lost)}."] if lost else []),
        ]


def named(frame: Frame) -> Frame:
    """Return rows with a column "model"."""
    return frame.assign(model=[Row(*each).name for each in zip(frame["layout"], frame["memory"], strict=True)])


def rows_of_model(frame: Frame, row: Row) -> Frame:
    """Return the rows of a model."""
    return select(frame, layout=row.layout, memory=row.memory)
