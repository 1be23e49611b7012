"""Documents of recurring names, and how a model reads them segment by segment: losses on what recurs, and gates.

Who has what is drawn anew for each document (`regard.tasks.RecurringNames`), so that what a name has can be predicted
only from an earlier mention. Attention sees those of its own segment.

Shapes: L tokens of a document.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import torch
from torch import Tensor

from regard.inspect.gates import bin_counts, layer_name
from regard.tasks import TokenExample
from regard.tasks.recurring_names import RecurringNames

from .streaming import Carry, streamed

RULES: dict[str, tuple[Carry, str]] = {
    "new": (Carry("segment", "segment"), "all new at every segment"),
    "frozen": (Carry("segment", "segment"), "memory never written"),
    "document": (Carry("document", "segment"), "memory through a document"),
    "paper": (Carry("stream", "segment"), "memory through everything (the paper)"),
    "carried": (Carry("document", "document"), "all states through a document"),
}
"""How a text is read. Pairs of attention are new at every segment by every rule."""
SHORTEST = 3  # tokens of a sentence


@dataclass(frozen=True)
class NamesText(RecurringNames):
    """Documents of exactly `length` tokens, of which every one is to be predicted."""

    length: int = 96

    @classmethod
    def of(cls, length: int, people: int, near: int) -> "NamesText":
        """Return documents of so many tokens; a name recurs far where attention to `near` tokens does not see it."""
        return cls(-(-length // SHORTEST), people, 0.8, verbs=0, window=near, everything=True, length=length)

    def draw(self, random: Random, split: str) -> TokenExample:
        found, end = super().draw(random, split), self.length
        parts = {part: where[:end] for part, where in found.parts.items()}
        return replace(found, tokens=found.tokens[:end], labels=found.labels[:end], parts=parts)

    def statements(self, tokens: list[int]) -> Iterator[tuple[tuple[int, ...], int]]:
        """Yield the statements, without one that the end cuts."""
        yield from ((fact, at) for fact, at in super().statements(tokens) if at < len(tokens))

    def documents(self, count: int, seed: int) -> list[Tensor]:
        """Return documents of the test split, int64 [L] each."""
        return [example.tokens for example in self.examples(seed, range(count), "test")]

    def mentions(self, tokens: Tensor, segment: int) -> dict[str, Tensor]:
        """Return masks [L - 1] of the tokens but the first that say what a name has: "new", or mentioned before
        "within" the same segment, or only "across" segments; and of all "other" tokens."""
        found = {part: torch.zeros(len(tokens) - 1, dtype=torch.bool) for part in ("new", "within", "across")}
        last: dict[tuple[int, ...], int] = {}
        for fact, at in self.statements(tokens.tolist()):
            before, first = last.get(fact), (at - 1) // segment * segment
            part = "new" if before is None else "within" if before >= first else "across"
            found[part][at - 1] = True
            last[fact] = at
        return {**found, "other": ~torch.stack(list(found.values())).any(0)}


def read_names(
    model: Any, text: NamesText, documents: Sequence[Tensor], segment: int, rules: Iterable[str], side_by_side: int = 1
) -> Iterator[dict[str, Any]]:
    """Read documents by `RULES` and yield rows: the loss of each document, all in all and of each kind of mention, the
    loss of each segment, and, by the paper's rule, the gates and the use of slots of each memory layer."""
    masks = [text.mentions(document, segment) for document in documents]
    for rule in rules:
        read = streamed(model, documents, segment, RULES[rule][0], rows=side_by_side, frozen=rule == "frozen",
                        statistics=rule == "paper")  # fmt: skip
        for place, (losses, own) in enumerate(zip(read.losses, masks, strict=True)):
            yield {"kind": "document", "rule": rule, "document": place, "loss": float(losses.mean()),
                   **means_of(losses, own)}  # fmt: skip
        for place, part in enumerate(torch.stack(read.losses).split(segment, dim=1), 1):
            yield {"kind": "segment", "rule": rule, "segment": place, "loss": float(part.mean())}
        over = {part: torch.cat([mask[part] for mask in masks]) for part in masks[0]}
        gates = {layer_name(hook): torch.cat(found) for hook, found in read.gates.items()}
        slots = {layer_name(name): found for name, found in read.slots.items()}
        for layer in dict.fromkeys([*gates, *slots]):
            row = {"kind": "layer", "layer": layer, **slots.get(layer, {})}
            if layer in gates:
                own_gates = gates[layer]
                row |= {"mean": float(own_gates.mean()), "deviation": float(own_gates.std(correction=0)),
                        "counts": bin_counts(own_gates).tolist(), **means_of(own_gates, over)}  # fmt: skip
            yield row


def means_of(values: Tensor, masks: dict[str, Tensor]) -> dict[str, float | None]:
    """Return the means of values [N] where each mask holds; None where it holds nowhere."""
    return {part: float(values[at].mean()) if at.any() else None for part, at in masks.items()}


def reading_rules(model: Any) -> list[str]:
    """Return the rules that differ for a model: without a memory, or without a recurrent state, some are the same."""
    from regard.models.hybrid.memories import memory_modules

    recurrent = bool({"gated-deltanet", "lact"} & {*model.config.mixers})
    return ["new", *["frozen", "document", "paper"] * bool(memory_modules(model)), *["carried"] * recurrent]
