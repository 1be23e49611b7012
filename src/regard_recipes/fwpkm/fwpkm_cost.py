"""What fast and slow memories cost: table 2 of the fast-weight paper, counted and measured.

Parameters are counted at the paper's size, on a device without memory. Floating-point operations are counted twice: as
the paper's column evidently does (six for every learned number that is multiplied, and token; what a memory searches,
gathers and writes is left out) and with everything that is computed. Samples per second are measured at a size that
runs here, forward, backward and the optimiser's step.

Legend: T tokens of a sample, C model width, H heads, D channels of a head; of a memory n sub-keys, k slots read, Dk and
Dv channels of keys and values. A multiplication and an addition are two operations.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch

from regard.checks import ArgumentError
from regard.recipes import Findings, Progress, recipes

from ..lib.language_runs import Budget, Corpus, Job, initial_range, run_jobs, sized
from .memory_layouts import LAYOUTS, MEMORIES, Row, Sizes, check_names, check_sizes, row_config

CALL = "reproduce: fwpkm-cost"
PAPER: dict[tuple[str, str], tuple[float, float, float, float]] = {
    ("GDN", "none"): (112.11, 22.05, 121.82, 42.81),
    ("GDN", "PKM"): (509.08, 20.91, 84.47, 30.09),
    ("GDN", "FwPKM"): (519.12, 22.74, 46.44, 16.10),
    ("GDN", "PKM+FwPKM"): (515.77, 22.14, 54.63, 19.26),
    ("GDN+SWA", "none"): (112.65, 22.14, 124.42, 43.45),
    ("GDN+SWA", "PKM"): (509.61, 21.03, 88.16, 31.25),
    ("GDN+SWA", "FwPKM"): (519.66, 22.86, 47.16, 16.27),
    ("GDN+SWA", "PKM+FwPKM"): (516.31, 22.23, 55.30, 19.39),
    ("GDN+FA", "none"): (112.65, 22.14, 120.67, 42.08),
    ("GDN+FA", "PKM"): (509.61, 21.03, 84.69, 30.07),
    ("GDN+FA", "FwPKM"): (519.66, 22.86, 46.51, 16.05),
    ("GDN+FA", "PKM+FwPKM"): (516.31, 22.23, 54.99, 19.29),
    ("FA", "none"): (114.25, 22.47, 120.45, 41.55),
    ("FA", "PKM"): (511.22, 21.33, 81.22, 28.49),
    ("FA", "FwPKM"): (521.26, 23.16, 46.63, 15.89),
    ("FA", "PKM+FwPKM"): (517.91, 22.56, 54.43, 18.84),
}
"""The paper's table 2: parameters in millions, FLOPs in T for a step of 8 sequences of 4096 tokens, FLOPS in T per
second, samples per second."""
PAPER_SIZES = Sizes(
    vocabulary=32_000, width=768, layers=12, heads=12, context=4096, sub_keys=512, memory_dim=512, chunk=512,
    slow_depths=(2, 6, 10), fast_depths=(2, 6, 10), mixed_slow=(6,), mixed_fast=(2, 10),
)  # fmt: skip
PAPER_BATCH = 8


@dataclass(frozen=True, kw_only=True)
class FwpkmCostConfig:
    """Count and measure the models of the fast-weight paper's table 2."""

    out: Path = Path("fwpkm-cost-out")
    """Folder to write. An earlier result in it is replaced; any other folder must be empty."""
    size: Literal["quick", "desk", "paper"] = "desk"
    """What is taken for measuring where an option is not given: 'quick' needs less than a minute on two cores, 'desk'
    two, 'paper' (the sizes that are counted) a GPU."""
    quick: bool = False
    """The same as --size quick."""
    layouts: tuple[str, ...] = ("GDN", "GDN+SWA", "GDN+FA", "FA")
    """Which are counted and measured."""
    memories: tuple[str, ...] = ("none", "PKM", "FwPKM", "PKM+FwPKM")
    """With which memories."""
    seed: int = 0
    """Of first weights and windows."""
    width: int | None = None
    """Width of a measured model."""
    heads: int | None = None
    """Its heads."""
    layers: int | None = None
    """Its layers; memories stand at the paper's depths where there are as many, else before the last."""
    context: int | None = None
    """Tokens of a sample."""
    chunk: int | None = None
    """Tokens between two writes."""
    sub_keys: int | None = None
    """The square root of its memories' slots."""
    memory_dim: int | None = None
    """Channels of their keys and values."""
    batch: int | None = None
    """Samples of a step."""
    steps: int | None = None
    """Steps, of which the median counts."""
    dtype: str | None = None
    """Of the products: float32 or bfloat16."""
    device: str | None = None
    """'cpu', 'cuda', 'mps' or 'auto'."""
    workers: int = 1
    """Models that are measured at the same time."""
    seeds: int = 1
    """Runs of each model."""


