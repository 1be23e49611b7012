"""The models of the fast-weight paper at any size: its layouts, each with its memories, by a name for each pair."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from regard.checks import ArgumentError

from ..lib.language_training import LanguageConfig
from ..lib.recipe import check_number

LAYOUTS = ("GDN", "GDN+SWA", "GDN+FA", "FA", "FA-pSWA")
MEMORIES = ("none", "PKM", "FwPKM", "PKM+FwPKM", "FwMLP")
LACT = "LaCT"
KNOWN = (*LAYOUTS, "GDN+FA-pSWA")
FULL, RESTRICTED = ("GDN+FA", "FA"), {"FA-pSWA": "FA", "GDN+FA-pSWA": "GDN+FA"}
"""Layouts with attention that sees everything; those whose attention sees little in most training steps, and what they
are without that."""
PAPER_MODEL: dict[str, Any] = {
    "width": 768, "layers": 12, "heads": 12, "kv_heads": 4, "delta_heads": 8, "context": 4096, "chunk": 512,
    "sub_keys": 512, "memory_dim": 512, "dtype": "bfloat16", "device": "auto",
}  # fmt: skip
"""The paper's models and contexts (table 3, sections 4.2 and 4.3): 112.11 M parameters, 519.12 M with FwPKM, where the
vocabulary has its 32,000 tokens."""
PAPER_VOCABULARY = 32_000


@dataclass(frozen=True, kw_only=True)
class MemoryConfig(LanguageConfig):
    """Options of recipes whose models have memories."""

    width: int = 64
    """Width of every model."""
    layers: int = 4
    """Layers of every model; every fourth is attention where a layout has both kinds. Memories stand at the paper's
    depths where there are twelve, else before the last."""
    heads: int = 2
    """Heads of every mixer."""
    kv_heads: int = 0
    """Heads of keys and values of attention; 0 for as many as `heads`."""
    delta_heads: int = 0
    """Heads of gated delta nets, as wide as those of attention; 0 for as many as `heads`."""
    context: int = 256
    chunk: int = 64
    """Tokens between two writes; also the window of SWA and pSWA."""
    sub_keys: int = 32
    """The square root of a memory's slots."""
    memory_dim: int = 64
    """Channels of a memory's keys and values."""


