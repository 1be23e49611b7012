"""`regard reproduce streaming-perplexity`: documents, what is read how, and verdicts that follow the numbers."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path

import pytest
import torch
from tiny_runs import checked

from regard.checks import ArgumentError
from regard.models import HybridForCausalLM, count_fast_weights, count_parameters, memory_modules
from regard_recipes.fwpkm.fwpkm_cost import TABLE_2
from regard_recipes.fwpkm.memory_layouts import LACT, MEMORIES, PAPER_VOCABULARY, Row, Sizes, row_config
from regard_recipes.lib.recipe import Results, frame_of
from regard_recipes.long_text import streaming_perplexity as recipe
from regard_recipes.long_text.document_text import (
    LONG,
    docstrings,
    files,
    long_modules,
    read_documents,
    split,
    standard_library,
)

TEXTS = ("short", "long")
made = partial(checked, "streaming-perplexity")


# Text ------------------------------------------------------------------------------------------------------------


def test_documents_of_the_standard_library() -> None:
    modules = standard_library()
    long, short = long_modules(modules), docstrings(modules)
    assert min(map(len, long)) >= LONG
    assert len(long) > 20
    assert max(map(len, short)) <= 2000
    assert len(short) == len(set(short)) > 500
    assert not any(path.startswith(("test/", "site-packages/")) for path in modules)
    names = [re.findall(r"\b[A-Za-z_]{6,}\b", text[20_000:30_000]) for text in long[:10]]
    seen = [set(re.findall(r"\w+", text[:20_000])) for text in long[:10]]
    recur = [sum(name in known for name in each) / len(each) for each, known in zip(names, seen, strict=True)]
    assert sorted(recur)[len(recur) // 2] > 0.5  # what makes it pay to remember
    joined = "\n".join(long)
    assert not any(doc.splitlines()[0] in joined for doc in short[::40] if len(doc.splitlines()[0]) > 60)


def test_whole_documents_are_held_out(tmp_path: Path) -> None:
    documents = [f"document {i} " + chr(97 + i % 26) * 400 for i in range(80)]
    (tmp_path / "short.txt").write_text("\n\n".join(documents))
    (tmp_path / "long").mkdir()
    for i in range(40):
        (tmp_path / "long" / f"{i}.txt").write_text(f"file {i}: " + "x y z " * 300)
    learn, held_out = split(documents)
    assert sorted(learn + held_out) == sorted(documents)
    assert len(held_out) == 10
    assert split(documents[::-1]) == (learn, held_out)
    text = read_documents(tmp_path / "short.txt", tmp_path / "long", "byte", length=500, count=3, call="test")
    assert text.kinds["short"].shape == text.kinds["long"].shape == (3, 500)
    decoded = text.tokenizer.decode(text.train_tokens.tolist())
    learned = {int(i) for i in re.findall(r"document (\d+) ", decoded)}
    short = text.tokenizer.decode(text.kinds["short"].flatten().tolist())
    unseen = {int(i) for i in re.findall(r"document (\d+) ", short)}
    assert unseen
    assert not learned & unseen
    long = {text.tokenizer.decode(row[:9].tolist()) for row in text.kinds["long"]}
    assert not set(re.findall(r"file \d+:", decoded)) & long
    patterns = (r"document \d+ \w+", r"file \d+:[xyz ]+")
    sizes = [sum(len(part) for part in re.findall(pattern, decoded)) for pattern in patterns]
    assert sizes[0] == pytest.approx(sizes[1], rel=0.1)
    with pytest.raises(ArgumentError, match="there are 0 held-out long documents of 1900 tokens, expected 1"):
        read_documents(tmp_path / "short.txt", tmp_path / "long", "byte", length=1900, count=1, call="test")
    with pytest.raises(ArgumentError, match="is not a folder"):
        files(tmp_path / "short.txt", "test")


# What is trained and read ----------------------------------------------------------------------------------------


def test_all_layouts_with_all_memories() -> None:
    trained = made().rows()
    assert len(trained) == 5 * 5 + 1
    assert len({row.name for row in trained}) == 26
    assert {row.memory for row in trained if row.layout == "FA-pSWA"} == set(MEMORIES)
    assert trained[-1] == Row(LACT)


@pytest.mark.parametrize("row", [Row("GDN+SWA", "PKM+FwPKM"), Row("FA-pSWA", "FwMLP"), Row(LACT), Row("GDN+FA", "PKM")])
def test_models_of_the_rows(row: Row) -> None:
    config = row_config(row, Sizes.of(made().config, 258))
    with torch.device("meta"):
        model = HybridForCausalLM(config)
    names = {type(module).__name__ for module in model.modules()}
    assert ("ProductKeyMemory" in names) == ("PKM" in row.memory.split("+"))
    assert ("FastWeightProductKeyMemory" in names) == ("FwPKM" in row.memory)
    assert ("FastWeightMLP" in names) == (row.memory == "FwMLP")
    assert ("GatedDeltaNet" in names) == row.layout.startswith("GDN")
    assert config.training_window == (64 if "pSWA" in row.layout else None)
    windows = config.layer_windows()
    assert windows == ([None] * 3 + [64] if row.layout == "GDN+SWA" else [None] * 4)


def test_the_size_of_the_paper() -> None:
    paper = made("paper", device="cpu")
    sizes = Sizes.of(paper.config, PAPER_VOCABULARY)
    assert (sizes.fast_depths, sizes.mixed_slow, sizes.mixed_fast) == ((2, 6, 10), (6,), (2, 10))
    budget = paper.budget()
    assert (budget.context, budget.batch, budget.steps, budget.learning_rate) == (4096, 128, 20_000, 1e-3)
    with torch.device("meta"):
        memories = memory_modules(HybridForCausalLM(paper.model(Row("GDN", "FwPKM"), 1000)))
    assert list(memories) == [2, 6, 10]
    for memory in memories.values():
        assert (memory.slots, memory.chunk_size, memory.settings.top_k) == (512**2, 512, 8)
        assert (memory.settings.rule.name, memory.settings.rule.address_weight) == ("reference", 1.0)


@pytest.mark.parametrize("layout", ["GDN", "GDN+SWA", "GDN+FA", "FA"])
def test_models_of_the_papers_size_have_the_papers_parameters(layout: str) -> None:
    """The fast-weight paper's table 2, slow and fast parameters together, of the models that `--size paper` trains."""
    paper = made("paper", device="cpu")
    for memory in MEMORIES[:4]:
        config = paper.model(Row(layout, memory), PAPER_VOCABULARY)
        assert round((count_parameters(config) + count_fast_weights(config)) / 1e6, 2) == TABLE_2[layout, memory][0]


