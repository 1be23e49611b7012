"""Which memory helps on which text: the paper's figures 2 and 3 and its findings 1 to 3, at a size for two cores.

Fast-weight Product Key Memory paper, section 4.2. All models are trained on the same windows of short and long
documents, and then read held-out documents of both kinds segment by segment. The paper carries the fast memory on
through everything and starts all else anew at every segment; here the same models are also read by rules that favour
nobody: the memory new at every document, and the recurrent states of all models carried through a document as well.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from torch import Tensor

from regard.checks import ArgumentError
from regard.recipes import Findings, Progress, recipes

from ..fwpkm.memory_layouts import (
    KNOWN,
    LACT,
    LAYOUTS,
    MEMORIES,
    Row,
    Sizes,
    check_names,
    check_sizes,
    row_config,
    rows_of,
)
from ..lib.language_runs import Budget, Job, initial_range, run_jobs, sized
from .streaming import Carry, streamed

if TYPE_CHECKING:
    from .document_text import DocumentText

CALL = "reproduce: streaming-perplexity"
RULES: dict[str, Carry] = {
    "new": Carry("segment", "segment"),
    "paper": Carry("stream", "segment"),
    "document": Carry("document", "segment"),
    "carried": Carry("document", "document"),
}
"""How a text is read: nothing goes on; as in the paper; the memory through a document; all states through a document.
Pairs of attention are new at every segment by every rule."""
FROZEN = "frozen"
"""The rule "new" with a memory that is never written."""


@dataclass(frozen=True, kw_only=True)
class StreamingPerplexityConfig:
    """Train the fast-weight paper's layouts with each of its memories, and read short and long documents in order."""

    out: Path = Path("streaming-perplexity-out")
    """Folder to write. An earlier result in it is replaced; any other folder must be empty."""
    size: Literal["quick", "desk", "paper"] = "desk"
    """What is taken where an option is not given: 'quick' needs two minutes on two cores, 'desk' a quarter of an hour,
    'paper' (12 layers of width 768, 512 x 512 slots) GPUs, days, --short and --long."""
    quick: bool = False
    """The same as --size quick."""
    layouts: tuple[str, ...] | None = None
    """GDN, GDN+SWA, GDN+FA, FA, FA-pSWA, GDN+FA-pSWA."""
    memories: tuple[str, ...] | None = None
    """none, PKM, FwPKM, PKM+FwPKM, FwMLP."""
    lact: bool = True
    """LaCT too, once."""
    short: Path | None = None
    """UTF-8 text of short documents with empty lines between them. None: docstrings of the standard library."""
    long: Path | None = None
    """A folder of long UTF-8 files. None: modules of the standard library."""
    tokenizer: str | None = None
    """char, byte or gpt2."""
    seeds: int | None = None
    """Models of each kind; they differ in first weights and windows."""
    seed: int = 0
    """The first of the seeds."""
    width: int | None = None
    """Width of every model."""
    layers: int | None = None
    """Layers of every model; every fourth is attention where a layout has both kinds."""
    heads: int | None = None
    """Heads of every mixer."""
    context: int | None = None
    """Tokens of a training window, and of a segment."""
    chunk: int | None = None
    """Tokens between two writes; also the window of SWA and pSWA."""
    sub_keys: int | None = None
    """The square root of a memory's slots."""
    memory_dim: int | None = None
    """Channels of a memory's keys and values."""
    batch: int | None = None
    """Windows of a step."""
    parts: int | None = None
    """In how many passes a step is made, where its memory is short."""
    steps: int | None = None
    """Optimiser steps of each model."""
    learning_rate: float | None = None
    """The highest, for all models."""
    documents: int | None = None
    """Held-out documents of each kind that are read."""
    segments: int | None = None
    """Segments of each."""
    looks: int | None = None
    """How often the losses are noted."""
    dtype: str | None = None
    """Of the products: float32 or bfloat16."""
    device: str | None = None
    """'cpu', 'cuda', 'mps' or 'auto'."""
    workers: int = 2
    """Models that are trained at the same time, on one thread each. Changes no number but the times."""


_ALL: dict[str, Any] = {"layouts": LAYOUTS, "memories": MEMORIES}
_SMALL: dict[str, Any] = {
    "tokenizer": "byte", "layers": 4, "parts": 1, "dtype": "float32", "device": "cpu", "seeds": 1,
}  # fmt: skip
SIZES: dict[str, dict[str, Any]] = {
    "quick": {
        **_SMALL, "layouts": ("GDN", "FA", "FA-pSWA"), "memories": ("none", "PKM", "FwPKM"), "width": 32, "heads": 2,
        "context": 64, "chunk": 16, "sub_keys": 16, "memory_dim": 32, "batch": 2, "steps": 12, "learning_rate": 1e-2,
        "documents": 2, "segments": 4, "looks": 2,
    },
    "desk": {
        **_SMALL, **_ALL, "width": 96, "heads": 4, "context": 256, "chunk": 64, "sub_keys": 32, "memory_dim": 64,
        "batch": 4, "steps": 130, "learning_rate": 6e-3, "documents": 8, "segments": 12, "looks": 4,
    },
    "paper": {
        **_ALL, "tokenizer": "gpt2", "layers": 12, "parts": 4, "dtype": "bfloat16", "device": "auto", "seeds": 1,
        "width": 768, "heads": 12, "context": 4096, "chunk": 512, "sub_keys": 512, "memory_dim": 512, "batch": 128,
        "steps": 20_000, "learning_rate": 1e-3, "documents": 128, "segments": 16, "looks": 20,
    },
}  # fmt: skip
"""Options by size. "paper" has the paper's depth, width, contexts and slots (its table 3, section 4.2), not its models:
12 heads of keys and values for its 4, 12 heads of GDN for its 8, hence 124.02 M numbers for 112.11 M and 531.03 M for
519.12 M with memories; the rule of writing is "normalized", and the memory is new in every window of training."""


