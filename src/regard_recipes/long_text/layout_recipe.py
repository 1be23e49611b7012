"""Options, sizes and training that the recipes about long text share: layouts with memories."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from ..fwpkm.memory_layouts import KNOWN, LACT, LAYOUTS, MEMORIES, Row, Sizes, check_sizes, row_config, rows_of
from ..lib.language_training import Budget, LanguageConfig, initial_range
from ..lib.recipe import Cell, Frame, Recipe, Results, select

PAPER = "Fast-weight Product Key Memory"
QUICK: dict[str, Any] = {
    "layouts": ("GDN", "FA", "FA-pSWA"), "width": 32, "heads": 2, "sub_keys": 16, "memory_dim": 32, "batch": 2,
    "looks": 2,
}  # fmt: skip
PAPER_SIZE: dict[str, Any] = {
    "layers": 12, "width": 768, "heads": 12, "context": 4096, "chunk": 512, "sub_keys": 512, "memory_dim": 512,
    "batch": 128, "parts": 4, "steps": 20_000, "learning_rate": 1e-3, "looks": 20, "dtype": "bfloat16",
    "device": "auto",
}  # fmt: skip
"""The paper's depth, width, contexts and slots (table 3, sections 4.2 and 4.3). The paper's models have 4 heads of keys
and values and 8 of GDN (112.11 M parameters, 519.12 M with memories); these have 12 of each (124.02 M and 531.03 M).
Here memories are written by the rule "normalized" and are new in every training window."""


@dataclass(frozen=True, kw_only=True)
class LayoutConfig(LanguageConfig):
    """Options of the models and their training."""

    layouts: tuple[str, ...] = LAYOUTS
    """GDN, GDN+SWA, GDN+FA, FA, FA-pSWA, GDN+FA-pSWA."""
    memories: tuple[str, ...] = MEMORIES
    """none, PKM, FwPKM, PKM+FwPKM, FwMLP."""
    lact: bool = True
    """Also train LaCT, once."""
    width: int = 64
    """Width of every model."""
    layers: int = 4
    """Layers of every model; every fourth is attention where a layout has both kinds."""
    heads: int = 2
    """Heads of every mixer."""
    context: int = 256
    batch: int = 8
    steps: int = 150
    chunk: int = 64
    """Tokens between two writes; also the window of SWA and pSWA."""
    sub_keys: int = 32
    """The square root of a memory's slots."""
    memory_dim: int = 64
    """Channels of a memory's keys and values."""
    learning_rate: float = 3e-3
    """The highest, for all models."""


class LayoutRecipe(Recipe):
    """A comparison of layouts, each with several memories."""

    choices: ClassVar = {"layouts": KNOWN, "memories": MEMORIES}

    def check(self) -> None:
        own, call = self.config, self.call()
        check_sizes(call, own)
        self.budget().check(call)
        for row in self.rows():
            row_config(row, sizes(own, 1000))

    def extra_rows(self) -> list[Row]:
        """Return the models besides layouts times memories."""
        return [Row(LACT)] if self.config.lact else []

    def rows(self) -> list[Row]:
        """Return the models."""
        return rows_of(self.config.layouts, self.config.memories, self.extra_rows())

    def cells(self) -> list[Cell]:
        return [{"layout": row.layout, "memory": row.memory} for row in self.rows()]

    def measured(self) -> int:
        """Return the number of held-out tokens that the loss of training is measured on."""
        return 2048

    def budget(self) -> Budget:
        """Return how every model is trained."""
        return Budget.of(self.config, measured=self.measured())

    def model(self, row: Row, vocabulary: int) -> Any:
        """Return the configuration of a model."""
        return row_config(row, sizes(self.config, vocabulary), initializer_range=initial_range(self.config.width))

    def notes(self, results: Results) -> list[str]:
        runs = named(results.select(kind="run"))
        lost = dict.fromkeys(runs[runs["held_out"].isna()]["model"])
        return [
            f"All models had the same {self.config.steps:,} steps and the same learning rate, chosen for none of them; "
            f"the worst ends at {runs['held_out'].astype(float).max():.2f} nats per token of held-out text. These are "
            f"beginnings of trainings.",
            *([f"Diverged: {', '.join(lost)}."] if lost else []),
        ]


def sizes(config: Any, vocabulary: int) -> Sizes:
    """Return the sizes of a recipe's models, with the paper's places for memories. Models with fewer layers have one
    memory of each kind: the fast one before the last layer, the slow one before the fast one."""
    slow, fast = (config.layers // 2 - 1,), (config.layers - 2,)
    paper = {"slow_depths": (2, 6, 10), "fast_depths": (2, 6, 10), "mixed_slow": (6,), "mixed_fast": (2, 10)}
    small = {"slow_depths": slow, "fast_depths": fast, "mixed_slow": slow, "mixed_fast": fast}
    given = ("width", "layers", "heads", "context", "sub_keys", "memory_dim", "chunk")
    return Sizes(
        vocabulary=vocabulary,
        **{name: getattr(config, name) for name in given},
        **(paper if config.layers >= 12 else small),
        pkm_top_k=min(32, config.sub_keys),
        fast_top_k=min(8, config.sub_keys),
        mlp_hidden=9 * config.memory_dim // 2,
    )


def named(frame: Frame) -> Frame:
    """Return rows with a column "model"."""
    return frame.assign(model=[Row(*each).name for each in zip(frame["layout"], frame["memory"], strict=True)])


def rows_of_model(frame: Frame, row: Row) -> Frame:
    """Return the rows of a model."""
    return select(frame, layout=row.layout, memory=row.memory)
