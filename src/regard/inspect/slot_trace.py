"""Which slots a memory read, who had written them, and whether that was the right answer.

"Fast-weight Product Key Memory" (section 5.1) looks at a needle's answer slot by slot: what the latest write into each
retrieved slot stored (the query token, the target token and the text around them), marked [HIT] where the target is
the true next token. Positions count the tokens of one stream, everything that the memory has read one after the other.

Legend: T tokens of the stream.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..checks import ArgumentError

if TYPE_CHECKING:
    from ..nn.memory_trace import Retrieved

HIT = "[HIT]"


@dataclass(frozen=True)
class Writer:
    """One write into a slot.

    Attributes:
        query: position of the token whose query found the slot.
        target: position of the token whose value was written.
        weight: by how much of the error the write moved this slot.
    """

    query: int
    target: int
    weight: float


@dataclass(frozen=True)
class RetrievedSlot:
    """A slot that was read, with the last writes into it.

    Attributes:
        slot: its number.
        weight: of the reading.
        writers: the latest first; none where nothing was written yet.
    """

    slot: int
    weight: float
    writers: tuple[Writer, ...]


@dataclass(frozen=True)
class SlotReading:
    """What one memory layer retrieved for one token.

    Attributes:
        layer: its name.
        position: of the token that asked.
        slots: the heaviest first.
    """

    layer: str
    position: int
    slots: tuple[RetrievedSlot, ...]


@dataclass(frozen=True)
class SlotReadings:
    """What the memories of a model retrieved over a stretch of a stream.

    Attributes:
        tokens: of the whole stream, T of them.
        labels: the same as text.
        readings: token by token, and of each token layer by layer.
        answers: position to the token that should come after it, where that is not the stream's own next one.
    """

    tokens: tuple[int, ...]
    labels: tuple[str, ...]
    readings: tuple[SlotReading, ...]
    answers: dict[int, int] | None = None

    def __post_init__(self) -> None:
        if len(self.tokens) != len(self.labels):
            raise ArgumentError(
                f"SlotReadings: {len(self.labels)} labels for {len(self.tokens)} tokens, expected one each."
            )

    def answer(self, reading: SlotReading) -> int | None:
        """The true next token of a reading; None after the last token of the stream."""
        if self.answers is not None and reading.position in self.answers:
            return self.answers[reading.position]
        after = reading.position + 1
        return self.tokens[after] if after < len(self.tokens) else None

    def hit(self, reading: SlotReading, slot: RetrievedSlot, last: int = 1) -> bool:
        """Whether one of the last writes into a slot stored the true next token."""
        answer = self.answer(reading)
        return answer is not None and any(self.tokens[writer.target] == answer for writer in slot.writers[:last])

    def hits(self, last: int = 1, layer: str | None = None) -> float:
        """Share of retrieved slots that are hits, 0 where none was retrieved."""
        found = [
            self.hit(reading, slot, last)
            for reading in self.readings
            if layer in (None, reading.layer)
            for slot in reading.slots
        ]
        return sum(found) / len(found) if found else 0.0

    def hit_weight(self, layer: str | None = None) -> float:
        """Share of the readings' weight that is on hits of the latest write, 0 where nothing was read."""
        total = right = 0.0
        for reading in self.readings:
            for slot in reading.slots if layer in (None, reading.layer) else ():
                total += slot.weight
                right += slot.weight * self.hit(reading, slot)
        return right / total if total else 0.0

    @property
    def layers(self) -> tuple[str, ...]:
        """Their names, in the order in which they read."""
        return tuple(dict.fromkeys(reading.layer for reading in self.readings))

    def context(self, position: int, reach: int) -> tuple[str, str, str]:
        """The text of `reach` tokens before a position, of the one there, and of as many after it."""
        join = "".join
        before, after = (
            self.labels[max(0, position - reach) : position],
            self.labels[position + 1 : position + 1 + reach],
        )
        return join(before), self.labels[position], join(after)