SIZES: dict[str, dict[str, Any]] = {
    "quick": {
        "width": 32, "heads": 2, "layers": 4, "context": 64, "chunk": 16, "sub_keys": 16, "memory_dim": 32, "batch": 2,
        "steps": 3, "dtype": "float32", "device": "cpu",
    },
    "desk": {
        "width": 192, "heads": 6, "layers": 4, "context": 256, "chunk": 64, "sub_keys": 128, "memory_dim": 128,
        "batch": 2, "steps": 5, "dtype": "float32", "device": "cpu",
    },
    "paper": {
        "width": 768, "heads": 12, "layers": 12, "context": 4096, "chunk": 512, "sub_keys": 512, "memory_dim": 512,
        "batch": 8, "steps": 20, "dtype": "bfloat16", "device": "auto",
    },
}  # fmt: skip
LEARNING_RATE = 1e-4
TEXT = 8192


@dataclass(frozen=True)
class Counted:
    """A model, counted.

    Attributes:
        learned: numbers that the optimiser changes; fast: numbers that are written while reading; table: those of the
            learned ones that are looked up and not multiplied (values of slow memories).
        parts: operations of one token's forward pass, by what they do.
        tokens: of a step.
    """

    learned: int
    fast: int
    table: int
    parts: dict[str, float]
    tokens: int

    @property
    def numbers(self) -> int:
        """All that the paper counts as parameters."""
        return self.learned + self.fast

    @property
    def paper_flops(self) -> float:
        """Six operations for every multiplied number and token of a step."""
        return 6.0 * (self.learned - self.table) * self.tokens

    @property
    def flops(self) -> float:
        """Everything: forward, and twice as much backward."""
        return 3.0 * sum(self.parts.values()) * self.tokens


def counted(row: Row, sizes: Sizes, batch: int) -> Counted:
    """The counts of one row. Allocates nothing."""
    from regard.models.base.catalogue import model_of
    from regard.nn import ProductKeyMemory
    from regard.nn.memories import MemoryLayer

    config = count_config(row, sizes)
    with torch.device("meta"):
        model = model_of(config)(copy.deepcopy(config))
    memories = [module for module in model.modules() if isinstance(module, MemoryLayer)]
    slow = [module for module in memories if isinstance(module, ProductKeyMemory)]
    held = {id(weight) for module in slow for weight in module.parameters(recurse=False) if weight.dim() > 1}
    matrices = sum(w.numel() for w in model.parameters() if w.dim() == 2 and id(w) not in held)
    table = sum(module.values.numel() for module in slow)
    parts = {"projections": 2.0 * matrices, **mixer_parts(row, sizes), **memory_parts(row, sizes)}
    learned = sum(weight.numel() for weight in model.parameters())
    return Counted(learned, sum(module.fast_numbers() for module in memories), table, parts, batch * sizes.context)


def count_config(row: Row, sizes: Sizes) -> Any:
    """A row's configuration: at the paper's width exactly the paper's, with its four key and value heads and the eight
    heads of its delta nets."""
    if sizes.width != PAPER_SIZES.width:
        return row_config(row, sizes)
    mixers = {"mixer_options": {"gated-deltanet": {"num_heads": 8, "head_dim": 64}}} if "GDN" in row.layout else {}
    return row_config(row, sizes, num_key_value_heads=4, **mixers)


