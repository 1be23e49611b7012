"""`regard reproduce fwpkm-case-studies`: slots and gates, counted by hand, and what is claimed of them."""

from __future__ import annotations

import math
import re
from typing import Any

import pandas as pd
import pytest
import torch
from tiny_runs import tiny
from torch import Tensor

from regard.inspect.slot_trace import RetrievedSlot, SlotReading, SlotReadings, Writer
from regard.models import HybridForCausalLM
from regard.models.hybrid.memories import memory_modules
from regard_recipes.fwpkm import _fwpkm_looks as looks
from regard_recipes.fwpkm.fwpkm_case_studies import FwPKMCaseStudies
from regard_recipes.lib.recipe import Results, select


def model() -> Any:
    torch.manual_seed(0)
    made = FwPKMCaseStudies(FwPKMCaseStudies.configure("quick"))
    return HybridForCausalLM(made.model_config(40)).eval()


def test_the_model_is_the_papers() -> None:
    found = model()
    assert list(memory_modules(found)) == [1, 3]
    assert found.config.memories == "fwpkm@1,3+pkm@2"
    paper = FwPKMCaseStudies(FwPKMCaseStudies.configure("paper", device="cpu"))
    assert paper.model_config(32_000).memories == "fwpkm@2,10+pkm@6"


def asked(rows: int, length: int) -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(1)
    number = lambda *size: torch.randint(40, size, generator=draw)  # noqa: E731
    return number(rows, length), number(rows, 3), number(rows, 2)


@torch.no_grad()
def test_answers_are_those_of_the_uncached_stream() -> None:
    """With one reading: the haystack as a chunk, then the question; no state but what one pass has anyway."""
    found, (haystacks, questions, answers) = model(), asked(2, 12)
    seen = looks.look_at_slots(found, asked(2, 12), reads=1)
    for memory in memory_modules(found).values():
        memory.chunk_size = 12
    stream = torch.cat([haystacks, questions], 1)
    for _ in range(2):
        logits = found(input_ids=stream, use_cache=False).logits
        stream = torch.cat([stream, logits[:, -1:].argmax(-1)], 1)
    case = select(pd.DataFrame(seen["rows"]), kind="case").iloc[0]
    assert case["tokens"] == stream[0].tolist()
    assert case["answers"] == [[14, int(answers[0, 0])], [15, int(answers[0, 1])]]
    labelled = looks.case_of(case, [f"w{i}" for i in range(40)])
    assert looks.case_row(labelled, bool(case["right"])) == seen["rows"][-1]
    assert seen["exact"] == (stream[:, -2:] == answers).all(1).double().mean()


def test_writers_are_of_the_readings_before() -> None:
    """After two readings of 12 tokens the writers kept are tokens of the stream, each with the next one as target."""
    *layers, case = looks.look_at_slots(model(), asked(2, 12), reads=2)["rows"]
    assert [layer["layer"] for layer in layers] == ["layer 2", "layer 4"]
    assert [reading["position"] for reading in case["readings"]] == [26, 26, 27, 27]
    writers = [w for reading in case["readings"] for slot in reading["slots"] for w in slot["writers"]]
    assert writers
    assert all(w["target"] == w["query"] + 1 and 0 <= w["query"] < 24 for w in writers)
    assert max(w["query"] for w in writers) >= 12
    for reading in case["readings"]:
        assert sum(slot["weight"] for slot in reading["slots"]) == pytest.approx(1, abs=1e-3)


def test_layers_are_counted() -> None:
    hit, same, other = Writer(0, 1, 1.0), Writer(2, 3, 1.0), Writer(1, 2, 1.0)
    tokens, labels = (5, 6, 5, 7, 5, 6), ("",) * 6
    first = SlotReading("low", 4, (RetrievedSlot(0, 0.5, (hit,)), RetrievedSlot(1, 0.5, (same, hit))))
    second = SlotReading("low", 4, (RetrievedSlot(2, 0.75, (other,)), RetrievedSlot(3, 0.25, ())))
    third = SlotReading("high", 4, (RetrievedSlot(2, 1.0, (other,)),))
    found = [SlotReadings(tokens, labels, (first, third), {4: 6}), SlotReadings(tokens, labels, (second,), {4: 6})]
    counts = looks.layer_counts(found, [True, False], "low")
    assert counts["hits"] == pytest.approx((1 / 2 + 0) / 2)
    assert counts["hits_of_four"] == pytest.approx((1 + 0) / 2)
    assert counts["weight"] == pytest.approx((0.5 + 0) / 2)
    assert counts["same_query"] == 1 / 2  # the second slot was written by the token that asks, the third was not
    assert (counts["misses"], counts["never"]) == (2, 1 / 4)
    assert counts["same_by_chance"] == 2 / 4  # the token 5 among 5, 6, 5, 7
    assert (counts["mixed"], counts["answered"]) == (1.0, 1)
    assert looks.layer_counts(found, [False, False], "low")["mixed"] == 0.0


