"""`regard reproduce fwpkm-case-studies`: slots and gates, counted by hand, and what is claimed of them."""

import re
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from tiny_runs import stored, tiny

from regard.inspect.slot_trace import RetrievedSlot, SlotReading, SlotReadings, Writer
from regard.models import HybridForCausalLM
from regard.models.hybrid.memories import memory_modules
from regard_recipes.fwpkm import fwpkm_case_studies as measures
from regard_recipes.fwpkm.fwpkm_case_studies import ROW, FwPKMCaseStudies
from regard_recipes.fwpkm.memory_recipe import NEEDLES


def model() -> Any:
    torch.manual_seed(0)
    return HybridForCausalLM(FwPKMCaseStudies.configure("quick").model_config(ROW.name, 40)).eval()


def slots_of(found: Any, reads: int) -> list[dict[str, Any]]:
    recipe = FwPKMCaseStudies.configure("quick", haystack=12, needles=1, examples=2, reads=reads)
    return list(recipe.scored(found, NEEDLES, Text()))


def test_the_model_is_the_papers() -> None:
    found = model()
    assert list(memory_modules(found)) == [1, 3]
    assert found.config.memories == "fwpkm@1,3+pkm@2"
    paper = FwPKMCaseStudies.configure("paper", device="cpu")
    assert paper.model_config(ROW.name, 32_000).memories == "fwpkm@2,10+pkm@6"


class Text:
    """Twelve random tokens a haystack, three a question, two an answer, which is spelled out."""

    def haystacks(self, length: int, needles: int) -> Any:
        return SimpleNamespace(examples=lambda seed, indices: [self.example(seed + i, length) for i in indices])

    def example(self, seed: int, length: int) -> Any:
        draw = torch.Generator().manual_seed(seed)
        number = lambda size: torch.randint(40, (size,), generator=draw).tolist()  # noqa: E731
        return SimpleNamespace(haystack=number(length), question=number(3), answer=" ".join(map(str, number(2))))

    def encode(self, sentence: str) -> list[int]:
        return [int(word) for word in sentence.split()]


@torch.no_grad()
def test_answers_are_those_of_the_uncached_stream() -> None:
    """With one reading: the haystack as a chunk, then the question; no state but what one pass has anyway."""
    found, examples = model(), Text().haystacks(12, 1).examples(0, range(2))
    *_, case = slots_of(found, reads=1)
    for memory in memory_modules(found).values():
        memory.chunk_size = 12
    stream = torch.tensor([example.haystack + example.question for example in examples])
    for _ in range(2):
        stream = torch.cat([stream, found(input_ids=stream, use_cache=False).logits[:, -1:].argmax(-1)], 1)
    answers = torch.tensor([Text().encode(example.answer) for example in examples])
    assert case["tokens"] == stream[0].tolist()
    assert case["answers"] == [[14, int(answers[0, 0])], [15, int(answers[0, 1])]]
    assert SlotReadings.from_dict(case, [""] * len(case["tokens"])).to_dict().items() <= case.items()
    assert case["exact"] == (stream[:, -2:] == answers).all(1).double().mean()


def test_writers_are_of_the_readings_before() -> None:
    """After two readings of 12 tokens the writers kept are tokens of the stream, each with the next one as target."""
    *layers, case = slots_of(model(), reads=2)
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
    counts = measures.layer_counts(found, [True, False], "low")
    assert counts["hits"] == pytest.approx((1 / 2 + 0) / 2)
    assert counts["hits_of_four"] == pytest.approx((1 + 0) / 2)
    assert counts["weight"] == pytest.approx((0.5 + 0) / 2)
    assert counts["same_query"] == 1 / 2  # the second slot was written by the token that asks, the third was not
    assert (counts["misses"], counts["never"]) == (2, 1 / 4)
    assert counts["same_by_chance"] == 2 / 4  # the token 5 among 5, 6, 5, 7
    assert (counts["mixed"], counts["answered"]) == (1.0, 1)
    assert measures.layer_counts(found, [False, False], "low")["mixed"] is None


def test_gates_of_a_text_are_kept() -> None:
    found, text = model(), torch.randint(40, (20,), generator=torch.Generator().manual_seed(3))
    heard: dict[str, torch.Tensor] = {}
    with torch.no_grad(), ExitStack() as hooks:
        for depth, memory in memory_modules(found).items():
            hear = lambda m, i, o, d=depth: heard.__setitem__(f"layer {d + 1}", o[0])  # noqa: E731
            hooks.enter_context(memory.hook_gate.register_forward_hook(hear))
        found(input_ids=text[None], use_cache=False)
    rows = list(measures.gate_rows(found, text))
    assert [row["layer"] for row in rows] == list(heard)
    for row in rows:
        assert row["tokens"] == text.tolist()
        assert row["gates"] == pytest.approx(heard[row["layer"]].tolist(), abs=1e-4)


def test_intervals_of_losses_are_over_models() -> None:
    """Documents that one model reads are no samples of their own."""
    own, results = stored("fwpkm-case-studies")
    read = own.chosen(results, "document", rule="paper").astype({"within": float})
    samples = [rows["within"].mean() for _, rows in read.groupby("seed")]
    half = stats.t.ppf(0.975, len(samples) - 1) * stats.sem(samples)
    table = own.tables(results)["Loss with the memory written, and frozen"]
    (row,) = (dict(zip(table.header, row, strict=True)) for row in table.rows if row[0] == "paper")
    assert row["nats, repeated names"] == f"{np.mean(samples):.3f} ± {half:.3f}"


def test_a_run_has_every_row_and_a_page() -> None:
    made, results = tiny("fwpkm-case-studies")
    layers = results.select(kind="layer", seed=0)
    named = list(zip(layers["task"], layers["layer"], strict=True))
    assert named == [(task, layer) for task in ("needles", "names") for layer in ("layer 2", "layer 4")]
    assert set(results.select(kind="document")["rule"]) == {"paper", "frozen"}
    assert len(results.select(kind="gates")["tokens"].iloc[0]) == 30
    html = (made.out / "fwpkm-case-studies-look.html").read_text()
    assert html.count("<details") == 2  # one for each pair of digits of the answer
    assert len(re.findall(r"mean gate \d\.\d\d", html)) == 2
    assert html.count("<span title=") == 2 * 30
