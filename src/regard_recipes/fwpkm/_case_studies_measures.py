"""Measure which slots answer a needle's question, and the gates over a text; part of the recipe fwpkm-case-studies.

Shapes: E questions, L tokens of a haystack, n readings, Q tokens of a question, A of an answer.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from regard.inspect.gates import gate_trace, layer_name
from regard.inspect.slot_trace import SlotReadings, slot_readings
from regard.nn.memory_trace import WriterTrace, observed

from ..long_text.needle_reading import asked, greedy
from ..long_text.needle_text import NeedleText

WRITERS = 4  # kept of every slot


@torch.no_grad()
def slot_rows(
    model: Any, text: NeedleText, *, length: int, needles: int, count: int, seed: int, reads: int
) -> Iterator[dict[str, Any]]:
    """Read haystacks [E, L] n times, answer greedily, and yield what was retrieved for the tokens of the answers. The
    chunk is the haystack: each reading is written once, the last one before the question's first token is read. A row
    of kind "layer" for each memory layer has counts over all questions; one of kind "slots" has the share of right
    answers ("exact"), and the slots of the first question that was answered correctly, if any."""
    from regard.models.hybrid.memories import chunk_size, keep_memory

    haystacks, questions, examples = asked(text, length, needles, range(count), seed)
    answers, cache = torch.tensor([text.encode(example.answer) for example in examples]), None
    with chunk_size(model, length), observed(model, lambda slots: WriterTrace(slots, WRITERS)) as traces:
        for _ in range(reads):
            cache = keep_memory(model, cache)
            model(input_ids=haystacks.to(model.device), cache=cache, logits_to_keep=1)
        spoken = greedy(model, questions.to(model.device), answers.shape[1], cache)
    retrieved = {layer_name(name): trace.retrieved() for name, trace in traces.items()}
    right = (spoken == answers).all(1)
    first = reads * length + questions.shape[1] - 1
    asking, readings = range(first, first + answers.shape[1]), []
    for row, tokens in enumerate(torch.cat([*[haystacks] * reads, questions, spoken], 1).tolist()):
        wanted = dict(zip(asking, answers[row].tolist(), strict=True))
        readings.append(slot_readings(retrieved, tokens, [""] * len(tokens), asking, answers=wanted, row=row))
    for name in retrieved:
        yield {"kind": "layer", "layer": name, **layer_counts(readings, right.tolist(), name)}
    shown = int(right.int().argmax())
    yield {"kind": "slots", "right": bool(right[shown]), **readings[shown].to_dict(),
           "exact": right.double().mean().item()}  # fmt: skip


def layer_counts(readings: Sequence[SlotReadings], right: list[bool], layer: str) -> dict[str, Any]:
    """Return counts of what one layer retrieved over all questions: hits, hits_of_four (share of the slots to which the
    last write, or one of the last four, gave the true next token); weight (share of the weight on hits); same_query (of
    the written slots that miss, the share whose last writer was the token that asks) and same_by_chance (share of that
    token among all that were read before); never (share of slots never written); mixed (of the right answers, the share
    with a miss, None where there is none)."""
    mean = lambda values: sum(values) / len(values) if values else 0.0  # noqa: E731
    of_layer = [(seen, reading) for seen in readings for reading in seen.readings if reading.layer == layer]
    slots = [(seen, seen.tokens[reading.position], slot, seen.hit(reading, slot))
             for seen, reading in of_layer for slot in reading.slots]  # fmt: skip
    missed = [seen.tokens[slot.writers[0].query] == asks for seen, asks, slot, hit in slots if slot.writers and not hit]
    chance = [seen.tokens[: at.position].count(seen.tokens[at.position]) / at.position for seen, at in of_layer]
    answered = [seen for seen, good in zip(readings, right, strict=True) if good]
    return {
        "hits": mean([seen.hits(1, layer) for seen in readings]),
        "hits_of_four": mean([seen.hits(WRITERS, layer) for seen in readings]),
        "weight": mean([seen.hit_weight(layer) for seen in readings]),
        "same_query": mean(missed), "same_by_chance": mean(chance), "misses": len(missed),
        "never": mean([not slot.writers for _, _, slot, _ in slots]),
        "mixed": mean([seen.hits(1, layer) < 1 for seen in answered]) if answered else None, "answered": len(answered),
    }  # fmt: skip


def gate_rows(model: Any, tokens: Tensor) -> Iterator[dict[str, Any]]:
    """Yield a row of kind "gates" for each memory layer: the tokens and their gates."""
    trace = gate_trace(model, tokens, [""] * len(tokens))
    for name, gates in zip(trace.layers, trace.gates.double().tolist(), strict=True):
        yield {"kind": "gates", "layer": name, "tokens": tokens.tolist(), "gates": [round(gate, 4) for gate in gates]}
