"""Memories over a text: retrieved slots as tables, figures and pages, with hits against a count by hand; and gates."""

import json
import math
import re
from typing import Any

import pytest
import scipy.stats
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from mistakes import refuses
from seen import HOSTILE, Elements, count, pixels
from torch import Tensor, nn

from regard.inspect import gates
from regard.inspect.figures import gate_histograms, gate_text, slot_figure, wrap
from regard.inspect.report import MemoryPage, render_memory
from regard.inspect.slot_trace import (
    RetrievedSlot,
    SlotReading,
    SlotReadings,
    Writer,
    slot_readings,
    slot_rows,
    slot_table,
)
from regard.nn import HookPoint
from regard.nn.memory_trace import Retrieved, Writers

LABELS = ("key", " is", " 7", ".", " key", " is")
TOKENS = (0, 1, 2, 3, 0, 1)


def readings(labels: tuple[str, ...] = LABELS) -> SlotReadings:
    """The token at 4 (a key) should lead to 1, that at 5 to 2, which is told."""
    right, wrong = Writer(0, 1, 0.5), Writer(1, 2, 0.25)
    first = SlotReading("low", 4, (RetrievedSlot(9, 0.75, (wrong, right)), RetrievedSlot(8, 0.25, (right,))))
    second = SlotReading("high", 5, (RetrievedSlot(3, 1.0, (wrong,)), RetrievedSlot(2, 0.0, ())))
    return SlotReadings(TOKENS, labels, (first, second), {5: 2})


def test_hits_are_counted() -> None:
    found = readings()
    assert found.layers == ("low", "high")
    assert found.hits() == 2 / 4
    assert found.hits(last=2) == 3 / 4
    assert found.hits(layer="low") == 1 / 2
    assert found.hits(last=4, layer="high") == 1 / 2
    assert found.hit_weight() == (0.25 + 1.0) / 2
    assert found.hit_weight("low") == 0.25
    nothing = SlotReadings(TOKENS, LABELS, ())
    assert (nothing.hits(), nothing.hit_weight()) == (0.0, 0.0)
    without = SlotReadings(TOKENS, LABELS, found.readings)  # after the last token nothing is known
    assert (without.hits(layer="high"), without.hits(layer="low")) == (0.0, 1 / 2)


many, number = st.integers(0, 2**40), st.floats(allow_nan=False)
slots = st.builds(RetrievedSlot, many, number, st.lists(st.builds(Writer, many, many, number), max_size=2).map(tuple))
traces = st.builds(
    lambda words, readings, answers: SlotReadings(tuple(map(len, words)), tuple(words), tuple(readings), answers),
    st.lists(st.text(max_size=3), max_size=4),
    st.lists(st.builds(SlotReading, st.text(max_size=3), many, st.lists(slots, max_size=2).map(tuple)), max_size=3),
    st.none() | st.dictionaries(many, many, max_size=3),
)


@given(traces)
@example(readings())
@example(SlotReadings(TOKENS, LABELS, ()))
@example(SlotReadings(TOKENS, LABELS, (), {}))
def test_a_trace_is_stored_as_json(trace: SlotReadings) -> None:
    assert SlotReadings.from_dict(json.loads(json.dumps(trace.to_dict())), trace.labels) == trace


def test_rows_say_who_wrote_and_mark_hits() -> None:
    rows = list(slot_rows(readings(), reach=1))
    wanted = [("low", 9, False), ("low", 8, True), ("high", 3, True), ("high", 2, False)]
    assert [(row["layer"], row["slot"], row["hit"]) for row in rows] == wanted
    assert (rows[0]["token"], rows[0]["query"], rows[0]["target"]) == (" key", " is", " 7")
    assert (rows[0]["before"], rows[0]["after"]) == ("key", " 7")
    assert (rows[1]["before"], rows[1]["after"]) == ("", " is")
    assert (rows[3]["query"], rows[3]["target"]) == ("", "")
    table = slot_table(readings(), reach=2)
    assert [row[-1] for row in table.rows] == ["", "[HIT]", "[HIT]", ""]
    assert table.rows[3][4:7] == ("never written", "-", "-")
    assert "in 50 % of the slots with 62 % of the weight; for one of the last four writes, in 75 %" in table.note


