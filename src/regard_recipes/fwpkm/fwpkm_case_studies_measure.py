"""What the recipe `fwpkm-case-studies` reads off a trained model, as plain data; runs in the process that trained it.

Shapes: E questions, L tokens of a haystack, n readings, Q of a question, A of an answer, S = n L + Q + A of a stream.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from regard.inspect.gates import gate_trace, rank_correlation, token_surprisal
from regard.inspect.slot_trace import SlotReadings, slot_readings
from regard.models.hybrid.memories import chunk_size
from regard.nn.memory_trace import WriterTrace, observed

from ..long_text.streaming import passed

WRITERS = 4
"""Kept of every slot."""
RARE = 0.1
"""The share of tokens that count as rare."""
DIGITS = 4
"""Decimals in the JSON file."""


# Slots -----------------------------------------------------------------------------------------------------------


@torch.no_grad()
def look_at_slots(model: Any, haystacks: Tensor, questions: Tensor, answers: Tensor, *, reads: int) -> dict[str, Any]:
    """Read every haystack n times, answer greedily, and keep what was retrieved for the tokens of the answers.

    The chunk is the haystack, so that each reading is written once, when the next token is there: the last one by the
    question's first token, before it is read. What is retrieved by the question's last token should lead to the first
    token of the answer, and so on.

    Returns:
        `exact` (share of right answers) and, for each memory layer, counts over all questions; `case`: the stream, and
        the retrieved slots of the first question that was answered rightly (of the first of all where none was).
    """
    device = next(model.parameters()).device
    length = haystacks.shape[1]
    with chunk_size(model, length), observed(model, lambda slots: WriterTrace(slots, WRITERS)) as seen:
        cache = None
        for _ in range(reads):
            cache = passed(model, cache, memory=True, recurrent=False)
            model(input_ids=haystacks.to(device), past_key_values=cache, use_cache=True, logits_to_keep=1)
        given, said = questions.to(device), []
        for _ in range(answers.shape[1]):
            logits = model(input_ids=given, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
            given = logits[:, -1:].argmax(-1)
            said.append(given.cpu())
        traces = {name: trace.retrieved() for name, trace in seen.items()}
    spoken = torch.cat(said, 1)
    stream = torch.cat([*[haystacks] * reads, questions, spoken], 1)
    right = (spoken == answers).all(1)
    first = reads * length + questions.shape[1] - 1
    asking = range(first, first + answers.shape[1])
    named = {_layer(name): trace for name, trace in traces.items()}
    found = [
        slot_readings(
            named,
            stream[row].tolist(),
            [""] * stream.shape[1],
            asking,
            answers=dict(zip(asking, answers[row].tolist(), strict=True)),
            row=row,
        )
        for row in range(len(stream))
    ]
    place = int(right.int().argmax())
    return {
        "exact": right.double().mean().item(),
        "layers": {layer: layer_counts(found, right.tolist(), layer) for layer in named},
        "case": {"right": bool(right[place]), **plain(found[place])},
    }


def _layer(name: str) -> str:
    """ "layer 3" of "model.layers.2.memory"."""
    number = next(part for part in name.split(".") if part.isdigit())
    return f"layer {int(number) + 1}"


def layer_counts(found: list[SlotReadings], right: list[bool], layer: str) -> dict[str, Any]:
    """Over all questions, of what one layer retrieved.

    Returns:
        hits, hits_of_four: share of the slots that the last writer, or any of the last four, gave the true next token;
        weight: share of the weight on hits; same_query: of the written slots that do not hit, the share whose last
        writer was the same token as the one that asked, and same_by_chance, the share of such tokens among all that
        were read before; never: share of the slots that nobody wrote; mixed: of right answers, the share in which some
        slot of this layer did not hit.
    """
    mean = lambda values: sum(values) / len(values) if values else 0.0  # noqa: E731
    misses, never, chance = [], [], []
    for seen in found:
        for reading in (r for r in seen.readings if r.layer == layer):
            before = seen.tokens[: reading.position]
            chance.append(before.count(seen.tokens[reading.position]) / len(before))
            for slot in reading.slots:
                never.append(not slot.writers)
                if slot.writers and not seen.hit(reading, slot):
                    misses.append(seen.tokens[slot.writers[0].query] == seen.tokens[reading.position])
    answered = [seen for seen, good in zip(found, right, strict=True) if good]
    return {
        "hits": mean([seen.hits(1, layer) for seen in found]),
        "hits_of_four": mean([seen.hits(WRITERS, layer) for seen in found]),
        "weight": mean([seen.hit_weight(layer) for seen in found]),
        "same_query": mean(misses),
        "same_by_chance": mean(chance),
        "misses": len(misses),
        "never": mean(never),
        "mixed": mean([seen.hits(1, layer) < 1 for seen in answered]),
        "answered": len(answered),
    }


def plain(seen: SlotReadings) -> dict[str, Any]:
    """A trace as plain data, without labels."""
    return {
        "tokens": list(seen.tokens),
        "answers": sorted((seen.answers or {}).items()),
        "readings": [
            {
                "layer": reading.layer,
                "position": reading.position,
                "slots": [
                    {
                        "slot": slot.slot,
                        "weight": round(slot.weight, DIGITS),
                        "writers": [[w.query, w.target, round(w.weight, DIGITS)] for w in slot.writers],
                    }
                    for slot in reading.slots
                ],
            }
            for reading in seen.readings
        ],
    }


# Gates -----------------------------------------------------------------------------------------------------------


def look_at_gates(model: Any, text: Tensor, learned: Tensor, chunk: int, unknown: int) -> dict[str, Any]:
    """The gates on a text, and how they go with how rare a token is where the model learned.

    Args:
        unknown: the token of all words that have none of their own, which has no rarity.

    Returns:
        tokens, bits (how rare each is, NaN for unknown words) and, for each memory layer: gates, their mean and
        standard deviation, the rank correlation with the bits, the means on the rarest tokens (`RARE` of them) and on
        the others, and of the rare ones those on the first and on later occurrences in this text.
    """
    trace = gate_trace(model, text, [""] * len(text), chunk_size=chunk)
    bits = token_surprisal(text, learned, model.config.vocab_size).where(text != unknown, torch.nan)
    rare = bits > bits.nanquantile(1 - RARE)
    before: set[int] = set()
    later = []
    for token in text.tolist():
        later.append(token in before)
        before.add(token)
    again = torch.tensor(later)
    mean = lambda gates, where: gates[where].double().mean().item() if where.any() else None  # noqa: E731
    return {
        "tokens": text.tolist(),
        "bits": [round(x, DIGITS) for x in bits.tolist()],
        "layers": {
            name: {
                "gates": [round(x, DIGITS) for x in gates.tolist()],
                "mean": gates.double().mean().item(),
                "deviation": gates.double().std(correction=0).item(),
                "correlation": rank_correlation(gates.double(), bits),
                "rare": mean(gates, rare),
                "common": mean(gates, ~rare & ~bits.isnan()),
                "rare_first": mean(gates, rare & ~again),
                "rare_again": mean(gates, rare & again),
            }
            for name, gates in zip(trace.layers, trace.gates, strict=True)
        },
    }
