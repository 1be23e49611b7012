"""`regard reproduce streaming-perplexity`: documents, what is read how, and verdicts that follow the numbers."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest
import torch

from regard.checks import ArgumentError
from regard.cli import main
from regard.models import HybridForCausalLM
from regard_recipes.fwpkm.memory_layouts import LACT, MEMORIES, Row, row_config
from regard_recipes.lib.language_runs import LanguageRun
from regard_recipes.long_text import streaming_perplexity as recipe
from regard_recipes.long_text import streaming_perplexity_output as shown
from regard_recipes.long_text.document_text import (
    LONG,
    docstrings,
    files,
    long_modules,
    read_documents,
    split,
    standard_library,
)

KINDS = ("short", "long")


def defaults(**changes: object) -> recipe.StreamingPerplexityConfig:
    return recipe.check(recipe.StreamingPerplexityConfig(**changes))


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
    assert text.short.shape == text.long.shape == (3, 500)
    decoded = text.tokenizer.decode(text.train_tokens.tolist())
    learned = {int(i) for i in re.findall(r"document (\d+) ", decoded)}
    unseen = {int(i) for i in re.findall(r"document (\d+) ", text.tokenizer.decode(text.short.flatten().tolist()))}
    assert unseen
    assert not learned & unseen
    assert not set(re.findall(r"file \d+:", decoded)) & {text.tokenizer.decode(row[:9].tolist()) for row in text.long}
    sizes = [
        sum(len(part) for part in re.findall(pattern, decoded))
        for pattern in (r"document \d+ \w+", r"file \d+:[xyz ]+")
    ]
    assert sizes[0] == pytest.approx(sizes[1], rel=0.1)
    with pytest.raises(ArgumentError, match="there are 0 held-out long documents of 1900 tokens, expected 1"):
        read_documents(tmp_path / "short.txt", tmp_path / "long", "byte", length=1900, count=1, call="test")
    with pytest.raises(ArgumentError, match="is not a folder"):
        files(tmp_path / "short.txt", "test")


# What is trained and read ----------------------------------------------------------------------------------------


def test_all_layouts_with_all_memories() -> None:
    trained = recipe.rows(defaults())
    assert len(trained) == 5 * 5 + 1
    assert len({row.name for row in trained}) == 26
    assert {row.memory for row in trained if row.layout == "FA-pSWA"} == set(MEMORIES)
    assert trained[-1] == Row(LACT)


@pytest.mark.parametrize("row", [Row("GDN+SWA", "PKM+FwPKM"), Row("FA-pSWA", "FwMLP"), Row(LACT), Row("GDN+FA", "PKM")])
def test_models_of_the_rows(row: Row) -> None:
    config = row_config(row, recipe.sizes(defaults(), 258))
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
    paper = defaults(size="paper", device="cpu")
    sizes = recipe.sizes(paper, 32_000)
    assert (sizes.fast_depths, sizes.mixed_slow, sizes.mixed_fast) == ((2, 6, 10), (6,), (2, 10))
    budget = recipe.budget(paper)
    assert (budget.context, budget.batch, budget.steps, budget.learning_rate) == (4096, 128, 20_000, 1e-3)
    config = row_config(Row("GDN", "FwPKM"), sizes)
    assert config.memory_options["fwpkm"] == {
        "sub_keys": 512, "key_dim": 512, "value_dim": 512, "top_k": 8, "chunk_size": 512,
    }  # fmt: skip


def test_only_rules_that_differ_are_read() -> None:
    assert recipe.reading_rules(Row("FA", "PKM")) == ["new"]
    assert recipe.reading_rules(Row("GDN")) == ["new", "carried"]
    assert recipe.reading_rules(Row("FA", "FwPKM")) == ["new", "paper", "document", "frozen"]
    assert set(recipe.reading_rules(Row("GDN", "FwMLP"))) == {"new", "paper", "document", "frozen", "carried"}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("streaming")
    (folder / "short.txt").write_text("\n\n".join(f"short {i} " + "the cat sat on it " * 9 for i in range(60)))
    (folder / "long").mkdir()
    for i in range(40):
        (folder / "long" / f"{i}.txt").write_text(f"name{i} is here and name{i} is there. " * 30)
    given = ["--short", str(folder / "short.txt"), "--long", str(folder / "long")]
    small = ["--layouts", "GDN", "FA", "--memories", "none", "FwPKM", "--no-lact", "--steps", "2", "--width", "16"]
    out = folder / "out"
    assert main(["reproduce", "streaming-perplexity", "--quick", "--out", str(out), *given, *small]) == 0
    return out


def test_every_model_is_read_by_its_rules(tiny: Path) -> None:
    found = json.loads((tiny / "streaming-perplexity.json").read_text())
    runs = {run["name"]: run["extra"] for run in found["runs"]}
    assert set(runs) == {"GDN", "GDN | FwPKM", "FA", "FA | FwPKM"}
    for kind in KINDS:
        assert set(runs["GDN"][kind]) == {"new", "carried"}
        assert set(runs["GDN | FwPKM"][kind]) == {"new", "paper", "document", "frozen", "carried"}
        read = runs["GDN | FwPKM"][kind]["paper"]
        assert read["tokens"] == [4 * 64, 4 * 64]
        assert len(read["by_segment"]) == 4
        (gates,) = read["gates"].values()
        assert sum(gates) == 2 * 4 * 64
        assert read["slots"]
    for name in ("losses", "segments", "gates"):
        assert (tiny / f"streaming-perplexity-{name}.png").read_bytes().startswith(b"\x89PNG")
    said = (tiny / "streaming-perplexity.md").read_text()
    assert "FwPKM less none on long documents" in said
    assert "One training of each" in said


# Verdicts --------------------------------------------------------------------------------------------------------


def read(loss: float, gate: int = 5) -> dict:
    """Two documents of 10 tokens around a loss, that differ by 0.2 between them; gates all in one bin."""
    counts = tuple(20 if place == gate else 0 for place in range(10))
    return {
        "nats": (10 * (loss - 0.1), 10 * (loss + 0.1)), "tokens": (10, 10), "by_segment": (loss, loss), "loss": loss,
        "gates": {"layers.2.memory.hook_gate": counts}, "means": {"layers.2.memory.hook_gate": gate / 10 + 0.05},
        "slots": {"m": {"coverage": 0.5, "collisions": 0.25}},
    }  # fmt: skip


def run(row: Row, seed: int, losses: dict[str, float], gate: int) -> LanguageRun:
    extra: dict = {}
    for kind in KINDS:
        for rule in recipe.reading_rules(row):
            off = 0.4 if rule == "frozen" else 0.0
            extra.setdefault(kind, {})[rule] = read(losses[kind] + off + 1e-3 * seed * (row.memory == "none"), gate)
    return LanguageRun(
        name=row.name, seed=seed, parameters=7, steps=(1, 2), train=(3.0, 2.0), held_out=(3.0, losses["long"]),
        step_seconds=0.1, step_cpu_seconds=0.1, peak_bytes=None, before_bytes=None, extra=extra,
    )  # fmt: skip


def groups(seeds: int = 3, gates: dict[str, int] | None = None, **ends: tuple[float, float]) -> dict:
    """Every row of the desk size; `ends` gives (short, long) by the row's name in letters."""
    made = {}
    for row in recipe.rows(defaults()):
        name = re.sub(r"\W+", "_", row.name)
        short, long = ends.get(name, (2.0, 2.0))
        gate = (gates or {}).get(row.layout, 5)
        made[row] = [run(row, seed, {"short": short, "long": long}, gate) for seed in range(seeds)]
    return made