def test_gates_are_set_beside_rarity() -> None:
    found = model()
    text = torch.tensor([1, 2, 3, 1, 2, 1, 4, 4, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 0, 2])
    learned = torch.tensor([1] * 50 + [2] * 10 + [3] * 5)
    seen = looks.look_at_gates(found, text, learned, 4, 0)
    first, *layers = seen["rows"]
    bits = first["bits"]
    assert bits[0] < bits[1] < bits[2] < bits[6]
    assert math.isnan(bits[18])
    gates = {}
    handles = [
        memory.hook_gate.register_forward_hook(lambda m, i, o, d=depth: gates.__setitem__(f"layer {d + 1}", o[0]))
        for depth, memory in memory_modules(found).items()
    ]
    for memory in memory_modules(found).values():
        memory.chunk_size = 4
    with torch.no_grad():
        found(input_ids=text[None], use_cache=False)
    for handle in handles:
        handle.remove()
    assert [layer["layer"] for layer in layers] == list(gates)
    for layer in layers:
        own = gates[layer["layer"]].double()
        assert layer["gates"] == pytest.approx(own.tolist(), abs=1e-4)
        assert layer["mean"] == pytest.approx(float(own.mean()))
        assert layer["deviation"] == pytest.approx(float(((own - own.mean()) ** 2).mean().sqrt()))
        assert layer["rare"] == pytest.approx(float((own[6] + own[7]) / 2))
        assert layer["rare_first"] == pytest.approx(float(own[6]))
        assert layer["rare_again"] == pytest.approx(float(own[7]))
        others = [i for i in range(20) if i not in (6, 7, 18)]
        assert layer["common"] == pytest.approx(float(own[others].mean()))


def test_a_run_has_every_row_and_a_page() -> None:
    made, results = tiny("fwpkm-case-studies")
    layers = results.select(kind="layer")
    named = list(zip(layers["task"], layers["layer"], strict=True))
    assert named == [(task, layer) for task in ("needles", "text") for layer in ("layer 2", "layer 4")]
    assert len(results.select(kind="gates")["tokens"].iloc[0]) == 50
    html = (made.config.out / "fwpkm-case-studies-look.html").read_text()
    assert html.count("<details") == 2  # one for each pair of digits of the answer
    assert len(re.findall(r"mean gate \d\.\d\d", html)) == 2
    assert html.count("<span title=") == 2 * 30


def results_of(low: dict[str, float], high: dict[str, float]) -> Results:
    """Two seeds; `low` and `high` change what the lower and the higher memory did."""
    slots = {"hits": 0.7, "hits_of_four": 0.9, "weight": 0.8, "same_query": 0.6, "same_by_chance": 0.1, "never": 0.0,
             "mixed": 0.9, "answered": 40}  # fmt: skip
    gates = {"gates": [0.5, 0.25], "mean": 0.9, "deviation": 0.1, "correlation": 0.3, "rare": 0.8, "common": 0.4,
             "rare_first": 0.7, "rare_again": math.nan}  # fmt: skip
    writers = [{"query": 0, "target": 1, "weight": 1.0}]
    case = {"right": True, "tokens": [0, 1, 0, 1], "answers": [[2, 1]], "readings": [
        {"layer": "layer 2", "position": 2, "slots": [{"slot": 3, "weight": 1.0, "writers": writers}]}]}  # fmt: skip
    rows: list[dict[str, Any]] = []
    for seed in (0, 1):
        needled, text = {"task": "needles", "seed": seed}, {"task": "text", "seed": seed}
        rows += [{**needled, "kind": "run", "exact": 0.5}, {**needled, "kind": "case", **case}]
        rows += [{**text, "kind": "gates", "tokens": [0, 1], "bits": [1.0, math.nan]}]
        for name, changes in (("layer 2", low), ("layer 4", high)):
            rows += [{"kind": "layer", "layer": name, **base, **own, **changes} for base, own in
                     ((needled, slots), (text, gates))]  # fmt: skip
    return Results(pd.DataFrame(rows), {"words": ["K07", "4"]}, {})


@pytest.mark.parametrize(
    ("low", "high", "verdicts"),
    [
        ({}, {"mean": 0.4, "deviation": 0.3}, ["holds"] * 5),
        ({"hits": 0.2, "same_query": 0.1, "mixed": 0.0}, {"correlation": -0.2}, ["fails"] * 5),
        ({}, {"mean": 0.88, "rare": 0.42}, ["holds"] * 3 + ["fails"] * 2),  # gates have to differ clearly
    ],
)
def test_claims_follow_the_numbers(low: dict[str, float], high: dict[str, float], verdicts: list[str]) -> None:
    results = results_of(low, high)
    paper = FwPKMCaseStudies(FwPKMCaseStudies.configure("paper", device="cpu"))
    assert [claim.verdict for claim in paper.claims(results)] == verdicts
    small = FwPKMCaseStudies(FwPKMCaseStudies.configure("quick"))
    assert [claim.verdict for claim in small.claims(results)] == [*verdicts[:3], *["not testable at this size"] * 2]


def test_tables_and_the_case_are_told_in_words() -> None:
    made, results = FwPKMCaseStudies(FwPKMCaseStudies.configure("small")), results_of({}, {})
    assert made.case(results)[1] == "The answer 4, given correctly as 4, after 4 readings"
    slots, gates, case = made.tables(results).values()
    assert slots.rows[0] == ("layer 2", "70%", "90%", "80%", "60%", "10%", "0%", "90%")
    assert gates.rows[1] == ("layer 4", "0.90", "0.10", "0.30", "0.80", "0.40", "0.70", "–")
    (row,) = case.rows
    assert (row[0], row[1], row[2], row[-1]) == ("␣K07", "layer 2", "3", "[HIT]")
