"""What `fwpkm-case-studies` reads off a trained model.

Shapes: E questions, L tokens of a haystack, n readings, Q tokens of a question, A of an answer, S = n L + Q + A tokens
of a stream.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from regard.inspect.gates import gate_trace, layer_name
from regard.inspect.slot_trace import RetrievedSlot, SlotReading, SlotReadings, Writer, slot_readings
from regard.nn.memory_trace import WriterTrace, observed

from ..long_text.needle_reading import asked
from ..long_text.needle_text import NeedleText
from ..long_text.streaming import passed

WRITERS = 4  # kept of every slot
DIGITS = 4  # decimals of stored gates


def look_at_slots(
    model: Any, text: NeedleText, length: int, needles: int, count: int, seed: int, reads: int
) -> Iterator[dict[str, Any]]:
    """Read haystacks of L = `length` tokens n times, answer greedily, and yield what was retrieved for the tokens of
    the answers. The chunk is the haystack: each reading is written once, the last one before the question's first token
    is read. A row of kind "layer" for each memory layer has counts over all questions; one of kind "slots" has the
    share of right answers ("exact"), and the slots of the first question that was answered correctly, if any."""
    haystacks, questions, examples = asked(text, length, needles, range(count), seed)
    answers = torch.tensor([text.encode(example.answer) for example in examples])
    spoken, traces = retrieved(model, haystacks, questions, answers.shape[1], reads)
    stream = torch.cat([*[haystacks] * reads, questions, spoken], 1)
    right = (spoken == answers).all(1)
    first = reads * length + questions.shape[1] - 1
    asking = range(first, first + answers.shape[1])
    wanted = [dict(zip(asking, own, strict=True)) for own in answers.tolist()]
    found = [slot_readings(traces, tokens, [""] * len(tokens), asking, answers=wanted[row], row=row)
             for row, tokens in enumerate(stream.tolist())]  # fmt: skip
    place = int(right.int().argmax())
    for name in traces:
        yield {"kind": "layer", "layer": name, **layer_counts(found, right.tolist(), name)}
    yield {**case_row(found[place], bool(right[place])), "exact": right.double().mean().item()}


@torch.no_grad()
def retrieved(model: Any, haystacks: Tensor, questions: Tensor, length: int, reads: int) -> tuple[Tensor, Any]:
    """Return greedy answers [E, A] to questions [E, Q] after n readings of haystacks [E, L], and by memory layer what
    every token retrieved."""
    from regard.models.hybrid.memories import chunk_size

    device, cache = next(model.parameters()).device, None
    given, said = questions.to(device), []
    with chunk_size(model, haystacks.shape[1]), observed(model, lambda slots: WriterTrace(slots, WRITERS)) as seen:
        for _ in range(reads):
            cache = passed(model, cache, memory=True, recurrent=False)
            model(input_ids=haystacks.to(device), cache=cache, logits_to_keep=1)
        for _ in range(length):
            logits = model(input_ids=given, cache=cache, logits_to_keep=1).logits
            given = logits[:, -1:].argmax(-1)
            said.append(given.cpu())
        return torch.cat(said, 1), {layer_name(name): trace.retrieved() for name, trace in seen.items()}


def layer_counts(found: Sequence[SlotReadings], right: list[bool], layer: str) -> dict[str, Any]:
    """Return counts of what one layer retrieved over all questions: hits, hits_of_four (share of the slots to which the
    last write, or one of the last four, gave the true next token); weight (share of the weight on hits); same_query (of
    the written slots that miss, the share whose last writer was the token that asks) and same_by_chance (share of that
    token among all that were read before); never (share of slots never written); mixed (of the right answers, the share
    with a miss, None where there is none)."""
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
        "mixed": mean([seen.hits(1, layer) < 1 for seen in answered]) if answered else None, "answered": len(answered),
    }  # fmt: skip


def case_row(seen: SlotReadings, right: bool) -> dict[str, Any]:
    """Return a question's slots as a row of kind "slots", without labels; `case_of` reads it."""
    readings = [asdict(reading) for reading in seen.readings]
    answers = [list(pair) for pair in sorted((seen.answers or {}).items())]
    return {"kind": "slots", "right": right, "tokens": list(seen.tokens), "answers": answers, "readings": readings}


def case_of(row: Any, words: Sequence[str]) -> SlotReadings:
    """Return the slots of such a row, labelled with words."""
    readings = tuple(
        SlotReading(each["layer"], each["position"], tuple(
            RetrievedSlot(slot["slot"], slot["weight"], tuple(Writer(**writer) for writer in slot["writers"]))
            for slot in each["slots"]
        ))
        for each in row["readings"]
    )  # fmt: skip
    labels = tuple(f" {words[token]}" for token in row["tokens"])
    return SlotReadings(tuple(row["tokens"]), labels, readings, dict(row["answers"]))


def gate_rows(model: Any, tokens: Tensor) -> Iterator[dict[str, Any]]:
    """Yield a row of kind "gates" for each memory layer: the tokens and their gates."""
    trace = gate_trace(model, tokens, [""] * len(tokens))
    for name, gates in zip(trace.layers, trace.gates.double().tolist(), strict=True):
        rounded = [round(gate, DIGITS) for gate in gates]
        yield {"kind": "gates", "layer": name, "tokens": tokens.tolist(), "gates": rounded}
