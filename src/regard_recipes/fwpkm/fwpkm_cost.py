"""What fast and slow memories cost: table 2 of the fast-weight paper, counted and measured.

Parameters are counted at the paper's size. Floating-point operations are counted twice: as the paper's column evidently
does (six for every token and learned number that is multiplied, without what a memory searches, gathers and writes) and
with everything that is computed; a multiplication and an addition are two.
"""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, ClassVar

import torch

from regard.checks import ArgumentError
from regard.nn import ProductKeyMemory
from regard.nn.memories import MemoryLayer

from ..lib.claims import Claim, claims_of, exact
from ..lib.display import Show, dots, pivot, stat
from ..lib.language_text import Corpus
from ..lib.recipe import Cell, Frame, Results, frame_of, select
from ..lib.text_recipe import initial_range
from ..lib.trained import LanguageOptions
from .memory_recipe import LAYOUTS, MEMORIES, PAPER_MODEL, PAPER_VOCABULARY, MemoryOptions, Row, row_config

TABLE_2: dict[tuple[str, str], tuple[float, ...]] = {
    (layout, memory): numbers
    for layout, row in {
        "GDN": ((112.11, 22.05, 42.81), (509.08, 20.91, 30.09), (519.12, 22.74, 16.10), (515.77, 22.14, 19.26)),
        "GDN+SWA": ((112.65, 22.14, 43.45), (509.61, 21.03, 31.25), (519.66, 22.86, 16.27), (516.31, 22.23, 19.39)),
        "GDN+FA": ((112.65, 22.14, 42.08), (509.61, 21.03, 30.07), (519.66, 22.86, 16.05), (516.31, 22.23, 19.29)),
        "FA": ((114.25, 22.47, 41.55), (511.22, 21.33, 28.49), (521.26, 23.16, 15.89), (517.91, 22.56, 18.84)),
    }.items()
    for memory, numbers in zip(MEMORIES[:4], row, strict=True)
}
"""The paper's parameters in millions, FLOPs in T for a step of 8 sequences of 4096 tokens, and samples per second."""
PAPER_SIZES = SimpleNamespace(**PAPER_MODEL)
PAPER_BATCH = 8
PARTS = ("projections", "attention", "delta rule", "search", "read", "write")


