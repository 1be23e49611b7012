"""A page of what memories did: retrieved slots with their hits, and gates over a text; one self-contained HTML file
without scripts, a server, a network, or other files beside it."""

from __future__ import annotations

import importlib.resources
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from jinja2 import Environment, StrictUndefined

from .figures import visible
from .gates import GateTrace
from .slot_trace import HIT, SlotReadings, slot_rows


@dataclass(frozen=True, kw_only=True)
class MemoryPage:
    """The whole page.

    Attributes:
        title, introduction: of the page.
        slots: title to what was retrieved.
        gates: title to the gates of a text.
        notes: sentences under a part's title, by that title.
    """

    title: str
    introduction: str
    slots: Mapping[str, SlotReadings] = field(default_factory=dict)
    gates: Mapping[str, GateTrace] = field(default_factory=dict)
    notes: Mapping[str, Sequence[str]] = field(default_factory=dict)


def render_memory(page: MemoryPage, *, reach: int = 10) -> str:
    """The page as HTML. All text is escaped.

    Args:
        reach: tokens of context on each side of the token that wrote a slot.
    """
    source = importlib.resources.files(__package__).joinpath("templates/memory.html.j2").read_text("utf-8")
    # autoescape by hand: jinja2 decides by the file's suffix only where it loads files itself
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    parts = [_part(page, title, steps=_steps(trace, reach)) for title, trace in page.slots.items()]
    parts += [_part(page, title, layers=_layers(trace)) for title, trace in page.gates.items()]
    return environment.from_string(source).render(page=page, parts=parts, hit=HIT)


def _part(page: MemoryPage, title: str, **content: Any) -> dict[str, Any]:
    return {"title": title, "notes": page.notes.get(title, ()), "steps": (), "layers": (), **content}


def _steps(trace: SlotReadings, reach: int) -> list[dict[str, Any]]:
    """The retrieved slots of every token that asked, all layers together."""
    names = dict(zip(trace.tokens, trace.labels, strict=True))
    rows = sorted(slot_rows(trace, reach=reach), key=lambda row: row["position"])  # stable: layers stay in order
    found = []
    for _, group in groupby(rows, key=lambda row: row["position"]):
        own = list(group)
        for row in own:
            row.update({name: _plain(row[name]) for name in ("before", "query", "target", "after")})
        answer = own[0]["answer"]
        said = "?" if answer is None else visible(names.get(answer, str(answer)))
        hits = sum(row["hit"] for row in own)
        found.append({"token": _plain(own[0]["token"]), "answer": said, "hits": hits, "rows": own})
    return found


def _plain(text: str) -> str:
    """Visible, without the escapes that figures need."""
    return visible(text).replace(r"\$", "$")


def _layers(trace: GateTrace) -> list[dict[str, Any]]:
    return [
        {"name": name, "mean": sum(gates) / max(1, len(gates)), "tokens": list(zip(trace.labels, gates, strict=True))}
        for name, gates in zip(trace.layers, trace.gates.tolist(), strict=True)
    ]
