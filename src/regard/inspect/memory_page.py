"""A page on memory layers: retrieved slots with their hits, and gates over a text, as one self-contained HTML file."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from .figures import visible
from .gates import GateTrace
from .report import template
from .slot_trace import HIT, SlotReadings, slot_rows


@dataclass(frozen=True, kw_only=True)
class MemoryPage:
    """The whole page: its parts, retrieved slots and gates of texts, by title, and paragraphs below these titles."""

    title: str
    introduction: str
    slots: Mapping[str, SlotReadings] = field(default_factory=dict)
    gates: Mapping[str, GateTrace] = field(default_factory=dict)
    notes: Mapping[str, Sequence[str]] = field(default_factory=dict)


def render_memory(page: MemoryPage, *, reach: int = 10) -> str:
    """Return the page as HTML, with all text escaped and `reach` tokens of context on each side of a writing token."""
    parts = [_part(page, title, steps=_steps(trace, reach)) for title, trace in page.slots.items()]
    parts += [_part(page, title, layers=_layers(trace)) for title, trace in page.gates.items()]
    return template("memory.html.j2").render(page=page, parts=parts, hit=HIT)


def _part(page: MemoryPage, title: str, **content: Any) -> dict[str, Any]:
    return {"title": title, "notes": page.notes.get(title, ()), "steps": (), "layers": (), **content}


def _steps(trace: SlotReadings, reach: int) -> list[dict[str, Any]]:
    """Return the retrieved slots of every querying token, with all layers together."""
    names = dict(zip(trace.tokens, trace.labels, strict=True))
    rows = sorted(slot_rows(trace, reach=reach), key=lambda row: row["position"])  # stable: layers stay in order
    steps = []
    for _, group in groupby(rows, key=lambda row: row["position"]):
        slots = list(group)
        for row in slots:
            row.update({name: visible(row[name]) for name in ("before", "query", "target", "after")})
        answer = slots[0]["answer"]
        label = "?" if answer is None else visible(names.get(answer, str(answer)))
        hits = sum(row["hit"] for row in slots)
        steps.append({"token": visible(slots[0]["token"]), "answer": label, "hits": hits, "rows": slots})
    return steps


def _layers(trace: GateTrace) -> list[dict[str, Any]]:
    return [
        {"name": name, "mean": sum(gates) / max(1, len(gates)), "tokens": list(zip(trace.labels, gates, strict=True))}
        for name, gates in zip(trace.layers, trace.gates.tolist(), strict=True)
    ]
