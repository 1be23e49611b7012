"""Streams of tokens that are read at once and written chunk by chunk, and what is carried from call to call.

Shapes: B batch, T tokens given now, R streams (a row of the batch, or one document of a packed row), W tokens of the
longest, P tokens that wait, M memories (R, or 1 when the batch shares one).

`chunk_schedule` says when what is read and written. Here are the tensors: streams without padding (`Streams`), tokens
that wait (`ChunkState`), and the loop (`run`), which is told how to read and how to write.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from ..checks import ArgumentError, refuse, require, segments, whole
from ..precision import clean, either
from ..recurrent.states import State, require_state
from .chunk_schedule import Step, schedule

C = TypeVar("C", bound="ChunkState")
Tensors = dict[str, Tensor]
Read = Callable[[Any, Tensors], Tensor]
Write = Callable[[Any, Tensors, Tensor], Tensors]


@dataclass(frozen=True)
class Streams:
    """Rows of a batch as streams of real tokens, first token first, without padding between.

    Attributes:
        index: int64 [R, W], where in B * T each token lies (0 where there is none); None: the rows as they are.
        valid: boolean [R, W], where there is one.
        counts: how many tokens each stream has; with a shared memory [W], the one clock of the whole batch.
        row: of each stream, its row of the batch; empty where streams are rows.
        fresh: of each stream, whether it begins a new document.
    """

    index: Tensor | None
    valid: Tensor
    counts: tuple[int, ...]
    row: tuple[int, ...] = ()
    fresh: tuple[bool, ...] = ()

    @classmethod
    def of(cls, mask: Tensor, segment_ids: Tensor | None, shared: bool) -> Streams:
        """`mask` boolean [B, T], true where a token is real; `segment_ids` integers [B or 1, T] or None, of which a
        change between real tokens begins a new document."""
        if torch.compiler.is_exporting():
            raise ArgumentError(
                "torch.export: this layer writes its fast weights in chunks of real tokens, which no exported graph "
                "holds; of such layers FastWeightProductKeyMemory can be exported."
            )
        batch, tokens = mask.shape
        if shared:
            some = mask.any(0)
            columns = some.nonzero()[:, 0]
            index = torch.arange(batch, device=mask.device)[:, None] * tokens + columns
            return cls(None if some.all() else index, mask[:, columns], (len(columns),))
        if segment_ids is None and mask.all():
            return cls(None, mask, (tokens,) * batch)
        at = mask.flatten().nonzero()[:, 0]
        begins = _changes(at // tokens)
        if segment_ids is not None:
            begins = begins | _changes(segment_ids.expand(batch, tokens).flatten()[at])
        number = begins.cumsum(0) - 1
        first = begins.nonzero()[:, 0]
        row = (at[first] // tokens).tolist()
        counts = torch.bincount(number, minlength=len(row)).tolist()
        absent = sorted(set(range(batch)) - set(row))  # a row of padding alone keeps its state
        index = at.new_zeros(len(row) + len(absent), max(counts, default=0))
        valid = torch.zeros_like(index, dtype=torch.bool)
        place = torch.arange(len(at), device=at.device) - first[number] if len(at) else at
        index[number, place], valid[number, place] = at, True
        fresh = (*(i > 0 and b == row[i - 1] for i, b in enumerate(row)), *(False for _ in absent))
        return cls(index, valid, (*counts, *(0 for _ in absent)), (*row, *absent), fresh)

    def cut(self, x: Tensor) -> Tensor:
        """[B, T, ...] to [R, W, ...], 0 where there is no token."""
        return hidden_where(~self.valid, x if self.index is None else x.flatten(0, 1)[self.index])

    def join(self, x: Tensor, batch: int, tokens: int) -> Tensor:
        """[R, W, D] to [B, T, D], 0 where there is no token."""
        if self.index is None:
            return hidden_where(~self.valid, x)
        flat = x.new_zeros(batch * tokens, x.shape[-1])
        return flat.index_put((self.index[self.valid],), x[self.valid]).unflatten(0, (batch, tokens))

    def begin(self, state: C, first: Mapping[str, Tensor]) -> C:
        """The state of every stream, of the state of every row; `first` are the fields with which those documents
        begin that begin now."""
        if not self.row:
            return state
        device = self.valid.device
        state = state.select(torch.tensor(self.row, device=device))
        if not any(self.fresh):
            return state
        return replace(state, **first).restart(torch.tensor(self.fresh, device=device))

    def end(self, state: C) -> C:
        """The state of every row: that of its last stream."""
        if not self.row:
            return state
        last = dict(zip(self.row, range(len(self.row)), strict=True))
        return state.select(torch.tensor([last[b] for b in sorted(last)], device=self.valid.device))


@dataclass(frozen=True, kw_only=True)
class ChunkState(State):
    """A memory that is written in chunks, and the tokens that wait to be written. A subclass names its tensors.

    Attributes:
        valid: boolean [R, P], which of the tokens that wait there are.
        waits: of each clock (a stream, or the shared one), how many tokens wait.
        writes: of each memory, how often it was written.
        shared: one memory for the whole batch.
    """

    MEMORY: ClassVar[dict[str, str | None]] = {}
    """Tensors [M, ...] that are written, and the attribute [...] that has their first value (None: zeros)."""
    WAITING: ClassVar[tuple[str, ...]] = ()
    """Tensors [R, P, ...] of the tokens that wait."""

    valid: Tensor
    waits: tuple[int, ...]
    writes: tuple[int, ...]
    shared: bool

    @property
    def memory(self) -> Tensors:
        """The tensors that are written."""
        return {name: getattr(self, name) for name in self.MEMORY}

    @property
    def waiting(self) -> Tensors:
        """The tensors of the tokens that wait."""
        return {name: getattr(self, name) for name in self.WAITING}

    @property
    def bytes(self) -> int:
        """The memory of the tensors, first values not counted: they are the layer's own."""
        return sum(x.numel() * x.element_size() for name, x in self._tensors().items() if name not in self._firsts)

    @property
    def _firsts(self) -> set[str]:
        return {name for name in self.MEMORY.values() if name}

    def detach(self: C) -> C:
        """The same numbers, through which no gradient flows (truncated backpropagation), but from a memory that begins
        anew to its first values, where those are leaves of the graph (parameters)."""
        kept = {name: x for name, x in self._tensors().items() if name in self._firsts and x.is_leaf}
        return replace(super().detach(), **kept)

    def restart(self: C, rows: Tensor | None = None) -> C:
        """Memories `rows` (boolean [M]; None: all) as at first, with nothing that waits."""
        rows = torch.ones(len(self.writes), dtype=torch.bool, device=self.valid.device) if rows is None else rows
        again = rows.tolist()
        zero = torch.zeros((), device=self.valid.device)
        memory = {
            name: blend(
                rows, getattr(self, first) if first else zero.to(getattr(self, name).dtype), getattr(self, name)
            )
            for name, first in self.MEMORY.items()
        }
        return replace(
            self,
            **memory,
            valid=self.valid & ~(rows if not self.shared else rows.expand(len(self.valid)))[:, None],
            waits=tuple(0 if hit else n for hit, n in zip(again, self.waits, strict=True)),
            writes=tuple(0 if hit else n for hit, n in zip(again, self.writes, strict=True)),
        )

    def reset(self: C) -> C:
        """The state before the first token, with the memory's first values."""
        return replace(self.restart(), tokens=0)

    def select(self: C, indices: Tensor) -> C:
        """The sequences `indices`, integers [N] in that order (beam search) or flags [B].

        Raises:
            ArgumentError: the memory is shared by the batch, so that rows are not sequences of their own.
        """
        require(not self.shared, f"{type(self).__name__}.select", SHARED)
        chosen = torch.arange(len(self.waits))[indices.cpu()].tolist()
        rows = {name: x[indices.to(x.device)] for name, x in self._tensors().items() if name not in self._firsts}
        counts = {name: tuple(getattr(self, name)[i] for i in chosen) for name in ("waits", "writes")}
        return replace(self, **rows, **counts)  # type: ignore[arg-type]

    def repeat(self: C, n: int) -> C:
        """Every sequence `n` times in a row.

        Raises:
            ArgumentError: the memory is shared by the batch.
        """
        require(not self.shared, f"{type(self).__name__}.repeat", SHARED)
        return self.select(torch.arange(len(self.waits), device=self.valid.device).repeat_interleave(n))

    def to_tensors(self) -> Tensors:
        """Name to tensor, contiguous, for safetensors; `from_tensors` gives the same state back."""
        plain = {name: torch.tensor(getattr(self, name)) for name in ("waits", "writes", "shared")}
        return {**super().to_tensors(), **plain}

    @classmethod
    def from_tensors(cls: type[C], tensors: Mapping[str, Tensor]) -> C:
        """The state that `to_tensors` wrote.

        Raises:
            ArgumentError: a tensor is missing or unknown.
        """
        state = super().from_tensors(tensors)
        counts: dict[str, Any] = {name: tuple(int(n) for n in getattr(state, name)) for name in ("waits", "writes")}
        return replace(state, **counts, shared=bool(state.shared))

    def fit(self, call: str, kind: type[ChunkState], sizes: dict[str, tuple[int, ...]], like: Tensor) -> None:
        """This state is of that kind, for as many rows as `like` has, with memory and tokens of these sizes beyond the
        first axis (memory) or the first two (tokens).

        Raises:
            ArgumentError: it is not.
        """
        rows = like.shape[0]
        memories, waits = (1 if self.shared else rows), self.valid.shape[-1]
        require(
            len(self.waits) == len(self.writes) == memories and self.valid.shape == (rows, waits),
            call,
            f"state is of {len(self.valid)} rows{' that share a memory' if self.shared else ''}, but {rows} are given "
            f"now; select or repeat its rows, or begin with state=None.",
        )
        full = {
            name: ((memories, *size) if name in kind.MEMORY else (rows, waits, *size)) for name, size in sizes.items()
        }
        require_state(call, self, kind, full, like)


