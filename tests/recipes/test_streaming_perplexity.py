"""`regard reproduce streaming-perplexity`: the text, what is read how, and verdicts that follow the numbers."""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from mistakes import refuses
from tiny_runs import checked, stored

from regard.models import HybridForCausalLM, count_fast_weights, count_parameters, memory_modules
from regard_recipes.fwpkm.fwpkm_cost import TABLE_2
from regard_recipes.fwpkm.memory_recipe import LACT, MEMORIES, PAPER_VOCABULARY, Row, depths_of, row_config
from regard_recipes.long_text import streaming_perplexity as recipe
from regard_recipes.long_text.streaming import Carry, mentions, read_names, reading_rules, streamed

made = partial(checked, "streaming-perplexity")


def test_documents_have_their_length_and_ask_for_everything() -> None:
    text = made(people=4, chunk=8).names(50)
    for index in range(30):
        example = text.example(0, index)
        assert example.tokens.shape == (50,)
        assert torch.equal(example.tokens, example.labels)
    assert text.floor(count=20)["accuracy on far"] < 0.5


def test_mentions_are_told_by_segment() -> None:
    text = made(people=3, chunk=8).names(400)
    tokens = text.example(0, 0, "test").tokens
    masks, segment = mentions(text, tokens, 40), 40
    assert torch.equal(sum(mask.int() for mask in masks.values()), torch.ones(399, dtype=torch.int32))
    assert all(masks[part].any() for part in masks)
    words = [text.words.words[token] for token in tokens.tolist()]
    at = {name: [i for i, word in enumerate(words) if word == name] for name in words if name[0].isupper()}
    assert len(at) == 3
    for name, places in at.items():
        for before, place in zip([None, *places], places, strict=False):
            if place + 1 >= len(tokens):
                continue
            target = place  # of the token after the name, in the masks
            first = target // segment * segment  # where its segment begins
            part = "new" if before is None else "within" if before + 1 >= first else "across"
            assert masks[part][target], (name, place)


def test_all_layouts_with_all_memories() -> None:
    assert len(recipe.StreamingPerplexity.known) == 5 * 5 + 1
    assert {row["row"].memory for row in recipe.ROWS.values() if row["row"].layout == "FA-pSWA"} == set(MEMORIES)
    assert [*recipe.ROWS][-1] == LACT
    assert set(made().trained) == set(recipe.SMALL)
    assert made("paper", device="cpu").trained == tuple(recipe.ROWS)


@pytest.mark.parametrize("row", [Row("GDN+SWA", "PKM+FwPKM"), Row("FA-pSWA", "FwMLP"), Row(LACT), Row("GDN+FA", "PKM")])
def test_models_of_the_rows(row: Row) -> None:
    config = row_config(row, made(layers=4, chunk=24), 258)
    with torch.device("meta"):
        names = {type(module).__name__ for module in HybridForCausalLM(config).modules()}
    assert ("ProductKeyMemory" in names) == ("PKM" in row.memory.split("+"))
    assert ("FastWeightProductKeyMemory" in names) == ("FwPKM" in row.memory)
    assert ("FastWeightMLP" in names) == (row.memory == "FwMLP")
    assert ("GatedDeltaNet" in names) == row.layout.startswith("GDN")
    assert config.training_window == (24 if "pSWA" in row.layout else None)
    assert config.layer_windows() == ([None] * 3 + [24] if row.layout == "GDN+SWA" else [None] * 4)


def test_the_size_of_the_paper() -> None:
    paper = made("paper", device="cpu")
    assert depths_of("PKM+FwPKM", paper.layers) == {"PKM": (6,), "FwPKM": (2, 10)}
    assert (paper.context, paper.steps, paper.segments) == (4096, 20_000, 16)
    with torch.device("meta"):
        memories = memory_modules(HybridForCausalLM(paper.model_config("GDN | FwPKM", 1000)))
    assert list(memories) == [2, 6, 10]
    for memory in memories.values():
        assert (memory.slots, memory.chunk_size, memory.settings.top_k) == (512**2, 512, 8)
        assert (memory.settings.rule.name, memory.settings.rule.address_weight) == ("reference", 1.0)


@pytest.mark.parametrize("layout", ["GDN", "GDN+SWA", "GDN+FA", "FA"])
def test_models_of_the_papers_size_have_the_papers_parameters(layout: str) -> None:
    """The fast-weight paper's table 2, trained and test-time-updated parameters, of the models of `--size paper`."""
    paper = made("paper", device="cpu")
    for memory in MEMORIES[:4]:
        config = paper.model_config(Row(layout, memory).name, PAPER_VOCABULARY)
        assert round((count_parameters(config) + count_fast_weights(config)) / 1e6, 2) == TABLE_2[layout, memory][0]


def test_bad_models_are_refused() -> None:
    refuses("--rule names 'papper', which is unknown", made, rule="papper")
    refuses("--layers is 2, expected at least 4", made, models=("GDN", "GDN+FA"))


def model(name: str) -> Any:
    torch.manual_seed(0)
    own = made("quick", width=16, sub_keys=4, memory_dim=8, top_k=2, context=24)
    (text,) = own.training_tasks().values()
    return own.make_model(name, text).eval(), text


@pytest.mark.parametrize(
    ("name", "rules"),
    [("FA", ["new"]), ("FA | PKM", ["new"]), ("GDN", ["new", "carried"]),
     ("FA | FwPKM", ["new", "frozen", "document", "paper"]),
     ("GDN | FwMLP", ["new", "frozen", "document", "paper", "carried"])],
)  # fmt: skip
def test_only_rules_that_differ_are_read(name: str, rules: list[str]) -> None:
    assert reading_rules(model(name)[0]) == rules
    row = made().row(name)
    assert recipe.rule_of(row, "paper") == ("paper" if row.remembers else "new")
    assert recipe.rule_of(row, "fair") in rules


def test_rows_are_means_of_what_was_read() -> None:
    net, _ = model("GDN | FwPKM")
    text = made(people=3, chunk=8).names(73)
    documents = [example.tokens for example in text.examples(0, range(4), "test")]
    rows = list(read_names(net, text, 24, ("paper", "frozen"), count=4, seed=0, rows=2))
    read = streamed(net, documents, 24, Carry("stream", "segment"), rows=2, statistics=True)
    told = [row for row in rows if row["kind"] == "document" and row["rule"] == "paper"]
    for row, losses, document in zip(told, read.losses, documents, strict=True):
        assert row["loss"] == pytest.approx(float(losses.mean()))
        for part, at in mentions(text, document, 24).items():
            assert row[part] == (pytest.approx(float(losses[at].mean())) if at.any() else None)
    segments = [row["loss"] for row in rows if row["kind"] == "segment" and row["rule"] == "paper"]
    assert segments == pytest.approx([float(torch.stack(read.losses)[:, i : i + 24].mean()) for i in (0, 24, 48)])
    (layer,) = [row for row in rows if row["kind"] == "layer"]
    (gates,) = read.gates.values()
    assert (layer["layer"], sum(layer["counts"])) == ("layer 2", 4 * 72)
    assert layer["mean"] == pytest.approx(float(torch.cat(gates).mean()))
    over = torch.cat([mentions(text, document, 24)["across"] for document in documents])
    assert layer["across"] == pytest.approx(float(torch.cat(gates)[over].mean()))
    assert layer["reads"] == 4 * 72 * 2


def test_models_without_memories_decide_nothing() -> None:
    own, found = stored("streaming-perplexity")
    few = replace(own, models=("GDN", "FA"))
    assert few.claims(replace(found, frame=found.select(model=list(few.models)).drop(columns=["counts"]))) == []
