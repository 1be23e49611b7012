"""Read long texts segment by segment: the loss of a language model, and what it carries from one segment to the next
(Fast-weight Product Key Memory paper, section 4.2).

Keys and values of attention are new at every segment, since positions begin anew there. Segments follow each other
without a gap, and every token of a document except the first is predicted once.

Shapes: B rows read side by side, S tokens of a segment, L of a document.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.inspect.capture import eval_mode
from regard.inspect.gates import GATE, bin_counts, layer_name
from regard.inspect.hooks import hooked, named_hook_points
from regard.nn.memory_trace import observed
from regard.tasks import RecurringNames

Span = Literal["stream", "document", "segment"]


class Carry(NamedTuple):
    """How a text is read: how long the states of written memories, and of recurrent mixers without positions (Gated
    DeltaNet, the fast weights of LaCT), live: "segment" (new at every one), "document", or "stream" (never new);
    whether memories are only read (`frozen`); and what a table says of it (`meaning`)."""

    memory: Span
    recurrent: Span = "segment"
    frozen: bool = False
    meaning: str = ""


RULES = {
    "new": Carry("segment", meaning="all new at every segment"),
    "frozen": Carry("segment", frozen=True, meaning="memory never written"),
    "document": Carry("document", meaning="memory through a document"),
    "paper": Carry("stream", meaning="memory through everything (the paper)"),
    "carried": Carry("document", "document", meaning="all states through a document"),
}
"""How a text is read. Keys and values of attention are new at every segment by every rule."""


class Streamed(NamedTuple):
    """What a model did on documents.

    Attributes:
        losses: of every document, the nats of its tokens but the first, float32 [L - 1].
        gates: hook point to the gates of every document, at the tokens before those of `losses`.
        slots: memory layer to statistics of its slots (`regard.nn.memory_trace.SlotStatistics`).
    """

    losses: list[Tensor]
    gates: dict[str, list[Tensor]]
    slots: dict[str, dict[str, float]]


@torch.no_grad()
def streamed(
    model: Any, documents: Sequence[Tensor], segment: int, carry: Carry = RULES["paper"], *, rows: int = 1,
    statistics: bool = False,
) -> Streamed:  # fmt: skip
    """Read documents in order, segment by segment, in one forward pass over all tokens.

    Args:
        model: any causal language model of `regard.models`; its mode is restored.
        documents: int [L] each, at least two tokens.
        segment: S.
        carry: how long each kind of state lives, and whether memories are written.
        rows: B streams side by side, each with its own memory: document i goes to stream i modulo B. Documents that are
            read at the same time must have the same length, since padding would count as time.
        statistics: keep gates and count slots.
    """
    from regard.models.hybrid.memories import frozen_memory, keep_memory

    device = next(model.parameters()).device
    losses: list[Tensor] = []
    gates: dict[str, list[Tensor]] = defaultdict(list)
    pending: dict[str, list[Tensor]] = defaultdict(list)  # gates of the documents that are being read, [B, S] a segment
    observers: dict[str, Any] = {}

    def record(name: str, gate: Tensor, hook: Any) -> None:
        pending[name].append(gate.float().flatten(1).cpu())

    with ExitStack() as active:
        active.enter_context(eval_mode(model))
        if carry.frozen:
            active.enter_context(frozen_memory(model))
        if statistics:
            observers = active.enter_context(observed(model))
            names = [name for name in named_hook_points(model) if name.endswith(f".{GATE}")]
            active.enter_context(hooked(model, [(name, partial(record, name)) for name in names], required=False))
        cache: Any = None
        for first in range(0, len(documents), rows):
            batch = torch.stack(list(documents[first : first + rows])).long().to(device)
            if len(batch) < min(rows, first):  # the last documents may be fewer than the streams
                cache.batch_select_indices(torch.arange(len(batch)))
            parts = []
            for start in range(0, batch.shape[1] - 1, segment):
                piece = batch[:, start : start + segment + 1]  # inputs and the token after them
                kept = ("document", "stream") if start else ("stream",)
                cache = keep_memory(model, cache, memory=carry.memory in kept, recurrent=carry.recurrent in kept)
                logits = model(input_ids=piece[:, :-1], cache=cache).logits.float()
                parts.append(F.cross_entropy(logits.transpose(1, 2), piece[:, 1:], reduction="none").cpu())
            losses += torch.cat(parts, 1).unbind()
            for name, values in pending.items():
                gates[name] += torch.cat(values, 1).unbind()
            pending.clear()
    return Streamed(losses, gates, {name: observer.summary() for name, observer in observers.items()})


def mentions(text: RecurringNames, tokens: Tensor, segment: int) -> dict[str, Tensor]:
    """Return masks [L - 1] of the tokens but the first that say what a name has: "new", or mentioned before "within"
    the same segment, or only "across" segments; and of all "other" tokens."""
    masks = {part: torch.zeros(len(tokens) - 1, dtype=torch.bool) for part in ("new", "within", "across")}
    last: dict[tuple[int, ...], int] = {}
    for fact, at in text.statements(tokens.tolist()):
        before, start = last.get(fact), (at - 1) // segment * segment
        part = "new" if before is None else "within" if before >= start else "across"
        masks[part][at - 1] = True
        last[fact] = at
    return {**masks, "other": ~torch.stack(list(masks.values())).any(0)}


def read_names(
    model: Any, text: RecurringNames, segment: int, rules: Iterable[str], *, count: int, seed: int, rows: int = 1
) -> Iterator[dict[str, Any]]:
    """Read `count` documents of the test split by `RULES` and yield rows: the losses of each document, in all and of
    each kind of mention, those of segments, and, by the paper's rule, gates and use of slots of each memory layer."""
    documents = [example.tokens for example in text.examples(seed, range(count), "test")]
    masks = [mentions(text, document, segment) for document in documents]
    joined = {part: torch.cat([mask[part] for mask in masks]) for part in masks[0]}
    for rule in rules:
        read = streamed(model, documents, segment, RULES[rule], rows=rows, statistics=rule == "paper")
        for number, (losses, mask) in enumerate(zip(read.losses, masks, strict=True)):
            yield {"kind": "document", "rule": rule, "document": number, "loss": float(losses.mean()),
                   **means_of(losses, mask)}  # fmt: skip
        for number, part in enumerate(torch.stack(read.losses).split(segment, dim=1), 1):
            yield {"kind": "segment", "rule": rule, "segment": number, "loss": float(part.mean())}
        gates = {layer_name(hook): torch.cat(values) for hook, values in read.gates.items()}
        slots = {layer_name(name): counts for name, counts in read.slots.items()}
        for layer in dict.fromkeys([*gates, *slots]):
            row = {"kind": "layer", "layer": layer, **slots.get(layer, {})}
            if layer in gates:
                values = gates[layer]
                row |= {"mean": float(values.mean()), "deviation": float(values.std(correction=0)),
                        "counts": bin_counts(values).tolist(), **means_of(values, joined)}  # fmt: skip
            yield row


def means_of(values: Tensor, masks: dict[str, Tensor]) -> dict[str, float | None]:
    """Return the means of values [N] where each mask holds; None where it holds nowhere."""
    return {part: float(values[at].mean()) if at.any() else None for part, at in masks.items()}


def reading_rules(model: Any) -> list[str]:
    """Return the rules that differ for a model: without a memory, or without a recurrent state, some are the same."""
    from regard.models.hybrid.memories import memory_modules

    recurrent = bool({"gated-deltanet", "lact"} & {*model.config.mixers})
    return ["new", *["frozen", "document", "paper"] * bool(memory_modules(model)), *["carried"] * recurrent]
