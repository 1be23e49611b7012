"""What recipes of models with fast-weight memories share: the layouts of the paper at any size, options, and texts."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, ClassVar

import torch

from regard.checks import ArgumentError
from regard.nn.memory.fast_weight_product_key_memory import PRESETS
from regard.tasks import RecurringNames

from ..lib.recipe import Limits
from ..lib.task_recipe import TaskRecipe, first_range
from ..long_text.needle_text import NeedleText, needle_text

LAYOUTS = ("GDN", "GDN+SWA", "GDN+FA", "FA", "FA-pSWA")
MEMORIES = ("none", "PKM", "FwPKM", "PKM+FwPKM", "FwMLP")
LACT = "LaCT"
RESTRICTED = {"FA-pSWA": "FA", "GDN+FA-pSWA": "GDN+FA"}
"""Layouts whose attention sees little in most training steps, and what they are without that."""
PAPER_MODEL: dict[str, Any] = {
    "width": 768, "layers": 12, "heads": 12, "kv_heads": 4, "delta_heads": 8, "context": 4096, "chunk": 512,
    "sub_keys": 512, "memory_dim": 512, "device": "auto",
}  # fmt: skip
"""The paper's models and contexts (table 3, sections 4.2 and 4.3): 112.11 M parameters, 519.12 M with FwPKM, where the
vocabulary has its 32,000 tokens."""
PAPER_VOCABULARY = 32_000
PAPER = "Fast-weight Product Key Memory"
RULES: dict[str, dict[str, Any]] = {"normalized": {}, **PRESETS}
NAMES, NEEDLES = "names", "needles"
QUICK: dict[str, Any] = {"width": 32, "sub_keys": 16, "memory_dim": 32, "batch": 8, "steps": 12, "examples": 8,
                         "top_k": 4}  # fmt: skip
PAPER_SIZE: dict[str, Any] = {
    **PAPER_MODEL, "rule": "program", "feed_forward": "swiglu", "batch": 32, "steps": 20_000, "rates": (3e-4, 1e-3),
}  # fmt: skip
"""Here memories are new in every training window. The paper's training carries one memory, of all windows, on."""
PAPER_BOTH: dict[str, Any] = {
    **PAPER_SIZE, "rule": "normalized", "address_weight": 10.0, "people": 24, "words": 30_000, "haystack": 4000,
    "digits": 6, "key_digits": 2, "most": 16,
}  # fmt: skip
"""The same for recipes with both texts, names and needles."""


@dataclass(kw_only=True, eq=False)
class MemoryOptions:
    """Options of recipes whose models have memories."""

    width: int = 64  # Width of every model.
    layers: int = 4
    """Layers of every model; every fourth is attention where a layout has both kinds. Memories stand at the paper's
    depths where there are twelve, else before the last."""
    heads: int = 2  # Heads of every mixer.
    kv_heads: int = 0  # Heads of keys and values of attention; 0 for as many as `heads`.
    delta_heads: int = 0  # Heads of gated delta nets, as wide as those of attention; 0 for as many as `heads`.
    context: int = 256  # Tokens of a training window.
    chunk: int = 64  # Tokens between two writes; also the window of SWA and pSWA.
    sub_keys: int = 32  # The square root of a memory's slots.
    memory_dim: int = 64  # Channels of a memory's keys and values.
    limits: ClassVar[Limits] = {
        **dict.fromkeys(("layers", "context", "chunk", "sub_keys", "memory_dim"), (2, math.inf)),
        **dict.fromkeys(("kv_heads", "delta_heads"), (0, math.inf)),
    }

    def check_sizes(self, layouts: Iterable[str]) -> None:
        """Raise an ArgumentError where no sizes can be made of the options."""
        if any("+" in layout for layout in layouts) and self.layers < 4:
            raise ArgumentError(f"--layers is {self.layers}, expected at least 4.")
        if self.memory_dim % 2:
            raise ArgumentError(f"--memory-dim is {self.memory_dim}, expected an even number: keys have halves.")
        if self.context < 2 * self.chunk:
            few = f"--context {self.context} has less than two chunks of {self.chunk}"
            raise ArgumentError(f"{few}: nothing that is written would be read; take a smaller --chunk.")


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


def known_rows(*more_layouts: str) -> dict[str, dict[str, Row]]:
    """Return `known` of a recipe with every layout, each with every memory, and LaCT."""
    rows = [*(Row(*each) for each in product((*LAYOUTS, *more_layouts), MEMORIES)), Row(LACT)]
    return {row.name: {"row": row} for row in rows}


