"""What `fwpkm-case-studies` reads off a trained model.

Shapes: E questions, L tokens of a haystack, n readings, Q tokens of a question, A of an answer, S = n L + Q + A tokens
of a stream.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from regard.inspect.gates import gate_trace, layer_name, rank_correlation, token_surprisal
from regard.inspect.slot_trace import RetrievedSlot, SlotReading, SlotReadings, Writer, slot_readings
from regard.nn.memory_trace import WriterTrace, observed

from ..long_text.streaming import passed

WRITERS = 4  # kept of every slot
RARE = 0.1  # share of the tokens that count as rare
DIGITS = 4  # decimals of stored gates


@torch.no_grad()
def look_at_slots(model: Any, asked: tuple[Tensor, Tensor, Tensor], reads: int) -> dict[str, Any]:
    """Read every haystack n times, answer greedily, and keep what was retrieved for the tokens of the answers. The
    chunk is the haystack: each reading is written once, the last one before the question's first token is read.

    Args:
        asked: haystacks [E, L], questions [E, Q] and answers [E, A].

    Returns:
        `exact`, the share of right answers, and rows: one of kind "layer" for each memory layer with counts over all
        questions, and one of kind "case" with the stream and the retrieved slots of the first question that was
        answered correctly (of the first of all if none was).
    """
    from regard.models.hybrid.memories import chunk_size  # imports transformers, which takes seconds

    haystacks, questions, answers = asked
    device, length = next(model.parameters()).device, haystacks.shape[1]
    with chunk_size(model, length), observed(model, lambda slots: WriterTrace(slots, WRITERS)) as seen:
        cache = None
        for _ in range(reads):
            cache = passed(model, cache, memory=True, recurrent=False)
            model(input_ids=haystacks.to(device), cache=cache, logits_to_keep=1)
        given, said = questions.to(device), []
        for _ in range(answers.shape[1]):
            logits = model(input_ids=given, cache=cache, logits_to_keep=1).logits
            given = logits[:, -1:].argmax(-1)
            said.append(given.cpu())
        traces = {layer_name(name): trace.retrieved() for name, trace in seen.items()}
    spoken = torch.cat(said, 1)
    stream = torch.cat([*[haystacks] * reads, questions, spoken], 1)
    right = (spoken == answers).all(1)
    first = reads * length + questions.shape[1] - 1
    asking = range(first, first + answers.shape[1])
    wanted = [dict(zip(asking, own, strict=True)) for own in answers.tolist()]
    found = [slot_readings(traces, tokens, [""] * len(tokens), asking, answers=wanted[row], row=row)
             for row, tokens in enumerate(stream.tolist())]  # fmt: skip
    place = int(right.int().argmax())
    rows = [{"kind": "layer", "layer": name, **layer_counts(found, right.tolist(), name)} for name in traces]
    return {"exact": right.double().mean().item(), "rows": [*rows, case_row(found[place], bool(right[place]))]}


def layer_counts(found: list[SlotReadings], right: list[bool], layer: str) -> dict[str, Any]:
    """Return counts of what one layer retrieved over all questions.

    Returns:
        hits, hits_of_four: share of the slots to which the last write, or one of the last four, gave the true next
        token; weight: share of the weight on hits; same_query: of the written slots that miss, the share whose last
        writer was the token that asks, and same_by_chance, the share of that token among all that were read before;
        never: share of the slots that were never written; mixed: of the right answers, the share with a miss.
    """
    mean = lambda values: sum(values) / len(values) if values else 0.0  # noqa: E731
    misses, never, chance = [], [], []
    for seen in found:
        for reading in (r for r in seen.readings if r.layer == layer):
            before, asks = seen.tokens[: reading.position], seen.tokens[reading.position]
            chance.append(before.count(asks) / len(before))
            never += [not slot.writers for slot in reading.slots]
            missed = [slot for slot in reading.slots if slot.writers and not seen.hit(reading, slot)]
            misses += [seen.tokens[slot.writers[0].query] == asks for slot in missed]
    answered = [seen for seen, good in zip(found, right, strict=True) if good]
    return {
        "hits": mean([seen.hits(1, layer) for seen in found]),
        "hits_of_four": mean([seen.hits(WRITERS, layer) for seen in found]),
        "weight": mean([seen.hit_weight(layer) for seen in found]),
        "same_query": mean(misses), "same_by_chance": mean(chance), "misses": len(misses), "never": mean(never),
        "mixed": mean([seen.hits(1, layer) < 1 for seen in answered]), "answered": len(answered),
    }  # fmt: skip


def case_row(seen: SlotReadings, right: bool) -> dict[str, Any]:
    """Return a question's slots as a row, without labels; `case_of` reads it."""
    readings = [asdict(reading) for reading in seen.readings]
    answers = [list(pair) for pair in sorted((seen.answers or {}).items())]
    return {"kind": "case", "right": right, "tokens": list(seen.tokens), "answers": answers, "readings": readings}


def case_of(row: Any, words: Sequence[str]) -> SlotReadings:
    """Return the slots of a row of kind "case", labelled with words."""
    readings = tuple(
        SlotReading(each["layer"], each["position"], tuple(
            RetrievedSlot(slot["slot"], slot["weight"], tuple(Writer(**writer) for writer in slot["writers"]))
            for slot in each["slots"]
        ))
        for each in row["readings"]
    )  # fmt: skip
    labels = tuple(f" {words[token]}" for token in row["tokens"])
    return SlotReadings(tuple(row["tokens"]), labels, readings, dict(row["answers"]))


def look_at_gates(model: Any, text: Tensor, learned: Tensor, chunk: int, unknown: int) -> dict[str, Any]:
    """Return the gates on a text, and how they go with how rare a token is where the model learned.

    Args:
        unknown: the token of all words that have none of their own, which has no rarity.

    Returns:
        Rows: one of kind "gates" with tokens and bits (how rare each is, NaN for unknown words); one of kind "layer"
        for each memory layer with its gates, their mean and standard deviation, the rank correlation with the bits, and
        the means on the rarest tokens (`RARE` of them), the others, and first and later occurrences of the rare ones.
    """
    trace = gate_trace(model, text, [""] * len(text), chunk_size=chunk)
    bits = token_surprisal(text, learned, model.config.vocab_size).where(text != unknown, torch.nan)
    rare = bits > bits.nanquantile(1 - RARE)
    tokens: list[int] = text.tolist()
    first = {token: place for place, token in reversed(list(enumerate(tokens)))}
    again = torch.tensor([place > first[token] for place, token in enumerate(tokens)])
    where = {"rare": rare, "common": ~rare & ~bits.isnan(), "rare_first": rare & ~again, "rare_again": rare & again}
    rounded = lambda values: [round(x, DIGITS) for x in values.tolist()]  # noqa: E731
    rows: list[dict[str, Any]] = [{"kind": "gates", "tokens": tokens, "bits": rounded(bits)}]
    for name, gates in zip(trace.layers, trace.gates.double(), strict=True):
        means = {part: gates[chosen].mean().item() for part, chosen in where.items()}
        rows.append({
            "kind": "layer", "layer": name, "gates": rounded(gates),
            "mean": gates.mean().item(), "deviation": gates.std(correction=0).item(),
            "correlation": rank_correlation(gates, bits), **means,
        })  # fmt: skip
    return {"rows": rows}
