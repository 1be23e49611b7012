"""The loop of a memory of fast weights along streams of tokens, and what it does in every round.

Legend: R streams (rows of the batch, or documents packed into rows), W tokens of the longest, M memories (R, or 1 when
the batch shares one), w tokens read at once, L tokens of one write, P = L, or R L when shared; H heads, k slots a head,
K = H k, Dk width of a query, Dv of a value.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from ..checks import ArgumentError
from ..grammar import Spec
from .chunk_schedule import Step, schedule
from .fast_weight_rules import WriteRule, Written
from .fast_weight_state import FastWeightState, Tokens
from .product_key import SlotScore, search, weigh
from .stores.slot_values import SlotValues

BLOCK = 8192
"""Tokens of the batch that are read at once, however large the chunk."""


class WriteObserver(Protocol):
    """Who is told what is read and written; tensors carry no gradient."""

    def on_read(self, slots: Tensor, weights: Tensor, position: Tensor, valid: Tensor, row: Tensor) -> None:
        """Slots and weights [M, P, K] of the tokens at `position` [M, P] of the stream of `row` [M, P] of the batch,
        where there are any (`valid` [M, P])."""

    def on_write(
        self, slots: Tensor, shares: Tensor, position: Tensor, target: Tensor, written: Tensor, row: Tensor
    ) -> None:
        """Slots and shares [M, P, K] of the tokens at `position`, moved towards the value at position `target` [M, P],
        where `written` [M, P]."""


@dataclass(frozen=True)
class How:
    """How a memory is read and written."""

    rule: WriteRule
    top_k: int
    kind: SlotScore
    eps: float
    spec: Spec
    detach_every: int
    observer: WriteObserver | None
    sync: str | None
    mix: bool = False


class Looked(NamedTuple):
    """What tokens [B, w] found: slots, weights [B, w, H, k]; read [B, w, Dv], and out [B, w, Dv], which is that or its
    mix with the tokens' values (`How.mix`); halves, half_scores [B, w, H, 2, k]; and scores [B, w, H, k], or None where
    no write needs them."""

    slots: Tensor
    weights: Tensor
    read: Tensor
    out: Tensor
    halves: Tensor
    half_scores: Tensor
    scores: Tensor | None


@runtime_checkable
class Rounds(Protocol):
    """Values that are searched, read and written at once, with the sub-keys, by kernels of their own; None where those
    do not know what is asked."""

    def clean(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """`precision.clean` of tokens."""

    def looked(self, how: How, keys: Tensor, tokens: dict[str, Tensor]) -> Looked | None:
        """What tokens [B, w, ...] find with keys [M, H, 2, n, Dk/2]; what is read, and its mix, is 0 where they are not
        good."""

    def rewritten(
        self, how: How, keys: Tensor, tokens: Tokens, following: dict[str, Tensor] | None
    ) -> tuple[Tensor, SlotValues] | None:
        """Keys and values after `tokens` were written, of which `following`, [B, 1, ...], come next."""


def run(
    how: How,
    new: dict[str, Tensor],
    counts: tuple[int, ...],
    state: FastWeightState,
    chunk: int,
    frozen: bool,
    rows: Tensor | None,
) -> tuple[Tensor, FastWeightState]:
    """What comes out for streams [R, W, ...] of so many tokens, [R, W, Dv], and the state after."""
    memory = Memory(how, state, rows)
    if frozen:
        return memory.read(new, kept=False)[1], state
    parts, places, reach = [], [], 0
    for step in schedule(state.waiting.counts, counts, chunk):
        piece = _piece(new, step)
        if any(step.flush):
            memory.write(step.flush, {name: x[:, :1] for name, x in piece.items()})
        found, given = memory.read(piece, kept=True)
        memory.waiting = memory.waiting.append(found, [b - a for a, b in zip(step.start, step.stop, strict=True)])
        parts.append(given)
        places.append((step, reach))
        reach += step.width
    if not parts:
        parts = [memory.read(new, kept=False)[1]]  # of no token, but a part of the graph
    out = parts[0] if len(parts) == 1 else torch.cat(parts, 1)
    if not all(step.uniform for step, _ in places):
        out = _in_order(out, places, new["value"].shape[1])
    return out, memory.state()


def mixed(read: Tensor, value: Tensor, gate: Tensor | None) -> Tensor:
    """g read + (1 - g) v of tokens [..., Dv] and their gates [...], or read + v without gates (equation 24)."""
    value = value.to(read.dtype)
    return read + value if gate is None else torch.lerp(value, read, gate[..., None].to(read.dtype))


def _shown(x: Tensor, good: Tensor | None) -> Tensor:
    """x [B, w, Dv], 0 where not good."""
    return x if good is None else torch.where(good[..., None], x, 0)


def _piece(new: dict[str, Tensor], step: Step) -> dict[str, Tensor]:
    """The tokens of one round, [R, w, ...]."""
    if step.uniform:
        return {name: x[:, step.start[0] : step.stop[0]] for name, x in new.items()}
    start, stop = (torch.tensor(x)[:, None] for x in (step.start, step.stop))
    at = start + torch.arange(step.width)
    device = new["value"].device
    there, index = (at < stop).to(device), torch.where(at < stop, at, 0).to(device)
    rows = torch.arange(len(index), device=device)[:, None]
    piece = {name: x[rows, index] for name, x in new.items()}
    return {**piece, "good": piece["good"] & there if "good" in piece else there}


def _in_order(out: Tensor, places: Sequence[tuple[Step, int]], width: int) -> Tensor:
    """Rounds [R, sum of w, Dv], one after the other, as streams [R, W, Dv]."""
    index = torch.zeros(len(out), width, dtype=torch.long)
    for step, reach in places:
        for row, (start, stop) in enumerate(zip(step.start, step.stop, strict=True)):
            index[row, start:stop] = torch.arange(reach, reach + stop - start)
    return out.gather(1, index.to(out.device)[..., None].expand(*index.shape, out.shape[-1]))


# Reading and writing ------------------------------------------------------------------------------------------


class Memory:
    """A state while it is read and written."""

    def __init__(self, how: How, state: FastWeightState, rows: Tensor | None) -> None:
        self.how, self.begun, self.rows = how, state, rows
        self.keys, self.values, self.waiting, self.writes = state.keys, state.values, state.waiting, state.writes

    def state(self) -> FastWeightState:
        """What it is now."""
        return replace(self.begun, keys=self.keys, values=self.values, waiting=self.waiting, writes=self.writes)

    def read(self, piece: dict[str, Tensor], *, kept: bool) -> tuple[Tokens, Tensor]:
        """The tokens [R, w, ...], read, `kept` with all that a write of them needs; and what comes out, [R, w, Dv]."""
        streams, width = piece["value"].shape[:2]
        size = max(1, BLOCK // max(1, streams))
        if width <= size:
            return self._read(piece, kept)
        starts = range(0, width, size)
        parts = [self._read({n: x[:, i : i + size] for n, x in piece.items()}, kept) for i in starts]
        found, outs = zip(*parts, strict=True)
        return Tokens.joined(found), torch.cat(outs, 1)

    def _read(self, piece: dict[str, Tensor], kept: bool) -> tuple[Tokens, Tensor]:
        how, good = self.how, piece.get("good")
        found = self._looked(piece)
        weights, slots = found.weights.flatten(-2), self._by_memory(found.slots.flatten(-2))
        if how.observer is not None:
            valid = torch.ones_like(piece["position"], dtype=torch.bool) if good is None else good
            told = (piece["position"], valid, self._rows(valid))
            how.observer.on_read(slots, *(self._by_memory(x.detach()) for x in (weights, *told)))
        tokens = Tokens(found.slots, found.weights, found.read, piece["value"], piece["position"])
        if kept:
            tokens = replace(tokens, gate=piece.get("gate"), good=good)
            if how.rule.key_update != "none":
                scores = found.scores if how.rule.key_update == "mse" else None
                parts = {"halves": found.halves, "half_scores": found.half_scores, "scores": scores}
                tokens = replace(tokens, query=piece["query"], **parts)
        return tokens, found.out

    def _looked(self, piece: dict[str, Tensor]) -> Looked:
        how, query, good = self.how, piece["query"], piece.get("good")
        if not torch.compiler.is_compiling() and isinstance(self.values, Rounds):
            looked = self.values.looked(how, self.keys, piece)
            if looked is not None:
                return looked
        found = search(query, self.keys[0] if len(self.keys) == 1 else self.keys, how.top_k, how.kind, how.eps)
        weights = weigh(found.scores.flatten(-2), how.spec)
        slots = self._by_memory(found.slots.flatten(-2))
        read = self.values.read(self._by_memory(weights), slots).view(*query.shape[:2], self.values.width)
        read = _shown(read, good)
        out = _shown(mixed(read, piece["value"], piece.get("gate")), good) if how.mix else read
        halves = (found.halves, found.half_scores, found.scores)
        return Looked(found.slots, weights.view_as(found.slots), read, out, *halves)

    def write(self, rows: Sequence[bool], following: dict[str, Tensor] | None) -> None:
        """Write what waits of the streams `rows` (or of all, with a shared memory). `following` are the tokens that
        come next, [R, 1, ...], or None where they are not there yet."""
        how = self.how
        self.writes = tuple(n + hit for n, hit in zip(self.writes, rows, strict=True))
        cut = [
            bool(hit and how.detach_every and n % how.detach_every == 0)
            for n, hit in zip(self.writes, rows, strict=True)
        ]
        with torch.set_grad_enabled(torch.is_grad_enabled() and not all(cut)):
            keys, values = self._rewritten(rows, following) or self._written(rows, following)
        if all(cut):
            keys, values = keys.detach(), values.detach()
        elif any(cut):
            flags = torch.tensor(cut, device=keys.device)
            keys, values = torch.where(flags.view(-1, 1, 1, 1, 1), keys.detach(), keys), values.detach(flags)
        self.keys, self.values = keys, values
        self.waiting = self.waiting.written(rows)

    def _rewritten(self, rows: Sequence[bool], following: dict[str, Tensor] | None) -> tuple[Tensor, SlotValues] | None:
        """Keys and values after a write by the values' own kernels, if they have any that know how."""
        how = self.how
        if not isinstance(self.values, Rounds) or how.observer is not None or how.sync is not None:
            return None
        tokens = self.waiting.tokens()
        if not all(rows):
            tokens = tokens.marked()
            assert tokens.good is not None
            tokens = replace(tokens, good=tokens.good & torch.tensor(rows, device=tokens.good.device)[:, None])
        return self.values.rewritten(how, self.keys, tokens, following)

    def _written(self, rows: Sequence[bool], following: dict[str, Tensor] | None) -> tuple[Tensor, SlotValues]:
        how, tokens = self.how, self._paired(rows, following)
        if how.sync is not None:
            tokens = tokens.map(_of_all_processes)
        steps = how.rule.steps(tokens)
        shares = (steps[..., None, None] * tokens.weights).flatten(-2)
        keys = how.rule.moved_keys(self.keys, self.values, tokens, how.kind, how.spec)
        return keys, self.values.write(tokens.slots.flatten(-2), shares, tokens.errors, tokens.counted)

    def _paired(self, rows: Sequence[bool], following: dict[str, Tensor] | None) -> Written:
        """The tokens that are written now, with their errors."""
        tokens = self.waiting.tokens().marked()
        assert tokens.good is not None
        good = tokens.good
        if not all(rows):
            good = good & torch.tensor(rows, device=good.device)[:, None]
        target, position, written = tokens.value, tokens.position, good
        if self.how.rule.look_ahead:
            target, position, there = _next(tokens, good, following if self.how.rule.border else None)
            written = good & there
        errors = torch.where(written[..., None], tokens.read - target.to(tokens.read.dtype), 0)
        slots = torch.where(good[..., None, None], tokens.slots, 0)
        parts = (slots, tokens.weights, errors, tokens.gate, good, written)
        more = (tokens.query, tokens.halves, tokens.half_scores, tokens.scores)
        found = Written(*(None if x is None else self._by_memory(x) for x in (*parts, *more)))
        if self.how.observer is not None:
            self._tell(found, tokens.position, position)
        return found

    def _tell(self, tokens: Written, position: Tensor, target: Tensor) -> None:
        assert self.how.observer is not None
        with torch.no_grad():
            shares = (self.how.rule.steps(tokens)[..., None, None] * tokens.weights).flatten(-2)
        places = (self._by_memory(x) for x in (position, target, self._rows(position)))
        at, to, row = places
        self.how.observer.on_write(tokens.slots.flatten(-2), shares, at, to, tokens.written, row)

    def _rows(self, like: Tensor) -> Tensor:
        """Of tokens [R, w], the row of the batch."""
        rows = torch.arange(len(like), device=like.device) if self.rows is None else self.rows
        return rows[:, None].expand_as(like)

    def _by_memory(self, x: Tensor) -> Tensor:
        """[R, w, ...] as [M, P, ...]."""
        return x.reshape(1, -1, *x.shape[2:]) if self.begun.shared else x