def test_an_unknown_rule_of_writing_is_refused() -> None:
    with pytest.raises(ArgumentError, match="--rule names 'papper', which is unknown"):
        made(rule="papper")


def test_only_rules_that_differ_are_read() -> None:
    assert recipe.reading_rules(Row("FA", "PKM")) == ["new"]
    assert recipe.reading_rules(Row("GDN")) == ["new", "carried"]
    assert recipe.reading_rules(Row("FA", "FwPKM")) == ["new", "frozen", "document", "paper"]
    assert set(recipe.reading_rules(Row("GDN", "FwMLP"))) == {"new", "paper", "document", "frozen", "carried"}


def document_rows(model: Row, losses: dict[str, tuple[float, float]], seed: int = 0, gate: float = 0.5) -> list[dict]:
    """The rows of a model by rule: its loss on short and on long documents, of which there are four; and its gate."""
    common = {"layout": model.layout, "memory": model.memory, "seed": seed}
    common_document = {**common, "kind": "document"}
    rows = [
        {**common_document, "text": text, "rule": rule, "document": i, "loss": loss + 0.01 * i + 0.001 * seed}
        for rule, both in losses.items()
        for text, loss in zip(TEXTS, both, strict=True)
        for i in range(4)
    ]
    gates = [{**common, "kind": "gate", "text": text, "hook": "memory", "mean": gate + 0.001 * seed} for text in TEXTS]
    return [*rows, {**common, "kind": "run", "held_out": 2.0}, *(gates if model.remembers else [])]


def claims(
    seeds: int = 1, steps: int = 1000, gates: dict[str, float] | None = None, **ends: tuple[float, float]
) -> dict:
    """Claims by their start; `ends` gives the losses of GDN with a memory and of FA with FwPKM ("FA")."""
    losses = {"none": (2.0, 2.0), "PKM": (1.9, 2.0), "FwPKM": (2.0, 1.9), "both": (1.8, 1.8), "FA": (2.0, 1.95), **ends}
    rows = []
    for seed in range(seeds):
        for layout in ("GDN", "FA", "FA-pSWA"):
            for memory in ("none", "PKM", "FwPKM", "PKM+FwPKM"):
                found = losses["both" if "+" in memory else memory]
                found = losses["FA"] if layout != "GDN" and memory == "FwPKM" else found
                model = Row(layout, memory)
                rules = {"paper": found, "frozen": (found[0], found[1] + 0.05)} if model.remembers else {"new": found}
                rows += document_rows(model, rules, seed, (gates or {}).get(layout, 0.5))
    own = made(layouts=("GDN", "FA", "FA-pSWA"), seeds=seeds, steps=steps)
    return {claim.wording: claim for claim in own.claims(Results(frame_of(rows), {}, {}))}


def verdict(found: dict, start: str) -> str:
    return next(claim.verdict for wording, claim in found.items() if wording.startswith(start))


GAIN, BOTH, LESS = "Fast memories gain", "Both together", "FwPKM gains less"
CLOSE, OPEN, WRITING = "Its gates close", "Windows in training", "Writing lowers the loss: FwPKM beside GDN"


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, {GAIN: "holds", BOTH: "holds", LESS: "holds", WRITING: "holds", CLOSE: "not testable at this size"}),
        ({"steps": 130}, {GAIN: "not testable at this size", BOTH: "not testable at this size"}),
        ({"FwPKM": (1.8, 2.1)}, {GAIN: "fails", LESS: "not testable at this size"}),
        ({"both": (2.0, 2.0)}, {BOTH: "fails"}),
        ({"FA": (2.0, 1.8)}, {LESS: "fails"}),
        ({"seeds": 3, "gates": {"FA": 0.2, "FA-pSWA": 0.7}}, {CLOSE: "holds", OPEN: "holds", GAIN: "holds"}),
        ({"seeds": 3, "gates": {"FA": 0.8, "FA-pSWA": 0.7}}, {CLOSE: "fails", OPEN: "fails"}),
        ({"seeds": 2, "gates": {"FA": float("nan")}}, {CLOSE: "undecided"}),
    ],
)
def test_verdicts_follow_the_numbers(changes: dict, expected: dict) -> None:
    found = claims(**changes)
    assert {start: verdict(found, start) for start in expected} == expected


def test_intervals_are_over_documents_where_there_is_one_seed() -> None:
    found = claims()[next(wording for wording in claims() if wording.startswith("Both"))].estimates
    one = found["GDN: PKM+FwPKM less PKM on short"]
    assert one.count == 4
    assert one.mean == pytest.approx(-0.1)
    assert claims(seeds=3)["Both together are best"].estimates["GDN: PKM+FwPKM less PKM on short"].count == 3
