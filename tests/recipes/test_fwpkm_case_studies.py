"""`regard reproduce fwpkm-case-studies`: slots and gates, counted by hand, and what is said of them."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from regard.cli import main
from regard.inspect.slot_trace import RetrievedSlot, SlotReading, SlotReadings, Writer
from regard.models import HybridForCausalLM
from regard.models.hybrid.memories import memory_modules
from regard_recipes.fwpkm import fwpkm_case_studies as recipe
from regard_recipes.fwpkm import fwpkm_case_studies_measure as measure
from regard_recipes.fwpkm import fwpkm_case_studies_output as shown
from regard_recipes.lib.language_runs import LanguageRun

SMALL = (
    "--quick --steps 2 --width 16 --sub-keys 8 --memory-dim 8 --top-k 2 --context 64 --chunk 16 --gate-chunk 4 "
    "--haystack 40 --questions 3 --reads 2 --examples 6 --words 60 --gate-tokens 50 --drawn 30"
)
TINY = SMALL.split()


def model(**changes: object) -> Any:
    torch.manual_seed(0)
    config = recipe.check(recipe.FwPKMCaseStudiesConfig(quick=True, **changes))
    return HybridForCausalLM(recipe.model_config(config, 40)).eval()


def test_the_model_is_the_papers() -> None:
    found = model()
    assert list(memory_modules(found)) == [1, 3]
    assert found.config.memories == "fwpkm@1,3+pkm@2"
    paper = recipe.check(recipe.FwPKMCaseStudiesConfig(size="paper", device="cpu", dtype="float32"))
    assert recipe.model_config(paper, 32_000).memories == "fwpkm@2,10+pkm@6"
    assert paper.gate_chunk == 32


# Slots -----------------------------------------------------------------------------------------------------------


def asked(rows: int, length: int) -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(1)
    number = lambda *size: torch.randint(40, size, generator=draw)  # noqa: E731
    return number(rows, length), number(rows, 3), number(rows, 2)


@torch.no_grad()
def test_answers_are_those_of_the_uncached_stream() -> None:
    """With one reading: the haystack as a chunk, then the question; no state but what one pass has anyway."""
    found, (haystacks, questions, answers) = model(), asked(2, 12)
    seen = measure.look_at_slots(found, haystacks, questions, answers, reads=1)
    for memory in memory_modules(found).values():
        memory.chunk_size = 12
    stream = torch.cat([haystacks, questions], 1)
    for _ in range(2):
        logits = found(input_ids=stream, use_cache=False).logits
        stream = torch.cat([stream, logits[:, -1:].argmax(-1)], 1)
    case = seen["case"]
    assert case["tokens"] == stream[0].tolist()
    assert case["answers"] == [(14, int(answers[0, 0])), (15, int(answers[0, 1]))]
    assert seen["exact"] == (stream[:, -2:] == answers).all(1).double().mean()


def test_writers_are_of_the_readings_before() -> None:
    """After two readings of 12 tokens the writers kept are tokens of the stream, each with the next one as target."""
    found, given = model(), asked(2, 12)
    case = measure.look_at_slots(found, *given, reads=2)["case"]
    layers = {reading["layer"] for reading in case["readings"]}
    assert layers == {"layer 2", "layer 4"}
    assert [reading["position"] for reading in case["readings"]] == [26, 26, 27, 27]
    writers = [w for reading in case["readings"] for slot in reading["slots"] for w in slot["writers"]]
    assert writers
    assert all(target == query + 1 and 0 <= query < 24 for query, target, _ in writers)
    assert max(query for query, _, _ in writers) >= 12
    for reading in case["readings"]:
        assert sum(slot["weight"] for slot in reading["slots"]) == pytest.approx(1, abs=1e-3)


def test_layers_are_counted() -> None:
    hit, same, other = Writer(0, 1, 1.0), Writer(2, 3, 1.0), Writer(1, 2, 1.0)
    tokens, labels = (5, 6, 5, 7, 5, 6), ("",) * 6
    first = SlotReading("low", 4, (RetrievedSlot(0, 0.5, (hit,)), RetrievedSlot(1, 0.5, (same, hit))))
    second = SlotReading("low", 4, (RetrievedSlot(2, 0.75, (other,)), RetrievedSlot(3, 0.25, ())))
    third = SlotReading("high", 4, (RetrievedSlot(2, 1.0, (other,)),))
    found = [SlotReadings(tokens, labels, (first, third), {4: 6}), SlotReadings(tokens, labels, (second,), {4: 6})]
    counts = measure.layer_counts(found, [True, False], "low")
    assert counts["hits"] == pytest.approx((1 / 2 + 0) / 2)
    assert counts["hits_of_four"] == pytest.approx((1 + 0) / 2)
    assert counts["weight"] == pytest.approx((0.5 + 0) / 2)
    assert counts["same_query"] == 1 / 2  # the second slot was written by the token that asks, the third was not
    assert (counts["misses"], counts["never"]) == (2, 1 / 4)
    assert counts["same_by_chance"] == 2 / 4  # the token 5 among 5, 6, 5, 7
    assert (counts["mixed"], counts["answered"]) == (1.0, 1)
    assert measure.layer_counts(found, [False, False], "low")["mixed"] == 0.0


# Gates -----------------------------------------------------------------------------------------------------------


def test_gates_are_set_beside_rarity() -> None:
    found = model()
    text = torch.tensor([1, 2, 3, 1, 2, 1, 4, 4, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 0, 2])
    learned = torch.tensor([1] * 50 + [2] * 10 + [3] * 5)
    seen = measure.look_at_gates(found, text, learned, 4, 0)
    bits = seen["bits"]
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
    assert seen["layers"].keys() == gates.keys()
    for name, layer in seen["layers"].items():
        own = gates[name].double()
        assert layer["gates"] == pytest.approx(own.tolist(), abs=1e-4)
        assert layer["mean"] == pytest.approx(float(own.mean()))
        assert layer["deviation"] == pytest.approx(float(((own - own.mean()) ** 2).mean().sqrt()))
        assert layer["rare"] == pytest.approx(float((own[6] + own[7]) / 2))
        assert layer["rare_first"] == pytest.approx(float(own[6]))
        assert layer["rare_again"] == pytest.approx(float(own[7]))
        others = [i for i in range(20) if i not in (6, 7, 18)]
        assert layer["common"] == pytest.approx(float(own[others].mean()))


# The recipe ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("cases") / "out"
    assert main(["reproduce", "fwpkm-case-studies", "--out", str(out), *TINY]) == 0
    return out


def test_the_folder_is_complete(tiny: Path) -> None:
    found = json.loads((tiny / "fwpkm-case-studies.json").read_text())
    needled, text = found["runs"]
    assert (needled["name"][-11:], text["name"][-8:]) == (" on needles", " on text")
    assert needled["extra"]["layers"].keys() == text["extra"]["layers"].keys() == {"layer 2", "layer 4"}
    assert len(text["extra"]["tokens"]) == 50
    for name in ("slots", "gates", "rarity"):
        assert (tiny / f"fwpkm-case-studies-{name}.png").read_bytes().startswith(b"\x89PNG")
    html = (tiny / "fwpkm-case-studies.html").read_text()
    assert html.count("<details") == 2  # one for each pair of digits of the answer
    assert len(re.findall(r"mean gate \d\.\d\d", html)) == 2
    assert html.count("<span title=") == 2 * 30
    markdown = (tiny / "fwpkm-case-studies.md").read_text()
    assert markdown.count("| layer 2 |") >= 2
    assert "One answer, slot by slot" in markdown


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--gate-chunk 1", "--gate-chunk is 1, expected at least 2"),
        ("--questions 0", "--questions is 0, expected at least 1"),
        ("--gate-tokens 90000000", "words of the text are held out"),
        ("--layers 0", "num_hidden_layers"),
    ],
)
def test_mistakes(flags: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["reproduce", "fwpkm-case-studies", "--quick", "--out", str(tmp_path / "o"), *flags.split()])
    assert code != 0
    assert said in re.sub(r"\s+", " ", capsys.readouterr().err)


# Verdicts --------------------------------------------------------------------------------------------------------


def layer(kind: str, **changes: float | None) -> dict[str, Any]:
    slots = {
        "hits": 0.7, "hits_of_four": 0.9, "weight": 0.8, "same_query": 0.6, "same_by_chance": 0.1, "misses": 10,
        "never": 0.0, "mixed": 0.8, "answered": 4,
    }  # fmt: skip
    gates = {
        "gates": [0.5, 0.25], "mean": 0.9, "deviation": 0.1, "correlation": 0.3, "rare": 0.8, "common": 0.4,
        "rare_first": 0.7, "rare_again": 0.9,
    }  # fmt: skip
    return {**(slots if kind == "slots" else gates), **changes}


def run(low: dict[str, Any], high: dict[str, Any], exact: float = 0.5) -> tuple[LanguageRun, ...]:
    case = {
        "right": True,
        "tokens": [0, 1, 0, 1],
        "answers": [(2, 1)],
        "readings": [
            {"layer": "layer 2", "position": 2, "slots": [{"slot": 3, "weight": 1.0, "writers": [[0, 1, 1.0]]}]}
        ],
    }
    pick = lambda kind: {"layer 2": layer(kind, **low.get(kind, {})), "layer 4": layer(kind, **high.get(kind, {}))}  # noqa: E731
    slots = {"exact": exact, "layers": pick("slots"), "case": case}
    gates = {"tokens": [0, 1], "bits": [1.0, math.nan], "layers": pick("gates")}
    return tuple(
        LanguageRun(
            name="m", seed=0, parameters=1, steps=(1,), train=(1.0,), held_out=(1.0,), step_seconds=1.0,
            step_cpu_seconds=1.0, peak_bytes=None, before_bytes=None, extra=extra,
        )
        for extra in (slots, gates)
    )  # fmt: skip


def seen(*runs: tuple[LanguageRun, ...]) -> shown.Seen:
    needled, texts = zip(*runs, strict=True)
    return shown.Seen(needled, texts, ["K07", "4"], reads=4, gate_chunk=8, drawn=2)


def note(notes: tuple[str, ...], start: str) -> str:
    (found,) = (text for text in notes if text.startswith(start))
    return found


def test_verdicts_follow_the_numbers() -> None:
    good = run({}, {"gates": {"mean": 0.4, "deviation": 0.3}, "slots": {"hits": 0.6}})
    told = shown.notes(seen(good, good))
    assert ": holds. By the last write 70% in layer 2, 60% in layer 4" in note(told, 'The paper: "the majority')
    assert ": holds. Written by the same token as the one that asks: 60% in layer 2" in note(
        told, "The paper: incorrect"
    )
    assert "of the 40 slots that miss; of all tokens of the stream that were read 10% in layer 2" in note(
        told, "The paper: incorrect"
    )
    assert ": holds. Of the right answers (8)" in note(told, "The paper: answers")
    assert ": holds. Mean gate 0.90 in layer 2, 0.40 in layer 4" in note(told, "The paper: the lower")
    assert "holds for rare words. Rank correlation of gate and rarity +0.30" in note(told, "The paper: in the higher")
    assert "0.70 in layer 2, 0.70 in layer 4 at the first mention and 0.90" in note(told, "Only a second")


def test_gates_have_to_differ_clearly() -> None:
    near = run({"gates": {"mean": 0.52, "deviation": 0.1}}, {"gates": {"mean": 0.5, "deviation": 0.11, "rare": 0.42}})
    told = shown.notes(seen(near))
    assert "does not hold here. Mean gate" in note(told, "The paper: the lower")
    assert "does not hold here for rare" in note(told, "The paper: in the higher")


def test_failures_are_told() -> None:
    bad = run(
        {"slots": {"hits": 0.2, "same_query": 0.1, "mixed": 0.0}, "gates": {"rare_again": None}},
        {"slots": {"hits": 0.3, "mixed": 0.0}, "gates": {"correlation": -0.2, "rare_again": None}},
    )
    told = shown.notes(seen(bad))
    assert ": not here." in note(told, 'The paper: "the majority')
    assert "does not hold here" in note(told, "The paper: incorrect")
    assert "does not hold here" in note(told, "The paper: answers")
    assert "does not hold here" in note(told, "The paper: the lower")
    assert "does not hold here" in note(told, "The paper: in the higher")
    assert not any(text.startswith("Only a second") for text in told)


def test_the_case_is_told_in_words() -> None:
    given = seen(run({}, {}))
    assert shown.question(given) == "The answer 4, given rightly as 4, after 4 readings"
    table = shown.tables(given)["One answer, slot by slot"]
    (row,) = table.rows
    assert (row[0], row[1], row[2], row[-1]) == ("␣K07", "layer 2", "3", "[HIT]")