class FwpkmCost(MemoryOptions, LanguageOptions, name="fwpkm-cost"):
    """Parameters, operations and samples per second of the fast-weight paper's models (its table 2)."""

    workers: int = 1
    """Models that are measured at the same time."""
    layouts: tuple[str, ...] = ("GDN", "GDN+SWA", "GDN+FA", "FA")  # Layouts that are counted and measured.
    memories: tuple[str, ...] = ("none", "PKM", "FwPKM", "PKM+FwPKM")  # Memories of each.
    width = 192
    heads = 6
    batch = 2
    steps = 5
    looks = 1
    sub_keys = 128
    memory_dim = 128
    choices: ClassVar = {"layouts": LAYOUTS, "memories": MEMORIES}
    by_size: ClassVar = {
        "quick": {"width": 32, "heads": 2, "context": 64, "chunk": 16, "sub_keys": 16, "memory_dim": 32, "steps": 3},
        "paper": {**PAPER_MODEL, "dtype": "bfloat16", "batch": 8, "steps": 20},
    }  # fmt: skip

    def check(self) -> None:
        super().check()
        if "none" not in self.memories:
            raise ArgumentError("--memories lacks none, to which all others are compared; add it.")
        self.check_sizes(self.layouts)
        for cell in self.cells():
            row_config(Row(cell["layout"], cell["memory"]), self, self.vocabulary)

    def cells(self) -> list[Cell]:
        rows = [Row(layout, memory) for layout in self.layouts for memory in self.memories]
        return [{"model": row.name, "layout": row.layout, "memory": row.memory} for row in rows]

    @property
    def vocabulary(self) -> int:
        """Return the number of tokens of the models that are measured."""
        return PAPER_VOCABULARY if self.size == "paper" else 256

    def measure(self, cell: Cell, seed: int) -> Iterator[Any]:
        from ..lib.language_training import train_language_model

        row = Row(cell["layout"], cell["memory"])
        yield {"kind": "count", **counted(row)}
        draw, count = torch.Generator().manual_seed(self.seed), max(8192, 2 * self.context)
        tokens = torch.randint(self.vocabulary, (count,), dtype=torch.int32, generator=draw)
        config = row_config(row, self, self.vocabulary, initializer_range=initial_range(self.width))
        yield train_language_model(config, Corpus(tokens, tokens[:2]), self, 1e-4, seed)[0]

    def claims(self, results: Results) -> list[Claim]:
        counts = beside_paper(results, "count").groupby("model").first().dropna(subset=["paper_tera"])
        gaps = {column: counts[column] - counts[f"paper_{column}"] for column in ("millions", "tera")}
        worst = {column: {name: exact(gap[name]) for name in gap.abs().nlargest(1).index}
                 for column, gap in gaps.items()}  # fmt: skip
        less = f"less the paper's; the furthest of {len(counts)}."
        return claims_of("Fast-weight Product Key Memory", [
            ("table 2", "The parameters", worst["millions"], "within", 0.005,
             f"Millions, trained and test-time-updated together, {less}"),
            ("table 2", "The FLOPs", worst["tera"], "within", 0.02,
             f"T, six for each token and learned number that is not looked up, {less}"),
        ], digits=4)  # fmt: skip

    def tables(self, results: Results) -> dict[str, Any]:
        counts, runs = beside_paper(results, "count"), beside_paper(results, "run")
        tera = 3e-12 * PAPER_BATCH * PAPER_SIZES.context
        operations: dict[str, Show] = {name: stat(name, "mean", "{:.3f}", tera) for name in PARTS}
        return {
            "Table 2, counted": pivot(counts, ["model"], {
                "parameters, M": "{millions:.3f}", "paper, M": "{paper_millions:.2f}",
                "learned, M": stat("learned", "mean", "{:.2f}", 1e-6), "fast, M": stat("fast", "mean", "{:.2f}", 1e-6),
                "6 x parameters x tokens, T": "{tera:.2f}", "paper, T": "{paper_tera:.2f}",
                "all, T": stat("flops", "mean", "{:.2f}", 1e-12), "left out": "{left_out:+.1%}",
                "in memories, T": "{in_memories:.2f}",
            }, note="At the paper's size, a training step of 8 sequences of 4096 tokens. All: everything computed, the "
                    "backward pass as twice the forward pass. Left out: what the paper's count lacks."),
            "Operations of a step by what they do": pivot(
                counts, ["model"], operations, note="T operations, forward and backward."),
            "Measured": pivot(runs, ["model"], {
                "learned": "{parameters:,.0f}", "step, in units of none": "{relative:.2f}",
                "paper": "{paper_relative:.2f}", "peak": "{peak:.0f} MiB",
                "samples/s": lambda rows: f"{self.batch / rows['step'].iloc[0]:.2f}",
                "paper, samples/s": "{paper_samples:.2f}",
            }, note="Here at the measured size; the paper's times are of its own sizes on a GPU. Peak: of the process, "
                    "less what it held before the model was made."),
        }  # fmt: skip

    def figures(self, results: Results) -> dict[str, bytes]:
        runs, times = beside_paper(results, "run"), {"relative": "here", "paper_relative": "paper"}
        runs = runs[runs["memory"] != "none"]
        label = "a training step, in units of the same layout without a memory"
        return {"steps": dots(runs, times, "model", x_label=label)} if len(runs) else {}