def check(config: StreamingPerplexityConfig) -> StreamingPerplexityConfig:
    """The config with the numbers of its size, after everything in it was found to be in range.

    Raises:
        ArgumentError: something is not, or a name is unknown or given twice.
    """
    config = sized(config, SIZES, CALL)
    assert config.layouts is not None
    assert config.memories is not None
    check_names(CALL, "--layouts", config.layouts, KNOWN)
    check_names(CALL, "--memories", config.memories, MEMORIES)
    for name in ("documents", "segments"):
        if getattr(config, name) < 1:
            raise ArgumentError(f"{CALL}: --{name} is {getattr(config, name)}, expected at least 1.")
    assert config.context is not None
    check_sizes(CALL, config)
    budget(config).check(CALL)
    for row in rows(config):
        row_config(row, sizes(config, 258))
    return config


def rows(config: StreamingPerplexityConfig) -> list[Row]:
    """What is trained."""
    assert config.layouts is not None
    assert config.memories is not None
    return rows_of(config.layouts, config.memories, [Row(LACT)] if config.lact else [])


def sizes(config: Any, vocabulary: int) -> Sizes:
    """How large the models of a recipe are, with the paper's places for memories and, in models of fewer layers, one
    memory a model: the slow one before the fast one, the fast one before the last layer."""
    paper = config.layers >= 12
    return Sizes(
        vocabulary=vocabulary,
        width=config.width,
        layers=config.layers,
        heads=config.heads,
        context=config.context,
        sub_keys=config.sub_keys,
        memory_dim=config.memory_dim,
        chunk=config.chunk,
        slow_depths=(2, 6, 10) if paper else (config.layers // 2 - 1,),
        fast_depths=(2, 6, 10) if paper else (config.layers - 2,),
        mixed_slow=(6,) if paper else (config.layers // 2 - 1,),
        mixed_fast=(2, 10) if paper else (config.layers - 2,),
        pkm_top_k=min(32, config.sub_keys),
        fast_top_k=min(8, config.sub_keys),
        mlp_hidden=9 * config.memory_dim // 2,
    )


def budget(config: Any) -> Budget:
    """What every model is given."""
    numbers = {f.name: getattr(config, f.name) for f in fields(Budget) if hasattr(config, f.name)}
    return Budget(**numbers, measured=max(2, 4 * config.context))


def reading_rules(row: Row) -> list[str]:
    """The rules that differ for a row: without a memory, or without a recurrent state, some are the same as others."""
    found = ["new"]
    if row.remembers:
        found += ["paper", "document", FROZEN]
    if row.recurrent:
        found.append("carried")
    return found


def measured(model: Any, row: Row, documents: Mapping[str, Tensor], segment: int) -> dict[str, Any]:
    """What a model makes of both kinds of documents by every rule; a `measure` of runs."""
    found: dict[str, Any] = {}
    for kind, each in documents.items():
        for rule in reading_rules(row):
            read = streamed(
                model,
                list(each),
                segment,
                RULES["new" if rule == FROZEN else rule],
                rows=max(1, len(each) // 2),
                frozen=rule == FROZEN,
                statistics=rule == "paper",
            )
            found.setdefault(kind, {})[rule] = read.record()
    return found


@recipes.register("streaming-perplexity")
class StreamingPerplexity:
    """Perplexity on short and long documents read in order, with fast and slow memories in the FwPKM layouts."""

    Config: ClassVar[type[Any]] = StreamingPerplexityConfig

    @staticmethod
    def run(config: StreamingPerplexityConfig, progress: Progress) -> Findings:
        """See `regard.recipes.Recipe`."""
        config = check(config)
        progress("reading the text")
        from .document_text import read_documents

        assert config.context is not None
        assert config.segments is not None
        assert config.documents is not None
        assert config.tokenizer is not None
        length = config.context * config.segments + 1
        text = read_documents(
            config.short, config.long, config.tokenizer, length=length, count=config.documents, call=CALL
        )
        trained = rows(config)
        found = run_jobs(jobs(config, trained, text), config.workers, progress)
        progress("drawing")
        from . import streaming_perplexity_output as output

        groups = {row: [run for run in found if run.name == row.name] for row in trained}
        data = {
            "text": text.described,
            "numbers": {f.name: getattr(config, f.name) for f in fields(config) if f.name in SIZES["paper"]},
            "rules": {name: {"memory": rule.memory, "recurrent": rule.recurrent} for name, rule in RULES.items()},
            "runs": [run.record() for run in found],
        }
        return Findings(data, output.tables(groups), output.figures(groups), output.notes(groups))


def jobs(config: StreamingPerplexityConfig, trained: list[Row], text: DocumentText) -> list[Job]:
    """One for every row and seed."""
    assert config.seeds is not None
    assert config.context is not None
    assert config.width is not None
    return [
        Job(
            name=row.name,
            config=row_config(row, sizes(config, text.vocabulary), initializer_range=initial_range(config.width)),
            material=text,
            budget=budget(config),
            seed=seed,
            measure=partial(measured, row=row, documents=text.kinds, segment=config.context),
        )
        for row in trained
        for seed in range(config.seed, config.seed + config.seeds)
    ]
