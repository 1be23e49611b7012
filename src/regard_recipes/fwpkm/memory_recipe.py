"""What recipes that train models with fast-weight memories on tasks share: options, models and texts."""

from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import Any, ClassVar

import torch

from regard.nn.memory.fast_weight_product_key_memory import PRESETS
from regard.tasks import RecurringNames

from ..lib.recipe import Limits
from ..lib.task_recipe import TaskRecipe, first_range
from ..long_text.needle_text import NeedleText, needle_text
from .layouts import PAPER_MODEL, MemoryOptions, Row, row_config

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