SHARED = (
    "this memory is shared by the batch, so that no row can be taken out, doubled or reordered (beam search does all "
    "three); use a memory per sequence, shared=False."
)


def run(
    state: C, new: Tensors, streams: Streams, chunk: int, *, read: Read, write: Write, detach_every: int
) -> tuple[Tensor, C]:
    """Read all tokens, and write every chunk that a next token closes.

    Args:
        state: of every stream (`Streams.begin`).
        new: the fields of `state.WAITING`, and others that are read alone, of the new tokens [R, W, ...].
        streams: of the new tokens.
        chunk: tokens of a chunk.
        read: of (state, piece), what the tokens [R, w, ...] read, [R, w, D].
        write: of (state, following, valid), the memory after a write of what waits; `following` are the waiting fields
            of the next token [R, 1, ...], `valid` [R, 1] where there is one.
        detach_every: no gradient passes more than so many writes back; 0: through all.

    Returns:
        (what was read [R, W, D], the state after).
    """
    outs, places, reach, straight = [], torch.zeros_like(streams.valid, dtype=torch.int64), 0, True
    for step in schedule(state.waits, streams.counts, chunk):
        piece, valid = _piece(new, streams.valid, step)
        if any(step.flush):
            state = written(
                state, step.flush, {n: piece[n][:, :1] for n in state.WAITING}, valid[:, :1], write, detach_every
            )
        outs.append(read(state, piece))
        for row, (start, stop) in enumerate(zip(step.start, step.stop, strict=True)):
            places[row, start:stop] = torch.arange(reach, reach + stop - start, device=places.device)
        reach, straight = reach + step.width, straight and step.uniform
        state = _append(state, piece, valid, step)
    out = torch.cat(outs, 1) if outs else read(state, new)
    return out if straight else out.gather(1, places[..., None].expand(*places.shape, out.shape[-1])), state