def mixer_parts(row: Row, sizes: Sizes) -> dict[str, float]:
    """Operations of a token beside the projections: QK and AV for all visible pairs; a delta net's convolution, and
    seven for every number of its state (fade, read by k, write, read by q)."""
    attention = {"GDN": 0, "FA": sizes.layers}.get(row.layout.partition("-")[0], sizes.layers // 4)
    paper = sizes.width == PAPER_SIZES.width
    heads, channels = (8, 64) if paper else (sizes.heads, sizes.width // sizes.heads)
    length, window = sizes.context, min(sizes.chunk, sizes.context)
    seen = (length + 1) / 2
    if "SWA" in row.layout:
        seen = (window * (window + 1) / 2 + (length - window) * window) / length
    nets = sizes.layers - attention
    return {
        "attention": 4.0 * seen * sizes.width * attention,
        "delta rule": (7.0 * heads * channels**2 + 8.0 * 3 * heads * channels) * nets,
    }


def memory_parts(row: Row, sizes: Sizes) -> dict[str, float]:
    """Operations of a token in its memories: search (scores of all sub-keys), read (weights times rows), write (errors,
    their sum in every row, and k sub-keys moved in each half)."""
    mixed = row.memory == "PKM+FwPKM"
    slow = len(sizes.mixed_slow if mixed else sizes.slow_depths) if "PKM" in row.memory.split("+") else 0
    fast = len(sizes.mixed_fast if mixed else sizes.fast_depths) if "FwPKM" in row.memory.split("+") else 0
    n, d, k = sizes.sub_keys, sizes.memory_dim, sizes.fast_top_k
    dense = 3.0 * d * sizes.mlp_hidden * (len(sizes.fast_depths) if row.memory == "FwMLP" else 0)
    return {
        "search": 2.0 * n * d * (slow * sizes.pkm_heads + fast),
        "read": 2.0 * d * (slow * sizes.pkm_heads * sizes.pkm_top_k + fast * k) + 2 * dense,
        "write": (2.0 * d + 2.0 * k * d + 3.0 * k * d) * fast + 4 * dense,
    }


def check(config: FwpkmCostConfig) -> FwpkmCostConfig:
    """The config with the numbers of its size, after everything in it was found to be in range.

    Raises:
        ArgumentError: something is not, or a name is unknown or given twice.
    """
    config = sized(config, SIZES, CALL)
    check_names(CALL, "--layouts", config.layouts, LAYOUTS)
    check_names(CALL, "--memories", config.memories, MEMORIES)
    if "none" not in config.memories:
        raise ArgumentError(f"{CALL}: --memories lacks none, to which all others are compared; add it.")
    check_sizes(CALL, config)
    budget(config).check(CALL)
    for row in rows(config):
        count_config(row, measured_sizes(config))
    return config


def rows(config: FwpkmCostConfig) -> list[Row]:
    """What is counted and measured."""
    return [Row(layout, memory) for layout in config.layouts for memory in config.memories]


def measured_sizes(config: FwpkmCostConfig) -> Sizes:
    """Of the models that are measured."""
    from ..long_text.streaming_perplexity import sizes

    found = sizes(config, PAPER_SIZES.vocabulary if config.size == "paper" else 256)
    return found


def budget(config: FwpkmCostConfig) -> Budget:
    """A few steps."""
    numbers = {f.name: getattr(config, f.name) for f in fields(Budget) if hasattr(config, f.name)}
    return Budget(**numbers, learning_rate=LEARNING_RATE, looks=1, measured=2)


@recipes.register("fwpkm-cost")
class FwpkmCost:
    """Parameters, operations and samples per second of the fast-weight paper's models (its table 2)."""

    Config: ClassVar[type[Any]] = FwpkmCostConfig

    @staticmethod
    def run(config: FwpkmCostConfig, progress: Progress) -> Findings:
        """See `regard.recipes.Recipe`."""
        config = check(config)
        progress("counting")
        counts = {row: counted(row, PAPER_SIZES, PAPER_BATCH) for row in rows(config)}
        found = run_jobs(jobs(config), config.workers, progress)
        from . import fwpkm_cost_output as output

        runs = {row: [run for run in found if run.name == row.name] for row in counts}
        assert config.batch is not None
        data = {
            "counted": {row.name: {**asdict(count), "paper_flops": count.paper_flops, "flops": count.flops}
                        for row, count in counts.items()},
            "paper": {row.name: PAPER[key] for row in counts if (key := (row.layout, row.memory)) in PAPER},
            "numbers": {f.name: getattr(config, f.name) for f in fields(config) if f.name in SIZES["paper"]},
            "runs": [run.record() for run in found],
        }  # fmt: skip
        shown: Mapping[Row, Counted] = counts
        return Findings(
            data,
            output.tables(shown, runs, config.batch),
            output.figures(shown, runs, config.batch),
            output.notes(shown, runs, config.batch),
        )


def jobs(config: FwpkmCostConfig) -> list[Job]:
    """One for every row and seed, on tokens that mean nothing."""
    sizes = measured_sizes(config)
    tokens = torch.randint(sizes.vocabulary, (max(TEXT, 2 * sizes.context),), dtype=torch.int32,
                           generator=torch.Generator().manual_seed(config.seed))  # fmt: skip
    text = Corpus(tokens, tokens[: sizes.context])
    assert config.width is not None
    return [
        Job(
            name=row.name,
            config=row_config_of(row, sizes),
            material=text,
            budget=budget(config),
            seed=seed,
        )
        for seed in range(config.seed, config.seed + config.seeds)
        for row in rows(config)
    ]


def row_config_of(row: Row, sizes: Sizes) -> Any:
    """A configuration that can be trained."""
    config = count_config(row, sizes)
    config.initializer_range = initial_range(sizes.width)
    return config