def slot_readings(
    retrieved: Mapping[str, Retrieved],
    tokens: Sequence[int],
    labels: Sequence[str],
    positions: Collection[int],
    *,
    answers: Mapping[int, int] | None = None,
    row: int = 0,
) -> SlotReadings:
    """What the memories of a model retrieved at some positions, made ready to be looked at.

    Args:
        retrieved: name of a layer to what `regard.nn.memory_trace.WriterTrace` noted, or None where it read nothing.
        tokens: of everything that row of the batch was given since the trace began; labels: the same as text.
        positions: of the tokens that asked.
        answers: as in `SlotReadings`.

    Raises:
        ArgumentError: labels do not match the tokens, or a position beyond them.
    """
    if any(not 0 <= position < len(tokens) for position in positions):
        raise ArgumentError(f"slot_readings: positions {sorted(positions)} reach beyond the {len(tokens)} tokens.")
    wanted = set(positions)
    found = []
    for layer, seen in retrieved.items():
        for at in ((seen.row == row).nonzero()[:, 0]).tolist():
            position = int(seen.position[at])
            if position in wanted:
                slots = tuple(_retrieved_slot(seen, at, place) for place in range(seen.slots.shape[1]))
                found.append(SlotReading(layer, position, tuple(sorted(slots, key=lambda slot: -slot.weight))))
    order = {layer: place for place, layer in enumerate(retrieved)}
    found.sort(key=lambda reading: (reading.position, order[reading.layer]))
    return SlotReadings(tuple(tokens), tuple(labels), tuple(found), dict(answers) if answers else None)


def _retrieved_slot(seen: Retrieved, at: int, place: int) -> RetrievedSlot:
    writers = seen.writers
    own = (x[at, place].tolist() for x in (writers.position, writers.target, writers.share))
    known = tuple(Writer(query, target, share) for query, target, share in zip(*own, strict=True) if query >= 0)
    return RetrievedSlot(int(seen.slots[at, place]), float(seen.weights[at, place]), known)


def slot_rows(trace: SlotReadings, *, reach: int = 10) -> Iterator[dict[str, Any]]:
    """A row for every retrieved slot, as plain data for tables, pages and JSON.

    Args:
        reach: tokens of context on each side of the writing token (10 in the paper's figure 5).
    """
    for reading in trace.readings:
        answer = trace.answer(reading)
        for slot in reading.slots:
            writer = slot.writers[0] if slot.writers else None
            before, query, after = trace.context(writer.query, reach) if writer else ("", "", "")
            yield {
                "layer": reading.layer,
                "position": reading.position,
                "token": trace.labels[reading.position],
                "answer": answer,
                "slot": slot.slot,
                "weight": slot.weight,
                "query": query,
                "target": trace.labels[writer.target] if writer else "",
                "before": before,
                "after": after,
                "hit": trace.hit(reading, slot),
            }


def slot_table(trace: SlotReadings, *, reach: int = 10) -> Any:
    """Every retrieved slot with what its latest write stored, as a `tables.Table`."""
    from .figures import visible
    from .tables import Table

    header = ("token read", "layer", "slot", "weight", "written by", "target", "around it", "")
    rows = []
    for row in slot_rows(trace, reach=reach):
        around = f"{_shown(row['before'])}[{_shown(row['query'])}]{_shown(row['after'])}" if row["query"] else "-"
        rows.append(
            (
                visible(row["token"]),
                row["layer"],
                str(row["slot"]),
                f"{row['weight']:.3f}",
                visible(row["query"]) or "never written",
                visible(row["target"]) or "-",
                around,
                HIT if row["hit"] else "",
            )
        )
    note = (
        f"Of each retrieved slot the latest write. {HIT}: its target is the true next token. All in all "
        f"{100 * trace.hits():.0f} % of the slots, {100 * trace.hit_weight():.0f} % of the weight; "
        f"{100 * trace.hits(last=4):.0f} % of the slots by one of the last four writes."
    )
    return Table(header, tuple(rows), note)


def _shown(text: str) -> str:
    from .figures import visible

    return visible(text).replace(r"\$", "$")