def _next(tokens: Tokens, good: Tensor, following: dict[str, Tensor] | None) -> tuple[Tensor, Tensor, Tensor]:
    """Of every token the next good one of its stream: value [R, L, Dv], position and whether there is one [R, L]."""
    value, position = tokens.value, tokens.position
    if following is None:
        following = {"value": value[:, :1], "position": position[:, :1], "good": torch.zeros_like(good[:, :1])}
    last = following.get("good", torch.ones_like(good[:, :1]))
    end = good.shape[1]
    places = torch.arange(end + 1, device=good.device)
    at = torch.where(torch.cat([good, last], 1), places, end + 1)
    at = at.flip(1).cummin(1).values.flip(1)[:, 1:]
    there, at = at <= end, at.clamp(max=end)
    value = torch.cat([value, following["value"]], 1).gather(1, at[..., None].expand(*at.shape, value.shape[-1]))
    return value, torch.cat([position, following["position"]], 1).gather(1, at), there


def _of_all_processes(x: Tensor) -> Tensor:
    """[1, P, ...] as [1, W P, ...] of all W processes, in their order; the others' parts carry no gradient."""
    from torch import distributed

    if not distributed.is_initialized():
        raise ArgumentError(
            "fast_weight_memory: sync='all_gather' needs torch.distributed; call init_process_group() first."
        )
    own = x.to(torch.uint8) if x.dtype == torch.bool else x
    parts = [torch.empty_like(own) for _ in range(distributed.get_world_size())]
    distributed.all_gather(parts, own.detach().contiguous())
    parts[distributed.get_rank()] = own
    return torch.cat(parts, 1).to(x.dtype)