def test_a_trace_is_made_ready() -> None:
    """Two rows of a batch, of which one is asked for; the heaviest slot first, nobody left out."""
    position = torch.tensor([[[1, 0], [-1, -1]], [[0, -1], [1, 0]], [[0, -1], [0, -1]]])
    share = torch.tensor([[[0.5, 0.25], [0.0, 0.0]], [[1.0, 0.0], [2.0, 3.0]], [[1.0, 0.0], [1.0, 0.0]]])
    writers = Writers(torch.zeros_like(position), position, torch.where(position < 0, -1, position + 1), share)
    rows, positions, slots = torch.tensor([0, 0, 1]), torch.tensor([3, 4, 4]), torch.tensor([[5, 6], [7, 8], [9, 9]])
    seen = Retrieved(rows, positions, slots, torch.tensor([[0.25, 0.75], [0.5, 0.5], [1.0, 0.0]]), writers)
    found = slot_readings({"a": seen, "b": seen}, TOKENS, LABELS, [4, 3])
    assert [(r.layer, r.position) for r in found.readings] == [("a", 3), ("b", 3), ("a", 4), ("b", 4)]
    wanted = (RetrievedSlot(6, 0.75, ()), RetrievedSlot(5, 0.25, (Writer(1, 2, 0.5), Writer(0, 1, 0.25))))
    assert found.readings[0].slots == wanted
    assert found.readings[2].slots[1] == RetrievedSlot(8, 0.5, (Writer(1, 2, 2.0), Writer(0, 1, 3.0)))
    other = slot_readings({"a": seen}, TOKENS, LABELS, [4], row=1, answers={4: 3})
    assert [slot.slot for slot in other.readings[0].slots] == [9, 9]
    assert other.answers == {4: 3}
    refuses("are out of range for 6 tokens", slot_readings, {"a": seen}, TOKENS, LABELS, [6])
    refuses("5 labels for 6 tokens", slot_readings, {"a": seen}, TOKENS, LABELS[:-1], [3])


def test_hits_are_green() -> None:
    image = pixels(slot_figure(readings(), title="one"))
    green, grey = count(image, "#a6dbc9"), count(image, "#f4f1ea")
    assert green > 1.5 * grey > 0  # two cells against one
    assert count(pixels(slot_figure(SlotReadings(TOKENS, LABELS, readings().readings[1:]), title="o")), "#a6dbc9") == 0


def test_an_open_gate_is_coloured() -> None:
    labels, values = tuple("abcd efgh " * 4), torch.tensor([[1.0] * 30 + [0.0] * 10, [0.0] * 40])
    trace = gates.GateTrace(labels, ("layer 1", "layer 2"), values)
    open_, closed = (pixels(gate_text(gates.GateTrace(labels, ("l",), row[None]), title="t")) for row in values)
    assert count(open_, "#D55E00") > 4 * count(closed, "#D55E00")  # the colour bar has a little of it
    assert pixels(gate_text(trace, title="both", columns=20)).shape[0] > open_.shape[0]


def test_lines_end_where_the_text_says() -> None:
    lines = wrap(["ab", "c\nd", "ef"], 3)
    assert [[sign for sign, _ in line] for line in lines] == [["a", "b", "c"], ["\n"], ["d", "e", "f"]]
    assert lines[2] == [("d", 1), ("e", 2), ("f", 2)]
    assert wrap([], 5) == [[]]


def test_figures_are_drawn_from_anything() -> None:
    two = {"layer 1": torch.full((10,), 0.1), "layer 2": torch.ones(3)}
    for png in (
        gate_histograms({"one": {"layer 1": torch.rand(50)}, "two": two}, title="t"),
        gate_histograms({}, title="none"),
        slot_figure(SlotReadings((), (), ()), title="none"),
    ):
        assert pixels(png).std() > 0


def page(text: str) -> str:
    slots = {"slots": readings((text, *LABELS[1:]))}
    traces = {"gates": gates.GateTrace((text, "b"), ("layer 1",), torch.tensor([[1.0, 0.25]]))}
    return render_memory(MemoryPage(title=text, introduction=text, slots=slots, gates=traces, notes={"slots": (text,)}))


def test_the_page_has_everything() -> None:
    html = page("words")
    found = Elements(html)
    text = found.text
    assert text.count("[HIT]") == 2
    assert "mean gate 0.62" in text
    assert found.every("style") == ["background:rgba(var(--gate),0.850)", "background:rgba(var(--gate),0.212)"]
    assert re.findall(r"(\d) of (\d) slots hit", text) == [("1", "2"), ("1", "2")]
    assert not re.search(r"https?://|@import|url\(|<script|<img|<link", html)


def test_text_stays_text() -> None:
    plain, hostile = Elements(page("words")), Elements(page(HOSTILE))
    assert plain.tags == hostile.tags
    assert HOSTILE in hostile.text


class Memory(nn.Module):
    def __init__(self, share: float) -> None:
        super().__init__()
        self.share = nn.Parameter(torch.tensor(share))
        self.hook_gate = HookPoint()

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.hook_gate((input_ids * self.share).sigmoid())


