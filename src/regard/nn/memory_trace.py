"""Observers of memory layers: statistics of slots for training logs, and a trace of who wrote each slot.

An observer is set as the `observer` of a memory layer, or of all layers of a model by `observed`. It receives every
read and write, and changes nothing.

Shapes: M memories, N = n^2 slots, P tokens of one chunk, K slots of a token, W writers kept of a slot, R reads.
Positions count the real tokens of a row, from the start of its stream; rows are those of the batch.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..checks import ArgumentError, require, shape
from ..memory.fast_weights import WriteObserver
from .arguments import positive_int
from .hooks import temporarily

NOBODY = -1  # the position that stands for no writer


class MemoryObserver(WriteObserver):
    """Base class of observers: every method does nothing, and a subclass overrides those it needs.

    Class attributes:
        by_memory: whether it keeps notes on every memory from call to call; packed documents are then refused.
    """

    by_memory = False

    def on_start(self, kept: bool) -> None:
        """Start a stream, in new memories or (`kept`) in the memory that the previous stream left."""

    def on_tokens(self, gate: Tensor | None, counted: Tensor, non_finite: Tensor) -> None:
        """Take the tokens of one call: gates [B, T], which tokens read (boolean [B, T]), and which are not finite."""


class SlotStatistics(MemoryObserver):
    """How evenly the slots of a memory are used: coverage, collisions and divergence from uniform use, in counts of
    reads, as in the released program of arXiv:2601.00671.

    Args:
        slots: N, a square.

    Attributes:
        reads: int64 [M, N], how often each slot was read.
        mass: float64 [M, N], the sum of the weights it was read with.

    Cost: one scatter of M P K numbers a read; 16 M N bytes.
    """

    def __init__(self, slots: int) -> None:
        positive_int("SlotStatistics", "slots", slots)
        require(math.isqrt(slots) ** 2 == slots, "SlotStatistics", f"slots is {slots}, expected a square.")
        self.slots = slots
        self.clear()

    def clear(self) -> None:
        self.reads = torch.zeros(0, self.slots, dtype=torch.long)
        self.mass = torch.zeros(0, self.slots, dtype=torch.float64)
        self._gates, self._gated, self._tokens, self._non_finite = 0.0, 0, 0, 0

    def on_tokens(self, gate: Tensor | None, counted: Tensor, non_finite: Tensor) -> None:
        self._tokens += int(counted.sum())
        self._non_finite += int(non_finite.sum())
        if gate is not None:
            self._gates += float(gate.detach().double()[counted].sum())
            self._gated += int(counted.sum())

    def on_read(self, slots: Tensor, weights: Tensor, position: Tensor, valid: Tensor, row: Tensor) -> None:
        missing = slots.shape[0] - self.reads.shape[0]
        if missing > 0:
            self.reads = torch.cat([self.reads.to(slots.device), self.reads.new_zeros(missing, self.slots)])
            self.mass = torch.cat([self.mass.to(slots.device), self.mass.new_zeros(missing, self.slots)])
        seen = valid[..., None].expand(slots.shape)
        at = slots.flatten(1)
        self.reads[: len(slots)].scatter_add_(1, at, seen.flatten(1).to(self.reads.dtype))
        self.mass[: len(slots)].scatter_add_(1, at, torch.where(seen, weights.detach().double(), 0).flatten(1))

    def summary(self) -> dict[str, float]:
        """Return one number per statistic, the mean over the memories that were read.

        Returns:
            tokens and not_finite (the number of finite and non-finite tokens), gate (its mean) if there is one, and if
            something was read: reads (slots read), coverage (share of the slots that were read), collisions (share of
            the reads of slots that were read more than once), kl_uniform (divergence of the reads' distribution over
            slots from the uniform one in nats, 0 to log N), and marginal_entropy (entropy in nats of the weights over
            the sub-keys of a half, mean of both halves; at most log n).
        """
        means: dict[str, float] = {"tokens": float(self._tokens), "not_finite": float(self._non_finite)}
        if self._gated:
            means["gate"] = self._gates / self._gated
        counts = self.reads[self.reads.sum(1) > 0].double()
        if len(counts) == 0:
            return means
        totals = counts.sum(1)
        collided = torch.where(counts > 1, counts, 0).sum(1) / totals
        grid = self.mass[self.reads.sum(1) > 0].unflatten(1, (math.isqrt(self.slots), -1))
        halves = torch.stack([_entropy(grid.sum(2)), _entropy(grid.sum(1))])
        return {
            **means,
            "reads": float(totals.sum()),
            "coverage": float((counts > 0).double().mean()),
            "collisions": float(collided.mean()),
            "kl_uniform": float((math.log(self.slots) - _entropy(counts)).mean()),
            "marginal_entropy": float(halves.mean()),
        }


def _entropy(mass: Tensor) -> Tensor:
    """Return the entropy, in nats, of the distributions proportional to the rows."""
    share = mass / mass.sum(-1, keepdim=True)
    return -torch.xlogy(share, share).sum(-1)


class Writers(NamedTuple):
    """The last W writers of slots, the latest first; each [..., W].

    Attributes:
        row, position: of the token that wrote; NOBODY if there was none.
        target: the position, in the same row, of the token whose value was written.
        share: of the error, as the layer's `step_rule` defines it.
    """

    row: Tensor
    position: Tensor
    target: Tensor
    share: Tensor

    @classmethod
    def none(cls, *sizes: int) -> "Writers":
        """Return no writers, [*sizes]."""
        where = torch.full(sizes, NOBODY, dtype=torch.int32)
        return cls(where, where.clone(), where.clone(), torch.zeros(sizes))


class Retrieved(NamedTuple):
    """What R tokens read, in the order of reading.

    Attributes:
        row, position: int64 [R], of the token that read.
        slots, weights: [R, K].
        writers: [R, K, W], of these slots at that time.
    """

    row: Tensor
    position: Tensor
    slots: Tensor
    weights: Tensor
    writers: Writers

    def hits(self, tokens: Tensor) -> "Hits":
        """Return which writers wrote the token that really comes next, given `tokens`, integers [rows, T]: the stream
        of every row without padding; negative: unknown. Fewer rows or tokens than were traced raise ArgumentError."""
        places = ((self.row, self.writers.row), (self.position, self.writers.target))
        reach = [max((int(x.max()) for x in pair if x.numel()), default=-1) for pair in places]
        short = any(size <= most for size, most in zip(tokens.shape, reach, strict=False))
        if tokens.dim() != 2 or tokens.is_floating_point() or short:
            expected = f"integers [rows, T] with rows > {reach[0]} and T > {reach[1]}"
            given, every = f"{tokens.dtype} {shape(tokens)}", "all that the layer was given since the trace began"
            raise ArgumentError(f"Retrieved.hits: tokens is {given}, expected {expected}, {every}.")
        tokens = nn.functional.pad(tokens.cpu().long(), (0, 1), value=NOBODY)
        following = tokens[self.row, self.position + 1]
        wrote = tokens[self.writers.row.long(), self.writers.target.long()]
        there = self.writers.position != NOBODY
        return Hits(there & (wrote == following[:, None, None]) & (wrote >= 0), following >= 0)


class Hits(NamedTuple):
    """Which retrieved slots hold the token that comes next.

    Attributes:
        hit: boolean [R, K, W].
        known: boolean [R], whether the next token is known; rates use these reads only.
    """

    hit: Tensor
    known: Tensor

    def rate(self, writers: int | None = None) -> float:
        """Return the share of retrieved slots for which one of the last `writers` writers (None: all that were kept;
        more raise ArgumentError) wrote the next token; no writer is a miss. NaN if no next token is known."""
        kept = self.hit.shape[2]
        if writers is not None:
            positive_int("Hits.rate", "writers", writers)
            require(writers <= kept, "Hits.rate", f"writers is {writers}, but the trace kept {kept}.")
        return float(self.hit[self.known][..., :writers].any(-1).double().mean())


class WriterTrace(MemoryObserver):
    """For every slot that is read, the tokens that wrote it last.

    A new stream continues to count positions where the longest row before it ended, so the tokens of a trace are all
    that the layer was given since the trace began. Snapshots that are restored are not tracked.

    Args:
        slots, writers: N, and W, how many are kept for each slot.

    Cost: 16 M N W bytes on the CPU, and 16 K W bytes per read.
    """

    by_memory = True

    def __init__(self, slots: int, writers: int = 4) -> None:
        positive_int("WriterTrace", "slots", slots)
        positive_int("WriterTrace", "writers", writers)
        self.slots, self.writers = slots, writers
        self.clear()

    def clear(self) -> None:
        self.written = Writers.none(0, self.slots, self.writers)
        self._reads: list[Retrieved] = []
        self._offset = self._end = 0

    def forget_reads(self) -> None:
        """Delete the records of reads, and keep those of writes."""
        self._reads = []

    def on_start(self, kept: bool) -> None:
        self._offset = self._end
        if not kept:
            self.written = Writers.none(0, self.slots, self.writers)

    def on_read(self, slots: Tensor, weights: Tensor, position: Tensor, valid: Tensor, row: Tensor) -> None:
        slots, weights, position, valid, row = (x.detach().cpu() for x in (slots, weights, position, valid, row))
        self._grow(len(slots))
        memory = torch.arange(len(slots))[:, None].expand(valid.shape)[valid]
        seen, where = slots[valid], position[valid] + self._offset
        writers = Writers(*(x[memory[:, None], seen] for x in self.written))
        self._reads.append(Retrieved(row[valid], where, seen, weights[valid].float(), writers))
        self._end = max(self._end, int(where.max()) + 1) if where.numel() else self._end

    def on_write(
        self, slots: Tensor, shares: Tensor, position: Tensor, target: Tensor, written: Tensor, row: Tensor
    ) -> None:
        given = (slots, shares, position, target, written, row)
        slots, shares, position, target, written, row = (x.detach().cpu() for x in given)
        self._grow(len(slots))
        memory = torch.arange(len(slots))[:, None].expand(written.shape)[written]
        early = position[written].argsort(stable=True)
        entry = (memory[:, None] * self.slots + slots[written])[early]
        token = early[:, None].expand(entry.shape)
        order = entry.flatten().argsort(stable=True)
        entries = torch.stack([entry.flatten()[order], token.flatten()[order]])
        # a token that has a slot twice, by two heads, is one writer
        (entry, token), which = entries.unique_consecutive(dim=1, return_inverse=True)
        share = torch.zeros(len(entry)).index_add_(0, which, shares[written][early].float().flatten()[order])
        offset = self._offset
        of = lambda x: x[written][token].int()  # noqa: E731
        self._push(entry, Writers(of(row), of(position) + offset, of(target) + offset, share))

    def retrieved(self) -> Retrieved:
        """Return all reads so far; raise ArgumentError if there is none."""
        text = "the trace recorded no read; call the model inside `observed(...)`."
        require(bool(self._reads), "WriterTrace.retrieved", text)
        row, position, slots, weights, writers = zip(*self._reads, strict=True)
        wrote = Writers(*map(torch.cat, zip(*writers, strict=True)))
        return Retrieved(torch.cat(row), torch.cat(position), torch.cat(slots), torch.cat(weights), wrote)

    def _grow(self, memories: int) -> None:
        missing = memories - len(self.written.row)
        if missing > 0:
            fresh = Writers.none(missing, self.slots, self.writers)
            self.written = Writers(*map(torch.cat, zip(self.written, fresh, strict=True)))

    def _push(self, entry: Tensor, new: Writers) -> None:
        """Make entries, sorted by memory N + slot and then by time, the last writers of their slots."""
        rows, counts = entry.unique_consecutive(return_counts=True)
        end = counts.cumsum(0)
        depth = torch.arange(self.writers)
        fresh = depth < counts[:, None]
        latest = (end[:, None] - 1 - depth).clamp_min(0)
        before = (depth - counts[:, None]).clamp_min(0)
        for held, made in zip(self.written, new, strict=True):
            table = held.flatten(0, 1)
            table[rows] = torch.where(fresh, made[latest], table[rows].gather(1, before))


@contextmanager
def observed(model: nn.Module, make: Callable[[int], Any] = SlotStatistics) -> Iterator[dict[str, Any]]:
    """Observe every memory of `model` inside this block.

    Args:
        model: any module; layers with an `observer` and `slots` take part, as `nn.FastWeightProductKeyMemory`.
        make: returns an observer, given a layer's number of slots.

    Yields:
        The observers by the layers' names in the model. The earlier observers are restored at the end.
    """
    seen: dict[str, Any] = {}
    with ExitStack() as changes:
        for name, layer in model.named_modules():
            slots = getattr(layer, "slots", None)
            if hasattr(layer, "observer") and isinstance(slots, int):
                seen[name] = make(slots)
                changes.enter_context(temporarily(layer, observer=seen[name]))
        yield seen


def memory_means(model: nn.Module, run: Callable[[], object]) -> dict[str, float]:
    """Return the statistics of all memories of `model` while `run()` runs, for a line of a log: means over the layers,
    sums of counts (tokens, not_finite, reads); {} for a model without memories. Resident memories stay as they were."""
    resident: list[Any] = [layer for layer in model.modules() if getattr(layer, "resident", False)]
    before = [layer.snapshot() for layer in resident]
    try:
        with observed(model, SlotStatistics) as seen, torch.no_grad():
            run()
    finally:
        for layer, snapshot in zip(resident, before, strict=True):
            layer.restore(snapshot)
    summaries = [each.summary() for each in seen.values()]
    means = {}
    for name in dict.fromkeys(name for each in summaries for name in each):
        values = [each[name] for each in summaries if name in each]
        means[name] = sum(values) / (1 if name in ("tokens", "not_finite", "reads") else len(values))
    return means
