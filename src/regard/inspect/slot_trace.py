"""Which slots a memory read, who had written them, and whether they held the right answer.

"Fast-weight Product Key Memory" (arXiv:2601.00671, section 5.1) shows for each slot that was retrieved at a needle what
the latest write stored there: the query token, the target token and their context, marked [HIT] if the target is the
true next token. Positions count the tokens of one stream, which is all that the memory has read.

Legend: T tokens of the stream.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ..checks import ArgumentError, require
from ..nn.memory_trace import Retrieved

HIT = "[HIT]"


@dataclass(frozen=True)
class Writer:
    """One write into a slot: the position of the token whose query selected the slot, that of the token whose value was
    written, and the fraction of the error by which the write changed this slot."""

    query: int
    target: int
    weight: float


@dataclass(frozen=True)
class RetrievedSlot:
    """A slot that was read: its number, its weight in the reading, and the last writes into it, the latest first."""

    slot: int
    weight: float
    writers: tuple[Writer, ...]


@dataclass(frozen=True)
class SlotReading:
    """The slots that one memory layer retrieved for the token at one position, by decreasing weight."""

    layer: str
    position: int
    slots: tuple[RetrievedSlot, ...]


@dataclass(frozen=True)
class SlotReadings:
    """The slots that the memories of a model retrieved over a part of a stream.

    Attributes:
        tokens, labels: the T tokens of the stream, and the same as text.
        readings: readings by token, and for each token by layer.
        answers: the expected next token by position, where it is not the next token of the stream.
    """

    tokens: tuple[int, ...]
    labels: tuple[str, ...]
    readings: tuple[SlotReading, ...]
    answers: dict[int, int] | None = None

    def __post_init__(self) -> None:
        tokens, labels = len(self.tokens), len(self.labels)
        require(tokens == labels, "SlotReadings", f"{labels} labels for {tokens} tokens, expected one each.")

    def to_dict(self) -> dict[str, Any]:
        """Return the trace without labels as data for JSON."""
        answers = None if self.answers is None else [list(pair) for pair in sorted(self.answers.items())]
        return {"tokens": list(self.tokens), "answers": answers, "readings": [asdict(each) for each in self.readings]}

    @classmethod
    def from_dict(cls, stored: Mapping[str, Any], labels: Sequence[str]) -> "SlotReadings":
        """Return the trace that `to_dict` stored; `labels` are the texts of its tokens."""

        def slot_of(slot: Mapping[str, Any]) -> RetrievedSlot:
            return RetrievedSlot(slot["slot"], slot["weight"], tuple(Writer(**each) for each in slot["writers"]))

        readings = (SlotReading(r["layer"], r["position"], tuple(map(slot_of, r["slots"]))) for r in stored["readings"])
        answers = None if stored["answers"] is None else dict(stored["answers"])
        return cls(tuple(stored["tokens"]), tuple(labels), tuple(readings), answers)

    def answer(self, reading: SlotReading) -> int | None:
        """Return the expected next token of a reading, or None after the last token of the stream."""
        if self.answers is not None and reading.position in self.answers:
            return self.answers[reading.position]
        after = reading.position + 1
        return self.tokens[after] if after < len(self.tokens) else None

    def hit(self, reading: SlotReading, slot: RetrievedSlot, last: int = 1) -> bool:
        """Return whether one of the `last` writes into a slot stored the expected next token."""
        answer = self.answer(reading)
        return answer is not None and any(self.tokens[writer.target] == answer for writer in slot.writers[:last])

    def hits(self, last: int = 1, layer: str | None = None) -> float:
        """Return the share of retrieved slots that are hits, 0 without retrieved slots."""
        hits = [self.hit(reading, slot, last) for reading, slot in self._slots(layer)]
        return sum(hits) / max(1, len(hits))

    def hit_weight(self, layer: str | None = None) -> float:
        """Return the share of the readings' weight on hits of the latest write, 0 without readings."""
        total = right = 0.0
        for reading, slot in self._slots(layer):
            total += slot.weight
            right += slot.weight * self.hit(reading, slot)
        return right / total if total else 0.0

    def _slots(self, layer: str | None) -> list[tuple[SlotReading, RetrievedSlot]]:
        return [(each, slot) for each in self.readings if layer in (None, each.layer) for slot in each.slots]

    @property
    def layers(self) -> tuple[str, ...]:
        """Return the names of the layers in the order in which they read."""
        return tuple(dict.fromkeys(reading.layer for reading in self.readings))

    def context(self, position: int, reach: int) -> tuple[str, str, str]:
        """Return the text of `reach` tokens before a position, of the token there, and of as many after it."""
        before = "".join(self.labels[max(0, position - reach) : position])
        return before, self.labels[position], "".join(self.labels[position + 1 : position + 1 + reach])