def flushed(state: C, write: Write) -> C:
    """The state in which nothing waits: whatever can be learned from it already is written."""
    none = {name: x.new_zeros(len(x), 1, *x.shape[2:]) for name, x in state.waiting.items()}
    flush = tuple(n > 0 for n in state.waits)
    return written(state, flush, none, state.valid.new_zeros(len(state.valid), 1), write, 0) if any(flush) else state


def written(
    state: C,
    flush: Sequence[bool],
    following: Tensors,
    valid: Tensor,
    write: Write,
    detach_every: int,
) -> C:
    """The state after the memories `flush` were written with what waits there; nothing waits in them any more."""
    writes = tuple(n + hit for n, hit in zip(state.writes, flush, strict=True))
    cut = tuple(bool(hit and detach_every and n % detach_every == 0) for n, hit in zip(writes, flush, strict=True))
    with torch.set_grad_enabled(torch.is_grad_enabled() and cut != tuple(flush)):  # what is cut off needs no graph
        memory = write(state, following, valid)
    rows = torch.tensor(flush, device=state.valid.device)
    memory = {name: x if all(flush) else blend(rows, x, getattr(state, name)) for name, x in memory.items()}
    if any(cut):
        cuts = torch.tensor(cut, device=state.valid.device)
        memory = {name: x.detach() if all(cut) else blend(cuts, x.detach(), x) for name, x in memory.items()}
    left = rows.expand(len(state.valid))
    waits = tuple(0 if hit else n for n, hit in zip(state.waits, flush, strict=True))
    return replace(state, **memory, valid=state.valid & ~left[:, None], waits=waits, writes=writes)


def with_next(state: ChunkState, following: Tensors, valid: Tensor) -> tuple[Tensors, Tensor]:
    """What waits and, after it in every stream, the next token: fields [R, P + 1, ...] and valid [R, P + 1]."""
    return _aligned(state, following, valid, state.valid.shape[1] + 1)


def first_in_rows(tensors: Tensors, there: Tensor) -> tuple[Tensors, Tensor]:
    """Fields [R, P, ...] with the tokens that are `there` (boolean [R, P]) first in every row, in their order."""
    if there.all():
        return tensors, there
    order = torch.argsort(~there, dim=1, stable=True)
    rows = torch.arange(len(order), device=order.device)[:, None]
    return {name: x[rows, order] for name, x in tensors.items()}, there[rows, order]


