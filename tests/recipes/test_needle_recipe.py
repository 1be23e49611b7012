"""`regard reproduce needle`: the world of needles, how answers are counted, and verdicts that follow the numbers."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
import torch
from scipy.stats import binomtest

from regard.checks import ArgumentError
from regard.cli import main
from regard.models import HybridConfig, HybridForCausalLM
from regard_recipes.fwpkm.memory_layouts import Row
from regard_recipes.lib.language_runs import LanguageRun
from regard_recipes.long_text import needle as recipe
from regard_recipes.long_text import needle_output as shown
from regard_recipes.long_text.needle_text import NeedleWorld, answers, learn_answers, needle_world

TEXT = "a river of many words , that runs on ( and on ) and never ends ; "


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("needles") / "text.txt"
    path.write_text(TEXT * 200)
    return path


def world(data: Path, **changes: int) -> NeedleWorld:
    return needle_world(data, **{"common": 9, "needles": 3, "digits": 2, **changes}, call="test")


def defaults(**changes: object) -> recipe.NeedleConfig:
    return recipe.check(recipe.NeedleConfig(**changes))


def test_words_are_tokens(data: Path) -> None:
    made = world(data, digits=4)
    assert made.decode(made.encode("number K3f 0742 . and")) == "number K3f 0742 . and"
    assert len(made.encode("0742")) == 2
    known = {word for word, _ in Counter(TEXT.split()).most_common(3)}
    assert known <= set(made.words)
    assert len(made.words) == len(set(made.words))
    assert len(made.learn) + len(made.held_out) == 200 * len(TEXT.split())
    for length in (40, 200):
        example = made.task(length).example(0, 3)
        assert len(example.haystack) == length
        assert made.task(length).oracle(example) == example.answer
        assert len(made.encode(example.answer)) == 2


def test_training_documents_ask_for_every_needle(data: Path) -> None:
    made = world(data)
    tokens = made.training_tokens(640, 64, 5).view(-1, 64)
    assert torch.equal(tokens, made.training_tokens(640, 64, 5).view(-1, 64))
    counts = set()
    for row in tokens:
        words = made.decode(row.tolist()).split()
        needles = [tuple(words[i : i + 2]) for i, word in enumerate(words) if word.startswith("K")]
        many = Counter(needles)
        assert set(many.values()) == {2}
        assert [key for key, _ in needles[: len(many)]] != [key for key, _ in needles[len(many) :]] or len(many) < 3
        counts.add(len(many))
    assert min(counts) >= 4
    assert max(counts) <= 8


def test_what_is_an_answer(data: Path) -> None:
    made = world(data, digits=4)
    text = "number K01 1234 . K02 5678 . 9999 number K01 1234 K03 1111 K01 5678 and 4321"
    tokens = torch.tensor([made.encode(text)])
    found = answers(tokens, made.values, made.keys)
    assert made.decode(tokens[found].tolist()) == "12345678"
    assert found.nonzero()[:, 1].tolist() == [13, 14, 19, 20]


def test_training_counts_answers_alone(data: Path) -> None:
    made = world(data)
    torch.manual_seed(0)
    model = HybridForCausalLM(
        HybridConfig(vocab_size=len(made.words), hidden_size=16, num_hidden_layers=1, num_attention_heads=2)
    )
    tokens = made.training_tokens(128, 64, 0).view(-1, 64).long()
    plain = model.eval()(input_ids=tokens, labels=tokens).loss
    learn_answers(model, made.values, made.keys)
    assert torch.equal(model(input_ids=tokens, labels=tokens).loss, plain)  # evaluation stays what it was
    loss = model.train()(input_ids=tokens, labels=tokens).loss
    logp = model(input_ids=tokens).logits.double().log_softmax(-1)
    expected = []
    for row, each in zip(logp, tokens.tolist(), strict=True):
        words = [made.words[token] for token in each]
        for t in range(1, 64):
            if words[t].isdigit() and words[t - 1].startswith("K") and words[t - 1] in words[: t - 1]:
                expected.append(-row[t - 1, each[t]].item())
    assert len(expected) >= 8
    assert loss.item() == pytest.approx(sum(expected) / len(expected), rel=1e-5)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory, data: Path) -> Path:
    out = tmp_path_factory.mktemp("needle") / "out"
    small = [
        "--layouts",
        "GDN",
        "--steps",
        "2",
        "--width",
        "16",
        "--samples",
        "4",
        "--lengths",
        "40",
        "70",
        "--also",
        "FwMLP",
        "--chunk",
        "8",
    ]
    assert main(["reproduce", "needle", "--quick", "--out", str(out), "--data", str(data), *small]) == 0
    return out


def test_every_length_protocol_and_read_is_asked(tiny: Path) -> None:
    found = json.loads((tiny / "needle.json").read_text())
    runs = {run["name"]: run["extra"] for run in found["runs"]}
    assert set(runs) == {"GDN", "GDN | FwPKM", "GDN | FwMLP", "LaCT"}
    assert set(runs["GDN"]["new"]) == {"40", "70"}
    assert {name: len(each) for name, each in runs["GDN"]["new"]["40"].items()} == {"whole": 1}
    assert "kept" not in runs["GDN"]
    own = runs["GDN | FwPKM"]
    assert {name: len(each) for name, each in own["new"]["70"].items()} == {"whole": 2, "chunked": 2, "flushed": 2}
    assert set(own["kept"]["40"]) == {"whole", "flushed"}
    assert own["new"]["40"]["whole"][0]["exact"][1] == 4
    assert own["new"]["40"]["whole"][0]["digits"][1] == 4
    assert len(runs["LaCT"]["new"]["40"]["flushed"]) == 2
    for name in ("whole", "chunked", "flushed", "lengths"):
        assert (tiny / f"needle-{name}.png").read_bytes().startswith(b"\x89PNG")
    assert "One training of each" in (tiny / "needle.md").read_text()


def run(row: Row, hits: dict, lengths: tuple[int, ...], trials: int = 50) -> LanguageRun:
    """`hits` maps protocol to hits by length and read; the same for a memory that is kept, less ten."""
    protocols = ("whole", "chunked", "flushed") if row.remembers else ("whole",)
    share = lambda n: {"exact": [n, trials], "digits": [n, trials], "candidate": [n, trials]}  # noqa: E731
    new = {str(length): {p: [share(n) for n in hits[p][i]] for p in protocols} for i, length in enumerate(lengths)}
    kept = {str(lengths[0]): {p: [share(max(0, n - 10)) for n in hits[p][0]] for p in ("whole", "flushed")}} \
        if row.remembers else None  # fmt: skip
    return LanguageRun(
        name=row.name, seed=0, parameters=7, steps=(1, 2), train=(3.0, 2.0), held_out=(3.0, 2.0),
        step_seconds=0.1, step_cpu_seconds=0.1, peak_bytes=None, before_bytes=None,
        extra={"new": new, **({"kept": kept} if kept else {})},
    )  # fmt: skip


def seen(
    fast: dict, none: list[list[int]], layouts: tuple[str, ...] = ("GDN",), pswa: dict | None = None
) -> shown.Seen:
    lengths = (100, 400)
    groups = {}
    for layout in layouts:
        groups[Row(layout)] = [run(Row(layout), {"whole": none}, lengths)]
        own = pswa if pswa and layout == "FA-pSWA" else fast
        groups[Row(layout, "FwPKM")] = [run(Row(layout, "FwPKM"), own, lengths)]
    return shown.Seen(groups, 100)


GOOD = {
    "whole": [[0, 40, 45], [0, 10, 40]],
    "chunked": [[40, 45, 45], [30, 40, 40]],
    "flushed": [[40, 45, 45], [10, 40, 40]],
}


def note(notes: tuple[str, ...], part: str) -> str:
    (found,) = (text for text in notes if part in text)
    return found


def test_verdicts_follow_the_numbers() -> None:
    told = shown.notes(seen(GOOD, [[5], [1]]))
    low, high = binomtest(40, 50).proportion_ci(method="wilson")
    assert f"holds: GDN | FwPKM 80% ({low:.0%} to {high:.0%}) and 0%" in note(told, "better than after it")
    assert "holds: GDN | FwPKM 0% to 80% (higher)" in note(told, "A second read boosts")
    assert "holds: GDN | FwPKM 80%" in note(told, "generalise to longer")
    assert "holds: GDN | FwPKM 2, 3." in note(told, "Longer texts need more reads")
    assert "GDN | FwPKM 60%" in note(told, "kept from sample to sample")
    assert "One training of each" in note(told, "not that it cannot")
    table = shown.needed_table(seen(GOOD, [[5], [1]])).markdown()
    assert "| GDN \\| FwPKM, whole | 2 | 3 |" in table
    assert "| GDN \\| FwPKM, flushed | 1 | 2 |" in table


def test_verdicts_can_fail() -> None:
    bad = {
        "whole": [[40, 40, 40], [40, 40, 40]],
        "chunked": [[0, 0, 0], [0, 0, 0]],
        "flushed": [[1, 1, 1], [1, 1, 1]],
    }
    told = shown.notes(seen(bad, [[45], [45]]))
    assert "does not hold here: GDN | FwPKM 2%" in note(told, "better than after it")
    assert "not seen here" in note(told, "A second read boosts")
    assert "does not hold here" in note(told, "generalise to longer")
    assert "not seen here: GDN | FwPKM 1, 1." in note(told, "Longer texts need more reads")
    chance = {name: [[0, 1, 1], [0, 0, 0]] for name in GOOD}
    told = shown.notes(seen(chance, [[0], [0]]))
    assert "not decided (no model answers 70% at the shortest length)" in note(told, "Longer texts")
    assert "not seen here" in note(told, "better than after it")
    fewer = {name: [[0, 40, 45], [40, 40, 40]] for name in GOOD}
    assert "does not hold here: GDN | FwPKM 2, 1." in note(shown.notes(seen(fewer, [[0], [0]])), "Longer texts")


def test_windows_in_training_are_compared() -> None:
    told = shown.notes(seen({name: [[0, 0, 0], [0, 0, 0]] for name in GOOD}, [[0], [0]], ("FA", "FA-pSWA"), GOOD))
    assert "FA-pSWA 80%" in note(told, "FwPKM with windows in training and without")
    assert "(higher)" in note(told, "FwPKM with windows in training and without")
    figures = shown.figures(seen(GOOD, [[5], [1]]))
    assert len(figures) == 4
    assert len(shown.tables(seen(GOOD, [[5], [1]]))) == 6


def test_the_size_of_the_paper() -> None:
    paper = defaults(size="paper", device="cpu")
    assert paper.lengths == (4096, 8192, 32_768, 131_072)
    assert (paper.samples, paper.reads, paper.needles, paper.digits) == (500, 4, 5, 6)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layouts": ("GDN", "GDN")}, "--layouts names 'GDN' twice"),
        ({"also": ("FwLMP",)}, "--also names 'FwLMP', which is unknown"),
        ({"reads": 0}, "--reads is 0"),
        ({"lengths": ()}, "--lengths is \\(\\)"),
        ({"context": 100}, "less than two chunks of 64"),
        ({"kept": -1}, "--kept is -1"),
        ({"samples": 2, "kept": 3}, "--kept is 3, expected at most the 2 --samples"),
        ({"samples": 0}, "--samples is 0"),
    ],
)
def test_mistakes_are_found_first(changes: dict, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        defaults(**changes)


def test_numbers_are_pairs_of_digits(data: Path) -> None:
    with pytest.raises(ArgumentError, match="--digits is 3, expected an even number"):
        world(data, digits=3)