def note(notes: tuple[str, ...], part: str) -> str:
    (found,) = (text for text in notes if part in text)
    return found


def test_verdicts_follow_the_numbers() -> None:
    told = shown.notes(
        groups(
            GDN_PKM=(1.8, 1.95), GDN_FwPKM=(1.95, 1.6), GDN_SWA_PKM=(1.7, 1.9), GDN_SWA_FwPKM=(1.9, 1.7),
            FA_FwPKM=(2.0, 1.95), GDN_FA_FwPKM=(2.0, 1.96), gates={"FA": 0, "GDN+FA": 1, "FA-pSWA": 8},
        )
    )  # fmt: skip
    first = note(told, "Fast memories gain on long")
    assert '"Fast memories gain on long documents, slow ones on short ones": holds; ' in first
    assert '"both together are best": does not hold here. GDN: PKM on short -0.201' in first
    assert "FwPKM less PKM on long -0.350 ± 0.000 (lower)" in first
    second = note(told, "gains less beside full attention")
    assert '": holds (long documents: GDN -0.401' in second
    assert '"its gates close there": holds (mean gate on long documents: GDN 0.55, GDN+FA 0.15, FA 0.05)' in second
    third = note(told, "Windows in training open")
    assert "holds (mean gate: FA-pSWA 0.85 and FA 0.05" in third
    assert "One training" not in third
    written = note(told, "never written")
    assert "holds: GDN | FwPKM -0.400 ± 0.000" in written
    assert "GDN -0.401 ± 0.002 and -0.401 ± 0.002" in note(told, "by the paper's protocol")
    assert "GDN, FwPKM less FwMLP -0.400" in note(told, "Other fast weights")


