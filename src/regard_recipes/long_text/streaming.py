"""Long texts, segment by segment: how well a language model predicts them, and what is carried from one to the next.

Fast-weight Product Key Memory paper, section 4.2: documents are read in order and in segments as long as the training
windows. Its memory is written on through all segments, documents and even test sets, while its baselines start anew at
every segment. Here each kind of state is told how long it lives:

    memory      memories that are written while reading (`regard.nn.memory_layers`)
    recurrent   states of fixed size of the mixers of tokens that know nothing of positions (of gated delta nets, and
                the fast weights of LaCT)
    pairs       keys and values of attention, and all else that positions turned: always new at every segment, since
                positions begin anew

Segments follow each other without a gap, and every token of a document but its first is predicted once: the last of a
segment from the state at its end. (The paper's program drops one more token at each segment than at the one before.)

Shapes: B rows read side by side, S tokens of a segment, L of a document, V vocabulary.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.checks import ArgumentError
from regard.inspect.gates import BINS, GATE, bin_counts

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
        """The paper's protocol: memory on through everything, all else new at every segment."""
        return cls("stream", "segment")


@dataclass(frozen=True)
class Streamed:
    """What a model made of a text.

    Attributes:
        nats: summed negative log-likelihood of every document; tokens: how many of its tokens were predicted.
        by_segment: nats per token of the first segment of all documents, the second, and so on.
        gates: hook point to how often its gate was in each of `BINS` equal parts of [0, 1]; gates that are not finite
            are in none.
        means: hook point to the mean of its gate; NaN where one is not finite.
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
        """Nats per token."""
        return sum(self.nats) / max(1, sum(self.tokens))

    @property
    def perplexity(self) -> float:
        """exp of the loss."""
        return math.exp(self.loss) if self.loss < 700 else math.inf

    def record(self) -> dict[str, Any]:
        """Plain data."""
        return {**asdict(self), "loss": self.loss}


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
        model: any causal language model of `regard.models`; it is left in the mode it was in.
        documents: int [L] each, two tokens at least.
        segment: S.
        carry: what lives how long.
        rows: B streams side by side, each with a memory of its own: document i goes to stream i modulo B. Documents
            that are read at the same time must have the same length, since padding would count as time.
        frozen: memories are read and never written.
        chunk: tokens between two writes; default the model's.
        statistics: count gates and slots.

    Raises:
        ArgumentError: no documents, one that is too short, a segment below 1, or rows of unequal lengths.

    Cost: one forward pass over all tokens.
    """
    carry = Carry() if carry is None else carry
    _check(documents, segment, rows)
    device = next(model.parameters()).device
    heard: dict[str, GateCount] = {}
    seen: dict[str, Any] = {}
    nats, cells = [0.0] * len(documents), _Cells()
    with ExitStack() as inside:
        inside.enter_context(evaluating(model))
        inside.enter_context(_reading(model, frozen, chunk))
        if statistics:
            heard = inside.enter_context(gate_counts(model))
            seen = inside.enter_context(_slots(model))
        cache = None
        for first in range(0, len(documents), rows):
            batch = torch.stack([documents[i] for i in range(first, min(first + rows, len(documents)))])
            cache = passed(model, cache, memory=carry.memory == "stream", recurrent=carry.recurrent == "stream")
            if len(batch) < min(rows, first):
                narrow(cache, len(batch))
            losses = []
            for place, piece in enumerate(_segments(batch, segment)):
                if place:
                    cache = passed(model, cache, carry.memory != "segment", carry.recurrent != "segment")
                found, cache = _read(model, piece.to(device), cache)
                losses.append(found)
                cells.add(place, found)
            for row, total in enumerate(torch.cat(losses, 1).double().sum(1).tolist()):
                nats[first + row] = total
    return Streamed(
        tuple(nats),
        tuple(len(document) - 1 for document in documents),
        cells.means(),
        {name: tuple(each.counts.tolist()) for name, each in heard.items() if each.tokens},
        {name: each.mean for name, each in heard.items() if each.tokens},
        {name: each.summary() for name, each in seen.items()},
    )