class Toy(nn.Module):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, input_ids: Tensor, use_cache: bool) -> Any:
        assert not self.training
        for layer in self.layers:
            layer(input_ids)


def test_gates_are_heard_layer_by_layer() -> None:
    model = Toy(Memory(1.0), nn.Identity(), Memory(-0.5)).train()
    trace = gates.gate_trace(model, torch.tensor([0, 1, 3]), ["a", "b", "c"])
    assert trace.layers == ("layer 1", "layer 3")
    assert gates.layer_name("memory.hook_gate") == "memory"
    wanted = [[1 / (1 + math.exp(-share * token)) for token in (0, 1, 3)] for share in (1.0, -0.5)]
    assert torch.allclose(trace.gates, torch.tensor(wanted))
    assert model.training


def test_gates_at_a_chunk_size() -> None:
    """The size holds during the trace, at modules that are written in chunks."""
    layer, seen = Memory(1.0), []
    layer.frozen, layer.chunk_size = False, 8
    layer.register_forward_hook(lambda *_: seen.append(layer.chunk_size))
    for size in (None, 2):
        gates.gate_trace(Toy(layer), torch.tensor([0]), ["a"], chunk_size=size)
    assert (seen, layer.chunk_size) == ([8, 2], 8)


def test_a_model_without_gates_is_refused() -> None:
    refuses("no memory layer of Toy has a gate", gates.gate_trace, Toy(nn.Identity()), torch.tensor([0]), ["a"])
    refuses("2 labels for 1 tokens", gates.gate_trace, Toy(Memory(1.0)), torch.tensor([0]), ["a", "b"])


def test_a_histogram_counts() -> None:
    values = torch.tensor([[0.0, 0.05, 0.1, 0.999, 1.0], [0.5, 0.5, 0.5, 0.5, 0.55]])
    found = gates.histogram(values)
    assert found.tolist() == [[0.4, 0.2, 0, 0, 0, 0, 0, 0, 0, 0.4], [0, 0, 0, 0, 0, 1.0, 0, 0, 0, 0]]
    assert gates.histogram(torch.empty(2, 0)).sum() == 0
    assert gates.bin_counts(torch.tensor([0.0, math.nan, math.inf, 0.95])).tolist() == [1, 0, 0, 0, 0, 0, 0, 0, 0, 1]
    assert torch.allclose(gates.histogram(values, 2), torch.tensor([[0.6, 0.4], [0.0, 1.0]], dtype=torch.float64))


def test_rare_tokens_have_many_bits() -> None:
    found = gates.token_surprisal(torch.tensor([0, 2, 1]), torch.tensor([0, 0, 0, 1]), 3)
    assert found.tolist() == pytest.approx([-math.log2(4 / 7), -math.log2(1 / 7), -math.log2(2 / 7)])


def test_tokens_have_the_rarity_of_their_word() -> None:
    counts = gates.word_counts("the fish and The fish_1 x")
    assert counts == {"the": 1, "fish": 2, "and": 1, "The": 1, "x": 1}
    pieces = ["The", " fi", "sh", " and", " ", "Sak", "ana", ".", " Sakana", " fish", "!3"]
    seen = [2, 3, 3, 2, math.nan, 1, 1, math.nan, 1, 3, math.nan]  # times of the word, and one
    wanted = [-math.log2(times / 12) for times in seen]
    assert gates.word_surprisal(pieces, counts).tolist() == pytest.approx(wanted, nan_ok=True)
    assert gates.word_surprisal([], {}).shape == (0,)
    rarer = gates.word_surprisal(["a b", "c"], {"a": 7})  # a token in two words has the rarer
    assert rarer.tolist() == pytest.approx([-math.log2(1 / 9)] * 2)


def test_rank_correlation_is_spearmans() -> None:
    draw = torch.Generator().manual_seed(0)
    x = torch.randint(6, (40,), generator=draw).double()
    y = x + 3 * torch.randn(40, generator=draw, dtype=torch.float64)
    wanted = scipy.stats.spearmanr(x.numpy(), y.numpy()).statistic
    assert gates.rank_correlation(x, y) == pytest.approx(wanted, abs=1e-12)
    y[::5] = math.nan
    wanted = scipy.stats.spearmanr(x.numpy(), y.numpy(), nan_policy="omit").statistic
    assert gates.rank_correlation(x, y) == pytest.approx(wanted, abs=1e-12)
    assert gates.rank_correlation(x, torch.ones(40)) == 0.0
    assert gates.rank_correlation(x[:1], y[:1]) == 0.0
