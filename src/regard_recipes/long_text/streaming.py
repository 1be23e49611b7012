"""Read long texts segment by segment: the loss of a language model, and what it carries from one segment to the next.

Fast-weight Product Key Memory paper, section 4.2: documents are read in order, in segments as long as the training
windows. Its memory is written through all segments and documents, while its baselines start anew at every segment. Here
the caller says how long each kind of state lives:

    memory      memories that are written while reading (`regard.nn.memory_layers`)
    recurrent   states of fixed size of token mixers without positions (Gated DeltaNet, the fast weights of LaCT)

Keys and values of attention are new at every segment, since positions begin anew there. Segments follow each other
without a gap, and every token of a document except the first is predicted once.

Shapes: B rows read side by side, S tokens of a segment, L of a document.
"""

import copy
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.inspect.capture import eval_mode
from regard.inspect.gates import GATE
from regard.inspect.hooks import hooked, named_hook_points
from regard.nn.memory_trace import observed

Span = Literal["stream", "document", "segment"]


@dataclass(frozen=True)
class Carry:
    """How long the states of written memories and of recurrent mixers live: "segment" (new at every one), "document",
    or "stream" (never new). The default is the paper's protocol."""

    memory: Span = "stream"
    recurrent: Span = "segment"


@dataclass(frozen=True)
class Streamed:
    """What a model did on documents.

    Attributes:
        losses: of every document, the nats of its tokens but the first, float32 [L - 1].
        gates: hook point to the gates of every document, at the tokens before those of `losses`.
        slots: memory layer to statistics of its slots (`regard.nn.memory_trace.SlotStatistics`).
    """

    losses: list[Tensor]
    gates: dict[str, list[Tensor]]
    slots: dict[str, dict[str, float]]


PAPER = Carry()


@torch.no_grad()
def streamed(
    model: Any, documents: Sequence[Tensor], segment: int, carry: Carry = PAPER, *, rows: int = 1,
    frozen: bool = False, statistics: bool = False,
) -> Streamed:  # fmt: skip
    """Read documents in order, segment by segment, in one forward pass over all tokens.

    Args:
        model: any causal language model of `regard.models`; its mode is restored.
        documents: int [L] each, at least two tokens.
        segment: S.
        carry: how long each kind of state lives.
        rows: B streams side by side, each with its own memory: document i goes to stream i modulo B. Documents that are
            read at the same time must have the same length, since padding would count as time.
        frozen: memories are read and never written.
        statistics: keep gates and count slots.
    """
    from regard.models.hybrid.memories import frozen_memory

    losses: list[Tensor] = []
    gates: dict[str, list[Tensor]] = {}
    heard: dict[str, list[Tensor]] = {}  # gates of the documents that are being read, [B, S] a segment
    seen: dict[str, Any] = {}
    with ExitStack() as inside:
        inside.enter_context(eval_mode(model))
        if frozen:
            inside.enter_context(frozen_memory(model))
        if statistics:
            seen = inside.enter_context(observed(model))
            heard = {name: [] for name in named_hook_points(model) if name.rpartition(".")[2] == GATE}
            record = lambda found: lambda gate, hook: found.append(gate.detach().float().flatten(1).cpu())  # noqa: E731
            listeners: list[Any] = [(name, record(found)) for name, found in heard.items()]
            inside.enter_context(hooked(model, listeners, required=False) if heard else ExitStack())
        cache = None
        for first in range(0, len(documents), rows):
            batch = torch.stack(list(documents[first : first + rows]))
            cache = passed(model, cache, memory=carry.memory == "stream", recurrent=carry.recurrent == "stream")
            if len(batch) < min(rows, first):
                narrow(cache, len(batch))
            parts = []
            for start in range(0, batch.shape[1] - 1, segment):
                piece = batch[:, start : start + segment + 1].long()  # inputs and the token after them
                if start:
                    cache = passed(model, cache, carry.memory != "segment", carry.recurrent != "segment")
                found, cache = _read(model, piece, cache)
                parts.append(found)
            losses += torch.cat(parts, 1).unbind()
            for name, found_gates in heard.items():
                if found_gates:
                    gates.setdefault(name, []).extend(torch.cat(found_gates, 1).unbind())
                    found_gates.clear()
    return Streamed(losses, gates, {name: each.summary() for name, each in seen.items()})


def _read(model: Any, piece: Tensor, cache: Any) -> tuple[Tensor, Any]:
    """Return the nats of each target of a piece, [B, S], and the cache after it."""
    piece = piece.to(next(model.parameters()).device)
    cache = model.model.new_cache() if cache is None else cache
    found = model(input_ids=piece[:, :-1], cache=cache)
    losses = F.cross_entropy(found.logits.float().transpose(1, 2), piece[:, 1:], reduction="none")
    return losses.cpu(), cache


def passed(model: Any, cache: Any, memory: bool, recurrent: bool) -> Any:
    """Return a new cache that keeps the memories, or the states of recurrent mixers, of `cache` (None: there are none),
    which is not changed; positions begin at 0."""
    from regard.models.hybrid.memories import keep_memory

    return model.model.new_cache() if cache is None else keep_memory(model, cache, memory=memory, recurrent=recurrent)


def copied(cache: Any) -> Any:
    """Return a cache that can be extended without changing this one: its tensors are never changed in place."""
    from transformers.cache_utils import Cache

    return Cache(layers=[copy.copy(layer) for layer in cache.layers])


def narrow(cache: Any, rows: int) -> None:
    """Keep the first rows only, where the last documents are fewer than the streams."""
    for layer in cache.layers:
        if any(getattr(layer, name) is not None for name in getattr(layer, "held", ())):
            layer.batch_select_indices(torch.arange(rows))