def depths_of(memory: str, layers: int) -> dict[str, tuple[int, ...]]:
    """Return the kinds of one of `MEMORIES` with their depths, from 0: the paper's. Models with fewer layers have one
    of each: the fast one before the last layer (of two, there), the slow one before the fast one."""
    slow: tuple[int, ...] = (layers // 2 - 1,)
    fast: tuple[int, ...] = (max(1, layers - 2),)
    if layers >= 12:
        slow, fast = ((6,), (2, 10)) if "+" in memory else ((2, 6, 10), (2, 6, 10))
    return {kind: slow if kind == "PKM" else fast for kind in memory.split("+") if kind != "none"}


def row_config(row: Row, sizes: Any, vocabulary: int, fast: Mapping[str, Any] | None = None, **fields: Any) -> Any:
    """Return the configuration of a row in the sizes of an object with the options of `MemoryOptions`, with further
    options of a FwPKM memory (`fast`) and `fields`."""
    from regard.models import HybridConfig

    head = sizes.width // sizes.heads
    memory = {"key_dim": sizes.memory_dim, "value_dim": sizes.memory_dim, "sub_keys": sizes.sub_keys}
    options = {  # the paper's numbers of heads and of slots that are read, as far as there are sub-keys
        "PKM": {**memory, "heads": 4, "top_k": min(32, sizes.sub_keys)},
        "FwPKM": {**memory, "top_k": min(8, sizes.sub_keys), "chunk_size": sizes.chunk, **(fast or {})},
        "FwMLP": {"in_dim": sizes.memory_dim, "value_dim": sizes.memory_dim, "hidden_dim": 9 * sizes.memory_dim // 2,
                  "chunk_size": sizes.chunk},
    }  # fmt: skip
    mixers = {
        "GDN": {"gated-deltanet": {"num_heads": sizes.delta_heads or sizes.heads, "head_dim": head}},
        LACT: {"lact": {"window": 4 * sizes.chunk, "chunk_size": sizes.chunk}},  # the paper's best preset
    }
    depths = depths_of(row.memory, sizes.layers)
    common: dict[str, Any] = {
        "vocab_size": vocabulary, "hidden_size": sizes.width, "num_hidden_layers": sizes.layers,
        "num_attention_heads": sizes.heads, "num_key_value_heads": sizes.kv_heads or sizes.heads, "head_dim": head,
        "intermediate_size": 3 * sizes.width, "max_position_embeddings": sizes.context,
        "mixer_options": mixers.get(row.layout.partition("+")[0]),
        "memories": "+".join(f"{kind}@{','.join(map(str, layers))}" for kind, layers in depths.items()) or None,
        "memory_options": {kind.lower(): options[kind] for kind in depths} or None,
    }  # fmt: skip
    if row.layout == "GDN+SWA" or row.layout in RESTRICTED:
        common["window"] = sizes.chunk
    return HybridConfig.layout(row.layout, **{**common, **fields})


class MemoryRecipe(MemoryOptions, TaskRecipe):
    """A recipe of models with memories; a name in `known` has a row ("row") and options of FwPKM memories ("fast")."""

    layers = 2
    heads = 1
    context = 48
    chunk = 8
    sub_keys = 16
    top_k: int = 8  # Slots that a token reads.
    rule: str = "normalized"
    """How FwPKM is written: normalized, paper (its equations) or program (the released program)."""
    address_weight: float = 1.0
    """Weight of the entropy that moves the keys, with --rule normalized; the other rules have their own. The paper's 10
    suits its 512 sub-keys."""
    feed_forward: str = "none"  # Of every layer: none, swiglu or gelu.
    limits: ClassVar[Limits] = {"top_k": (1, 2**16)}
    choices: ClassVar = {"rule": tuple(RULES)}

    def check(self) -> None:
        super(TaskRecipe, self).check()  # the tasks, which it would make next, are made below: sizes are checked first
        self.check_sizes(self.row(name).layout for name in self.trained)
        with torch.device("meta"):  # options that do not fit are errors, and nothing is allocated
            for task, name in product(self.training_tasks().values(), self.trained):
                self.make_model(name, task)

    def row(self, name: str) -> Row:
        """Return how the layers of a model mix tokens, and its memory."""
        return self.known[name]["row"]

    def model_config(self, name: str, vocabulary: int) -> Any:
        fields = {"initializer_range": first_range(self.width), **self.shared()}
        return row_config(self.row(name), self, vocabulary, self.fast(name), **fields)

    def shared(self) -> Mapping[str, Any]:
        return {"feed_forward": self.feed_forward}

    def fast(self, name: str) -> dict[str, Any]:
        """Return the options of a model's FwPKM memories beside their sizes."""
        common = {"top_k": min(self.top_k, self.sub_keys**2), "address_weight": self.address_weight}
        return {**common, **RULES[self.rule], **self.known[name].get("fast", {})}


class NamesRecipe(MemoryRecipe):
    """A recipe with the text of names."""

    people: int = 4  # People of a document.
    limits: ClassVar[Limits] = {"people": (1, 100)}

    def names(self, length: int) -> RecurringNames:
        """Return the text of names, in documents of so many tokens, of which every one is to be predicted. A name
        recurs far where attention to a chunk does not see it."""
        return RecurringNames(-(-length // 3), self.people, 0.8, verbs=0, window=self.chunk, everything=True,
                              length=length)  # fmt: skip


class NeedleRecipe(MemoryRecipe):
    """A recipe with the text of needles."""

    data: Path | None = None
    """UTF-8 text that haystacks are made of, a file or a folder. None: the Python manual inside the interpreter."""
    words: int = 200  # How many of the commonest words are tokens of their own.
    most: int = 4  # Most needles of a training example.
    needles: int = 4  # Needles in a haystack that is asked about.
    digits: int = 2  # Digits of a needle's number; two of them are a token.
    key_digits: int = 1  # Hexadecimal digits of a needle's key, together a token.
    reads: int = 4  # How often a haystack is read at most.
    limits: ClassVar[Limits] = {"key_digits": (1, 4)}

    def needle_task(self) -> NeedleText:
        """Return the text of needles, in examples as long as a training window."""
        return needle_text(self.data, self.words, self.digits, self.key_digits, self.context, self.most)


class NamesAndNeedlesRecipe(NamesRecipe, NeedleRecipe):
    """A recipe of models that learn both texts, and read haystacks and documents of another length."""

    batch = 16
    stop_at = 2.0
    rates = (4e-3,)
    haystack: int = 256  # Tokens of a haystack.
    documents: int = 8  # Documents of held-out names that are read.

    def check(self) -> None:
        super().check()
        self.needle_task().haystacks(self.haystack, self.needles).example(0, 0)