def _check(documents: Sequence[Tensor], segment: int, rows: int) -> None:
    call = "streamed"
    if segment < 1 or rows < 1:
        raise ArgumentError(f"{call}: segment is {segment} and rows {rows}, expected at least 1.")
    short = [i for i, document in enumerate(documents) if document.dim() != 1 or len(document) < 2]
    if short or not documents:
        which = f"document {short[0]} is {list(documents[short[0]].shape)}" if short else "there are none"
        raise ArgumentError(f"{call}: documents are to be int [L] with at least 2 tokens; {which}.")
    for first in range(0, len(documents), rows):
        sizes = {len(document) for document in documents[first : first + rows]}
        if len(sizes) > 1:
            raise ArgumentError(
                f"{call}: documents {first} to {first + rows - 1} are read side by side and have {sorted(sizes)} "
                f"tokens; give them one length, or rows=1."
            )


def _segments(batch: Tensor, segment: int) -> Iterator[Tensor]:
    """Inputs with one token after them, [B, up to S + 1]: every token but the first is once a target."""
    for start in range(0, batch.shape[1] - 1, segment):
        yield batch[:, start : start + segment + 1].long()


def _read(model: Any, piece: Tensor, cache: Any) -> tuple[Tensor, Any]:
    """Nats of each target of a piece, [B, S], and the cache after it."""
    found = model(input_ids=piece[:, :-1], past_key_values=cache, use_cache=True)
    logits = found.logits.float()
    losses = F.cross_entropy(logits.transpose(1, 2), piece[:, 1:], reduction="none")
    return losses.cpu(), found.past_key_values


class _Cells:
    """Means by the number of the segment."""

    def __init__(self) -> None:
        self.sums: list[list[float]] = []

    def add(self, place: int, losses: Tensor) -> None:
        while len(self.sums) <= place:
            self.sums.append([0.0, 0.0])
        self.sums[place][0] += losses.double().sum().item()
        self.sums[place][1] += losses.numel()

    def means(self) -> tuple[float, ...]:
        return tuple(total / count for total, count in self.sums)


# What is carried -------------------------------------------------------------------------------------------------


def passed(model: Any, cache: Any, memory: bool, recurrent: bool) -> Any:
    """A new cache with those states of `cache` that go on; positions begin at 0.

    Args:
        model: whose cache it is.
        cache: left as it is; None for none.
        memory: memories go on; recurrent: the states of recurrent mixers do.
    """
    from regard.models.hybrid.memories import keep_memory

    return model.model.new_cache() if cache is None else keep_memory(model, cache, memory=memory, recurrent=recurrent)


def copied(cache: Any) -> Any:
    """A cache that can be read on from without changing this one: states and pairs are never changed in place."""
    from transformers.cache_utils import Cache

    return Cache(layers=[copy.copy(layer) for layer in cache.layers])


def narrow(cache: Any, rows: int) -> None:
    """Only the first rows go on, where the last documents are fewer than the streams."""
    for layer in cache.layers:
        if any(getattr(layer, name) is not None for name in getattr(layer, "held", ())):
            layer.batch_select_indices(torch.arange(rows))


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode, and after it the mode of before."""
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)


@contextmanager
def _reading(model: nn.Module, frozen: bool = False, chunk: int | None = None) -> Iterator[None]:
    from regard.models.hybrid.memories import chunk_size, frozen_memory

    frozen_or_not = frozen_memory(model) if frozen else nullcontext()
    with frozen_or_not, nullcontext() if chunk is None else chunk_size(model, chunk):
        yield


class GateCount:
    """What passed at the gate of one memory: `bin_counts`, how many tokens, and their mean."""

    def __init__(self) -> None:
        self.counts = torch.zeros(BINS, dtype=torch.long)
        self.tokens, self._total = 0, 0.0

    @property
    def mean(self) -> float:
        """0 where nothing passed."""
        return self._total / max(1, self.tokens)

    def add(self, gate: Tensor, hook: Any = None) -> None:
        """Gates of any shape."""
        found = gate.detach().double().flatten()
        self.tokens += found.numel()
        self._total += found.sum().item()
        self.counts += bin_counts(found).cpu()


@contextmanager
def gate_counts(model: nn.Module) -> Iterator[dict[str, GateCount]]:
    """What passes at the gates of memories while this block runs, by hook point."""
    from regard.inspect.hooks import hooked, named_hook_points

    counts = {name: GateCount() for name in named_hook_points(model) if name.rpartition(".")[2] == GATE}
    listeners: list[tuple[Any, Any]] = [(name, each.add) for name, each in counts.items()]
    with hooked(model, listeners, required=False) if counts else nullcontext():
        yield counts


@contextmanager
def _slots(model: nn.Module) -> Iterator[dict[str, Any]]:
    from regard.nn.memory_trace import observed

    with observed(model) as seen:
        yield seen