def hidden_where(gone: Tensor, x: Tensor) -> Tensor:
    """x [R, W, ...] with 0 where `gone`, boolean [R, W]."""
    return x.masked_fill(gone.view(*gone.shape, *(1,) * (x.dim() - 2)), 0)


def finite_tokens(tensors: Tensors) -> tuple[Tensors, Tensor]:
    """Fields [B, T, ...] with 0 at tokens of which any number is not finite, and the others: boolean [B, T]."""
    bad = None
    for x in tensors.values():
        bad = either(bad, clean(x.detach().flatten(2))[1])
    if bad is None:
        x = next(iter(tensors.values()))
        return tensors, torch.ones(x.shape[:2], dtype=torch.bool, device=x.device)
    return {name: hidden_where(bad, x) for name, x in tensors.items()}, ~bad


def blend(rows: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """x [M, ...] or [...] in the memories `rows`, y [M, ...] in the others."""
    return torch.where(rows.view(-1, *(1,) * (y.dim() - 1)), x, y)


def check_chunk(call: str, chunk_size: object, least: int) -> int:
    """`chunk_size`, after checking that it is a whole number of at least so many tokens."""
    why = "a chunk of one token could never be learned from" if least > 1 else "tokens between two writes"
    return int(min(whole(call, "chunk_size", chunk_size, least, why=f": {why}"), 2**48))


def check_held(call: str, name: str, tokens: Tensor) -> None:
    """Check that `tokens` hold something: which of them are there decides what a memory writes."""
    if tokens.device.type == "meta":
        raise ArgumentError(
            f"{call}: {name} is on the meta device, where it holds no tokens; a memory that is written needs them. "
            f"Move it with .to()."
        )


def check_meta_grad(call: str, meta_grad: object) -> int:
    """`meta_grad` (True, False, or every how many writes the gradient is cut) as `detach_every` of `run`."""
    if isinstance(meta_grad, bool):
        return 0 if meta_grad else 1
    if not isinstance(meta_grad, int) or meta_grad < 1:
        raise refuse(call, "meta_grad", meta_grad, "True, False or a number of writes >= 1")
    return meta_grad


def check_segments(call: str, ids: object, batch: int, tokens: int, shared: bool, device: torch.device) -> None:
    """Check that `segment_ids` is None or integers [B or 1, T], and that memories are then not shared."""
    segments(call, ids, batch, tokens, device)
    shared_one = "segment_ids need a memory per document, but shared=True has one for the batch."
    require(ids is None or not shared, call, shared_one)


def _changes(x: Tensor) -> Tensor:
    """Where x [N] is not what it was one before; true at first."""
    return torch.cat([x.new_ones(len(x) and 1, dtype=torch.bool), x[1:] != x[:-1]])


def _piece(new: Tensors, valid: Tensor, step: Step) -> tuple[Tensors, Tensor]:
    """The tokens of one round: fields [R, w, ...] and valid [R, w]."""
    if step.uniform:
        span = slice(step.start[0], step.stop[0])
        return {name: x[:, span] for name, x in new.items()}, valid[:, span]
    device = valid.device
    at = torch.tensor(step.start, device=device)[:, None] + torch.arange(step.width, device=device)
    there = at < torch.tensor(step.stop, device=device)[:, None]
    at, rows = torch.where(there, at, 0), torch.arange(len(at), device=device)[:, None]
    return {name: x[rows, at] for name, x in new.items()}, there


def _append(state: C, piece: Tensors, valid: Tensor, step: Step) -> C:
    """The state in which the tokens of a round wait too."""
    waits = tuple(n + stop - start for n, start, stop in zip(state.waits, step.start, step.stop, strict=True))
    piece = {name: piece[name] for name in state.WAITING}
    if not any(state.waits):
        return replace(state, **piece, valid=valid, waits=waits)
    held, valid = _aligned(state, piece, valid, max(waits))
    return replace(state, **held, valid=valid, waits=waits)


def _aligned(state: ChunkState, more: Tensors, valid: Tensor, width: int) -> tuple[Tensors, Tensor]:
    """What waits and then `more`, those that are there first in every row, at most `width` of them."""
    every = torch.cat([state.valid, valid], 1)
    joined = {name: torch.cat([held, more[name]], 1) for name, held in state.waiting.items()}
    if state.shared or (set(state.waits) == {state.valid.shape[1]} and every.shape[1] == width):
        return joined, every
    order = torch.argsort(~every, dim=1, stable=True)[:, :width]
    rows = torch.arange(len(order), device=order.device)[:, None]
    return {name: x[rows, order] for name, x in joined.items()}, every[rows, order]