def slot_readings(
    retrieved: Mapping[str, Retrieved],
    tokens: Sequence[int],
    labels: Sequence[str],
    positions: Collection[int],
    *,
    answers: Mapping[int, int] | None = None,
    row: int = 0,
) -> SlotReadings:
    """Return the slots that the memories of a model retrieved at some positions.

    Args:
        retrieved: records of `regard.nn.memory_trace.WriterTrace` by layer.
        tokens, labels: all tokens of the row since the trace began, and the same as text.
        positions: positions of the querying tokens.
        answers: as in `SlotReadings`.
        row: row of the batch.

    Raises:
        ArgumentError: labels do not match the tokens, or a position is out of range.
    """
    if any(not 0 <= position < len(tokens) for position in positions):
        raise ArgumentError(f"slot_readings: positions {sorted(positions)} are out of range for {len(tokens)} tokens.")
    wanted, readings = set(positions), []
    for layer, seen in retrieved.items():
        for at in (seen.row == row).nonzero()[:, 0].tolist():
            position = int(seen.position[at])
            if position in wanted:
                slots = (_retrieved_slot(seen, at, index) for index in range(seen.slots.shape[1]))
                readings.append(SlotReading(layer, position, tuple(sorted(slots, key=lambda slot: -slot.weight))))
    readings.sort(key=lambda reading: reading.position)  # stable: layers stay in order
    return SlotReadings(tuple(tokens), tuple(labels), tuple(readings), dict(answers) if answers else None)


def _retrieved_slot(seen: Retrieved, at: int, index: int) -> RetrievedSlot:
    writers = seen.writers
    values = (x[at, index].tolist() for x in (writers.position, writers.target, writers.share))
    known = tuple(Writer(query, target, share) for query, target, share in zip(*values, strict=True) if query >= 0)
    return RetrievedSlot(int(seen.slots[at, index]), float(seen.weights[at, index]), known)


def slot_rows(trace: SlotReadings, *, reach: int = 10) -> Iterator[dict[str, Any]]:
    """Yield a row of plain data for every retrieved slot, with `reach` tokens of context on each side of the writing
    token (10 in the paper's figure 5)."""
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
    """Return a `tables.Table` of the retrieved slots with what their latest writes stored."""
    from .tables import Table, visible

    header = ("token read", "layer", "slot", "weight", "written by", "target", "around it", "")
    rows = []
    for row in slot_rows(trace, reach=reach):
        before, query, after = (visible(row[name]) for name in ("before", "query", "after"))
        written = visible(row["query"]) or "never written", visible(row["target"]) or "-"
        around = f"{before}[{query}]{after}" if row["query"] else "-"
        read = visible(row["token"]), row["layer"], str(row["slot"]), f"{row['weight']:.3f}"
        rows.append((*read, *written, around, HIT if row["hit"] else ""))
    note = (
        f"The latest write into each retrieved slot. {HIT}: its target is the true next token, in "
        f"{100 * trace.hits():.0f} % of the slots with {100 * trace.hit_weight():.0f} % of the weight; for one of the "
        f"last four writes, in {100 * trace.hits(last=4):.0f} % of the slots."
    )
    return Table(header, tuple(rows), note)