@dataclass(frozen=True)
class Row:
    """One model of a comparison: how its layers mix tokens, and one of `MEMORIES`."""

    layout: str
    memory: str = "none"

    @property
    def name(self) -> str:
        """Return a unique name for people."""
        return self.layout if self.memory == "none" else f"{self.layout} | {self.memory}"

    @property
    def remembers(self) -> bool:
        """Return whether it has a memory that is written while reading."""
        return "Fw" in self.memory

    @property
    def rereads(self) -> bool:
        """Return whether it has fast weights, which reads can change."""
        return self.remembers or self.layout == LACT

    @property
    def recurrent(self) -> bool:
        """Return whether a mixer has a state of fixed size."""
        return self.layout.startswith("GDN") or self.layout == LACT


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """How large the models are.

    Attributes:
        vocabulary, width, layers, heads: of the decoder; context: tokens of a training window.
        kv_heads, delta_heads: heads of keys and values, and of gated delta nets.
        sub_keys: n of both product-key memories, which have n^2 slots; memory_dim: channels of their keys and values.
        chunk: tokens between two writes of a fast memory; also the window of SWA and pSWA.
        slow_depths, fast_depths: where a memory that is not shared with the other kind stands, from 0; a model of both
            kinds has the slow one at `mixed_slow` and the fast one at `mixed_fast`.
        pkm_heads, pkm_top_k, fast_top_k: how many slots are read; mlp_hidden: width of the fast-weight MLP.
    """

    vocabulary: int
    width: int
    layers: int
    heads: int
    kv_heads: int
    delta_heads: int
    context: int
    sub_keys: int
    memory_dim: int
    chunk: int
    slow_depths: tuple[int, ...]
    fast_depths: tuple[int, ...]
    mixed_slow: tuple[int, ...]
    mixed_fast: tuple[int, ...]
    pkm_top_k: int
    fast_top_k: int
    mlp_hidden: int
    pkm_heads: int = 4

    @classmethod
    def of(cls, config: Any, vocabulary: int, **changes: Any) -> Sizes:
        """Return the sizes of a recipe's models, with the paper's places for memories. Models with fewer layers have
        one memory of each kind: the fast one before the last layer, the slow one before the fast one."""
        names = ("width", "layers", "heads", "context", "sub_keys", "memory_dim", "chunk")
        slow, fast = (config.layers // 2 - 1,), (config.layers - 2,)
        places = ((2, 6, 10), (2, 6, 10), (6,), (2, 10)) if config.layers >= 12 else (slow, fast, slow, fast)
        depths = zip(("slow_depths", "fast_depths", "mixed_slow", "mixed_fast"), places, strict=True)
        heads = {name: getattr(config, name) or config.heads for name in ("kv_heads", "delta_heads")}
        return cls(**{
            "vocabulary": vocabulary, **{name: getattr(config, name) for name in names}, **heads, **dict(depths),
            "pkm_top_k": min(32, config.sub_keys), "fast_top_k": min(8, config.sub_keys),
            "mlp_hidden": 9 * config.memory_dim // 2, **changes,
        })  # fmt: skip


def placed(row: Row, sizes: Sizes) -> str | None:
    """Return the memories of a row with their depths, as `HybridConfig.memories` has them."""
    slow, fast = (sizes.mixed_slow, sizes.mixed_fast) if "+" in row.memory else (sizes.slow_depths, sizes.fast_depths)
    kinds = row.memory.split("+")
    depths = [",".join(map(str, slow if kind == "PKM" else fast)) for kind in kinds]
    return None if row.memory == "none" else "+".join(f"{kind}@{at}" for kind, at in zip(kinds, depths, strict=True))


def row_config(row: Row, sizes: Sizes, fast: Mapping[str, Any] | None = None, **fields: Any) -> Any:
    """Return the configuration of a row, with further options of a FwPKM memory (`fast`) and `fields`.

    Raises:
        ArgumentError: sizes that do not fit.
    """
    from regard.models import HybridConfig

    head = sizes.width // sizes.heads
    memory = {"key_dim": sizes.memory_dim, "value_dim": sizes.memory_dim, "sub_keys": sizes.sub_keys}
    options = {
        "PKM": {"pkm": {**memory, "heads": sizes.pkm_heads, "top_k": sizes.pkm_top_k}},
        "FwPKM": {"fwpkm": {**memory, "top_k": sizes.fast_top_k, "chunk_size": sizes.chunk, **(fast or {})}},
        "FwMLP": {"fwmlp": {"in_dim": sizes.memory_dim, "value_dim": sizes.memory_dim, "hidden_dim": sizes.mlp_hidden,
                            "chunk_size": sizes.chunk}},
    }  # fmt: skip
    mixers: dict[str, Any] = {}
    if row.layout.startswith("GDN"):
        mixers = {"gated-deltanet": {"num_heads": sizes.delta_heads, "head_dim": head}}
    if row.layout == LACT:
        mixers = {"lact": {"window": 4 * sizes.chunk, "chunk_size": sizes.chunk}}  # the paper's best preset
    own: dict[str, Any] = {
        "vocab_size": sizes.vocabulary, "hidden_size": sizes.width, "num_hidden_layers": sizes.layers,
        "num_attention_heads": sizes.heads, "num_key_value_heads": sizes.kv_heads, "head_dim": head,
        "intermediate_size": 3 * sizes.width, "max_position_embeddings": sizes.context,
        "mixer_options": mixers or None,
        "memory_options": {k: v for part in row.memory.split("+") for k, v in options.get(part, {}).items()} or None,
    }  # fmt: skip
    if row.layout == "GDN+SWA" or row.layout in RESTRICTED:
        own["window"] = sizes.chunk
    return HybridConfig.layout(row.layout, placed(row, sizes), **{**own, **fields})


def rows_of(layouts: Sequence[str], memories: Sequence[str], also: Iterable[Row] = ()) -> list[Row]:
    """Return every layout with every memory, and some more, each once."""
    found = [Row(layout, memory) for layout in layouts for memory in memories]
    return list(dict.fromkeys([*found, *also]))


def check_sizes(call: str, config: Any) -> None:
    """Raise an ArgumentError where no sizes can be made of the options."""
    lowest = {"layers": 4, "chunk": 2, "sub_keys": 2, "memory_dim": 2, "context": 2, "kv_heads": 0, "delta_heads": 0}
    for name, low in lowest.items():
        check_number(f"{call}: --{name.replace('_', '-')}", getattr(config, name), low, math.inf)
    if config.memory_dim % 2:
        raise ArgumentError(f"{call}: --memory-dim is {config.memory_dim}, expected an even number: keys have halves.")
    check_chunk(call, config)


def check_chunk(call: str, config: Any) -> None:
    """Raise an ArgumentError where a context has less than two chunks."""
    if config.context < 2 * config.chunk:
        raise ArgumentError(
            f"{call}: --context {config.context} has less than two chunks of {config.chunk}: nothing that is written "
            f"would be read; take a smaller --chunk."
        )
