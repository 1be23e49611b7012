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

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.checks import ArgumentError
from regard.inspect.capture import eval_mode
from regard.inspect.gates import GATE, bin_counts

Span = Literal["stream", "document", "segment"]


@dataclass(frozen=True)
class Carry:
    """How long each kind of state lives: "segment" (new at every one), "document", or "stream" (never new).

    Attributes:
        memory: of memories that are written; recurrent: of recurrent mixers.

    Raises:
        ArgumentError: another word.
    """

    memory: Span = "document"
    recurrent: Span = "segment"

    def __post_init__(self) -> None:
        for name in ("memory", "recurrent"):
            if (span := getattr(self, name)) not in get_args(Span):
                raise ArgumentError(f"Carry: {name} is {span!r}, expected one of {', '.join(get_args(Span))}.")

    @classmethod
    def paper(cls) -> Carry:
        """Return the paper's protocol: memory through everything, all else new at every segment."""
        return cls("stream", "segment")


@dataclass(frozen=True)
class Streamed:
    """The losses of a model on documents.

    Attributes:
        nats, tokens: of every document, the sum of the losses of its tokens, and the number of tokens predicted.
        by_segment: nats per token of the first segment of all documents, the second, and so on.
        gates: hook point to the number of gates in each of `BINS` equal parts of [0, 1]; non-finite gates are in none.
        means: hook point to the mean gate; NaN if one is not finite.
        slots: memory layer to statistics of its slots (`regard.nn.memory_trace.SlotStatistics`).
    """

    nats: tuple[float, ...]
    tokens: tuple[int, ...]
    by_segment: tuple[float, ...]
    gates: dict[str, tuple[int, ...]] = field(default_factory=dict)
    means: dict[str, float] = field(default_factory=dict)
    slots: dict[str, dict[str, float]] = field(default_factory=dict)

    @property
    def loss(self) -> float:
        """Return the nats per token."""
        return sum(self.nats) / max(1, sum(self.tokens))


@torch.no_grad()
def streamed(
    model: Any,
    documents: Sequence[Tensor],
    segment: int,
    carry: Carry | None = None,
    *,
    rows: int = 1,
    frozen: bool = False,
    chunk: int | None = None,
    statistics: bool = False,
) -> Streamed:
    """Read documents in order, segment by segment.

    Args:
        model: any causal language model of `regard.models`; its mode is restored.
        documents: int [L] each, at least two tokens.
        segment: S.
        carry: how long each kind of state lives.
        rows: B streams side by side, each with its own memory: document i goes to stream i modulo B. Documents that are
            read at the same time must have the same length, since padding would count as time.
        frozen: memories are read and never written.
        chunk: tokens between two writes; default the model's.
        statistics: count gates and slots.

    Raises:
        ArgumentError: no documents, one that is too short, a segment below 1, or rows of unequal lengths.

    Cost: one forward pass over all tokens.
    """
    from regard.inspect.hooks import hooked, named_hook_points
    from regard.models.hybrid.memories import chunk_size, frozen_memory
    from regard.nn.memory_trace import observed

    carry = Carry() if carry is None else carry
    _check(documents, segment, rows)
    gates: dict[str, list[Tensor]] = {}
    seen: dict[str, Any] = {}
    nats: list[float] = []
    sums: dict[int, tuple[float, int]] = {}  # segment to nats and tokens
    with ExitStack() as inside:
        inside.enter_context(eval_mode(model))
        if frozen:
            inside.enter_context(frozen_memory(model))
        if chunk is not None:
            inside.enter_context(chunk_size(model, chunk))
        if statistics:
            gates = {name: [] for name in named_hook_points(model) if name.rpartition(".")[2] == GATE}
            record = lambda found: lambda gate, hook: found.append(gate.detach().float().flatten().cpu())  # noqa: E731
            if gates:
                listeners: list[Any] = [(name, record(found)) for name, found in gates.items()]
                inside.enter_context(hooked(model, listeners, required=False))
            seen = inside.enter_context(observed(model))
        cache = None
        for first in range(0, len(documents), rows):
            batch = torch.stack(list(documents[first : first + rows]))
            cache = passed(model, cache, memory=carry.memory == "stream", recurrent=carry.recurrent == "stream")
            if len(batch) < min(rows, first):
                narrow(cache, len(batch))
            losses = []
            for place, piece in enumerate(_segments(batch, segment)):
                if place:
                    cache = passed(model, cache, carry.memory != "segment", carry.recurrent != "segment")
                found, cache = _read(model, piece, cache)
                losses.append(found)
                total, count = sums.get(place, (0.0, 0))
                sums[place] = total + found.double().sum().item(), count + found.numel()
            nats += torch.cat(losses, 1).double().sum(1).tolist()
    heard = {name: torch.cat(found) for name, found in gates.items() if found}
    return Streamed(
        tuple(nats),
        tuple(len(document) - 1 for document in documents),
        tuple(total / count for total, count in sums.values()),
        {name: tuple(bin_counts(found).tolist()) for name, found in heard.items()},
        {name: found.double().mean().item() for name, found in heard.items()},
        {name: each.summary() for name, each in seen.items()},
    )


def _check(documents: Sequence[Tensor], segment: int, rows: int) -> None:
    call = "streamed"
    if segment < 1 or rows < 1:
        raise ArgumentError(f"{call}: segment is {segment} and rows {rows}, expected at least 1.")
    short = [i for i, document in enumerate(documents) if document.dim() != 1 or len(document) < 2]
    if short or not documents:
        which = f"document {short[0]} is {list(documents[short[0]].shape)}" if short else "there are none"
        raise ArgumentError(f"{call}: documents must be int [L] with at least 2 tokens; {which}.")
    for first in range(0, len(documents), rows):
        sizes = {len(document) for document in documents[first : first + rows]}
        if len(sizes) > 1:
            raise ArgumentError(
                f"{call}: documents {first} to {first + rows - 1} are read side by side and have {sorted(sizes)} "
                f"tokens; give them one length, or rows=1."
            )


def _segments(batch: Tensor, segment: int) -> Iterator[Tensor]:
    """Yield inputs with one token after them, [B, up to S + 1]; every token but the first is a target once."""
    for start in range(0, batch.shape[1] - 1, segment):
        yield batch[:, start : start + segment + 1].long()


def _read(model: Any, piece: Tensor, cache: Any) -> tuple[Tensor, Any]:
    """Return the nats of each target of a piece, [B, S], and the cache after it."""
    piece = piece.to(next(model.parameters()).device)
    found = model(input_ids=piece[:, :-1], past_key_values=cache, use_cache=True)
    losses = F.cross_entropy(found.logits.float().transpose(1, 2), piece[:, 1:], reduction="none")
    return losses.cpu(), found.past_key_values


def passed(model: Any, cache: Any, memory: bool, recurrent: bool) -> Any:
    """Return a new cache that keeps some states of `cache`; positions begin at 0.

    Args:
        model: the model of the cache.
        cache: is not changed; None for a cache without states.
        memory, recurrent: whether memories, and the states of recurrent mixers, are kept.
    """
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