def test_verdicts_can_fail() -> None:
    told = shown.notes(
        groups(
            GDN_PKM=(2.3, 1.5), GDN_FwPKM=(1.9, 1.9), GDN_SWA_PKM=(2.3, 1.5), GDN_SWA_FwPKM=(1.9, 1.9),
            FA_FwPKM=(2.0, 1.2), GDN_FA_FwPKM=(2.0, 1.2), gates={"FA": 9, "GDN+FA": 9, "FA-pSWA": 3},
        )
    )  # fmt: skip
    assert "does not hold here" in note(told, "Fast memories gain on long")
    second = note(told, "gains less beside full attention")
    assert '"FwPKM gains less beside full attention": does not hold here' in second
    assert '"its gates close there": does not hold here' in second
    assert "does not hold here" in note(told, "Windows in training open")
    level = shown.notes(groups())
    assert "not seen here" in note(level, "Fast memories gain on long")
    single = shown.notes(groups(seeds=1, GDN_FwPKM=(1.9, 1.6)))
    assert "One training of each: whether another seed would say the same is not decided." in note(single, "Windows")
    broken = groups(GDN_FwPKM=(math.nan, math.nan))
    told = shown.notes(broken)
    assert "not decided (diverged)" in note(told, "Fast memories gain on long")
    assert "Diverged: GDN | FwPKM." in note(told, "same learning rate")
    assert shown.tables(broken)
    assert len(shown.figures(broken)) == 3


def test_intervals_are_over_documents_where_there_is_one_seed() -> None:
    """Half a 95 % interval of two values: 12.706 s / sqrt(2)."""
    one = shown.Difference((0.3,), (0.1, 0.5))
    assert one.noise == pytest.approx(12.7062 * 0.2828427 / math.sqrt(2), rel=1e-5)
    assert one.side == "level"
    three = shown.Difference((0.3, 0.31, 0.32), (0.1, 0.5))
    assert three.noise == pytest.approx(4.3027 * 0.01 / math.sqrt(3), rel=1e-4)
    assert three.side == "higher"


def test_no_gain_is_not_a_small_gain() -> None:
    worse = groups(GDN_FwPKM=(2.0, 2.3), GDN_FA_FwPKM=(2.0, 2.1), FA_FwPKM=(2.0, 1.8))
    assert '"FwPKM gains less beside full attention": not decided (no gain beside GDN: higher)' in note(
        shown.notes(worse), "gains less"
    )


def test_both_together() -> None:
    told = shown.notes(groups(GDN_PKM_FwPKM=(1.5, 1.5), GDN_SWA_PKM_FwPKM=(1.5, 1.5)))
    assert '"both together are best": holds' in note(told, "Fast memories gain on long")


@pytest.mark.parametrize(
    ("one", "other", "side"),
    [
        ([0.501], [0.499], "level"),
        ([0.6], [0.4], "higher"),
        ([0.4], [0.6], "lower"),
        ([0.5, 0.7, 0.4], [0.4, 0.5, 0.6], "level"),
        ([0.61, 0.62, 0.61], [0.4, 0.41, 0.41], "higher"),
        ([math.nan], [0.4], "diverged"),
    ],
)
def test_gates_are_compared_with_a_margin(one: list[float], other: list[float], side: str) -> None:
    assert shown.gate_side(one, other) == side


def test_gates_of_a_model_that_diverged_are_not_closed() -> None:
    made = groups(gates={"FA": 0, "GDN+FA": 0})
    for each in made[Row("FA", "FwPKM")]:
        for kind in KINDS:
            each.extra[kind]["paper"]["means"] = {"layers.2.memory.hook_gate": math.nan}
    assert '"its gates close there": not decided (diverged)' in note(shown.notes(made), "gains less")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layouts": ("GDN", "SWA")}, "--layouts names 'SWA', which is unknown"),
        ({"memories": ("FwPKM", "FwPKM")}, "--memories names 'FwPKM' twice"),
        ({"context": 100}, "less than two chunks of 64"),
        ({"segments": 0}, "--segments is 0"),
        ({"steps": 0}, "--steps is 0"),
        ({"heads": 7}, "head_dim is 13"),
    ],
)
def test_mistakes_are_found_first(changes: dict, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        defaults(**changes)
