"""Run a memory along a stream of tokens: all tokens are read at once, and written chunk by chunk.

A stream is cut into chunks of C tokens, counted from its first token. The tokens of a chunk all read the memory as it
was at the start of the chunk. A full chunk waits until the next token arrives, because that token is the target of the
chunk's last one; it is written before the new token is read. The result therefore depends only on the stream, not on
how it is cut into calls, and no token is used as a target before it has arrived.

The rows of a batch are separate streams, each at its own position in its chunk. Padding is removed first, and documents
packed into one row are streams of their own. A memory brings a state (`StreamState`) and two functions, `read` and
`write` (`ChunkMemory`); `follow` does the rest.

Shapes: B batch, T tokens of a call, R streams, W tokens of the longest, w tokens of one step, P waiting tokens, M
memories (R, or 1 if the batch shares one).
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from ..checks import ArgumentError, instance, refuse, require, segments, suggestion, token_mask, whole, within
from ..precision import mapped
from ..recurrent.states import State
from .token_fields import Tensors, Waiting, blend, device_of, hidden_where, limited, picked, repeated, width

S = TypeVar("S", bound="StreamState")
M = TypeVar("M", bound="ChunkMemory")


@dataclass(frozen=True)
class Step:
    """One write of full chunks, then one read."""

    flush: tuple[bool, ...]  # for each row, whether its waiting tokens are written first
    start: tuple[int, ...]  # for each row, the first of its new tokens to read then
    stop: tuple[int, ...]  # for each row, the end of these tokens (start = stop: none)

    @property
    def width(self) -> int:
        return max(self.counts)

    @property
    def counts(self) -> tuple[int, ...]:
        return tuple(stop - start for start, stop in zip(self.start, self.stop, strict=True))

    @property
    def uniform(self) -> bool:
        return len(set(zip(self.flush, self.start, self.stop, strict=True))) == 1


def schedule(pending: Sequence[int], new: Sequence[int], chunk: int) -> list[Step]:
    """Return the steps of a call, given the numbers of waiting and new tokens of each row. A full chunk, or more if the
    chunk size has shrunk, is written at once; a row whose tokens are used up neither reads nor writes."""
    waiting, read = list(pending), [0] * len(new)
    steps = []
    while any(at < count for at, count in zip(read, new, strict=True)):
        flush, start = [], tuple(read)
        for row, count in enumerate(new):
            left = count - read[row]
            flush.append(left > 0 and waiting[row] >= chunk)
            if flush[row]:
                waiting[row] = 0
            taken = min(left, chunk - waiting[row]) if left > 0 else 0
            read[row] += taken
            waiting[row] += taken
        steps.append(Step(tuple(flush), start, tuple(read)))
    return steps


@dataclass(frozen=True, kw_only=True)
class StreamState(State):
    """A memory in the middle of a stream. Nothing is changed in place."""

    MEMORY: ClassVar[dict[str, str | None]] = {}
    """Fields [M, ...] that are written, and the attributes [...] that hold their first values (None: zeros)."""

    waiting: Waiting  # tokens that were read but not yet written
    writes: tuple[int, ...]  # how often each memory was written
    shared: bool = False  # whether the batch has one memory

    @property
    def memory(self) -> Tensors:
        return {name: getattr(self, name) for name in self.MEMORY}

    @property
    def waits(self) -> tuple[int, ...]:
        """The number of waiting tokens of each row, or of the shared memory."""
        return self.waiting.counts

    @property
    def bytes(self) -> int:
        """The memory of all tensors, without the first values, which belong to the layer."""
        return self.waiting.bytes + sum(x.nbytes for x in self.memory.values())

    def map(self: S, fn: Callable[[Tensor], Tensor]) -> S:
        return replace(super().map(fn), waiting=self.waiting.map(fn))

    def clone(self: S) -> S:
        return StreamState.map(self, torch.clone)

    def detach(self: S) -> S:
        """Cut off gradients (truncated backpropagation). Memories that restart later still pass gradients to their
        first values if those are leaves of the graph (parameters)."""
        kept = {name: x for name, x in self._tensors().items() if name not in self.MEMORY and x.is_leaf}
        return replace(StreamState.map(self, Tensor.detach), **kept)

    def detach_written(self: S, names: Collection[str], rows: Tensor | None) -> S:
        """Cut off the gradients of these fields, for the memories `rows` (boolean [M]; None: all)."""
        held = {name: x for name, x in self.memory.items() if name in names}
        return replace(self, **{n: x.detach() if rows is None else blend(rows, x.detach(), x) for n, x in held.items()})

    def restart(self: S, rows: Tensor) -> S:
        """Set the memories `rows` (boolean [M]) back to their first values, and drop their waiting tokens."""
        flags, memory = rows.tolist(), self.memory
        for name, first in self.MEMORY.items():
            old = memory[name]
            memory[name] = blend(rows, getattr(self, first) if first else old.new_zeros(()), old)
        writes = tuple(0 if again else n for again, n in zip(flags, self.writes, strict=True))
        return replace(self, **memory, waiting=self.waiting.written(flags), writes=writes)

    def reset(self: S) -> S:
        every = torch.ones(len(self.writes), dtype=torch.bool, device=device_of(self.memory))
        return replace(self.restart(every), tokens=0)

    def select(self: S, indices: Tensor) -> S:
        """Return the sequences `indices`, integers [N] in that order (beam search) or flags [B]. It is an ArgumentError
        if the batch shares one memory."""
        self._require_own("select")
        if indices.dtype == torch.bool:
            indices = indices.nonzero().squeeze(-1)
        index = indices.to(device_of(self.memory))
        rows = {name: x[index] for name, x in self.memory.items()}
        return replace(self, **rows, waiting=self.waiting.select(index), writes=picked(self.writes, indices))

    def repeat(self: S, n: int) -> S:
        """Repeat every sequence `n` times in a row. Raise ArgumentError if the batch shares one memory."""
        self._require_own("repeat")
        again = lambda x: x.repeat_interleave(n, 0)  # noqa: E731
        rows = {name: again(x) for name, x in self.memory.items()}
        waiting = replace(self.waiting.map(again), counts=repeated(self.waits, n))
        return replace(self, **rows, waiting=waiting, writes=repeated(self.writes, n))

    def _require_own(self, what: str) -> None:
        rows = "its rows cannot be selected, repeated or reordered (beam search does all three)"
        why = f"this memory is shared by the batch, so {rows}; use one memory per sequence (shared=False)."
        require(not self.shared, f"{type(self).__name__}.{what}", why)


@dataclass(frozen=True)
class Streams:
    """The rows of a batch as streams without padding."""

    # int64 [R, W], the position of each token among the B * T (0 where there is none); None: rows as they are
    index: Tensor | None
    valid: Tensor | None  # boolean [R, W], where there is a token; None: everywhere
    counts: tuple[int, ...]  # tokens of each stream; with a shared memory [W], since all rows share one clock
    row: tuple[int, ...] = ()  # the batch row of each stream; empty if the streams are the rows
    fresh: tuple[bool, ...] = ()  # for each stream, whether it begins a new document

    @classmethod
    def of(cls, like: Tensor, mask: Tensor | None, segment_ids: Tensor | None, shared: bool) -> "Streams":
        """Return the streams of tokens `like` [B, T, ...], with `mask` boolean [B, T] (None: no padding) and
        `segment_ids` integers [B or 1, T]. Does not synchronise with the device if both are None."""
        batch, tokens = like.shape[:2]
        mask = None if mask is None or mask.all() else mask
        if mask is None and segment_ids is None:
            return cls(None, None, (tokens,) * (1 if shared else batch))
        # not new_ones, which torch.vmap would map
        mask = torch.ones(batch, tokens, dtype=torch.bool, device=like.device) if mask is None else mask
        if shared:
            some = mask.any(0)
            columns = some.nonzero()[:, 0]
            index = torch.arange(batch, device=mask.device)[:, None] * tokens + columns
            return cls(None if some.all() else index, mask[:, columns], (len(columns),))
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
        column = torch.arange(len(at), device=at.device) - first[number] if len(at) else at
        index[number, column], valid[number, column] = at, True
        fresh = (*(i > 0 and b == row[i - 1] for i, b in enumerate(row)), *(False for _ in absent))
        return cls(index, valid, (*counts, *(0 for _ in absent)), (*row, *absent), fresh)

    def cut(self, new: Tensors) -> Tensors:
        """Rearrange fields [B, T, ...] to [R, W, ...], 0 where there is no token, and mark those in `good`."""
        if self.valid is None:
            return new
        index, gone = self.index, ~self.valid
        fields = {n: hidden_where(gone, x if index is None else x.flatten(0, 1)[index]) for n, x in new.items()}
        return {"good": self.valid, **fields}

    def join(self, x: Tensor, batch: int, tokens: int) -> Tensor:
        """Rearrange [R, W, D] to [B, T, D], 0 where there is no token."""
        if self.valid is None:
            return x
        if self.index is None:
            return hidden_where(~self.valid, x)
        flat = x.new_zeros(batch * tokens, x.shape[-1])
        return flat.index_put((self.index[self.valid],), x[self.valid]).unflatten(0, (batch, tokens))

    def begin(self, state: S, first: Mapping[str, Tensor]) -> S:
        """Return the state of every stream, given that of every row; documents that begin now start from `first`."""
        if not self.row:
            return state
        state = state.select(self._tensor(self.row))
        return replace(state, **first).restart(self._tensor(self.fresh)) if any(self.fresh) else state

    def end(self, state: S) -> S:
        """Return the state of every row: that of its last stream."""
        if not self.row:
            return state
        last = dict(zip(self.row, range(len(self.row)), strict=True))
        return state.select(self._tensor([last[b] for b in sorted(last)]))

    def _tensor(self, values: Sequence[int]) -> Tensor:
        assert self.valid is not None
        return torch.tensor(values, device=self.valid.device)


class ChunkMemory:
    """The base of memories: settings, which are a frozen dataclass, and how it is read and written.

    Attributes:
        chunk_size: tokens per chunk.
        read: given (state, tokens, keep), returns what the tokens, fields [R, w, ...], read, [R, w, D], and (if `keep`)
            the fields that `write` needs of them.
        write: given (state, tokens, following), returns the written fields of the state. `tokens`, [R, P, ...], are
            written where `good` (everywhere without that field); `following`, [R, 1, ...], are the next tokens, None if
            they have not arrived.
    """

    chunk_size: int
    meta_grad: bool | int
    read: Callable[..., tuple[Tensor, Tensors]]
    write: Callable[..., dict[str, Any]]
    __dataclass_fields__: ClassVar[dict[str, Any]]

    @classmethod
    def of(cls: type[M], call: str, memory: M | None, options: Mapping[str, Any]) -> M:
        """Return the settings of a call: those of `memory` (None: the defaults), changed by `options`."""
        memory = cls() if memory is None else instance(call, "memory", memory, cls, f"a {cls.__name__} or None")
        for name in options:
            if name not in cls.__dataclass_fields__:
                raise ArgumentError(f"{call}: unknown option {name!r}.{suggestion(name, cls.__dataclass_fields__)}")
        return within(call, None, replace, memory, **options)

    @property
    def detach_every(self) -> int:
        """After how many writes gradients are cut; 0: never."""
        return check_meta_grad(type(self).__name__, self.meta_grad)


def follow(memory: ChunkMemory, state: S, begun: S, new: Tensors, streams: Streams, frozen: bool) -> tuple[Tensor, S]:
    """Read the tokens of a call, fields `new` [B, T, ...] of `finite_tokens`, and write every chunk that a next token
    closes. Return what was read [B, T, D] and the state of every row after it, given the state of every row and that
    of every stream, `begun`; if `frozen`, only read."""
    batch, tokens = next(iter(new.values())).shape[:2]
    fields = streams.cut(new)
    if frozen:
        return streams.join(memory.read(begun, fields, False)[0], batch, tokens), state
    out, after = _run(memory, begun, fields, streams.counts)
    return streams.join(out, batch, tokens), replace(streams.end(after), tokens=state.tokens + tokens)


def _run(memory: ChunkMemory, state: S, new: Tensors, counts: Sequence[int]) -> tuple[Tensor, S]:
    parts, steps = [], schedule(state.waits, counts, memory.chunk_size)
    for step, piece in zip(steps, _pieces(new, steps), strict=True):
        if any(step.flush):
            first = {name: x[:, :1] for name, x in piece.items()}
            state = _written(memory, state, step.flush, first, memory.detach_every)
        out, kept = memory.read(state, piece, True)
        state = replace(state, waiting=state.waiting.append(kept, step.counts))
        parts.append(out)
    if not parts:
        return memory.read(state, new, False)[0], state  # empty, but part of the graph
    out = parts[0] if len(parts) == 1 else torch.cat(parts, 1)
    return out if all(step.uniform for step in steps) else _in_order(out, steps, width(new)), state


def flushed(memory: ChunkMemory, state: S, detach_every: int = 0) -> S:
    """Write all waiting tokens whose targets have arrived; afterwards none waits."""
    rows = [n > 0 for n in state.waits]
    return _written(memory, state, rows, None, detach_every) if any(rows) else state


def _written(memory: ChunkMemory, state: S, rows: Sequence[bool], following: Tensors | None, detach_every: int) -> S:
    """Write the waiting tokens of the memories `rows`."""
    writes = tuple(n + hit for n, hit in zip(state.writes, rows, strict=True))
    cut = [bool(hit and detach_every and n % detach_every == 0) for n, hit in zip(writes, rows, strict=True)]
    tokens = state.waiting.tokens()
    with torch.set_grad_enabled(torch.is_grad_enabled() and not all(cut)):
        new = memory.write(state, tokens if all(rows) else limited(tokens, rows), following)
    if not all(rows):
        flags = torch.tensor(rows, device=device_of(tokens))
        new = {n: blend(flags, x, getattr(state, n)) if isinstance(x, Tensor) else x for n, x in new.items()}
    state = replace(state, **new, waiting=state.waiting.written(rows), writes=writes)
    if not any(cut):
        return state
    return state.detach_written(new, None if all(cut) else torch.tensor(cut, device=device_of(tokens)))


def _pieces(new: Tensors, steps: Sequence[Step]) -> Iterator[Tensors]:
    """Yield the tokens of each step, fields [R, w, ...]. They are cut at once where they can be: the derivative is one
    concatenation then, not a padded gradient for each step."""
    sizes = [step.width for step in steps]
    if all(step.uniform for step in steps) and sum(sizes) == width(new):
        parts = [x.split(sizes, 1) for x in new.values()]
        yield from (dict(zip(new, piece, strict=True)) for piece in zip(*parts, strict=True))
    else:
        yield from (_piece(new, step) for step in steps)


def _piece(new: Tensors, step: Step) -> Tensors:
    if step.uniform:
        return {name: x[:, step.start[0] : step.stop[0]] for name, x in new.items()}
    start, stop = (torch.tensor(x)[:, None] for x in (step.start, step.stop))
    at = start + torch.arange(step.width)
    device = device_of(new)
    there, index = (at < stop).to(device), torch.where(at < stop, at, 0).to(device)
    rows = torch.arange(len(index), device=device)[:, None]
    piece = {name: x[rows, index] for name, x in new.items()}
    return {**piece, "good": piece["good"] & there if "good" in piece else there}


def _in_order(out: Tensor, steps: Sequence[Step], width: int) -> Tensor:
    """Rearrange the outputs of consecutive steps [R, sum of w, D] to streams [R, W, D]."""
    index, first = torch.zeros(len(out), width, dtype=torch.long), 0
    for step in steps:
        for row, (start, stop) in enumerate(zip(step.start, step.stop, strict=True)):
            index[row, start:stop] = torch.arange(first, first + stop - start)
        first += step.width
    return out.gather(1, index.to(out.device)[..., None].expand(*index.shape, out.shape[-1]))


def _changes(x: Tensor) -> Tensor:
    """Return where x [N] differs from the entry before; true for the first."""
    return torch.cat([x.new_ones(len(x) and 1, dtype=torch.bool), x[1:] != x[:-1]])


def check_chunk(call: str, chunk_size: object, least: int) -> int:
    """Check that `chunk_size` is a whole number >= `least`, and return it."""
    why = "nothing can be learned from a chunk of one token" if least > 1 else "tokens between two writes"
    return int(min(whole(call, "chunk_size", chunk_size, least, why=f": {why}"), 2**48))


def check_held(call: str, name: str, tokens: Tensor) -> None:
    """Check that `tokens` hold data, since what a memory writes depends on it."""
    why = f"{name} is on the meta device, where it holds no data, which a write needs. Move it with .to()."
    require(tokens.device.type != "meta", call, why)


def check_meta_grad(call: str, meta_grad: object) -> int:
    """Check `meta_grad` (True, False, or the number of writes between cuts), and return it as `detach_every`."""
    if isinstance(meta_grad, bool):
        return 0 if meta_grad else 1
    if not isinstance(meta_grad, int) or meta_grad < 1:
        raise refuse(call, "meta_grad", meta_grad, "True, False or a number of writes >= 1")
    return meta_grad


def check_tokens(
    call: str, query: Tensor, mask: object, segment_ids: object, shared: bool, exports: bool = False
) -> None:
    """Check that the tokens `query` [B, T, ...] hold data, `mask` is None or boolean [B, T], and `segment_ids`
    is None or integers [B or 1, T], which a shared memory does not take. With `exports`, torch.export can trace a call
    without mask and segment_ids."""
    check_held(call, "query", query)
    batch, tokens = query.shape[:2]
    token_mask(call, "mask", mask, batch, tokens, like=query)
    segments(call, segment_ids, batch, tokens, query.device)
    for name, given in (("mask", mask), ("segment_ids", segment_ids)):
        if isinstance(given, Tensor) and mapped(given):
            why = f"torch.vmap runs over {name}, whose contents say what is written"
            raise ArgumentError(f"{call}: {why}; give the sequences as the batch, or the same {name} for all of them.")
    shared_one = "segment_ids need a memory per document, but shared=True has one for the batch."
    require(segment_ids is None or not shared, call, shared_one)
    if torch.compiler.is_exporting() and not (exports and mask is None and segment_ids is None):
        why = "this layer writes its fast weights in chunks of real tokens, which an exported graph cannot hold"
        raise ArgumentError(f"torch.export: {why}; of such layers FastWeightProductKeyMemory can be exported.")
