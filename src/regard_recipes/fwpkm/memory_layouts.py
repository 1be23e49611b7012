"""The models of the fast-weight paper at any size: its layouts, each with its memories, by a name for each pair."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from regard.checks import ArgumentError

from ..lib.recipe import Limits, check_number

PAPER = "Fast-weight Product Key Memory"
LAYOUTS = ("GDN", "GDN+SWA", "GDN+FA", "FA", "FA-pSWA")
MEMORIES = ("none", "PKM", "FwPKM", "PKM+FwPKM", "FwMLP")
LACT = "LaCT"
FULL, RESTRICTED = ("GDN+FA", "FA"), {"FA-pSWA": "FA", "GDN+FA-pSWA": "GDN+FA"}
"""Layouts with attention that sees everything; those whose attention sees little in most training steps, and what they
are without that."""
PAPER_MODEL: dict[str, Any] = {
    "width": 768, "layers": 12, "heads": 12, "kv_heads": 4, "delta_heads": 8, "context": 4096, "chunk": 512,
    "sub_keys": 512, "memory_dim": 512, "device": "auto",
}  # fmt: skip
"""The paper's models and contexts (table 3, sections 4.2 and 4.3): 112.11 M parameters, 519.12 M with FwPKM, where the
vocabulary has its 32,000 tokens."""
PAPER_VOCABULARY = 32_000
PKM_HEADS, PKM_TOP_K, TOP_K = 4, 32, 8
"""Heads of a slow memory and slots that each reads; slots that a fast memory reads, as far as there are sub-keys."""


@dataclass(kw_only=True, eq=False)
class MemoryOptions:
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
    """Tokens of a training window."""
    chunk: int = 64
    """Tokens between two writes; also the window of SWA and pSWA."""
    sub_keys: int = 32
    """The square root of a memory's slots."""
    memory_dim: int = 64
    """Channels of a memory's keys and values."""
    limits: ClassVar[Limits] = {
        **dict.fromkeys(("layers", "context", "chunk", "sub_keys", "memory_dim"), (2, math.inf)),
        **dict.fromkeys(("kv_heads", "delta_heads"), (0, math.inf)),
    }


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


def depths_of(memory: str, layers: int) -> dict[str, tuple[int, ...]]:
    """Return the kinds of one of `MEMORIES` with their depths, from 0: the paper's. Models with fewer layers have one
    of each: the fast one before the last layer (of two, there), the slow one before the fast one."""
    slow: tuple[int, ...] = (layers // 2 - 1,)
    fast: tuple[int, ...] = (max(1, layers - 2),)
    if layers >= 12:
        slow, fast = ((6,), (2, 10)) if "+" in memory else ((2, 6, 10), (2, 6, 10))
    return {kind: slow if kind == "PKM" else fast for kind in memory.split("+") if kind != "none"}


def row_config(
    row: Row, own: Any, vocabulary: int, fast: Mapping[str, Any] | None = None,
    depths: Mapping[str, tuple[int, ...]] | None = None, **fields: Any,
) -> Any:  # fmt: skip
    """Return the configuration of a row in the sizes of `own`, which has the options of `MemoryOptions`, with further
    options of a FwPKM memory (`fast`) and `fields`."""
    from regard.models import HybridConfig

    head, delta_heads = own.width // own.heads, own.delta_heads or own.heads
    memory = {"key_dim": own.memory_dim, "value_dim": own.memory_dim, "sub_keys": own.sub_keys}
    options = {
        "PKM": {"pkm": {**memory, "heads": PKM_HEADS, "top_k": min(PKM_TOP_K, own.sub_keys)}},
        "FwPKM": {"fwpkm": {**memory, "top_k": min(TOP_K, own.sub_keys), "chunk_size": own.chunk, **(fast or {})}},
        "FwMLP": {"fwmlp": {"in_dim": own.memory_dim, "value_dim": own.memory_dim, "hidden_dim": hidden_of(own),
                            "chunk_size": own.chunk}},
    }  # fmt: skip
    at = depths or depths_of(row.memory, own.layers)
    mixers: dict[str, Any] = {}
    if row.layout.startswith("GDN"):
        mixers = {"gated-deltanet": {"num_heads": delta_heads, "head_dim": head}}
    if row.layout == LACT:
        mixers = {"lact": {"window": 4 * own.chunk, "chunk_size": own.chunk}}  # the paper's best preset
    made: dict[str, Any] = {
        "vocab_size": vocabulary, "hidden_size": own.width, "num_hidden_layers": own.layers,
        "num_attention_heads": own.heads, "num_key_value_heads": own.kv_heads or own.heads, "head_dim": head,
        "intermediate_size": 3 * own.width, "max_position_embeddings": own.context,
        "mixer_options": mixers or None,
        "memory_options": {name: value for kind in at for name, value in options[kind].items()} or None,
    }  # fmt: skip
    if row.layout == "GDN+SWA" or row.layout in RESTRICTED:
        made["window"] = own.chunk
    memories = "+".join(f"{kind}@{','.join(map(str, where))}" for kind, where in at.items()) or None
    return HybridConfig.layout(row.layout, memories, **{**made, **fields})


def hidden_of(own: Any) -> int:
    """Return the width of a fast-weight MLP."""
    return int(9 * own.memory_dim // 2)


def check_sizes(call: str, config: Any, layouts: Iterable[str]) -> None:
    """Raise an ArgumentError where no sizes can be made of the options."""
    if any("+" in layout for layout in layouts):
        check_number(f"{call}: --layers", config.layers, 4, math.inf)
    if config.memory_dim % 2:
        raise ArgumentError(f"{call}: --memory-dim is {config.memory_dim}, expected an even number: keys have halves.")
    if config.context < 2 * config.chunk:
        raise ArgumentError(
            f"{call}: --context {config.context} has less than two chunks of {config.chunk}: nothing that is written "
            f"would be read; take a smaller --chunk."
        )