def beside_paper(results: Results, kind: str) -> Frame:
    """Return the rows of a kind with the paper's numbers, steps in units of the same layout without a memory, and what
    the paper's count leaves out."""
    rows = results.select(kind=kind)
    columns = ("layout", "memory", "paper_millions", "paper_tera", "paper_samples")
    paper = frame_of(dict(zip(columns, (*model, *numbers), strict=True)) for model, numbers in TABLE_2.items())
    rows = rows.merge(paper, "left", ["layout", "memory"])
    rows["step"] = rows.groupby("model")["step_cpu_seconds"].transform("median")  # on a GPU by the wall's clock
    alone = select(rows, memory="none").groupby("layout")[["step", "paper_samples"]].first()
    step, samples = (rows["layout"].map(alone[column]) for column in alone)
    memories = rows["search"] + rows["read"] + rows["write"]
    return rows.assign(
        millions=rows["numbers"] / 1e6, tera=rows["paper_flops"] / 1e12, relative=rows["step"] / step,
        paper_relative=samples / rows["paper_samples"], left_out=rows["flops"] / rows["paper_flops"] - 1,
        in_memories=3 * memories * rows["tokens"] / 1e12,
        peak=(rows["peak_bytes"].astype(float) - rows["before_bytes"].astype(float)) / 2**20,
    )  # fmt: skip


def counted(row: Row) -> dict[str, Any]:
    """Count a model of the paper's size, unallocated. Return its numbers: learned, fast (written while reading), table
    (learned and looked up: values of slow memories) and numbers (learned and fast); operations of one token's forward
    pass by `PARTS`; tokens of a step, and its operations as the paper counts them (paper_flops) and all (flops)."""
    from regard.models.base.catalogue import model_of

    config = row_config(row, PAPER_SIZES, PAPER_VOCABULARY)
    with torch.device("meta"):
        model = model_of(config)(config)
    memories = [module for module in model.modules() if isinstance(module, MemoryLayer)]
    slow = [module for module in memories if isinstance(module, ProductKeyMemory)]
    searched = {id(weight) for module in slow for weight in module.parameters(recurse=False) if weight.dim() > 1}
    matrices = sum(w.numel() for w in model.parameters() if w.dim() == 2 and id(w) not in searched)
    table = sum(module.values.numel() for module in slow)
    parts = {"projections": 2.0 * matrices, **mixer_parts(row), **memory_parts(config)}
    learned, fast = model.num_parameters(), sum(module.fast_numbers() for module in memories)
    tokens = PAPER_BATCH * PAPER_SIZES.context
    return {"learned": learned, "fast": fast, "table": table, "numbers": learned + fast, "tokens": tokens, **parts,
            "paper_flops": 6.0 * (learned - table) * tokens, "flops": 3.0 * sum(parts.values()) * tokens}  # fmt: skip


def mixer_parts(row: Row) -> dict[str, float]:
    """Return the operations of a token beside the projections: QK and AV for all visible pairs; a delta net's
    convolution, and seven for every number of its state (fade, read by k, write, read by q)."""
    sizes, length = PAPER_SIZES, PAPER_SIZES.context
    attention = {"GDN": 0, "FA": sizes.layers}.get(row.layout.partition("-")[0], sizes.layers // 4)
    channels = sizes.width // sizes.heads
    window = min(sizes.chunk, length) if "SWA" in row.layout else length
    seen = (window * (window + 1) / 2 + (length - window) * window) / length
    net = sizes.delta_heads * (7.0 * channels**2 + 8.0 * 3 * channels)
    return {"attention": 4.0 * seen * sizes.width * attention, "delta rule": net * (sizes.layers - attention)}


def memory_parts(config: Any) -> dict[str, float]:
    """Return the operations of a token in the memories of a model: search (scores of all sub-keys), read (weights times
    rows), write (errors, their sum in every row, and k sub-keys moved in each half)."""
    parts = dict.fromkeys(("search", "read", "write"), 0.0)
    for name in (name for names in config.layer_memories().values() for name in names):
        options = config.memory_options[name]
        if name == "fwmlp":
            dense = 3.0 * options["in_dim"] * options["hidden_dim"]
            counts = {"read": 2 * dense, "write": 4 * dense}
        else:
            heads, n, d, k = (options.get(size, 1) for size in ("heads", "sub_keys", "key_dim", "top_k"))
            counts = {"search": 2.0 * heads * n * d, "read": 2.0 * heads * k * d,
                      "write": (2.0 * d + 2.0 * k * d + 3.0 * k * d) * (name == "fwpkm")}  # fmt: skip
        for part, count in counts.items():
            parts[part] += count
    return parts
